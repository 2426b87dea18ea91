"""A library with NCCL's functions for machines without GPUs, and a server's worker that uses it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path

import torch
from aiohttp import web
from control_server import ControlServer, error

from agentrl.errors import WeightSyncError
from agentrl.inference.weights.broadcast import DTYPES
from agentrl.inference.weights.nccl import Library, _UniqueID

SOURCE = Path(__file__).with_name("nccl_stand_in.c")

PLUGIN = '''
"""Has vLLM's own NCCL backend work on host memory; nothing of it is replaced but its GPU."""

import contextlib

import torch


def register():
    from vllm.utils import torch_utils
    from vllm.v1.worker.cpu import shm

    # vLLM on a CPU has streams that do nothing already; NCCL asks them for a handle.
    torch_utils._StreamPlaceholder.cuda_stream = None
    shm._StreamPlaceholder.cuda_stream = None
    torch.accelerator.current_device_index = lambda: torch.device("cpu")
    torch.accelerator.device_index = lambda index: contextlib.nullcontext()
'''


def build(directory: Path) -> Path | None:
    """Builds the library; returns None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    path = directory / "libnccl_stand_in.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", path, SOURCE], check=True)
    return path


def write_vllm_plugin(directory: Path) -> None:
    """For a vLLM server that has this directory on its PYTHONPATH."""
    metadata = directory / "nccl_on_host_memory-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (directory / "nccl_on_host_memory.py").write_text(PLUGIN)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nccl-on-host-memory\nVersion: 1\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nnccl_on_host_memory = nccl_on_host_memory:register\n"
    )


class Worker:
    """A rank beside the trainer, as vLLM's workers are: it joins, warms up and receives."""

    def __init__(self, library: Library, unique_id: bytes, rank: int, world_size: int) -> None:
        self.library = library
        self.handle = ctypes.c_void_p()
        library.call(
            "ncclCommInitRank",
            ctypes.byref(self.handle),
            world_size,
            _UniqueID.from_buffer_copy(unique_id),
            rank,
        )
        one = torch.ones(1)
        place = ctypes.c_void_p(one.data_ptr())
        library.call("ncclAllReduce", place, place, 1, 7, 0, self.handle, None)
        assert one.item() == world_size - 1  # the trainer's is 0

    def receive(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        place = ctypes.c_void_p(tensor.data_ptr())
        self.library.call(
            "ncclBroadcast", place, place, tensor.numel(), DTYPES[dtype], 0, self.handle, None
        )
        return tensor

    def close(self) -> None:
        with contextlib.suppress(WeightSyncError):
            self.library.call("ncclCommAbort", self.handle)


class NCCLServer(ControlServer):
    """`ControlServer` with vLLM's NCCL backend in place of the file."""

    def __init__(self, library: Library, num_workers: int = 1) -> None:
        super().__init__()
        self.library = library
        self.num_workers = num_workers
        self.workers: list[Worker] = []
        self.num_joined = 0
        self.on_tensor = lambda number: None
        """Called in the workers' threads before each tensor is received."""

    def restart(self) -> None:
        super().restart()
        self.release()

    def release(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []

    async def handle(self, request: web.Request) -> web.Response:
        threaded = {"/init_weight_transfer_engine": self.join, "/update_weights": self.receive}.get(
            request.path
        )
        if threaded is None or request.path in self.answer:
            return await super().handle(request)
        self.calls.append(request.path)
        body = await request.json()
        self.bodies.append(body)
        try:
            return await threaded(body)
        except WeightSyncError as failure:
            return error(500, str(failure))

    def do_get_world_size(self, body) -> web.Response:
        return web.json_response({"world_size": self.num_workers})

    def do_shutdown_weight_transfer_engine(self, body) -> web.Response:
        if self.open_update:
            return error(500, "Cannot release a trainer connection during a weight update")
        self.release()
        return web.json_response({})

    async def join(self, body) -> web.Response:
        info = body["init_info"]
        assert info["packed"] is False
        unique_id = base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        ranks = range(info["rank_offset"], info["rank_offset"] + self.num_workers)
        self.workers = await asyncio.gather(
            *(
                asyncio.to_thread(Worker, self.library, unique_id, rank, info["world_size"])
                for rank in ranks
            )
        )
        self.num_joined += 1
        self.initialised = "nccl"
        return web.json_response({})

    async def receive(self, body) -> web.Response:
        if not (self.paused and self.open_update):
            return error(500, "the worker died: update without pause or start")
        if not self.workers:
            return error(500, "NCCL weight transfer not initialized")
        info = body["update_info"]
        described = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))

        def tensors_of(worker: Worker) -> dict[str, torch.Tensor]:
            received = {}
            for number, (name, dtype, shape) in enumerate(described):
                self.on_tensor(number)
                received[name] = worker.receive(shape, getattr(torch, dtype))
            return received

        parts = await asyncio.gather(
            *(asyncio.to_thread(tensors_of, worker) for worker in self.workers)
        )
        for part in parts[1:]:
            assert all(torch.equal(part[name], parts[0][name]) for name in parts[0])
        self.model.load_state_dict(self.after_load(parts[0]), strict=False)
        self.num_updates += 1
        return web.json_response({})
