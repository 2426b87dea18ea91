"""Sends weights from the trainer's GPU to the servers' GPUs, without a file.

    trainer, rank 0                    workers of one server, ranks 1 to N
    where to meet, over HTTP       ->  all join one group
    names, dtypes, shapes, over HTTP
    broadcast, tensor by tensor    ->  each is loaded as it comes

`agentrl.sync.nccl` does it with vLLM's servers, `agentrl.sync.sglang` with SGLang's.

Every server has a group of its own, so that one that dies takes no other with it: a collective
waits for all of its ranks, NCCL's without a deadline. What fails here is aborted, which is the only
way out of a call that waits, and the next update begins with a new group.

Trainer and servers need different GPUs: NCCL takes no two ranks on one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from agentrl.errors import WeightSyncError
from agentrl.sync.adapter import has_adapter
from agentrl.sync.control import ServerControl
from agentrl.sync.shards import CheckpointTensors, is_sharded
from agentrl.sync.transfer import Transfer, in_thread
from agentrl.types import JSON

Result = TypeVar("Result")

REASON_S = 5.0
"""The time that a server has to say why a transfer broke."""
REST_S = 60.0
"""The time that the trainer's part has to end after the server's has."""
DTYPES = (
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16),
)
"""The dtypes that every library can send."""


class NCCLError(WeightSyncError):
    """The library refused a call, or a rank was lost."""


class Group(Protocol):
    """Rank 0 of a group whose other ranks are the workers of one server."""

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send tensors of the device or of host memory, and wait until all have left.

        Raises:
            NCCLError: a rank was lost, or `abort` was called.
        """
        ...

    def abort(self) -> None:
        """End it, from any thread: calls that wait for other ranks return with an error."""
        ...


class BroadcastTransfer(Transfer):
    """Sends the model's own tensors and, where ranks hold shards of them, a copy in host memory.

    The copy is made of every version, for servers that are restarted between two updates. On the
    device there is never more of it than the tensors that are on their way."""

    backend = "nccl"

    def __init__(self) -> None:
        self._live: dict[str, torch.Tensor] = {}
        """The model's own tensors, until the push is over; of shards there are none."""
        self._weights: dict[str, torch.Tensor] = {}
        """The copy."""
        self._version: int | None = None
        self._device = torch.device("cpu")
        self._groups: dict[str, Group] = {}
        self._labels: dict[str, str] = {}
        """The label of the weights that a server was sent through its group last, by address."""

    async def take(self, model: PreTrainedModel, version: int) -> None:
        if has_adapter(model):
            raise WeightSyncError(
                "inference.transfer = 'nccl' sends whole weights, not an adapter; use 'file'"
            )
        # Of shards in host memory it is another device than theirs.
        self._version, self._device = version, getattr(model, "computes_on", model.device)
        await in_thread(lambda: self._copy(model))

    async def connect(self, control: ServerControl) -> None:
        url = control.url
        if url in self._groups and await _label(control) == self._labels.get(url):
            return
        self._drop(url)
        self._groups[url] = await self._join(control)

    async def send(self, control: ServerControl) -> None:
        group, weights = self._groups[control.url], self._live or self._weights
        dtypes: list[JSON] = [str(each.dtype).removeprefix("torch.") for each in weights.values()]
        shapes: list[JSON] = [list(each.shape) for each in weights.values()]
        try:
            await together(
                self._receive(control, list(weights), dtypes, shapes, version=str(self._version)),
                lambda: group.broadcast(weights.values()),
            )
        except BaseException:
            self._drop(control.url)
            raise
        self._labels[control.url] = str(self._version)

    async def _join(self, control: ServerControl) -> Group:
        """Have the server join a new group, and leave an old one."""
        raise NotImplementedError

    async def _receive(
        self,
        control: ServerControl,
        names: list[JSON],
        dtypes: list[JSON],
        shapes: list[JSON],
        *,
        version: str,
    ) -> None:
        """Have the paused server take what is sent, and load it."""
        raise NotImplementedError

    def delivered(self, version: int) -> None:
        """From here on the model may change."""
        self._live = {}

    async def aclose(self) -> None:
        for url in list(self._groups):
            self._drop(url)
        self._live = self._weights = {}

    def _drop(self, url: str) -> None:
        self._labels.pop(url, None)
        group = self._groups.pop(url, None)
        if group is not None:
            # It may wait for what the GPU has queued.
            threading.Thread(target=group.abort, daemon=True).start()

    def _copy(self, model: PreTrainedModel) -> None:
        """Copies the weights, into the memory of the last copy where that fits."""
        tensors = CheckpointTensors(model)
        for name, shape in tensors.shapes.items():
            if shape.dtype not in DTYPES:
                raise WeightSyncError(f"NCCL cannot send {name}: its dtype is {shape.dtype}")
        for name in self._weights.keys() - tensors.shapes.keys():
            del self._weights[name]
        on_gpu = self._device.type == "cuda"
        self._live = {} if is_sharded(model) else dict(tensors)
        with torch.no_grad():
            for name, tensor in self._live.items() or tensors:
                kept = self._weights.get(name)
                if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                    # Pinned, so that its copies to and from the device are queued, not waited for.
                    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
                    self._weights[name] = kept
                kept.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize(self._device)


async def _label(control: ServerControl) -> str:
    """Returns the server's label of its weights. After a restart it is the first label again."""
    return json.loads(await control.call("GET", control.label_path))["weight_version"]


async def together(request: Awaitable[object], work: Callable[[], Result]) -> Result:
    """Make a call that the server answers when it has done its part of `work`, and do ours.

    A thread whose work never ends is left behind: nothing can stop it, and the process ends in
    spite of it.

    Raises:
        WeightSyncError: of the call, else of the work.
    """
    calling, working = asyncio.ensure_future(request), _in_daemon_thread(work)
    for future in (calling, working):
        future.add_done_callback(_retrieve)
    try:
        await asyncio.wait({calling, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None:
            # The server's reason says more than a lost rank.
            await asyncio.wait({calling}, timeout=REASON_S)
        else:
            await asyncio.wait({calling})  # which has a deadline
        if calling.done():
            calling.result()
        await asyncio.wait({working}, timeout=REST_S)
        if not working.done():
            raise NCCLError(f"the server has its part, and ours did not end within {REST_S:g} s")
        return working.result()
    finally:
        calling.cancel()
        working.cancel()


def _in_daemon_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # pyright: ignore[reportArgumentType]
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except (WeightSyncError, RuntimeError) as raised:  # RuntimeError: CUDA, after an abort
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="agentrl-nccl", daemon=True).start()
    return future


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Look at the outcome, so that asyncio does not report an error that another one explains."""
    if not future.cancelled():
        future.exception()
