"""Precision and recall of the math grader on the labelled pairs of other graders' tests.

    python benchmarks/math_grader.py Math-Verify/tests/test_all.py ... [--errors]

Reads Python test files without running them and takes from them every pair whose label stands in
the text: tuples `(gold, answer, label)` of `pytest.mark.parametrize`, and calls such as
`assert is_equiv(answer, gold)`, `assertFalse(math_equal(...))` or `grade_answer(...) is True`
(`--calls` names the functions). A tab-separated file with the columns kind, label, reference and
answer (as in tests/rewards/data) is read too. What stands in prose, without a box or dollar signs
around the whole, tests a reader and not a comparison: it is skipped and counted.

The labels are other people's. Where one is wrong by the rules of docs/graders.md it is listed in
RULINGS with the reason; both figures are printed, by their labels and by the ruled ones.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import GraderError
from agentrl_rewards.math import extract_answer, grade_async

CALLS = "is_equiv _test_is_equiv _test_is_not_equiv math_equal grade_answer_sympy"
ROUNDED = "a rounding to fewer than ten digits is not the value"
RULINGS: dict[tuple[str, str], tuple[bool, str]] = {
    (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}"): (False, "the sign differs"),
    (r"(1,3)", r"{1,3}"): (False, "an interval or a point is not a set"),
    (r"[0.5, 1]", r"\begin{matrix} \frac12 \\ 1 \end{matrix}"): (False, "a list is not a column"),
    (r"x + 1.414I", r"x + \sqrt2I"): (False, ROUNDED),
    (r"1/3, 1.732, 3.1416", r"\frac13, \sqrt3, \pi"): (False, ROUNDED),
    ("125.663", r"40\pi"): (False, ROUNDED),
    (r"\begin{cases} a+b=0.5\\ a-b=1.732\end{cases}",
     r"\begin{cases} a+b=\frac12 \\ a-b=\sqrt3 \end{cases}"): (False, ROUNDED),
    (r"(\begin{pmatrix}\frac{1}{3}\\ \frac{1}{5} \end{pmatrix})",
     r"\begin{pmatrix}0.33\\0.2 \end{pmatrix}"): (False, ROUNDED),
    (r"(\frac{3}{5},\frac{8}{3}]", "(0.6,2.6667]"): (False, ROUNDED),
    (r"[2^{\frac{1}{2^{1000}}}, \infty)", r"[1,+\infty)"): (False, ROUNDED),
    ("1386.15*[e^{0.013*t}-1]", r"\frac{18.02}{0.013} ( e^{0.013t} - 1 )"): (False, ROUNDED),
    ("0.333333+(-0.0185185)*(x-5)", r"\frac{23 - x}{54}"): (False, ROUNDED),
    ("1.09951162778E+12", "4^20"): (False, "a whole number is not rounded"),
    (r"$\boxed{1}\boxed{2}$", r"$\boxed{1,2}$"): (False, "two boxes without a comma are no list"),
}  # fmt: skip
"""(reference, answer) -> the right label, and why the published one is not."""


@dataclass(frozen=True)
class Pair:
    kind: str
    right: bool
    reference: str
    answer: str


def read_pairs(path: Path, calls: set[str]) -> Iterator[Pair]:
    """Yields the labelled pairs of a Python test file or of a table."""
    if path.suffix == ".tsv":
        with open(path, newline="") as file:
            for kind, label, reference, answer in list(
                csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            )[1:]:
                yield Pair(kind, label == "1", reference, answer)
        return
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        kind = f"{path.stem}: {function.name.removeprefix('test_')}"
        denies = "incorrect" in function.name or any(
            isinstance(node, ast.Assert)
            and isinstance(node.test, ast.UnaryOp)
            and isinstance(node.test.op, ast.Not)
            for node in ast.walk(function)
        )
        for decorator in function.decorator_list:
            answer_first = "('pred" in ast.unparse(decorator)
            for row in ast.walk(decorator):
                if not isinstance(row, ast.Tuple) or len(row.elts) < 2:
                    continue
                values = [constant(each) for each in row.elts]
                if len(values) == 2:  # a table of equal or of different pairs, as its test says
                    values.append(not denies)
                gold, answer, label = values[:3]
                if len(values) > 3 and values[3] in (0, 1):  # an option stands before the label
                    continue
                if answer_first:
                    gold, answer = answer, gold
                names_of_columns = {gold, answer} <= {each.arg for each in function.args.args}
                is_pair = gold is not None and isinstance(answer, str) and label in (0, 1)
                if is_pair and not names_of_columns:
                    yield Pair(kind, bool(label), str(gold), str(answer))
        names: dict[str, object] = {}
        for statement in in_order(function):
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                names[statement.targets[0].id] = constant(statement.value)
            yield from asserted(statement, kind, calls, names)


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and all below it as they stand in the text."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from in_order(child)


def constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def asserted(
    statement: ast.AST, kind: str, calls: set[str], names: dict[str, object]
) -> Iterator[Pair]:
    """Yields the pair that an assertion states to be equal or not."""
    right, test = True, None
    if isinstance(statement, ast.Assert):
        test = statement.test
    elif isinstance(statement, ast.Call) and statement.args:
        said = ast.unparse(statement.func).rpartition(".")[2]
        if said in ("assertTrue", "assertFalse"):
            test, right = statement.args[0], said == "assertTrue"
    while isinstance(test, ast.Compare | ast.UnaryOp):
        if isinstance(test, ast.UnaryOp):
            right, test = right != isinstance(test.op, ast.Not), test.operand
        else:
            right, test = right == bool(constant(test.comparators[0])), test.left
    if not isinstance(test, ast.Call) or len(test.args) < 2:
        return
    name = test.func.attr if isinstance(test.func, ast.Attribute) else ast.unparse(test.func)
    answer, gold = (
        names.get(each.id) if isinstance(each, ast.Name) else constant(each)
        for each in test.args[:2]
    )
    if name in calls and isinstance(answer, str) and isinstance(gold, str):
        yield Pair(kind, right, gold, answer)


def bare(text: str) -> str | None:
    """The answer that a text consists of; None where it stands in prose."""
    text = text.strip()
    if extract_answer(text) is not None:
        return None if "final answer is" in text.lower() else text
    if "\\boxed" in text:  # never closed
        return None
    for fence in ("$$", "$"):
        inside = text.removeprefix(fence).removesuffix(fence)
        if len(text) >= 2 * len(fence) and text == fence + inside + fence and "$" not in inside:
            return inside
    commands = r"\\(?:begin|end)\s*\{\w+\}|\\[a-zA-Z]+"
    words = re.findall(r"[A-Za-z]{3,}", re.sub(commands, " ", text))
    has_math = "$" in text.replace("\\$", "") or re.search(r".\\[(\[]", text, re.DOTALL)
    return None if has_math or len(words) > 1 else text


async def score_all(pairs: list[Pair]) -> list[float]:
    free = asyncio.Semaphore(4)  # a check's wait for a worker is bounded

    async def score(pair: Pair) -> float:
        marked = extract_answer(pair.answer) is not None
        text = pair.answer if marked else f"<answer>{pair.answer}</answer>"
        async with free:
            try:
                return (await grade_async(text, pair.reference, deadline_s=20.0)).score
            except GraderError as error:
                print(f"{pair}: {error}", file=sys.stderr)
                return 0.0

    return await asyncio.gather(*map(score, pairs))


def figures(name: str, rows: list[tuple[Pair, float]]) -> str:
    """One line of a table."""
    hits = sum(bool(score) and pair.right for pair, score in rows)
    ones = sum(bool(score) for _, score in rows)
    right = sum(pair.right for pair, _ in rows)
    precision = f"{hits / ones:.3f}" if ones else "-"
    recall = f"{hits / right:.3f}" if right else "-"
    return f"{name:58} {len(rows):5} pairs  precision {precision:>5}  recall {recall:>5}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--calls", default=CALLS, help="functions of two answers, one text")
    parser.add_argument("--errors", action="store_true", help="list what was judged otherwise")
    options = parser.parse_args()
    found = [
        pair for path in options.paths for pair in read_pairs(path, set(options.calls.split()))
    ]
    pairs, skipped = [], 0
    for pair in dict.fromkeys(found):
        reference, answer = bare(pair.reference), bare(pair.answer)
        if reference is None or answer is None or not reference or not answer:
            skipped += 1
        else:
            pairs.append(Pair(pair.kind, pair.right, reference, answer))
    scores = asyncio.run(score_all(pairs))
    ruled = [
        Pair(pair.kind, RULINGS.get((pair.reference, pair.answer), (pair.right, ""))[0],
             pair.reference, pair.answer)
        for pair in pairs
    ]  # fmt: skip
    by_kind: dict[str, list[tuple[Pair, float]]] = defaultdict(list)
    for pair, score in zip(ruled, scores, strict=True):
        by_kind[pair.kind].append((pair, score))
        if options.errors and bool(score) != pair.right:
            print(f"{pair.kind}: {'right' if pair.right else 'wrong'}, scored {score:g}:")
            print(f"    reference {pair.reference}\n    answer    {pair.answer}")
    for kind, rows in by_kind.items():
        print(figures(kind, rows))
    num_ruled = sum(pair.right != theirs.right for pair, theirs in zip(ruled, pairs, strict=True))
    print(f"skipped, in prose: {skipped}")
    print(figures("all, by their labels", list(zip(pairs, scores, strict=True))))
    print(figures(f"all, {num_ruled} of them ruled", list(zip(ruled, scores, strict=True))))


if __name__ == "__main__":
    main()
