"""Chooses the forms in which a test is in a control run.

A design is a few values of a test, each with one or more other results. The forms of the test are
all combinations, the original among them. So each result of a value, the author's included, is in
equally many forms, and counting tells nothing.

    assert merge([(1, 3), (3, 5)]) == [(1, 5)]      the first 3 may be 5, the last 5 may be 4:
    assert merge([(1, 5), (3, 5)]) == [(1, 5)]
    assert merge([(1, 3), (3, 5)]) == [(1, 4)]
    assert merge([(1, 5), (3, 5)]) == [(1, 4)]
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence

from agentrl_swebench.alter import Edit

Form = tuple[Edit, ...]
"""The changes of one form; () for the original."""
Design = list[list[Edit]]
"""The other results of each value."""


def num_forms(design: Design) -> int:
    """Returns the number of forms, the original included."""
    return math.prod(1 + len(results) for results in design)


def make_design(edits: Sequence[Edit], wanted: int) -> Design:
    """Returns a design of the first changes: of so many that it has `wanted` forms, or of all."""
    values: dict[int, list[Edit]] = {}
    for edit in edits:
        if num_forms(list(values.values())) < wanted:
            values.setdefault(edit.start, []).append(edit)
    return list(values.values())


def altered_forms(design: Design) -> list[Form]:
    """Returns all forms but the original."""
    combinations = itertools.product(*([None, *results] for results in design))
    forms = [tuple(edit for edit in each if edit is not None) for each in combinations]
    return [form for form in forms if form]


def without(design: Design, forms: Collection[Form]) -> Design:
    """Returns a design with none of these altered forms, in which as few changes are left out as a
    greedy choice gives."""
    design = [[*results] for results in design]
    while wrong := [form for form in altered_forms(design) if form in forms]:
        ((worst, _),) = Counter(itertools.chain(*wrong)).most_common(1)
        design = [[edit for edit in results if edit != worst] for results in design]
    return [results for results in design if results]
