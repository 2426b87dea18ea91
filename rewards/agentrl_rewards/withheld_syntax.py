"""Reads the syntax trees of tests, for `agentrl_rewards.withheld`."""

from __future__ import annotations

import ast
from collections import defaultdict

MAKERS = frozenset({
    "approx", "array", "asarray", "Decimal", "Fraction", "set", "frozenset", "dict", "list",
    "tuple", "float", "int", "str", "complex", "bytes", "DataFrame", "Series", "Index", "datetime",
    "date",
    "timedelta", "OrderedDict", "zeros", "ones", "full", "arange", "linspace", "eye", "dedent",
})  # fmt: skip
"""Calls in which an expected value is made."""
TEXT_MAKERS = {"join", "format", "strip"}
"""The same, as methods of a literal."""


def is_literal(node: ast.AST) -> bool:
    """Returns True if a node is plain data, or data in a call that only makes such data."""
    if isinstance(node, ast.Call):
        parts = [*node.args, *(each.value for each in node.keywords)]
        return only_makes(node) and all(map(is_literal, parts))
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(map(is_literal, node.elts))
    if isinstance(node, ast.Dict):
        return all(is_literal(each) for each in (*node.keys, *node.values) if each is not None)
    try:
        ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def only_makes(call: ast.Call) -> bool:
    """Returns True if a call makes data of its arguments."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if called(call) in TEXT_MAKERS:
        return owner is not None and is_literal(owner)
    return called(call) in MAKERS and isinstance(owner, ast.Name | ast.Attribute | None)


def called(node: ast.AST) -> str:
    """Returns the name of the function that a call calls; "" if it has none."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def loaded(node: ast.AST) -> set[str]:
    return {
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }


def bound_names(target: ast.AST) -> set[str]:
    """Returns the names that an assignment binds; {""} if it binds anything but names."""
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Tuple | ast.List):
        return set().union(*map(bound_names, target.elts))
    return {""}


def root_name(node: ast.AST) -> str:
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


def assigned_values(body: list[ast.stmt]) -> dict[str, list[ast.expr]]:
    """Returns the values that are assigned to each name."""
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in bound_names(target) - {""}:
                    found[name].append(node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for name in bound_names(node.target) - {""}:
                found[name].append(node.value)
    return found
