"""Tasksets of verifiers, which its own scaffold begins."""

import sys

import pytest

pytest.importorskip("verifiers.v1", reason="needs verifiers: see `make test-adapters`")

from verifiers.v1.cli.init import main as vf_init

from agentrl.env.registry import resolve
from agentrl.errors import ConfigError

LOAD = """        return [
            MyEnvTask(MyEnvData(prompt=f"What is {n} + {n}?", system_prompt="Be brief.",
                answer=str(2 * n)), self.config.task)
            for n in range(self.config.num_tasks)
        ]
"""
REWARD = """        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(trace.messages[0].content == "Be brief.")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package as `vf-init` writes it, with its two functions filled in."""
    monkeypatch.setattr(sys, "argv", ["vf-init", "my-env", "--path", str(tmp_path)])
    vf_init()
    path = tmp_path / "my_env" / "my_env" / "taskset.py"
    text = path.read_text().replace("(vf.TaskData):", "(vf.TaskData):\n    answer: str = ''\n", 1)
    head, _, rest = text.partition('        raise NotImplementedError("Score')
    rest = rest.partition("\n")[2]
    middle, _, _ = rest.partition("        raise NotImplementedError(")
    path.write_text(head + REWARD + middle + LOAD)
    monkeypatch.syspath_prepend(str(tmp_path / "my_env"))
    yield path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_env"]:
        del sys.modules[name]


def test_a_taskset_is_played_and_scored_by_its_own_functions(opened, package):
    env = opened("verifiers:my-env", settings={"num_tasks": 6}, num_test=2)
    prompt = env.reset("test", 1)
    assert [m["role"] for m in prompt] == ["system", "user"]
    assert prompt[1]["content"] == "What is 5 + 5?"
    result = env.step("10")
    assert result.terminated and result.reward == 1.5
    assert result.info["rewards"] == {"reward": 1.0, "short": 0.5}
    assert result.metrics["length"] == 2 and result.metrics["asked"] == 1
    env.reset("train", 1)
    assert env.step("surely it is 3, or so I think").reward == 0.0


def test_what_needs_a_harness_is_refused(package):
    package.write_text(
        package.read_text().replace(
            "(vf.Task[MyEnvData]):", "(vf.Task[MyEnvData]):\n    NEEDS_CONTAINER = True\n", 1
        )
    )
    environment = resolve("verifiers:my-env")
    with pytest.raises(ConfigError, match="agent"):
        environment.load_shared(environment.Config())


def test_a_package_that_is_not_installed_is_named():
    environment = resolve("verifiers:owner/no-such-taskset")
    with pytest.raises(ConfigError, match="no_such_taskset"):
        environment.load_shared(environment.Config())
