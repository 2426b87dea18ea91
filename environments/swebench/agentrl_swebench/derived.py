"""Derives the images of datasets whose own images the official harness cannot use.

SWE-smith: a row's `patch` adds the bug to the repository in its image, which already has the tests
that the bug breaks. The derived image has the bug but not the files of the broken tests, and its
history is a single commit. The reference solution removes the bug, and the test patch restores the
tests.

SWE-rebench-V2: the authors' images have the repository of `owner/name` at `/name`, but the harness
applies patches at `/testbed`. The derived image has it there and a link to it at `/name`.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

from agentrl import runtime
from agentrl.env.container.box import MAX_STREAM_BYTES, ProgramResult
from agentrl.env.container.container import packed
from agentrl.env.container.engine import connect, engine_errors
from agentrl.errors import DataError
from agentrl_swebench.adapters import MOVED_REPOSITORY, eval_script
from agentrl_swebench.containers import InstanceContainer
from agentrl_swebench.dataset import parse_row, test_names
from agentrl_swebench.images import commit, is_local
from agentrl_swebench.testfiles import named_file

SMITH_REPOSITORY = "agentrl/swebench-smith"
_WAIT_S = 600

_ADD_BUG = r"""
set -euo pipefail
cd /testbed
export GIT_CONFIG_NOSYSTEM=1 HOME=/tmp GIT_AUTHOR_NAME=agentrl GIT_AUTHOR_EMAIL=agentrl@localhost
export GIT_COMMITTER_NAME=agentrl GIT_COMMITTER_EMAIL=agentrl@localhost
export GIT_AUTHOR_DATE=2000-01-01T00:00:00Z GIT_COMMITTER_DATE=2000-01-01T00:00:00Z
git config --global --add safe.directory /testbed
git reset -q --hard && good=$(git rev-parse HEAD)
git apply --whitespace=nowarn /tmp/bug.patch
rm /tmp/bug.patch
[ -z "$*" ] || rm -f -- "$@"
git checkout -q --orphan agentrl && git add -A && git commit -q -m Start
printf '%s\0' "$(git rev-parse HEAD)"
git diff --binary --full-index HEAD "$good" -- . $(printf ':(exclude)%s ' "$@")
printf '\0'
[ -z "$*" ] || git diff --binary --full-index HEAD "$good" -- "$@"
"""
_MOVE = """
set -eu
[ -d "/$1/.git" ] || { echo "there is no repository at /$1" >&2; exit 1; }
mv "/$1" /testbed
ln -s /testbed "/$1"
"""


def make_smith_row(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Makes the image of a row of SWE-smith; returns the row with the columns of SWE-bench 5.

    Args:
        place: names the row in errors.

    Raises:
        DataError: the bug does not apply, or the row names no test files or lacks a column.
        EnvError: there is no engine, or the source image is missing.
    """
    required = {name: test_names(row, name, place) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    hidden = sorted({named_file(test) for test in required["FAIL_TO_PASS"]} - {""})
    files = sorted({named_file(test) for tests in required.values() for test in tests} - {""})
    source, bug = row["image_name"], row["patch"]
    tag = _tag(source, bug, *hidden)
    ran = runtime.run(
        _derive(source, f"{SMITH_REPOSITORY}:{tag}", _ADD_BUG, *hidden, patch=bug.encode())
    )
    if ran.exit_code != 0:
        said = ran.errors[-300:]
        raise DataError(f"{place}: the bug of {row['instance_id']} can't be made: {said}")
    base, gold, tests = ran.output.decode().split("\0")
    if not tests:
        raise DataError(f"{place}: {row['instance_id']} names no test files in FAIL_TO_PASS")
    made = row | {
        "version": "0",
        "base_commit": base,
        "patch": gold,
        "test_patch": tests,
        "image": f"{SMITH_REPOSITORY}:{tag}",
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": eval_script(
            base_commit=base,
            install="",
            test="pytest -rA --color=no -p no:cacheprovider " + " ".join(files),
            test_patch=tests,
            place=place,
        ),
    }
    return parse_row(made, place).row()


def make_moved_row(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns a row of SWE-rebench-V2 with the derived image, which is made if it is not local.

    Args:
        place: names the row in errors.

    Raises:
        DataError: the image has no repository at `/name`.
        EnvError: there is no engine, or the source image is missing.
    """
    source, name = row["image_name"], row["repo"].partition("/")[2]
    tag = _tag(source)
    image = f"{MOVED_REPOSITORY}:{tag}"
    with engine_errors(), contextlib.closing(connect()) as client:
        is_there = is_local(client, image)
    if not is_there:
        ran = runtime.run(_derive(source, image, _MOVE, name))
        if ran.exit_code != 0:
            raise DataError(f"{place}: image {source}: {ran.errors[-300:]}")
    return row | {"image_name": image}


def _tag(*made_of: str) -> str:
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:24]


async def _derive(
    source: str, image: str, script: str, *arguments: str, patch: bytes = b""
) -> ProgramResult:
    """Makes an image of what a script did in one, with `patch` in /tmp/bug.patch; of a script that
    failed, none."""
    container = await InstanceContainer.start(source, run_id="derive", role="build", workdir="/")
    try:
        if patch:
            await container.put(packed({"bug.patch": patch}), "/tmp")
        ran = await container.script(
            script, *arguments, timeout_s=_WAIT_S, max_bytes=MAX_STREAM_BYTES
        )
        if ran.exit_code == 0:
            await commit(container, image)
        return ran
    finally:
        await container.end()
