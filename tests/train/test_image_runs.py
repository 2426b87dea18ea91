"""A run that shows images: killed, resumed and replayed, each image once on the disk."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_loop import require_same, tensors_of, untimed

from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.train.loop import train
from agentrl.view.tracking import read_metrics
from tests.vision_models import save_with_processor

SHOWS = """
import PIL.Image

from agentrl.env import Environment, Task, tool
from agentrl.images import image_part


def picture(colour):
    return image_part(PIL.Image.new("RGB", (24, 24), colour))


class Shows(Environment):
    def splits(self):
        return {"train": 4}

    def get(self, split, index):
        return Task(f"{split}/{index}", "which?", metadata={"colour": (60 * index, 90, 30)})

    def reset(self, task, *, seed):
        shown = picture(tuple(task.metadata["colour"]))
        return [{"role": "user", "content": [{"type": "text", "text": "which?"}, shown]}]

    def step(self, action):
        if self.episode.last_turn:
            self.finish(len(action.text) % 5 / 4)
            return None
        return [{"role": "user", "content": [picture((9, 9, 200)), {"type": "text", "text": "?"}]}]
"""
RUN = """
[run]
num_steps = 3
save_every = 1
keep_checkpoints = 9
preflight = false

[model]
path = "model"

[env]
id = "shows.py:Shows"

[rollout]
groups_per_step = 2
group_size = 4
max_turns = 2
max_turn_tokens = 6
max_context_tokens = 200

[train]
learning_rate = 1e-3
"""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    (folder / "model").mkdir()
    save_with_processor("qwen2_5_vl", folder / "model")
    (folder / "shows.py").write_text(SHOWS)
    (folder / "run.toml").write_text(RUN)
    return folder / "run.toml"


def run(run_file: Path, run_dir: Path, *overrides: str) -> Path:
    return train(load_config(run_file, ["--run.dir", str(run_dir), *overrides]), quiet=True)


@pytest.mark.slow
def test_a_killed_run_and_a_replay_end_in_the_same_weights(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(run_file.parent)
    whole = run(run_file, tmp_path / "whole")
    assert all(row["rollout/error_fraction"] == 0 for row in read_metrics(whole))
    assert any(row["train/grad_norm"] > 0 for row in read_metrics(whole))
    # Four tasks' images and the second turn's, however often they were shown.
    assert len(list((whole / "images").iterdir())) == 5

    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "agentrl", "train", str(run_file), "--run.dir", str(killed)]
    process = subprocess.Popen([*command, "--quiet"], cwd=run_file.parent, env={**os.environ})
    while not (killed / "checkpoints" / "step_000001").exists():
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "checkpoints" / "step_000003").exists()
    run(run_file, killed, "--run.resume")
    require_same(killed, whole, 3)

    again = run(run_file, tmp_path / "again", "--run.replay", str(whole))
    assert tensors_of(again, 3) == tensors_of(whole, 3)
    assert untimed(read_metrics(again)) == untimed(read_metrics(whole))


@pytest.mark.slow
def test_an_evaluation_goes_on_with_its_images(run_file, tmp_path):
    played = tmp_path / "played"
    command = ["eval", str(run_file), "--out", str(played), "--eval.split", "train"]
    assert main([*command, "--eval.num_tasks", "2"]) == 0
    before = {file.name: file.stat().st_mtime_ns for file in (played / "images").iterdir()}
    assert main([*command, "--eval.num_tasks", "4", "--resume"]) == 0
    after = {file.name: file.stat().st_mtime_ns for file in (played / "images").iterdir()}
    assert len(before) == 3 and len(after) == 5
    assert before.items() <= after.items()  # what was played is not played again
