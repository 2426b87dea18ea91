"""Runs a task's container and copies the agent's changes into the verifier's.

The engine tells which files the agent changed and what is in them, because no program in the
agent's container can be trusted. The verifier's container is made from the task's image; the
agent's changes are written into it as files, without those that decide how any test runs.
"""

from __future__ import annotations

import functools
import io
import posixpath
import re
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.env.container.box import ROOT, Box
from agentrl.env.container.container import Container, ContainerSpec, archive_of
from agentrl.env.container.engine import Engine, labels
from agentrl.env.container.programs import FINDS_LIBRARY, PROGRAM_PATH, RUNNER_PATH, USED_BY_RUNNER
from agentrl.errors import EnvError
from agentrl_harbor.task import EnvironmentTable

if TYPE_CHECKING:
    from docker import DockerClient

MAX_CARRIED_BYTES = 2 << 30
"""Largest size of an agent's changes in bytes."""
SCRIPT_FAILED = "script_failed"
TOO_LARGE = "too_large"
"""Codes of errors that an agent's changes may cause."""
_PATH = "/bin:/usr/bin:/sbin:/usr/sbin"
"""PATH of agentrl's scripts: the agent may be able to write to folders of the image's PATH."""
_SCRIPT_S = 120.0
_HEADER_BYTES = 1024
"""Bytes that a file in an archive takes beside its content."""
_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID",
    "SETPCAP", "SETUID", "SYS_CHROOT",
)  # fmt: skip
"""The engine's default capabilities without devices and raw sockets: tasks install packages, start
servers and change users."""

_CHANGED, _ADDED, _DELETED = 0, 1, 2

_NEVER = re.compile(
    r"/(?:tests|solution|logs/verifier|proc|sys|dev|run/secrets)(?:/.*)?"
    r"|/(?:\.dockerenv|etc/(?:hosts|hostname|resolv\.conf))"
    r"|.*/__pycache__(?:/.*)?"
)
"""Paths that are never copied: the verifier, the engine or Python provides them."""
_START_UP = re.compile(
    r"/(?:root|home/[^/]+)/\.(?:bash\w*|profile|pam_environment|zsh\w*|pythonrc.*|curlrc|wgetrc"
    r"|(?:config/)?(?:pip|uv)/.*)"
    r"|/etc/(?:ld(?:\.so\.|-musl).*|profile(?:\.d/.*)?|bash.*|environment|pam\.d/.*|sudoers.*"
    r"|inputrc|nsswitch\.conf|pip\.conf|uv/.*|wgetrc|apt/apt\.conf(?:\.d/.*)?|ssl/openssl\.cnf)"
    r"|.*/(?:site|user)customize(?:\.\w+|/.*)"
    r"|/(?:conftest\.py|\.?pytest\.(?:ini|toml)|tox\.ini|setup\.(?:cfg|py)|pyproject\.toml)"
    r"|.*/(?:pytest\.py|_?pytest/.*)"
)
"""Files that shells, interpreters, pytest and package installers read on their own."""
_CODE_IN = {".pth": re.compile(rb"import[ \t]"), "/entry_points.txt": re.compile(rb"pytest11")}
"""Content that makes Python or pytest run other code at start, by the end of a file's name."""
_MAX_CODE_BYTES = 1 << 20
"""Largest such file that is searched; larger ones are left out."""
_HIDDEN = re.compile(r"/(?:(?:tests|solution|logs/verifier|proc)(?:/.*)?|logs)?")
"""Paths to which no link of an agent may lead: files of the verifier, and folders above them."""
_LIST_PROGRAMS = (
    'IFS=:; for folder in $PATH; do printf "%s/\\0" "$folder"; for each in "$folder"/*; do '
    '[ -f "$each" ] && [ -x "$each" ] && printf "%s\\0" "$each"; done; done; exit 0'
)


@dataclass(slots=True, frozen=True)
class Image:
    """Facts about a task's image, as the engine reports them."""

    id: str
    user: str
    workdir: str
    programs: frozenset[str]
    """Paths of all programs in the image's PATH, and of its folders, which end with a slash; empty
    until they are listed."""
    volumes: tuple[str, ...] = ()
    """Folders whose content the engine does not list among a container's changes."""
    is_named: bool = False
    """True if the image was found by its name, not built."""


async def start_container(
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
) -> Container:
    """Starts a container with the task's limits.

    Args:
        network: `none` or `bridge`.
        user: None for the image's user.

    Raises:
        EnvError: the engine refused or does not answer; no container is left.
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
    )
    return await Container.create(engine, spec, labels(run_id, role))


async def as_root(
    box: Box, script: str, *arguments: str, path: str | None = _PATH, code: str = "start_failed"
) -> bytes:
    """Runs a script of agentrl as root and returns its output.

    Args:
        path: PATH of the script; None for the image's.
        code: code of the error if the script fails. If the box gives no answer, the code is
            `start_failed`, because the agent did not cause that.

    Raises:
        EnvError: the script failed.
    """
    variables = {"HOME": "/nonexistent"} | ({} if path is None else {"PATH": path})
    ran = await box.script(
        script,
        *arguments,
        timeout_s=_SCRIPT_S,
        max_bytes=16 << 20,
        environment=variables,
        user=ROOT,
    )
    if ran.exit_code != 0:
        said = ran.errors or ran.output.decode(errors="replace")
        raise EnvError(
            f"a script failed in a task's container: {said[-300:]}",
            code="start_failed" if ran.exit_code is None else code,
        )
    return ran.output


async def list_programs(box: Box) -> frozenset[str]:
    """Returns the paths of the programs in the image's PATH, and of its folders."""
    found = await as_root(box, _LIST_PROGRAMS, path=None)
    return frozenset(found.decode(errors="surrogateescape").split("\0")) - {""}


async def carry(
    source: Container, target: Container, programs: frozenset[str], *, everything: bool
) -> list[str]:
    """Writes a container's changes into an unused container of the same image.

    Args:
        programs: paths of the image's programs.
        everything: also copy files that decide how any test runs.

    Returns:
        What was left out, as `PATH: reason`.

    Raises:
        EnvError: the changes are too large, or the engine failed.
    """
    changes = await source.changes()
    kept, left_out = await source.call(
        lambda client: _choose(changes, programs, everything)  # not in the event loop
    )

    def pack(client: DockerClient) -> None:
        def refuse(path: str, member: tarfile.TarInfo, content: bytes) -> str | None:
            if changes.get(path) == _CHANGED and _is_folder(client, target.id, path):
                return "takes the place of a folder of the image"
            return _leads_astray(path, member, content)

        _pack(client, source.id, kept, changes, archive, left_out, None if everything else refuse)

    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            await source.call(pack)
        packed.seek(0)
        deleted = [path for path in kept if changes[path] == _DELETED]
        for start in range(0, len(deleted), 200):
            some = deleted[start : start + 200]
            await as_root(target, 'rm -rf -- "$@"', *some, code=SCRIPT_FAILED)
        await target.put(packed)
    return left_out


async def carry_folders(source: Container, target: Box, paths: Sequence[str]) -> list[str]:
    """Copies files and folders to the same paths in another container; missing ones are
    skipped.

    Returns:
        What was left out, as `PATH: reason`.

    Raises:
        EnvError: they are too large, or the engine failed.
    """
    left_out: list[str] = []
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            # Skip paths in folders that are copied anyway: a second copy could follow a link.
            whole = tuple(f"{path}/" for path in paths)
            changes = dict.fromkeys((p for p in paths if not p.startswith(whole)), _ADDED)
            await source.call(
                lambda client: _pack(
                    client, source.id, list(changes), changes, archive, left_out, is_hidden
                )
            )
        packed.seek(0)
        await target.put(packed)
    return left_out


def _choose(
    changes: Mapping[str, int], programs: frozenset[str], everything: bool
) -> tuple[list[str], list[str]]:
    """Returns the changed paths that the verifier gets, and what is left out, as `PATH: reason`."""
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
    """Returns the reason for which a change decides how any test runs; None if it does not."""
    folder, _, name = path.rpartition("/")
    folders, names, above = _places(programs)
    if _START_UP.fullmatch(path):
        return "read by shells, interpreters or pytest on their own"
    if kind != _ADDED:
        is_program = (
            path in programs
            or (kind == _DELETED and path in above)
            or folder == "/etc/alternatives"
            or RUNNER_PATH.fullmatch(path)
            or USED_BY_RUNNER.fullmatch(path)
            or PROGRAM_PATH.fullmatch(path)
            or FINDS_LIBRARY.fullmatch(path)
        )
        return "a program of the image" if is_program else None
    if folder in folders and name in names:
        return "takes the place of a program of the image"
    if FINDS_LIBRARY.fullmatch(path) and folder in above:
        return "tells an interpreter where its library is"
    if RUNNER_PATH.fullmatch(path) and not _in_new_environment(path, changes, above):
        return "runs or finds tests"
    return None


@functools.lru_cache(maxsize=16)
def _places(programs: frozenset[str]) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Returns the folders of programs, their names, and these folders with all above them."""
    folders = frozenset(each.rpartition("/")[0] for each in programs)
    names = frozenset(each.rpartition("/")[2] for each in programs)
    above = {
        "/".join(parts[:length])
        for parts in (folder.split("/") for folder in folders)
        for length in range(2, len(parts) + 1)
    }
    return folders, names, frozenset(above)


def _in_new_environment(path: str, changes: Mapping[str, int], above: frozenset[str]) -> bool:
    """Returns True for a file of a Python environment, or of an interpreter with its library, that
    the agent made in a new folder, apart from the image's programs."""
    while path := path.rpartition("/")[0]:
        made = (path, f"{path}/bin", f"{path}/lib")
        if path not in above and all(changes.get(each) == _ADDED for each in made):
            return True
    return False


Refuse = Callable[[str, tarfile.TarInfo, bytes], str | None]
"""Returns the reason for which a file with this path and content is left out; None to copy it."""


def _leads_astray(path: str, member: tarfile.TarInfo, content: bytes) -> str | None:
    """Returns the reason for which a file or link may change what tests run."""
    is_link = member.issym() or member.islnk()
    for ending, code in _CODE_IN.items():
        if path.endswith(ending) and (
            is_link or member.size > _MAX_CODE_BYTES or code.search(content)
        ):
            return "runs code whenever Python or pytest starts"
    inner = f"{path}/any.py"
    if member.issym() and (_START_UP.fullmatch(inner) or RUNNER_PATH.fullmatch(inner)):
        return "a link in place of a file that runs or finds tests"
    return is_hidden(path, member, content)


def is_hidden(path: str, member: tarfile.TarInfo, content: bytes) -> str | None:
    """Returns the reason for which a link may lead to the verifier's files; None if it does not.

    Links with `..` after a name are also left out: the name may be a link, and `..` lead anywhere.
    """
    if not member.issym():
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), member.linkname))
    parts = [each for each in member.linkname.split("/") if each not in ("", ".")]
    up = [each == ".." for each in parts]
    if _HIDDEN.fullmatch("/" + target.lstrip("/")) or up != sorted(up, reverse=True):
        return "a link that may lead to the verifier's files"
    return None


def _is_folder(client: DockerClient, container_id: str, path: str) -> bool:
    with archive_of(client, container_id, path) as archive:
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
    """Adds paths of a container to an archive: new folders with all that is in them, folders of the
    image alone, for their owner and mode. Appends what is left out to `left_out`."""
    wanted = set(paths)
    added: set[str] = set()
    total = 0
    for path in paths:
        parent = path.rpartition("/")[0]
        if changes[path] == _DELETED or (changes.get(parent) == _ADDED and parent in wanted):
            continue
        with archive_of(client, container_id, path) as source:
            while source is not None and (member := source.next()) is not None:
                inner = member.name.partition("/")[2]
                full = f"{path}/{inner}" if inner else path
                # These headers would override the new names.
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
                        f"the agent changed more than {MAX_CARRIED_BYTES >> 20} MiB", code=TOO_LARGE
                    )
                member.name = full[1:]
                if member.islnk():  # the engine names the target relative to the folder above
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
