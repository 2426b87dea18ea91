"""Rows and predictions in the official formats."""

import json
import os
from pathlib import Path

import pytest
import swe_rows
from hypothesis import example, given
from hypothesis import strategies as st
from rows_for_tests import write_rows

from agentrl.config import load_config
from agentrl.errors import DataError
from agentrl.evaluate.episodes import EpisodeLog
from agentrl.types import StopReason, Trajectory, TrajectoryError
from agentrl_swebench.dataset import (
    NEW_COLUMNS,
    Instance,
    Prediction,
    load_instances,
    load_predictions,
    parse_row,
)
from agentrl_swebench.testfiles import named_file

ROW = swe_rows.ROW | {"hints_text": "", "created_at": "2024-01-01", "FAIL_TO_PASS": '["t::new"]'}
SECOND = ROW | {"instance_id": "a__b-2"}
BOTH = [parse_row(ROW, ""), parse_row(SECOND, "")]


def test_jsonl_json_parquet_and_folder_agree(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [row | {"PASS_TO_PASS": json.dumps(["t::old"])} for row in (ROW, SECOND)]
    jsonl = write_rows(tmp_path / "d.jsonl", rows)
    (tmp_path / "d.json").write_text(json.dumps(rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "test.parquet")
    expected = load_instances(jsonl)
    assert [each.instance_id for each in expected] == ["a__b-1", "a__b-2"]
    for source in (tmp_path / "d.json", tmp_path / "test.parquet", tmp_path):
        assert load_instances(source) == expected


def test_row_is_what_the_harness_reads(tmp_path):
    instance = parse_row(ROW, "row 1")
    assert isinstance(instance, Instance)
    assert instance.fail_to_pass == ("t::new",)
    again = instance.row()
    assert again["FAIL_TO_PASS"] == ["t::new"] and again["PASS_TO_PASS"] == ["t::old"]
    assert {name: again[name] for name in NEW_COLUMNS} == {name: ROW[name] for name in NEW_COLUMNS}
    assert parse_row(again, "row 1") == instance
    harness = pytest.importorskip("swebench.harness.utils")
    assert harness.make_test_spec(again).FAIL_TO_PASS == ["t::new"]


def test_selection_keeps_the_order_and_names_the_unknown(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [ROW, SECOND])
    assert [each.instance_id for each in load_instances(path, instance_ids=["a__b-2"])] == [
        "a__b-2"
    ]
    with pytest.raises(DataError, match="no instance c__d-9"):
        load_instances(path, instance_ids=["a__b-1", "c__d-9"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch": None}, "line 1: column patch is not text"),
        ({"image": 3}, "column image is not text"),
        ({"FAIL_TO_PASS": "[x"}, "FAIL_TO_PASS is not JSON"),
        ({"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS must be a list of test names"),
        ({"PASS_TO_PASS": None}, "PASS_TO_PASS must be a list"),
    ],
)
def test_a_bad_row_is_named(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        load_instances(write_rows(tmp_path / "d.jsonl", [ROW | change]))


# Pieces of which paths that lead elsewhere are made, beside any text.
NAMES = st.one_of(
    st.text(),
    st.lists(st.sampled_from(["..", ".", "/", "a", "b__c-1", "~", "\\", "\0", "\n", "-", " "])).map(
        "".join
    ),
)


@given(NAMES)
@example("../../../../victim")
@example("/victim")
@example("..")
@example("a\n")
@example("x" * 300)
def test_an_id_names_a_folder_of_its_own_or_is_refused(name):
    out = Path("/out")
    try:
        instance = parse_row(ROW | {"instance_id": name}, "FILE, line 3")
    except DataError as error:
        assert str(error).startswith("FILE, line 3: instance_id ")
        assert name != ROW["instance_id"]
    else:
        assert os.path.normpath(out / instance.instance_id) == f"/out/{name}"
        assert Path(os.path.normpath(out / instance.instance_id)).parent == out
        assert len(name.encode()) <= 255 and name.isprintable()


@given(NAMES)
@example("../../victim")
@example("..")
@example("a/../../b")
@example("m" * 300)
def test_a_models_name_is_a_folder_of_its_own_or_is_refused(tmp_path_factory, name):
    instance = parse_row(ROW, "row 1")
    path = tmp_path_factory.getbasetemp() / "predictions.jsonl"
    write_rows(path, [prediction(patch="", model=name)])
    try:
        (found,) = load_predictions(path, [instance])
    except DataError as error:
        assert "line 1: " in str(error) and "model_name_or_path" in str(error)
    else:
        folder = Path("/out") / found.model_name_or_path.replace("/", "__")
        assert Path(os.path.normpath(folder)) == folder and folder.parent == Path("/out")
        assert b"\0" not in os.fsencode(folder) and len(os.fsencode(folder.name)) < 200


@pytest.mark.parametrize(
    "test", ["../../etc/a.py::t", "/etc/a.py::t", "a/../../b.py::t", "-rf.py::t"]
)
def test_a_required_test_names_no_file_outside_the_repository(test):
    assert named_file(test) == ""
    assert named_file("tests/a.py::t") == "tests/a.py"


def test_missing_file_empty_file_and_duplicates(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_instances(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no rows"):
        load_instances(write_rows(tmp_path / "d.jsonl", []))
    with pytest.raises(DataError, match="a__b-1 twice"):
        load_instances(write_rows(tmp_path / "d.jsonl", [ROW, ROW]))


OLD = {name: value for name, value in ROW.items() if name not in NEW_COLUMNS}


def test_a_row_of_swe_bench_4_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"line 2: the row has no image .*current revision"):
        load_instances(write_rows(tmp_path / "d.jsonl", [ROW, OLD]))


def prediction(instance_id="a__b-1", patch="p", model="m/x"):
    return {"instance_id": instance_id, "model_name_or_path": model, "model_patch": patch}


def test_predictions_in_all_official_forms(tmp_path):
    rows = [prediction(), prediction("a__b-2", None)]
    jsonl = write_rows(tmp_path / "p.jsonl", rows)
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "map.json").write_text(json.dumps({row["instance_id"]: row for row in rows}))
    bare = {name: {k: v for k, v in row.items() if k != "instance_id"}
            for name, row in zip(("a__b-1", "a__b-2"), rows, strict=True)}  # fmt: skip
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    (tmp_path / "marked.json").write_text("\ufeff" + json.dumps(rows))
    (tmp_path / "marked.jsonl").write_text("\ufeff" + jsonl.read_text())
    (tmp_path / "twice.json").write_text(json.dumps([*rows, rows[0]]))
    expected = load_predictions(jsonl, BOTH)
    assert [each.model_patch for each in expected] == ["p", ""]
    assert expected[0].row() == rows[0]
    for name in ("list.json", "map.json", "bare.json", "marked.json", "marked.jsonl", "twice.json"):
        assert load_predictions(tmp_path / name, BOTH) == expected
    gold = load_predictions("gold", BOTH)
    assert [each.model_patch for each in gold] == [ROW["patch"]] * 2


def test_predictions_of_what_agentrl_eval_played(tmp_path):
    folder = tmp_path / "some-model"
    episodes = [
        Trajectory(f"{name}/0", name, "swebench", name, 0, stop_reason=StopReason.TERMINATED)
        for name in (ROW["instance_id"], SECOND["instance_id"])
    ]
    episodes[0].info = {"model_patch": "p"}
    episodes[1].error = TrajectoryError("step", "env_error", "no verdict")
    config = load_config({"env": {"id": "swebench"}, "model": {"path": "m"}})
    EpisodeLog(folder, config).finish(episodes)
    assert load_predictions(folder, BOTH) == [Prediction("a__b-1", "some-model", "p")]
    with pytest.raises(DataError, match="not in the dataset"):
        load_predictions(folder, BOTH[1:])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([prediction("c__d-9")], "c__d-9 is not in the dataset"),
        ([prediction(), prediction(patch="q")], "second, other prediction for a__b-1"),
        ([prediction(), prediction("a__b-2", model="other")], "several models"),
        ([{"instance_id": "a__b-1", "model_patch": ""}], "model_name_or_path"),
        ([prediction(patch=3)], "model_patch must be text"),
        ([], "no predictions"),
    ],
)
def test_bad_predictions_are_named(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        load_predictions(write_rows(tmp_path / "p.jsonl", rows), BOTH)


def test_predictions_for_other_instances_are_left_out_of_a_selection(tmp_path, caplog):
    path = write_rows(tmp_path / "p.jsonl", [prediction(), prediction("c__d-9")])
    (kept,) = load_predictions(path, BOTH[:1], is_selection=True)
    assert kept.instance_id == "a__b-1" and "1 predictions for other instances" in caplog.text
    with pytest.raises(DataError, match="for these instances"):
        load_predictions(path, BOTH[1:], is_selection=True)


def test_half_a_surrogate_pair_spoils_one_patch_and_not_the_file(tmp_path, caplog):
    rows = [prediction(patch="+x = '\ud800'"), prediction("a__b-2")]
    path = write_rows(tmp_path / "p.jsonl", rows)
    one, two = load_predictions(path, BOTH)
    assert one.model_patch == "+x = '?'" and two.instance_id == "a__b-2"
    assert f"{path}, line 1" in caplog.text


def test_predictions_have_a_known_ending(tmp_path):
    with pytest.raises(DataError, match=r"\.jsonl or \.json"):
        load_predictions(tmp_path / "p.txt", [])
