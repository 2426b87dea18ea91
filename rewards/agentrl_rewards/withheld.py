"""Withholds the expected values of Python tests from the code that they test.

    assert parse("0.05") == 5              ->  value(1, parse("0.05"))
    assertAlmostEqual(total(x), 0.3)       ->  value(2, total(x))
    with pytest.raises(ValueError): f()    ->  with raises(3): f()

`withhold` drops the expected side of each comparison, and whatever only that side
needs: names, columns of parameters and of tables. The tests report the actual side instead, in
canonical form (`withheld_report`). The same tests are run with the reference solution, in which
`stable` finds the values to expect, and `compare` judges outside of the process that ran the code.
What that process says about the tests' outcome is not read, so forging it gains nothing.

A probe is *strong* if the value is one that code cannot easily guess. One that reports a bit or the
mere kind of an exception, or whose expectation stays readable where the tests run (a fixture, a
file, a variable that the test needs, too), is *weak*. A test is covered if it has a strong probe
with a stable value that tells something (`tells`). Code that knows the right values for a test's
inputs, from a report of the bug or from other files, can't be told from a solution.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.runtime import parse_python
from agentrl_rewards.withheld_syntax import (
    MAKERS,
    assigned_values,
    bound_names,
    called,
    is_literal,
    loaded,
    only_makes,
    root_name,
)
from agentrl_rewards.withheld_values import (
    OPERATORS,
    RELATIVE,
    Comparison,
    Probe,
    Test,
    Values,
    compare,
    is_right,
    read_reports,
    stable,
    tells,
)

__all__ = [
    "Comparison",
    "Probe",
    "Test",
    "Values",
    "Withheld",
    "compare",
    "is_right",
    "read_reports",
    "stable",
    "tells",
    "withhold",
]

MODULE = "_withheld"
REPORTER = Path(__file__).with_name("withheld_report.py")
RAISES = {"raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp", "assert_raises"}
CLOSE = {"allclose", "isclose", "array_equal", "array_equiv", "equals"}
READERS = frozenset({
    "open", "read", "readlines", "read_text", "read_bytes", "load", "loadtxt", "genfromtxt",
    "fromfile", "read_csv", "imread",
})  # fmt: skip
"""Calls by which a test takes what it expects from a file, where the code under test can read
it."""
EXPECTED_NAME = re.compile(r"expect|desired|want|correct|answer|truth|^exp|^ref", re.IGNORECASE)
AS_OPERATOR: dict[str, type[ast.cmpop]] = {
    "in": ast.In, "notin": ast.NotIn, "is": ast.Is, "isnot": ast.IsNot, "greater": ast.Gt,
    "less": ast.Lt, "greaterequal": ast.GtE, "lessequal": ast.LtE, "notequal": ast.NotEq,
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class Withheld:
    text: str
    """The tests without what they expect. They append reports to a file (`withhold`)."""
    probes: dict[int, Probe]


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
        self._globals = assigned_values(module.body)
        self._classes = {each.name for each in module.body if isinstance(each, ast.ClassDef)}
        self.kept: set[str] = set()
        """Names that loops bind for expected sides alone, in columns that cannot be emptied."""

    # statements

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        outer, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = outer
        return node

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        if self._scope is None:
            self._scope = _Scope((self._class, node.name), node, assigned_values(node.body))
            self._scopes.append(self._scope)
            if _is_test(node):
                self.tests.add(self._scope.test)
            self.generic_visit(node)
            self._scope = None
        else:
            self.generic_visit(node)
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = _function

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
        if self._scope is None or called(node) not in RAISES:
            return node
        has_pattern = "Regex" in called(node)
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
            if called(test) in CLOSE and len(both) > 1:
                return [self._value(both[0], both[1], _tolerance(test))]
            match both[-1:]:  # (a == b).all(), all(a == b)
                case [ast.Compare(ops=[ast.Eq()]) as inner] if called(test) == "all":
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
            if isinstance(each, ast.Call) and called(each) == "approx":
                tolerance = _tolerance(each)
        one, two = (
            each.args[0] if isinstance(each, ast.Call) and called(each) == "approx" else each
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
        name = called(node).lower().replace("_", "")
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
            return self._assertion(ast.Compare(arguments[0], [compare], [ast.Constant(None)]))
        if len(arguments) < 2:
            return None
        if rest in AS_OPERATOR:
            return self._assertion(ast.Compare(arguments[0], [AS_OPERATOR[rest]()], arguments[1:2]))
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
        if isinstance(node, ast.Call) and not only_makes(node):
            return 2.5 if called(node)[:1].isupper() else 3
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
                if isinstance(each, ast.Call) and called(each) in READERS:
                    return True
                if isinstance(each, ast.Name) and each.id not in seen:
                    seen.add(each.id)
                    values = self._scope.values.get(each.id, []) if self._scope else []
                    todo += values or self._globals.get(each.id, [])
        return False

    def _probe(self, expected: ast.AST, **values: Any) -> int:
        assert self._scope is not None
        names = loaded(expected)
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
            for name in loaded(self.module)
            if any(map(is_literal, self._globals.get(name, [])))
        }
        for scope in self._scopes:
            own = scope.arguments | scope.values.keys()
            as_it_is = loaded(scope.node) & own | constants - own
            for number, probe in self.probes.items():
                if probe.test == scope.test:
                    probe.strong &= (
                        scope.test in self.tests
                        and not probe.names & visible[scope.test]
                        and root_name(self._expected[number]) not in as_it_is
                    )

    def _prune_body(self, node: ast.AST, dropped: set[str]) -> set[str]:
        """Drops assignments and columns of tables that nothing needs any more; returns the names
        that are no longer loaded."""
        while True:
            dead = dropped - loaded(node)
            pruner = _Pruner(self, dead, deep=not isinstance(node, ast.Module))
            pruner.generic_visit(node)
            if pruner.freed <= dropped:
                return dead
            dropped |= pruner.freed

    def _prune_parameters(self, decorator: ast.expr, dead: set[str]) -> set[str]:
        """Empties the columns of `parametrize` that have a dead name; returns those names."""
        if called(decorator) != "parametrize" or not isinstance(decorator, ast.Call):
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
            if isinstance(row, ast.Call) and called(row) == "param":
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
            self.freed |= loaded(node)
            return ast.copy_location(ast.Pass(), node)
        return self._inside(node)

    def _inside(self, node: ast.AST) -> ast.AST:
        return self.generic_visit(node) if self._deep else node

    visit_AsyncFunctionDef = visit_ClassDef = _inside

    def _assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> ast.AST:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        bound = set().union(*map(bound_names, targets))
        if node.value is None or not bound or not bound <= self._dead:
            return node
        self.freed |= loaded(node.value)
        return ast.copy_location(ast.Pass(), node)

    visit_Assign = visit_AnnAssign = visit_AugAssign = _assignment

    def visit_For(self, node: ast.For) -> ast.AST:
        names = [getattr(each, "id", "") for each in getattr(node.target, "elts", [])]
        numbers = [number for number, each in enumerate(names) if each in self._dead]
        is_empty = self._module.empty_columns(node.iter, numbers, is_single=False)
        emptied = {names[number] for number in numbers} if is_empty else set()
        self._module.kept |= (bound_names(node.target) & self._dead) - emptied
        return self.generic_visit(node)


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
            return kinds, re.escape(text) if called(made) == "escape" else ""
    return kinds, ""


def _tolerance(call: ast.Call) -> tuple[float, float] | None:
    """Returns the relative and absolute tolerance that a call states; None if it states none."""
    name = called(call).lower().replace("_", "")
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
