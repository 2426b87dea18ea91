"""Whole runs on several ranks: the curve of one, other numbers of ranks on resume, SIGKILLs."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from test_loop import QUICKSTART, contents, save_mixture, untimed

from agentrl.model.load import load_model
from agentrl.rollout import read_signals, read_trajectories
from agentrl.view.tracking import read_metrics

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
NUM_KILLS = int(os.environ.get("AGENTRL_RANK_KILLS", "3"))
"""Every one costs a restart of all ranks, 6 seconds and more."""
SMALL = [
    *("--rollout.groups_per_step", "4", "--rollout.group_size", "4"),
    *("--train.token_budget", "256", "--train.num_minibatches", "2"),
]


def start(
    num_ranks: int,
    run_dir: Path,
    *arguments: str,
    launch: tuple[str, ...] = (),
    program: tuple[str, ...] = ("-m", "agentrl"),
    run_file: Path = QUICKSTART,
) -> subprocess.Popen:
    command = [*TORCHRUN, "--nproc-per-node", str(num_ranks), *launch, *program]
    if num_ranks == 1:
        command = [sys.executable, "-m", "agentrl"]
    with open(run_dir.with_suffix(".log"), "a") as log:
        return subprocess.Popen(
            [*command, "train", str(run_file), "--run.dir", str(run_dir), *SMALL, *arguments],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def finished(process: subprocess.Popen, run_dir: Path) -> Path:
    assert process.wait(300) == 0, run_dir.with_suffix(".log").read_text()[-4000:]
    return run_dir


def train(num_ranks: int, run_dir: Path, *arguments: str, **options) -> Path:
    return finished(start(num_ranks, run_dir, *arguments, **options), run_dir)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All shards of a checkpoint, by folder, tensor and offset."""
    found = {}
    for path in sorted(checkpoint.glob("*/*.safetensors")):
        with safe_open(path, "pt") as file:
            offsets = file.metadata()["DCP_SHARDING_INFO"]
            for name in file.keys():  # noqa: SIM118
                key = (path.parent.name, name, path.name if "step/" not in name else "")
                found[key] = file.get_tensor(name)
            assert "saved_offsets" in offsets
    return found


def logprob_free(rows: list[dict]) -> list[dict]:
    """Drops the metrics of rounding, and the loss, which is zero but for rounding."""
    return [
        {
            k: v
            for k, v in row.items()
            if not k.startswith(("loss/", "policy/fresh_diff")) and "logprob_diff" not in k
        }
        for row in untimed(rows)
    ]


def played(run_dir: Path) -> list[tuple]:
    """Ids and rewards; log-probs differ by the rounding of the weights."""
    return [
        (t.trajectory_id, t.reward, [row.token_ids for row in t.branches])
        for _, t in read_trajectories(run_dir)
    ]


@pytest.mark.slow
def test_a_mixture_on_two_ranks_learns_with_the_routes_that_it_was_sampled_with(tmp_path):
    settings = ["--model.path", save_mixture(tmp_path / "mixture"), "--run.num_steps", "2"]
    settings += ["--run.preflight", "false"]  # a random model has no rewards
    run_dir = train(2, tmp_path / "run", *settings, "--train.router_replay", "true")
    metrics = read_metrics(run_dir)
    assert [each["train/unrouted"] for each in metrics] == [0, 0]
    assert all(each["policy/rollout_train_logprob_diff_max"] < 1e-3 for each in metrics[:1])


@pytest.mark.promise
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_do_what_one_does_and_any_number_goes_on(tmp_path):
    one = train(1, tmp_path / "one", "--run.num_steps", "4", "--run.save_every", "2")
    two = train(2, tmp_path / "two", "--run.num_steps", "4", "--run.save_every", "2")
    assert played(two) == played(one), "other tokens"
    for its, mine in zip(
        logprob_free(read_metrics(one)), logprob_free(read_metrics(two)), strict=True
    ):
        assert mine == pytest.approx(its, rel=1e-4, abs=1e-6)

    # What each token was trained with, whichever rank did it.
    for step in (1, 4):
        signals = read_signals(one, step), read_signals(two, step)
        assert signals[0].keys() == signals[1].keys() and signals[0]
        for name, rows in signals[0].items():
            for its, mine in zip(rows, signals[1][name], strict=True):
                assert np.array_equal(mine.trained, its.trained)
                for field in ("advantages", "logprobs", "weights"):
                    values = getattr(mine, field)[mine.trained]
                    expected = getattr(its, field)[its.trained]
                    np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-5)

    # One folder for transformers, as close to one rank's weights as the updates were.
    exported = tmp_path / "exported"
    last = two / "checkpoints/step_000004"
    export = [sys.executable, "-m", "agentrl", "export", str(last), "--out", str(exported)]
    assert subprocess.run(export).returncode == 0
    model = load_model(str(exported), dtype=torch.float32, device="cpu").state_dict()
    for name, tensor in load_file(one / "checkpoints/step_000004/model.safetensors").items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-5, atol=1e-6)

    for num_ranks in (1, 3):
        again = shutil.copytree(two, tmp_path / f"on-{num_ranks}")
        train(num_ranks, again, "--run.num_steps", "5", "--run.save_every", "1", "--resume")
        assert len(read_metrics(again)) == 5
    shutil.copytree(one, tmp_path / "from-one")
    train(2, tmp_path / "from-one", "--run.num_steps", "5", "--resume")
    on_one, on_three, from_one = (
        untimed(read_metrics(tmp_path / name))[-1] for name in ("on-1", "on-3", "from-one")
    )
    for key in ("reward/mean", "train/grad_norm", "policy/entropy"):
        assert on_three[key] == pytest.approx(on_one[key], rel=1e-5)
        assert from_one[key] == pytest.approx(on_one[key], rel=1e-4)

    # A shard that is gone is named, whoever looks for it.
    shard = next(last.glob("model/shard-00002-*"))
    shard.unlink()
    shutil.rmtree(two / "checkpoints/step_000002")
    shutil.rmtree(two / "checkpoints/step_000000", ignore_errors=True)
    for num_ranks in (1, 2):
        process = start(num_ranks, two, "--run.num_steps", "5", "--resume")
        assert process.wait(100) != 0
        log = two.with_suffix(".log").read_text()
        assert shard.name in log[-20000:] and "cannot be read" in log


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_that_hold_rows_together_play_and_learn_what_one_does(tmp_path):
    one = train(1, tmp_path / "one", "--run.num_steps", "2")
    two = train(2, tmp_path / "two", "--run.num_steps", "2", "--train.parallel.context", "2")
    assert played(two) == played(one), "other tokens"
    for its, mine in zip(
        logprob_free(read_metrics(one)), logprob_free(read_metrics(two)), strict=True
    ):
        assert mine == pytest.approx(its, rel=1e-4, abs=1e-6)


def children(pid: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found += map(int, (thread / "children").read_text().split())
    return sorted(found)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_hangs_is_named_and_the_run_ends(tmp_path):
    run_dir = tmp_path / "run"
    process = start(2, run_dir, "--run.num_steps", "500", "--train.parallel.deadline_s", "8")
    metrics_file = run_dir / "metrics.jsonl"
    while not (metrics_file.exists() and metrics_file.stat().st_size):
        assert process.poll() is None
        time.sleep(0.05)
    stopped = children(process.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert process.wait(120) != 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
    log = run_dir.with_suffix(".log").read_text()
    assert log.count("error: nothing moved for 8 s during") == 1
    assert "rank 1 of 2 does not answer" in log
    assert "loop.py" in log, "the stack of rank 0"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("async_save", ["false", "true"])
def test_ranks_that_are_killed_change_nothing(tmp_path, async_save):
    """SIGKILL of random ranks, two of five inside a save and the others outside; torchrun starts
    them again."""
    num_steps_in_all = 3 * NUM_KILLS
    steps = ["--run.num_steps", str(num_steps_in_all), "--run.save_every", "1"]
    steps += ["--run.async_save", async_save]
    started = time.monotonic()
    undisturbed = train(2, tmp_path / "undisturbed", *steps)
    step_s = (time.monotonic() - started) / num_steps_in_all
    killed = tmp_path / "killed"
    restarts = ("--max-restarts", str(num_steps_in_all), "--monitor-interval", "0.5")
    process = start(2, killed, *steps, launch=restarts)
    inside = 2 * NUM_KILLS // 5
    outside = itertools.islice(itertools.cycle(["playing", "training", "pushing"]), NUM_KILLS)
    wanted = Counter(["saving"] * inside + [*outside][inside:])
    rng, hit, victims, seen = random.Random(1), Counter[str](), [], 0

    def seen_until(condition) -> bool:
        """False: the run ended first."""
        while process.poll() is None:
            if condition():
                return True
            time.sleep(0.001)
        return False

    try:
        # One that came too late has hit something else, and another is tried.
        while missing := sorted((wanted - hit).elements()):
            aim = rng.choice(missing)
            if not (
                seen_until(lambda least=seen: num_steps(killed / "metrics.jsonl") > least)
                and seen_until(lambda what=aim: phase(killed) == what)
            ):
                break
            short = aim in ("saving", "pushing")
            time.sleep(rng.uniform(0.0, 0.01 if short else step_s / 2))
            if len(alive := children(process.pid)) < 2:
                break  # it has just ended
            victims.append(rng.randrange(2))
            os.kill(alive[victims[-1]], signal.SIGKILL)
            hit[phase(killed)] += 1
            seen_until(lambda gone=alive: not set(gone) & set(children(process.pid)))
            seen = num_steps(killed / "metrics.jsonl")
        assert process.wait(300) == 0, killed.with_suffix(".log").read_text()[-4000:]
    finally:
        process.terminate()
        process.wait(60)
    print(f"{hit.total()} kills of ranks {victims}: {dict(hit)}")
    assert hit.total() >= NUM_KILLS and hit["saving"] and len(hit) > 1
    require_bitwise(killed, undisturbed, num_steps_in_all)


def phase(run_dir: Path) -> str:
    """Returns the phase of a run that saves every step, from the files it has written."""
    step = num_steps(run_dir / "metrics.jsonl")
    # The folder is renamed at the end of a save: while it is there the save is under way.
    if any((run_dir / "checkpoints").glob(".tmp-*")):
        return "saving"
    if not (run_dir / f"checkpoints/step_{step:06d}").exists():
        return "about to save"
    records = f"step_{step + 1:06d}.msgpack.zst"
    if (run_dir / "signals" / records).exists():
        return "pushing"
    return "training" if (run_dir / "trajectories" / records).exists() else "playing"


def num_steps(metrics_file: Path) -> int:
    return metrics_file.read_bytes().count(b"\n") if metrics_file.exists() else 0


def require_bitwise(run_dir: Path, undisturbed: Path, step: int) -> None:
    """Weights and moments of the last checkpoint, metrics and trajectories."""
    name = f"checkpoints/step_{step:06d}"
    mine, its = tensors(run_dir / name), tensors(undisturbed / name)
    assert mine.keys() == its.keys() and len(its) > 100
    assert {folder for folder, *_ in its} == {"model", "optimizer"}
    assert all(torch.equal(mine[key], its[key]) for key in its)
    assert untimed(read_metrics(run_dir)) == untimed(read_metrics(undisturbed))
    assert contents(run_dir) == contents(undisturbed)
