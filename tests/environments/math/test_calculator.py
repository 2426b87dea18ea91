"""The calculator is exact, bounded and never runs Python."""

import operator
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_math.calculator import MAX_BITS, CalculatorError, calculate, show


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("347*28", "9716"),
        ("347 × 28 =?", "9716"),
        ("1,000 + 1", "1001"),
        ("(3 + 4) * 2.5 / 7", "2.5"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "1/3 (about 0.333333)"),
        ("-1/3", "-1/3 (about -0.333333)"),
        ("-1/8", "-0.125"),
        ("6/3", "2"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("2*3^2", "18"),
        ("-2^2", "-4"),
        ("2**-2", "0.25"),
        ("2^3^2", "512"),
        ("(-1)^999999999", "-1"),
        ("0^5", "0"),
        ("1.5e3", "1500"),
        ("007 + 1", "8"),
        ("−5 ÷ 2", "-2.5"),
        (" 5\n+ 5 ", "10"),
        ("- - 5", "5"),
    ],
)
def test_values(expression, shown):
    assert show(calculate(expression)) == shown


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "empty"),
        ("  =?", "empty"),
        ("1/0", "division by zero"),
        ("1//0", "division by zero"),
        ("1%0", "division by zero"),
        ("0^-1", "division by zero"),
        ("2^0.5", "whole exponents"),
        ("9^9^9^9", "too large"),
        ("9**9**9**9", "too large"),
        ("2^5000", "too large"),
        ("1e999999999", "exponent"),
        ("(10^1000)*(10^1000)", "too large"),
        ("1" * 301, "longer than"),
        ("(" * 100 + "1" + ")" * 100, "nested"),
        ("-" * 200 + "1", "nested"),
        ("3 +", "not an arithmetic expression"),
        ("50%", "not an arithmetic expression"),
        ("1 2", "not an arithmetic expression"),
        ("(1", "not an arithmetic expression"),
        ("x + 1", "'x' is not arithmetic"),
        ("__import__('os')", "'_' is not arithmetic"),
        ("sum([1])", "'s' is not arithmetic"),
        ("1, 2", "',' is not arithmetic"),
        ("eE", "is not arithmetic"),
        ("e()", "is not arithmetic"),
        ("1 .e", "not an arithmetic|is not arithmetic"),
        ("\u0661+1", "is not arithmetic"),
        ("1\x002", "is not arithmetic"),
        ("()", "is not arithmetic"),
    ],
)
def test_refusals_say_why(expression, reason):
    started = time.perf_counter()
    with pytest.raises(CalculatorError, match=reason):
        calculate(expression)
    assert time.perf_counter() - started < 0.5


Pair = tuple[str, Fraction | None]
"""An expression and its value by Python's own fractions; None where something divides by zero."""


def combined(left: Pair, symbol: str, right: Pair) -> Pair:
    operation = {
        "+": operator.add,
        "-": operator.sub,
        "*": operator.mul,
        "/": operator.truediv,
        "//": operator.floordiv,
        "%": operator.mod,
    }[symbol]
    text = f"({left[0]} {symbol} {right[0]})"
    if left[1] is None or right[1] is None or (right[1] == 0 and symbol in ("/", "//", "%")):
        return text, None
    return text, Fraction(operation(left[1], right[1]))


def powered(base: Pair, exponent: int) -> Pair:
    text = f"{base[0]}**{exponent}" if base[0].endswith(")") else f"({base[0]})^{exponent}"
    if base[1] is None or (base[1] == 0 and exponent < 0):
        return text, None
    return text, base[1] ** exponent


def negated(value: Pair) -> Pair:
    return f"(-{value[0]})", None if value[1] is None else -value[1]


numbers = st.integers(0, 10**9).map(str) | st.decimals(
    0, 10**6, places=3, allow_nan=False, allow_infinity=False
).map(str)
expressions = st.recursive(
    numbers.map(lambda text: (text, Fraction(text))),
    lambda inner: st.one_of(
        st.builds(combined, inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner),
        st.builds(powered, inner.filter(lambda pair: "^" not in pair[0]), st.integers(-3, 3)),
        inner.map(negated),
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(expressions)
def test_agrees_with_pythons_fractions(pair):
    expression, expected = pair
    try:
        value = calculate(expression)
    except CalculatorError as error:
        reasons = ["too large", "longer", "nested"] + ["division by zero"] * (expected is None)
        assert any(reason in str(error) for reason in reasons), error
        return
    assert value == expected
    assert max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_agrees_with_pythons_integers(left, right):
    assert show(calculate(f"{left}+({right})")) == str(left + right)
    assert show(calculate(f"{left}*({right})")) == str(left * right)
    if right:
        assert show(calculate(f"({left})//({right})")) == str(left // right)
        assert show(calculate(f"({left})%({right})")) == str(left % right)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789+-*/%().eE ,^=", max_size=60) | st.text(max_size=30))
def test_any_text_gives_a_number_or_a_reason_quickly(text):
    started = time.perf_counter()
    try:
        shown = show(calculate(text))
    except CalculatorError as error:
        assert str(error)
    else:
        assert re.match(r"-?\d", shown)
    assert time.perf_counter() - started < 0.5


@given(st.fractions(max_denominator=10**6))
def test_shown_decimals_are_exact_unless_they_say_about(value):
    shown = show(value)
    fraction, _, rest = shown.partition(" (about ")
    assert Fraction(fraction) == value
    if rest:
        assert abs(Fraction(rest[:-1]) - value) <= Fraction(1, 2 * 10**6)
