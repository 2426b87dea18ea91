"""Runs one grading per process.

`python -m agentrl_swebench.grade_worker` imports the harness and then forks a worker for each
folder that it is sent (`harness.py`). A worker reads `request.json` in its folder, runs the
official harness' `run_instance` as it is, and writes `result.json` there. The harness is given a
Docker client that adds limits and labels to the container it creates (`guarded.py`), and its
clean-up is replaced by ours; nothing else about the run differs from the official one.

Besides the report, the result says what ended the run. It is read from the exception that the
harness met and from the engine's events about the container, because the graded patch can write
to the harness' log and the test output, but not to those.

A worker ends with its parent: it holds a connection to it, and when that closes, the parent is gone
or has given up the grading.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.env.container.engine import connect, reap
from agentrl.errors import AgentRLError
from agentrl_swebench.guarded import GuardedClient, Watch

if TYPE_CHECKING:
    import docker

GRADING_LABEL = "agentrl.grading"
"""Label by which the container of one run of the harness is found."""

FOLDER_PREFIX = "agentrl-grade-"
REQUEST_FILE = "request.json"
RESULT_FILE = "result.json"
LOG_FILE = "worker.log"

_EVENTS_WAIT_S = 3.0
_DISK_POLL_S = 1.0


def main() -> int:
    """Forks workers until the process that asks for them is gone; returns 0."""
    import swebench.harness.grading
    import swebench.harness.run_evaluation
    import swebench.harness.utils  # noqa: F401

    asked = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        folder, connections, _, _ = socket.recv_fds(asked, 4096, 1)
        if not folder:
            return 0
        if os.fork() == 0:
            try:
                _work(os.fsdecode(folder), connections[0])
            finally:
                traceback.print_exc()  # reached only if `_work` failed: it ends the process itself
                os._exit(1)
        os.close(connections[0])


def _work(folder: str, connection: int) -> None:
    """Grades in the forked process and ends the process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    try:
        os.chdir(folder)
    except FileNotFoundError:
        os._exit(1)  # the folder is gone: the grading was given up before it began
    log = os.open(LOG_FILE, os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, log, log)):
        os.dup2(file, number)
    os.set_inheritable(connection, False)  # programs that the harness starts must not hold it
    os.write(connection, b"%d\n" % os.getpid())
    request = json.loads(Path(REQUEST_FILE).read_text())
    threading.Thread(
        target=_end_with_parent, args=(connection, request["grading"]), daemon=True
    ).start()
    for name in [name for name in os.environ if name.startswith("DOCKER_")]:
        del os.environ[name]
    os.environ.update(request["environment"])
    limit = request["worker_memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    result = run(request)
    part = Path(RESULT_FILE + ".part")
    part.write_text(json.dumps(result))
    part.replace(RESULT_FILE)
    sys.stdout.flush()
    if _parent_gone.is_set():
        threading.Event().wait()  # the other thread cleans up and ends the process
    # Not sys.exit: the harness' reader thread may still wait for a container that hangs.
    os._exit(0)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Grades `request["patch"]` on `request["row"]`; returns the fields of `Evidence`, except
    `ended` and `seconds`."""
    # Importing the harness takes a second and raises the process' limits, so only workers do.
    from docker.errors import DockerException
    from swebench.harness import run_evaluation
    from swebench.harness.constants import (
        END_TEST_OUTPUT,
        LOG_TEST_OUTPUT,
        RUN_EVALUATION_LOG_DIR,
        START_TEST_OUTPUT,
    )
    from swebench.harness.grading import get_logs_eval
    from swebench.harness.utils import make_test_spec

    from agentrl.errors import AgentRLError

    row, model = request["row"], request["model_name_or_path"]
    prediction = {
        "instance_id": row["instance_id"],
        "model_name_or_path": model,
        "model_patch": request["patch"],
    }
    log_dir = RUN_EVALUATION_LOG_DIR / request["grading"] / model.replace("/", "__")
    log_dir /= row["instance_id"]
    result: dict[str, Any] = {
        "report": None,
        "statuses": {},
        "complete": False,
        "reports": (),
        "error_kind": "",
        "error": "",
        "container_end": "",
        "out_of_memory": False,
        "least_free_bytes": None,
        "image_id": "",
        "log_dir": str(log_dir),
    }
    try:
        spec = make_test_spec(row)
    except (KeyError, ValueError, TypeError) as error:
        return result | {"error_kind": "row", "error": f"{type(error).__name__}: {error}"}
    try:
        # The stream of the tests' output may be silent for as long as the tests may run.
        client = connect(request["timeout_s"] + 60)
        disk = _DiskWatch(_disk_of(client))
    except (AgentRLError, DockerException, OSError) as error:
        return result | {"error_kind": "engine", "error": str(error)}
    output = log_dir / LOG_TEST_OUTPUT

    watch = Watch()
    guarded = GuardedClient(client, request["container"], watch)
    errors = _ErrorWatch()
    logging.getLogger(f"{row['instance_id']}.run_instance.log").addHandler(errors)
    returned = None
    try:
        run_evaluation.cleanup_container = _clean_up
        returned = run_evaluation.run_instance(
            spec,
            prediction,
            guarded,  # type: ignore[arg-type]
            request["grading"],
            timeout=request["timeout_s"],
            skip_patch=request["skip_patch"],
        )
    except (DockerException, OSError, UnicodeError, MemoryError) as error:
        # Raised by the harness' clean-up or its files; any other exception is a defect to be seen.
        errors.errors.append(error)
    if returned is not None:
        result["report"] = returned[1]
    else:
        result["error_kind"], result["error"] = _what_failed(errors.errors)
    result["container_end"], result["out_of_memory"] = watch.end(_EVENTS_WAIT_S)
    result["least_free_bytes"] = disk.least()
    result["image_id"] = watch.image_id
    if output.is_file():
        text = output.read_text(errors="replace")
        result["complete"] = START_TEST_OUTPUT in text and END_TEST_OUTPUT in text
        result["reports"] = marked_lines(text, request["mark"])
        if returned is not None:
            result["statuses"], _ = get_logs_eval(spec, str(output))
    return result


def marked_lines(text: str, mark: str) -> list[str]:
    """Returns what follows a mark and a space in the lines of a log.

    The engine joins two streams, so what one writes may begin within a line of the other.
    """
    head = f"{mark} "
    return [each.partition(head)[2] for each in text.split("\n") if mark and head in each]


def _clean_up(client: object, container: Any, logger: object) -> None:
    """Replaces the harness' clean-up, which runs two `docker` programs after the verdict."""
    if container is not None:
        container.clean_up()


class _ErrorWatch(logging.Handler):
    """Collects the exceptions that the harness handles: it logs each while handling it."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is not None and (not self.errors or self.errors[-1] is not error):
            self.errors.append(error)


def _what_failed(errors: list[BaseException]) -> tuple[str, str]:
    """Returns the kind and the text of the error that ended a run.

    Kinds: `patch` (it does not apply), `timeout` (the tests took too long), `image` (it is
    missing), `engine`, `memory`, `decode`, `disk`, `other`.
    """
    import subprocess

    from docker.errors import DockerException, ImageNotFound
    from requests.exceptions import RequestException
    from swebench.harness.constants import APPLY_PATCH_FAIL
    from swebench.harness.utils import EvaluationError
    from urllib3.exceptions import HTTPError

    # Errors of the clean-up's programs come after the error that ended the run.
    causes = [error for error in errors if not isinstance(error, subprocess.SubprocessError)]
    if not causes:
        return "other", "the harness gave neither a report nor an error"
    error = causes[-1]
    if isinstance(error, EvaluationError):
        message = str(error.super_str)
        if message.startswith(APPLY_PATCH_FAIL):
            return "patch", message[:500]
        if message.startswith("Test timed out"):
            return "timeout", message
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    kinds: tuple[tuple[str, tuple[type[BaseException], ...]], ...] = (
        ("image", (ImageNotFound,)),
        ("engine", (DockerException, RequestException, HTTPError)),
        ("memory", (MemoryError,)),
        ("decode", (UnicodeError,)),
        ("disk", (OSError,)),
    )
    for kind, types in kinds:
        if any(isinstance(each, types) for each in chain):
            return kind, text
    return "other", text


class _DiskWatch:
    """Records the least free space while a grading runs: a full disk fails tests as a wrong patch
    does."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._least = self._free()
        threading.Thread(target=self._poll, daemon=True).start()

    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free

    def _poll(self) -> None:
        while True:
            time.sleep(_DISK_POLL_S)
            self._least = min(self._least, self._free())

    def least(self) -> int:
        """Returns the least free space so far, in bytes."""
        return min(self._least, self._free())


def _disk_of(client: docker.DockerClient) -> str:
    """Returns a folder on the disk that containers write to."""
    folder = client.info().get("DockerRootDir", "")
    # If the folder is not visible here, the engine is on another machine or this process runs in a
    # container, whose root lies on the engine's disk.
    return folder if os.path.isdir(folder) else "/"


_parent_gone = threading.Event()


def _end_with_parent(connection: int, grading: str) -> None:
    while os.read(connection, 1024):
        pass
    _parent_gone.set()
    try:
        reap(connect(10), label=f"{GRADING_LABEL}={grading}", everything=True)
    except AgentRLError:
        pass  # the reaper will find the container by its label
    finally:
        # The parent made this folder for the run and can no longer remove it.
        folder = Path.cwd()
        for _ in range(100 if folder.name.startswith(FOLDER_PREFIX) else 0):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.02)  # the harness wrote a file there meanwhile
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
