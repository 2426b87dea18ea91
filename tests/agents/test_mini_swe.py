"""mini-swe-agent trained as its examples say: real containers, gradings and verifiers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("minisweagent", reason="see `make test-docker-slow`")

from agentrl.env.container.engine import connect
from agentrl.errors import AgentRLError
from agentrl.rollout import read_trajectories
from agentrl.view.tracking import read_metrics

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def fixtures(tmp_path):
    """A folder with build/swebench; the instances' images are on the engine."""
    sys.path.append(str(ROOT / "benchmarks"))
    from swe_fixtures.build import build

    try:
        connect(timeout_s=30).close()
        build(tmp_path / "build" / "swebench")
    except AgentRLError as error:
        if os.environ.get("AGENTRL_REQUIRE_DOCKER") == "1":
            pytest.fail(f"AGENTRL_REQUIRE_DOCKER=1, but {error}")
        pytest.skip(str(error))
    return tmp_path


def run(folder, *command):
    variables = os.environ | {"AGENTRL_STATE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def require_trained(folder, num_steps):
    metrics = read_metrics(folder / "run")
    assert [row["step"] for row in metrics] == list(range(1, num_steps + 1))
    for row in metrics:
        assert row["rollout/error_fraction"] == 0.0 and row["rollout/trajectories"] == 16
        assert row["policy/rollout_train_logprob_diff_max"] < 1e-4
        assert 0 < row["reward/mean"] < 1 and row["train/grad_norm"] > 0


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_mini_swe_agent_is_trained_for_three_steps(fixtures):
    model = fixtures / "model"
    run(fixtures, EXAMPLES / "agent" / "make_mini_swe_model.py", "--out", model)
    train = ["-m", "agentrl", "train", EXAMPLES / "agent" / "mini_swe.toml", "--model.path", model]
    run(fixtures, *train, "--run.dir", fixtures / "run")
    require_trained(fixtures, 3)
    trajectories = [each for _, each in read_trajectories(fixtures / "run")]
    assert {each.task_id for each in trajectories} == {"agentrl__gauge-1", "agentrl__spans-1"}
    for each in trajectories:
        # Rewards are the harness's verdicts on what the agent's commands changed.
        paid = each.info["resolved"] and "honest" in each.info["verdict_flags"]
        assert each.reward == float(paid), each.info
        ran = [call["arguments"]["command"] for call in each.info["tool_calls"]]
        assert not paid or any(command.startswith("sed") for command in ran)


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_mini_swe_agent_is_trained_on_a_harbor_task(fixtures):
    made = fixtures / "build" / "harbor"
    make = [EXAMPLES / "harbor" / "make_model.py", "--agent", "mini-swe", "--out", made]
    run(fixtures, *make, "--image", "agentrl/swebench-fixture-base:1")
    train = [
        "-m",
        "agentrl",
        "train",
        EXAMPLES / "harbor" / "mini_swe.toml",
        "--run.num_steps",
        "2",
    ]
    train += ["--model.path", made / "mini_swe_model", "--run.dir", fixtures / "run"]
    run(fixtures, *train)
    require_trained(fixtures, 2)
    for _, each in read_trajectories(fixtures / "run"):
        # Rewards are the verifier's, on what the agent's commands left in the container.
        assert each.info["rewards"] == {"reward": each.reward} and each.task_id == "number-7"
        ran = [call["arguments"]["command"] for call in each.info["tool_calls"]]
        assert not each.reward or "echo 7 > n" in ran
