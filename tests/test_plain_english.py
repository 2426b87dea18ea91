"""Docstrings begin with a verb or a noun."""

import ast
from pathlib import Path

import pytest

ROOMS = ("agentrl", "environments", "rewards", "tests", "benchmarks")
RIDDLES = ("Of", "What", "Who", "Whose", "How", "Where", "Whether", "Around", "That")
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_say_what_something_is_or_does(room):
    found = []
    for path in sorted((ROOT / room).rglob("*.py")):
        if "swe_fixtures" in path.parts:  # repositories that agents are tried on
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if text.split(" ")[0] in RIDDLES:
                    found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not found, "begin with a verb, as in 'Returns ...':\n" + "\n".join(found)
