"""Containers of SWE-bench's images: they run as root, activate the project's environment and have
a writable file system. All else is `agentrl.env.container.container`."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentrl.env.container.container import Container, ContainerSpec, packed
from agentrl.env.container.engine import Engine, labels
from agentrl.errors import EnvError

WORKDIR = "/testbed"
_PROGRAM_S = 150.0

_READ_FILE = r"""
path=$(realpath -e -- "$1") && [ -f "$path" ] \
    && printf '%s\0%s\0' "$(stat -c %a -- "$path")" "$path" && cat -- "$path"
"""

_ENVIRONMENT = {
    "BASH_ENV": "/root/.bashrc",  # where SWE-bench's images activate the project's environment
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "TERM": "dumb",
    "PIP_PROGRESS_BAR": "off",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "TQDM_DISABLE": "1",
    "PYTHONUNBUFFERED": "1",
}


_SPEC = ContainerSpec(
    "",
    workdir=WORKDIR,
    environment=_ENVIRONMENT,
    user="root",
    read_only=False,
    tmpfs=(),
    memory_mb=4096,
    cpus=2.0,
    max_processes=512,
)


@dataclass(slots=True, frozen=True)
class File:
    path: str
    """Absolute path with links resolved."""
    mode: int
    content: bytes


@functools.cache
def _engine(address: str | None) -> Engine:
    return Engine()


def current_engine() -> Engine:
    """Returns the engine that DOCKER_HOST names now."""
    return _engine(os.environ.get("DOCKER_HOST"))


class InstanceContainer(Container):
    """A running container of an instance's image; `start` makes one and `remove` ends it."""

    @classmethod
    async def start(
        cls,
        image: str,
        *,
        run_id: str,
        role: Literal["agent", "build", "grade"] = "agent",
        **limits: Any,
    ) -> InstanceContainer:
        """Starts a container of a local image on `current_engine()`.

        Args:
            role: in a container with the role `build`, in which no agent acts, the owner of files
                may be changed.
            limits: keys of `ContainerSpec`: `memory_mb`, `cpus`, `max_processes`, `disk_mb`,
                `life_s`, `network`, `capabilities`, `new_privileges`, `workdir`.

        Raises:
            EnvError: the engine refused or does not answer; no container is left.
        """
        if role == "build":
            limits |= {"capabilities": ("CHOWN", "DAC_OVERRIDE", "FOWNER")}
        spec = replace(_SPEC, image=image, **limits)
        return await cls.create(current_engine(), spec, labels(run_id, role))

    async def read_file(self, path: str, max_bytes: int) -> File | None:
        """Returns a regular file; None if there is none or it is larger than `max_bytes`."""
        wrote = await self.script(_READ_FILE, path, timeout_s=30, max_bytes=max_bytes + 4096)
        if wrote.exit_code != 0:
            return None
        mode, real_path, content = wrote.output.split(b"\0", 2)
        if len(content) > max_bytes:
            return None
        return File(real_path.decode(errors="surrogateescape"), int(mode, 8), content)

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Writes a file by its absolute path; its folder must exist.

        Raises:
            EnvError: the container or the engine failed.
        """
        folder, _, name = path.rpartition("/")
        await self.put(packed({name: content}, mode=mode), folder or "/")

    async def output_of(self, argv: Sequence[str]) -> tuple[int, bytes]:
        """Runs a program with the image's own variables; returns its exit code and its output with
        errors.

        Raises:
            EnvError: it did not end, or the container or the engine failed.
        """
        output = bytearray()
        ran = await self.execute(
            argv, timeout_s=_PROGRAM_S, add=lambda kind, payload: output.extend(payload)
        )
        if ran.exit_code is None:
            raise EnvError(f"{' '.join(argv)} did not end within {_PROGRAM_S} s and 64 MiB")
        return ran.exit_code, bytes(output)
