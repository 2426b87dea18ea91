"""Tests without their expected values: what they report, and how it is compared."""

import ast
import collections
import dataclasses
import decimal
import enum
import fractions
import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_rewards.withheld import Probe, compare, is_right, read_reports, stable, tells, withhold
from agentrl_rewards.withheld_report import canonical

PLAIN = Probe(("", "test"), True, set())


def seen(value):
    """The value as it arrives: in canonical form, through JSON."""
    return json.loads(json.dumps(canonical(value), sort_keys=True))


def same(one, two, probe=PLAIN):
    return is_right(probe, seen(one), seen(two))


# --- the canonical form ---------------------------------------------------------------------------

ATOMS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(-1e9, 1e9)
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
DATA = st.recursive(
    ATOMS,
    lambda each: (
        st.lists(each)
        | st.tuples(each, each)
        | st.dictionaries(KEYS, each)
        | st.frozensets(KEYS)
        | st.lists(each).map(collections.deque)
    ),
    max_leaves=12,
)


@given(DATA)
@settings(deadline=None)
def test_a_value_equals_itself_and_nothing_else_of_its_kind(value):
    assert same(value, value)
    assert not same(value, [value])
    assert not same([value, value], [value])


@given(DATA, DATA)
@settings(deadline=None)
def test_plain_data_is_told_apart_as_python_does(one, two):
    assert same(one, two) == _equal(one, two)


def _equal(one, two):
    """Equality of Python, except that floating-point numbers may differ by rounding."""
    if isinstance(one, float) or isinstance(two, float):
        numbers = isinstance(one, int | float) and isinstance(two, int | float)
        return numbers and math.isclose(one, two, rel_tol=2e-7)
    if type(one) is type(two) and isinstance(one, list | tuple | collections.deque):
        return len(one) == len(two) and all(map(_equal, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_equal(one[key], two[key]) for key in one)
    return one == two


class Universal:
    def __eq__(self, other):
        return True

    __hash__ = None


class Liar(list):
    __class__ = dict
    __len__ = __iter__ = __repr__ = lambda self: 1 / 0


class Odd(int):
    def __eq__(self, other):
        return True

    __int__ = __index__ = lambda self: 7
    __hash__ = int.__hash__


def test_what_a_class_says_about_itself_does_not_count():
    assert not same(3, Universal()) and not same([], Universal())
    assert same([1, 2], Liar([1, 2])) and not same({}, Liar())
    assert same(3, Odd(3)) and not same(7, Odd(3))
    assert not same(object(), Universal())


@dataclasses.dataclass
class Point:
    x: int
    y: float


@dataclasses.dataclass
class Point3(Point):
    z: int


class HalfHidden:
    def __init__(self, x, y):
        self.x, self._y = x, y

    y = property(lambda self: self._y)
    __eq__ = Universal.__eq__
    __hash__ = None


class Place:
    __slots__ = ("_cache", "x", "y")

    def __init__(self, x, y):
        self.x, self.y, self._cache = x, y, object()


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def test_objects_are_compared_by_their_public_attributes():
    assert same(Point(1, 2.0), Point(1, 2.0)) and not same(Point(1, 2.0), Point(1, 3.0))
    assert same(Point(1, 2.0), Place(1, 2.0)) and same(Point(1, 2.0), Point3(1, 2.0, 3))
    assert not same(Point(1, 2.0), HalfHidden(1, 3.0))
    assert not same(Point(1, 2.0), Universal())
    assert same(Colour.RED, Colour.RED) and not same(Colour.RED, Colour.BLUE)


def test_a_bit_and_an_object_without_public_values_tell_nothing():
    loop = []
    loop.append(loop)
    for value in (None, True, object(), Universal(), [Universal(), object()]):
        assert not tells(seen(value)), value
    assert not tells(seen(Point(Universal(), object())))
    for value in (0, "", [], [True, False], Point(1, 2.0), [Point(None, 2.0)], {1: object()}):
        assert tells(seen(value)), value
    assert not tells(seen(loop)) and not tells(["unprintable", "RecursionError"])


def test_numbers_of_every_kind_are_compared_by_value():
    assert same(decimal.Decimal("1.50"), decimal.Decimal("1.5"))
    assert same(fractions.Fraction(4, 2), 2)
    assert not same(decimal.Decimal("0.1"), decimal.Decimal("0.2"))
    assert same(float("nan"), float("nan")) and not same(float("nan"), 1.0)
    assert same(float("inf"), float("inf")) and not same(float("inf"), -float("inf"))
    assert same(2**70, 2**70) and not same(2**70, 2**70 + 1)
    assert same(1 + 2j, 1 + 2j) and not same(1 + 2j, 1 - 2j)


def test_what_has_no_end_or_cannot_be_shown_is_reported_all_the_same():
    loop = []
    loop.append(loop)
    assert same(loop, loop) and not same(loop, [])
    assert seen(iter([])) == seen(iter([]))
    assert "0x7" not in str(seen(lambda: 0))


def test_arrays_frames_and_quantities():
    numpy = pytest.importorskip("numpy")
    assert same(numpy.arange(4).reshape(2, 2), numpy.array([[0.0, 1.0], [2.0, 3.0]]))
    assert not same(numpy.arange(4), numpy.arange(4).reshape(2, 2))
    assert same(numpy.array([1, 2]), [1, 2]) and not same([1, 2], (1, 2))
    assert same(numpy.float64(0.5), 0.5) and same(numpy.int8(3), 3)
    assert not same(numpy.array([1, 2]), numpy.array([1, 3]))
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2]})
    assert same(frame, frame.copy()) and not same(frame, frame + 1)
    assert not same(frame, frame.rename(columns={"a": "b"}))


@given(st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=8), DATA)
@settings(deadline=None)
def test_reports_that_code_forges_are_wrong_and_never_an_error(forged, value):
    assert is_right(PLAIN, seen(value), forged) in (True, False)
    for kind in (
        ["dict", 3], ["object", "X"], ["object", "X", 3], ["object", "X", {}], ["array"], [],
        ["raised", 1, 2], [None],
    ):  # fmt: skip
        assert is_right(PLAIN, seen([value]), kind) is False
        assert is_right(PLAIN, seen(Point(value, 2.0)), kind) is False


# --- the transformation ---------------------------------------------------------------------------

HEAD = """
import unittest
import pytest
from pytest import approx, raises
"""


def play(source, tmp_path, code):
    """Runs the tests without expected values on `code`, a function f; returns probes and values."""
    file = tmp_path / f"reports-{next(_numbers)}"
    made = withhold(HEAD + source, report_file=str(file))
    names = {"f": code}
    exec(compile(made.text, "tests", "exec"), names)
    for name, test in list(names.items()):
        if name.startswith("test"):
            marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
            for row in marks[0].args[1] if marks else [()]:
                _ended(test, row)
        elif name.startswith("Test"):
            for method in [each for each in vars(test) if each.startswith("test")]:
                _ended(getattr(test(method), method), ())
    return made, read_reports(file.read_text().splitlines() if file.exists() else [])


_numbers = itertools.count()


def _ended(test, row):
    try:
        test(*row)
    except (Exception, pytest.skip.Exception) as error:
        print(f"{test.__name__}: {error!r}")


def is_paid(source, folder, right, code):
    """Whether `code` reports the values that `right` does."""
    made, reference = play(source, folder, right)
    return not compare(made.probes, reference, play(source, folder, code)[1]).wrong


def double(x):
    if x is None:
        raise ValueError("no number: None")
    return x * 2


def triple_less_one(x):
    return x * 3 - x if x is not None else double(x)


FORMS = {
    "equal": "def test():\n    assert f(2) == 4, f(3)",
    "changed in place": "def test():\n    y = 2\n    y *= 2\n    assert f(2) == y",
    "method of the actual": "def test():\n    x = str(f(2)).strip('x')\n    y = '4'.lower()\n"
    "    assert x == y",
    "reversed": "def test():\n    assert 4 == f(2)",
    "and": "def test():\n    assert f(2) == 4 and f(3) == 6",
    "chain": "def test():\n    assert f(2) == f(2) == 4",
    "name": "def test():\n    expected = 4\n    result = f(2)\n    assert expected == result",
    "names": "def test():\n    y: int = 4\n    a, b = f(2), f(3)\n    assert (a, b) == (y, 6)",
    "approx": "def test():\n    assert f(2.0) == approx(4.0, abs=0.1)",
    "approx of the actual": "def test():\n    assert 4.0 == pytest.approx(f(2.0))",
    "module": "EXPECTED = {'a': 4}\ndef test():\n    assert {'a': f(2)} == EXPECTED",
    "parametrize": "@pytest.mark.parametrize('x,y', [(2, 4), (3, 6)])\n"
    "def test(x, y):\n    assert f(x) == y",
    "table": "TABLE = [(2, 4), (3, 6)]\n@pytest.mark.parametrize(('x', 'y'), TABLE)\n"
    "def test(x, y):\n    assert f(x) == y",
    "loop": "def test():\n    for x, y in [(2, 4), (3, 6)]:\n        assert f(x) == y",
    "raises": "def test():\n    with raises(ValueError, match='no number'):\n        f(None)\n"
    "    assert f(2) == 4",
    "raises, called": "def test():\n    pytest.raises(ValueError, f, None)\n    assert f(2) == 4",
    "text of an error": "def test():\n    with raises(ValueError) as info:\n        f(None)\n"
    "    assert str(info.value) == 'no number: None'\n    assert f(2) == 4",
    "unittest": "class TestF(unittest.TestCase):\n    def test(self):\n"
    "        self.assertEqual(f(2), 4)\n        self.assertListEqual([6], [f(3)])",
    "almost equal": "class TestF(unittest.TestCase):\n    def test(self):\n"
    "        self.assertAlmostEqual(f(2.0), 4.0, places=3)",
    "true": "class TestF(unittest.TestCase):\n    def test(self):\n"
    "        self.assertTrue(f(2) == 4)",
    "raises in unittest": "class TestF(unittest.TestCase):\n    def test(self):\n"
    "        with self.assertRaisesRegex(ValueError, 'no'):\n            f(None)\n"
    "        self.assertRaises(ValueError, f, None)\n        self.assertEqual(f(2), 4)",
    "numpy": "import numpy as np\ndef test():\n"
    "    np.testing.assert_allclose(f(np.array([2.0])), [4.0], rtol=1e-3)\n"
    "    np.testing.assert_array_equal(f(np.array([2])), [4])\n"
    "    assert np.allclose(f(2.0), 4.0)\n    assert (f(np.array([2])) == [4]).all()",
    "in a nested function": "def test():\n    def inner():\n        assert f(2) == 4\n    inner()",
    "both sides": "def test():\n    assert f(2) == f(2.0)",
    "function of the tests": "def by_hand(x):\n    return {2: 4}[x]\n"
    "def test():\n    assert f(2) == by_hand(2)",
    "names of rows": "@pytest.mark.parametrize('x,y', [(2, 4), (3, 6)], ids=['is 4', '6'])\n"
    "def test(x, y):\n    assert f(x) == y",
    "docstring and future": "def test():\n    'doubles'\n    assert f(2) == 4",
}


@pytest.mark.parametrize("source", FORMS.values(), ids=FORMS)
def test_right_code_is_confirmed_and_wrong_code_is_not(source, tmp_path):
    made, reference = play(source, tmp_path, double)
    gold = stable(made.probes, reference, play(source, tmp_path, double)[1])
    assert gold.keys() == made.probes.keys() and any(p.strong for p in made.probes.values())
    same = compare(made.probes, gold, play(source, tmp_path, triple_less_one)[1])
    assert not same.wrong and same.num_right == same.num_values > 0, same
    for cheat in (lambda x: 7, lambda x: Universal(), lambda x: pytest.skip("x"), lambda x: None):
        assert compare(made.probes, gold, play(source, tmp_path, cheat)[1]).wrong


@pytest.mark.parametrize(
    "source", [source.replace("4", "123457") for source in FORMS.values()], ids=FORMS
)
def test_expected_values_are_nowhere_in_the_text(source):
    assert "123457" not in withhold(HEAD + source, report_file="/tmp/r").text


WEAK = {
    "truth": "def test():\n    assert f(2)",
    "not": "def test():\n    assert not f(0)",
    "bit": "def test():\n    assert f(None) is None",
    "kind": "def test():\n    assert isinstance(f(2), int)",
    "in": "def test():\n    assert 'abc' in f('abc')",
    "order": "def test():\n    assert f(2) < 10",
    "unequal": "def test():\n    assert f(2) != 5",
    "helper": "def check(a, b):\n    assert a == b\ndef test():\n    check(f(2), 4)",
    "fixture": "@pytest.fixture\ndef y():\n    return 4\ndef test(y):\n    assert f(2) == y",
    "attribute": "class TestF(unittest.TestCase):\n    def setUp(self):\n        self.four = 4\n"
    "    def test(self):\n        self.assertEqual(f(2), self.four)",
    "other assertions": "class TestF(unittest.TestCase):\n    def test(self):\n"
    "        self.assertLogs(f)",
    "nothing": "def test():\n    f(2)",
    "literals alone": "def test():\n    assert 2 == 2 == 2",
    "text of an exception that stays": "import re\ndef test():\n    m = 'no'\n    print(m)\n"
    "    with raises(ValueError, match=re.escape(m)):\n        f(None)",
    "exception": "def test():\n    with raises(ValueError):\n        f(None)",
    "columns that stay": "def test():\n    for x, y in {2: 4}.items():\n        assert f(x) == y",
    "one that goes and one that stays": "def test():\n    for x, y in [(2, 4)]:\n"
    "        assert f(x) == y\n    for x, y in zip([3], [6]):\n        assert f(x) == y",
    "nested columns": "def test():\n    for i, (x, y) in enumerate([(2, 4)]):\n"
    "        assert f(x) == y",
    "variable that stays": "def test():\n    y = 4\n    print(y)\n    assert f(2) == y",
    "there and back": "@pytest.mark.parametrize('x', ['4', '5'])\n"
    "def test(x):\n    assert f(f(x)) == x",
    "constant that stays": "FOUR = 4\ndef test():\n    assert f(2) == FOUR\n"
    "def test_other():\n    f(FOUR)",
    "part of what stays": "def test():\n    y = [4]\n    assert f(2) == y[0]\n    y.pop()",
    "members of what stays": "T = {2: 4}\ndef test():\n"
    "    assert [f(x) for x in T] == list(T.values())",
    "columns of what stays": "def test():\n    t = [(2, 4)]\n"
    "    assert [f(x) for x, y in t] == [y for x, y in t]",
    "class": "class TestF:\n    four = 4\n    def test(self):\n        assert f(2) == TestF.four",
    "file": "def test():\n    with open('four') as file:\n        y = int(file.read())\n"
    "    assert f(2) == y",
    "file of the module": "import json\nFOUR = json.load(open('four'))\n"
    "def test():\n    assert f(2) == FOUR",
}


@pytest.mark.parametrize("source", WEAK.values(), ids=WEAK)
def test_what_can_be_guessed_or_read_is_not_counted_as_covered(source):
    made = withhold(HEAD + source, report_file="/tmp/r")
    compile(made.text, "tests", "exec")
    assert not any(probe.strong for probe in made.probes.values())


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ("def test():\n    assert f(2) < 10", lambda x: 9, lambda x: 10),
        ("def test():\n    assert 'abc' in f(2)", lambda x: "xabcx", lambda x: "x"),
        ("def test():\n    assert f(2) not in (1, 2)", lambda x: 3, lambda x: 2),
        ("def test():\n    assert f(2) != 5", lambda x: 6, lambda x: 5),
        ("def test():\n    assert {1} in (f(2), f(3))", lambda x: {1}, lambda x: {2}),
    ],
)
def test_operators_other_than_equality_are_evaluated_outside(source, right, wrong, tmp_path):
    made, reference = play(source, tmp_path, right)
    gold = stable(made.probes, reference, reference)
    assert gold and not compare(made.probes, gold, play(source, tmp_path, right)[1]).wrong
    assert compare(made.probes, gold, play(source, tmp_path, wrong)[1]).wrong
    assert "10" not in ast.unparse(ast.parse(made.text).body[-1]) and "abc" not in ast.unparse(
        ast.parse(made.text).body[-1]
    )


def test_an_exception_counts_by_the_kinds_that_a_test_can_see(tmp_path):
    class Both(ValueError, KeyError):
        pass

    class AnyOf(ValueError, KeyError, TypeError, ArithmeticError):
        pass

    def raising(error):
        def code(x):
            raise error

        return code

    source = "def test():\n    with raises(ValueError, match='^no'):\n        f(1)"
    right = raising(ValueError("no number"))
    assert play(source, tmp_path, right)[0].probes[1].strong
    for error, paid in [
        (ValueError("no, not at all"), True),
        (Both("no"), False),  # its text is quoted, as that of a KeyError is
        (UnicodeError("no"), True),
        (ValueError("a number"), False),
        (TypeError("no"), False),
        (AnyOf("no"), False),
        (ValueError("no" + " or any other word" * 10), False),
    ]:
        assert is_paid(source, tmp_path, right, raising(error)) is paid, error
    right = raising(ValueError("no (number)"))
    for first, match in (
        ("expected = r'no .number.'", "expected"),
        ("import re", "re.escape('no (number)')"),
    ):
        raises = f"with raises(ValueError, match={match}):\n        f(1)"
        named = f"def test():\n    {first}\n    {raises}"
        made, _ = play(named, tmp_path, right)
        assert made.probes[1].strong and "number" not in made.text.split("def test")[1]
        assert is_paid(named, tmp_path, right, raising(ValueError("no (number)!")))
        assert not is_paid(named, tmp_path, right, raising(ValueError("not at all")))
    plain = "def test():\n    with raises(ValueError):\n        f(1)"
    assert is_paid(plain, tmp_path, raising(ValueError("no")), raising(Both("no")))


@pytest.mark.parametrize(
    ("assertion", "near", "far"),
    [
        ("assert f(1) == approx(4.0, rel=0.1)", 4.3, 6.0),
        ("assert f(1) == 4.0", 4.0 + 1e-8, 4.0 + 1e-5),
        ("assert f(1) == approx(4, abs=1)", 5, 7),
    ],
)
def test_numbers_are_compared_within_the_tolerance_that_the_test_states(
    assertion, near, far, tmp_path
):
    source = f"def test():\n    {assertion}"
    assert is_paid(source, tmp_path, lambda x: 4.0, lambda x: near)
    assert not is_paid(source, tmp_path, lambda x: 4.0, lambda x: far)


def test_the_order_counts_unless_the_test_says_that_it_does_not(tmp_path):
    source = "class TestF(unittest.TestCase):\n    def test(self):\n        self.{}(f(1), [1, 2])"
    codes = (lambda x: [1, 2]), (lambda x: [2, 1])
    assert is_paid(source.format("assertCountEqual"), tmp_path, *codes)
    assert not is_paid(source.format("assertEqual"), tmp_path, *codes)


def test_values_of_a_loop_count_in_their_order(tmp_path):
    source = "def test():\n    for x, y in [(1, -1), (-1, 1)]:\n        assert f(x) == y"
    assert is_paid(source, tmp_path, lambda x: -x, lambda x: -x)
    assert not is_paid(source, tmp_path, lambda x: -x, lambda x: x)


def test_values_count_for_the_test_that_reports_them_in_any_order_of_tests(tmp_path, monkeypatch):
    source = "def test():\n    assert f(1) == 4"
    made, file = withhold(HEAD + source, report_file=str(tmp_path / "r")), tmp_path / "r"

    def reported(*values):
        for name, value in values:
            monkeypatch.setenv("PYTEST_CURRENT_TEST", name)
            play_one = {"f": lambda x, value=value: value}
            exec(compile(made.text, "tests", "exec"), play_one)
            play_one["test"]()
        found = read_reports(file.read_text().splitlines())
        file.unlink()
        return found

    reference = reported(("a[1]", 1), ("a[2]", 2))
    assert not compare(made.probes, reference, reported(("a[2]", 2), ("a[1]", 1))).wrong
    assert compare(made.probes, reference, reported(("a[1]", 2), ("a[2]", 1))).wrong
    assert compare(made.probes, reference, reported(("a[1]", 1))).wrong
    assert compare(made.probes, reference, reported(("a[1]", 1), ("a[2]", 2), ("a[2]", 2))).wrong


def test_names_of_rows_are_dropped_with_what_they_may_tell():
    source = "@pytest.mark.parametrize('x,y', [pytest.param(2, 4, id='gives 123457')])\n"
    made = withhold(f"{HEAD}{source}def test(x, y):\n    assert f(x) == y", report_file="/tmp/r")
    assert "123457" not in made.text and all(probe.strong for probe in made.probes.values())


def test_a_call_that_holds_the_expected_value_is_dropped():
    for expected in ("Box(123457)", "int('123457')", "box(g(123457))"):
        actual = expected.replace("123457", "f(2)").replace("'", "")
        made = withhold(f"def test():\n    assert {actual} == {expected}", report_file="/tmp/r")
        assert "123457" not in made.text


def test_a_value_that_differs_between_runs_is_not_expected(tmp_path):
    source = "def test():\n    assert f(2) == 4\n    assert f(3) == 6"
    ticks = itertools.count()
    runs = [play(source, tmp_path, lambda x: next(ticks) if x == 3 else 4) for _ in range(2)]
    assert list(stable(runs[0][0].probes, runs[0][1], runs[1][1])) == [1]


def test_lines_that_are_no_reports_are_left_out():
    lines = ['[1, 2, "a"]', "", "[1", "1", '["x", 3, ""]', '[1, [1, 2], ""]', "[2, 3]"]
    lines += ["[" * 100_000, '[1e999, 0, ""]', "[NaN, 0, 0]", "[2, 3, 4, 5]"]
    assert read_reports(lines) == {1: [("a", 2), ("", [1, 2])]}


def test_the_text_of_another_module_has_numbers_of_its_own():
    source = "def test():\n    assert f(1) == 2"
    assert list(withhold(source, report_file="/tmp/r", first=7).probes) == [7]
