"""Precision and recall of the math grader on a table of labelled pairs."""

from __future__ import annotations

import asyncio
import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import GraderError
from agentrl_rewards.math import grade_async

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Pair:
    kind: str
    right: bool
    reference: str
    answer: str


def read_pairs(name: str) -> list[Pair]:
    with open(DATA / f"math_{name}.tsv", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    return [Pair(kind, label == "1", reference, answer) for kind, label, reference, answer in rows]


def judge(pairs: list[Pair], deadline_s: float = 20.0) -> tuple[float, float, list[str]]:
    """Returns precision, recall, and the pairs that were judged otherwise than labelled. A grader
    that failed counts as a score of 0."""

    free = asyncio.Semaphore(4)  # a check's wait for a worker is bounded

    async def score(pair: Pair) -> float | None:
        text = f"So it is \\boxed{{{pair.answer}}}."
        async with free:
            try:
                return (await grade_async(text, pair.reference, deadline_s=deadline_s)).score
            except GraderError as error:
                print(error, file=sys.stderr)
                return None

    async def score_all() -> list[float | None]:
        return await asyncio.gather(*map(score, pairs))

    scores = asyncio.run(score_all())
    hits = sum(bool(score) and pair.right for score, pair in zip(scores, pairs, strict=True))
    num_ones = sum(map(bool, scores))
    errors = [
        f"{pair.kind}: {pair.answer} for {pair.reference} is "
        f"{'right' if pair.right else 'wrong'} and scored {score}"
        for score, pair in zip(scores, pairs, strict=True)
        if score is None or bool(score) != pair.right
    ]
    return hits / num_ones, hits / sum(pair.right for pair in pairs), errors
