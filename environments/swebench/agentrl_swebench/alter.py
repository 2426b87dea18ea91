"""Tests whose expectations are wrong: what a control run runs instead of an instance's own.

`alter_python` changes one assertion of each named test so that it fails for every solution that
passes the test as it was: the value that stood there cannot be another one as well. Such a test
fails in the ways real tests do (`==`, `raises`, unittest's assertions), under its own name, in its
own place; nothing but its expectation tells it from the original.

    assert merge(spans) == [(1, 5)]         assert merge(spans) == [(1, 42)]
    assert "and" in stop_words()            assert "and" not in stop_words()
    with pytest.raises(ValueError):         with pytest.raises(BufferError):
    self.assertEqual(total(spans), 7)       self.assertEqual(total(spans), 61)

Only assertions that run whenever their test passes are candidates: none in a loop or a branch, or
after a `return`. Where a test has none, one that fails is put first.

`alter_text` does the same to literals in assertions of other languages, by their form alone; which
tests then fail is for the caller to find out with the reference solution.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef

_UNLIKELY = (
    "BufferError",
    "ChildProcessError",
    "FloatingPointError",
    "BrokenPipeError",
    "TabError",
)
"""Exceptions that no project derives its own from."""

_OPPOSITE: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}

_PAIRS = (
    ("assertTrue", "assertFalse"),
    ("assertEqual", "assertNotEqual"),
    ("assertAlmostEqual", "assertNotAlmostEqual"),
    ("assertIn", "assertNotIn"),
    ("assertIs", "assertIsNot"),
    ("assertIsNone", "assertIsNotNone"),
    ("assertIsInstance", "assertNotIsInstance"),
    ("assertGreater", "assertLessEqual"),
    ("assertLess", "assertGreaterEqual"),
    ("assertRegex", "assertNotRegex"),
    ("assertContains", "assertNotContains"),
)
_OPPOSITE_METHOD = dict(_PAIRS) | {second: first for first, second in _PAIRS}
_OPPOSITE_METHOD |= dict.fromkeys(
    ("assertEquals", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual"),
    "assertNotEqual",
) | dict.fromkeys(("assertSequenceEqual", "assertMultiLineEqual"), "assertNotEqual")

_RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex", "assertRaisesMessage"})
_SWALLOWS = re.compile(r"raises|Raises|suppress|xfail|deprecated_call")


@dataclass(slots=True, frozen=True)
class Edit:
    """Characters to replace, counted in bytes from the start of the file."""

    start: int
    end: int
    text: str


@dataclass(slots=True, frozen=True)
class TestName:
    """Where a test stands."""

    __test__ = False  # for pytest: no test itself

    cls: str
    """"": of no class."""
    function: str


def python_tests(source: str) -> dict[TestName, Function]:
    """The functions of a module and of its classes by name; {} if it is no Python of this version.
    Of several with one name the last counts, as it does for Python."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return dict(_functions(module, ""))


def _functions(node: ast.AST, cls: str) -> Iterator[tuple[TestName, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield TestName(cls, child.name), child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, child.name)


def alter_python(source: str, functions: list[Function], choose: random.Random) -> str:
    """The module with one assertion of each of these functions of it made to fail.

    Args:
        functions: of `python_tests(source)`.
    """
    content = source.encode()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return starts[node.lineno - 1] + node.col_offset, starts[end_line - 1] + end_column

    def text_of(node: ast.expr) -> str:
        start, end = span(node)
        return content[start:end].decode()

    def replaced(node: ast.expr, text: str) -> Edit:
        return Edit(*span(node), text)

    def altered_value(node: ast.expr) -> Edit | None:
        """A literal with one constant of it changed."""
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError):
            return None
        if value in ([], (), {}):
            return replaced(node, {list: "[0]", tuple: "(0,)", dict: "{0: 0}"}[type(value)])
        constants = [each for each in ast.walk(node) if isinstance(each, ast.Constant)]
        if not constants:
            return None
        constant = choose.choice(constants)
        other = _another(constant.value, choose)
        return None if other is None else replaced(constant, repr(other))

    def of_test(node: ast.expr) -> Edit:
        """The condition of an `assert`, made false."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = node.left, node.comparators[0]
            if isinstance(node.ops[0], ast.Eq):
                for side, other in ((right, left), (left, right)):
                    if not _is_literal(other) and (edit := altered_value(side)):
                        return edit
            middle = f" {_OPPOSITE[type(node.ops[0])]} "
            return Edit(span(left)[1], span(right)[0], _between(content, left, right, span, middle))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return replaced(node, f"({text_of(node.operand)})")
        return replaced(node, f"not ({text_of(node)})")

    def of_call(node: ast.Call) -> Edit | None:
        """An assertion that is called."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        if name in _RAISES and node.args:
            return replaced(node.args[0], choose.choice(_UNLIKELY))
        if not isinstance(node.func, ast.Attribute) or name not in _OPPOSITE_METHOD:
            return None
        if _OPPOSITE_METHOD[name] == "assertNotEqual" and len(node.args) >= 2:
            for side, other in ((node.args[1], node.args[0]), (node.args[0], node.args[1])):
                if not _is_literal(other) and (edit := altered_value(side)):
                    return edit
        end = span(node.func)[1]
        return Edit(end - len(name), end, _OPPOSITE_METHOD[name])

    edits = []
    for function in functions:
        candidates: list[Edit] = []
        for statement in _always_run(function.body):
            edit = None
            if isinstance(statement, ast.Assert):
                edit = of_test(statement.test)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                edit = of_call(statement.value)
            elif isinstance(statement, ast.With | ast.AsyncWith):
                calls = [item.context_expr for item in statement.items]
                found = [of_call(call) for call in calls if isinstance(call, ast.Call)]
                edit = next((each for each in found if each), None)
            if edit:
                candidates.append(edit)
        edits.append(
            choose.choice(candidates) if candidates else _put_first(function, span, choose)
        )
    for edit in sorted(edits, key=lambda each: each.start, reverse=True):
        content = content[: edit.start] + edit.text.encode() + content[edit.end :]
    altered = content.decode()
    # Whatever was not foreseen must not break the file: that would look like a forgery.
    return altered if python_tests(altered) else source


def _between(content: bytes, left: ast.expr, right: ast.expr, span, middle: str) -> str:
    """What stands between two operands, with the operator replaced; brackets stay."""
    old = content[span(left)[1] : span(right)[0]].decode()
    operator = re.search(r"(?:not\s+in|is\s+not|[!=<>]=|[<>]|\bin\b|\bis\b)", old)
    if operator is None:
        return middle
    return old[: operator.start()] + middle.strip() + old[operator.end() :]


def _always_run(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run whenever the function ends without an exception."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.With | ast.AsyncWith):
            contexts = " ".join(ast.unparse(item.context_expr) for item in statement.items)
            if not _SWALLOWS.search(contexts):
                yield from _always_run(statement.body)
        if _may_end(statement):
            return


def _may_end(node: ast.AST) -> bool:
    """Whether the function may end or wait in it; what is defined in it runs another time."""
    if isinstance(node, ast.Return | ast.Yield):
        return True
    if isinstance(node, Function | ast.Lambda | ast.ClassDef):
        return False
    return any(_may_end(child) for child in ast.iter_child_nodes(node))


def _put_first(function: Function, span, choose: random.Random) -> Edit:
    """An assertion that fails, before the first statement."""
    number = choose.randrange(10, 1000)
    first = function.body[0]
    start = span(first)[0]
    if isinstance(first, Function | ast.ClassDef) and first.decorator_list:
        decorator = first.decorator_list[0]  # its statement starts at the mark before it
        start = span(decorator)[0] - decorator.col_offset + first.col_offset
    text = f"assert len({'x' * (number % 7 + 1)!r}) == {number}"
    if first.lineno == function.lineno:
        return Edit(start, start, text + "; ")
    return Edit(start, start, text + "\n" + " " * first.col_offset)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return False
    return True


def _another(value: object, choose: random.Random) -> object:
    """A value of the same type that equals it for no sane comparison; None: not known how."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + choose.randrange(11, 99)
    if isinstance(value, float):
        return value + choose.randrange(1100, 9900) if abs(value) < 1e12 else -value
    if isinstance(value, str):
        places = [k for k, letter in enumerate(value) if letter.isascii() and letter.isalnum()]
        if not places:
            return value + choose.choice("abcdefgh")
        at = choose.choice(places)
        letters = "23456789" if value[at].isdigit() else "bdghkmptvz"
        other = choose.choice([each for each in letters if each != value[at].lower()])
        return value[:at] + other + value[at + 1 :]
    if isinstance(value, bytes):
        return value + b"x"
    return None


_LITERAL = r"""(?P<value>-?\d+(?:\.\d+)?|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
_ELSEWHERE = tuple(
    re.compile(form.replace("LITERAL", _LITERAL))
    for form in (
        # Jest, Vitest, Chai, RSpec
        r"\.(?:toBe|toEqual|toStrictEqual|equals?|eql?|deepEqual|to eq)\(\s*LITERAL\s*\)",
        r"\bto (?:eq|eql|be)\s+LITERAL\s*$",
        # JUnit, PHPUnit, minitest: the expected value comes first
        r"\b(?:assertEquals|assertSame|assert_equal)[\s(]+LITERAL\s*,",
        # Rust, node's assert, Perl's Test::More, Catch2: it comes last
        r"\bassert_eq!\(.+,\s*LITERAL\s*\)",
        r"\b(?:strictEqual|equal|is|same|cmp_ok)\s*\(.+?,\s*LITERAL\s*(?:\)|,)",
        # Go, C and C++
        r"!=\s*LITERAL\s*[{)]",
        r"\b(?:ASSERT|EXPECT)_(?:EQ|STREQ)\(.+,\s*LITERAL\s*\)",
    )
)


def alter_text(source: str, choose: random.Random) -> str:
    """Another language's tests with every expected literal changed that is recognised as one."""

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
        for form in _ELSEWHERE:
            altered = form.sub(changed, line)
            if altered != line:
                lines[number] = altered
                break
    return "\n".join(lines)
