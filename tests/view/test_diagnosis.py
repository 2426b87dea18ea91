import re
from pathlib import Path

import pytest
from planted import FAULTS, HEALTHY, STEPS, plant

from agentrl.view.changes import fall
from agentrl.view.diagnosis import diagnose
from agentrl.view.groups import Query, find_groups
from agentrl.view.rules import RULES, Evidence, Finding
from agentrl.view.runs import RunFiles
from agentrl.view.tracking import MetricsWriter


def found(run_dir: Path) -> dict[str, dict]:
    return {r["id"]: r for r in diagnose(RunFiles(run_dir))["rules"] if r["state"] == "found"}


def test_every_rule_has_a_planted_fault():
    assert {rule.id for rule in RULES} == set(FAULTS)


@pytest.mark.parametrize("rule", FAULTS)
def test_a_planted_fault_is_found_first_and_its_examples_show_it(tmp_path, rule):
    run_dir = plant(tmp_path / rule, rule)
    findings = found(run_dir)
    assert rule in findings
    # What follows from it is found as well, and ranked behind it.
    implied = {
        "never_rewarded": {"equal_rewards"},
        "uniform": {"malformed_calls"},
        "too_far": {"reward_fell", "truncation", "malformed_calls", "equal_rewards"},
    }
    assert set(findings) - {rule} <= implied.get(rule, set())
    assert next(iter(findings)) == rule
    query = findings[rule]["query"]
    assert findings[rule]["text"] and findings[rule]["fix"] and findings[rule]["why"]
    if query is not None:
        shown = find_groups(RunFiles(run_dir), Query(**query))
        assert shown["groups"], "its examples"
        members = [member for group in shown["groups"] for member in group["members"]]
        has = {
            "truncation": lambda m: m["truncated"],
            "malformed_calls": lambda m: m["malformed"],
            "errors": lambda m: m["error"] == "grader_timeout",
        }.get(rule)
        if has is not None:
            assert all(any(has(m) for m in group["members"]) for group in shown["groups"])
            assert any(m["matches"] and has(m) for m in members)
        if rule == "equal_rewards":
            assert all(group["zero_variance"] for group in shown["groups"])


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_has_no_finding(tmp_path, kind):
    run_dir = plant(tmp_path / kind, kind)
    assert found(run_dir) == {}
    assert diagnose(RunFiles(run_dir))["sentence"] == f"Nothing wrong was found in {STEPS} steps."


def test_the_first_sentence_names_the_fall_its_step_its_cause_and_the_remedy(tmp_path):
    diagnosis = diagnose(RunFiles(plant(tmp_path / "run", "too_far")))
    sentence = diagnosis["sentence"]
    fell = r"The reward fell from 0\.\d+ to 0 at step 2; step 1 moved the weights by 0\.6 "
    assert re.match(fell, sentence)
    assert sentence.endswith(": lower train.learning_rate.")
    found = [rule for rule in diagnosis["rules"] if rule["state"] == "found"]
    first = [(rule["id"], rule["step"]) for rule in found[:2]]
    assert first == [("too_far", 1), ("reward_fell", 2)]
    behind = {rule["id"] for rule in found if rule["follows"]}
    assert {"truncation", "malformed_calls"} <= behind


def test_the_limit_of_the_mismatch_is_that_of_the_dtype(tmp_path, monkeypatch):
    gap = {"metrics": {"policy/fresh_diff_mean": 0.02}}
    monkeypatch.setitem(FAULTS, "gap", gap)
    run_dir = plant(tmp_path / "gap", "gap")
    assert "in float32, above 0.005" in found(run_dir)["mismatch"]["text"]
    config = run_dir / "config.toml"
    config.write_text(config.read_text().replace("[model]", "[model]\ndtype = 'bfloat16'"))
    assert found(run_dir) == {}
    gap["metrics"]["policy/fresh_diff_mean"] = 0.2
    run_dir = plant(tmp_path / "rounded", "gap")
    config = run_dir / "config.toml"
    config.write_text(config.read_text() + "\n[inference]\nquantization = 'fp8'\n")
    assert "in fp8, above 0.1" in found(run_dir)["mismatch"]["text"]


def test_what_is_wrong_in_one_environment_alone_is_found_there(tmp_path, monkeypatch):
    clipped = {"env/sums/policy/clip_fraction_high": 0.4, "env/math/policy/clip_fraction_high": 0.0}
    monkeypatch.setitem(FAULTS, "clipped", {"metrics": clipped})
    run_dir = plant(tmp_path / "clipped", "clipped")
    assert found(run_dir) == {}
    config = run_dir / "config.toml"
    tables = '[[env]]\nid = "math"\n\n[[env]]\nname = "sums"\nid = "math"'
    config.write_text(config.read_text().replace('[env]\nid = "math"', tables))
    (finding,) = found(run_dir).values()
    assert finding["id"] == "clipping@sums" and finding["metric"].startswith("env/sums/policy/clip")
    assert finding["text"] == "in sums the clip takes the gradient of 40.0% of the tokens"


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([0.8] * 30 + [0.2] * 5, 31),
        ([0.41] + [0.0] * 11, 2),
        ([0.02 * i for i in range(40)] + [0.1] * 20, 41),
        ([0.8 - 0.006 * i for i in range(100)], range(20, 80)),
        ([0.8] * 20 + [0.1] * 5 + [0.8] * 20, None),
        ([0.5 + 0.1 * (i % 3) for i in range(40)], None),
        ([0.0] * 20, None),
        ([-0.2] * 12 + [-0.9] * 12, 13),
    ],
)
def test_a_fall_is_placed_at_its_step(values, step):
    points = list(enumerate(values, start=1))
    change = fall(points, noise=[0.3] * len(points), count=64)
    assert (change is None) if step is None else change is not None
    if change is not None and step is not None:
        assert change.step in (step if isinstance(step, range) else [step])


def test_where_next_to_nothing_was_earned_no_component_carries_it(tmp_path, monkeypatch):
    rare = {"components": lambda reward: {"correct": 0.02 * reward, "format": 0.0}}
    monkeypatch.setitem(FAULTS, "rare", rare)
    assert "one_component" not in found(plant(tmp_path / "rare", "rare"))


def test_what_was_not_recorded_is_said_to_be_unknown(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 30):
            writer.write(step, {"reward/mean": 0.5, "rollout/truncated_fraction": 0.6})
    rules = {rule["id"]: rule for rule in diagnose(RunFiles(tmp_path))["rules"]}
    assert rules["truncation"]["state"] == "found" and rules["truncation"]["query"] is None
    assert {rules[name]["state"] for name in ("mismatch", "errors", "entropy_collapse")} == {
        "unknown"
    }


def test_a_run_without_anything_is_all_unknown(tmp_path):
    assert {rule["state"] for rule in diagnose(RunFiles(tmp_path))["rules"]} == {"unknown"}


def test_an_entropy_that_fell_with_a_solved_task_is_no_collapse(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 30):
            writer.write(step, {"reward/mean": step / 30, "policy/entropy": 1.5 * 0.8**step})
    rules = {rule["id"]: rule["state"] for rule in diagnose(RunFiles(tmp_path))["rules"]}
    assert rules["entropy_collapse"] == "clear"


@pytest.mark.parametrize(
    ("last", "num_tasks", "parted"), [(0.336, 128, True), (0.336, 16, False), (0.52, 128, False)]
)
def test_test_tasks_that_fell_from_their_best_are_told_with_the_entropy(last, num_tasks, parted):
    """Two evaluations are enough where the second is worse by more than their noise."""
    metrics = [
        {"step": step, "reward/mean": 0.3 + step / 130, "policy/entropy": 0.67 - step / 90}
        for step in range(1, 51)
    ]
    metrics[22]["eval/avg@1"], metrics[49]["eval/avg@1"] = 0.539, last
    seen = Evidence(metrics, [], {"eval": {"num_tasks": num_tasks, "samples_per_task": 1}})
    verdicts = {rule.id: rule.check(seen) for rule in RULES}
    assert isinstance(verdicts["parted"], Finding) == parted
    assert isinstance(verdicts["entropy_collapse"], Finding) == parted
    assert not parted or verdicts["parted"].step == 23


@pytest.mark.parametrize("steps", [16, 20, 40])
def test_a_fall_over_the_whole_run_is_one(steps):
    curve = [(step, 0.58 * (steps - step) / (steps - 1)) for step in range(1, steps + 1)]
    noise = [(value * (1 - value)) ** 0.5 for _, value in curve]
    change = fall(curve, noise=noise, count=64)
    assert change is not None and change.before > 0.4 and change.after < 0.2
    assert fall([(s, v) for s, (_, v) in enumerate(reversed(curve))], noise=noise, count=64) is None
