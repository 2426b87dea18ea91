"""Reads rows of SWE-bench 4 as JSON from stdin and prints them with the columns of SWE-bench 5.

This is a script for a Python that has `swebench==4.1.0`; it imports nothing from agentrl.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright sees version 5 of the harness.

import json
import sys

from swebench.harness import constants
from swebench.harness.log_parsers import MAP_REPO_TO_PARSER
from swebench.harness.test_spec.create_scripts import make_eval_script_list

# `make_test_spec` would download requirements for some repositories, which an evaluation script
# does not need.
SHELL_HEAD = ["#!/bin/bash", "set -uxo pipefail"]


def convert(row: dict) -> dict:
    repo, version, instance_id = row["repo"], row["version"], row["instance_id"]
    try:
        specs = constants.MAP_REPO_VERSION_TO_SPECS[repo][version]
        parser = MAP_REPO_TO_PARSER[repo].__name__
    except KeyError as error:
        sys.exit(f"instance {instance_id}: swebench 4.1.0 does not know {repo} {version} ({error})")
    lines = make_eval_script_list(
        row, specs, "testbed", "/testbed", row["base_commit"], row["test_patch"]
    )
    image = f"swebench/sweb.eval.x86_64.{instance_id.replace('__', '_1776_')}:latest".lower()
    fail_only = repo in constants.FAIL_ONLY_REPOS
    return row | {
        "image": image,
        "eval_script": "\n".join(SHELL_HEAD + lines) + "\n",
        "log_parser": parser,
        "eval_type": "fail_only" if fail_only else "pass_and_fail",
    }


if __name__ == "__main__":
    json.dump([convert(row) for row in json.load(sys.stdin)], sys.stdout)
