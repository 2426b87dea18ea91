"""Our report, validation and the commands; no engine needed."""

import asyncio
import dataclasses
import json

import pytest
import swe_attacks
from attack_rows import STATED
from rows_for_tests import write_rows
from swe_grading import harness_seconds
from swe_rows import FAILED, INFRASTRUCTURE, ROW, instance_of, verdict

from agentrl.cli.main import main
from agentrl.errors import DataError
from agentrl_swebench import evaluate as evaluation
from agentrl_swebench.cli import app
from agentrl_swebench.dataset import Prediction, parse_row
from agentrl_swebench.diff import parse_patch
from agentrl_swebench.evaluate import Validation, _read_verdict, make_report

VOID = INFRASTRUCTURE | {"reason": "the engine is gone"}


def test_report_keeps_the_official_number_and_the_rewarded_apart():
    report = make_report(
        [
            verdict("a", flags=("partly_covered",)),
            verdict("b", flags=("wrong_values",)),
            verdict("c", **FAILED),
            verdict("d", **VOID),
        ],
        run_id="r",
        model="m",
        policy="official",
        withhold=True,
    )
    assert report["resolved_ids"] == ["a", "b"] and report["rewarded_ids"] == ["a"]
    assert report["infrastructure_ids"] == ["d"]
    assert report["flagged_ids"] == {"partly_covered": ["a"], "wrong_values": ["b"]}
    assert report["outcomes"] == {"infrastructure": 1, "resolved": 2, "unresolved": 1}
    assert report["instances"]["d"]["reward"] is None
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize(
    ("gold", "empty", "reason"),
    [
        ([verdict()] * 3, verdict(**FAILED), ""),
        ([verdict(), verdict(**FAILED)], verdict(**FAILED), "resolves it 1 times of 2"),
        ([verdict()] * 3, verdict(), "without a patch"),
        ([verdict(), verdict(**VOID)], verdict(**FAILED), "the engine is gone"),
        ([verdict(flags=("wrong_values",))], verdict(**FAILED), "differ between runs"),
        ([verdict(flags=("uncovered",))], verdict(**FAILED), "uncovered: forged"),
    ],
)
def test_an_instance_is_valid_if_only_its_solution_solves_it(gold, empty, reason):
    validation = Validation("a__b-1", tuple(gold), empty)
    assert reason in validation.reason and bool(reason) == bool(validation.reason)


def test_a_verdict_on_disk_counts_for_the_same_input_only(tmp_path):
    path = tmp_path / "a.json"
    kept = verdict(flags=("partly_covered",), notes=("n",), dropped=(("conftest.py", "test file"),))
    path.write_text(json.dumps({"digest": "d", "verdict": dataclasses.asdict(kept)}))
    assert _read_verdict(path, "d") == kept
    assert _read_verdict(path, "other") is None
    assert _read_verdict(tmp_path / "none.json", "d") is None
    path.write_text(json.dumps({"digest": "d", "verdict": dataclasses.asdict(verdict(**VOID))}))
    assert _read_verdict(path, "d") is None
    path.write_text("{")
    with pytest.raises(DataError, match="damaged"):
        _read_verdict(path, "d")


async def test_an_interrupted_evaluation_waits_for_those_that_clean_up(tmp_path, monkeypatch):
    """One call ends at once when it is cancelled; another still removes its container."""
    cleaned = []

    async def slow(instance, *arguments, **options):
        try:
            started.append(1)
            await asyncio.sleep(60)
        finally:
            await asyncio.shield(clean_up())

    async def clean_up():
        for _ in range(20):
            await asyncio.sleep(0.005)
        cleaned.append(1)

    monkeypatch.setattr(evaluation, "grade", slow)
    monkeypatch.setattr(evaluation, "num_cores", lambda: 2)
    instances = [instance_of(instance_id=f"i-{k}") for k in range(4)]
    predictions = [Prediction(each.instance_id, "m", "p") for each in instances]
    for work in (
        evaluation.evaluate(instances, predictions, run_id="r", out=tmp_path, dataset="d"),
        evaluation.validate(instances, run_id="r"),
    ):
        started: list[int] = []
        cleaned.clear()
        task = asyncio.create_task(work)
        while len(started) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(cleaned) == 2


def test_seconds_of_a_harness_log(tmp_path):
    log = tmp_path / "run_instance.log"
    log.write_text(
        "2024-01-01 10:00:00,500 - INFO - Creating\nTraceback\n"
        "2024-01-01 10:00:07,750 - INFO - removed\n"
    )
    assert harness_seconds(log) == 7.25


def test_commands_and_their_defaults():
    _, given, _ = app.parse_args(["eval", "--dataset", "d", "--predictions", "gold"])
    given.apply_defaults()
    found = given.arguments
    assert (found["policy"], found["withhold"]) == ("official", False)
    assert (found["limits"].network, found["limits"].sys_admin) == (False, False)
    _, given, _ = app.parse_args(["validate", "--dataset", "d"])
    given.apply_defaults()
    assert given.arguments["repeats"] == 3


def test_an_engine_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    dataset = write_rows(tmp_path / "d.jsonl", [ROW])
    arguments = ["--dataset", str(dataset), "--predictions", "gold", "--out", str(tmp_path)]
    assert main(["swebench", "eval", *arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("agentrl: error: no Docker engine answers at") and said.count("\n") == 1


def test_patches_of_the_table_are_patches():
    """By name, each once; the stated 24 and ours; all but the prose one can be read."""
    names = [each.name for each in swe_attacks.ATTACKS]
    assert len(names) == len(set(names)) and len(STATED) == 24
    for each in swe_attacks.ATTACKS:
        repo = f"agentrl/{each.instance_id.split('__')[1].rsplit('-', 1)[0]}"
        patch = each.make_patch(parse_row(ROW | {"repo": repo}, ""))
        assert "@PASSED@" not in patch and "@TARGETS@" not in patch
        if each.name not in ("conftest_after_prose", "git_hook"):
            assert parse_patch(patch)
