"""Adapters report a missing package, and translate values."""

import math
import subprocess
import sys

import numpy
import pytest

from agentrl.env import make
from agentrl.errors import EnvError
from agentrl_adapters.gymnasium_env import GymnasiumEnvironment
from agentrl_adapters.packages import import_package, to_json
from agentrl_adapters.reasoning_gym_env import ReasoningGymEnvironment


@pytest.mark.parametrize(
    "environment, package, extra",
    [
        (GymnasiumEnvironment, "gymnasium", "gymnasium"),
        (ReasoningGymEnvironment, "reasoning_gym", "reasoning-gym"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, environment, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    env = make(environment).sync
    with pytest.raises(EnvError, match=rf"pip install 'agentrl-gym\[{extra}\]'") as caught:
        env.info()
    assert caught.value.code == "invalid_request"
    env.close()


def test_a_package_that_misses_another_is_not_called_missing(monkeypatch, tmp_path):
    (tmp_path / "agentrl_half_a_package.py").write_text("import agentrl_no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="agentrl_no_such_package"):
        import_package("agentrl_half_a_package", "x")


@pytest.mark.slow
def test_importing_adapters_imports_no_framework():
    code = (
        "import sys\n"
        "from agentrl_adapters import gymnasium_env, openenv_env, openenv_server\n"
        "from agentrl_adapters import mcp_env, reasoning_gym_env, trl_factory\n"
        "named = 'torch gymnasium reasoning_gym mcp openenv trl transformers'.split()\n"
        "print([name for name in named if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_values_of_other_frameworks_become_json():
    value = {
        "array": numpy.eye(2, dtype="float32"),
        "number": numpy.int64(3),
        "odd": [math.nan, numpy.float64("inf")],
        4: {"b", "a"},
        "thing": range(2),
        "pair": (1, None),
    }
    assert to_json(value) == {
        "array": [[1.0, 0.0], [0.0, 1.0]],
        "number": 3,
        "odd": [None, None],
        "4": ["a", "b"],
        "thing": "range(0, 2)",
        "pair": [1, None],
    }


def test_what_one_encoder_refuses_becomes_json():
    value = {(1, 2): 2**70, "deep": [{None: float("nan"), "\ud800": 1}], 3: {4}}
    found = to_json(value)
    assert found == {"(1, 2)": 2**70, "deep": [{"None": None, "\ud800": 1}], "3": [4]}
