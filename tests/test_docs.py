"""The docs list exactly what exists."""

import importlib.util
import re
from pathlib import Path

import pytest

from agentrl.config import valid_keys
from agentrl.view.glossary import METRICS, meaning

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", sorted(generator().PAGES))
def test_pages_made_from_the_code_are_up_to_date(page):
    made = generator().PAGES[page]()
    assert (DOCS / page).read_text() == made, "run python docs/generate.py"


def test_a_person_can_read_the_pages():
    made = generator()
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *ROOT.glob("environments/*/README.md")]
    words = {page.name: made.hand_words(page) for page in pages}
    assert sum(words.values()) <= 35_000, "words by hand: cut, or make a page of the code"
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_metric_named_in_the_code_has_a_meaning():
    sections = {name.split("/")[0] for name in METRICS}
    named = set()
    for path in (ROOT / "agentrl").rglob("*.py"):
        named |= set(re.findall(r'"([a-z]+/[a-z_]+)"', path.read_text()))
    named = {name for name in named if name.split("/")[0] in sections}
    assert len(named) > 50
    assert not named - METRICS.keys() - {"train/loss"}, "of the example in tracking.py"


def test_a_name_with_a_part_of_its_own_has_the_meaning_of_its_kind():
    assert meaning("env/score") == METRICS["env/<name>"]
    assert meaning("rollout/staleness_fraction/3") == METRICS["rollout/staleness_fraction/<steps>"]
    assert meaning("reward/mean") == METRICS["reward/mean"]
    assert meaning("nonsense/mean") is None


def pages():
    return [ROOT / "README.md", *DOCS.glob("*.md"), *ROOT.glob("examples/**/*.md")]


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not re.match(r"https?:|mailto:", target):
            assert (page.parent / target).exists(), target


def test_keys_that_the_docs_name_exist():
    """`--section.key` and `section.key` of a section of the run file."""
    keys = set(valid_keys())
    sections = "|".join(sorted({key.split(".")[0] for key in keys}))
    parents = {key.rpartition(".")[0] for key in keys}
    for page in pages():
        if page.name == "changelog.md":  # it names keys that are gone
            continue
        text = re.sub(r"```python.*?```", "", page.read_text(), flags=re.DOTALL)
        if page.name == "migration.md" or page.name.startswith(
            "from_"
        ):  # its left column has other trainers' names
            text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
        for name in re.findall(rf"(?:`|--)((?:{sections})(?:\.[a-z_0-9]+)+)(?=[`\s=])", text):
            # Below a key that holds a table, such as env.config, the names are another's.
            below = any(name.startswith(f"{key}.") for key in keys)
            known = below or {name, f"objective.{name}"} & (keys | parents)
            assert known or re.search(r"\.(py|md|toml|jsonl?|safetensors)$", name), (
                f"{page.name}: {name}"
            )
