"""`agentrl examples`: the run files and tiny models of examples/, for whoever has no checkout."""

from __future__ import annotations

import shutil
from importlib.metadata import distribution
from pathlib import Path

from agentrl.errors import ConfigError, DataError

_INSTALLED = "share/agentrl/examples/"
"""Where a wheel puts them, below the environment's prefix."""


def copy_examples(out: Path) -> Path:
    """Copy every example to a directory of its own.

    Raises:
        ConfigError: `out` exists already.
        DataError: this installation has no examples.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; name another directory with --out")
    beside = Path(__file__).parents[1] / "examples"
    if (beside / "quickstart" / "run.toml").is_file():
        ignored = shutil.ignore_patterns("__pycache__", "runs")
        shutil.copytree(beside, out, ignore=ignored)
        return out
    files = [
        each for each in distribution("agentrl-gym").files or () if _INSTALLED in each.as_posix()
    ]
    if not files:
        raise DataError("this installation of agentrl has no examples; install its wheel again")
    for file in files:
        target = out / file.as_posix().partition(_INSTALLED)[2]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(file.locate()), target)
    return out
