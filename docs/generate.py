"""Write the pages that are made from the code: configuration, metrics, commands.

    python docs/generate.py

`tests/test_docs.py` fails where a page is older than the code.
"""

from __future__ import annotations

import argparse
import re
import typing
from pathlib import Path
from types import UnionType
from typing import Any

from pydantic import BaseModel

from agentrl.cli import _parser
from agentrl.config import RunConfig, valid_keys
from agentrl.glossary import METRICS

HERE = Path(__file__).parent
_NOTE = "<!-- made by docs/generate.py; change what it is made from -->\n"


def configuration() -> str:
    """Every key of a run file."""
    lines = [
        _NOTE,
        "# Configuration",
        "",
        "A run is one TOML file, and every key of it can be set on the command line as",
        "`--section.key value` or `section.key=value`. Lists and tables are JSON or TOML:",
        "`--env.config '{\"digits\": 2}'` sets the same as `--env.config.digits 2`, and leaves the",
        "file's other keys. `agentrl train RUN.toml --dry-run` prints the resolved file, refusing",
        "what the run would: keys, `env.id`, `env.config` and the dialect.",
        "The keys of `[objective]` are explained with their formulas in",
        "[algorithms.md](algorithms.md).",
    ]
    section = ""
    for key, (default, text) in valid_keys().items():
        parent, _, name = key.rpartition(".")
        if parent != section:
            section = parent
            about = _section(section).__doc__ or ""
            own = "" if about == BaseModel.__doc__ else " ".join(about.split())
            lines += ["", f"## [{section}]", ""] + ([own, ""] if own else [])
            lines += ["| key | type | default | |", "|---|---|---|---|"]
        kind = _kind(_section(parent), name)
        cells = (f"`{name}`", kind, f"`{default}`", text)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _section(dotted: str) -> type[BaseModel]:
    section: Any = RunConfig
    for name in dotted.split("."):
        section = section.model_fields[name].annotation
    return section


def _kind(section: type[BaseModel], name: str) -> str:
    """A key's type and range in words."""
    field = section.model_fields[name]
    bounds = [
        f"{sign} {getattr(each, attribute)}"
        for each in field.metadata
        for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(each, attribute, None) is not None
    ]
    return ", ".join([_type(field.annotation), *bounds])


def _type(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(parts[0])
    if origin is typing.Literal:
        return " or ".join(f"`{each}`" for each in parts)
    if origin in (typing.Union, UnionType):
        return " or ".join(_type(each) for each in parts if each is not type(None))
    if origin in (list, tuple):
        return f"list of {_type(parts[0])}"
    if origin is dict or annotation is dict:
        return "table"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", "value"))


def metrics() -> str:
    """Every metric of a run."""
    lines = [
        _NOTE,
        "# Metrics",
        "",
        "A run appends one line per step to `metrics.jsonl`; these are its keys. A name in `<>`",
        "stands for several. Which to look at when a run does not learn:",
        "[troubleshooting.md](troubleshooting.md).",
    ]
    section = ""
    for name, text in METRICS.items():
        if name.split("/")[0] != section:
            section = name.split("/")[0]
            lines += ["", f"## {section}", "", "| metric | |", "|---|---|"]
        lines.append(f"| `{name}` | {text} |")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Every command and its options."""
    lines = [_NOTE, "# Command line", ""]
    for name, parser in _all_commands(_parser()):
        lines += [f"## {name}", ""]
        if parser.description:
            lines += [" ".join(parser.description.split()), ""]
        options = [each for each in parser._actions if not _is_group(each)]
        if options:
            lines += ["| option | |", "|---|---|"]
        for option in options:
            called = ", ".join(option.option_strings) or str(option.metavar or option.dest)
            if option.option_strings and option.nargs != 0:
                choices = "|".join(map(str, option.choices or ()))
                called += f" {option.metavar or choices or option.dest.upper()}"
            told = parser._get_formatter()._expand_help(option) if option.help else ""
            text = " ".join(told.split())
            lines.append(f"| `{_cell(called)}` | {_cell(text)} |")
        lines.append("")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _is_group(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def _all_commands(
    parser: argparse.ArgumentParser,
) -> typing.Iterator[tuple[str, argparse.ArgumentParser]]:
    groups = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog, parser
    for group in groups:
        for child in group.choices.values():
            yield from _all_commands(child)


PAGES = {"configuration.md": configuration, "metrics.md": metrics, "commands.md": commands}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (HERE / page).write_text(make())
