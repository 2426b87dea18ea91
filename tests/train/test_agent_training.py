"""`[agent]` in a run file: train and eval play by the agent."""

import json
from pathlib import Path

import pytest
from test_ranks_runs import train

from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.rollout.log import read_trajectories
from agentrl.view.tracking import read_metrics

ROOT = Path(__file__).parents[2]
SOLVE = """
from openai import AsyncOpenAI

async def solve(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        reply = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": task.prompt}]
        )
        return reply.choices[0].message.content
"""
SMALL = [
    *("--run.num_steps", "2", "--run.save_every", "2", "--rollout.groups_per_step", "2"),
    *("--rollout.group_size", "2", "--eval.num_tasks", "3", "--run.eval_every", "2"),
]


@pytest.fixture
def run_file(tmp_path):
    text = (ROOT / "examples" / "agent" / "run.toml").read_text()
    model = ROOT / "examples" / "quickstart" / "model"
    (tmp_path / "run.toml").write_text(text.replace("../quickstart/model", str(model)))
    (tmp_path / "solve.py").write_text(SOLVE)
    return tmp_path / "run.toml"


def test_train_and_eval_play_by_the_agent(run_file, tmp_path, capsys):
    run_dir = tmp_path / "run"
    arguments = [str(run_file), *SMALL, "--run.dir", str(run_dir)]
    assert main(["train", *arguments, "--quiet"]) == 0
    trajectories = [trajectory for _, trajectory in read_trajectories(run_dir)]
    assert len(trajectories) == 8
    assert all(trajectory.error is None for trajectory in trajectories)
    # `tools` were not sent, so the prompt shows none: it is the agent's, not the environment's.
    assert {len(trajectory.turns) for trajectory in trajectories} == {1}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row["policy/rollout_train_logprob_diff_max"] for row in rows) < 1e-4
    assert "eval/avg@1" in rows[-1]
    capsys.readouterr()
    assert main(["eval", *arguments, "--checkpoint", "latest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_samples"] == 3
    out = tmp_path / "out"
    assert main(["rollout", *arguments, "--checkpoint", "latest", "--out", str(out)]) == 0
    played = [trajectory for _, trajectory in read_trajectories(out)]
    assert [len(trajectory.turns) for trajectory in played] == [1, 1, 1]

    # Another agent makes another run; another port does not.
    (tmp_path / "other.py").write_text(SOLVE)
    capsys.readouterr()
    resumed = ["train", *arguments, "--quiet", "--resume", "--run.num_steps", "3"]
    assert main([*resumed, "--agent.run", str(tmp_path / "other.py") + ":solve"]) != 0
    assert "agent.run: checkpoint" in capsys.readouterr().err
    assert main([*resumed, "--agent.port", "0", "--agent.host", "127.0.0.2"]) == 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["--agent.command", '["mini"]'], "agent.run and agent.command are both set"),
        (
            ["--inference.backend", "openai", "--inference.urls", "http://localhost:1"],
            "token ids, which a chat server",
        ),
        (["--agent.ports", "1"], "did you mean agent.port"),
    ],
)
def test_a_contradiction_is_an_error_with_its_remedy(run_file, overrides, says):
    with pytest.raises(ConfigError, match=says):
        load_config(run_file, overrides)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ('run = "nothing.py:solve"', "no file"),
        ('run = "solve.py:nothing"', "has no 'nothing'"),
        ('run = "solve.py:SECRET"', "is not a function"),
        ('command = ["no-such-program-here"]', "no program 'no-such-program-here'"),
    ],
)
def test_an_agent_that_is_not_there_is_an_error_before_the_model_is_loaded(
    run_file, tmp_path, changed, says, capsys
):
    (tmp_path / "solve.py").write_text(SOLVE + "\nSECRET = 3\n")
    text = run_file.read_text().replace('run = "solve.py:solve"', changed)
    run_file.write_text(text)
    assert main(["train", str(run_file), "--run.dir", str(tmp_path / "run")]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_train_what_an_agent_plays(run_file, tmp_path):
    run_dir = train(2, tmp_path / "run", *SMALL, run_file=run_file)
    trajectories = [trajectory for _, trajectory in read_trajectories(run_dir)]
    assert len(trajectories) == 8 and all(each.error is None for each in trajectories)
    for row in read_metrics(run_dir):
        assert row["policy/rollout_train_logprob_diff_max"] < 1e-4
