"""Runs from Python: what they return, and what callbacks may do to them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.api import evaluate, load_config, read_metrics, read_trajectories, rollout, train
from agentrl.config import with_change
from agentrl.errors import ConfigError
from agentrl.view.tracking import read_status

ROOT = Path(__file__).parents[1]
MODEL = str(ROOT / "examples" / "quickstart" / "model")
ARITHMETIC = {"source": "arithmetic", "min_digits": 2, "digits": 3, "tools": True}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def config(run_dir: Path, **run):
    return load_config(
        {
            "run": {"dir": str(run_dir), "num_steps": 4, "save_every": 2} | run,
            "model": {"path": MODEL},
            "env": {"id": "math", "config": ARITHMETIC | {"operators": "+-*", "instruction": ""}},
            "rollout": {
                "groups_per_step": 2,
                "group_size": 4,
                "max_turns": 3,
                "max_turn_tokens": 24,
                "max_context_tokens": 256,
            },
            "train": {"learning_rate": 1e-4},
            "eval": {"num_tasks": 4, "samples_per_task": 2},
        }
    )


def untimed(rows: list[dict]) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not k.startswith("time/") and not k.endswith("_per_s")}
        for row in rows
    ]


def test_a_run_returns_its_metrics_and_a_checkpoint_that_can_be_evaluated(tmp_path):
    its = config(tmp_path / "run")
    result = train(its, quiet=True)
    assert [row["step"] for row in result.metrics] == [1, 2, 3, 4]
    assert result.metrics == read_metrics(result.run_dir)
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step_000004"

    ended = []
    measured = evaluate(its, checkpoint="latest", on_progress=lambda done, all: ended.append(done))
    assert len(measured.trajectories) == max(ended) == 8
    assert {version for t in measured.trajectories for version in t.branches[0].policy_versions}
    assert measured.statistics.average.value == measured.to_json()["avg@2"]["value"]
    same = evaluate(its, checkpoint=str(result.checkpoint))
    assert same.to_json() == measured.to_json()


def test_the_package_offers_the_names_that_are_typed_first():
    """In a new process, where nothing has been imported before."""
    code = """
import agentrl

assert {*agentrl.__all__} <= {*dir(agentrl)}

@agentrl.register("sums")
class Sums(agentrl.Environment):
    def splits(self):
        return {"test": 1}

    def get(self, split, index):
        return agentrl.Task("sum", "40+2=?", reference=42)

    @agentrl.tool(terminal=True)
    def answer(self, number: int) -> None: ...

    @agentrl.reward
    def right(self, episode) -> float:
        return float(episode.actions[-1].tool_calls[0].arguments["number"] == self.task.reference)

env = agentrl.make("sums").sync
env.reset()
assert env.call("answer", number=42).reward == 1.0
env.close()

for _ in range(2):  # importing a module of the package agentrl.train does not hide the function
    try:
        agentrl.train(agentrl.load_config({"model": {"path": "none"}}), quiet=True)
    except Exception as error:
        assert "none" in str(error), error
    import agentrl.train.loop
try:
    agentrl.trian
except AttributeError:
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rollouts_are_returned_and_written_only_where_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    played = rollout(config(tmp_path / "unused"))
    assert [len(group.trajectories) for group in played.groups] == [2] * 4
    assert not list(tmp_path.iterdir())
    rollout(config(tmp_path / "unused"), out=tmp_path / "out")
    kept = [trajectory for _, trajectory in read_trajectories(tmp_path / "out")]
    assert [t.messages for t in kept] == [t.messages for t in played.trajectories]
    assert read_metrics(tmp_path / "out")[0]["reward/mean"] == played.metrics["reward/mean"]
    with pytest.raises(ConfigError, match="already holds an evaluation"):
        rollout(config(tmp_path / "unused"), out=tmp_path / "out")


def cool_down(end):
    """Halves the rate after step 2, and samples colder after step 3."""
    end.log({"mine/turns": sum(len(t.turns) for t in end.trajectories)})
    if end.step == 2:
        end.change("train.learning_rate", end.config.train.learning_rate / 2)
    if end.step == 3:
        end.change("rollout.temperature", 0.5)


def test_what_callbacks_change_holds_from_the_next_step_on_and_after_a_resume(tmp_path):
    whole = train(config(tmp_path / "whole", num_steps=6), callbacks=[cool_down], quiet=True)
    rates = [row["train/learning_rate"] for row in whole.metrics]
    assert rates == [1e-4, 1e-4, 5e-5, 5e-5, 5e-5, 5e-5]
    assert all(row["mine/turns"] >= 8 for row in whole.metrics)
    # Sampler and trainer changed together.
    differences = [row["policy/rollout_train_logprob_diff_max"] for row in whole.metrics]
    assert max(differences) < 1e-4

    def stop_at_4(end):
        cool_down(end)
        if end.step == 4:
            end.stop()

    its = config(tmp_path / "parts", num_steps=6, save_every=100)
    first = train(its, callbacks=[stop_at_4], quiet=True)
    assert first.checkpoint.name == "step_000004"
    assert read_status(first.run_dir)["state"] == "stopped"
    its = config(tmp_path / "parts", num_steps=6, save_every=100, resume=True)
    resumed = train(its, quiet=True)  # nothing is left for the callback to change
    assert read_status(resumed.run_dir)["state"] == "finished"
    metrics = [{k: v for k, v in row.items() if k != "mine/turns"} for row in whole.metrics]
    assert untimed(resumed.metrics)[4:] == untimed(metrics)[4:]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (resumed.checkpoint / name).read_bytes() == (whole.checkpoint / name).read_bytes()


def test_saving_and_evaluating_more_often_from_now_on(tmp_path):
    def every_step(end):
        end.change("run.save_every", 1)
        end.change("run.eval_every", 1)

    result = train(config(tmp_path / "run", num_steps=3), callbacks=[every_step], quiet=True)
    assert ["eval/avg@2" in row for row in result.metrics] == [False, True, True]
    names = [path.name for path in sorted((result.run_dir / "checkpoints").iterdir())]
    assert names == ["step_000002", "step_000003"]


def test_what_a_callback_may_not_do_is_said_by_name(tmp_path):
    its = config(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"cannot change during a run; did you mean train\.learn"):
        with_change(its, "train.learning_rat", 1)
    with pytest.raises(ConfigError, match=r"these can: train\.learning_rate, rollout\.temp"):
        with_change(its, "model.path", "other")
    with pytest.raises(ConfigError, match=r"train\.learning_rate: Input should be greater than 0"):
        with_change(its, "train.learning_rate", -1.0)
    with pytest.raises(ConfigError, match=r"kl\.where = 'none'"):
        with_change(its, "objective.kl.coef", 0.1)
    with pytest.raises(ConfigError, match="reward/mean: the run writes this metric"):
        train(its, callbacks=[lambda end: end.log({"reward/mean": 1.0})], quiet=True)
    assert read_status(tmp_path / "run")["state"] == "failed"


def test_a_dictionary_is_checked_as_a_file_is():
    given = {"model": {"path": "m"}, "rollout": {"group_sise": 4}}
    with pytest.raises(ConfigError, match=r"configuration: rollout\.group_sise: unknown key; did"):
        load_config(given)
    assert load_config({"model": {"path": "m"}}, ["--run.seed", "7"]).run.seed == 7
    assert given == {"model": {"path": "m"}, "rollout": {"group_sise": 4}}


def test_it_works_where_an_event_loop_runs_already(tmp_path):
    async def cell():
        return train(config(tmp_path / "run", num_steps=2), quiet=True)

    inside = asyncio.run(cell())
    outside = train(config(tmp_path / "other", num_steps=2), quiet=True)
    assert untimed(inside.metrics) == untimed(outside.metrics)

    async def wrong():
        return evaluate(load_config({"model": {"path": str(tmp_path / "nothing")}}))

    with pytest.raises(ConfigError, match="nothing"):
        asyncio.run(wrong())


IN_A_LOOP = """
import asyncio, json, signal, sys
from agentrl.api import load_config, train

async def cell():
    result = train(load_config(sys.argv[1], ["--run.num_steps", "10000"]), quiet=True)
    print(json.dumps([result.checkpoint.name, len(result.metrics)]))

# A process that a shell started in the background ignores the signal; a notebook's kernel does not.
signal.signal(signal.SIGINT, signal.default_int_handler)
asyncio.new_event_loop().run_until_complete(cell())  # as a notebook does
"""


@pytest.mark.slow
def test_an_interrupt_beside_a_running_loop_saves_as_on_the_command_line(tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text(config(tmp_path / "run").to_toml())
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_LOOP, str(run_file)], stdout=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    name, num_steps = json.loads(said.splitlines()[-1])
    assert name == f"step_{num_steps:06d}" and num_steps < 10000
    assert read_status(tmp_path / "run")["state"] == "stopped"


CHANGING = """
import sys
from agentrl.api import load_config, train
from test_api import halve_at_first

train(load_config(sys.argv[1]), callbacks=[halve_at_first], quiet=True)
"""


def halve_at_first(end):
    if end.step == 1:
        end.change("train.learning_rate", 5e-5)


@pytest.mark.slow
def test_every_rank_learns_with_what_a_callback_changed(tmp_path):
    one = train(config(tmp_path / "one", num_steps=3), callbacks=[halve_at_first], quiet=True)
    (tmp_path / "run.toml").write_text(config(tmp_path / "two", num_steps=3).to_toml())
    (tmp_path / "script.py").write_text(CHANGING)
    ended = subprocess.run(
        [*TORCHRUN, "2", str(tmp_path / "script.py"), str(tmp_path / "run.toml")],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    two = read_metrics(tmp_path / "two")
    assert [row["train/learning_rate"] for row in two] == [1e-4, 5e-5, 5e-5]
    norms = [row["train/grad_norm"] for row in one.metrics]
    assert [row["train/grad_norm"] for row in two] == pytest.approx(norms, rel=1e-3)
