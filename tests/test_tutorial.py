"""docs/tutorial.md and docs/first_hour.md as a reader follows them: files, commands and Python in
their order."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import blocks_of

from agentrl.view.diagnosis import diagnose
from agentrl.view.runs import RunFiles
from agentrl.view.tracking import read_metrics

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
FIRST_HOUR = ROOT / "docs" / "first_hour.md"


def follow(page: Path, folder: Path) -> str:
    """Write each block that begins with a file's name, run every other one; returns outputs."""
    (folder / "examples").symlink_to(ROOT / "examples")
    outputs = []
    for block in blocks_of(page):
        if block.not_run and "tests/test_tutorial.py runs it" not in block.not_run:
            continue
        if block.file:
            (folder / block.file).write_text(block.code)
            continue
        if block.language == "text":  # what was printed
            continue
        if block.language == "python":
            commands = [["-c", block.code]]
        else:
            lines = [shlex.split(line) for line in block.code.splitlines()]
            assert all(words[0] in ("agentrl", "python") for words in lines)
            commands = [["-m", *w] if w[0] == "agentrl" else w[1:] for w in lines]
        for command in commands:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, (command, done.stdout[-1500:], done.stderr[-1500:])
            outputs.append(done.stdout)
    return "\n".join(outputs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_reader_gets_from_an_empty_file_to_a_curve(tmp_path):
    outputs = follow(PAGE, tmp_path)
    assert re.search(r"1\d passed, 0 failed", outputs)
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "runs" / "sums")]
    assert len(rewards) == 60
    gain = sum(rewards[-10:]) / 10 - sum(rewards[:10]) / 10
    assert gain > 0.25, rewards
    # Without servers a run repeats on one machine, and nearly so on another: what the page shows
    # of its curve is what comes out, give or take what another processor rounds away.
    shown, printed = (
        re.findall(r"^steps .*: (\d\.\d\d) #", text, re.M) for text in (PAGE.read_text(), outputs)
    )
    assert len(shown) == len(printed) == 6
    assert [float(each) for each in printed] == pytest.approx(list(map(float, shown)), abs=0.15)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_reader_gets_a_curve_of_their_own_and_finds_planted_faults(tmp_path):
    follow(FIRST_HOUR, tmp_path)
    runs = tmp_path / "runs"
    rewards = [row["reward/mean"] for row in read_metrics(runs / "warehouse")]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1, rewards
    better = [row["reward/mean"] for row in read_metrics(runs / "better")]
    assert sum(better[-4:]) > sum(rewards[-4:]), "the remedy of the page"
    faults = {"short": "malformed_calls", "wrong": "one_component"}
    for name, expected in faults.items():
        rules = diagnose(RunFiles(runs / name))["rules"]
        assert expected in {rule["id"] for rule in rules if rule["state"] == "found"}, name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_environment_on_the_first_page_learns(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (block,) = [each for each in blocks_of(ROOT / "README.md") if each.file == "sums.py"]
    (tmp_path / "sums.py").write_text(block.code)
    words = ["train", "examples/quickstart/run.toml", "--env.id", "sums.py:Sums"]
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", *words, "--run.name", "sums", "--run.num_steps", "40"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "runs" / "sums")]
    assert sum(rewards[:3]) / 3 < 0.6 and sum(rewards[-3:]) / 3 > 0.8, rewards
