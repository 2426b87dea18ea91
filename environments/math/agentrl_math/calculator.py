"""Evaluates an agent's arithmetic exactly and within limits, without running it as Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from fractions import Fraction

from agentrl.runtime import parse_expression

MAX_CHARS = 300
MAX_DEPTH = 40
MAX_BITS = 4096
"""Limit on the numerator and denominator of every intermediate result; 1,233 digits."""
MAX_LITERAL_EXPONENT = 1000


class CalculatorError(ValueError):
    """The expression cannot be calculated; the message tells the agent why."""


_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: lambda left, right: left % right,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: lambda value: value,
    ast.USub: lambda value: -value,
}
_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE](?P<exponent>[-+]?[0-9]+))?")


def calculate(expression: str) -> Fraction:
    """Returns the exact value of an arithmetic expression.

    Supports numbers (`12`, `1,000`, `0.5`, `1.5e3`), parentheses, `+ - * / // %`, powers as `**` or
    `^`, and unary signs, with Python's precedence. `/` does not round; `//` and `%` round down.
    Also accepts the signs `×`, `÷`, `·` and `−`, and ignores a trailing `=` or `=?`.

    Raises:
        CalculatorError: the text is not such an expression, divides by zero or exceeds a limit.
    """
    text = _plain(expression)
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth > MAX_DEPTH:
            raise CalculatorError(f"parentheses are nested more than {MAX_DEPTH} deep")
    try:
        tree = parse_expression(text)
    except SyntaxError as error:
        raise CalculatorError(
            f"{expression.strip()!r} is not an arithmetic expression (+ - * / // % ** and "
            "parentheses)"
        ) from error
    return _value(tree.body, text, 0)


def show(value: Fraction) -> str:
    """Formats an exact value: `6`, `0.25`, `1/3 (about 0.333333)`."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives)
    if rest == 1 and places <= 30:
        return _decimal(value, places)
    return f"{value.numerator}/{value.denominator} (about {_decimal(value, 6)})"


def _decimal(value: Fraction, places: int) -> str:
    digits = str(abs(round(value * 10**places))).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}"


def _plain(expression: str) -> str:
    if len(expression) > MAX_CHARS:
        raise CalculatorError(f"the expression is longer than {MAX_CHARS} characters")
    text = expression.translate(str.maketrans("×·÷−", "**/-")).replace("^", "**")
    text = " ".join(text.split()).removesuffix("?").rstrip().removesuffix("=").rstrip()
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"(?<![0-9.])0+(?=[0-9])", "", text)  # Python rejects 007
    if not text:
        raise CalculatorError("the expression is empty")
    if odd := re.search(r"[^0-9eE.+\-*/%() ]", text):
        raise CalculatorError(
            f"{odd.group()!r} is not arithmetic; write numbers, + - * / // % ** and parentheses"
        )
    return text


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise CalculatorError(f"the expression is nested more than {MAX_DEPTH} deep")
    match node:
        case ast.Constant():
            return _number(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, text, depth + 1))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, text, depth + 1), _value(right, text, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _value(left, text, depth + 1), _value(right, text, depth + 1)
            if second == 0 and isinstance(op, ast.Div | ast.FloorDiv | ast.Mod):
                raise CalculatorError("division by zero")
            return _bounded(_BINARY[type(op)](first, second))
    raise CalculatorError(
        f"{ast.get_source_segment(text, node)!r} is not arithmetic; write numbers, "
        "+ - * / // % ** and parentheses"
    )


def _number(literal: str) -> Fraction:
    # Parse the text, not the constant: 0.1 has to be one tenth, not a float.
    match = _NUMBER.fullmatch(literal)
    if match is None:
        raise CalculatorError(f"{literal!r} is not a number")
    if match["exponent"] and abs(int(match["exponent"])) > MAX_LITERAL_EXPONENT:
        raise CalculatorError(f"the exponent of {literal} is above {MAX_LITERAL_EXPONENT}")
    return _bounded(Fraction(literal))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculatorError("only whole exponents can be calculated exactly")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    # Checked beforehand, because the result could exhaust memory.
    if _bits(base) > 1 and _bits(base) * abs(int(exponent)) > 2 * MAX_BITS:
        raise CalculatorError("the power is too large")
    return _bounded(base ** int(exponent))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise CalculatorError("the number is too large")
    return value
