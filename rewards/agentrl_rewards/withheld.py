"""Withholds the expected values of Python tests from the code that they test.

    assert parse("0.05") == 5              ->  value(1, parse("0.05"))
    assertAlmostEqual(total(x), 0.3)       ->  value(2, total(x))
    with pytest.raises(ValueError): f()    ->  with raises(3): f()

`withhold` drops the expected side of each comparison, and whatever only that side needs: names,
columns of parameters and of tables. The tests report the actual side instead, in canonical form
(`withheld_report`). The same tests are run with the reference solution, in which `stable` finds the
values to expect, and `compare` judges outside of the process that ran the code. What that process
says about the tests' outcome is not read, so forging it gains nothing.

A probe is *strong* if the value is one that code cannot easily guess. One that reports a bit or the
mere kind of an exception, or whose expectation stays readable where the tests run (a fixture, a
file, a variable that the test needs, too), is *weak*. A test is covered if it has a strong probe
with a stable value that tells something (`tells`). Code that knows the right
values for a test's inputs, from a report of the bug or from other files, can't be told from a
solution.
"""

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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.runtime import parse_python
from agentrl.types import JSON

Test = tuple[str, str]
"""Class of a test, "" outside of a class, and its function."""
Values = Mapping[int, list[tuple[str, JSON]]]
"""Reported values in canonical form, each with the running test's name, by the number of the
probe."""

MODULE = "_withheld"
REPORTER = Path(__file__).with_name("withheld_report.py")
RELATIVE = 1e-7
"""Tolerance on numbers with a fraction where the test states none."""
RAISES = {"raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp", "assert_raises"}
CLOSE = {"allclose", "isclose", "array_equal", "array_equiv", "equals"}
MAKERS = frozenset({
    "approx", "array", "asarray", "Decimal", "Fraction", "set", "frozenset", "dict", "list",
    "tuple", "float", "int", "str", "complex", "bytes", "DataFrame", "Series", "Index", "datetime",
    "date",
    "timedelta", "OrderedDict", "zeros", "ones", "full", "arange", "linspace", "eye", "dedent",
})  # fmt: skip
"""Calls in which an expected value is made."""
READERS = frozenset({
    "open", "read", "readlines", "read_text", "read_bytes", "load", "loadtxt", "genfromtxt",
    "fromfile", "read_csv", "imread",
})  # fmt: skip
"""Calls by which a test takes what it expects from a file, where the code under test can read
it."""
TEXT_MAKERS = {"join", "format", "strip"}
"""The same, as methods of a literal."""
EXPECTED_NAME = re.compile(r"expect|desired|want|correct|answer|truth|^exp|^ref", re.IGNORECASE)
OPERATORS: dict[type[ast.cmpop], Any] = {
    ast.NotEq: operator.ne, ast.IsNot: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
AS_OPERATOR: dict[str, type[ast.cmpop]] = {
    "in": ast.In, "notin": ast.NotIn, "is": ast.Is, "isnot": ast.IsNot, "greater": ast.Gt,
    "less": ast.Lt, "greaterequal": ast.GtE, "lessequal": ast.LtE, "notequal": ast.NotEq,
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
class Withheld:
    text: str
    """The tests without what they expect. They append reports to a file (`withhold`)."""
    probes: dict[int, Probe]


@dataclass(slots=True, frozen=True)
class Comparison:
    num_right: int
    num_values: int
    wrong: tuple[Test, ...]
    """The tests with another value than the reference solution."""

    def __str__(self) -> str:
        return f"{self.num_right} of {self.num_values} values"


def withhold(source: str, *, report_file: str, first: int = 1) -> Withheld:
    """Drops what tests expect and lets them report what they compare with it.

    Args:
        source: text of a module with tests.
        report_file: file to which the tests append their reports, where they run.
        first: number of the first probe, so that several modules can share a file.

    Raises:
        SyntaxError: the module cannot be parsed.
    """
    module = parse_python(source)
    work = _Module(module, first)
    work.visit(module)
    work.prune()
    code = f"FILE = {report_file!r}\n"
    code = REPORTER.read_text().replace('FILE = ""\n', code, 1)
    body = module.body
    heads = 0
    while heads < len(body) and (
        (isinstance(body[heads], ast.Expr) and heads == 0 and ast.get_docstring(module) is not None)
        or getattr(body[heads], "module", "") == "__future__"
    ):
        heads += 1
    load = (
        f"import types as {MODULE}\n{MODULE} = {MODULE}.ModuleType({MODULE!r})\n"
        f"exec({code!r}, {MODULE}.__dict__)"
    )
    body[heads:heads] = ast.parse(load).body
    text = ast.unparse(ast.fix_missing_locations(module)) + "\n"
    return Withheld(text, work.probes)


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


# --- transformation -------------------------------------------------------------------------------


def is_literal(node: ast.AST) -> bool:
    """Returns True if a node is plain data, or data in a call that only makes such data."""
    if isinstance(node, ast.Call):
        parts = [*node.args, *(each.value for each in node.keywords)]
        return _only_makes(node) and all(map(is_literal, parts))
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(map(is_literal, node.elts))
    if isinstance(node, ast.Dict):
        return all(is_literal(each) for each in (*node.keys, *node.values) if each is not None)
    try:
        ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _only_makes(call: ast.Call) -> bool:
    """Returns True if a call makes data of its arguments."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if _called(call) in TEXT_MAKERS:
        return owner is not None and is_literal(owner)
    return _called(call) in MAKERS and isinstance(owner, ast.Name | ast.Attribute | None)


def _called(node: ast.AST) -> str:
    """Returns the name of the function that a call calls; "" if it has none."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def _loaded(node: ast.AST) -> set[str]:
    return {
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }


def _bound(target: ast.AST) -> set[str]:
    """Returns the names that an assignment binds; {""} if it binds anything but names."""
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Tuple | ast.List):
        return set().union(*map(_bound, target.elts))
    return {""}


def _root(node: ast.AST) -> str:
    """Returns the name of which a node is a value as it is, or a part; "" if it is computed."""
    while True:
        match node:
            case ast.Name():
                return node.id
            case ast.Attribute() | ast.Subscript():
                node = node.value
            case ast.ListComp() | ast.SetComp() | ast.DictComp():
                node = node.generators[0].iter
            case ast.Call(ast.Name("list" | "tuple" | "set" | "dict" | "sorted"), [inner]):
                node = inner
            case ast.Call(ast.Attribute(attr="escape"), [inner]):
                node = inner
            case ast.Call(ast.Attribute(attr="values" | "keys" | "items" | "copy") as inner, []):
                node = inner
            case _:
                return ""


@dataclass(slots=True)
class _Scope:
    """A function of the tests, with what it assigns, and the names that it no longer needs."""

    test: Test
    node: ast.FunctionDef | ast.AsyncFunctionDef
    values: dict[str, list[ast.expr]] = field(default_factory=lambda: defaultdict(list))
    dropped: set[str] = field(default_factory=set)

    @property
    def arguments(self) -> set[str]:
        each = self.node.args
        return {a.arg for a in (*each.posonlyargs, *each.args, *each.kwonlyargs)} - {"self", "cls"}


class _Module(ast.NodeTransformer):
    """Replaces the assertions of a module by probes."""

    def __init__(self, module: ast.Module, first: int) -> None:
        self.module = module
        self.probes: dict[int, Probe] = {}
        self._expected: dict[int, ast.AST] = {}
        self.tests: set[Test] = set()
        self._next = first
        self._class = ""
        self._scope: _Scope | None = None
        self._scopes: list[_Scope] = []
        self._globals = _assigned(module.body)
        self._classes = {each.name for each in module.body if isinstance(each, ast.ClassDef)}
        self.kept: set[str] = set()
        """Names that loops bind for expected sides alone, in columns that cannot be emptied."""

    # statements

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        outer, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = outer
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        if self._scope is None:
            self._scope = _Scope((self._class, node.name), node, _assigned(node.body))
            self._scopes.append(self._scope)
            if _is_test(node):
                self.tests.add(self._scope.test)
            self.generic_visit(node)
            self._scope = None
        else:
            self.generic_visit(node)
        return node

    def visit_Assert(self, node: ast.Assert) -> Any:
        if self._scope is None:
            return node
        return [ast.Expr(each) for each in self._assertion(node.test)]

    def visit_Expr(self, node: ast.Expr) -> Any:
        if self._scope is not None and isinstance(node.value, ast.Call):
            probes = self._assert_call(node.value)
            if probes is not None:
                return [ast.Expr(each) for each in probes]
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if self._scope is None or _called(node) not in RAISES:
            return node
        has_pattern = "Regex" in _called(node)
        rest = node.args[2 if has_pattern else 1 :]
        arguments: dict[str, list[ast.expr]] = {name: [] for name in self._scope.arguments}
        assigned = {**self._globals, **arguments, **self._scope.values}
        kinds, match = _expected_exception(node, has_pattern, assigned)
        stated = next((each.value for each in node.keywords if each.arg == "match"), node)
        number = self._probe(stated, strong=bool(match), raises=True, kinds=kinds, match=match)
        options = [each for each in node.keywords if each.arg not in ("match", "msg")]
        name = "raised" if rest else "raises"
        return _call(name, [ast.Constant(number), *rest], options if rest else [])

    # assertions

    def _assertion(self, test: ast.expr) -> list[ast.expr]:
        """Returns the probes of what an assertion asserts."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return [probe for each in test.values for probe in self._assertion(each)]
        if isinstance(test, ast.Compare) and all(isinstance(op, ast.Eq) for op in test.ops):
            sides = [test.left, *test.comparators]
            if len(sides) == 2:
                return [self._value(sides[0], sides[1])]
            actual = [each for each in sides if not is_literal(each)]
            probes = [self._value(each, ast.Constant(0)) for each in actual]
            return probes or [self._truth(test)]
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return [self._tested(test)]
        if isinstance(test, ast.Call):
            owner = test.func.value if isinstance(test.func, ast.Attribute) else None
            both = test.args if len(test.args) > 1 or owner is None else [owner, *test.args]
            if _called(test) in CLOSE and len(both) > 1:
                return [self._value(both[0], both[1], _tolerance(test))]
            match both[-1:]:  # (a == b).all(), all(a == b)
                case [ast.Compare(ops=[ast.Eq()]) as inner] if _called(test) == "all":
                    return [self._value(inner.left, inner.comparators[0])]
        return [self._truth(test)]

    def _tested(self, test: ast.Compare) -> ast.expr:
        """Returns the probe of a comparison other than by `==`."""
        left, compare, right = test.left, test.ops[0], test.comparators[0]
        if isinstance(compare, ast.Is) and is_literal(right):
            return self._value(left, right)
        literal_is_left = is_literal(left)
        literal, other = (left, right) if literal_is_left else (right, left)
        if type(compare) in OPERATORS and literal_is_left != is_literal(right):
            try:
                content = ast.literal_eval(literal)
            except ValueError:
                return self._truth(test)
            test_of = type(compare), content, literal_is_left
            number = self._probe(literal, strong=False, test_of=test_of)
            return _call("value", [ast.Constant(number), self.visit(other)])
        return self._truth(test)

    def _truth(self, test: ast.expr) -> ast.expr:
        number = self._probe(ast.Constant(0), strong=False)
        return _call("truth", [ast.Constant(number), self.visit(test)])

    def _value(
        self,
        one: ast.expr,
        two: ast.expr,
        tolerance: tuple[float, float] | None = None,
        **more: Any,
    ) -> ast.expr:
        for each in (*ast.walk(one), *ast.walk(two)):
            if isinstance(each, ast.Call) and _called(each) == "approx":
                tolerance = _tolerance(each)
        one, two = (
            each.args[0] if isinstance(each, ast.Call) and _called(each) == "approx" else each
            for each in (one, two)
        )
        actual, expected = (two, one) if self._rank(two) > self._rank(one) else (one, two)
        if self._calls_the_same(one, two):
            # What is tested is that both sides agree: neither holds an expected value.
            actual, expected = ast.Tuple([one, two], ast.Load()), ast.Constant(0)
        relative, absolute = tolerance or (RELATIVE, 0.0)
        is_bit = isinstance(expected, ast.Constant) and isinstance(expected.value, bool | None)
        owner = ast.unparse(expected).partition(".")[0]
        stays = owner in {"self", "cls", *self._classes} or self._reads_file(expected)
        number = self._probe(
            expected, strong=not is_bit and not stays, relative=relative, absolute=absolute, **more
        )
        return _call("value", [ast.Constant(number), self.visit(actual)])

    def _assert_call(self, node: ast.Call) -> list[ast.expr] | None:
        """Returns the probes of a call of an assertion; None if it is none that is known."""
        name = _called(node).lower().replace("_", "")
        if not name.startswith("assert") or not node.args:
            return None
        rest, arguments = name.removeprefix("assert"), node.args
        if any(isinstance(each, ast.Starred) for each in arguments[:2]):
            return None
        if rest in ("", "true"):
            return self._assertion(arguments[0])
        if rest == "false":
            return [self._truth(ast.UnaryOp(ast.Not(), arguments[0]))]
        if rest in ("isnone", "isnotnone"):
            compare = ast.Is() if rest == "isnone" else ast.IsNot()
            return [self._tested(ast.Compare(arguments[0], [compare], [ast.Constant(None)]))]
        if len(arguments) < 2:
            return None
        if rest in AS_OPERATOR:
            return [self._tested(ast.Compare(arguments[0], [AS_OPERATOR[rest]()], [arguments[1]]))]
        if rest in ("isinstance", "issubclass"):
            return [self._truth(ast.Call(ast.Name(rest, ast.Load()), arguments[:2], []))]
        if re.search("equal|close|identical", rest) and "not" not in rest:
            any_order = "count" in rest or "items" in rest
            one, two = arguments[:2]
            return [self._value(one, two, _tolerance(node), any_order=any_order)]
        return None

    def _rank(self, node: ast.expr, depth: int = 0) -> float:
        """Returns how likely a side of a comparison is the one that the code under test gives."""
        if is_literal(node):
            return 0
        if isinstance(node, ast.Name):
            if EXPECTED_NAME.search(node.id):
                return 0.5
            values = self._scope.values.get(node.id, []) if self._scope and depth < 8 else []
            return max([1.0, *(self._rank(each, depth + 1) for each in values)])
        if isinstance(node, ast.Call) and not _only_makes(node):
            return 2.5 if _called(node)[:1].isupper() else 3
        inner = [
            self._rank(each, depth)
            for each in ast.iter_child_nodes(node)
            if isinstance(each, ast.expr)
        ]
        return max([2.0 if isinstance(node, ast.Attribute) else 1.0, *inner])

    def _calls_the_same(self, one: ast.expr, two: ast.expr) -> bool:
        """Returns True if both sides call the same function on data that the tests hold."""
        if not isinstance(one, ast.Call) or not isinstance(two, ast.Call):
            return False
        name = ast.unparse(one.func)
        is_function = name.isidentifier() and not name[0].isupper() and name not in MAKERS
        data = [*one.args, *two.args, *(each.value for each in (*one.keywords, *two.keywords))]
        return (
            is_function
            and name == ast.unparse(two.func)
            and not hasattr(builtins, name)
            and all(self._rank(each) < 2 for each in data)
        )

    def _reads_file(self, node: ast.AST) -> bool:
        """Returns True if an expected value, or a value that it is made of, comes from a file."""
        todo, seen = [node], set()
        while todo:
            for each in ast.walk(todo.pop()):
                if isinstance(each, ast.Call) and _called(each) in READERS:
                    return True
                if isinstance(each, ast.Name) and each.id not in seen:
                    seen.add(each.id)
                    values = self._scope.values.get(each.id, []) if self._scope else []
                    todo += values or self._globals.get(each.id, [])
        return False

    def _probe(self, expected: ast.AST, **values: Any) -> int:
        assert self._scope is not None
        names = _loaded(expected)
        self._scope.dropped |= names
        self._expected[self._next] = expected
        self.probes[self._next] = Probe(self._scope.test, names=names, **values)
        self._next += 1
        return self._next - 1

    # what only the expected sides needed

    def prune(self) -> None:
        """Drops what only the expected sides needed, and marks the probes whose expectation stays
        readable as weak."""
        visible: dict[Test, set[str]] = {}
        for scope in self._scopes:
            self.kept.clear()
            dead = self._prune_body(scope.node, scope.dropped)
            seen = scope.arguments & dead
            for decorator in scope.node.decorator_list:
                seen -= self._prune_parameters(decorator, dead)
            visible[scope.test] = seen | self.kept
        dropped = set().union(*(scope.dropped for scope in self._scopes))
        self._prune_body(self.module, dropped)
        constants = {
            name
            for name in _loaded(self.module)
            if any(map(is_literal, self._globals.get(name, [])))
        }
        for scope in self._scopes:
            own = scope.arguments | scope.values.keys()
            as_it_is = _loaded(scope.node) & own | constants - own
            for number, probe in self.probes.items():
                if probe.test == scope.test:
                    probe.strong &= (
                        scope.test in self.tests
                        and not probe.names & visible[scope.test]
                        and _root(self._expected[number]) not in as_it_is
                    )

    def _prune_body(self, node: ast.AST, dropped: set[str]) -> set[str]:
        """Drops assignments and columns of tables that nothing needs any more; returns the names
        that are no longer loaded."""
        while True:
            dead = dropped - _loaded(node)
            pruner = _Pruner(self, dead, deep=not isinstance(node, ast.Module))
            pruner.generic_visit(node)
            if pruner.freed <= dropped:
                return dead
            dropped |= pruner.freed

    def _prune_parameters(self, decorator: ast.expr, dead: set[str]) -> set[str]:
        """Empties the columns of `parametrize` that have a dead name; returns those names."""
        if _called(decorator) != "parametrize" or not isinstance(decorator, ast.Call):
            return set()
        if len(decorator.args) < 2:
            return set()
        first = decorator.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            names = [each.strip() for each in first.value.split(",")]
        elif isinstance(first, ast.List | ast.Tuple) and is_literal(first):
            names = [str(each) for each in ast.literal_eval(first)]
        else:
            return set()
        emptied = {each for each in names if each in dead}
        numbers = [number for number, each in enumerate(names) if each in dead]
        is_empty = self.empty_columns(decorator.args[1], numbers, is_single=len(names) == 1)
        if is_empty:  # the tests' own names may tell what they expect
            decorator.keywords = [each for each in decorator.keywords if each.arg != "ids"]
        return emptied if is_empty else set()

    def empty_columns(self, table: ast.expr, numbers: list[int], *, is_single: bool) -> bool:
        """Empties columns of a table; returns False if it is not one that can be read."""
        if isinstance(table, ast.Name):
            uses = sum(isinstance(n, ast.Name) and n.id == table.id for n in ast.walk(self.module))
            values = self._globals.get(table.id, [])
            if uses != 2 or len(values) != 1:
                return False  # others may need the column
            table = values[0]
        if not isinstance(table, ast.List | ast.Tuple) or not numbers:
            return False
        for place, row in enumerate(table.elts):
            cells = None
            if isinstance(row, ast.Call) and _called(row) == "param":
                cells = row.args
                row.keywords = [each for each in row.keywords if each.arg != "id"]
            if isinstance(row, ast.List | ast.Tuple) and not is_single:
                cells = row.elts
            if is_single and cells is None:
                table.elts[place] = ast.Constant(None)
            elif cells is None or max(numbers) >= len(cells):
                return False
            else:
                for number in numbers:
                    cells[number] = ast.Constant(None)
        return True


class _Pruner(ast.NodeTransformer):
    def __init__(self, module: _Module, dead: set[str], *, deep: bool) -> None:
        self._module = module
        self._dead = dead
        self._deep = deep
        self.freed: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in self._dead and not node.decorator_list:
            self.freed |= _loaded(node)
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node) if self._deep else node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self.generic_visit(node) if self._deep else node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self.generic_visit(node) if self._deep else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        bound = set().union(*map(_bound, node.targets))
        if bound <= self._dead and bound:
            self.freed |= _loaded(node.value)
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if _bound(node.target) <= self._dead and node.value is not None:
            self.freed |= _loaded(node.value)
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if _bound(node.target) <= self._dead:
            self.freed |= _loaded(node.value)
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        names = [getattr(each, "id", "") for each in getattr(node.target, "elts", [])]
        numbers = [number for number, each in enumerate(names) if each in self._dead]
        is_empty = self._module.empty_columns(node.iter, numbers, is_single=False)
        emptied = {names[number] for number in numbers} if is_empty else set()
        self._module.kept |= (_bound(node.target) & self._dead) - emptied
        return self.generic_visit(node)


def _assigned(body: list[ast.stmt]) -> dict[str, list[ast.expr]]:
    """Returns the values that are assigned to each name."""
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in _bound(target) - {""}:
                    found[name].append(node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for name in _bound(node.target) - {""}:
                found[name].append(node.value)
    return found


def _is_test(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    is_fixture = any("fixture" in ast.unparse(each) for each in node.decorator_list)
    return node.name.lower().startswith("test") and not is_fixture


def _call(
    name: str, arguments: list[ast.expr], options: list[ast.keyword] | None = None
) -> ast.Call:
    return ast.Call(
        ast.Attribute(ast.Name(MODULE, ast.Load()), name, ast.Load()), arguments, options or []
    )


def _expected_exception(
    call: ast.Call, has_pattern: bool, assigned: Mapping[str, list[ast.expr]]
) -> tuple[tuple[str, ...], str]:
    """Returns the kinds that a call of `raises` names and the pattern that it matches."""
    expected = call.args[0] if call.args else ast.Tuple([])
    parts = expected.elts if isinstance(expected, ast.Tuple) else [expected]
    names = [getattr(each, "attr", getattr(each, "id", "")) for each in parts]
    kinds = tuple(names) if all(each[:1].isupper() for each in names) else ()
    given = [each.value for each in call.keywords if each.arg == "match"]
    given += call.args[1:2] if has_pattern else []
    if given and isinstance(given[0], ast.Name):
        given = assigned.get(given[0].id, [])
    match given:
        case [ast.Constant(value=str() as pattern)]:
            return kinds, pattern
        case [ast.Call(args=[ast.Constant(value=str() as text)]) as made]:
            return kinds, re.escape(text) if _called(made) == "escape" else ""
    return kinds, ""


def _tolerance(call: ast.Call) -> tuple[float, float] | None:
    """Returns the relative and absolute tolerance that a call states; None if it states none."""
    name = _called(call).lower().replace("_", "")
    options: dict[str | None, Any] = {
        each.arg: each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)
    }
    relative = next((options[key] for key in ("rtol", "rel", "rel_tol") if key in options), None)
    absolute = next(
        (options[key] for key in ("atol", "abs", "abs_tol", "delta") if key in options), None
    )
    digits = options.get("places", options.get("decimal"))
    if "almostequal" in name and absolute is None:
        default = 6 if "array" in name else 7
        absolute, relative = 1.5 * 10.0 ** -(default if digits is None else digits), 0.0
    elif relative is None and absolute is None:
        known = {"approx": (1e-6, 1e-12), "allclose": (1e-5, 1e-8), "isclose": (1e-5, 1e-8)}
        return known.get(name)
    numbers = [each if isinstance(each, int | float) else 0.0 for each in (relative, absolute)]
    return float(numbers[0]), float(numbers[1])
