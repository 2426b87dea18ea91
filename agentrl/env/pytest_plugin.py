"""A pytest plugin that runs every check of `agentrl env check` as one test.

    @pytest.mark.agentrl_env("my_env.env:MyEnv")     # a class, a name, or the URL of a server
    def test_conformance(env_check):
        env_check()

The marker also takes `config`, `only`, `skip` and `thorough`. A test run that does not use
`env_check` imports nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_MARKER = "agentrl_env"
_SUBJECTS = pytest.StashKey[dict[str, Any]]()
_RUNNER = pytest.StashKey[Any]()
"""One event loop for all tests, because what sessions share may belong to the loop that made it."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(target, *, config, only, skip, thorough): the environment whose conformance "
        "the test checks, with the fixture env_check",
    )
    config.stash[_SUBJECTS] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "env_check" not in metafunc.fixturenames:
        return
    from agentrl.env.check import select

    options = _options(metafunc.definition)
    names = select(options.get("only", ()), options.get("skip", ()))
    metafunc.parametrize("env_check", names, indirect=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    runner = config.stash.get(_RUNNER, None)
    if runner is not None:
        for subject in config.stash[_SUBJECTS].values():
            runner.run(subject.aclose())
        runner.close()


@pytest.fixture
def env_check(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Returns a function that runs one check.

    It fails the test with the problem and its fix, or skips it with the reason.
    """
    import asyncio

    from agentrl.env.check import load_subject, run_check

    options = _options(request.node)
    key = repr(sorted(options.items(), key=lambda item: item[0]))
    stash = request.config.stash
    runner = stash.setdefault(_RUNNER, asyncio.Runner())

    def run() -> None:
        __tracebackhide__ = True
        subject = stash[_SUBJECTS].get(key)
        if subject is None:  # loaded once for all checks
            loading = load_subject(
                options["target"],
                config=options.get("config"),
                thorough=options.get("thorough", False),
            )
            subject = stash[_SUBJECTS][key] = runner.run(loading)
        result = runner.run(run_check(request.param, subject))
        if result.status == "skip":
            pytest.skip(result.detail)
        if result.status == "fail":
            pytest.fail(f"{result.asserts}\n{result.detail}\n{result.remedy}", pytrace=False)

    return run


def _options(node: Any) -> dict[str, Any]:
    marker = node.get_closest_marker(_MARKER)
    if marker is None or len(marker.args) != 1:
        raise pytest.UsageError(
            f"{node.nodeid} uses env_check: name the environment to check, as in "
            f'@pytest.mark.{_MARKER}("my_env.env:MyEnv")'
        )
    return {"target": marker.args[0], **marker.kwargs}
