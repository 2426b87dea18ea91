"""em and f1 against SQuAD's evaluation, restated here from its published definition."""

import functools
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_rewards.qa import em, f1, substring
from agentrl_rewards.style import format

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
