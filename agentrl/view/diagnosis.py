"""Finds out why a run does not learn: what the rules find in its files, causes before symptoms.

A finding that began only when the reward fell is a consequence and is ranked behind it.
"""

from __future__ import annotations

from typing import Any

from agentrl.view.changes import Change
from agentrl.view.groups import grouped
from agentrl.view.rules import RULES, WINDOW, Evidence, Finding, Rule
from agentrl.view.runs import RunFiles


def diagnose(run: RunFiles) -> dict[str, Any]:
    """Returns every rule's verdict, findings first and causes before their consequences, and one
    sentence that sums them up. In a run with several environments, a rule that holds for one of
    them but not for all together is reported for that environment."""
    evidence = Evidence(run.metrics(), grouped(run), run.config())
    results = _judged(evidence)
    seen = {each["id"] for each in results if each["state"] == "found"}
    for name, part in evidence.by_environment().items():
        for each in _judged(part):
            if each["state"] == "found" and each["id"] not in seen:
                each["id"] += f"@{name}"
                each["title"] += f" ({name})"
                each["text"] = f"in {name} {each['text']}"
                each["metric"] = f"env/{name}/{each['metric']}"
                results.append(each)
    order = {"found": 0, "clear": 2, "unknown": 3}
    results.sort(key=lambda each: order[each["state"]] + each["follows"])
    last = evidence.metrics[-1]["step"] if evidence.metrics else None
    return {
        "sentence": _sentence(results, last),
        "rules": results,
        "step": last,
        "window": WINDOW,
    }


def _judged(evidence: Evidence) -> list[dict[str, Any]]:
    """Returns every rule's verdict on a run, or on one environment of it."""
    fallen = evidence.fall()
    before = evidence.before(fallen.step) if fallen else None
    results = []
    for rule in RULES:
        verdict = rule.check(evidence) if evidence.metrics or evidence.groups else None
        found = verdict if isinstance(verdict, Finding) else None
        follows = found is not None and _follows(rule, found, fallen, before)
        results.append(
            {
                "id": rule.id,
                "title": rule.title,
                "state": "found" if found else "unknown" if verdict is None else "clear",
                "text": found.text if found else verdict or NOT_RECORDED,
                "follows": follows,
                "fix": rule.fix if found else "",
                "why": rule.why if found else "",
                "metric": rule.metric,
                "query": found.query if found else None,
                "step": found.step if found else None,
            }
        )
    return results


NOT_RECORDED = "the run did not record what this rule needs"


def _follows(rule: Rule, found: Finding, fallen: Change | None, before: Evidence | None) -> bool:
    """Tells whether a finding is a usual consequence of the reward's fall and did not exist before
    it."""
    if fallen is None or before is None or not rule.of_policy:
        return False
    return not isinstance(rule.check(before), Finding)


def _sentence(results: list[dict[str, Any]], last: int | None) -> str:
    """Returns the sentence to read first: what happened, its first cause and what to do."""
    found = [each for each in results if each["state"] == "found" and not each["follows"]]
    if not found:
        if all(each["state"] == "unknown" for each in results):
            return "There is nothing to judge yet."
        return f"Nothing wrong was found in {last} steps." if last else "Nothing wrong was found."
    cause = found[0]
    fell = next((each for each in found if each["id"] == "reward_fell"), cause)
    what = cause["text"] if fell is cause else f"{fell['text']}; {cause['text']}"
    sentence = f"{what}: {cause['fix']}."
    return sentence[:1].upper() + sentence[1:]
