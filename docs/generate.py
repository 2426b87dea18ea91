"""Write the pages that are made from the code: configuration, metrics, commands.

    python docs/generate.py

`tests/test_docs.py` fails where a page is older than the code.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import typing
from pathlib import Path
from types import UnionType
from typing import Any

from pydantic import BaseModel

from agentrl.cli.main import _parser
from agentrl.config import RunConfig
from agentrl.config.load import FIRST_KEYS, valid_keys
from agentrl.view.glossary import METRICS

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
    keys = valid_keys()
    lines += [
        "",
        "## Keys that people set first",
        "",
        "`agentrl train --help` shows these, `--help-all` every key. The sections below have all.",
        "",
        "| key | type | default | |",
        "|---|---|---|---|",
    ]
    for key in FIRST_KEYS:
        lines.append(_row(key, key, *keys[key]))
    section = ""
    for key, (default, text) in keys.items():
        parent, _, name = key.rpartition(".")
        if parent != section:
            section = parent
            about = _section(section).__doc__ or ""
            own = "" if about == BaseModel.__doc__ else " ".join(about.split())
            lines += ["", f"## [{section}]", ""] + ([own, ""] if own else [])
            lines += ["| key | type | default | |", "|---|---|---|---|"]
        lines.append(_row(key, name, default, text))
    return "\n".join(lines) + "\n"


def _row(key: str, shown: str, default: str, text: str) -> str:
    parent, _, name = key.rpartition(".")
    cells = (f"`{shown}`", _kind(_section(parent), name), f"`{default}`", text)
    return "| " + " | ".join(map(_cell, cells)) + " |"


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


_SWEBENCH = """\
# SWE-bench

An agent fixes real bugs by shell commands in the repository's container, and the unmodified
official harness grades its change in a fresh one. This needs a Docker engine.

```
pip install -e ".[swebench]"
agentrl swebench doctor --dataset verified               # engine, disk, images, rows
agentrl swebench pull --dataset verified --scrub         # images ahead of a run
agentrl eval examples/swebench/eval.toml --inference.urls http://localhost:8000 --out results
agentrl swebench eval --dataset verified --predictions results --out results    # or preds.jsonl
agentrl swebench validate --dataset D.jsonl --audit --out valid.jsonl    # before training
agentrl swebench export --dataset verified --out tasks   # as Harbor's tasks: harbor.md
agentrl train examples/swebench/run.toml
```

In training, the reward is the harness' verdict under the policy `strict`, confirmed by a control
run in which a random part of the tests is altered. A patch that forges results passes an altered
test or fails an unaltered one, and gets reward 0. `environments/swebench/README.md` explains how
this works, which attacks were tried and which gaps are known.

## Rows

A dataset is an alias (`full`, `lite`, `verified`, `multilingual`, `multimodal`, `swe-gym`, ...), a
Hugging Face name, or a `.jsonl`, `.json` or `.parquet` file. A row with `image` or `eval_script` is
a row of SWE-bench 5 and is used as it is; other rows are recognised by their columns. Instances
that rows of SkyRL and NeMo-Gym wrap are taken out. The adapters below were tested on rows made in
these forms; no real row was converted and no real image run, but `validate` tells for each instance
whether it can be graded. `doctor` names rows whose log parser the harness lacks and rows without a
test to fix.

"""
_SWEBENCH_KEYS = """\
A refused row is an error that names its place in the file, before anything is started.

## Keys of `env.config`

"""


def swebench() -> str:
    """Returns the page on SWE-bench: first commands, rows that can be read, and keys."""
    from agentrl_swebench import adapters
    from agentrl_swebench.env import SWEBenchConfig

    lines = [_NOTE, *_SWEBENCH.splitlines(), "| rows of | |", "|---|---|"]
    for kind, adapter in adapters.ADAPTERS.items():
        about = (inspect.getdoc(adapter) or "").partition("\n\n")[0]
        lines.append(f"| {kind} | {_cell(' '.join(about.split()))} |")
    for kind, message in adapters.REFUSED.items():
        lines.append(f"| {kind} | refused: {_cell(message.format(instance='an instance'))} |")
    lines += ["", *_SWEBENCH_KEYS.splitlines(), "| key | type | default | |", "|---|---|---|---|"]
    for name, field in SWEBenchConfig.model_fields.items():
        default = "" if field.is_required() else f"`{json.dumps(field.default)}`"
        about = " ".join((field.description or "").split())
        lines.append(f"| `{name}` | {_kind(SWEBenchConfig, name)} | {default} | {_cell(about)} |")
    return "\n".join(lines) + "\n"


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


PAGES = {
    "configuration.md": configuration,
    "metrics.md": metrics,
    "commands.md": commands,
    "swebench.md": swebench,
}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (HERE / page).write_text(make())
