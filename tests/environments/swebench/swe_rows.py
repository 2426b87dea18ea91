"""A row of SWE-bench, its instance and a verdict on it, but for what a test changes."""

import dataclasses

from patches import file_diff

from agentrl_swebench.dataset import Instance, parse_row
from agentrl_swebench.grade import Verdict

ROW = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "version": "1.0",
    "base_commit": "0" * 40,
    "problem_statement": "It is broken.",
    "patch": file_diff("src/b/core.py", "a\n", "b\n"),
    "test_patch": file_diff("checks/hidden.py", "a\n", "b\n"),
    "FAIL_TO_PASS": ["t::new"],
    "PASS_TO_PASS": ["t::old"],
    "image": "a/b:1",
    "eval_script": "pytest -rA checks/verify.py\n",
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}
INFRASTRUCTURE = {"resolved": None, "outcome": "infrastructure"}
FAILED = {"resolved": False, "outcome": "unresolved"}


def instance_of(**changes) -> Instance:
    return dataclasses.replace(parse_row(ROW, ""), **changes)


def verdict(instance_id="a__b-1", **changes) -> Verdict:
    given = {"resolved": True, "outcome": "resolved", "reason": "r", "report": {}}
    return Verdict(instance_id, **given | {"seconds": 1.0, "flags": ()} | changes)
