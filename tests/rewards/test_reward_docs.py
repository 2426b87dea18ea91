"""The tables of docs/rewards.md and docs/graders.md are true."""

import re
from pathlib import Path

import pytest

from agentrl.config import RewardSection
from agentrl_rewards.math import grade
from agentrl_rewards.runner import REWARDS

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join((DOCS / name).read_text() for name in ("rewards.md", "graders.md"))


def rows_under(heading: str) -> list[list[str]]:
    section = TEXT.split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_reward_has_a_row_at_its_module():
    rows = {
        name: names_in(row[1])[0]
        for row in rows_under("## Rewards that are there")
        for name in names_in(row[0])
    }
    assert rows == {
        name: target.split(":")[0].removeprefix("agentrl_rewards.")
        for name, target in REWARDS.items()
    }


def test_every_key_of_the_section_has_a_row_with_its_default():
    rows = rows_under("## Keys")
    assert {name for row in rows for name in names_in(row[0])} == set(RewardSection.model_fields)
    shown = {names_in(row[0])[0]: row[1] for row in rows}
    defaults = RewardSection()
    assert shown["text"] == f'`"{defaults.text}"`'
    assert shown["deadline_s"] == f"{defaults.deadline_s:g}, {defaults.max_concurrency}"


@pytest.mark.parametrize("row", rows_under("## What counts as equal in math"), ids=lambda r: r[0])
def test_what_counts_as_equal(row):
    [reference] = names_in(row[0])
    assert len(names_in(row[1])) >= 2
    for answer in names_in(row[1]):
        assert grade(f"#### {answer}", reference, equivalence="numeric").score == 1.0, answer
        assert grade(f"\\boxed{{{answer}}}", reference).score == 1.0, answer
    for answer in names_in(row[2]):
        assert grade(f"#### {answer}", reference, equivalence="numeric").score == 0.0, answer
        assert grade(f"\\boxed{{{answer}}}", reference).score == 0.0, answer
