import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.view.curves import binned, duration, nice_ticks, series, short_number, text_plot

finite = st.floats(-1e12, 1e12, allow_subnormal=False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (0.4375, "0.4375"),
        (-0.0021, "-0.0021"),
        (1.2e-6, "1.2e-06"),
        (0.5, "0.5"),
        (1, "1"),
        (9.876, "9.88"),
        (12.345, "12.3"),
        (123.4, "123"),
        (999.6, "1000"),
        (12345, "12.3k"),
        (1_450_000, "1.45M"),
        (-2.5e9, "-2.5G"),
    ],
)
def test_numbers_are_short(value, expected):
    assert short_number(value) == expected


@given(finite)
def test_short_numbers_stay_short_and_near(value):
    text = short_number(value)
    assert len(text) <= 9
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1)
    shown = float(text.rstrip("kMGT")) * scale
    assert shown == pytest.approx(value, rel=0.05, abs=5e-5 if abs(value) >= 1e-3 else 1e-12)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0 s"), (12.4, "12 s"), (187, "3:07"), (7387, "2:03:07")]
)
def test_durations(seconds, expected):
    assert duration(seconds) == expected


def test_series_skips_what_is_missing_or_null():
    rows = [
        {"step": 1, "a": 0.5},
        {"step": 2, "a": None},
        {"step": 3},
        {"step": 4, "a": math.nan},
        {"step": 5, "a": 2},
        {"a": 1},
    ]
    assert series(rows, "a") == [(1, 0.5), (5, 2.0)]


@given(finite, finite, st.integers(2, 12))
def test_ticks_span_the_range_in_even_steps(a, b, target):
    low, high = min(a, b), max(a, b)
    if high - low < 1e-6 * max(1.0, abs(low), abs(high)):
        return
    ticks = nice_ticks(low, high, target)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + 1e-6 * step and ticks[-1] >= high - 1e-6 * step
    assert 2 <= len(ticks) <= 2 * target + 2
    for left, right in pairwise(ticks):
        assert right - left == pytest.approx(step, rel=1e-4)


def test_binning_averages_neighbours():
    assert binned([1, 2, 3], 5) == [1, 2, 3]
    assert binned([1, 3, 5, 7], 2) == [2, 6]
    assert math.fsum(binned(list(range(1000)), 10)) == pytest.approx(4995)


@given(
    values=st.lists(finite, min_size=2, max_size=300),
    width=st.integers(30, 130),
    height=st.integers(2, 12),
    ascii_only=st.booleans(),
)
def test_a_text_plot_fits_its_box(values, width, height, ascii_only):
    lines = text_plot(list(enumerate(values)), width=width, height=height, ascii_only=ascii_only)
    assert len(lines) == height + 2
    assert all(len(line) <= width for line in lines)
    if ascii_only:
        assert all(line.isascii() for line in lines)


def test_a_rising_line_rises():
    lines = text_plot([(s, float(s)) for s in range(20)], width=40, height=5, ascii_only=True)
    tops = [
        min(r for r in range(5) if c < len(lines[r]) and lines[r][c] == "*") for c in (5, 20, 38)
    ]
    assert tops[0] > tops[1] > tops[2]
    assert text_plot([(1, 0.5)], width=40, height=5) == []


@given(st.lists(finite, min_size=2, max_size=20), st.integers(3, 12))
def test_the_labels_of_a_text_plot_stand_evenly(values, height):
    lines = text_plot(list(enumerate(values)), width=60, height=height)[:height]
    labelled = [row for row, line in enumerate(lines) if "┤" in line]
    assert labelled[0] == 0 and labelled[-1] == height - 1
    assert len({after - before for before, after in pairwise(labelled)}) == 1


def test_a_flat_line_is_drawn_once():
    lines = text_plot([(s, 0.5) for s in range(10)], width=40, height=5, ascii_only=True)
    assert sum("*" in line for line in lines) == 1
