"""Every option of tests/options.toml: it loads, runs, or is refused in the words that the row says.

python tests/test_options.py          prints the table: each option with what shows it
python tests/test_options.py --write  writes docs/options.md
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config import RunConfig, load_config
from agentrl.config.load import apply_overrides
from agentrl.errors import ConfigError

ROOT = Path(__file__).parents[1]
ROWS: list[dict[str, str]] = tomllib.loads(Path(__file__).with_name("options.toml").read_text())[
    "option"
]
STATES = {"works": "yes", "instead": "another way", "not yet": "not yet"}
PAGE = ROOT / "docs" / "options.md"
RUN = ROOT / "examples" / "quickstart" / "run.toml"


def loaded(overrides: list[str]) -> RunConfig:
    return load_config({"model": {"path": "m"}}, overrides)


def require_held(asked: Any, found: Any, key: str) -> None:
    """
    Raises:
        AssertionError: the configuration has another value than was asked for.
    """
    if isinstance(asked, dict):
        for name, value in asked.items():
            require_held(value, found[name], f"{key}.{name}")
    elif isinstance(asked, list):
        for number, value in enumerate(asked):
            require_held(value, found[number], f"{key}.{number}")
    elif isinstance(found, list):  # written without brackets
        assert ",".join(map(str, found)) == str(asked), key
    else:
        assert found == asked, key


def show(row: dict[str, str]) -> None:
    """Do what shows that a row is true.

    Raises:
        AssertionError: it is not.
    """
    assert row.keys() & {"run", "command", "test"}, "nothing shows it"
    assert row.get("state", "works") in STATES
    assert row.get("state", "works") == "works" or "here" in row, "it does not say what instead"
    if "refuses" in row:
        with pytest.raises(ConfigError, match=re.escape(row["refuses"])):
            loaded(shlex.split(row["run"]))
    elif "run" in row:
        overrides = shlex.split(row["run"])
        asked: dict[str, Any] = {}
        apply_overrides(asked, overrides)
        require_held(asked, loaded(overrides).model_dump(mode="json"), "")
    if "command" in row:
        words = [str(RUN) if word == "RUN.toml" else word for word in shlex.split(row["command"])]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(ROOT):
            assert main(words) == 0
    if "test" in row:
        path, _, name = row["test"].partition("::")
        assert not name or re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M)
        assert (ROOT / path).is_file()


def shown_by(row: dict[str, str]) -> list[str]:
    """Returns the commands of a row."""
    commands = [f"agentrl {row['command']}"] if "command" in row else []
    if "run" in row:
        commands.append(f"agentrl train RUN.toml {row['run']}")
    return commands + ([f"pytest {row['test']}"] if "test" in row else [])


def page() -> str:
    counts = Counter(row.get("state", "works") for row in ROWS)
    lines = [
        "# Options of other trainers, one by one",
        "",
        f"{len(ROWS)} options of slime, TRL, Unsloth, Search-R1, SSR-GRPO and AReaL that users who "
        f"come from there look for: {counts['works']} are there, {counts['instead']} another way, "
        f"{counts['not yet']} "
        "not yet. [migration.md](migration.md) has the names key by key. This page is made by "
        "`python tests/test_options.py --write` from `tests/options.toml`; a test loads or runs "
        "every row.",
    ]
    peer = ""
    for row in ROWS:
        if row["peer"] != peer:
            peer = row["peer"]
            more = "\n## slime, rollouts\n" if f"\n## {peer}\n" in lines else f"\n## {peer}\n"
            lines += [more, "| option | there | here | shown by |", "|---|---|---|---|"]
        state, here = row.get("state", "works"), row.get("here", "")
        shown = "<br>".join(f"`{command}`" for command in shown_by(row)).replace("|", "\\|")
        lines.append(f"| `{row['name']}` | {STATES[state]} | {here} | {shown} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['peer']} {row['name']}")
def test_option(row: dict[str, str]) -> None:
    show(row)


def test_the_page_is_made_of_the_rows() -> None:
    assert PAGE.read_text() == page(), "run python tests/test_options.py --write"


def test_every_flag_has_a_row_in_the_migration_page() -> None:
    pages = [ROOT / "docs" / "migration.md", *sorted((ROOT / "docs").glob("from_*.md"))]
    table = [row for page in pages for row in re.findall(r"^\|(.+)\|$", page.read_text(), re.M)]
    known = {
        flag
        for line in table
        for span in re.findall(r"`([^`]+)`", line)
        for flag in re.findall(r"[\w-]+", span)
    }
    flag = r"(?<![\w-])(--[a-z][a-z_-]+|[a-z]+_[a-z_0-9]+)"
    flags = {found for row in ROWS for found in re.findall(flag, row["name"])}
    assert len(flags) > 100
    assert not sorted(flags - known), "give them a row in agentrl/config/peers.toml"


def test_a_wrong_row_is_found() -> None:
    for row in (
        {"run": "--rollout.group_sise 4"},
        {"run": "--model.device npu", "refuses": "other words"},
        {"command": "train nowhere.toml --dry-run"},
        {"test": "tests/test_options.py::test_that_is_not_there"},
        {"run": "--rollout.group_size 4", "state": "instead"},
        {},
    ):
        with pytest.raises((AssertionError, ConfigError)):
            show(row)
    with pytest.raises(AssertionError, match="group_size"):
        require_held({"group_size": 4}, {"group_size": 8}, "")


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
        raise SystemExit
    wrong = 0
    for each in ROWS:
        try:
            show(each)
            said = STATES[each.get("state", "works")]
        except Exception as error:
            said, wrong = f"WRONG: {error}", wrong + 1
        print(f"{each['peer']:20} {each['name'][:60]:60} {said}")
        for command in shown_by(each):
            print(f"{'':20} {command}")
    print(f"{len(ROWS)} options, {wrong} wrong; {Counter(e.get('state', 'works') for e in ROWS)}")
    raise SystemExit(wrong > 0)
