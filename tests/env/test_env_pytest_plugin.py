"""The pytest plugin, in pytest runs of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENTS = Path(__file__).with_name("broken_envs.py")
THREE_LINES = """
import pytest

@pytest.mark.agentrl_env("{target}"{options})
def test_conformance(env_check):
    env_check()
"""


def pytest_in(folder, *arguments):
    """Run pytest with this plugin alone; returns its status and output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "agentrl.env.pytest_plugin", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    return done.returncode, done.stdout + done.stderr


def run(tmp_path, target, options="", *arguments):
    test = THREE_LINES.format(target=f"{ENVIRONMENTS}:{target}", options=options)
    (tmp_path / "test_env.py").write_text(test)
    return pytest_in(tmp_path, "--strict-markers", "-v", "-rs", *arguments)


def test_each_check_is_a_test_of_its_own(tmp_path):
    names = 'only=["tasks", "canary", "oracle"]'
    status, out = run(tmp_path, "Good", f", {names}")
    assert status == 0, out
    for name in ("tasks", "canary", "oracle"):
        assert f"test_conformance[{name}] PASSED" in out
    assert "test_conformance[tools]" not in out


@pytest.mark.slow
def test_a_failure_says_what_was_seen_and_what_helps(tmp_path):
    status, out = run(tmp_path, "TellsTheAnswer", "", "-k", "canary or tasks")
    assert status == 1 and "test_conformance[tasks] PASSED" in out
    assert "test_conformance[canary] FAILED" in out
    assert "No, it is " in out and "leave the reference out" in out
    assert "Traceback" not in out


@pytest.mark.slow
def test_a_fixture_without_an_environment_is_a_clear_error(tmp_path):
    (tmp_path / "test_env.py").write_text("def test_conformance(env_check):\n    env_check()\n")
    status, out = pytest_in(tmp_path, "-q")
    assert status != 0 and "name the environment to check" in out
