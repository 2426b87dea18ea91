"""Makes the official run report in a separate process: `python -m agentrl_swebench.report_worker`.

Reads one JSON request from standard input: the rows, the predictions as they were graded, and the
harness' log folder of each instance. Moves the folders to where the harness keeps its logs, below
the working directory, has the harness write its report there, and prints the report's path as the
last line.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from agentrl.env.container.engine import connect

_ATTEMPTS = 5


def main() -> int:
    # Importing the harness takes seconds, so it is done only here.
    from docker.errors import NotFound
    from swebench.harness.constants import LOG_REPORT, RUN_EVALUATION_LOG_DIR
    from swebench.harness.reporting import make_run_report
    from swebench.harness.run_evaluation import write_run_metadata

    request = json.load(sys.stdin)
    run_id = request["run_id"]
    write_run_metadata(run_id, request["dataset"], request["split"], None)
    predictions = {each["instance_id"]: each for each in request["predictions"]}
    for instance_id, prediction in predictions.items():
        model = prediction["model_name_or_path"].replace("/", "__")
        final = RUN_EVALUATION_LOG_DIR / run_id / model / instance_id
        fresh = Path(request["logs"][instance_id])
        if fresh.is_dir():
            shutil.rmtree(final, ignore_errors=True)
            final.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(fresh, final)
        if instance_id in request["void"] and (final / LOG_REPORT).exists():
            # The infrastructure failed, so this must count as an error, not a failure of the model.
            (final / LOG_REPORT).replace(final / f"void.{LOG_REPORT}")
    for attempt in range(_ATTEMPTS):
        try:
            print(make_run_report(predictions, request["rows"], run_id, connect(), "."))
            return 0
        except NotFound:
            # The harness lists all images and containers, and one of another run was just removed.
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(1)
    return 1


if __name__ == "__main__":
    sys.exit(main())
