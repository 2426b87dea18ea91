"""docs/algorithms.md is made from docstrings, from the presets and from what own functions get.

`AGENTRL_WRITE_DOCS=1 pytest tests/algo/test_algorithm_docs.py` makes it.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from agentrl.algo import PRESETS, Objective
from agentrl.algo.explain import NOTATION
from agentrl.algo.presets import PRESET_DATA
from agentrl.algo.stage import AMBIGUOUS_NAMES, Stage, choices_of, summary_of
from agentrl.algo.user_functions import ADVANTAGE_INPUTS, LOSS_INPUTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


def stages_in(annotation: object) -> list[type[Stage]]:
    if isinstance(annotation, type) and issubclass(annotation, Stage):
        return [annotation]
    return [stage for inner in get_args(annotation) for stage in stages_in(inner)]


def choices(stage: type[Stage]) -> Iterator[tuple[str, str]]:
    for key in stage.model_fields:
        yield from ((f"{key} = {name}", text) for name, text in choices_of(stage, key).items())


def stages() -> str:
    """Each stage with its summary, and a line for each of its choices."""
    parts = ["```text", NOTATION, "```"]
    for name, field in Objective.model_fields.items():
        kinds = stages_in(field.annotation)
        if not kinds:
            continue
        rows = []
        if len(kinds) > 1:
            for kind in kinds:
                rows.append((f"kind = {kind.model_fields['kind'].default}", summary_of(kind)))
                rows += [(f"  {key}", text) for key, text in choices(kind)]
            summary = " ".join((field.description or "").split())
        else:
            rows, summary = list(choices(kinds[0])), f"{summary_of(kinds[0])}."
        parts += ["", f"### `{name}`", "", re.sub(r"([*<])", r"\\\1", summary)]
        if rows:
            width = max(len(key) for key, _ in rows)
            parts += ["", "```text", *(f"{key:<{width}}  {text}" for key, text in rows), "```"]
    return "\n".join(parts)


def written(value: object) -> str:
    """As in TOML."""
    if isinstance(value, Stage):
        value = value.model_dump()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value) if isinstance(value, str | bool) else f"{value:g}"


def keys_of(preset: str) -> Iterator[str]:
    """Returns the dotted keys that a preset sets differently from an objective without a preset."""
    for name in Objective.model_fields:
        theirs, default = getattr(PRESETS[preset], name), getattr(Objective(), name)
        if isinstance(theirs, list) and theirs:
            yield f"{name} = {written(theirs)}"
        elif isinstance(theirs, Stage) and theirs != default:
            if type(theirs) is not type(default):
                yield f'{name}.kind = "{theirs.kind}"'  # type: ignore[attr-defined]
                default = type(theirs)()
            for key, value in theirs:
                if value != getattr(default, key):
                    yield f"{name}.{key} = {written(value)}"


def presets() -> str:
    """Each preset with the keys that it sets and the notes that `agentrl algo show` prints."""
    rows = ["| preset | sets | what it is, and when to choose it |", "|---|---|---|"]
    for name, note in PRESET_DATA.items():
        keys = ", ".join(f"`{key}`" for key in keys_of(name)) or "the defaults"
        rows.append(f"| `{name}` | {keys} | {note.title}. {note.when} {'; '.join(note.sources)}. |")
    return "\n".join(rows)


def inputs() -> str:
    """Returns the inputs that a loss and an advantage may ask for."""
    rows = ["| parameter | what | may be asked for by |", "|---|---|---|"]
    for name, what in {**LOSS_INPUTS, **ADVANTAGE_INPUTS}.items():
        by = [who for who, offered in OFFERED.items() if name in offered]
        rows.append(f"| `{name}` | {what} | {', '.join(by)} |")
    return "\n".join(rows)


OFFERED = {"loss": LOSS_INPUTS, "advantage": ADVANTAGE_INPUTS}
GENERATED = {"stages": stages, "presets": presets, "inputs": inputs}


@pytest.mark.parametrize("name", GENERATED)
def test_the_page_is_what_the_code_says(name: str) -> None:
    begin, end = f"<!-- {name}: made by the tests -->\n\n", f"\n\n<!-- end of {name} -->"
    before, _, rest = PAGE.read_text().partition(begin)
    there, found, after = rest.partition(end)
    assert found
    if "AGENTRL_WRITE_DOCS" in os.environ:
        PAGE.write_text(f"{before}{begin}{GENERATED[name]()}{end}{after}")
    else:
        assert there == GENERATED[name](), f"AGENTRL_WRITE_DOCS=1 pytest {__file__}"


def test_settings_in_the_tables_are_valid() -> None:
    """Every `stage = {...}` or `stage = [...]` in the page is accepted by the objective."""
    text = PAGE.read_text()
    cells = [piece for piece in text.split("`")[1::2] if "= {" in piece or "= [{" in piece]
    assert len(cells) > 10
    for cell in cells:
        data = tomllib.loads(cell.replace("…", "1.5"))
        Objective.model_validate(data)


def test_refused_names_are_real() -> None:
    text = PAGE.read_text()
    for name in ("clip_ratio", "epsilon_high", "delta", "loss_type", "adv_norm", "dynamic_bs"):
        assert f"`{name}`" in text and name in AMBIGUOUS_NAMES
