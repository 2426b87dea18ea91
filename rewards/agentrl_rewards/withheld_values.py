"""Compares the values that withheld tests report with the reference's (see `withheld.py`)."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import json
import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl.types import JSON

Test = tuple[str, str]
"""Class of a test, "" outside of a class, and its function."""
Values = Mapping[int, list[tuple[str, JSON]]]
"""Reported values in canonical form, each with the running test's name, by the number of the
probe."""

RELATIVE = 1e-7
"""Tolerance on numbers with a fraction where the test states none."""

OPERATORS: dict[type[ast.cmpop], Any] = {
    ast.NotEq: operator.ne, ast.IsNot: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


@dataclass(slots=True)
class Probe:
    """One place of a test that reports a value."""

    test: Test
    strong: bool
    names: set[str]
    """Names in the expected side that was dropped."""
    relative: float = RELATIVE
    absolute: float = 0.0
    any_order: bool = False
    test_of: tuple[type[ast.cmpop], Any, bool] | None = None
    """Operator and literal with which the value is tested here, and whether the literal is left."""
    kinds: tuple[str, ...] = ()
    """Exceptions that the test expects, if it names them."""
    match: str = ""
    """Pattern that the exception's text has to match."""
    raises: bool = False


@dataclass(slots=True, frozen=True)
class Comparison:
    num_right: int
    num_values: int
    wrong: tuple[Test, ...]
    """The tests with another value than the reference solution."""

    def __str__(self) -> str:
        return f"{self.num_right} of {self.num_values} values"


def read_reports(lines: Iterable[str]) -> dict[int, list[tuple[str, JSON]]]:
    """Reads reported lines; lines that are not reports are left out."""
    found: dict[int, list[tuple[str, JSON]]] = defaultdict(list)
    for line in lines:
        try:
            number, value, test = json.loads(line)
            found[int(number)].append((str(test), value))
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue  # written by the code under test, or cut off
    return dict(found)


def stable(
    probes: Mapping[int, Probe], one: Values, two: Values
) -> dict[int, list[tuple[str, JSON]]]:
    """Returns the values that two runs of the reference solution both reported."""
    return {
        number: values
        for number, values in one.items()
        if number in probes
        and _all_right(probes[number], values, two.get(number, []))
        and _all_right(probes[number], values, values)
    }


def compare(probes: Mapping[int, Probe], reference: Values, reported: Values) -> Comparison:
    """Compares reported values with those of the reference solution."""
    num_right = 0
    wrong: dict[Test, None] = {}
    for number, values in reference.items():
        if _all_right(probes[number], values, reported.get(number, [])):
            num_right += len(values)
        else:
            wrong[probes[number].test] = None
    return Comparison(num_right, sum(map(len, reference.values())), tuple(wrong))


# --- comparison -----------------------------------------------------------------------------------


def tells(value: JSON) -> bool:
    """Returns True if a value in canonical form says more than a bit or the class of an object."""
    return not (value is None or isinstance(value, bool) or _is_hollow(value))


def _is_hollow(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    if value[0] == "object":
        return all(map(_is_hollow, value[2].values()))
    if value[0] in ("list", "tuple", "set", "deque"):
        return bool(value[1]) and all(map(_is_hollow, value[1]))
    return value[0] in ("again", "unprintable")


def _all_right(
    probe: Probe, reference: list[tuple[str, JSON]], reported: list[tuple[str, JSON]]
) -> bool:
    """Compares the values of one probe: those of a test in their order, and tests by name, because
    they may run in any order."""
    one, two = (sorted(each, key=operator.itemgetter(0)) for each in (reference, reported))
    return [test for test, _ in one] == [test for test, _ in two] and all(
        is_right(probe, expected, found) for (_, expected), (_, found) in zip(one, two, strict=True)
    )


def is_right(probe: Probe, reference: JSON, reported: JSON) -> bool:
    """Compares one value with the reference's, within the tolerance that the test states."""
    try:
        if probe.raises:
            return _same_exception(probe, reference, reported)
        if probe.test_of is not None:
            compare, literal, literal_is_left = probe.test_of
            found = _plain(reported)
            sides = (literal, found) if literal_is_left else (found, literal)
            return bool(OPERATORS[compare](*sides))
        return _same(probe, reference, reported)
    except (
        AttributeError, ValueError, TypeError, LookupError, RecursionError, OverflowError, re.error
    ):  # fmt: skip
        return False  # not in canonical form, so the code under test wrote it


def _same(probe: Probe, one: Any, two: Any, *, loose: bool = False) -> bool:
    if isinstance(one, int | float) and isinstance(two, int | float):
        if float in (type(one), type(two)) or probe.relative > RELATIVE:
            # The reference lies within the tolerance of what the test expects, as the value must.
            close = {"rel_tol": 2 * probe.relative, "abs_tol": 2 * probe.absolute}
            return math.isclose(one, two, **close) or (one != one and two != two)
        return one == two or abs(one - two) <= 2 * probe.absolute
    if not isinstance(one, list) or not isinstance(two, list):
        return type(one) is type(two) and one == two
    kinds = {one[0], two[0]}
    if "array" in kinds:  # a list in its place is as good
        first, second = (each[1] if each[0] == "array" else each for each in (one, two))
        return _same(probe, first, second, loose=True)
    if kinds <= {"list", "tuple"} and (loose or len(kinds) == 1):
        if probe.any_order:
            return _same_members(dataclasses.replace(probe, any_order=False), one[1], two[1])
        return _each_same(probe, one[1], two[1], loose)
    if len(kinds) != 1:
        return False
    kind = one[0]
    if kind in ("set", "deque"):
        return _each_same(probe, one[1], two[1])
    if kind == "dict":
        first, second = ([part for pair in each[1] for part in pair] for each in (one, two))
        return _each_same(probe, first, second)
    if kind in ("pandas", "masked", "xarray", "quantity", "complex"):
        return _each_same(probe, one[1:], two[1:])
    if kind == "object":
        # Another class with the same values is as good, and one with more.
        return bool(one[2] or one[1] == two[1]) and all(
            name in two[2] and _same(probe, each, two[2][name]) for name, each in one[2].items()
        )
    return one == two


def _each_same(probe: Probe, one: list[Any], two: list[Any], loose: bool = False) -> bool:
    return len(one) == len(two) and all(map(partial(_same, probe, loose=loose), one, two))


def _same_members(probe: Probe, one: list[Any], two: list[Any]) -> bool:
    left = list(two)
    for value in one:
        match = next((k for k, each in enumerate(left) if _same(probe, value, each)), None)
        if match is None:
            return False
        left.pop(match)
    return not left


def _plain(value: Any) -> Any:
    """Returns plain data from its canonical form, and an object that equals nothing for others."""
    if not isinstance(value, list):
        return value
    kind, *content = value
    if kind in ("list", "tuple", "set", "deque"):
        members = [_plain(each) for each in content[0]]
        return {"tuple": tuple, "set": frozenset}.get(kind, list)(members)
    if kind == "array":
        return _plain(content[0])
    if kind == "dict":
        return {_plain(k): _plain(v) for k, v in content[0]}
    if kind == "bytes":
        return bytes.fromhex(content[0])
    return object()


def _same_exception(probe: Probe, reference: Any, reported: Any) -> bool:
    """Accepts a kind that also inherits other kinds, but none that inherits whatever a test may
    expect."""
    if reference is None or reported is None:
        return reference is reported
    its, mine, text = reference[1], reported[1], reported[2]
    if reported[0] != "raised" or not any(kind in mine for kind in probe.kinds or its[:1]):
        return False
    known = [getattr(builtins, name, None) for name in mine]
    classes = [each for each in known if isinstance(each, type)]
    leaves = [each for each in classes if not any(issubclass(k, each) for k in {*classes} - {each})]
    if probe.match and (
        len(text) > 2 * len(reference[2]) + 100 or not re.search(probe.match, text)
    ):
        return False  # a text that holds whatever a test may look for is not one
    return len(leaves) <= 2
