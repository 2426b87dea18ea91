"""Runs work as a process of its own on a pretended GPU, or as one process on each of several.

Processes are forked from the tests', which have imported everything and touched no GPU.
"""

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 120
SMALL = [
    *("--run.num_steps", "1", "--rollout.groups_per_step", "2", "--rollout.group_size", "3"),
    *("--model.device", "cuda"),
]
ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/quickstart"


def ends_well(work: Callable[[], int | None], log: Path, *, num_ranks: int = 1) -> None:
    """Do the work on so many pretended GPUs.

    Raises:
        AssertionError: it raised or did not end; with the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [log.with_name(f"{log.name}.{rank}") for rank in range(num_ranks)]
    processes = [_fork(work, logs[rank], rank, num_ranks, port) for rank in range(num_ranks)]
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(statuses) < num_ranks:
        for rank, process in enumerate(processes):
            if rank not in statuses:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
        # One that failed leaves the others waiting.
        over = any(statuses.values()) or time.monotonic() > deadline
        for rank, process in enumerate(processes):
            if over and rank not in statuses:
                os.kill(process, signal.SIGABRT)  # with its stacks in the log
        time.sleep(0.02)
    failed = [rank for rank in range(num_ranks) if statuses[rank] > 0] or [
        rank for rank in range(num_ranks) if statuses[rank]
    ]
    said = "".join(f"\nrank {rank}:\n{logs[rank].read_text()[-4000:]}" for rank in failed)
    assert not failed, f"exit {statuses}{said}"


def _fork(work: Callable[[], int | None], log: Path, rank: int, num_ranks: int, port: int) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        sys.__stderr__ = sys.stderr
        faulthandler.enable(sys.stderr)
        if num_ranks > 1:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        status = work() or 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def agentrl(*arguments: object) -> Callable[[], int]:
    """The command, for `ends_well`."""
    from agentrl.cli.main import main

    return lambda: main([str(argument) for argument in arguments])


def train(run_dir: Path, *arguments: object) -> Callable[[], int]:
    """One step of the quickstart on the GPU."""
    return agentrl("train", QUICKSTART / "run.toml", "--run.dir", run_dir, *SMALL, *arguments)
