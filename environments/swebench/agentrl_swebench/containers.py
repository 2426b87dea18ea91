"""Containers of SWE-bench's images: they run as root, activate the project's environment and have
a writable file system. All else is `agentrl.env.container.container`."""

from __future__ import annotations

import io
import tarfile
import time
from dataclasses import dataclass
from typing import Literal

from agentrl.env.container.container import Container, ContainerSpec
from agentrl.env.container.engine import MAX_LIFE_S, Engine, labels
from agentrl.env.container.programs import PROGRAM_PATH

WORKDIR = "/testbed"

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


@dataclass(slots=True, frozen=True)
class Limits:
    """Limits of an agent's container."""

    memory_mb: int = 4096
    """Memory in MiB, swap included."""
    cpus: float = 2.0
    max_processes: int = 512
    disk_mb: int | None = None
    life_s: int = MAX_LIFE_S


@dataclass(slots=True, frozen=True)
class File:
    path: str
    """Absolute path with links resolved."""
    mode: int
    content: bytes


class InstanceContainer(Container):
    """A running container of an instance's image; `start` makes one and `remove` ends it."""

    @classmethod
    async def start(
        cls,
        engine: Engine,
        image: str,
        *,
        run_id: str,
        limits: Limits | None = None,
        role: Literal["agent", "build"] = "agent",
    ) -> InstanceContainer:
        """Starts a container of a local image. One with the role `build` may change the owner of
        files; no agent acts in it.

        Raises:
            EnvError: the engine refused or does not answer; no container is left.
        """
        limits = limits or Limits()
        spec = ContainerSpec(
            image,
            workdir=WORKDIR,
            environment=_ENVIRONMENT,
            user="root",
            read_only=False,
            tmpfs=(),
            capabilities=("CHOWN", "DAC_OVERRIDE", "FOWNER") if role == "build" else (),
            memory_mb=limits.memory_mb,
            cpus=limits.cpus,
            max_processes=limits.max_processes,
            disk_mb=limits.disk_mb,
            life_s=limits.life_s,
        )
        return await cls.create(engine, spec, labels(run_id, role))

    async def changed_programs(self) -> list[str]:
        """Returns the paths of system programs and libraries that differ from the image, as the
        engine lists them."""
        changes = await self._call(lambda client: client.api.diff(self.id)) or []
        return [each["Path"] for each in changes if PROGRAM_PATH.fullmatch(each["Path"])]

    async def read_file(self, path: str, max_bytes: int) -> File | None:
        """Returns a regular file; None if there is none or it is larger than `max_bytes`."""
        wrote = await self.script(_READ_FILE, path, timeout_s=30, max_bytes=max_bytes + 4096)
        if wrote.exit_code != 0:
            return None
        mode, real_path, content = wrote.output.split(b"\0", 2)
        if len(content) > max_bytes:
            return None
        return File(real_path.decode(errors="surrogateescape"), int(mode, 8), content)

    async def write_file(self, file: File) -> None:
        """Writes a file through the engine; its folder must exist.

        Raises:
            EnvError: the container or the engine failed.
        """
        folder, _, name = file.path.rpartition("/")
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(file.content), file.mode, int(time.time())
            archive.addfile(member, io.BytesIO(file.content))
        content = packed.getvalue()
        await self._call(lambda client: client.api.put_archive(self.id, folder or "/", content))
