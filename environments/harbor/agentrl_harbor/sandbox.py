"""A task's container, and what of an agent's work is carried into the verifier's.

Nothing that the agent may have changed is asked for anything: which files it changed, and what is
in them, the engine says. The verifier's container is made from the task's image; the agent's
changes are written into it as files, without those that decide how any test runs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import posixpath
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING

from agentrl.env.container.container import Container, ContainerSpec
from agentrl.env.container.engine import Engine, labels
from agentrl.env.container.programs import PROGRAM_PATH, RUNNER_PATH
from agentrl.errors import EnvError
from agentrl_harbor.task import EnvironmentTable

if TYPE_CHECKING:
    from docker import DockerClient

MAX_CARRIED_BYTES = 2 << 30
"""Of an agent's changes."""
SCRIPT_FAILED = "script_failed"
TOO_LARGE = "too_large"
"""Codes of errors that an agent's changes may cause."""
_PATH = "/bin:/usr/bin:/sbin:/usr/sbin"
"""Of agentrl's scripts: an image's own PATH may hold folders that the agent could write to."""
_HEADER_BYTES = 1024
"""Of a file in an archive, beside its content."""
_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID",
    "SETPCAP", "SETUID", "SYS_CHROOT",
)  # fmt: skip
"""The engine's own choice without devices and raw sockets: tasks install packages, start servers
and change users."""

_CHANGED, _ADDED, _DELETED = 0, 1, 2

_NEVER = re.compile(
    r"/(?:tests|solution|logs/verifier|proc|sys|dev|run/secrets)(?:/.*)?"
    r"|/(?:\.dockerenv|etc/(?:hosts|hostname|resolv\.conf))"
)
"""What the verifier brings itself, and what the engine does."""
_START_UP = re.compile(
    r"/(?:root|home/[^/]+)/\.(?:bash\w*|profile|pam_environment|zsh\w*|pythonrc.*|curlrc|wgetrc"
    r"|(?:config/)?(?:pip|uv)/.*)"
    r"|/etc/(?:ld(?:\.so\.|-musl).*|profile(?:\.d/.*)?|bash.*|environment|pam\.d/.*|sudoers.*"
    r"|inputrc|nsswitch\.conf|pip\.conf|uv/.*|wgetrc|apt/apt\.conf(?:\.d/.*)?|ssl/openssl\.cnf)"
    r"|.*/(?:site|user)customize(?:\.\w+|/.*)"
    r"|/(?:conftest\.py|\.?pytest\.(?:ini|toml)|tox\.ini|setup\.(?:cfg|py)|pyproject\.toml)"
    r"|.*/(?:pytest\.py|_?pytest/.*)"
)
"""Files that shells, interpreters, pytest and what fetches it read by themselves."""
_CODE_IN = {".pth": re.compile(rb"import[ \t]"), "/entry_points.txt": re.compile(rb"pytest11")}
"""By how a name ends: content that makes Python, or pytest, run other code at its start."""
_MAX_CODE_BYTES = 1 << 20
"""Of such a file; a larger one is not searched but left out."""
_HIDDEN = re.compile(r"/(?:(?:tests|solution|logs/verifier|proc)(?:/.*)?|logs)?")
"""Where no link of an agent's may lead: to what is the verifier's alone, and where that is."""
_LIST_PROGRAMS = (
    'IFS=:; for folder in $PATH; do for each in "$folder"/*; do '
    '[ -f "$each" ] && [ -x "$each" ] && printf "%s\\0" "$each"; done; done; exit 0'
)


@dataclass(slots=True, frozen=True)
class Image:
    """Facts about a task's image, as the engine gives them."""

    id: str
    user: str
    workdir: str
    programs: frozenset[str]
    """Paths of all programs that are found by name; empty until they are listed."""
    volumes: tuple[str, ...] = ()
    """Folders whose content the engine does not count among a container's changes."""
    is_named: bool = False
    """It was found by its name and not built."""


class TaskContainer(Container):
    """A running container of a task's image; `start` makes one and `remove` ends it."""

    @classmethod
    async def start(
        cls,
        engine: Engine,
        image: Image,
        table: EnvironmentTable,
        *,
        run_id: str,
        role: str,
        network: str,
        user: str | int | None,
        environment: Mapping[str, str],
        max_processes: int,
        life_s: int,
    ) -> TaskContainer:
        """Start one, with the limits that the task gives.

        Raises:
            EnvError: the engine refused or does not answer; nothing is left behind.
        """
        spec = ContainerSpec(
            image.id,
            workdir=table.workdir or image.workdir,
            environment=environment,
            user=str(user) if user is not None else image.user,
            read_only=False,
            tmpfs=(),
            network=network,
            capabilities=_CAPABILITIES,
            memory_mb=table.memory_mb or 2048,
            cpus=table.cpus or 1.0,
            max_processes=max_processes,
            life_s=life_s,
        )
        return await cls.create(engine, spec, labels(run_id, role))

    async def put(self, archive: bytes | IO[bytes], folder: str = "/") -> None:
        """Unpack an archive in a folder, which is made where there is none."""
        await self.as_root('mkdir -p -- "$1"', folder)
        await self._call(lambda client: client.api.put_archive(self.id, folder, archive))

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        """A regular file's content; None: there is none, or it is larger."""

        def read(client: DockerClient) -> bytes | None:
            with _archive(client, self.id, path) as archive:
                member = archive.next() if archive is not None else None
                if archive is None or member is None or not member.isreg():
                    return None
                file = archive.extractfile(member)
                return file.read() if file is not None and member.size <= max_bytes else None

        return await self._call(read)

    async def as_root(
        self, script: str, *arguments: str, path: str | None = _PATH, code: str = "start_failed"
    ) -> bytes:
        """Run a script of agentrl's as root.

        Args:
            path: where it finds programs; None: where the image says.
            code: of the error if it fails; one that gets no answer is never the agent's doing.

        Raises:
            EnvError: it failed.
        """
        as_root = TaskContainer(self._engine, self.id, None, replace(self.spec, user="0"))
        variables = {"HOME": "/nonexistent"} | ({} if path is None else {"PATH": path})
        ran = await as_root.script(
            script, *arguments, timeout_s=60.0, max_bytes=16 << 20, environment=variables
        )
        if ran.exit_code != 0:
            raise EnvError(
                f"a script failed in a container of {self.spec.image[:19]}: {ran.errors[-300:]}",
                code="start_failed" if ran.exit_code is None else code,
            )
        return ran.output

    async def list_programs(self) -> frozenset[str]:
        """Paths of the programs that are found by name."""
        found = await self.as_root(_LIST_PROGRAMS, path=None)
        return frozenset(found.decode(errors="surrogateescape").split("\0")) - {""}

    async def carry(
        self, target: TaskContainer, programs: frozenset[str], *, everything: bool
    ) -> list[str]:
        """Write this container's changes into another of the same image, in which nobody was.

        Args:
            programs: those of the image.
            everything: also what decides how any test runs.

        Returns what was left out: a path and a reason each.

        Raises:
            EnvError: the changes are too large, or the engine failed.
        """
        found = await self._call(lambda client: client.api.diff(self.id)) or []
        changes: dict[str, int] = {each["Path"]: each["Kind"] for each in found}
        kept, left_out = await self._call(
            lambda client: _choose(changes, programs, everything)  # not in the event loop
        )

        def pack(client: DockerClient) -> None:
            def refuse(path: str, member: tarfile.TarInfo, content: bytes) -> str | None:
                if changes.get(path) == _CHANGED and _is_folder(client, target.id, path):
                    return "takes the place of a folder of the image"
                return _leads_astray(path, member, content)

            _pack(client, self.id, kept, changes, archive, left_out, None if everything else refuse)

        with tempfile.TemporaryFile() as packed:
            with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
                await self._call(pack)
            packed.seek(0)
            deleted = [path for path in kept if changes[path] == _DELETED]
            for start in range(0, len(deleted), 200):
                await target.as_root(
                    'rm -rf -- "$@"', *deleted[start : start + 200], code=SCRIPT_FAILED
                )
            await target.put(packed)
        return left_out

    async def carry_folders(self, target: TaskContainer, paths: Sequence[str]) -> list[str]:
        """Write these files and folders, where there are any, to where they are in this one.

        Returns what was left out.
        """
        left_out: list[str] = []
        with tempfile.TemporaryFile() as packed:
            with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
                # Below a folder that is written anyway, a second copy could go through its links.
                whole = tuple(f"{path}/" for path in paths)
                changes = dict.fromkeys((p for p in paths if not p.startswith(whole)), _ADDED)
                await self._call(
                    lambda client: _pack(
                        client, self.id, list(changes), changes, archive, left_out, is_hidden
                    )
                )
            packed.seek(0)
            await target.put(packed)
        return left_out


def _choose(
    changes: Mapping[str, int], programs: frozenset[str], everything: bool
) -> tuple[list[str], list[str]]:
    """Returns the changed paths that the verifier gets, and what is left out."""
    kept: list[str] = []
    left_out: list[str] = []
    for path, kind in sorted(changes.items()):
        if _NEVER.fullmatch(path):
            continue
        reason = None if everything else _reason(path, kind, changes, programs)
        if reason is None:
            kept.append(path)
        else:
            left_out.append(f"{path}: {reason}")
    return kept, left_out


def _reason(
    path: str, kind: int, changes: Mapping[str, int], programs: frozenset[str]
) -> str | None:
    """Says why a change decides how any test runs; None if it does not."""
    folder, _, name = path.rpartition("/")
    folders, names, above = _places(programs)
    if _START_UP.fullmatch(path):
        return "read by shells, interpreters or pytest by themselves"
    if kind != _ADDED:
        is_program = (
            path in programs
            or (kind == _DELETED and path in above)
            or folder == "/etc/alternatives"
            or RUNNER_PATH.fullmatch(path)
            or PROGRAM_PATH.fullmatch(path)
        )
        return "a program of the image" if is_program else None
    if folder in folders and name in names:
        return "takes the place of a program of the image"
    if RUNNER_PATH.fullmatch(path) and not _in_new_environment(path, changes):
        return "runs or finds tests"
    return None


@functools.lru_cache(maxsize=16)
def _places(programs: frozenset[str]) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Returns programs' folders, their names, and all folders that they are somewhere below."""
    folders = frozenset(each.rpartition("/")[0] for each in programs)
    names = frozenset(each.rpartition("/")[2] for each in programs)
    above = {
        "/".join(parts[:length])
        for parts in (folder.split("/") for folder in folders)
        for length in range(2, len(parts) + 1)
    }
    return folders, names, frozenset(above)


def _in_new_environment(path: str, changes: Mapping[str, int]) -> bool:
    """Tells whether a file is in a virtual environment of Python's that the agent made."""
    while path := path.rpartition("/")[0]:
        if changes.get(f"{path}/pyvenv.cfg") == _ADDED:
            return True
    return False


Refuse = Callable[[str, tarfile.TarInfo, bytes], str | None]
"""Says why a file with this path and content is left out; None if it is not."""


def _leads_astray(path: str, member: tarfile.TarInfo, content: bytes) -> str | None:
    """Says why a file or link leads tests elsewhere; None if it does not."""
    is_link = member.issym() or member.islnk()
    for ending, code in _CODE_IN.items():
        if path.endswith(ending) and (
            is_link or member.size > _MAX_CODE_BYTES or code.search(content)
        ):
            return "runs code whenever Python or pytest starts"
    inner = f"{path}/any.py"
    if member.issym() and (_START_UP.fullmatch(inner) or RUNNER_PATH.fullmatch(inner)):
        return "a link in the place of what runs or finds tests"
    return is_hidden(path, member, content)


def is_hidden(path: str, member: tarfile.TarInfo, content: bytes) -> str | None:
    """Says why a link may lead to what is the verifier's alone; None if it does not.

    Behind a name that is itself a link, `..` may be anywhere, so such links are left out as well.
    """
    if not member.issym():
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), member.linkname))
    parts = [each for each in member.linkname.split("/") if each not in ("", ".")]
    up = [each == ".." for each in parts]
    if _HIDDEN.fullmatch("/" + target.lstrip("/")) or up != sorted(up, reverse=True):
        return "a link that may lead to what the agent never saw"
    return None


def _is_folder(client: DockerClient, container_id: str, path: str) -> bool:
    with _archive(client, container_id, path) as archive:
        member = archive.next() if archive is not None else None
        return member is not None and member.isdir()


def _pack(
    client: DockerClient,
    container_id: str,
    paths: list[str],
    changes: Mapping[str, int],
    archive: tarfile.TarFile,
    left_out: list[str],
    refuse: Refuse | None = None,
) -> None:
    """Add these paths of a container to an archive: new folders whole, of others what changed.

    Folders of the image are added without what is in them, for their owner and mode.
    """
    wanted = set(paths)
    added: set[str] = set()
    total = 0
    for path in paths:
        parent = path.rpartition("/")[0]
        if changes[path] == _DELETED or (changes.get(parent) == _ADDED and parent in wanted):
            continue
        with _archive(client, container_id, path) as source:
            while source is not None and (member := source.next()) is not None:
                inner = member.name.partition("/")[2]
                full = f"{path}/{inner}" if inner else path
                # These would count instead of the new names.
                old = ("path", "linkpath")
                member.pax_headers = {
                    key: text for key, text in member.pax_headers.items() if key not in old
                }
                if changes[path] != _ADDED and member.isdir():
                    member.name = full[1:]
                    archive.addfile(member)
                    break
                if full in changes and full not in wanted:
                    continue
                if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                    left_out.append(f"{full}: neither a file, a folder nor a link")
                    continue
                total += member.size + _HEADER_BYTES
                if total > MAX_CARRIED_BYTES:
                    raise EnvError(
                        f"the agent changed more than {MAX_CARRIED_BYTES >> 20} MiB",
                        code=TOO_LARGE,
                    )
                member.name = full[1:]
                if member.islnk():  # the engine names it as seen from the folder above
                    member.linkname = f"{parent}/{member.linkname}"[1:]
                if member.islnk() and member.linkname not in added:
                    left_out.append(f"{full}: a link to a file that was left out")
                    continue
                content = source.extractfile(member) if member.isreg() else None
                if refuse is not None:
                    text = b""
                    if (
                        content
                        and full.endswith(tuple(_CODE_IN))
                        and member.size <= _MAX_CODE_BYTES
                    ):
                        text = content.read()
                        content = io.BytesIO(text)
                    if reason := refuse(full, member, text):
                        left_out.append(f"{full}: {reason}")
                        continue
                added.add(member.name)
                archive.addfile(member, content)


@contextlib.contextmanager
def _archive(
    client: DockerClient, container_id: str, path: str
) -> Iterator[tarfile.TarFile | None]:
    """Yields an archive of a container's path, read as it comes; None if nothing is there."""
    from docker.errors import NotFound

    try:
        chunks, _ = client.api.get_archive(container_id, path)
    except NotFound as error:
        if "such container" in str(error).lower():
            raise
        yield None
        return
    with contextlib.closing(chunks), tarfile.open(fileobj=_Chunks(chunks), mode="r|") as archive:
        yield archive


class _Chunks(io.RawIOBase):
    """A file of what an iterator gives."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        parts, length = [self._rest], len(self._rest)
        while size < 0 or length < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            parts.append(chunk)
            length += len(chunk)
        whole = b"".join(parts)
        taken, self._rest = (whole, b"") if size < 0 else (whole[:size], whole[size:])
        return taken
