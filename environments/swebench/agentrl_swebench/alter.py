"""Makes mutants of tests for control runs.

A mutant is a test with one constant changed: an input, an expected value, a parameter, an argument
of a helper, or the exception that it expects. It differs from the original test in nothing else.

    assert merge([(1, 3), (3, 5)]) == [(1, 5)]      assert merge([(1, 3), (3, 5)]) == [(1, 42)]
    assert parse("2 kg").unit == "kg"               assert parse("2 kp").unit == "kg"
    with pytest.raises(ValueError):                 with pytest.raises(BufferError):

A correct solution may still pass some mutants; `audit` keeps those that the reference solution
fails.
"""

from __future__ import annotations

import ast
import builtins
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl.python_source import parse_python

Function = ast.FunctionDef | ast.AsyncFunctionDef

_UNLIKELY = ("BufferError", "TabError", "FloatingPointError", "ChildProcessError")
"""Exceptions that no project derives its own from."""
_UNLIKELY_WARNINGS = ("BytesWarning", "ImportWarning", "UnicodeWarning")

_EXPECTS = re.compile(r"assert|raises|warns|approx|match|equal|expect|check|verify", re.IGNORECASE)
"""Names of calls whose arguments say what is expected."""
_FRAGILE = re.compile(
    r"sleep|wait|join|alarm|timeout|delay|interval|patch|[sg]etattr|delattr|import|fixture|skip|xfail"
    r"|fail|open",
    re.IGNORECASE,
)
"""Names of calls and keywords whose arguments, if changed, delay the test or break it for every
solution."""
_WEIGHT = 4.0
"""Weight of an expected value when a value is drawn; an input has weight 1."""


@dataclass(slots=True, frozen=True, order=True)
class Edit:
    """A replacement in a file; `start` and `end` count bytes from the file's start."""

    start: int
    end: int
    text: str


@dataclass(slots=True, frozen=True)
class TestName:
    """The class and the function of a test."""

    __test__ = False  # keeps pytest from collecting this class

    cls: str
    """"" if the function is in no class."""
    function: str


@dataclass(slots=True, frozen=True)
class Slot:
    """One form of a test in an altered file: its name there and the changes in it."""

    name: str
    edits: tuple[Edit, ...] = ()
    """Empty for the original test."""


def python_tests(source: str) -> dict[TestName, Function]:
    """Returns the functions of a module and of its classes by name; {} if this version of Python
    cannot parse it. Of several functions with one name it returns the last, which Python runs."""
    try:
        module = parse_python(source)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return dict(_functions(module, ""))


def _functions(node: ast.AST, cls: str) -> Iterator[tuple[TestName, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield TestName(cls, child.name), child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, child.name)


def draw_edits(source: str, function: Function, choose: random.Random, number: int) -> list[Edit]:
    """Draws up to `number` changes of different values of a test; expected values are likelier
    than inputs."""
    content = source.encode()
    starts = _line_starts(content)
    drawn = []
    for node, weight in _values(function):
        start, end = _span(node, starts)
        if (text := _another_text(node, content[start:end].decode(), choose)) is not None:
            edit = Edit(start, end, text)
            drawn.append((choose.random() ** (1 / weight), edit))
    chosen: list[Edit] = []
    for _, edit in sorted(drawn, reverse=True):
        if all(edit.start >= each.end or edit.end <= each.start for each in chosen):
            chosen.append(edit)
    return chosen[:number]


def with_slots(source: str, slots: Sequence[tuple[Function, Sequence[Slot]]]) -> str:
    """Returns the module's source with each of the given functions replaced by its slots, in
    order."""
    content = source.encode()
    starts = _line_starts(content)
    edits = []
    for function, its_slots in slots:
        first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
        start, end = starts[first - 1], _span(function, starts)[1]
        definition = starts[function.lineno - 1] + function.col_offset
        match = re.match(rb"(?:async\s+)?def\s+", content[definition:end])
        named = definition + (match.end() if match else 0)
        blocks = []
        for slot in its_slots:
            rename = Edit(named, named + len(function.name.encode()), slot.name)
            block = content[start:end]
            for edit in sorted([*slot.edits, rename], reverse=True):
                at = edit.start - start
                block = block[:at] + edit.text.encode() + block[edit.end - start :]
            blocks.append(block.decode())
        gap = "\n\n" if function.col_offset else "\n\n\n"
        edits.append(Edit(start, end, gap.join(blocks)))
    for edit in sorted(edits, reverse=True):
        content = content[: edit.start] + edit.text.encode() + content[edit.end :]
    return content.decode()


def _line_starts(content: bytes) -> list[int]:
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _span(node: ast.expr | ast.stmt, starts: list[int]) -> tuple[int, int]:
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
    return starts[node.lineno - 1] + node.col_offset, starts[end_line - 1] + end_column


def _values(function: Function) -> Iterator[tuple[ast.expr, float]]:
    """Yields the values in a test that may be changed, each with its weight."""
    for decorator in function.decorator_list:
        # The first argument names the parameters. Other decorators decide whether a test runs.
        if isinstance(decorator, ast.Call) and _called(decorator) == "parametrize":
            for argument in decorator.args[1:]:
                yield from _values_below(argument, _WEIGHT)
    for statement in function.body:
        yield from _values_below(statement, 1.0)


def _values_below(node: ast.AST, weight: float) -> Iterator[tuple[ast.expr, float]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.JoinedStr | ast.ImportFrom):
        return
    if isinstance(node, ast.keyword) and _FRAGILE.search(node.arg or ""):
        return
    if isinstance(node, ast.Assert):
        weight = _WEIGHT
        yield from _values_below(node.test, weight)
        return  # the assertion's message affects nothing
    if isinstance(node, ast.Call):
        name = _called(node)
        if _FRAGILE.search(name):
            return
        weight = _WEIGHT if _EXPECTS.search(name) else weight
        if node.args and re.fullmatch(r"raises|warns|assert(?:Raises|Warns)\w*", name):
            yield node.args[0], weight
    if isinstance(node, ast.Constant) and (node.value is not None or weight > 1):
        yield node, weight
    if isinstance(node, ast.List | ast.Tuple | ast.Dict):
        yield node, weight
    for child in ast.iter_child_nodes(node):
        yield from _values_below(child, weight)


def _called(node: ast.Call) -> str:
    function = node.func
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _another_text(node: ast.expr, text: str, choose: random.Random) -> str | None:
    """Returns the source of another value; None if this value cannot be changed."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str | bytes):
            return _another_string(text, choose)
        other = _another(node.value, choose)
        return None if other is None else repr(other).replace("Ellipsis", "...")
    if isinstance(node, ast.List | ast.Tuple | ast.Dict):
        empty = not (node.keys if isinstance(node, ast.Dict) else node.elts)
        forms = {ast.List: "[{}]", ast.Tuple: "({},)", ast.Dict: "{{{}: 0}}"}
        return forms[type(node)].format(choose.randrange(99)) if empty else None
    if isinstance(node, ast.Name | ast.Attribute):
        # An exception that is not a subclass of the expected one, so that no solution raises it.
        kind = getattr(builtins, getattr(node, "id", ""), None)
        is_warning = isinstance(kind, type) and issubclass(kind, Warning)
        others = [
            each
            for each in (_UNLIKELY_WARNINGS if is_warning else _UNLIKELY)
            if not (isinstance(kind, type) and issubclass(getattr(builtins, each), kind))
        ]
        return choose.choice(others) if others else None
    return None


def _another_string(text: str, choose: random.Random) -> str:
    """Returns the source of a string with one letter or digit changed, or one added at its end."""
    for at in choose.sample(range(len(text)), len(text)):
        if text[at].isascii() and text[at].isalnum() and text[at - 1 : at] != "\\":
            changed = text[:at] + _another_letter(text[at], choose) + text[at + 1 :]
            try:
                old, new = (ast.literal_eval(f"({each})") for each in (text, changed))
            except (SyntaxError, ValueError):
                continue  # the changed letter belongs to the string's prefix
            if type(old) is type(new) and len(old) == len(new) and old != new:
                return changed
    closing = 3 if len(text) >= 6 and text.endswith(('"""', "'''")) else 1
    return text[:-closing] + choose.choice("abcdefgh") + text[-closing:]


def _another_letter(letter: str, choose: random.Random) -> str:
    letters = "23456789" if letter.isdigit() else "bdghkmptvz"
    return choose.choice([each for each in letters if each != letter.lower()])


def _another(value: object, choose: random.Random) -> object:
    """Returns a different value of the same type (... for None); None if there is none to offer."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + choose.randrange(11, 99)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value + choose.randrange(3, 90) + 0.5 if abs(value) < 1e9 else -value
    if isinstance(value, str):
        places = [k for k, letter in enumerate(value) if letter.isascii() and letter.isalnum()]
        if not places:
            return value + choose.choice("abcdefgh")
        at = choose.choice(places)
        return value[:at] + _another_letter(value[at], choose) + value[at + 1 :]
    return ... if value is None else None


_LITERAL = r"""(?P<value>-?\d+(?:\.\d+)?|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
_ELSEWHERE = tuple(
    re.compile(form.replace("LITERAL", _LITERAL))
    for form in (
        # Jest, Vitest, Chai, RSpec
        r"\.(?:toBe|toEqual|toStrictEqual|equals?|eql?|deepEqual|to eq)\(\s*LITERAL\s*\)",
        r"\bto (?:eq|eql|be)\s+LITERAL\s*$",
        # JUnit, PHPUnit, minitest: the expected value is first
        r"\b(?:assertEquals|assertSame|assert_equal)[\s(]+LITERAL\s*,",
        # Rust, node's assert, Perl's Test::More, Catch2: the expected value is last
        r"\bassert_eq!\(.+,\s*LITERAL\s*\)",
        r"\b(?:strictEqual|equal|is|same|cmp_ok)\s*\(.+?,\s*LITERAL\s*(?:\)|,)",
        # Go, C and C++
        r"!=\s*LITERAL\s*[{)]",
        r"\b(?:ASSERT|EXPECT)_(?:EQ|STREQ)\(.+,\s*LITERAL\s*\)",
    )
)


def alter_text(source: str, choose: random.Random, share: float = 1.0) -> str:
    """Returns tests in another language than Python with some expected literals changed.

    Args:
        share: probability that a line is considered. Of such a line, the literals are changed that
            the form of a common assertion shows to be expected values.
    """

    def changed(match: re.Match[str]) -> str:
        old = match.group("value")
        if old[0] in "'\"":
            new = old[0] + str(_another(old[1:-1], choose)) + old[0]
        else:
            new = str(_another(float(old) if "." in old else int(old), choose))
        start = match.start("value") - match.start()
        return match.group()[:start] + new + match.group()[start + len(old) :]

    lines = source.split("\n")
    for number, line in enumerate(lines):
        if choose.random() >= share:
            continue
        for form in _ELSEWHERE:
            altered = form.sub(changed, line)
            if altered != line:
                lines[number] = altered
                break
    return "\n".join(lines)
