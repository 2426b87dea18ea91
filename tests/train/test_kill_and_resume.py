"""A run that is killed again and again ends bit for bit where an undisturbed one does.

Real processes, real SIGKILL, at seeded random moments: while playing, while training, and, in at
least a quarter of the lives, inside a checkpoint's write (its hidden partial folder exists).
"""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_loop import QUICKSTART, require_same, tensors_of

from agentrl.view.tracking import read_metrics

NUM_STEPS = 60
OVERRIDES = [
    *("--rollout.groups_per_step", "4", "--rollout.group_size", "4"),
    *("--run.num_steps", str(NUM_STEPS), "--run.save_every", "1"),
]
PPO = [
    *("--objective.preset", "ppo", "--critic.learning_rate", "1e-3", "--critic.warmup_steps", "3"),
    *("--train.num_minibatches", "2", "--run.num_steps", "15"),
]

BFLOAT16 = ["--model.dtype", "bfloat16", "--run.num_steps", "8"]

ASYNC = ["--run.async_save", "true", "--run.num_steps", "15"]

EVALUATED = [
    *("--run.num_steps", "24", "--run.save_every", "4", "--run.eval_every", "3"),
    *("--eval.num_tasks", "8", "--eval.sets.plain.split", "test", "--run.patience", "7"),
    *("--eval.sets.greedy.temperature", "0", "--run.keep_best", "eval/greedy/avg@1"),
]


def start(run_dir: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "agentrl", "train", str(QUICKSTART)]
    with open(run_dir.with_suffix(".log"), "a") as log:
        return subprocess.Popen(
            [*command, "--run.dir", str(run_dir), *OVERRIDES, *arguments], stdout=log, stderr=log
        )


def wait_until(condition, process: subprocess.Popen) -> bool:
    """True when the condition holds, False when the process ended first."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.0005)
    return False


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("arguments", "num_steps", "num_kills"),
    [
        ([], NUM_STEPS, 20),
        pytest.param(PPO, 15, 3, marks=pytest.mark.promise),
        (BFLOAT16, 8, 2),
        pytest.param(ASYNC, 15, 3, marks=pytest.mark.promise),
        (EVALUATED, 24, 2),
    ],
    ids=["grpo, 20 kills", "ppo, 3 kills", "bfloat16, 2 kills", "async save, 3 kills", "evaluated"],
)
def test_kills_change_nothing(tmp_path, arguments, num_steps, num_kills):
    undisturbed = tmp_path / "undisturbed"
    assert start(undisturbed, *arguments).wait() == 0

    killed = tmp_path / "killed"
    checkpoints, metrics_file = killed / "checkpoints", killed / "metrics.jsonl"
    rng = random.Random(1)
    kills = kills_inside_a_save = 0
    process = start(killed, *arguments)
    while kills < num_kills:
        # Alive again: the first checkpoint, or the first new step.
        size = metrics_file.stat().st_size if metrics_file.exists() else 0
        if kills == 0:
            assert wait_until(lambda: (checkpoints / "step_000000").exists(), process)
        else:
            alive = wait_until(lambda size=size: metrics_file.stat().st_size != size, process)
            assert alive, f"it ended before it could be killed {num_kills} times; raise num_steps"
        if kills % 2:
            time.sleep(rng.uniform(0.0, 0.6))
        else:
            wait_until(lambda: any(checkpoints.glob(".tmp-*")), process)
            time.sleep(rng.uniform(0.0, 0.01))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended by itself before the kill"
        kills += 1
        kills_inside_a_save += any(checkpoints.glob(".*"))
        process = start(killed, *arguments, "--resume")
    assert process.wait() == 0, killed.with_suffix(".log").read_text()[-2000:]

    print(f"{kills} kills, {kills_inside_a_save} of them inside a save")
    assert kills_inside_a_save >= num_kills // 4
    require_same(killed, undisturbed, num_steps)
    # With a critic, it and its optimizer.
    assert len(tensors_of(killed, num_steps)) == (4 if arguments == PPO else 2)
    if arguments == EVALUATED:
        best = [(each / "checkpoints" / "best").resolve().name for each in (killed, undisturbed)]
        assert best[0] == best[1] and best[0].startswith("step_")


@pytest.mark.promise
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "save"),
    [
        (signal.SIGINT, ["--run.save_every", "1000"]),
        (signal.SIGTERM, ["--run.save_every", "1000"]),
        (signal.SIGINT, ["--run.async_save", "true"]),
    ],
)
def test_an_interrupted_run_saves_and_says_how_to_go_on(tmp_path, number, save):
    run_dir = tmp_path / "run"
    process = start(run_dir, *save)
    metrics_file = run_dir / "metrics.jsonl"
    assert wait_until(lambda: metrics_file.exists() and metrics_file.stat().st_size > 0, process)
    process.send_signal(number)
    assert process.wait(30) == 130
    steps = [row["step"] for row in read_metrics(run_dir)]
    assert (run_dir / "checkpoints" / f"step_{steps[-1]:06d}").is_dir()
    assert "--resume" in run_dir.with_suffix(".log").read_text()
