"""`agentrl examples`: the run files and tiny models of examples/, for users without a checkout."""

from __future__ import annotations

import shutil
from importlib.metadata import distribution
from pathlib import Path

from agentrl.errors import ConfigError, DataError

_INSTALLED = "share/agentrl/examples/"
"""The folder into which a wheel puts them, below the environment's prefix."""
_CHECKOUT = Path(__file__).parents[2] / "examples"
_OURS = _CHECKOUT / "quickstart" / "run.toml"
"""Is there in a checkout. Beside an installed package, `examples` may be another project's."""


def copy_examples(out: Path) -> Path:
    """Copies every example to the new directory `out`.

    Raises:
        ConfigError: `out` exists already.
        DataError: this installation has no examples.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; name another directory with --out")
    if _OURS.is_file():
        ignored = shutil.ignore_patterns("__pycache__", "runs")
        shutil.copytree(_CHECKOUT, out, ignore=ignored)
        return out
    for name, file in _installed().items():
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return out


def example_file(name: str) -> Path:
    """Returns the path of an example's file, given its path below the examples.

    Raises:
        DataError: this installation does not have it.
    """
    if _OURS.is_file():
        return _CHECKOUT / name
    if name not in (files := _installed()):
        raise DataError(f"this installation of agentrl has no examples/{name}; install it again")
    return files[name]


def _installed() -> dict[str, Path]:
    """Returns the files of the installed wheel, by their paths below the examples."""
    files = distribution("agentrl-gym").files or ()
    found = {
        file.as_posix().partition(_INSTALLED)[2]: Path(str(file.locate()))
        for file in files
        if _INSTALLED in file.as_posix()
    }
    if not found:
        raise DataError("this installation of agentrl has no examples; install its wheel again")
    return found
