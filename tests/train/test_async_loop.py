"""The loop with rollouts that go on while it trains.

The servers are stood in for by an engine in this process on a copy of the weights, which a sync
copies anew; tests/inference and tests/inference/weights hold the real servers to the same contract.
"""

import asyncio
import copy
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.errors import TrainingError, WeightSyncError
from agentrl.inference.embedded import EmbeddedEngine
from agentrl.rollout import read_trajectories
from agentrl.train import run as run_parts
from agentrl.train.loop import train
from agentrl.train.serving import Serving
from agentrl.view.tracking import read_metrics

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
SMALL = [
    *("--rollout.groups_per_step", "2", "--rollout.group_size", "4"),
    *("--run.num_steps", "4", "--run.save_every", "1"),
    *("--inference.backend", "vllm", "--inference.urls", "http://127.0.0.1:9"),
]


class CopySync:
    """Copies the trainer's weights to the engine's model between two of its rounds."""

    def __init__(self, engine, model):
        self.engine, self.model, self.pushed = engine, model, []

    async def push(self, model, version):
        while not self.engine.weights_lock.acquire(blocking=False):
            await asyncio.sleep(0)
        try:
            self.model.load_state_dict(model.state_dict())
        finally:
            self.engine.weights_lock.release()
        self.pushed.append(version)
        return {"sync/seconds": 0.0}

    async def push_to(self, url):
        raise NotImplementedError

    async def aclose(self):
        pass


@pytest.fixture
def syncs(monkeypatch):
    made = []

    async def start_serving(config, model, run_dir, *, quiet):
        mine = copy.deepcopy(model).requires_grad_(False)
        engine = EmbeddedEngine(mine, seed=config.run.seed)
        made.append(CopySync(engine, mine))
        return Serving(engine, made[-1])

    monkeypatch.setattr(run_parts, "start_serving", start_serving)
    return made


def run(run_dir: Path, *overrides: str) -> Path:
    config = load_config(QUICKSTART, [*SMALL, "--run.dir", str(run_dir), *overrides])
    return train(config, quiet=True)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_every_trained_token_is_within_the_bound_and_no_task_is_lost(
    tmp_path, syncs, max_staleness
):
    run_dir = run(tmp_path / "run", "--rollout.max_staleness", str(max_staleness))
    assert syncs[0].pushed == [0, 1, 2, 3, 4]
    groups = []
    for step, trajectory in read_trajectories(run_dir):
        groups.append(trajectory.group_id)
        assert step - 1 - trajectory.oldest_version <= max_staleness
    assert sorted(set(groups)) == [f"g{n:07d}" for n in range(8)] and len(groups) == 32
    metrics = read_metrics(run_dir)
    assert [row["rollout/staleness_max"] <= max_staleness for row in metrics] == [True] * 4
    for row in metrics:
        fractions = [v for k, v in row.items() if k.startswith("rollout/staleness_fraction/")]
        assert sum(fractions) == pytest.approx(1)
    # The policy that sampled fresh tokens is the policy that is trained.
    assert metrics[0]["policy/rollout_train_logprob_diff_max"] < 1e-4
    if max_staleness == 0:
        assert all(row["policy/rollout_train_logprob_diff_max"] < 1e-4 for row in metrics)
    else:
        assert metrics[-1]["rollout/staleness_max"] > 0


def swapped(answers):
    """Two of three calls get the newest answer to another prompt."""
    prompt, own = answers[-1]
    others = [answer for asked, answer in answers if asked != prompt]
    return others[-1] if others and len(answers) % 3 else own


def wrong_ids(answers):
    """One token in ten is another than the one that was sampled."""
    _, own = answers[-1]
    ids = [(each + 7) % 300 if at % 10 == 0 else each for at, each in enumerate(own.token_ids)]
    return replace(own, token_ids=ids)


@pytest.mark.parametrize("wrong", [swapped, wrong_ids])
@pytest.mark.parametrize("from_step", [1, 3])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_wrong_answers_of_an_engine_end_the_run(
    tmp_path, syncs, monkeypatch, wrong, from_step, max_staleness
):
    generate, answers = EmbeddedEngine.generate, []

    async def spoilt(self, request_id, prompt_ids, *arguments):
        answer = await generate(self, request_id, prompt_ids, *arguments)
        if self.policy_version < from_step - 1:
            return answer
        answers.append((prompt_ids, answer))
        given = wrong(answers)
        return replace(given, versions=[answer.versions[0]] * len(given.token_ids))

    monkeypatch.setattr(EmbeddedEngine, "generate", spoilt)
    with pytest.raises(TrainingError, match="sampler and trainer differ"):
        # Of answers that were wrong before their step, only the newest policy's are judged.
        run(
            tmp_path / "run", "--rollout.max_staleness", str(max_staleness), "--run.num_steps", "12"
        )


def test_a_resumed_run_plays_again_what_no_step_trained_on(tmp_path, syncs):
    run_dir = run(tmp_path / "run", "--rollout.max_staleness", "1", "--run.num_steps", "2")
    # As if killed after step 1, with whole groups in flight.
    newest = run_dir / "checkpoints" / "step_000002"
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    state = json.loads((run_dir / "checkpoints" / "step_000001" / "state.json").read_text())
    position = state["data_position"]
    assert position["position"] == 4 and sorted(position["returned"])[0] >= 0
    assert len(position["returned"]) == 2

    run(run_dir, "--rollout.max_staleness", "1", "--run.resume")
    groups = [t.group_id for _, t in read_trajectories(run_dir)]
    assert sorted(groups) == sorted(f"g{n:07d}" for n in range(8) for _ in range(4))
    assert syncs[-1].pushed == [1, 2, 3, 4], "a resumed run first sends the weights it loaded"


def test_evaluation_during_training_shares_the_capacity_and_ends(tmp_path, syncs):
    run_dir = run(
        tmp_path / "run",
        *("--rollout.max_staleness", "2", "--rollout.max_concurrent", "3"),
        *("--run.eval_every", "1", "--eval.num_tasks", "4"),
    )
    assert all("eval/avg@1" in row for row in read_metrics(run_dir))


def test_a_stall_says_where_every_episode_stands_and_exits_with_75(
    tmp_path, syncs, monkeypatch, capsys
):
    async def hangs(self, request_id, prompt_ids, sampling):
        await asyncio.sleep(60)

    monkeypatch.setattr(EmbeddedEngine, "generate", hangs)
    arguments = ["--run.dir", str(tmp_path / "run"), "--run.stall_timeout_s", "0.5", "--quiet"]
    assert main(["train", str(QUICKSTART), *SMALL, *arguments]) == 75
    shown = capsys.readouterr().err
    assert "no episode progressed" in shown and "8 in flight" in shown
    assert shown.count("generate") == 8 and "g0000001-m003" in shown


@pytest.mark.slow
def test_an_interruption_saves_and_the_run_goes_on_afterwards(tmp_path, syncs):
    """A real process, a real SIGINT in the middle of asynchronous rollouts."""
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import copy, pathlib\n"
        "import test_async_loop as t\n"
        "from agentrl.train import run\n"
        "async def start(config, model, run_dir, *, quiet):\n"
        "    mine = copy.deepcopy(model).requires_grad_(False)\n"
        "    engine = t.EmbeddedEngine(mine, seed=1)\n"
        "    return t.Serving(engine, t.CopySync(engine, mine))\n"
        "run.start_serving = start\n"
        "overrides = [*t.SMALL, '--run.dir', *sys.argv[2:]]\n"
        "config = t.load_config(t.QUICKSTART, overrides)\n"
        "t.train(config)\n"
    )
    run_dir = tmp_path / "run"
    command = [
        *(sys.executable, str(script), str(Path(__file__).parent), str(run_dir)),
        *("--run.num_steps", "60", "--rollout.max_staleness", "1", "--run.save_every", "50"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if "3/60" in line:
            process.send_signal(signal.SIGINT)
            break
    output = process.stdout.read()
    assert process.wait(60) == 0, output
    assert "continue with --resume" in output
    done = len(read_metrics(run_dir))
    assert 3 <= done < 50
    steps = ("--run.num_steps", str(done + 1))
    run(run_dir, *steps, "--rollout.max_staleness", "1", "--run.save_every", "50", "--run.resume")
    groups = [t.group_id for _, t in read_trajectories(run_dir)]
    assert sorted(set(groups)) == [f"g{n:07d}" for n in range(2 * (done + 1))]
    assert len(groups) == 4 * len(set(groups))


def test_weights_that_are_spoilt_do_not_reach_the_engine(tmp_path, syncs, monkeypatch):
    """A sync that fails ends the run with its reason; the checkpoint before it stands."""

    async def refuses(self, model, version):
        if version == 2:
            raise WeightSyncError("http://127.0.0.1:9 computes something else: 1.98 nats")
        return {}

    monkeypatch.setattr(CopySync, "push", refuses)
    with pytest.raises(WeightSyncError, match=r"1\.98 nats"):
        run(tmp_path / "run", "--rollout.max_staleness", "1")
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()
