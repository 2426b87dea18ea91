"""docs/tutorial.md as a reader follows it: its files, commands and Python in their order."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.tracking import read_metrics

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()


def follow(folder: Path) -> list[str]:
    """Write each block that begins with a file's name, run every other one; returns outputs."""
    outputs = []
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        if named := re.match(r"# (\S+\.(?:py|toml))\n", code):
            (folder / named[1]).write_text(code)
            continue
        if language == "text":  # what was printed
            continue
        if language == "python":
            commands = [[sys.executable, "-c", code]]
        else:
            lines = [shlex.split(line) for line in code.splitlines()]
            assert all(words[0] == "agentrl" for words in lines)
            commands = [[sys.executable, "-m", *words] for words in lines]
        for command in commands:
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, (command[1:], done.stdout[-1500:], done.stderr[-1500:])
            outputs.append(done.stdout)
    return outputs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_reader_gets_from_an_empty_file_to_a_curve(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    outputs = "\n".join(follow(tmp_path))
    assert "17 passed, 0 failed" in outputs  # env check
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "runs" / "sums")]
    assert len(rewards) == 60
    gain = sum(rewards[-10:]) / 10 - sum(rewards[:10]) / 10
    assert gain > 0.25, rewards
    # Without servers a run repeats on one machine, and nearly so on another: what the page shows
    # of its curve is what comes out, give or take what another processor rounds away.
    shown, printed = (
        re.findall(r"^steps .*: (\d\.\d\d) #", text, re.M) for text in (PAGE, outputs)
    )
    assert len(shown) == len(printed) == 6
    assert [float(each) for each in printed] == pytest.approx(list(map(float, shown)), abs=0.15)
