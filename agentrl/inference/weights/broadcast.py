"""Sends weights from the trainer's GPU to the servers' GPUs, without a file.

    trainer, rank 0                    workers of one server, ranks 1 to N
    rendezvous address, over HTTP  ->  all join one group
    names, dtypes, shapes, over HTTP
    broadcast, tensor by tensor    ->  each is loaded as it arrives

`nccl` beside this module implements it for vLLM servers, `sglang` for SGLang servers.

Each server has its own group, so that a server that dies does not affect the others: a collective
waits for all of its ranks, and NCCL's has no timeout. If a transfer fails, the group is aborted,
which is the only way to end a blocked call, and the next update makes a new group.

Trainer and servers need different GPUs: NCCL does not allow two ranks on the same GPU.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from agentrl.errors import WeightSyncError
from agentrl.inference.servers import retrieve
from agentrl.inference.weights.control import ServerControl
from agentrl.inference.weights.transfer import Transfer, in_thread
from agentrl.model.adapter_files import has_adapter
from agentrl.model.tensors import CheckpointTensors, is_sharded
from agentrl.types import JSON

Result = TypeVar("Result")

REASON_S = 5.0
"""Seconds to wait for a server's error message after a transfer failed."""
REST_S = 60.0
"""Seconds that the trainer may take to finish a transfer after the server has finished."""
DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""The dtypes that both NCCL and gloo can send, and their `ncclDataType_t`."""


class NCCLError(WeightSyncError):
    """The communication library returned an error, or a rank was lost."""


class Group(Protocol):
    """Rank 0 of a communication group whose other ranks are the workers of one server."""

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sends tensors from the device or host memory and waits until all have been sent.

        Raises:
            NCCLError: a rank was lost, or `abort` was called.
        """
        ...

    def abort(self) -> None:
        """Ends the group, from any thread; calls that wait for other ranks raise NCCLError."""
        ...


class BroadcastTransfer(Transfer):
    """Sends the model's tensors or, if they are sharded over ranks, a copy in host memory.

    The copy is made for every version, also for servers that are restarted between two updates. The
    device holds only those of its tensors that are currently being sent.
    """

    backend = "nccl"

    def __init__(self) -> None:
        self._live: dict[str, torch.Tensor] = {}
        """The model's own tensors during a push; empty for sharded models."""
        self._weights: dict[str, torch.Tensor] = {}
        """The copy in host memory."""
        self._version: int | None = None
        self._device = torch.device("cpu")
        self._groups: dict[str, Group] = {}
        self._labels: dict[str, str] = {}
        """Server URL -> label of the last weights sent through its group."""

    async def take(self, model: PreTrainedModel, version: int) -> None:
        if has_adapter(model):
            raise WeightSyncError(
                "inference.transfer = 'nccl' sends whole weights, not an adapter; use 'file'"
            )
        # Shards may be in host memory, while the model computes on a GPU.
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
        """Makes a new group with the server's workers, which leave an old one."""
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
        """Makes the paused server receive the broadcast tensors and load them."""
        raise NotImplementedError

    def delivered(self, version: int) -> None:
        """Releases the model's tensors, which may change from now on."""
        self._live = {}

    async def aclose(self) -> None:
        for url in list(self._groups):
            self._drop(url)
        self._live = self._weights = {}

    def _drop(self, url: str) -> None:
        self._labels.pop(url, None)
        group = self._groups.pop(url, None)
        if group is not None:
            # In a thread, because it may wait for work queued on the GPU.
            threading.Thread(target=group.abort, daemon=True).start()

    def _copy(self, model: PreTrainedModel) -> None:
        """Copies the weights to host memory, reusing the last copy's memory where shapes match."""
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
                    # Pinned, so that copies to and from the device are asynchronous.
                    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
                    self._weights[name] = kept
                kept.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize(self._device)


async def _label(control: ServerControl) -> str:
    """Returns the label of the server's weights; a restart resets it to the initial one."""
    return json.loads(await control.call("GET", control.label_path))["weight_version"]


async def together(request: Awaitable[object], work: Callable[[], Result]) -> Result:
    """Makes an HTTP request and does the trainer's side of the same collective operation.

    The server answers once it has done its side. `work` runs on a daemon thread; if it never ends,
    the thread is abandoned, because it cannot be stopped and does not keep the process alive.

    Raises:
        WeightSyncError: the request's error if it failed, else that of `work`.
    """
    calling, working = asyncio.ensure_future(request), _in_daemon_thread(work)
    for future in (calling, working):
        future.add_done_callback(retrieve)
    try:
        await asyncio.wait({calling, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None:
            # The server's error message says more than "a rank was lost".
            await asyncio.wait({calling}, timeout=REASON_S)
        else:
            await asyncio.wait({calling})  # the request has a timeout
        if calling.done():
            calling.result()
        await asyncio.wait({working}, timeout=REST_S)
        if not working.done():
            raise NCCLError(
                "the server has finished the transfer, but the trainer did not finish within "
                f"{REST_S:g} s"
            )
        return working.result()
    finally:
        calling.cancel()
        working.cancel()


def _in_daemon_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()  # so that nothing cancels what the thread will set

    def run() -> None:
        try:
            outcome.set_result(work())
        except (WeightSyncError, RuntimeError) as error:  # RuntimeError: from CUDA, after an abort
            outcome.set_exception(error)

    threading.Thread(target=run, name="agentrl-nccl", daemon=True).start()
    return asyncio.wrap_future(outcome)
