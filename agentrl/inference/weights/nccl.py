"""Sends weights to vLLM servers' "nccl" backend, calling NCCL in the same way as vLLM's workers.

See `broadcast` beside this module. The ranks find each other by an id of 128 bytes, sent over HTTP.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
from collections.abc import Iterable

import torch

from agentrl.errors import ConfigError
from agentrl.inference.weights.broadcast import (
    DTYPES,
    BroadcastTransfer,
    Group,
    NCCLError,
    together,
)
from agentrl.inference.weights.control import ServerControl
from agentrl.types import JSON

LIBRARY = "VLLM_NCCL_SO_PATH"
"""Environment variable with the path of the NCCL library, which vLLM reads, too. Both sides need
compatible versions. If it is not set, libnccl.so.2 is loaded by name, as torch does."""

_SUM = 0


class _UniqueID(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Library:
    """The NCCL functions that a sender needs (nccl.h, unchanged since NCCL 2.4)."""

    def __init__(self, path: str | None = None) -> None:
        """
        Raises:
            ConfigError: the library cannot be loaded.
        """
        path = path or os.environ.get(LIBRARY) or "libnccl.so.2"
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise ConfigError(
                f"inference.transfer = 'nccl' needs NCCL, but {path} cannot be loaded ({error}); "
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
        """Returns 128 bytes by which the ranks of a new communicator find each other."""
        made = _UniqueID()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the library.

        Raises:
            NCCLError: the function returned an error.
        """
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            reason = self._library.ncclGetErrorString(result).decode(errors="replace")
            raise NCCLError(f"{name}: {reason} (set NCCL_DEBUG=INFO for details)")


class Communicator(Group):
    """A communicator with vLLM's workers, without torch.distributed."""

    def __init__(
        self, library: Library, unique_id: bytes, world_size: int, device: torch.device
    ) -> None:
        """Blocks until all ranks have joined, without a timeout.

        Raises:
            NCCLError: two ranks share a GPU, or they cannot reach each other.
        """
        self._library = library
        self._device = device
        # One stream for all pushes: PyTorch's allocator reuses memory only within a stream.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._handle = ctypes.c_void_p()
        with self._queueing() as stream:
            identity = _UniqueID.from_buffer_copy(unique_id)
            try:
                library.call(
                    "ncclCommInitRank", ctypes.byref(self._handle), world_size, identity, 0
                )
            except NCCLError as error:
                raise NCCLError(
                    f"{error}; trainer and servers need different GPUs and a network connection "
                    "(NCCL_SOCKET_IFNAME)"
                ) from error
            # vLLM's workers start with this call, and all ranks have to make the same calls.
            one = torch.zeros(1, device=device)
            place = ctypes.c_void_p(one.data_ptr())
            number = DTYPES[one.dtype]
            library.call("ncclAllReduce", place, place, 1, number, _SUM, self._handle, stream)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Group.broadcast`.

        On a separate stream, each tensor is copied from pinned memory and sent, and the next one
        reuses its memory; the host waits once, at the end.

        Raises:
            NCCLError: a rank was lost, or `abort` was called.
        """
        with self._queueing() as stream:
            for tensor in tensors:
                tensor = tensor.to(self._device, non_blocking=True).contiguous()
                place = ctypes.c_void_p(tensor.data_ptr())
                self._library.call(
                    "ncclBroadcast",
                    place,
                    place,
                    tensor.numel(),
                    DTYPES[tensor.dtype],
                    0,
                    self._handle,
                    stream,
                )

    def abort(self) -> None:
        """See `Group.abort`."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            with contextlib.suppress(NCCLError):  # the other ranks may already be gone
                self._library.call("ncclCommAbort", handle)

    @contextlib.contextmanager
    def _queueing(self):
        """Runs the block on the stream and waits for it at the end.

        Yields the stream's handle, or None for tensors in host memory, which only a stand-in of the
        library supports.
        """
        if self._stream is None:
            yield None
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # also selects its device
            yield ctypes.c_void_p(self._stream.cuda_stream)
        self._stream.synchronize()


class NCCLTransfer(BroadcastTransfer):
    """Sends to vLLM servers, whose workers call NCCL directly, too."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self._library = library

    async def _join(self, control: ServerControl) -> Communicator:
        world_size = 1 + json.loads(await control.call("GET", "/get_world_size"))["world_size"]
        # The server may still have an earlier trainer's communicator.
        await control.post_ending(
            "/shutdown_weight_transfer_engine", "during a weight update", "/finish_weight_update"
        )
        unique_id = self._library.unique_id()
        init_info: dict[str, JSON] = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": world_size,
            "packed": False,
        }
        return await together(
            control.post("/init_weight_transfer_engine", {"init_info": init_info}),
            lambda: Communicator(self._library, unique_id, world_size, self._device),
        )

    async def _receive(
        self,
        control: ServerControl,
        names: list[JSON],
        dtypes: list[JSON],
        shapes: list[JSON],
        *,
        version: str,
    ) -> None:
        update_info: dict[str, JSON] = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        await control.post("/update_weights", {"update_info": update_info})
