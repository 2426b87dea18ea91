"""Grading on a real engine: honest verdicts, forged ones, and trouble of the infrastructure."""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patches import file_diff
from swe_attacks import ATTACKS, grade_attack

from agentrl.env.container.engine import RUN_LABEL
from agentrl_swebench import official
from agentrl_swebench.dataset import Prediction
from agentrl_swebench.evaluate import evaluate
from agentrl_swebench.grade import GradingLimits, grade, run_harness

pytestmark = pytest.mark.docker
pytest.importorskip("swebench", reason="the official harness is missing: agentrl-gym[swebench]")

RUN_ID = f"test-{os.getpid()}"
SPANS = "agentrl__spans-1"
TIMING = {"unstopped_instances", "unstopped_containers", "unremoved_images"}
"""What depends on the engine's other containers, not on the predictions."""


def grade_now(instance, patch, **arguments):
    arguments = {"policy": "strict", "run_id": RUN_ID, "timeout_s": 120.0} | arguments
    return asyncio.run(grade(instance, patch, **arguments))


def containers(engine):
    """Lists the containers of these tests only, since the engine may be shared."""
    return engine.containers.list(
        all=True, filters={"label": f"{RUN_LABEL}={RUN_ID}"}, ignore_removed=True
    )


def noop(instance):
    return next(each for each in ATTACKS if each.name == "noop").make_patch(instance)


def test_gold_resolves_with_an_official_report_and_leaves_nothing(
    engine, fixture_instances, tmp_path
):
    instance = fixture_instances[SPANS]
    verdict = grade_now(instance, instance.patch, withhold=True, logs=tmp_path / "logs")
    assert (verdict.outcome, verdict.resolved, verdict.reward) == ("resolved", True, 1.0)
    assert verdict.flags == () and verdict.withheld == "6 of 6 values"
    assert verdict.report == json.loads((tmp_path / "logs" / "report.json").read_text())
    assert set(verdict.report[SPANS]["tests_status"]["FAIL_TO_PASS"]["success"]) == set(
        instance.fail_to_pass
    )
    assert verdict.image_id == engine.images.get(instance.image).id
    assert containers(engine) == []


def test_tests_that_take_too_long_earn_nothing(engine, fixture_instances):
    """Not masked: whoever makes the tests hang would be as well off as one who was not graded."""
    instance = fixture_instances[SPANS]
    hangs = ROWS["runaway_sleep"].make_patch(instance)
    verdict = grade_now(instance, hangs, timeout_s=10.0, withhold=True)
    assert (verdict.outcome, verdict.reward) == ("unresolved", 0.0), verdict
    assert "grade_timeout" in verdict.flags
    assert containers(engine) == []


ROWS = {each.name: each for each in ATTACKS}
SMOKE = (
    "noop",
    "unappliable",
    "conftest_exit_uncaptured",
    "source_writes_shell_stdout",
    "source_forges_after_summary",
    "source_xfail",
    "source_reads_expected",
    "gauge_replaces_is",
    "kills_the_shell",
)


@pytest.mark.parametrize("name", SMOKE)
def test_forged_verdicts_get_no_reward(engine, fixture_instances, name):
    row = asyncio.run(
        grade_attack(ROWS[name], fixture_instances[ROWS[name].instance_id], run_id=RUN_ID)
    )
    assert row.as_expected, (row.official, row.strict)
    assert containers(engine) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in ROWS if name not in SMOKE])
def test_every_patch_of_the_table(engine, fixture_instances, name):
    row = asyncio.run(
        grade_attack(ROWS[name], fixture_instances[ROWS[name].instance_id], run_id=RUN_ID)
    )
    assert row.as_expected, (row.official, row.strict)


def run_here(*arguments):
    source = Path(__file__).parents[3] / "environments" / "swebench"
    return subprocess.run(
        [sys.executable, "-m", "agentrl", "swebench", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["gold", "empty", "wrong", "noop"])
def test_report_is_the_official_command_lines(fixture_dir, fixture_instances, tmp_path, kind):
    instances = list(fixture_instances.values())
    patches = {
        "gold": lambda each: each.patch,
        "empty": lambda each: "",
        "wrong": lambda each: file_diff(f"{each.repo.split('/')[1]}/wrong.py", None, "x = 1 /\n"),
        "noop": lambda each: file_diff("NOTE.md", None, "Nothing changed.\n"),
    }
    predictions = tmp_path / "predictions.jsonl"
    with predictions.open("w") as file:
        for each in instances:
            row = {"instance_id": each.instance_id, "model_name_or_path": f"org/{kind}"}
            file.write(json.dumps(row | {"model_patch": patches[kind](each)}) + "\n")
    dataset = fixture_dir / "dataset.jsonl"
    ours, official = tmp_path / "ours", tmp_path / "official"
    done = run_here(
        *("eval", "--dataset", dataset, "--predictions", predictions, "--run-id", "equal"),
        *("--out", ours, "--timeout", "120"),
    )
    assert done.returncode == 0, done.stderr
    official.mkdir()
    subprocess.run(
        [
            shutil.which("swebench", path=Path(sys.executable).parent) or "swebench",
            *("eval", dataset, "-p", predictions, "--run-id", "equal"),
            *("-j", "2", "-t", "120", "--report-dir", "."),
        ],
        cwd=official,
        check=True,
        capture_output=True,
        timeout=600,
    )
    name = f"org__{kind}.equal.json"
    first, second = (json.loads((folder / name).read_text()) for folder in (ours, official))
    assert {key for key in first if first[key] != second[key]} <= TIMING
    assert set(first) == set(second)
    expected = sorted(fixture_instances) if kind == "gold" else []
    assert first["resolved_ids"] == expected
    own = json.loads((ours / f"org__{kind}.equal.agentrl.json").read_text())
    assert own["resolved_ids"] == expected
    for each in instances:
        part = Path("logs/run_evaluation/equal", f"org__{kind}", each.instance_id, "report.json")
        assert (ours / part).is_file() == (official / part).is_file()
        if (ours / part).is_file():
            assert json.loads((ours / part).read_text()) == json.loads(
                (official / part).read_text()
            )


def test_an_interrupted_evaluation_goes_on_and_grades_changed_patches(
    fixture_dir, fixture_instances, tmp_path
):
    instance = fixture_instances[SPANS]
    predictions = tmp_path / "p.jsonl"

    def eval_command(patch):
        row = {"instance_id": SPANS, "model_name_or_path": "m", "model_patch": patch}
        predictions.write_text(json.dumps(row) + "\n")
        done = run_here(
            *("eval", "--dataset", fixture_dir / "dataset.jsonl", "--predictions", predictions),
            *("--instance-ids", SPANS, "--out", tmp_path / "out", "--timeout", "120"),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads((tmp_path / "out" / "m.run.json").read_text())

    said, report = eval_command(instance.patch)
    assert report["resolved_ids"] == [SPANS] and "earlier call" not in said
    said, report = eval_command(instance.patch)
    assert report["resolved_ids"] == [SPANS] and "1 verdicts come from an earlier call" in said
    # The harness itself would answer with the report of the patch before.
    said, report = eval_command(noop(instance))
    assert report["unresolved_ids"] == [SPANS] and "earlier call" not in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_validate_keeps_what_can_be_graded(fixture_dir, fixture_instances, tmp_path):
    rows = [json.loads(line) for line in (fixture_dir / "dataset.jsonl").read_text().splitlines()]
    spans = next(row for row in rows if row["instance_id"] == SPANS)
    broken = spans | {"instance_id": "agentrl__broken-1", "patch": noop(fixture_instances[SPANS])}
    dataset = tmp_path / "d.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in (spans, broken)))
    done = run_here(
        *("validate", "--dataset", dataset, "--repeats", 1, "--out", tmp_path / "valid.jsonl"),
        *("--timeout", "120", "--withhold"),
    )
    assert done.returncode == 1
    assert "1 of 2 instances are valid" in done.stdout
    assert "the reference solution resolves it 0 times of 1" in done.stdout + done.stderr
    kept = [json.loads(line) for line in (tmp_path / "valid.jsonl").read_text().splitlines()]
    assert [row["instance_id"] for row in kept] == [SPANS]


# --- trouble of the infrastructure is never reward 0 ------------------------------------------


async def when_running(engine, act, number=1):
    """Call `act` on each of the next `number` grading containers once its tests run."""
    seen = set()
    for _ in range(2400):
        for container in await asyncio.to_thread(containers, engine):
            if container.id not in seen and container.status == "running":
                seen.add(container.id)
                await asyncio.sleep(0.7)
                await asyncio.to_thread(act, container)
                if len(seen) == number:
                    return
        await asyncio.sleep(0.05)
    raise AssertionError("no grading container was seen")


def kill_harness(container):
    """The process with the harness' functions, which is needed again once the tests have run."""
    os.kill(official._harness._process.pid, signal.SIGKILL)


def disturbed(engine, instance, act, number, patch=None, **arguments):
    async def both():
        disturbance = asyncio.create_task(when_running(engine, act, number))
        verdict = await grade(
            instance,
            patch or instance.patch,
            **({"policy": "strict", "run_id": RUN_ID, "timeout_s": 120.0} | arguments),
        )
        await disturbance
        return verdict

    return asyncio.run(both())


def remove(container):
    container.remove(force=True)


def freeze(container):
    container.pause()


TROUBLE = pytest.mark.parametrize("act", [remove, freeze], ids=["container removed", "frozen"])


@TROUBLE
def test_trouble_once_is_retried(engine, fixture_instances, act):
    verdict = disturbed(engine, fixture_instances[SPANS], act, 1, timeout_s=45.0)
    assert (verdict.outcome, verdict.attempts) == ("resolved", 2), (verdict.reason, verdict.flags)
    assert containers(engine) == []


@TROUBLE
def test_trouble_twice_is_masked(engine, fixture_instances, act):
    instance = fixture_instances[SPANS]
    verdict = disturbed(engine, instance, act, 2, patch=noop(instance), timeout_s=45.0)
    assert (verdict.outcome, verdict.resolved, verdict.reward) == ("infrastructure", None, None)
    assert containers(engine) == []


def test_a_harness_that_is_killed_starts_again(engine, fixture_instances):
    verdict = disturbed(engine, fixture_instances[SPANS], kill_harness, 1)
    assert (verdict.outcome, verdict.attempts) == ("resolved", 1), (verdict.reason, verdict.flags)


def test_missing_image_is_masked(engine, fixture_instances):
    instance = dataclasses.replace(fixture_instances[SPANS], image="agentrl/never-built:0")
    verdict = grade_now(instance, instance.patch)
    assert (verdict.outcome, verdict.reward) == ("infrastructure", None)
    assert "never-built" in verdict.reason


@pytest.mark.parametrize("policy", ["official", "strict"])
def test_engine_that_is_not_there_is_masked_soon(fixture_instances, monkeypatch, tmp_path, policy):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr("agentrl_swebench.grade.BACK_OFF_S", (0.1, 0.1, 100.0))
    instance = fixture_instances[SPANS]
    started = time.monotonic()
    verdict = grade_now(instance, instance.patch, policy=policy, withhold=True)
    assert time.monotonic() - started < 30
    assert (verdict.outcome, verdict.reward) == ("infrastructure", None)
    assert "no Docker engine answers" in verdict.reason


def test_a_character_that_is_cut_off_at_the_end_is_replaced(engine, fixture_instances, tmp_path):
    instance = fixture_instances[SPANS]
    script = instance.eval_script + "\nset +x; sleep 1; printf '\\303'\n"
    instance = dataclasses.replace(instance, eval_script=script)
    verdict = grade_now(instance, instance.patch, policy="official", logs=tmp_path / "logs")
    assert verdict.outcome == "resolved"
    written = (tmp_path / "logs" / "test_output.txt").read_text()
    assert written.endswith("\N{REPLACEMENT CHARACTER}")


def test_full_disk_is_masked_and_a_pass_stands(engine, fixture_instances):
    full = GradingLimits(min_free_bytes=1 << 60)
    instance = fixture_instances[SPANS]
    verdict = grade_now(instance, noop(instance), limits=full)
    assert (verdict.outcome, verdict.reward) == ("infrastructure", None)
    assert "disk is full" in verdict.reason
    assert grade_now(instance, instance.patch, limits=full).reward == 1.0


def test_a_void_verdict_is_an_error_in_the_official_report(engine, fixture_instances, tmp_path):
    """The harness made a report, `not resolved`, on a full disk: no failure of the model."""
    instance = fixture_instances[SPANS]
    result = asyncio.run(
        evaluate(
            [instance],
            [Prediction(SPANS, "m", noop(instance))],
            run_id=RUN_ID,
            out=tmp_path,
            dataset="d.jsonl",
            timeout_s=120.0,
            limits=GradingLimits(min_free_bytes=1 << 60),
        )
    )
    report = json.loads(result.report.read_text())
    assert (report["error_ids"], report["unresolved_ids"]) == ([SPANS], [])
    own = json.loads(result.our_report.read_text())
    assert own["infrastructure_ids"] == [SPANS]
    (void,) = tmp_path.rglob("void.report.json")
    assert json.loads(void.read_text())[SPANS]["resolved"] is False


def test_unknown_log_parser_is_masked_with_its_name(engine, fixture_instances):
    instance = dataclasses.replace(fixture_instances[SPANS], log_parser="parse_log_nobody")
    verdict = grade_now(instance, instance.patch)
    assert (verdict.outcome, verdict.reward) == ("infrastructure", None)
    assert "parse_log_nobody" in verdict.reason


def test_a_grading_ends_with_its_process(engine, fixture_instances, tmp_path):
    """A trainer that is killed leaves neither container nor folder."""
    instance = fixture_instances[SPANS]
    code = (
        "import asyncio, json, sys\n"
        "from agentrl_swebench.dataset import parse_row\n"
        "from agentrl_swebench.grade import grade\n"
        "instance = parse_row(json.load(sys.stdin), 'row')\n"
        f"asyncio.run(grade(instance, instance.patch, policy='strict', run_id='{RUN_ID}',"
        " timeout_s=120))\n"
    )
    source = Path(__file__).parents[3] / "environments" / "swebench"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(source), "TMPDIR": str(tmp_path)},
    )
    process.stdin.write(json.dumps(instance.row()).encode())
    process.stdin.close()
    asyncio.run(when_running(engine, lambda container: process.kill()))
    process.wait()
    until = time.monotonic() + 20
    while (containers(engine) or any(tmp_path.iterdir())) and time.monotonic() < until:
        time.sleep(0.2)
    assert containers(engine) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_gradings_of_one_instance_at_once(engine, fixture_instances):
    """Three times eight with one run id; the harness alone kills its own containers then."""
    instance = fixture_instances[SPANS]

    async def eight():
        runs = (
            run_harness(
                instance, instance.patch, run_id=RUN_ID, timeout_s=300, limits=GradingLimits()
            )
            for _ in range(8)
        )
        return await asyncio.gather(*runs)

    for _ in range(3):
        runs = asyncio.run(eight())
        assert [each.report[SPANS]["resolved"] for each in runs] == [True] * 8
    assert containers(engine) == []
