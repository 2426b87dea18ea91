"""Transfers weights from the trainer to a server that `ServerControl.update` has paused.

`FileTransfer` uses a directory that both can access. `nccl` and `sglang` beside this
module send from GPU to GPU, and the latter also in request bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from transformers import PreTrainedModel

from agentrl.errors import WeightSyncError
from agentrl.inference.weights.control import ServerControl
from agentrl.inference.weights.files import remove_weights, write_policy
from agentrl.types import JSON

Result = TypeVar("Result")


class Transfer(Protocol):
    backend: str
    """Name of the weight-transfer backend with which the servers have to be started."""

    async def take(self, model: PreTrainedModel, version: int) -> None:
        """Copies the current weights, which `send` then sends.

        Raises:
            WeightSyncError: there is not enough space, or these weights cannot be sent.
        """
        ...

    async def connect(self, control: ServerControl) -> None:
        """Prepares a server for `send`, while it still samples.

        Called before every update, because a restarted server needs it again.

        Raises:
            WeightSyncError: the server refused or could not be reached.
        """
        ...

    async def send(self, control: ServerControl) -> None:
        """Makes a paused server load the weights.

        Raises:
            WeightSyncError: the server refused, failed, or could not be reached.
        """
        ...

    def delivered(self, version: int) -> None:
        """Notes that all reachable servers have this version; `send` may still be called again."""
        ...

    async def aclose(self) -> None: ...


class FileTransfer(Transfer):
    """Transfers weights as a safetensors file in a directory that only this run uses.

    The servers have to see the directory under the same path: on /dev/shm or a shared file system.
    """

    backend = "agentrl"

    def __init__(self, directory: Path) -> None:
        """Creates the directory if it is missing, and deletes weights in it."""
        self._directory = directory.absolute()
        self._path: Path | None = None
        self._label = ""
        """The version, as servers label it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        remove_weights(self._directory)

    async def take(self, model: PreTrainedModel, version: int) -> None:
        self._label = str(version)
        try:
            self._path = await in_thread(lambda: write_policy(model, self._directory, version))
        except OSError as error:
            raise WeightSyncError(
                f"cannot write the weights of version {version} to {self._directory} ({error}); it "
                "needs space for two versions of the model (inference.weights_dir sets it)"
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
    """Runs a function in a thread, to its end even if cancelled, as it reads the live model."""
    future = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
