"""Checks that the settings and names on the pages on objectives are those of the objective."""

from __future__ import annotations

import tomllib
from pathlib import Path

from agentrl.algo import Objective
from agentrl.algo.stage import AMBIGUOUS_NAMES

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "algorithms.md").read_text() + (DOCS / "objectives.md").read_text()


def test_settings_in_the_tables_are_valid() -> None:
    """Every `stage = {...}` or `stage = [...]` on the pages is accepted by the objective."""
    cells = [piece for piece in TEXT.split("`")[1::2] if "= {" in piece or "= [{" in piece]
    assert len(cells) > 6
    for cell in cells:
        data = tomllib.loads(cell.replace("…", "1.5"))
        Objective.model_validate(data)


def test_refused_names_are_real() -> None:
    for name in ("clip_ratio", "epsilon_high", "delta", "loss_type", "adv_norm", "dynamic_bs"):
        assert f"`{name}`" in TEXT and name in AMBIGUOUS_NAMES
