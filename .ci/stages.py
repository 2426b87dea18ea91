"""Prints the stages of .ci/run that a change needs, one a line, after `.ci/paths.toml`.

What changed is measured, for each stage, against the commit that .ci/passed/NAME names: the newest
one at which it passed. Without it, or if it is not an ancestor, and with CI_ALL=1, it is needed.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PASSED = ROOT / ".ci" / "passed"
TABLE = tomllib.loads((ROOT / ".ci" / "paths.toml").read_text())


def matches(path: str, pattern: str) -> bool:
    """Tells a pattern's path: `**` stands for anything, `*` for anything but a slash."""
    parts = (re.escape(part).replace(r"\*", "[^/]*") for part in pattern.split("**"))
    return re.fullmatch(".*".join(parts), path) is not None


def stages_of(path: str) -> list[str]:
    """Returns the stages that a changed path needs.

    Raises:
        LookupError: no row has a pattern for the path.
    """
    for row in TABLE["row"]:
        if any(matches(path, pattern) for pattern in row["paths"]):
            return TABLE["stages"] if row["stages"] == ["all"] else row["stages"]
    raise LookupError(f"{path}: no row of .ci/paths.toml says what a change of it needs")


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def changed_paths(stage: str) -> list[str] | None:
    """Returns what differs from the newest commit at which the stage passed; None: unknown."""
    if os.environ.get("CI_ALL") or not (PASSED / stage).is_file():
        return None
    commit = (PASSED / stage).read_text().strip()
    if not re.fullmatch("[0-9a-f]{40}", commit):
        return None
    if git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return None
    done = git("diff", "--name-only", "--no-renames", "-z", commit, "HEAD")
    return None if done.returncode else [path for path in done.stdout.split("\0") if path]


def main() -> None:
    """Prints each stage that is needed and, to standard error, because of which path."""
    for stage in TABLE["stages"]:
        paths = changed_paths(stage)
        if paths is None:
            print(f"{stage}: no earlier commit to compare with, or CI_ALL is set", file=sys.stderr)
            print(stage)
            continue
        needing = [path for path in paths if stage in stages_of(path)]
        if needing:
            print(f"{stage}: {needing[0]} and {len(needing) - 1} more changed", file=sys.stderr)
            print(stage)


if __name__ == "__main__":
    main()
