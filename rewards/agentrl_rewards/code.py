"""Rewards for programs: run the answer's code against unit tests, in a sandbox.

    text -> extract_code -> a fresh process in its own namespaces, per answer -> cases passed

Three kinds of test, told apart by the reference:

    "assert f(2) == 4"                                   Python code, run after the answer's
    ["assert f(2) == 4", "assert f(3) == 9"]             the same, one case each
    {"inputs": ["2\\n"], "outputs": ["4\\n"]}              standard input and output
    {"inputs": [[2]], "outputs": [4], "fn_name": "f"}    arguments and result of a function

The dictionaries are in the format of APPS and TACO and may also be given as JSON text; the expected
outputs never enter the sandbox. Tests that are Python code run in a separate process from the
answer's: they call the answer across the process boundary and get plain data back (numbers,
strings, lists, ...), so an answer gains nothing by rebinding builtins, returning objects that equal
everything, or skipping lines of the tests (`agentrl_rewards.code_calls` has the rules). Tests that
subclass one of the answer's classes cannot run that way and raise `GraderError`.

Printed words are compared as text, and as numbers within FLOAT_TOLERANCE where the expected one has
a decimal point; so are the floats in a function's result.

A program that reads standard input may exit as usual: its threads are joined, its exit handlers
run, and `os._exit(0)` counts as a normal exit.

A wrong answer, an exception, and too much time, memory or output are failures of the code and score
0. A sandbox that could not be set up raises `GraderError`. Linux only: the code has no network, no
files other than the standard library, no other processes and an empty environment
(see `agentrl_rewards.code_sandbox`).
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, cast

from agentrl.errors import GraderError
from agentrl.runtime import kill_group, parse_python, start_group
from agentrl.types import JSON
from agentrl_rewards.inputs import without_reasoning

SANDBOX_FILE = Path(__file__).with_name("code_sandbox.py")
GRACE_S = 5.0
"""A sandbox exits at its deadline; if it is still running this much later, it is killed."""
MAX_CODE_CHARS = 100_000
FLOAT_TOLERANCE = {"stdin": 1e-6, "function": 1e-5}
"""Kind of test -> largest absolute or relative error of a number that the expected output writes
with a decimal point or an exponent. Codeforces' problems state the one, LeetCode's the other."""

CaseStatus = Literal[
    "passed", "wrong", "error", "exited", "timeout", "memory", "output_limit", "not_run"
]
"""`error`: an exception or failed assert. `exited`: the process exited before the tests ended.
`not_run`: an earlier case failed and `partial` was off, or the deadline passed."""


@dataclass(slots=True, frozen=True)
class CodeGrade:
    """The result of a program on its test cases."""

    score: float
    """With `partial`, the fraction of cases that passed; without, 1.0 if all passed, else 0.0."""
    statuses: tuple[CaseStatus, ...]
    """One per case; empty if the text contains no code."""
    message: str
    """Describes the first failure in at most 500 characters; empty if all cases passed."""


@dataclass(slots=True, frozen=True)
class _Tests:
    kind: Literal["asserts", "stdin", "function"]
    cases: list[JSON]
    outputs: list[JSON]
    function: str = ""


def extract_code(text: str) -> str | None:
    """Returns the last closed code block after any reasoning, or None if there is none.

    Only blocks fenced as Python or without a language count; a Python block is preferred.
    """
    text = without_reasoning(text)
    python = other = None
    language, lines = None, []
    for line in text.split("\n"):
        if not line.startswith("```"):
            if language is not None:
                lines.append(line)
        elif language is None:
            language, lines = line[3:].strip().lower(), []
        else:
            if language in ("python", "py", "python3"):
                python = "\n".join(lines)
            elif not language:
                other = "\n".join(lines)
            language = None
    return python if python is not None else other


def grade_code(
    text: str,
    reference: JSON,
    *,
    partial: bool = False,
    deadline_s: float = 6.0,
    memory_bytes: int = 512 << 20,
    max_threads: int = 8,
) -> CodeGrade:
    """Runs the code in `text` against the tests in `reference`. Blocks; callable from any thread.

    Args:
        text: the policy's text, from which `extract_code` takes the code.
        reference: the tests, in one of the forms listed in the module's docstring.
        partial: True scores the fraction of cases that passed. False scores 1.0 only if all
            passed, and stops at the first failure.
        deadline_s: wall-clock seconds for all cases together, including the sandbox's start.
        memory_bytes: limit on the code's address space (RLIMIT_AS). On top of it, files may take
            1/32 of this, at most 16 MiB.
        max_threads: threads the code may run at once. It may not start processes.

    Raises:
        GraderError: the tests cannot be read, or the sandbox could not be set up or did not reply.
    """
    tests = read_tests(reference)
    code = extract_code(text)
    if code is None:
        return CodeGrade(0.0, (), "no closed code block")
    if len(code) > MAX_CODE_CHARS:
        return CodeGrade(0.0, (), f"more than {MAX_CODE_CHARS} characters of code")
    cases, tests_text = tests.cases, b""
    if tests.kind == "asserts":
        cases, tests_text = _as_positions([str(case) for case in tests.cases])
    request: dict[str, JSON] = {
        "code": code,
        "kind": tests.kind,
        "cases": cases,
        "function": tests.function,
        "deadline_s": deadline_s,
        "memory_bytes": memory_bytes,
        "max_threads": max_threads,
        "all_cases": partial,
    }
    outcomes = _run_sandbox(request, tests_text, deadline_s)
    return _judge(outcomes, tests, partial)


async def grade_code_async(text: str, reference: JSON, **limits: Any) -> CodeGrade:
    """Calls `grade_code` on a thread pool, with at most one sandbox per CPU core at a time.

    Takes its arguments and raises its errors. The deadline starts with the sandbox; time spent
    waiting for a free thread does not count.
    """
    call = functools.partial(grade_code, text, reference, **limits)
    return await asyncio.get_running_loop().run_in_executor(_executor(), call)


async def code(
    text: str, reference: JSON, *, partial: bool = False, deadline_s: float = 6.0
) -> float:
    """Returns the score of the code in `text`, 0 to 1. Takes the arguments of `grade_code`.

    Raises:
        GraderError: see `grade_code`; such failures are never scored 0.
    """
    return (await grade_code_async(text, reference, partial=partial, deadline_s=deadline_s)).score


def read_tests(reference: JSON) -> _Tests:
    """Parses a reference into its test cases.

    Raises:
        GraderError: the reference is in none of the supported forms.
    """
    if isinstance(reference, str) and reference.lstrip().startswith("{"):
        with suppress(ValueError):
            reference = json.loads(reference)
    texts = [reference] if isinstance(reference, str) else reference
    if isinstance(texts, list) and texts:
        sources = [case for case in texts if isinstance(case, str) and case.strip()]
        if len(sources) == len(texts):
            for source in sources:
                _check_source(source)
            return _Tests("asserts", [*sources], [])
    if isinstance(reference, Mapping):
        inputs, outputs = reference.get("inputs"), reference.get("outputs")
        function = reference.get("fn_name") or ""
        element = list if function else str
        if (
            isinstance(inputs, list)
            and isinstance(outputs, list)
            and isinstance(function, str)
            and 0 < len(inputs) == len(outputs)
            and all(isinstance(case, element) for case in inputs)
            and (function or all(isinstance(case, str) for case in outputs))
        ):
            return _Tests("function" if function else "stdin", inputs, outputs, function)
    raise GraderError(
        f"cannot read the tests {str(reference)[:80]!r}: give assert statements (a string or a "
        'list of strings) or {"inputs": [...], "outputs": [...]} of equal length, with "fn_name" '
        "if they are argument lists and results"
    )


def _check_source(source: str) -> None:
    """Raises GraderError if a test is not valid Python, or defines `check` but never calls it."""
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError) as error:
        raise GraderError(f"the test {source[:80]!r} is not valid Python: {error}") from error
    defined = any(isinstance(each, ast.FunctionDef) and each.name == "check" for each in tree.body)
    calls = (each.func for each in ast.walk(tree) if isinstance(each, ast.Call))
    if defined and not any(isinstance(each, ast.Name) and each.id == "check" for each in calls):
        raise GraderError(
            "the tests define check() but never call it, so any answer would pass; append a line "
            "such as `check(name_of_the_function)`"
        )


def _judge(outcomes: list[dict[str, str]], tests: _Tests, partial: bool) -> CodeGrade:
    statuses: list[CaseStatus] = []
    message = ""
    for index, outcome in enumerate(outcomes):
        status = outcome["status"]
        if status == "unusable":
            raise GraderError(f"these tests cannot run in the sandbox: {outcome['output']}")
        if status == "ok":
            status = "passed" if _expected(tests, index, outcome["output"]) else "wrong"
        if status != "passed" and not message:
            said = f": {outcome['output']}" if status in ("error", "exited") else ""
            message = f"case {index}: {status}{said}"[:500]
        statuses.append(cast(CaseStatus, status))
    statuses.extend("not_run" for _ in range(len(tests.cases) - len(statuses)))
    num_passed = statuses.count("passed")
    all_passed = num_passed == len(statuses)
    score = num_passed / len(statuses) if partial else float(all_passed)
    return CodeGrade(score, tuple(statuses), message)


def _expected(tests: _Tests, index: int, output: str) -> bool:
    if tests.kind == "asserts":
        return True
    expected = tests.outputs[index]
    if tests.kind == "function":
        with suppress(ValueError, RecursionError, OverflowError):
            return _same_value(json.loads(output), expected)
        return False
    assert isinstance(expected, str)
    lines, wanted = _lines(output), _lines(expected)
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.strip().splitlines()]


_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    words, wanted = line.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, expected: str) -> bool:
    """Returns whether two words are equal, or numbers of which the expected one is a decimal."""
    if word == expected:
        return True
    if not re.search("[.eE]", expected) or not _DECIMAL.fullmatch(expected):
        return False
    return bool(_DECIMAL.fullmatch(word)) and _is_close(float(word), float(expected), "stdin")


def _same_value(value: JSON, expected: JSON) -> bool:
    if isinstance(expected, float) and isinstance(value, int | float):
        return value == expected or _is_close(float(value), expected, "function")
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(_same_value, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(
            _same_value(value[key], expected[key]) for key in expected
        )
    return bool(value == expected)


def _is_close(number: float, expected: float, kind: str) -> bool:
    tolerance = FLOAT_TOLERANCE[kind]
    return math.isclose(number, expected, rel_tol=tolerance, abs_tol=tolerance)


def _as_positions(texts: list[str]) -> tuple[list[JSON], bytes]:
    """Concatenates the texts; returns `[position, length]` in bytes of each, and the result."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    ends = [0, *accumulate(map(len, encoded))]
    cases: list[JSON] = [[start, len(text)] for start, text in zip(ends, encoded, strict=False)]
    return cases, b"".join(encoded)


def _run_sandbox(
    request: dict[str, JSON], tests_text: bytes, deadline_s: float
) -> list[dict[str, str]]:
    if sys.platform != "linux":
        raise GraderError("the sandbox of the code reward needs Linux")
    late = False
    # In a file, because the answer's process is forked with a copy of the sandbox's memory.
    with open(os.memfd_create("tests"), "wb") as tests_file:
        tests_file.write(tests_text)
        tests_file.flush()
        process = start_group(
            # -I -S: no site packages, no user site directory, no environment variables
            [sys.executable, "-I", "-S", str(SANDBOX_FILE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            cwd="/",
            pass_fds=[tests_file.fileno()],
        )
        sent = json.dumps(request | {"tests_fd": tests_file.fileno()}).encode()
    try:
        data, _ = process.communicate(sent, timeout=deadline_s + GRACE_S)
    except subprocess.TimeoutExpired:
        late, data = True, b""
    finally:
        # pid 1 of the sandbox dies with the launcher, and the kernel kills its whole namespace
        if process.returncode is None:
            kill_group(process)
            process.communicate()
    if late:
        raise GraderError(f"the code sandbox did not exit within {deadline_s + GRACE_S:g} s")
    try:
        reply = json.loads(data)
    except ValueError as error:
        raise GraderError("the code sandbox exited without a reply") from error
    if "error" in reply:
        raise GraderError(
            f"the code sandbox cannot be set up ({reply['error']}): it needs libseccomp and "
            "unprivileged user namespaces; in Docker, run the grader with a seccomp profile that "
            "allows unshare and mount"
        )
    return reply["cases"]


@functools.cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 2, "code-reward")


os.register_at_fork(after_in_child=_executor.cache_clear)
