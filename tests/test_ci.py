"""Checks which stages a change needs, and that none is left out in silence."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE = tomllib.loads((ROOT / ".ci" / "paths.toml").read_text())
sys.path.insert(0, str(ROOT / ".ci"))

from stages import matches, stages_of  # noqa: E402


def git(*arguments: str, cwd: Path = ROOT) -> str:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True, text=True
    )
    return done.stdout


def stages(checkout: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, ".ci/stages.py"],
        cwd=checkout,
        env={**os.environ, "CI_ALL": "", **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


def commit(checkout: Path, *paths: str) -> str:
    for path in paths:
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(path + str(os.urandom(4)))
    git("add", "--all", cwd=checkout)
    git("commit", "--quiet", "--message", "change", cwd=checkout)
    return git("rev-parse", "HEAD", cwd=checkout)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git("init", "--quiet", cwd=tmp_path)
    (tmp_path / ".ci" / "passed").mkdir(parents=True)
    for name in ("stages.py", "paths.toml"):
        shutil.copy(ROOT / ".ci" / name, tmp_path / ".ci")
    return tmp_path


def test_every_path_says_what_it_needs():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    known = {*TABLE["stages"], "all"}
    assert all(set(row["stages"]) <= known for row in TABLE["row"])
    for path in git("ls-files", "-z").rstrip("\0").split("\0"):
        stages_of(path)
    with pytest.raises(LookupError, match=r"a/new/place: no row"):
        stages_of("a/new/place")


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.md", "README.md", True),
        ("*.md", "docs/README.md", False),
        ("docs/**", "docs/a/b.md", True),
        ("docs/**", "docs.md", False),
        ("benchmarks/swe_*/**", "benchmarks/swe_attacks/a/b.py", True),
        (".*", ".gitignore", True),
        (".*", "gitignore", False),
    ],
)
def test_patterns(pattern, path, expected):
    assert matches(path, pattern) is expected


def test_stages_are_known_to_the_program():
    program = (ROOT / ".ci" / "run").read_text()
    started = re.findall(r"^\s*stage ([a-z-]+) \d+ ", program, re.MULTILINE)
    assert sorted(started) == sorted([*TABLE["required"], *TABLE["stages"]])
    assert f'always="{" ".join(TABLE["required"])}"' in program


def test_only_what_changed_since_a_stage_passed(checkout):
    first = commit(checkout, "README.md")
    assert stages(checkout) == TABLE["stages"], "nothing has passed yet"
    for stage in TABLE["stages"]:
        (checkout / ".ci" / "passed" / stage).write_text(first)
    commit(checkout)
    assert stages(checkout) == []
    second = commit(checkout, "docs/page.md", "agentrl/view/pages.py")
    assert stages(checkout) == ["docs", "browser"]
    assert stages(checkout, CI_ALL="1") == TABLE["stages"]
    (checkout / ".ci" / "passed" / "docs").write_text(second)
    commit(checkout)
    assert stages(checkout) == ["browser"]
    git("mv", "agentrl/view/pages.py", "agentrl/algo.py", cwd=checkout)
    commit(checkout)
    assert stages(checkout) == TABLE["stages"], "both names of a moved file count"


@pytest.mark.parametrize("named", ["", "main", "0" * 40])
def test_an_unknown_commit_is_none(checkout, named):
    commit(checkout, "README.md")
    (checkout / ".ci" / "passed" / "docs").write_text(named)
    commit(checkout)
    assert stages(checkout) == TABLE["stages"]


@pytest.fixture
def program(checkout) -> Path:
    """A checkout with .ci/run whose commands do nothing, but for those that a test writes."""
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci")
    (checkout / ".gitignore").write_text(".cache\nbin\n")
    (checkout / "bin").mkdir()
    for command, text in {
        "make": 'case "$*" in $BREAKS) sleep 1; exit 2 ;; esac',
        "slurmd": "",
        "chromium": "",
    }.items():
        (checkout / "bin" / command).write_text(f"#!/bin/sh\n{text}\n")
        (checkout / "bin" / command).chmod(0o755)
    commit(checkout, "README.md")
    return checkout


def run(checkout: Path, *named: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [".ci/run", *named],
        cwd=checkout,
        env={**os.environ, "BREAKS": "-", "PATH": path, **environment},
        capture_output=True,
        text=True,
    )


def test_a_stage_that_passes_is_recorded(program):
    head = git("rev-parse", "HEAD", cwd=program)
    done = run(program, "docs", "slow", "fast", BREAKS="test-slow*")
    assert done.returncode == 1
    assert "=== docs passed" in done.stdout and "=== types not needed" in done.stdout
    assert done.stdout.rstrip().splitlines()[-2].startswith("=== slow FAILED; from its output")
    assert [file.name for file in (program / ".ci" / "passed").iterdir()] == ["docs"]
    assert (program / ".ci" / "passed" / "docs").read_text() == head
    # What ran was not the commit, so it says nothing of it.
    (program / "README.md").write_text("changed")
    assert run(program, "slow").returncode == 0
    assert not (program / ".ci" / "passed" / "slow").exists()


def test_a_stage_that_runs_beside_others_is_waited_for(program):
    done = run(program, "browser", "cluster", BREAKS="test-cluster*")
    assert done.returncode == 1
    assert "=== cluster FAILED; from its output" in done.stdout
    assert "=== browser passed" in done.stdout


def test_nothing_more_runs_after_the_required_lane_failed(program):
    done = run(program, BREAKS="types")
    assert done.returncode == 1
    assert "=== package passed" in done.stdout and "docs passed" not in done.stdout


def test_a_stage_left_out_for_lack_of_time_fails(program):
    done = run(program, CI_MINUTES="0")
    assert done.returncode == 1
    assert "=== fast FAILED: takes" in done.stdout
