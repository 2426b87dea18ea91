"""Measures how well altered values can be told from those that authors of tests wrote.

    python benchmarks/swe_attacks/told_apart.py FOLDER ...

A patch that sees a test beside its altered forms may judge by the values which one is the
original. This reads `test_*.py` below the folders (such as the tests that numpy and pandas install,
or those of CPython), draws the forms of some tests of each file, and prints for several rules

* the share of pairs (author's value, other value) in which the rule picks the author's;
* the share of tests in which it finds the original among all forms, as a patch must in every
  control run. A tie counts as a guess.

The rules are each feature alone, in the better direction, and a logistic regression over all,
trained on half of the files and tried on the others.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.runtime import parse_python
from agentrl_swebench.alter import Edit, Function, draw_edits, python_tests
from agentrl_swebench.forms import Form, altered_forms, make_design

_MAX_BYTES = 200_000
_TOKEN = re.compile(r"[A-Za-z_]+|\d+\.\d+|\d+")
FEATURES = (
    "smaller number",
    "shorter",
    "round",
    "0, 1 or 2",
    "in the test elsewhere",
    "times in the test elsewhere",
    "times in the file elsewhere",
    "whole text in the test elsewhere",
    "whole text in the file elsewhere",
    "frequency in all files",
    "True",
    "None",
)


def features(old: str, new: str, test: str, file: str, frequency: Counter[str]) -> list[float]:
    """Returns the features of the author's value less those of the other; `test` and `file` are the
    source around the value."""

    def of(text: str, other: str) -> list[float]:
        apart = {*_TOKEN.findall(other)}
        token = next((each for each in _TOKEN.findall(text) if each not in apart), text)
        digits = re.fullmatch(r"\d+(\.\d+)?", token)
        number = float(token) if digits else 0.0
        in_test, in_file = (_TOKEN.findall(each).count(token) for each in (test, file))
        return [
            -math.log1p(number),
            -len(text),
            bool(digits) and number % 10 == 0,
            bool(digits) and number in (0, 1, 2),
            in_test > 0,
            in_test,
            math.log1p(in_file),
            text in test,
            math.log1p(file.count(text)),
            math.log1p(frequency[token]),
            text == "True",
            text == "None",
        ]

    return [float(a) - float(b) for a, b in zip(of(old, new), of(new, old), strict=True)]


@dataclass(slots=True, frozen=True)
class Drawn:
    """The forms of one test as a control run has them."""

    differences: dict[Edit, list[float]]
    """For each change, the features of the author's value less those of the other."""
    forms: list[Form]
    """All forms but the original."""

    def share_found(self, weights: torch.Tensor) -> float:
        """Returns the chance of a rule that takes a form with the highest score to take the
        original."""
        lost = {
            edit: float(torch.tensor(difference) @ weights)
            for edit, difference in self.differences.items()
        }
        scores = [-sum(lost[edit] for edit in form) for form in self.forms]
        return 0.0 if max(scores) > 0 else 1 / (1 + scores.count(0.0))


def draw(
    source: str, function: Function, choose: random.Random, frequency: Counter[str]
) -> Drawn | None:
    content = source.encode()
    lines = content.splitlines(keepends=True)
    start = sum(map(len, lines[: function.lineno - 1]))
    end = sum(map(len, lines[: function.end_lineno]))
    design = make_design(draw_edits(source, function, choose, 64), 16)
    found = {}
    for edit in itertools.chain(*design):
        old = content[edit.start : edit.end].decode()
        test = content[min(start, edit.start) : edit.start] + b" | " + content[edit.end : end]
        file = content[: edit.start] + b" | " + content[edit.end :]
        found[edit] = features(old, edit.text, test.decode(), file.decode(), frequency)
    return Drawn(found, altered_forms(design)) if found else None


def read(folders: Sequence[Path], limit: int, choose: random.Random) -> dict[Path, str]:
    texts = {}
    paths = sorted({path for folder in folders for path in folder.rglob("test_*.py")})
    for path in choose.sample(paths, min(limit, len(paths))):
        text = path.read_text(errors="replace")
        try:
            parse_python(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        if len(text) < _MAX_BYTES:
            texts[path] = text
    return texts


def share_won(scores: torch.Tensor) -> float:
    """Returns the share of pairs with a score above 0; pairs with a score of 0 count half."""
    return float(((scores > 0).float() + 0.5 * (scores == 0).float()).mean())


def fit(x: torch.Tensor) -> torch.Tensor:
    """Fits a logistic regression to differences [pairs, features] of which each is a win."""
    weights = torch.zeros(x.shape[1], requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)
    for _ in range(400):
        loss = torch.nn.functional.softplus(-x @ weights).mean() + 1e-3 * weights.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights.detach()


def _show(name: str, won: float, tests: Sequence[Drawn], weights: torch.Tensor) -> None:
    found = sum(each.share_found(weights) for each in tests) / len(tests)
    print(f"{name:36} {won:.3f}  {found:.3f}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/swe_attacks/told_apart.py",
        description="Measure how well altered values can be told from the authors'.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--files", type=int, default=400, metavar="N", help="read N (default: 400)")
    parser.add_argument("--tests", type=int, default=8, metavar="N", help="of a file (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    choose = random.Random(given.seed)
    texts = read(given.folders, given.files, choose)
    frequency = Counter(token for text in texts.values() for token in _TOKEN.findall(text))
    halves: tuple[list[Drawn], list[Drawn]] = ([], [])
    for number, text in enumerate(texts.values()):
        functions = [f for name, f in python_tests(text).items() if name.function[:5] == "test_"]
        for function in choose.sample(functions, min(given.tests, len(functions))):
            if drawn := draw(text, function, choose, frequency):
                halves[number % 2].append(drawn)
    if not all(halves):
        print("no tests with values below these folders", file=sys.stderr)
        return 1
    train, held_out = (
        torch.tensor([each for drawn in half for each in drawn.differences.values()])
        for half in halves
    )
    deviation = train.std(0).clamp_min(1e-6)
    print(f"{len(texts)} files, {sum(map(len, halves))} tests, {len(train) + len(held_out)} pairs")
    print(f"{'rule':36} pairs  found")
    for k, (name, column) in enumerate(zip(FEATURES, held_out.T, strict=True)):
        direction = 1.0 if share_won(train[:, k]) >= 0.5 else -1.0
        weights = direction * torch.eye(len(FEATURES))[k]
        _show(name, share_won(direction * column), halves[1], weights)
    weights = fit(train / deviation) / deviation
    _show("all", share_won(held_out @ weights), halves[1], weights)
    _show("chance", 0.5, halves[1], torch.zeros(len(FEATURES)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
