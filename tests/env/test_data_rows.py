"""Rows of JSONL and parquet files: places, order, and what is said of a file that is wrong."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.rows import read_rows
from agentrl.errors import ConfigError, DataError

VALUES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8)


@given(st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=6))
def test_jsonl_rows_come_back_with_their_lines(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    # every second line is empty, as files that were put together by hand have it
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    read = list(read_rows(path))
    assert [row for _, row in read] == rows
    assert [place for place, _ in read] == [f"{path}, line {2 * i + 1}" for i in range(len(rows))]


def test_parquet_rows_come_back_in_order_over_several_batches(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"n": list(range(2500))}), path)
    read = list(read_rows(path))
    assert [row["n"] for _, row in read] == list(range(2500))
    assert read[2400][0] == f"{path}, row 2401"


def test_rows_are_read_one_at_a_time(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\nnot json\n')
    rows = read_rows(path)
    assert next(rows)[1] == {"n": 1}  # what is wrong further down is not known yet
    assert next(rows)[1] == {"n": 2}
    with pytest.raises(DataError, match="line 3: not JSON"):
        next(rows)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "[1]\n", "line 1: a list; every line has to be a JSON object"),
        ("rows.parquet", "no parquet", "cannot be read as parquet"),
        ("rows.csv", "a,b\n", "neither .jsonl nor .parquet"),
        ("rows.jsonl", None, "does not exist; the path is relative to"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path / name))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_text("x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        list(read_rows(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("number", [2**63, 2**64 + 1, -(2**63) - 1, 10**29 + 12345])
def test_integers_of_any_size_are_exact(tmp_path, number):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"a": {number}, "b": [{number}], "c": {{"d": {number}}}}}\n')
    ((_, row),) = read_rows(file)
    assert row == {"a": number, "b": [number], "c": {"d": number}}


@pytest.mark.parametrize("text", ['{"a": NaN, "b": 12345678901234567890}', '{"a": NaN}'])
def test_nan_is_no_json(tmp_path, text):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match="line 1"):
        list(read_rows(file))


def test_numbers_of_parquet_are_what_the_file_says(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from decimal import Decimal

    from pyarrow import parquet

    columns = {
        "single": pa.array([0.1, float("nan"), None], pa.float32()),
        "double": pa.array([0.1, float("inf"), -2.5]),
        "list": pa.array([[0.1, float("nan")], [], None], pa.list_(pa.float32())),
        "struct": pa.array([{"x": 0.3}, None, {"x": None}], pa.struct([("x", pa.float32())])),
        "decimal": pa.array([Decimal("1.50"), Decimal("7.00"), None]),
        "large": pa.array([Decimal(10**29 + 1), None, None]),
    }
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table(columns), file)
    one, two, three = (row for _, row in read_rows(file))
    assert one == {
        "single": 0.1,
        "double": 0.1,
        "list": [0.1, None],
        "struct": {"x": 0.3},
        "decimal": 1.5,
        "large": 10**29 + 1,
    }
    assert (two["single"], two["double"], two["decimal"]) == (None, None, 7)
    assert type(two["decimal"]) is int and three["struct"] == {"x": None}
