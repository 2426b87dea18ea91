"""`agentrl env init`: makes a project from a template.

Templates are working projects with the names my-env, my_env and MyEnv, which are replaced in the
copy. `templates/` has a folder for each, and `common` with the files that all projects have. The
Dockerfile is the one of `env build`.
"""

from __future__ import annotations

import keyword
import re
import sys
import tempfile
from pathlib import Path

from agentrl.errors import ConfigError

TEMPLATES = Path(__file__).with_name("templates")
COMMON = "common"
DOCKERFILE = Path(__file__).parent / "container" / "Dockerfile"
_TAKEN = {
    "agentrl",
    "agentrl-gym",
    "test",
    "tests",
    "env",
    "environment",
    "task",
    "action",
    "tool-call",
}


def templates() -> list[str]:
    """Returns the names of the templates, sorted."""
    return sorted(each.name for each in TEMPLATES.iterdir() if each.is_dir() if each.name != COMMON)


def make_project(name: str, *, template: str = "tool", path: Path = Path()) -> Path:
    """Writes a project to the folder `path/name` and returns the folder.

    Args:
        name: the name of the project and the environment, such as `word-game`; then the package is
            `word_game` and the class `WordGame`.

    Raises:
        ConfigError: there is no such template, the name is malformed or taken, or the folder
            exists or cannot be written.
    """
    if template not in templates():
        raise ConfigError(f"no template '{template}'; choose one of {', '.join(templates())}")
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise ConfigError(
            f"'{name}' cannot be the name of an environment: write lower-case letters, digits and "
            "single hyphens, beginning with a letter, as in word-game"
        )
    identifier, module = name.replace("_", "-"), name.replace("-", "_")
    if module in sys.stdlib_module_names or keyword.iskeyword(module) or identifier in _TAKEN:
        raise ConfigError(f"'{name}' is a name in Python or agentrl already; choose another")
    folder = path / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another name or --path")
    names = {
        "my-env": identifier,
        "my_env": module,
        "MyEnv": "".join(part.capitalize() for part in identifier.split("-")),
    }

    def rename(text: str) -> str:
        return re.sub("|".join(names), lambda match: names[match[0]], text)

    files = {
        file.relative_to(root): file
        for root in (TEMPLATES / COMMON, TEMPLATES / template)
        for file in root.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    files[Path("Dockerfile")] = DOCKERFILE
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Written elsewhere and then renamed, so that the project is never there in part.
        with tempfile.TemporaryDirectory(dir=path, prefix=".agentrl-") as aside:
            made = Path(aside) / name
            for copy, source in files.items():
                target = made / rename(str(copy))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(rename(source.read_text(encoding="utf-8")), encoding="utf-8")
            made.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    return folder
