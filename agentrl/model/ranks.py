"""Connects the ranks of a run: one process per GPU, each with a shard of every network.

The launcher (torchrun, Ray Train, a Slurm script) sets the environment variables RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. Rank 0 drives the run: it plays, writes and decides. The others follow
it (`agentrl.train.follow`): they wait for its next command and do their part of the work. Without
those variables there is a single rank, and the functions here do nothing.

Ranks exchange JSON, msgpack and tensors; nothing is unpickled.
"""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # pyright: ignore

from agentrl.config import ParallelSection
from agentrl.errors import ConfigError, TrainingError, first_line
from agentrl.model import context
from agentrl.model.watchdog import REMEDY, Watchdog
from agentrl.types import JSON

_control: dist.ProcessGroup | None = None
"""Carries rank 0's commands. It has no deadline, because rank 0 may play for hours between two."""
_host: dist.ProcessGroup | None = None
"""For data in host memory."""
_everywhere: dist.ProcessGroup | None = None
"""For data in host memory or on the device; None if the default group takes both."""
_saving: dist.ProcessGroup | None = None
"""For saving checkpoints, which a thread of each rank may do beside its other work."""
_launch: Store | None = None
"""The launcher's store; unlike that of an attempt it outlives a restart (--max-restarts)."""

_watchdog: Watchdog | None = None
_attempt = 0
_of_a_row = 1

_FOREVER = datetime.timedelta(days=30)
_CONNECTING_S = 10.0
"""Time that torch's client needs to give up by itself once its own limit has passed."""


def rank() -> int:
    """Returns the number of this process among the ranks, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Returns the number of ranks; 1 if the run was not started as several."""
    return dist.get_world_size() if dist.is_initialized() else 1


def of_a_row() -> int:
    """Returns how many neighbouring ranks compute the same rows together."""
    return _of_a_row


def attempt() -> int:
    """Returns how many times torchrun has restarted the ranks.

    The largest count of any rank, because a machine that joined later counts from zero.
    """
    return _attempt


def agents_share_store() -> bool:
    """Tells whether torchrun keeps one store for all attempts; if not, each attempt has its own."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join(device: torch.device, parallel: ParallelSection) -> None:
    """Connects to the other ranks, if the environment variables name any.

    Args:
        device: kind of device to compute on; each rank takes GPU number LOCAL_RANK.

    Raises:
        ConfigError: `train.parallel` asks for another number of ranks, or a rank does not appear
            within `train.parallel.meeting_s` seconds.
    """
    global _attempt, _control, _everywhere, _host, _of_a_row, _saving, _watchdog
    _attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    for name in ("context", "tensor", "expert"):
        if world_size % (size := getattr(parallel, name)):
            raise ConfigError(
                f"train.parallel.{name} = {size}, but {world_size} ranks were started, which is "
                "not a multiple of it; start them with torchrun --nproc-per-node "
                f"{max(size, parallel.of_a_row * (parallel.data or 1))}"
            )
    groups = world_size // parallel.of_a_row
    if parallel.data not in (None, groups):
        raise ConfigError(
            f"train.parallel.data = {parallel.data}, but {groups} ranks (with train.parallel."
            "context or tensor, groups of ranks) were started; leave it out, or start them with "
            f"torchrun --nproc-per-node {parallel.data * parallel.of_a_row}"
        )
    _of_a_row = parallel.of_a_row
    if world_size == 1:
        return
    # The watchdog acts first, because its message says more than that of a timed-out collective.
    deadline = datetime.timedelta(seconds=2 * parallel.deadline_s + 60)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if dist.is_initialized():
        # The launcher has connected the ranks, as Ray Train does, on GPUs for device memory only.
        group: Any = dist.new_group(backend=backend, timeout=deadline)
        _everywhere = group
    else:
        store, own_rank, world_size = _meet(parallel.meeting_s)
        store.set_timeout(deadline)
        dist.init_process_group(
            backend, store=store, rank=own_rank, world_size=world_size, timeout=deadline
        )
    # The watchdog needs its own connection, because this one blocks while it waits.
    store: Any = dist.distributed_c10d._get_default_store()
    _watchdog = Watchdog(
        PrefixStore("watchdog", store.clone()), rank(), world_size, parallel.deadline_s
    )
    groups: Any = [
        dist.new_group(backend="gloo", timeout=each) for each in (_FOREVER, deadline, deadline)
    ]
    _control, _host, _saving = groups
    _attempt = max(int(str(each)) for each in gather(_attempt))
    if parallel.context > 1:
        context.join(parallel.context)


def _meet(limit_s: float) -> tuple[Store, int, int]:
    """Waits for all ranks.

    Returns:
        A store for this attempt, this rank, and the number of ranks.
    """
    global _launch
    absent: list[int] = []
    over = time.monotonic() + limit_s
    limit = datetime.timedelta(seconds=limit_s)
    # Torch's client would wait for ever for a program that holds the port and never answers.
    silent = threading.Timer(limit_s + _CONNECTING_S, _nobody_answers, [limit_s])
    silent.daemon = True
    silent.start()
    try:
        launch, own_rank, world_size = next(rendezvous("env://", timeout=limit))
        store = launch
        if agents_share_store():
            # That store outlives a restart and still holds the addresses of ranks that are gone.
            store = PrefixStore(f"agentrl/{_attempt}", store)
        arrived = [f"arrived/{each}" for each in range(world_size)]
        store.set(arrived[own_rank], "")
        try:
            store.wait(arrived, datetime.timedelta(seconds=max(1.0, over - time.monotonic())))
        except dist.DistStoreError:
            absent = [each for each, key in enumerate(arrived) if not store.check([key])]
            raise
        _launch = launch
        return store, own_rank, world_size
    except dist.DistError as error:
        reason = f"without rank {', '.join(map(str, absent))}" if absent else first_line(error)
        raise ConfigError(_not_met(reason)) from error
    finally:
        silent.cancel()


def _nobody_answers(limit_s: float) -> None:
    """Ends this process with a message: nothing at the rendezvous address answers."""
    faulthandler.dump_traceback(all_threads=True, file=sys.__stderr__ or sys.stderr)
    reason = f"nothing answers there for {limit_s:g} s (train.parallel.meeting_s)"
    print(f"error: {_not_met(reason)}", file=sys.stderr, flush=True)
    os._exit(1)


def _not_met(reason: str) -> str:
    address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return (
        f"rank {os.environ.get('RANK')} does not meet the others at {address}:{port} ({reason}); "
        "MASTER_ADDR must name the machine of rank 0, MASTER_PORT must be free there, and all "
        "ranks must be started within train.parallel.meeting_s"
    )


def leave() -> None:
    """Disconnects from the other ranks; every rank calls it when its work is done."""
    global _of_a_row
    _of_a_row = 1
    if _watchdog is not None:
        _watchdog.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    context.leave()


def end_process(status: int) -> None:
    """Runs the exit handlers and ends this process, if it was one of several ranks.

    The interpreter is not shut down: gloo threads that outlive their groups may then abort the
    process, and torchrun would report a finished run as failed.
    """
    if _watchdog is not None:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def working(work: str, *, breaks: bool = True) -> Iterator[None]:
    """Marks the block as work that other ranks may wait for; the `Watchdog` expects it to progress.

    Args:
        work: named in the watchdog's messages.
        breaks: a broken connection ends this rank, so the watchdog limits the time for cleaning
            up. If False, the caller handles it.
    """
    if _watchdog is None:
        yield
        return
    with _watchdog.working(work):
        try:
            yield
        except RuntimeError as error:
            if breaks and is_broken(error):
                _watchdog.broke()  # cleaning up must end too, or the loss is never reported
            raise


def silent() -> AbstractContextManager[None]:
    """Keeps other ranks from calling this one lost while the block holds Python's lock for long."""
    return nullcontext() if _watchdog is None else _watchdog.silent()


def moved() -> None:
    """Tells the watchdog that the work of this thread made progress."""
    if _watchdog is not None:
        _watchdog.moved()


@contextmanager
def losses_named() -> Iterator[None]:
    """Wraps everything that a rank does: if a connection breaks, one rank reports which is gone.

    Raises:
        TrainingError: a connection broke; on the rank that reports it, and on rank 0.
        SystemExit: a connection broke; on the other ranks.
    """
    try:
        yield
    except RuntimeError as error:
        if _watchdog is None or not is_broken(error):
            raise
        _watchdog.broke()
        report = _watchdog.lost()
        _watchdog.closed()
        if report is None and rank() > 0:
            raise SystemExit(1) from None
        reason = report or "another rank ended with an error, which it reports"
        raise TrainingError(f"{reason}. {REMEDY}") from error


def is_broken(error: Exception) -> bool:
    """Tells whether an error means that a connection to another rank is broken."""
    if not isinstance(error, RuntimeError):
        return False
    # NCCL raises a DistError; gloo names itself in the message.
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def remember(key: str, value: str) -> None:
    """Stores a value in the launcher's store, for the ranks of a later attempt."""
    if _launch is not None:
        _launch.set(f"agentrl/{key}", value)


def remembered(key: str) -> str | None:
    """Returns the value that an earlier attempt stored with `remember`; None if there is none."""
    if _launch is None or not _launch.check([f"agentrl/{key}"]):
        return None
    return _launch.get(f"agentrl/{key}").decode()


def host_group() -> dist.ProcessGroup | None:
    """Returns the group for data in host memory; None for a single rank."""
    return _host


def everywhere() -> dist.ProcessGroup | None:
    """Returns the group for tensors on host and device; None if it is the default group."""
    return _everywhere


def saving_group() -> dist.ProcessGroup | None:
    """Returns the group for saving checkpoints; None for a single rank."""
    return _saving


# commands of rank 0 -------------------------------------------------------------------------------


def tell(word: str, content: Any = None) -> None:
    """Sends a command to the other ranks; only rank 0 calls it. A single rank sends nothing.

    Args:
        word: the command, see `agentrl.train.follow`.
        content: its arguments, as JSON and bytes.
    """
    if size() == 1:
        return
    encoded = bytearray(msgspec.msgpack.encode([word, content]))
    message = torch.frombuffer(encoded, dtype=torch.uint8)
    with working(word):  # a stopped rank blocks the sender of a long message
        dist.broadcast(torch.tensor(len(message)), src=0, group=_control)
        dist.broadcast(message, src=0, group=_control)


def told() -> tuple[str, Any]:
    """Waits for rank 0's next command; ranks above 0 call it.

    Returns:
        The word and content of `tell`.

    Raises:
        RuntimeError: rank 0 is gone.
    """
    length = torch.zeros((), dtype=torch.int64)
    dist.broadcast(length, src=0, group=_control)
    message = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, src=0, group=_control)
    word, content = msgspec.msgpack.decode(message.numpy().tobytes())
    return word, content


# collectives: every rank calls them ---------------------------------------------------------------


def share(value: JSON = None) -> JSON:
    """Returns rank 0's value, on every rank."""
    return gather(value)[0] if size() > 1 else value


def gather(value: JSON, group: dist.ProcessGroup | None = None) -> list[JSON]:
    """Returns the values of all ranks, in order of rank, on every rank.

    Args:
        group: a gloo group; by default that for data in host memory.
    """
    if size() == 1:
        return [value]
    group = group or _host
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros((), dtype=torch.int64) for _ in range(size())]
    dist.all_gather(lengths, torch.tensor(len(mine)), group=group)
    longest = int(max(lengths))
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(size())]
    dist.all_gather(texts, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=group)
    pairs = zip(texts, lengths, strict=True)
    return [json.loads(text[: int(length)].numpy().tobytes()) for text, length in pairs]


@contextmanager
def failing_together() -> Iterator[None]:
    """Ends all ranks if the block, which every rank enters, fails on one.

    Raises:
        ConfigError: the block raised it on some rank; on rank 0, which reports it.
        SystemExit: the same, on the other ranks.
    """
    problem = None
    try:
        yield
    except ConfigError as error:
        problem = str(error)
    problems = [each for each in gather(problem) if each is not None]
    if problems and rank() > 0:
        raise SystemExit(1)
    if problems:
        raise ConfigError(str(problems[0]))


def add_up(tensor: torch.Tensor) -> torch.Tensor:
    """Sums a tensor over all ranks, in place, and returns it."""
    if size() > 1:
        dist.all_reduce(tensor, group=_everywhere)
    return tensor


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """Takes the elementwise maximum over all ranks, in place, and returns the tensor."""
    if size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=_everywhere)
    return tensor


def barrier() -> None:
    """Waits until every rank has come here."""
    if size() > 1:
        dist.barrier(_host)
