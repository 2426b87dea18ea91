"""Containers of SWE-bench's images: they run as root, activate the project's environment and have
a writable file system. All else is `agentrl.env.container.container`."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentrl.env.container.container import MAX_STREAM_BYTES, Container, ContainerSpec, packed
from agentrl.env.container.engine import Engine, connect, engine_errors, labels, remove
from agentrl.env.container.programs import PROGRAM_PATH
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


class InstanceContainer(Container):
    """A running container of an instance's image; `start` makes one and `remove` ends it."""

    @classmethod
    async def start(
        cls,
        engine: Engine,
        image: str,
        *,
        run_id: str,
        role: Literal["agent", "build", "grade"] = "agent",
        **limits: Any,
    ) -> InstanceContainer:
        """Starts a container of a local image. One with the role `build` may change the owner of
        files; no agent acts in it.

        Args:
            limits: keys of `ContainerSpec`: `memory_mb`, `cpus`, `max_processes`, `disk_mb`,
                `life_s`, `network`, `capabilities`, `new_privileges`.

        Raises:
            EnvError: the engine refused or does not answer; no container is left.
        """
        if role == "build":
            limits |= {"capabilities": ("CHOWN", "DAC_OVERRIDE", "FOWNER")}
        spec = replace(_SPEC, image=image, **limits)
        return await cls.create(engine, spec, labels(run_id, role))

    async def changed_programs(self) -> list[str]:
        """Returns the paths of system programs and libraries that differ from the image, as the
        engine lists them."""
        return [path for path in await self.changes() if PROGRAM_PATH.fullmatch(path)]

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

    async def execute(self, argv: Sequence[str]) -> tuple[int, bytes]:
        """Runs a program with the image's own variables; returns its exit code and its output with
        errors.

        Raises:
            EnvError: it did not end, or the container or the engine failed.
        """
        output = bytearray()
        ran = await self.attend(
            argv, lambda kind, payload: output.extend(payload), _PROGRAM_S, MAX_STREAM_BYTES
        )
        if ran.exit_code is None:
            raise EnvError(f"{' '.join(argv)} did not end within {_PROGRAM_S} s and 64 MiB")
        return ran.exit_code, bytes(output)


@contextlib.contextmanager
def script_container(
    image: str,
    script: str,
    *arguments: str,
    run_id: str,
    role: str,
    timeout_s: float,
    **options: Any,
) -> Iterator[Any]:
    """Yields a container that is to run a bash script without a network (`run_script`), and removes
    it afterwards.

    Args:
        timeout_s: seconds in which the engine must answer each call.

    Raises:
        EnvError: the engine failed, or the image is missing.
    """
    with engine_errors(), contextlib.closing(connect(timeout_s=timeout_s)) as client:
        container = client.containers.create(
            image,
            ["-c", script, "bash", *arguments],
            entrypoint="/bin/bash",
            network_mode="none",
            labels=labels(run_id, role),
            **options,
        )
        try:
            yield container
        finally:
            remove(client, str(container.id))


def run_script(container: Any) -> str | None:
    """Runs the script of a container to its end; returns its last lines if it failed, else None."""
    container.start()
    if container.wait(timeout=container.client.api.timeout)["StatusCode"] == 0:
        return None
    return container.logs(tail=3).decode(errors="replace").strip()


def read_text(container: Any, path: str) -> str:
    """Returns the text of a file in a container; "" if another thing than a file is there.

    Raises:
        docker.errors.NotFound: nothing is there.
        UnicodeDecodeError: the file is not UTF-8.
    """
    chunks, _ = container.get_archive(path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        member = archive.getmembers()[0]
        file = archive.extractfile(member) if member.isfile() else None
        return file.read().decode() if file else ""
