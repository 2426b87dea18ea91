from pathlib import Path

import pytest
from planted import FAULTS, plant

from agentrl.tracking import MetricsWriter
from agentrl.view.diagnosis import RULES, diagnose
from agentrl.view.groups import Query, find_groups
from agentrl.view.runs import RunFiles


def found(run_dir: Path) -> dict[str, dict]:
    return {r["id"]: r for r in diagnose(RunFiles(run_dir))["rules"] if r["state"] == "found"}


def test_every_rule_has_a_planted_fault():
    assert {rule.id for rule in RULES} == set(FAULTS) and len(RULES) == 12


@pytest.mark.parametrize("rule", FAULTS)
def test_a_planted_fault_is_found_first_and_its_examples_show_it(tmp_path, rule):
    run_dir = plant(tmp_path / rule, rule)
    findings = found(run_dir)
    assert rule in findings
    # Without any reward, rewards are equal and there is nothing to learn from as well.
    implied = {"never_rewarded": {"equal_rewards"}}
    assert set(findings) - {rule} <= implied.get(rule, set())
    query = findings[rule]["query"]
    assert findings[rule]["text"] and findings[rule]["advice"]
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


def test_a_healthy_run_has_no_finding(tmp_path):
    assert found(plant(tmp_path / "healthy")) == {}


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
