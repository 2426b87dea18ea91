"""em and f1 against SQuAD's evaluation, restated here from its published definition."""

import functools
import json
import os
import random
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_rewards.qa import em, f1, substring
from agentrl_rewards.style import format

DATA = Path(os.environ.get("AGENTRL_DATA", Path(__file__).parents[3] / "shared" / "data"))
FILE = DATA / "squad" / "dev-v2.0-five-articles.json"


# SQuAD 2.0's evaluation, written anew from its definition and without anything of the module:
# lower, drop string.punctuation, replace \b(a|an|the)\b by a space, join what split() gives.
# Golds that normalise to nothing are dropped; a question without golds has the one gold "".


@functools.cache
def official_normal_form(text):
    excluded = set(string.punctuation)
    kept = [char for char in text.lower() if char not in excluded]
    words = re.compile(r"\b(a|an|the)\b", re.UNICODE).sub(" ", "".join(kept))
    return " ".join(words.split())


def official_tokens(text):
    return official_normal_form(text).split() if text else []


def official_golds(golds):
    return [gold for gold in golds if official_normal_form(gold)] or [""]


def official_em(prediction, golds):
    return max(
        int(official_normal_form(gold) == official_normal_form(prediction))
        for gold in official_golds(golds)
    )


def official_f1(prediction, golds):
    def one(gold):
        gold_tokens, tokens = official_tokens(gold), official_tokens(prediction)
        if len(gold_tokens) == 0 or len(tokens) == 0:
            return int(gold_tokens == tokens)
        left, same = list(gold_tokens), 0
        for token in tokens:
            if token in left:
                left.remove(token)
                same += 1
        if same == 0:
            return 0
        precision, recall = 1.0 * same / len(tokens), 1.0 * same / len(gold_tokens)
        return (2 * precision * recall) / (precision + recall)

    return max(one(gold) for gold in official_golds(golds))


PERTURBATIONS = {
    "none": lambda t, r: t,
    "article": lambda t, r: f"{r.choice(['a', 'An', 'THE', 'the a'])} {t}",
    "article inside": lambda t, r: t.replace(" ", f" {r.choice(['the', 'a'])} ", 1),
    "punctuation": lambda t, r: "".join(c + r.choice(["", "", *string.punctuation]) for c in t),
    "unicode punctuation": lambda t, r: f"“{t}”—…" if r.random() < 0.5 else t.replace(" ", "–"),
    "upper": lambda t, r: t.upper(),
    "swapped case": lambda t, r: t.swapcase(),
    "unicode case": lambda t, r: t.replace("i", "İ").replace("s", "ß").upper(),
    "unicode spaces": lambda t, r: t.replace(" ", r.choice(["\u00a0", "\u2003", "\t", "\n"])),
    "accents": lambda t, r: t.replace("a", "á").replace("o", "o\u0308"),
    "digits": lambda t, r: t + r.choice([" ２", " ٣", " ²"]),
    "dropped token": lambda t, r: " ".join(t.split()[1:]),
    "doubled token": lambda t, r: f"{t} {(t.split() or [''])[-1]}",
    "shuffled": lambda t, r: " ".join(r.sample(t.split(), len(t.split()))),
    "inside a sentence": lambda t, r: f"I think the answer is: {t}.",
    "glued article": lambda t, r: f"the{t} a-{t} {t}'s the",
    "empty": lambda t, r: r.choice(["", " ", "the", "...", "\n"]),
}


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_em_and_f1_agree_with_squad_on_five_articles(every):
    if not FILE.is_file():
        pytest.skip(f"no SQuAD rows at {FILE}; set AGENTRL_DATA")
    articles = json.loads(FILE.read_text())["data"]
    rows = [qa for a in articles for p in a["paragraphs"] for qa in p["qas"]]
    assert len(articles) == 5 and len(rows) == 1407
    chance = random.Random(0)
    num_compared = num_unanswerable = 0
    disagreements = []
    for row in rows[::every]:
        golds = [answer["text"] for answer in row["answers"]]
        num_unanswerable += row["is_impossible"]
        shown = golds or [a["text"] for a in row.get("plausible_answers", [])] or [""]
        for name, perturb in PERTURBATIONS.items():
            for prediction in dict.fromkeys(perturb(text, chance) for text in shown):
                # the golds are perturbed as well: extra ones, empty ones, another order
                variants = (golds, [perturb(gold, chance) for gold in golds], ["the", *golds[::-1]])
                for several in variants:
                    num_compared += 1
                    ours = em(prediction, several), f1(prediction, several)
                    theirs = official_em(prediction, several), official_f1(prediction, several)
                    if ours != theirs:
                        disagreements.append((name, prediction, several, ours, theirs))
    assert num_unanswerable > 500 / every and num_compared > 100_000 / every
    assert disagreements == []


WORDS = st.lists(
    st.sampled_from(["a", "the", "An", "cat", "Cat's", "—", "the.", "x-y", "\u00a0", "dog", "İ"]),
    max_size=6,
).map(" ".join)


@given(WORDS | st.text(max_size=20), st.lists(WORDS | st.text(max_size=20), max_size=4))
def test_em_and_f1_agree_with_squad_on_any_text(prediction, golds):
    assert em(prediction, golds) == official_em(prediction, golds)
    assert f1(prediction, golds) == official_f1(prediction, golds)


@pytest.mark.parametrize(
    ("text", "golds", "exact", "overlap", "part"),
    [
        ("The Normans!", ["Normans", "the Norman people"], 1, 1, 1),
        ("in the 10th century", "10th century", 0, 0.8, 1),
        ("party", "art", 0, 0, 0),
        ("", None, 1, 1, 1),
        ("the.", [], 1, 1, 1),
        ("Normandy", None, 0, 0, 0),
        ("", "Normandy", 0, 0, 0),
        ("cat cat", "cat", 0, pytest.approx(2 / 3), 1),
    ],
)
def test_by_hand(text, golds, exact, overlap, part):
    assert (em(text, golds), f1(text, golds), substring(text, golds)) == (exact, overlap, part)


def test_where_search_r1_s_scorer_says_otherwise():
    """The list in environments/search/README.md."""
    assert em("", ["", "x"]) == 0.0  # a reference without a word is left out
    assert em("", [""]) == 1.0
    assert substring("party", "art") == 0.0
    assert substring("fine art", "art") == 1.0
    assert format("<think></think><answer>x</answer>", style="search") == 0.0
    assert format("<think>so</think><answer></answer>", style="search") == 0.0
    rounds = "<think>so</think><search>q</search><information></information>"
    assert format(f"{rounds}<think>so</think><answer>x</answer>", style="search") == 1.0
