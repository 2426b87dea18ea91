"""mini-swe-agent trained as examples/agent/mini_swe.toml says: real containers and gradings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("minisweagent", reason="see `make test-docker-slow`")

from agentrl.env.container.engine import connect
from agentrl.errors import AgentRLError
from agentrl.rollout import read_trajectories
from agentrl.tracking import read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"


@pytest.fixture
def fixtures(tmp_path):
    """A folder with build/swebench; the instances' images are on the engine."""
    from agentrl_swebench.fixtures.build import build

    try:
        connect(timeout_s=30).close()
        build(tmp_path / "build" / "swebench")
    except AgentRLError as error:
        if os.environ.get("AGENTRL_REQUIRE_DOCKER") == "1":
            pytest.fail(f"AGENTRL_REQUIRE_DOCKER=1, but {error}")
        pytest.skip(str(error))
    return tmp_path


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_mini_swe_agent_is_trained_for_three_steps(fixtures):
    def run(*command):
        variables = os.environ | {"AGENTRL_STATE_DIR": str(fixtures)}
        done = subprocess.run(
            [sys.executable, *command], cwd=fixtures, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]

    model = fixtures / "model"
    run(str(EXAMPLE / "make_mini_swe_model.py"), "--out", str(model))
    train = ["-m", "agentrl", "train", str(EXAMPLE / "mini_swe.toml"), "--model.path", str(model)]
    run(*train, "--run.dir", str(fixtures / "run"))
    metrics = read_metrics(fixtures / "run")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    for row in metrics:
        assert row["rollout/error_fraction"] == 0.0 and row["rollout/trajectories"] == 16
        assert row["policy/rollout_train_logprob_diff_max"] < 1e-4
        assert 0 < row["reward/mean"] < 1 and row["train/grad_norm"] > 0
    trajectories = [each for _, each in read_trajectories(fixtures / "run")]
    assert {each.task_id for each in trajectories} == {"agentrl__gauge-1", "agentrl__spans-1"}
    for each in trajectories:
        # Rewards are the harness's verdicts on what the agent's commands changed.
        paid = each.info["resolved"] and "honest" in each.info["verdict_flags"]
        assert each.reward == float(paid), each.info
        ran = [call["arguments"]["command"] for call in each.info["tool_calls"]]
        assert not paid or any(command.startswith("sed") for command in ran)
