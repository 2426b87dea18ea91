"""SWE-smith: derives images that contain the bug.

A row's `patch` adds the bug to the repository in its image, which already has the tests that the
bug breaks. The derived image has the bug but not the files of the broken tests, and its history is
a single commit. The reference solution removes the bug, and the test patch restores the tests.
"""

from __future__ import annotations

import hashlib
from typing import Any

from agentrl.env.container.engine import connect, engine_errors, labels, remove
from agentrl.errors import DataError
from agentrl_swebench.adapters import eval_script
from agentrl_swebench.dataset import parse_row, test_names
from agentrl_swebench.testfiles import named_file, packed

REPOSITORY = "agentrl/swebench-smith"
_WAIT_S = 600

_MAKE = r"""
set -euo pipefail
cd /testbed
export GIT_CONFIG_NOSYSTEM=1 HOME=/tmp GIT_AUTHOR_NAME=agentrl GIT_AUTHOR_EMAIL=agentrl@localhost
export GIT_COMMITTER_NAME=agentrl GIT_COMMITTER_EMAIL=agentrl@localhost
export GIT_AUTHOR_DATE=2000-01-01T00:00:00Z GIT_COMMITTER_DATE=2000-01-01T00:00:00Z
git config --global --add safe.directory /testbed
git reset -q --hard && good=$(git rev-parse HEAD)
git apply --whitespace=nowarn /tmp/bug.patch
[ -z "$*" ] || rm -f -- "$@"
git checkout -q --orphan agentrl && git add -A && git commit -q -m Start
git rev-parse HEAD > /tmp/base
git diff --binary --full-index HEAD "$good" -- . $(printf ':(exclude)%s ' "$@") > /tmp/gold.diff
: > /tmp/tests.diff
[ -z "$*" ] || git diff --binary --full-index HEAD "$good" -- "$@" > /tmp/tests.diff
"""


def make_smith_row(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Converts a row of SWE-smith to a row of SWE-bench 5; makes its image if it is not local.

    Raises:
        DataError: the bug does not apply, or the row names no test files or lacks a column.
        EnvError: there is no engine, or the source image is missing.
    """
    required = {name: test_names(row, name, place) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    hidden = sorted({named_file(test) for test in required["FAIL_TO_PASS"]} - {""})
    files = sorted({named_file(test) for tests in required.values() for test in tests} - {""})
    source, bug = row["image_name"], row["patch"]
    digest = hashlib.sha256("\0".join([source, bug, *hidden]).encode()).hexdigest()[:24]
    with engine_errors():
        client = connect(timeout_s=_WAIT_S)
        try:
            container = client.containers.create(
                source,
                ["/bin/bash", "-c", _MAKE, "bash", *hidden],
                network_mode="none",
                labels=labels("smith", "build"),
            )
            try:
                container.put_archive("/tmp", packed({"bug.patch": bug.encode()}))
                container.start()
                if container.wait(timeout=_WAIT_S)["StatusCode"] != 0:
                    said = container.logs(tail=3).decode(errors="replace").strip()
                    raise DataError(
                        f"{place}: the bug of {row['instance_id']} can't be made: {said}"
                    )
                base, gold, tests = (
                    _text(container, f"/tmp/{name}") for name in ("base", "gold.diff", "tests.diff")
                )
                # Otherwise the container's command would become the image's.
                container.commit(REPOSITORY, digest, changes=['CMD ["/bin/bash"]'])
            finally:
                remove(client, str(container.id))
        finally:
            client.close()
    if not tests:
        raise DataError(f"{place}: {row['instance_id']} names no test files in FAIL_TO_PASS")
    made = row | {
        "version": "0",
        "base_commit": base.strip(),
        "patch": gold,
        "test_patch": tests,
        "image": f"{REPOSITORY}:{digest}",
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": eval_script(
            base_commit=base.strip(),
            install="",
            test="pytest -rA --color=no -p no:cacheprovider " + " ".join(files),
            test_patch=tests,
            place=place,
        ),
    }
    return parse_row(made, place).row()


def _text(container: Any, path: str) -> str:
    import io
    import tarfile

    chunks, _ = container.get_archive(path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        file = archive.extractfile(archive.getmembers()[0])
        return file.read().decode() if file else ""
