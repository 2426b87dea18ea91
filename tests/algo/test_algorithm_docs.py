"""docs/algorithms.md says what the presets compute."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from agentrl.algo import PRESETS, Objective, describe
from agentrl.algo.objective import AMBIGUOUS_NAMES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_stands_there_with_its_formulas_and_sources(name: str) -> None:
    _, _, after = PAGE.read_text().partition(f"### `{name}`\n")
    section = after.partition("\n## ")[0].partition("\n### ")[0]
    description = describe(PRESETS[name])
    for stage, formula in description.stages:
        assert any(line.split(maxsplit=1) == [stage, formula] for line in section.splitlines()), (
            f"{name}: {stage} should read {formula!r}"
        )
    for part in (description.title, description.when, *description.sources):
        assert part in section
    for field in description.needs:
        assert f"`{field}`" in section


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
