"""Brings weights from the trainer to a server, while `ServerControl.update` has it paused.

`FileTransfer` here goes through a directory that both see; `agentrl.sync.nccl` and
`agentrl.sync.sglang` send from GPU to GPU, and the latter in requests as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from transformers import PreTrainedModel

from agentrl.errors import WeightSyncError
from agentrl.sync.control import ServerControl
from agentrl.sync.files import remove_weights, write_policy
from agentrl.types import JSON

Result = TypeVar("Result")


class Transfer(Protocol):
    backend: str
    """Name of the weight-transfer backend that the servers must have been started with."""

    async def take(self, model: PreTrainedModel, version: int) -> None:
        """Copy the weights as they are now; `send` sends the last that were taken.

        Raises:
            WeightSyncError: there is no room for them.
        """
        ...

    async def connect(self, control: ServerControl) -> None:
        """Prepare a server, which still samples, for `send`. Called before every update: a server
        that was restarted since the last one knows nothing of it.

        Raises:
            WeightSyncError: it refused, or could not be reached.
        """
        ...

    async def send(self, control: ServerControl) -> None:
        """Have a paused server load the weights.

        Raises:
            WeightSyncError: it refused, failed, or could not be reached.
        """
        ...

    def delivered(self, version: int) -> None:
        """All servers within reach have this version, and `send` may be asked for it again."""
        ...

    async def aclose(self) -> None: ...


class FileTransfer(Transfer):
    """A safetensors file in a directory of this run alone, which the servers see under the same
    path: on /dev/shm, or on a shared file system."""

    backend = "agentrl"

    def __init__(self, directory: Path) -> None:
        """Makes the directory if it is absent; weights found there are removed."""
        self._directory = directory.absolute()
        self._path: Path | None = None
        self._directory.mkdir(parents=True, exist_ok=True)
        remove_weights(self._directory)

    async def take(self, model: PreTrainedModel, version: int) -> None:
        try:
            self._path = await in_thread(lambda: write_policy(model, self._directory, version))
        except OSError as error:
            raise WeightSyncError(
                f"the weights of version {version} cannot be written to {self._directory} "
                f"({error}); it needs room for two versions of the model"
            ) from error

    async def connect(self, control: ServerControl) -> None:
        body: dict[str, JSON] = {"init_info": {"directory": str(self._directory)}}
        await control.post("/init_weight_transfer_engine", body)

    async def send(self, control: ServerControl) -> None:
        await control.post("/update_weights", {"update_info": {"path": str(self._path)}})

    def delivered(self, version: int) -> None:
        remove_weights(self._directory, keep=version)

    async def aclose(self) -> None:
        remove_weights(self._directory)


async def in_thread(function: Callable[[], Result]) -> Result:
    """Run in a thread, to its end even if the caller is cancelled: it reads the live model."""
    future = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
