"""Parses Python source in any thread."""

from __future__ import annotations

import ast
import threading
from typing import cast

MAX_ATTEMPTS = 10
_one_at_a_time = threading.Lock()


def parse_python(source: str) -> ast.Module:
    """Returns the tree of statements; raises what `ast.parse` raises."""
    return cast(ast.Module, _parse(source, "exec"))


def parse_expression(source: str) -> ast.Expression:
    """Returns the tree of one expression; raises what `ast.parse` raises."""
    return cast(ast.Expression, _parse(source, "eval"))


def _parse(source: str, mode: str) -> ast.AST:
    # CPython 3.11 keeps the depth of the tree that it builds in one place for all threads, and says
    # "AST constructor recursion depth mismatch" where one interrupts another. The lock keeps apart
    # those that parse here; the attempts are for libraries that parse meanwhile.
    for _ in range(MAX_ATTEMPTS - 1):
        try:
            with _one_at_a_time:
                return ast.parse(source, mode=mode)
        except SystemError:
            continue
    return ast.parse(source, mode=mode)
