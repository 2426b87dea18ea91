"""Rewards for short free-text answers: exact match, token F1 and substring match.

Normalisation, exact match and F1 follow SQuAD (Rajpurkar et al. 2018, "Know What You Don't Know:
Unanswerable Questions for SQuAD", arXiv:1806.03822): convert to lower case, remove ASCII
punctuation, remove the articles a, an and the, collapse white space, in this order. With several
golds, the best match counts.

For an unanswerable question, with no gold (`None`, `[]`, or golds that normalise to nothing), only
an empty answer scores 1.

    em("The Normans!", ["Normans", "the Norman people"])       # 1.0
    f1("in the 10th century", "10th century")                  # 0.8
    em("", None)                                               # 1.0
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")

Golds = str | Sequence[str] | None


def normalize_answer(text: str) -> str:
    """Normalises an answer as SQuAD's evaluation does; see the module's docstring."""
    text = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(text.split())


def em(text: str, reference: Golds) -> float:
    """Returns 1.0 if the whole text equals one of the golds after normalisation, else 0.0."""
    answer = normalize_answer(text)
    return float(any(answer == gold for gold in _normalized(reference)))


def f1(text: str, reference: Golds) -> float:
    """Returns the harmonic mean of token precision and recall against the best gold, 0 to 1."""
    answer = normalize_answer(text).split()
    return max(_token_f1(answer, gold.split()) for gold in _normalized(reference))


def substring(text: str, reference: Golds) -> float:
    """Returns 1.0 if the normalised text contains a gold's tokens in sequence, else 0.0.

    Compares whole tokens, so "art" is not found in "party". For an unanswerable question, the text
    has to be empty, as for `em`.
    """
    answer = normalize_answer(text)
    golds = _normalized(reference)
    return float(any(f" {gold} " in f" {answer} " if gold else not answer for gold in golds))


def _normalized(reference: Golds) -> list[str]:
    golds = [reference] if isinstance(reference, str) else list(reference or ())
    return [gold for gold in map(normalize_answer, golds) if gold] or [""]


def _token_f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    num_same = (Counter(answer) & Counter(gold)).total()
    if num_same == 0:
        return 0.0
    precision, recall = num_same / len(answer), num_same / len(gold)
    return 2 * precision * recall / (precision + recall)
