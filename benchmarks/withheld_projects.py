"""Tries `agentrl_rewards.withheld` on the tests that projects ship, with mutants and rewrites.

    python benchmarks/withheld_projects.py networkx=VENV/bin/python ... [--files 20]

Each project is installed in an environment of its own, with pytest and with its tests. It is copied
to a temporary folder, so the environment stays as it is. From a seeded sample of its test files,
each a process of its own, the script takes those in which a test passes within `--seconds`:

* Their tests run as they are, then twice without what they expect, with the installed project as
  the reference solution. A test is covered if it has a strong probe with a stable value, and weak
  if it has only weak probes with stable values. `alike` counts the tests with the same outcomes.
* A mutant changes a constant, an operator or a branch of a function that a test file executes (one
  of the faster half). It counts if a covered test fails with it that passes without, and is told
  if `compare` says so.
* A rewrite changes a function in form only: locals renamed, a conditional expression or a
  comprehension written as statements, an expression moved to a helper, two statements exchanged. It
  counts if the outcomes stay the same, and `compare` should not tell it from the reference.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.runtime import kill_group, start_group
from agentrl_rewards.withheld import (
    Values,
    Withheld,
    compare,
    read_reports,
    stable,
    tells,
    withhold,
)

PLUGIN = """
import json, os, sys, pytest
outcomes, ran = [], set()
def seen(frame, event, argument):
    ran.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    sys.settrace(seen if os.environ["TRACE"] else None)
    yield
    sys.settrace(None)
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        name = getattr(getattr(item, "function", None), "__qualname__", item.name)
        outcomes.append([name, report.outcome + ("x" if hasattr(report, "wasxfail") else "")])
def pytest_sessionfinish():
    with open(os.environ["OUTCOMES"], "w") as file:
        json.dump([outcomes, sorted(ran)], file)
"""
SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.And: ast.Or,
    ast.Or: ast.And, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}  # fmt: skip
Function = ast.FunctionDef
Change = tuple[ast.AST, Callable[[], list[ast.AST]]]
"""A node and a function that makes what replaces it."""


# --- mutants and rewrites -------------------------------------------------------------------------


def changed(node: Any, **fields: Any) -> list[ast.AST]:
    """Returns a list of a copy of the node with other fields."""
    made = copy.copy(node)
    for name, each in fields.items():
        setattr(made, name, each)
    return [made]


def mutants(function: Function) -> Iterator[tuple[str, Change]]:
    """Finds the constants, operators and branches of a function that can be made wrong."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    inside_text = {
        id(part)
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }
    for node in (each for statement in body for each in ast.walk(statement)):
        if id(node) in inside_text:
            continue  # before Python 3.12 the places of its parts are wrong
        match node:
            case ast.Constant(value=bool() | int() | float() as old):
                value = not old if isinstance(old, bool) else old + 1
                yield "constant", (node, lambda n=node, v=value: changed(n, value=v))
            case ast.Constant(value=str() as text):
                yield "constant", (node, lambda n=node, v=f"{text}x": changed(n, value=v))
            case ast.BinOp(op=old) | ast.BoolOp(op=old) if type(old) in SWAPPED:
                op = SWAPPED[type(old)]()
                yield "operator", (node, lambda n=node, op=op: changed(n, op=op))
            case ast.Compare(ops=[old]) if type(old) in SWAPPED:
                ops = [SWAPPED[type(old)]()]
                yield "operator", (node, lambda n=node, ops=ops: changed(n, ops=ops))
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield "branch", (test, lambda t=test: [ast.UnaryOp(ast.Not(), t)])


def names_in(node: ast.AST, kind: type) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, kind)}


def renamed(node: Any, names: dict[str, str]) -> Any:
    made = copy.deepcopy(node)
    for each in ast.walk(made):
        if isinstance(each, ast.Name):
            each.id = names.get(each.id, each.id)
    return made


def rewrites(function: Function) -> Iterator[tuple[str, Change]]:
    """Finds what can be written otherwise in a function without a change of what it does."""
    nested = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Global,
              ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.Match,
              ast.Import, ast.ImportFrom, ast.Delete, ast.Try)  # fmt: skip
    inner = [each for statement in function.body for each in ast.walk(statement)]
    reflects = {"locals", "vars", "super", "eval", "exec", "__class__"}
    if any(isinstance(each, nested) for each in inner) or names_in(function, ast.Load) & reflects:
        return
    stored = names_in(function, ast.Store)
    arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    if new := {name: f"{name}_of_it" for name in stored - arguments}:
        other = changed(function, body=[renamed(each, new) for each in function.body])
        yield "renamed locals", (function, lambda: other)
    for node in inner:
        match node:
            case ast.Assign(targets=[ast.Name()], value=value) | ast.Return(value=value):
                pass
            case _:
                continue

        def with_value(each: ast.expr, node: ast.AST = node) -> Any:
            return changed(node, value=each)[0]

        match value:
            case ast.IfExp(test=test, body=one, orelse=two):
                branches = ast.If(test, [with_value(one)], [with_value(two)])
                yield "if and else", (node, lambda made=branches: [made])
            case ast.ListComp(elt=element, generators=[ast.comprehension(is_async=0) as loop]):
                own = {name: f"{name}_here" for name in names_in(loop.target, ast.Store)}
                append = ast.Call(ast.Attribute(ast.Name("made"), "append"), [element], [])
                inside: ast.stmt = ast.Expr(append)
                if loop.ifs:
                    inside = ast.If(ast.BoolOp(ast.And(), loop.ifs), [inside], [])
                body = ast.For(renamed(loop.target, own), loop.iter, [renamed(inside, own)], [])
                made = [ast.Assign([ast.Name("made")], ast.List([])), body]
                yield "loop", (node, lambda m=made, w=with_value: [*m, w(ast.Name("made"))])
        if value is not None and not isinstance(value, ast.Constant | ast.Name):
            free = sorted(names_in(value, ast.Load) & (stored | arguments))
            empty: Any = ast.parse(f"lambda {', '.join(free)}: 0", mode="eval").body
            helper: Any = changed(empty, body=value)[0]
            call = ast.Call(ast.Name("helper"), [ast.Name(n) for n in free], [])
            first = ast.Assign([ast.Name("helper")], helper)
            yield "helper", (node, lambda f=first, c=call, w=with_value: [f, w(c)])
    blocks = [getattr(each, "body", []) for each in (function, *inner)]
    for block in (each for each in blocks if isinstance(each, list)):
        for one, two in itertools.pairwise(block):
            own, others = (names_in(each, ast.Store) for each in (one, two))
            is_free = not (
                own & (names_in(two, ast.Load) | others) or others & names_in(one, ast.Load)
            )
            if is_free and _is_simple(one) and _is_simple(two):
                span = changed(one, end_lineno=two.end_lineno, end_col_offset=two.end_col_offset)[0]
                yield "exchanged", (span, lambda one=one, two=two: [two, one])


def _is_simple(node: ast.stmt) -> bool:
    """Returns True for an assignment to a name that calls nothing."""
    is_assignment = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    return is_assignment and not any(isinstance(each, ast.Call) for each in ast.walk(node))


def apply(text: str, change: Change) -> str:
    """Returns the module with one node replaced; its other lines stay as they are."""
    node: Any
    node, make = change
    lines = text.encode().splitlines(keepends=True)
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)]) - 1
    start = node.col_offset
    before, after = lines[first][:start], lines[node.end_lineno - 1][node.end_col_offset :]
    parts = [ast.unparse(ast.fix_missing_locations(copy.deepcopy(each))) for each in make()]
    if isinstance(node, ast.expr):
        made = f"({parts[0]})".encode()
    else:
        made = ("\n" + " " * start).join("\n".join(parts).splitlines()).encode()
    return b"".join([*lines[:first], before, made, after, *lines[node.end_lineno :]]).decode()


# --- running --------------------------------------------------------------------------------------


@dataclass
class Run:
    outcomes: dict[str, Counter[str]]
    """Outcomes of each test by the qualified name of its function; none if the run never ended."""
    executed: set[tuple[str, int]]
    """Module and first line of the project's functions, if they were traced."""
    values: Values
    seconds: float


@dataclass
class File:
    path: Path
    made: Withheld
    original: Run
    runs: list[Run]
    reference: dict[int, Any] = field(default_factory=dict)

    def tests_with(self, *, strong: bool) -> set[str]:
        tests = {
            self.made.probes[number].test
            for number, values in self.reference.items()
            if not strong
            or (self.made.probes[number].strong and any(tells(value) for _, value in values))
        }
        return {name for name in self.original.outcomes if _place(name) in tests}

    @property
    def passed(self) -> set[str]:
        return {name for name, found in self.original.outcomes.items() if found["passed"]}


def _place(name: str) -> tuple[str, str]:
    owner, _, function = name.rpartition(".")
    return owner.rpartition(".")[2], function


class Project:
    """A copy of an installed project, with its tests."""

    def __init__(self, name: str, python: Path, folder: Path, seconds: float) -> None:
        self.python, self.folder, self.seconds = python, folder, seconds
        find = f"import {name}, os; print(os.path.dirname({name}.__file__))"
        found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
        source = Path(found.stdout.strip())
        self.package = Path(shutil.copytree(source, folder / source.name))
        for libraries in source.parent.glob("*.libs"):
            shutil.copytree(libraries, folder / libraries.name)
        (folder / "outcomes_plugin.py").write_text(PLUGIN)
        (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
        self.reports = folder / "reports"

    def run(self, path: Path, *, trace: bool = False) -> Run:
        """Runs the tests of a file."""
        outcomes = self.folder / "outcomes.json"
        for each in (outcomes, self.reports):
            each.unlink(missing_ok=True)
        variables = {"OUTCOMES": str(outcomes), "TRACE": "1" if trace else "", "MPLBACKEND": "agg",
                     "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
        command = [str(self.python), "-m", "pytest", "-q", "-p", "outcomes_plugin", str(path)]
        start = time.perf_counter()
        process = start_group(command, cwd=self.folder, env=os.environ | variables,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            process.wait(self.seconds * (5 if trace else 1))  # tracing is slow
        except subprocess.TimeoutExpired:
            pass
        finally:
            kill_group(process)
        seconds = time.perf_counter() - start
        found: dict[str, Counter[str]] = defaultdict(Counter)
        tests, executed = json.loads(outcomes.read_text()) if outcomes.exists() else ([], [])
        for name, outcome in tests:
            found[name][outcome] += 1
        text = self.reports.read_text(errors="replace") if self.reports.exists() else ""
        own = f"{self.package}/"
        functions = {(p, n) for p, n in executed if p.startswith(own) and "/tests/" not in p}
        return Run(dict(found), functions, read_reports(text.splitlines()), seconds)

    def with_text(self, path: Path, text: str, tests: Path, **options: Any) -> Run:
        """Runs tests while a file of the project holds another text."""
        original = path.read_text()
        path.write_text(text)
        try:
            return self.run(tests, **options)
        finally:
            path.write_text(original)

    def try_file(self, path: Path) -> File | None:
        """Runs a test file as it is, and twice without what it expects."""
        original = self.run(path)
        if not any(each["passed"] for each in original.outcomes.values()):
            return None
        made = withhold(path.read_text(), report_file=str(self.reports))
        runs = [self.with_text(path, made.text, path, trace=each) for each in (False, True)]
        file = File(path, made, original, runs)
        file.reference = stable(made.probes, file.runs[0].values, file.runs[1].values)
        return file


# --- changes of the project -----------------------------------------------------------------------


def functions(path: Path) -> dict[int, Function]:
    """Returns the functions of a module by the line at which their code begins."""
    found = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, Function)]
    return {min([f.lineno, *(d.lineno for d in f.decorator_list)]): f for f in found}


def try_changes(
    project: Project,
    files: Sequence[File],
    find: Callable[[Function], Iterator[tuple[str, Change]]],
    count: int,
    draw: random.Random,
) -> str:
    """Changes the functions that the files execute, one at a time, until enough changes count.

    Returns of how many of them `compare` finds a wrong value.
    """
    is_rewrite = find is rewrites
    tried: list[bool] = []
    kinds: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    files = [
        each
        for each in files
        if each.tests_with(strong=True) & each.passed and each.runs[1].executed
    ]
    files = sorted(files, key=lambda each: each.original.seconds)[: (len(files) + 1) // 2]
    for _ in range(12 * count if files else 0):
        file = draw.choice(files)
        name, line = draw.choice(sorted(file.runs[1].executed))
        path = Path(name)
        function = functions(path).get(line) if path.suffix == ".py" else None
        found = list(find(function)) if function else []
        if not found:
            continue
        draw.shuffle(found)
        kind, change = min(found, key=lambda each: kinds[each[0]])
        text = path.read_text()
        new = apply(text, change)
        try:
            ast.parse(new)
        except SyntaxError:
            continue  # the statement shares its line with another
        if (name, new) in seen:
            continue
        seen.add((name, new))
        kinds[kind] += 1
        run = project.with_text(path, new, file.path)
        covered = file.tests_with(strong=True) & file.passed
        killed = [t for t in covered if run.outcomes.get(t) != file.original.outcomes[t]]
        counts = run.outcomes == file.original.outcomes if is_rewrite else killed and run.outcomes
        if not counts:
            continue
        path.write_text(new)
        try:
            values = project.with_text(file.path, file.made.text, file.path).values
        finally:
            path.write_text(text)
        tried.append(bool(compare(file.made.probes, file.reference, values).wrong))
        print(f"  {kind}: {'told' if tried[-1] else 'not told'} in {file.path.name}", flush=True)
        if len(tried) == count:
            break
    return f"{sum(tried)} of {len(tried)}"


def measure(name: str, python: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of a project."""
    draw = random.Random(f"{options.seed} {name}")
    with tempfile.TemporaryDirectory() as folder:
        project = Project(name, python, Path(folder), options.seconds)
        paths = sorted(project.package.rglob("test_*.py"))
        draw.shuffle(paths)
        files: list[File] = []
        for path in paths[: 4 * options.files]:
            file = project.try_file(path) if len(files) < options.files else None
            files += [file] if file else []
            print(f"  {len(files)} files of {name}", end="\r", flush=True)
        if not files:
            raise SystemExit(f"{name}: no test passes; try {python} -m pytest {project.package}")
        told = try_changes(project, files, mutants, options.mutants, draw)
        held = try_changes(project, files, rewrites, options.rewrites, draw)
    tests = [(file, name) for file in files for name in sorted(file.passed)]
    covered = [name for file, name in tests if name in file.tests_with(strong=True)]
    some = [name for file, name in tests if name in file.tests_with(strong=False)]
    alike = [
        found == file.runs[0].outcomes.get(test)
        for file in files
        for test, found in file.original.outcomes.items()
    ]
    kept = sum(len(file.reference) for file in files)
    reported = sum(len(file.runs[0].values) for file in files)
    return {
        "project": name,
        "files": len(files),
        "tests": len(tests),
        "covered": len(covered),
        "weak": len(some) - len(covered),
        "uncovered": len(tests) - len(some),
        "stable probes": f"{kept} of {reported}",
        "alike": f"{sum(alike)} of {len(alike)}",
        "seconds": f"{sum(f.original.seconds for f in files):.0f} -> "
        f"{sum(f.runs[0].seconds for f in files):.0f}",
        "mutants told": told,
        "rewrites told": held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("projects", nargs="+", metavar="PACKAGE=PYTHON")
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--mutants", type=int, default=10)
    parser.add_argument("--rewrites", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60, help="limit for a test file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    for each in options.projects:
        name, _, python = each.partition("=")
        rows.append(measure(name, Path(python).absolute(), options))
        print(rows[-1], flush=True)
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    main()
