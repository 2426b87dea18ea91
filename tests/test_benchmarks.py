"""Every benchmark imports names that exist: a move would break those that no test runs."""

import ast
import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(path for path in BENCHMARKS.rglob("*.py") if not {"before", "fix"} & {*path.parts})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_of_ours_exists(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("agentrl"):
            continue
        try:
            module = importlib.import_module(node.module)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("agentrl"):
                raise
            continue  # needs a package that is not installed
        for name in (alias.name for alias in node.names):
            submodule = f"{node.module}.{name}"
            assert hasattr(module, name) or importlib.util.find_spec(submodule), submodule
