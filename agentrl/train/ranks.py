"""The ranks of a run: processes, one per GPU, that hold a shard of each network and learn together.

Whoever starts them (torchrun, Ray Train, a Slurm script) says by environment variables who is who:
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 is the run: it plays, writes and decides. The
others follow it (`agentrl.train.follow`): they wait for its next word and do their part of the
work. Without those variables there is one rank, and nothing here does anything.

What ranks say to each other is JSON and arrays; nothing is unpickled.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save
from torch.distributed import PrefixStore, Store, rendezvous  # pyright: ignore

from agentrl.config import ParallelSection
from agentrl.errors import ConfigError, TrainingError, first_line
from agentrl.train import context
from agentrl.train.watchdog import REMEDY, Watchdog
from agentrl.types import JSON

_control: dist.ProcessGroup | None = None
"""Ranks above 0 wait here while rank 0 plays, which may take hours: a group without a deadline."""
_host: dist.ProcessGroup | None = None
"""For what lies in host memory, whatever the ranks were started with."""
_everywhere: dist.ProcessGroup | None = None
"""For what lies in host memory or on the device; None: the default group does both."""
_saving: dist.ProcessGroup | None = None
"""For those who write a checkpoint, which may be a thread of each rank beside its work."""
_launch: Store | None = None
"""The store of the launch, not of the attempt: it outlives a restart under --max-restarts."""

_watchdog: Watchdog | None = None
_attempt = 0

_FOREVER = datetime.timedelta(days=30)
_CONNECTING_S = 10.0
"""The time that torch's client may need to give up by itself, once its own limit has passed."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def attempt() -> int:
    """Returns how often torchrun has started these ranks before: the most that any of them says,
    because a machine that came later does not know."""
    return _attempt


def agents_share_store() -> bool:
    """Tells whether torchrun keeps one store for all attempts; else rank 0 starts one for each."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join(device: torch.device, parallel: ParallelSection) -> None:
    """Meet the other ranks, if the environment says that there are any.

    Raises:
        ConfigError: `train.parallel` asks for another number of them, or they do not meet.
    """
    global _attempt, _control, _everywhere, _host, _saving, _watchdog
    _attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size % parallel.context:
        raise ConfigError(
            f"train.parallel.context = {parallel.context}, and {world_size} ranks were started, "
            f"which is no multiple of it; start them with torchrun --nproc-per-node "
            f"{parallel.context * (parallel.data or 1)}"
        )
    if parallel.data not in (None, world_size // parallel.context):
        wanted = parallel.data * parallel.context
        raise ConfigError(
            f"train.parallel.data = {parallel.data}, and {world_size // parallel.context} ranks "
            "or groups of them were started; leave it out, or start them with torchrun "
            f"--nproc-per-node {wanted}"
        )
    if world_size == 1:
        return
    # The watchdog says more than a collective that gives up.
    deadline = datetime.timedelta(seconds=2 * parallel.deadline_s + 60)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if dist.is_initialized():
        # By whoever started the ranks, as Ray Train does: on GPUs for the device alone.
        group: Any = dist.new_group(backend=backend, timeout=deadline)
        _everywhere = group
    else:
        store, own_rank, world_size = _meet(parallel.meeting_s)
        store.set_timeout(deadline)
        dist.init_process_group(
            backend, store=store, rank=own_rank, world_size=world_size, timeout=deadline
        )
    # A connection of its own, while the other one waits.
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
    """A store for this attempt, this rank and how many they are, once all of them are there.

    Raises:
        ConfigError: they are not within this time.
    """
    global _launch
    absent: list[int] = []
    over = time.monotonic() + limit_s
    limit = datetime.timedelta(seconds=limit_s)
    # A program that has the port and never answers would hold torch's client for ever.
    silent = threading.Timer(limit_s + _CONNECTING_S, _nobody_answers, [limit_s])
    silent.daemon = True
    silent.start()
    try:
        launch, own_rank, world_size = next(rendezvous("env://", timeout=limit))
        store = launch
        if agents_share_store():
            # It outlives a restart, and with it the addresses of ranks that are gone.
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
    faulthandler.dump_traceback(all_threads=True, file=sys.__stderr__ or sys.stderr)
    reason = f"nothing answers there for {limit_s:g} s (train.parallel.meeting_s)"
    print(f"error: {_not_met(reason)}", file=sys.stderr, flush=True)
    os._exit(1)


def _not_met(reason: str) -> str:
    address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return (
        f"rank {os.environ.get('RANK')} does not meet the others at {address}:{port} ({reason}); "
        "MASTER_ADDR must name the machine of rank 0, MASTER_PORT be free there, and all ranks be "
        "started within train.parallel.meeting_s"
    )


def leave() -> None:
    """Part from the other ranks; every rank calls it, at its end."""
    if _watchdog is not None:
        _watchdog.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    context.leave()


def end_process(status: int) -> None:
    """End a process that was one of several ranks, once its exit handlers have run.

    The interpreter is not taken down: some of gloo's threads outlive their groups, and one of them
    may abort the process then, so that torchrun would call a run failed whose work is done.
    """
    if _watchdog is not None:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def working(work: str, *, breaks: bool = True) -> Iterator[None]:
    """Marks work that the other ranks may wait for, so that the `Watchdog` expects it to move.

    Args:
        breaks: whether this rank ends soon once a connection breaks; else the caller says so.
    """
    if _watchdog is None:
        yield
        return
    with _watchdog.working(work):
        try:
            yield
        except RuntimeError as error:
            if breaks and is_broken(error):
                _watchdog.broke()  # what is closed before the loss is named has to end as well
            raise


@contextmanager
def silent() -> Iterator[None]:
    """Keep the others from calling this rank lost while the block keeps Python's lock for long."""
    if _watchdog is None:
        yield
        return
    with _watchdog.silent():
        yield


def moved() -> None:
    """Tell the watchdog that the work of this rank made progress."""
    if _watchdog is not None:
        _watchdog.moved()


@contextmanager
def losses_named() -> Iterator[None]:
    """Wraps all that a rank does: once a connection breaks, one rank says which other one is gone.

    Raises:
        TrainingError: on that one, and on rank 0.
        SystemExit: on the others.
    """
    try:
        yield
    except RuntimeError as error:
        if _watchdog is None or not is_broken(error):
            raise
        _watchdog.broke()
        said = _watchdog.lost()
        _watchdog.closed()
        if said is None and rank() > 0:
            raise SystemExit(1) from None
        reason = said or "another rank ended with an error, which it says"
        raise TrainingError(f"{reason}. {REMEDY}") from error


def is_broken(error: Exception) -> bool:
    """Tells whether an error means that a connection to another rank is broken."""
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error)  # NCCL's; gloo's


def remember(key: str, value: str) -> None:
    """Keep something for the ranks that are started after these were killed."""
    if _launch is not None:
        _launch.set(f"agentrl/{key}", value)


def remembered(key: str) -> str | None:
    if _launch is None or not _launch.check([f"agentrl/{key}"]):
        return None
    return _launch.get(f"agentrl/{key}").decode()


def host_group() -> dist.ProcessGroup | None:
    """A group for what lies in host memory; None for a single rank."""
    return _host


def everywhere() -> dist.ProcessGroup | None:
    """A group for tensors on the host and on the device; None where that is the default one."""
    return _everywhere


def saving_group() -> dist.ProcessGroup | None:
    """The group of those who write a checkpoint; None for a single rank."""
    return _saving


# words --------------------------------------------------------------------------------------------


def tell(word: str, content: Any = None, arrays: Mapping[str, np.ndarray] | None = None) -> None:
    """Rank 0: have the others do something too; `content` is JSON. Alone, do nothing."""
    if size() == 1:
        return
    text = np.frombuffer(json.dumps([word, content]).encode(), np.uint8)
    message = torch.frombuffer(bytearray(save({**(arrays or {}), "": text})), dtype=torch.uint8)
    with working(word):  # a rank that is stopped takes no long message
        dist.broadcast(torch.tensor(len(message)), src=0, group=_control)
        dist.broadcast(message, src=0, group=_control)


def told() -> tuple[str, Any, dict[str, np.ndarray]]:
    """The other ranks: wait for rank 0's next word; it, its content and its arrays.

    Raises:
        RuntimeError: rank 0 is gone.
    """
    length = torch.zeros((), dtype=torch.int64)
    dist.broadcast(length, src=0, group=_control)
    message = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, src=0, group=_control)
    arrays = load(message.numpy().tobytes())
    word, content = json.loads(arrays.pop("").tobytes())
    return word, content, arrays


# what all ranks do together -----------------------------------------------------------------------


def share(value: JSON = None) -> JSON:
    """Rank 0's value, on every rank."""
    return gather(value)[0] if size() > 1 else value


def gather(value: JSON, group: dist.ProcessGroup | None = None) -> list[JSON]:
    """Every rank's value, on every rank, in the order of the ranks.

    Args:
        group: of gloo; by default that of the ranks' work.
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


def add_up(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in place."""
    if size() > 1:
        dist.all_reduce(tensor, group=_everywhere)
    return tensor


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """The elementwise maximum over all ranks, in place."""
    if size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=_everywhere)
    return tensor


def barrier() -> None:
    if size() > 1:
        dist.barrier(_host)
