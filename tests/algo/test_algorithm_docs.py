"""Checks that the settings and names in docs/algorithms.md are those of the objective."""

from __future__ import annotations

import tomllib
from pathlib import Path

from agentrl.algo import Objective
from agentrl.algo.stage import AMBIGUOUS_NAMES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


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
