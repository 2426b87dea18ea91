"""Sends weights to SGLang servers: as a folder that they read, in request bodies, or by NCCL.

Every transfer happens while `SGLangControl.update` has paused the server, and ends by emptying the
caches and labelling the weights. SGLang answers 200 even to names that its model does not have, so
only the probe afterwards shows whether the weights are in use.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from pathlib import Path
from pickle import dumps
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)
from transformers import PreTrainedModel

from agentrl.errors import WeightSyncError
from agentrl.inference.weights.broadcast import BroadcastTransfer, Group, NCCLError, together
from agentrl.inference.weights.control import ServerControl
from agentrl.inference.weights.transfer import FileTransfer, in_thread
from agentrl.types import JSON

Library = Literal["nccl", "gloo"]

_BUCKET_BYTES = 256 * 2**20
"""Maximum size of the weights in one request, unless a single tensor is larger."""
_GROUP = "agentrl"
"""Name of the group. The same in every run, so that a server can leave a killed trainer's group."""
_PATIENCE = timedelta(hours=12)
"""Timeout of a group's calls. Blocked calls are aborted much earlier, when the server's answer is
overdue."""


class FolderTransfer(FileTransfer):
    """Links the file of `FileTransfer` into a folder that SGLang can load as a model."""

    backend = "disk"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._remove_folders()

    async def take(self, model: PreTrainedModel, version: int) -> None:
        await super().take(model, version)
        assert self._path is not None
        folder = self._directory / f"sglang-{version}"
        folder.mkdir(exist_ok=True)
        link = folder / "model.safetensors"
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..") / self._path.name)

    async def connect(self, control: ServerControl) -> None:
        """Does nothing: an update contains everything that a server has to know."""

    async def send(self, control: ServerControl) -> None:
        body: dict[str, JSON] = {
            "model_path": str(self._directory / f"sglang-{self._label}"),
            "weight_version": self._label,
            "flush_cache": True,
        }
        await control.post("/update_weights_from_disk", body)

    def delivered(self, version: int) -> None:
        super().delivered(version)
        self._remove_folders(keep=version)

    async def aclose(self) -> None:
        await super().aclose()
        self._remove_folders()

    def _remove_folders(self, *, keep: int | None = None) -> None:
        for folder in self._directory.glob("sglang-*"):
            if folder.name != f"sglang-{keep}":
                shutil.rmtree(folder)


class TensorTransfer(FileTransfer):
    """Sends weights in request bodies, so that servers need no access to the directory.

    A copy is kept in the directory for servers that are restarted between two updates. The body is
    a pickle of plain tensors, which a server with one GPU unpickles. A pickle of torch's shared
    memory would crash it.
    """

    backend = "tensor"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._bodies: list[str] = []

    async def take(self, model: PreTrainedModel, version: int) -> None:
        await super().take(model, version)
        path = self._path
        assert path is not None
        self._bodies = await in_thread(lambda: [_pickled(part) for part in _buckets(path)])

    async def connect(self, control: ServerControl) -> None:
        """Does nothing, as in `FolderTransfer`."""

    async def send(self, control: ServerControl) -> None:
        async with _open_update(control):
            for number, body in enumerate(self._bodies, 1):
                last = number == len(self._bodies)
                label: dict[str, JSON] = {"weight_version": self._label} if last else {}
                await control.post(
                    "/update_weights_from_tensor",
                    {"serialized_named_tensors": [body], "flush_cache": last, **label},
                )


class TorchTransfer(BroadcastTransfer):
    """Sends through a torch.distributed group with SGLang's workers: NCCL, or gloo on a CPU."""

    def __init__(self, library: Library = "nccl") -> None:
        super().__init__()
        self._library: Library = library

    async def _join(self, control: ServerControl) -> TorchGroup:
        info = json.loads(await control.call("GET", "/server_info"))
        world_size = 1 + int(info.get("tp_size", 1)) * int(info.get("pp_size", 1))
        with contextlib.suppress(WeightSyncError):  # status 400 if there is no earlier group
            await control.post("/destroy_weights_update_group", {"group_name": _GROUP})
        host = _own_address(control.url)
        try:
            store = TCPStore(host, 0, world_size, True, wait_for_workers=False)
        except RuntimeError as error:
            raise NCCLError(
                f"cannot open a rendezvous store for the workers of {control.url}: {error}"
            ) from error
        meeting: dict[str, JSON] = {
            "master_address": host,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": _GROUP,
            "backend": self._library,
        }
        return await together(
            control.post("/init_weights_update_group", meeting),
            lambda: TorchGroup(store, world_size, self._device, self._library),
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
        update: dict[str, JSON] = {"names": names, "dtypes": dtypes, "shapes": shapes}
        label: dict[str, JSON] = {"weight_version": version, "flush_cache": True}
        await control.post(
            "/update_weights_from_distributed", {**update, **label, "group_name": _GROUP}
        )

    async def send(self, control: ServerControl) -> None:
        async with _open_update(control):
            await super().send(control)


class TorchGroup(Group):
    def __init__(
        self, store: Store, world_size: int, device: torch.device, library: Library
    ) -> None:
        """Blocks until all ranks have joined.

        Raises:
            NCCLError: the ranks cannot reach each other.
        """
        self._device = device
        self._group: Any
        # The same nesting as in SGLang and torch on the other side.
        for prefix in (_GROUP, f"{_GROUP}/", "cuda/" if library == "nccl" else "cpu/"):
            store = PrefixStore(prefix, store)
        try:
            if library == "gloo":
                self._group = ProcessGroupGloo(store, 0, world_size, _PATIENCE)
            else:
                options = torch.distributed.ProcessGroupNCCL.Options()
                # When it expires, NCCL ends the whole process; `abort` is called long before.
                options._timeout = _PATIENCE
                self._group = torch.distributed.ProcessGroupNCCL(store, 0, world_size, options)
        except RuntimeError as error:
            raise NCCLError(f"cannot make a group with the server's workers: {error}") from error

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Group.broadcast`."""
        options = BroadcastOptions()
        options.rootRank = 0
        try:
            for tensor in tensors:
                tensor = tensor.to(self._device, non_blocking=True).contiguous()
                self._group.broadcast([tensor], options).wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise NCCLError(f"a rank was lost: {error}") from error

    def abort(self) -> None:
        """See `Group.abort`."""
        with contextlib.suppress(RuntimeError):  # the other ranks may already be gone
            self._group.abort()


@contextlib.asynccontextmanager
async def _open_update(control: ServerControl) -> AsyncIterator[None]:
    await control.post_ending("/begin_weight_update", "already", "/end_weight_update", {})
    yield
    await control.post("/end_weight_update", {})


def _own_address(url: str) -> str:
    """Returns this machine's address on the route to a server, without sending anything."""
    parts = urlsplit(url)
    family, kind, protocol, _, address = socket.getaddrinfo(
        parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _buckets(path: Path) -> list[list[tuple[str, torch.Tensor]]]:
    buckets: list[list[tuple[str, torch.Tensor]]] = [[]]
    size = 0
    for name, tensor in load_file(path).items():
        if buckets[-1] and size + tensor.nbytes > _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    return buckets


def _pickled(tensors: list[tuple[str, torch.Tensor]]) -> str:
    return base64.b64encode(dumps(tensors, protocol=4)).decode()
