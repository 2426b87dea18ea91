"""Weights from the trainer's GPU to the servers' GPUs, without a file: vLLM's backend "nccl".

    trainer, rank 0                    workers of one server, ranks 1 to N
    an id of 128 bytes, over HTTP  ->  all join one communicator
    names, dtypes, shapes, over HTTP
    broadcast, tensor by tensor    ->  each is loaded as it comes

Every server has a communicator of its own, so that one that dies takes no other with it: a
collective of NCCL waits for all of its ranks and has no deadline. What fails here is aborted, which
is the only way out of a call that waits, and the next update begins with a new communicator.

Trainer and servers need different GPUs: NCCL takes no two ranks on one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import json
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from agentrl.errors import ConfigError, WeightSyncError
from agentrl.sync.adapter import has_adapter
from agentrl.sync.control import ServerControl
from agentrl.sync.shards import CheckpointTensors, is_sharded
from agentrl.sync.transfer import Transfer, in_thread
from agentrl.types import JSON

Result = TypeVar("Result")

LIBRARY = "VLLM_NCCL_SO_PATH"
"""Environment variable with the library's path, the same that vLLM reads; both sides need versions
that understand each other. Not set: the one that torch has loaded."""

_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""`ncclDataType_t`."""
_FLOAT32, _SUM = 7, 0

REASON_S = 5.0
"""How long a server is given to say why a transfer broke."""
REST_S = 60.0
"""How long the trainer's part may go on when the server's has ended."""


class NCCLError(WeightSyncError):
    """The library refused a call, or a rank was lost."""


class _UniqueID(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Library:
    """The functions of NCCL that a sender needs (nccl.h, unchanged since NCCL 2.4)."""

    def __init__(self, path: str | None = None) -> None:
        """
        Raises:
            ConfigError: there is none.
        """
        path = path or os.environ.get(LIBRARY) or "libnccl.so.2"
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise ConfigError(
                f"inference.transfer = 'nccl' needs NCCL, and {path} cannot be loaded ({error}); "
                f"install a CUDA build of torch, set {LIBRARY}, or use inference.transfer = 'file'"
            ) from error
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._library = library
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetErrorString.argtypes = [number]
        library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueID)]
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueID, number]
        library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        library.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        library.ncclCommAbort.argtypes = [pointer]

    def unique_id(self) -> bytes:
        """128 bytes by which the ranks of one communicator find each other."""
        made = _UniqueID()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def call(self, name: str, *arguments: object) -> None:
        """
        Raises:
            NCCLError: it returned anything but success.
        """
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            reason = self._library.ncclGetErrorString(result).decode(errors="replace")
            raise NCCLError(f"{name}: {reason} (NCCL_DEBUG=INFO says more)")


class Communicator:
    """Rank 0 of a group whose other ranks are the workers of one server."""

    def __init__(
        self, library: Library, unique_id: bytes, world_size: int, device: torch.device
    ) -> None:
        """Blocks until all ranks are there, for ever if one never comes.

        Raises:
            NCCLError: two ranks share a GPU, or they cannot reach each other.
        """
        self._library = library
        self._device = device
        self._handle = ctypes.c_void_p()
        with self._stream() as stream:
            identity = _UniqueID.from_buffer_copy(unique_id)
            try:
                library.call(
                    "ncclCommInitRank", ctypes.byref(self._handle), world_size, identity, 0
                )
            except NCCLError as error:
                raise NCCLError(
                    f"{error}; trainer and servers need different GPUs, and must reach each other "
                    "(NCCL_SOCKET_IFNAME)"
                ) from error
            # vLLM's workers make this call first, and all ranks must make the same ones.
            one = torch.zeros(1, device=device)
            place = ctypes.c_void_p(one.data_ptr())
            library.call("ncclAllReduce", place, place, 1, _FLOAT32, _SUM, self._handle, stream)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send contiguous tensors, and wait until all have left.

        Raises:
            NCCLError: a rank was lost, or `abort` was called.
        """
        with self._stream() as stream:
            for tensor in tensors:
                # On its way from the host a tensor has to arrive before it is sent, and to be sent
                # before its memory is used again; the calls are queued on a stream of their own.
                from_host = tensor.device != self._device
                tensor = tensor.to(self._device)
                if from_host:
                    torch.cuda.synchronize(self._device)
                place = ctypes.c_void_p(tensor.data_ptr())
                self._library.call(
                    "ncclBroadcast",
                    *(place, place, tensor.numel(), _DTYPES[tensor.dtype], 0),
                    *(self._handle, stream),
                )
                if from_host:
                    torch.cuda.synchronize(self._device)

    def abort(self) -> None:
        """End it, from any thread: calls that wait for other ranks return with an error."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            with contextlib.suppress(NCCLError):  # its other ranks may be gone already
                self._library.call("ncclCommAbort", handle)

    @contextlib.contextmanager
    def _stream(self):
        """A stream of the device on which NCCL's calls are queued, waited for at the end. Host
        memory, which only a stand-in of the library takes, has none."""
        if self._device.type != "cuda":
            yield None
            return
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            yield ctypes.c_void_p(stream.cuda_stream)
            stream.synchronize()


class NCCLTransfer(Transfer):
    """Keeps a copy of the weights for servers that are restarted between two updates: on the
    trainer's device or, where the model is sharded and no GPU may have room, in host memory."""

    backend = "nccl"

    def __init__(self, library: Library) -> None:
        self._library = library
        self._weights: dict[str, torch.Tensor] = {}
        self._version: int | None = None
        self._device = torch.device("cpu")
        self._communicators: dict[str, Communicator] = {}
        self._labels: dict[str, str] = {}
        """What a server calls the weights that it was sent through its communicator."""

    async def take(self, model: PreTrainedModel, version: int) -> None:
        if has_adapter(model):
            raise WeightSyncError(
                "vLLM's NCCL backend takes whole weights, not an adapter; use "
                "inference.transfer = 'file'"
            )
        # Of shards in host memory it is another device than theirs.
        self._version, self._device = version, getattr(model, "computes_on", model.device)
        try:
            await in_thread(lambda: self._copy(model))
        except torch.OutOfMemoryError as error:
            raise WeightSyncError(
                f"no room for a copy of the weights of version {version} on the trainer's GPU "
                "(inference.transfer = 'nccl' keeps one); use inference.transfer = 'file'"
            ) from error

    async def connect(self, control: ServerControl) -> None:
        url = control.url
        if url in self._communicators and await _label(control) == self._labels.get(url):
            return
        self._drop(url)
        world_size = 1 + json.loads(await control.call("GET", "/get_world_size"))["world_size"]
        await _release(control)
        unique_id = self._library.unique_id()
        init_info: dict[str, JSON] = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": world_size,
            "packed": False,
        }
        self._communicators[url] = await _together(
            control.post("/init_weight_transfer_engine", {"init_info": init_info}),
            lambda: Communicator(self._library, unique_id, world_size, self._device),
        )

    async def send(self, control: ServerControl) -> None:
        communicator, weights = self._communicators[control.url], self._weights
        update_info: dict[str, JSON] = {
            "names": list(weights),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
            "shapes": [list(each.shape) for each in weights.values()],
        }
        try:
            await _together(
                control.post("/update_weights", {"update_info": update_info}),
                lambda: communicator.broadcast(weights.values()),
            )
        except BaseException:
            self._drop(control.url)
            raise
        self._labels[control.url] = str(self._version)

    def delivered(self, version: int) -> None:
        """Nothing to do: the copy is overwritten by the next."""

    async def aclose(self) -> None:
        for url in list(self._communicators):
            self._drop(url)
        self._weights = {}

    def _drop(self, url: str) -> None:
        self._labels.pop(url, None)
        communicator = self._communicators.pop(url, None)
        if communicator is not None:
            # It may wait for what the GPU has queued.
            threading.Thread(target=communicator.abort, daemon=True).start()

    def _copy(self, model: PreTrainedModel) -> None:
        """Into the memory of the last copy, where that fits."""
        tensors = CheckpointTensors(model)
        for name, shape in tensors.shapes.items():
            if shape.dtype not in _DTYPES:
                raise WeightSyncError(f"NCCL cannot send {name}: its dtype is {shape.dtype}")
        for name in self._weights.keys() - tensors.shapes.keys():
            del self._weights[name]
        device = torch.device("cpu") if is_sharded(model) else model.device
        with torch.no_grad():
            for name, tensor in tensors:
                kept = self._weights.get(name)
                if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                    kept = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    self._weights[name] = kept
                kept.copy_(tensor)
        if any(tensor.is_cuda for tensor in self._weights.values()):
            torch.cuda.synchronize()


async def _release(control: ServerControl) -> None:
    """Have the server let an earlier trainer's communicator go; without one it does nothing."""
    try:
        await control.post("/shutdown_weight_transfer_engine")
    except WeightSyncError as error:
        if "during a weight update" not in str(error):
            raise
        await control.post("/finish_weight_update")  # that trainer was killed in the middle of it
        await control.post("/shutdown_weight_transfer_engine")


async def _label(control: ServerControl) -> str:
    """What the server calls its weights; a restarted one has its first word for them again."""
    return json.loads(await control.call("GET", "/weight_info"))["weight_version"]


async def _together(request: Awaitable[object], work: Callable[[], Result]) -> Result:
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
