"""Write the pages, and parts of pages, that are made from the code.

    python docs/generate.py

`tests/test_docs.py` fails where a page is older than the code.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any

from pydantic import BaseModel

from agentrl.algo import PRESETS, Objective
from agentrl.algo.presets import PRESET_DATA
from agentrl.algo.stage import Stage
from agentrl.algo.user_functions import ADVANTAGE_INPUTS, LOSS_INPUTS
from agentrl.cli.main import add_plugins, app
from agentrl.config import RunConfig
from agentrl.config.load import FIRST_KEYS, valid_keys
from agentrl.config.peers import Row, peers
from agentrl.config.toml_text import toml_value
from agentrl.env.check import CHECKS
from agentrl.env.registry import resolve
from agentrl.env.server.app import make_app
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
        "[algorithms.md](algorithms.md). A section opens at a click.",
        "",
        "```",
        "agentrl train RUN.toml --rollout.group_size 16 --dry-run",
        "agentrl train --help-all",
        "```",
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
    sections: dict[str, list[str]] = {}
    for key, (default, text) in keys.items():
        parent, _, name = key.rpartition(".")
        sections.setdefault(parent, []).append(_row(key, name, default, text))
    for section, rows in sections.items():
        about = _section(section).__doc__ or ""
        own = "" if about == BaseModel.__doc__ else " ".join(about.split())
        number = f"{len(rows)} key{'s' * (len(rows) > 1)}"
        lines += ["", f"## [{section}]", ""] + ([own, ""] if own else [])
        lines += [f'<details markdown="1"><summary>{number}</summary>', ""]
        lines += ["| key | type | default | |", "|---|---|---|---|", *rows, "", "</details>"]
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


def filled(page: str, **parts: Callable[[], str]) -> str:
    """Returns a page written by hand, its parts between markers made of the code."""
    text = (HERE / page).read_text()
    for name, make in parts.items():
        begin, end = f"<!-- {name}: made by docs/generate.py -->\n\n", f"\n\n<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"{page} has no part {name}"
        text = f"{before}{begin}{make()}{end}{after}"
    return text


def hand_words(page: Path) -> int:
    """Counts the words of a page that no program writes, its code blocks and tables included."""
    text = re.sub(r"<!-- [^>]*made by .*?<!-- end[^>]*-->", "", page.read_text(), flags=re.DOTALL)
    text = text.partition("<!-- below: written by ")[0]
    return 0 if text.startswith(_NOTE) or page.name in NOT_COUNTED else len(text.split())


NOT_COUNTED = ("changelog.md", "options.md")
"""The changelog, and a page that tests/test_options.py writes."""


def environment_keys() -> str:
    """Every key of `env.config`, by environment."""
    lines = [
        _NOTE,
        "# Keys of the environments",
        "",
        "The keys of `env.config`: `--env.config.digits 2` on the command line, `config = {digits",
        "= 2}` in a run file. This prints any environment's, yours included:",
        "",
        "```",
        "agentrl env info math",
        "```",
    ]
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    for name, target in project["entry-points"]["agentrl.environments"].items():
        config = resolve(target).Config
        lines += ["", f"## {name}", "", "| key | type | default | |", "|---|---|---|---|"]
        lines += _environment_rows(config, "")
    return "\n".join(lines) + "\n"


def _environment_rows(config: type[BaseModel], before: str) -> list[str]:
    rows = []
    for name, field in config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            rows += _environment_rows(kind, f"{before}{name}.")
            continue
        default = "" if field.is_required() else json.dumps(field.default, default=str)
        quote = "" if not default else "``" if "`" in default else "`"
        about = _cell(" ".join((field.description or "").split()))
        cells = f"`{before}{name}`", _kind(config, name), f"{quote}{default}{quote}", about
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _instances() -> str:
    """Returns which rows of data sets the SWE-bench environment reads, and which it refuses."""
    from agentrl_swebench import adapters

    lines = ["| rows of | |", "|---|---|"]
    for kind, adapter in adapters.ADAPTERS.items():
        about = (inspect.getdoc(adapter) or "").partition("\n\n")[0]
        lines.append(f"| {kind} | {_cell(' '.join(about.split()))} |")
    for kind, message in adapters.REFUSED.items():
        lines.append(f"| {kind} | refused: {_cell(message.format(instance='an instance'))} |")
    return "\n".join(lines)


def _checks() -> str:
    """Returns what each check of `agentrl env check` states."""
    rows = ["| check | an environment that passes |", "|---|---|"]
    for name, check in CHECKS.items():
        about = (inspect.getdoc(check) or "").partition("\n\n")[0]
        rows.append(f"| `{name}` | {_cell(' '.join(about.split()))} |")
    return "\n".join(rows)


def _calls() -> str:
    """Returns the calls of the environment server, with their parameters and bodies."""
    described = make_app([]).openapi()
    schemas = described["components"]["schemas"]
    rows = ["| call | parameters or body | |", "|---|---|---|"]
    for path, methods in described["paths"].items():
        for method, call in methods.items():
            names = [each["name"] for each in call.get("parameters", []) if each["in"] != "path"]
            body = call.get("requestBody", {}).get("content", {}).get("application/json", {})
            if "$ref" in body.get("schema", {}):
                names += schemas[body["schema"]["$ref"].rpartition("/")[2]]["properties"]
            shown = ", ".join(f"`{name}`" for name in names)
            about = " ".join(call.get("description", "").split())
            rows.append(f"| `{method.upper()} {path}` | {shown} | {_cell(about)} |")
    return "\n".join(rows)


_NOTATION = """\
R is a trajectory's reward, r_t the part of it placed on a token, G the return, A the advantage, r
the ratio, l a token's loss, L the loss; sg[x] is x without gradient. n counts the trained tokens of
a row, N those of the step, B the rows that have any. Policies: mu (the engine, at sampling), old
(the trainer, before the update), pi (live), ref (the reference), T (a teacher)."""


def _summary_of(stage: type[Stage]) -> str:
    """Returns the first paragraph of the class docstring as one line, without its full stop."""
    return " ".join((inspect.getdoc(stage) or "").split("\n\n")[0].split()).rstrip(".")


def _choices_of(stage: type[Stage], key: str) -> dict[str, str]:
    """Returns choice -> formula from the lines of a key's help, without their full stops."""
    choices: dict[str, str] = {}
    current = None
    known = typing.get_args(stage.model_fields[key].annotation)
    for line in (stage.model_fields[key].description or "").splitlines():
        name, colon, meaning = line.strip().partition(": ")
        if colon and name in known:
            current = name
            choices[current] = meaning
        elif current:
            choices[current] += f" {line.strip()}"
    return {name: text.strip().rstrip(".") for name, text in choices.items()}


def _stages_in(annotation: object) -> list[type[Stage]]:
    if isinstance(annotation, type) and issubclass(annotation, Stage):
        return [annotation]
    return [stage for inner in typing.get_args(annotation) for stage in _stages_in(inner)]


def _choices(stage: type[Stage]) -> typing.Iterator[tuple[str, str]]:
    for key in stage.model_fields:
        yield from ((f"{key} = {name}", text) for name, text in _choices_of(stage, key).items())


def _stages() -> str:
    """Each stage with its summary, and a line for each of its choices."""
    parts = ["```text", _NOTATION, "```"]
    for name, field in Objective.model_fields.items():
        kinds = _stages_in(field.annotation)
        if not kinds:
            continue
        rows = []
        if len(kinds) > 1:
            for kind in kinds:
                rows.append((f"kind = {kind.model_fields['kind'].default}", _summary_of(kind)))
                rows += [(f"  {key}", text) for key, text in _choices(kind)]
            summary = " ".join((field.description or "").split())
        else:
            rows, summary = list(_choices(kinds[0])), f"{_summary_of(kinds[0])}."
        parts += ["", f"### `{name}`", "", re.sub(r"([*<])", r"\\\1", summary)]
        if rows:
            width = max(len(key) for key, _ in rows)
            parts += ["", "```text", *(f"{key:<{width}}  {text}" for key, text in rows), "```"]
    return "\n".join(parts)


def _written(value: object) -> str:
    """As in TOML."""
    if isinstance(value, Stage):
        value = value.model_dump()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value) if isinstance(value, str | bool) else f"{value:g}"


def _keys_of(preset: str) -> typing.Iterator[str]:
    """Returns the dotted keys that a preset sets differently from an objective without a preset."""
    for name in Objective.model_fields:
        theirs, default = getattr(PRESETS[preset], name), getattr(Objective(), name)
        if isinstance(theirs, list) and theirs:
            yield f"{name} = {_written(theirs)}"
        elif isinstance(theirs, Stage) and theirs != default:
            if type(theirs) is not type(default):
                yield f'{name}.kind = "{theirs.kind}"'
                default = type(theirs)()
            for key, value in theirs:
                if value != getattr(default, key):
                    yield f"{name}.{key} = {_written(value)}"


def _presets() -> str:
    """Each preset with the keys that it sets and its notes."""
    rows = ["| preset | sets | what it is, and when to choose it |", "|---|---|---|"]
    for name, note in PRESET_DATA.items():
        keys = ", ".join(f"`{key}`" for key in _keys_of(name)) or "the defaults"
        rows.append(f"| `{name}` | {keys} | {note.title}. {note.when} {'; '.join(note.sources)}. |")
    return "\n".join(rows)


def _inputs() -> str:
    """Returns the inputs that a loss and an advantage may ask for."""
    offered_to = {"loss": LOSS_INPUTS, "advantage": ADVANTAGE_INPUTS}
    rows = ["| parameter | what | may be asked for by |", "|---|---|---|"]
    for name, what in {**LOSS_INPUTS, **ADVANTAGE_INPUTS}.items():
        by = [who for who, offered in offered_to.items() if name in offered]
        rows.append(f"| `{name}` | {what} | {', '.join(by)} |")
    return "\n".join(rows)


def metrics() -> str:
    """Every metric of a run."""
    lines = [
        _NOTE,
        "# Metrics",
        "",
        "A run appends one line per step to `metrics.jsonl`; these are its keys. A name in `<>`",
        "stands for several. Which to look at when a run does not learn:",
        "[troubleshooting.md](troubleshooting.md).",
        "",
        "```",
        "agentrl view runs/quickstart          # their curves",
        "```",
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
    add_plugins(app)
    _, head, text = app.generate_docs().partition("## Table of Contents")
    text = re.sub(r"```console\n(.*)\n```", r"`\1`", text)  # a pattern, and no command to run
    return f"{_NOTE}\n# Command line\n\n{head}{text}".rstrip() + "\n"


def _by_value(row: Row) -> list[str]:
    """Returns what each value of a setting is here: one key for all values, or keys for each."""
    mine = {theirs: keys for theirs, keys in row.values.items() if keys}
    keys = {key for each in mine.values() for key in each}
    if len(keys) > 1 or any(len(each) > 1 for each in mine.values()) or len(mine) < 2:
        return [
            ", ".join(f"`{key} = {toml_value(value)}`" for key, value in each.items())
            + f" for `{theirs}`"
            for theirs, each in mine.items()
        ]
    renamed: dict[str, list[str]] = {}
    for theirs, each in mine.items():
        (value,) = each.values()
        if value != theirs:
            renamed.setdefault(toml_value(value), []).append(f"`{theirs}`")
    renames = (f"{', '.join(theirs)} is `{value}`" for value, theirs in renamed.items())
    return [f"`{keys.pop()}`", *renames]


def peer(name: str) -> str:
    """Returns the page of another trainer: what its settings are called here."""
    found = peers()[name]
    lines = [
        _NOTE,
        f"# Coming from {found.name}",
        "",
        "```",
        f"agentrl import FILE --from {name} --out run.toml" + (" --prove" if name == "trl" else ""),
        "```",
        "",
        "reads a script or configuration without running it, and writes a run file; what it does",
        f"not take stands at its end. It goes by this table, with names of {found.version}.",
        found.about,
        *(
            ["One script, end to end: [switching from TRL](switching_from_trl.md)."]
            * (name == "trl")
        ),
        "",
    ]
    of_cell: dict[str, list[str]] = {}
    for row in found.rows.values():
        keys = [f"`{key}`" for key in (row.to, *row.also) if key]
        needs = [f"only with `{row.needs}`"] if row.needs else []
        ours = [", ".join(keys), *_by_value(row), row.note, *needs]
        of_cell.setdefault("; ".join(filter(None, ours)), []).append(f"`{row.theirs}`")
    lines += [f"|{found.name}|agentrl|", "|---|---|"]
    lines += [f"|{_cell(', '.join(theirs))}|{_cell(ours)}|" for ours, theirs in of_cell.items()]
    if found.defaults:
        mine = ", ".join(f"`{key} = {toml_value(value)}`" for key, value in found.defaults.items())
        lines += ["", f"Its defaults that an imported run file states: {mine}."]
    return "\n".join(lines) + "\n"


PAGES = {
    **{f"from_{name.replace('-', '_')}.md": partial(peer, name) for name in peers()},
    "configuration.md": configuration,
    "metrics.md": metrics,
    "commands.md": commands,
    "environment_keys.md": environment_keys,
    "environments.md": partial(filled, "environments.md", checks=_checks),
    "wire.md": partial(filled, "wire.md", calls=_calls),
    "swebench.md": partial(filled, "swebench.md", rows=_instances),
    "algorithms.md": partial(
        filled, "algorithms.md", stages=_stages, presets=_presets, inputs=_inputs
    ),
}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (HERE / page).write_text(make())
