"""Answers requests with the official harness' own functions, in a process of its own:
`python -m agentrl_swebench.official_worker FOLDER BYTES`.

The import takes seconds and changes variables and limits of its process, and the harness' parsers
read what a patch wrote, so none of it happens in the process that grades. A request and its answer
are a line of JSON each. At the end of the requests the folder is removed.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

_ATTEMPTS = 5


def main() -> None:
    folder, memory_bytes = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the harness prints
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": _ACTIONS[request.pop("action")](**request)}
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            answer = {"kind": _kind_of(error), "error": text}
        print(json.dumps(answer), file=answers, flush=True)
    shutil.rmtree(folder, ignore_errors=True)


def _kind_of(error: Exception) -> str:
    kinds = (
        (_RowError, "row"),
        (MemoryError, "memory"),
        (UnicodeError, "decode"),
        (OSError, "disk"),
    )
    return next((kind for types, kind in kinds if isinstance(error, types)), "other")


class _RowError(Exception):
    """A row of the dataset cannot be read."""


def prepare(row: dict[str, Any], folder: str) -> dict[str, Any]:
    """Returns the test script of a row and what else a run needs, by the harness' constants.

    Writes the files that a patch in text cannot hold to `image_assets` below `folder`.
    """
    from swebench.harness import constants, run_evaluation

    spec = _spec(row)
    restore = []
    log = logging.getLogger("agentrl_swebench")
    for asset in (
        each for key in ("test_patch", "patch") for each in spec.image_assets.get(key, ())
    ):
        if not asset.get("path"):
            continue
        place = {**asset, "instance_id": spec.instance_id}
        content = run_evaluation._resolve_asset_bytes(place, None, log)  # type: ignore[arg-type]
        if content is None:
            continue
        path, name = asset["path"], asset["path"].replace("/", "__")
        (Path(folder) / "image_assets").mkdir(exist_ok=True)
        (Path(folder) / "image_assets" / name).write_bytes(content)
        restore.append(f"mkdir -p $(dirname {path}) && cp /image_assets/{name} {path}")
    return {
        "script": run_evaluation._inject_asset_restore(spec.eval_script, restore),
        "apply": run_evaluation.GIT_APPLY_CMDS,
        "patch_file": constants.CONTAINER_PATCH_FILE,
        "applied": constants.APPLY_PATCH_PASS,
        "not_applied": constants.APPLY_PATCH_FAIL,
        "log": constants.LOG_INSTANCE,
        "output": constants.LOG_TEST_OUTPUT,
    }


def report(
    row: dict[str, Any], prediction: dict[str, str], folder: str, mark: str, *, ended: bool
) -> dict[str, Any]:
    """Reads the tests' output and returns fields of `Evidence`.

    Args:
        ended: the tests ended by themselves, so that there is a report, which is written too.
    """
    from swebench.harness import constants
    from swebench.harness.grading import get_eval_report, get_logs_eval

    output = Path(folder) / constants.LOG_TEST_OUTPUT
    found: dict[str, Any] = {}
    if ended:
        spec = _spec(row)
        made = get_eval_report(spec, prediction, str(output), include_tests_status=True)
        (Path(folder) / constants.LOG_REPORT).write_text(json.dumps(made, indent=4))
        found = {"report": made, "statuses": get_logs_eval(spec, str(output))[0]}
    text = output.read_text(errors="replace")
    marks = (constants.START_TEST_OUTPUT, constants.END_TEST_OUTPUT)
    complete = all(each in text for each in marks)
    return found | {"complete": complete, "reports": marked_lines(text, mark)}


def _spec(row: dict[str, Any]) -> Any:
    from swebench.harness.utils import make_test_spec

    try:
        return make_test_spec(row)
    except (KeyError, ValueError, TypeError) as error:
        raise _RowError(f"{type(error).__name__}: {error}") from error


def marked_lines(text: str, mark: str) -> list[str]:
    """Returns what follows a mark and a space in the lines of a log.

    The engine joins two streams, so what one writes may begin within a line of the other.
    """
    head = f"{mark} "
    return [each.partition(head)[2] for each in text.split("\n") if mark and head in each]


def run_report(
    rows: list[dict[str, Any]],
    predictions: list[dict[str, str]],
    logs: dict[str, str],
    void: list[str],
    run_id: str,
    dataset: str,
    split: str,
    out: str,
    environment: dict[str, str],
) -> str:
    """Has the harness make the report of a run in the folder `out`; returns the report's path.

    Args:
        predictions: as they were graded.
        logs: log folder of each instance, which is moved to where the harness keeps it.
        void: instances of which the infrastructure failed.
    """
    from docker.errors import NotFound
    from swebench.harness.constants import LOG_REPORT, RUN_EVALUATION_LOG_DIR
    from swebench.harness.reporting import make_run_report
    from swebench.harness.run_evaluation import write_run_metadata

    from agentrl.env.container.engine import connect

    os.chdir(out)
    for name in [name for name in os.environ if name.startswith("DOCKER_")]:
        del os.environ[name]
    os.environ.update(environment)
    write_run_metadata(run_id, dataset, split, None)
    by_id = {each["instance_id"]: each for each in predictions}
    for instance_id, prediction in by_id.items():
        model = prediction["model_name_or_path"].replace("/", "__")
        final = RUN_EVALUATION_LOG_DIR / run_id / model / instance_id
        fresh = Path(logs[instance_id])
        if fresh.is_dir():
            shutil.rmtree(final, ignore_errors=True)
            final.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(fresh, final)
        if instance_id in void and (final / LOG_REPORT).exists():
            # The infrastructure failed, so this must count as an error, not a failure of the model.
            (final / LOG_REPORT).replace(final / f"void.{LOG_REPORT}")
    for attempt in range(_ATTEMPTS):
        try:
            return str(make_run_report(by_id, rows, run_id, connect(), "."))  # type: ignore[arg-type]
        except NotFound:
            # The harness lists all images and containers, and one of another run was just removed.
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(1)
    raise AssertionError


_ACTIONS = {each.__name__: each for each in (prepare, report, run_report)}

if __name__ == "__main__":
    main()
