"""Reads and checks Harbor's task directories.

A task is a folder with `task.toml`, `instruction.md`, `environment/` (a Dockerfile and the files it
copies, unless `task.toml` names an image), `tests/test.sh`, and perhaps `solution/solve.sh`. A task
of several steps has a folder `steps/NAME/` with an instruction, tests and a solution for each.

A feature that a task needs and agentrl lacks is an error that names the key.
"""

from __future__ import annotations

import io
import logging
import os
import re
import tarfile
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agentrl.errors import DataError

logger = logging.getLogger("agentrl.env")

T = TypeVar("T", bound=BaseModel)

MAX_FILES_BYTES = 256 << 20
"""Largest total size in bytes of the files of folders that are put into a container."""

_STEP_NAME = re.compile(r"(?!\.)[^/\\\x00-\x1f]+")
_MAX_NAME_BYTES = 255
_PATH = re.compile(r"/[^\x00]*")
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][\w./:@-]{0,254}")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG])B?", re.IGNORECASE)
_CANARY = re.compile(r"(?:\s*(?:<!--.*canary.*-->|#.*canary.*)\s*\n)+\s*", re.IGNORECASE)

_NOT_HERE = {
    "gpus": "graphics processors",
    "tpu": "TPUs",
    "mcp_servers": "MCP servers in the container",
    "skills_dir": "skills",
}
"""Keys of [environment] for features that agentrl's containers lack."""
_NO_FIELDS = {*_NOT_HERE, "memory", "allow_internet", "allowed_hosts", "gpu_types"}
"""Keys of [environment] that are handled although `EnvironmentTable` has no such fields."""


class _Table(BaseModel):
    # Harbor's format grows, and some keys matter only to its own runner.
    model_config = ConfigDict(extra="ignore")


class Network(_Table):
    network_mode: Literal["no-network", "public", "allowlist"] | None = None


class Healthcheck(_Table):
    command: str
    interval_sec: float = Field(default=5.0, ge=0)
    timeout_sec: float = Field(default=30.0, gt=0)
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: float = Field(default=5.0, ge=0)
    retries: int = Field(default=3, ge=1)


class EnvironmentTable(Network):
    docker_image: str | None = None
    build_timeout_sec: float = Field(default=600.0, gt=0)
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, ge=64)
    storage_mb: int | None = Field(default=None, ge=1)
    env: dict[str, str] = Field(default_factory=dict)
    healthcheck: Healthcheck | None = None
    workdir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_older_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key, what in _NOT_HERE.items():
            if values.get(key):
                raise ValueError(f"{key}: agentrl's containers have no {what}")
        values = dict(values)
        for old in ("memory", "storage"):
            if (size := values.pop(old, None)) is not None:
                values.setdefault(f"{old}_mb", _megabytes(size))
        internet = values.get("allow_internet")
        if not isinstance(internet, bool | None):
            raise ValueError(f"allow_internet = {internet!r} is neither true nor false")
        if internet is not None and values.get("network_mode") is None:
            values["network_mode"] = "public" if internet else "no-network"
        return values

    @field_validator("docker_image")
    @classmethod
    def _check_image(cls, image: str | None) -> str | None:
        if image is not None and not _IMAGE_NAME.fullmatch(image):
            raise ValueError(f"{image!r} is not the name of an image")
        return image

    @field_validator("workdir")
    @classmethod
    def _check_workdir(cls, workdir: str | None) -> str | None:
        return None if workdir is None else _absolute(workdir)

    @field_validator("os")
    @classmethod
    def _check_os(cls, os_name: str) -> str:
        if os_name.lower() != "linux":
            raise ValueError(f"os = {os_name!r}: only Linux containers run here")
        return os_name


class AgentTable(Network):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None


class VerifierTable(Network):
    timeout_sec: float | None = Field(default=None, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[Any] = Field(default_factory=list)

    @field_validator("collect")
    @classmethod
    def _check_collect(cls, collect: list[Any]) -> list[Any]:
        if collect:
            raise ValueError(
                "[[verifier.collect]] runs in services of a compose file, which "
                "agentrl does not start"
            )
        return collect

    def separate(self) -> bool | None:
        """Tells whether the verifier runs in a separate image; None if the table does not say."""
        if self.environment_mode is not None:
            return self.environment_mode == "separate"
        return True if self.environment is not None else None


class Artifact(_Table):
    source: str
    service: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        source = _absolute(source)
        if source == "/":
            raise ValueError("'/' would bring the agent's whole system, programs included")
        return source

    @field_validator("service")
    @classmethod
    def _check_service(cls, service: str | None) -> str | None:
        if service not in (None, "main"):
            raise ValueError(f"service {service!r}: agentrl starts no services of a compose file")
        return service


class StepTable(_Table):
    name: str
    agent: AgentTable = Field(default_factory=AgentTable)
    verifier: VerifierTable = Field(default_factory=VerifierTable)
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[Artifact] = Field(default_factory=list)

    @field_validator("name")
    @classmethod
    def _check_step_name(cls, name: str) -> str:
        if not _STEP_NAME.fullmatch(name) or len(name.encode()) > _MAX_NAME_BYTES:
            raise ValueError(f"step {name!r} is not the name of a folder")
        return name


class TaskTable(_Table):
    """The tables of `task.toml`."""

    task: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    environment: EnvironmentTable = Field(default_factory=EnvironmentTable)
    agent: AgentTable = Field(default_factory=AgentTable)
    verifier: VerifierTable = Field(default_factory=VerifierTable)
    solution: dict[str, dict[str, str]] = Field(default_factory=dict)
    steps: list[StepTable] = Field(default_factory=list)
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    artifacts: list[Artifact] = Field(default_factory=list)

    @field_validator("steps")
    @classmethod
    def _check_names(cls, steps: list[StepTable]) -> list[StepTable]:
        names = [step.name.casefold() for step in steps]
        if len(set(names)) < len(names):
            raise ValueError("two steps have one name")
        return steps


@dataclass(slots=True, frozen=True)
class Step:
    """A part of a task that is verified by itself: one of its steps, or the whole task."""

    name: str
    """Empty if the task has no steps."""
    instruction: str
    folders: tuple[Path, ...]
    """Folders with its tests: the task's, then the step's."""
    solution: Path | None
    """Folder with `solve.sh`; None if there is no solution."""
    workdir: Path | None
    """Folder whose files are put into the working folder before the step."""
    agent: AgentTable
    verifier: VerifierTable
    separate: bool
    """True if the verifier runs in a separate image and gets only the artifacts."""
    bundled: Path | None
    """Folder whose Dockerfile builds the separate verifier's image, tests included."""
    artifacts: tuple[str, ...]
    min_reward: dict[str, float]
    healthcheck: Healthcheck | None


@dataclass(slots=True, frozen=True)
class HarborTask:
    id: str
    """Name of the task's folder."""
    folder: Path
    table: TaskTable
    steps: tuple[Step, ...]
    solution_env: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    """Keys of `task.toml` that have no effect here."""


def load_tasks(
    source: Path, *, compose: bool = False, task_ids: Collection[str] | None = None
) -> list[HarborTask]:
    """Returns the task in a folder, or the tasks in its subfolders, sorted by folder name.

    Of a folder of tasks, those that are invalid or need what agentrl lacks are left out, and a
    warning counts them with the reason of the first.

    Args:
        compose: the sandbox can start compose files.
        task_ids: the tasks that are wanted, none of which may be left out; None for all.

    Raises:
        DataError: there is no task, or none that is valid; the error names its file and key.
    """
    if (source / "task.toml").is_file():
        return [load_task(source, compose=compose)]
    if not source.is_dir():
        raise DataError(f"source {source} is not a folder: give a Harbor task or a folder of tasks")
    found = [each for each in sorted(source.iterdir()) if (each / "task.toml").is_file()]
    if not found:
        raise DataError(f"source {source} has no task.toml and no folder with one")
    tasks, problems = [], []
    for each in found:
        name = each.resolve().name
        if task_ids is not None and name not in task_ids:
            continue
        try:
            tasks.append(load_task(each, compose=compose))
        except DataError as error:
            if task_ids is not None:
                raise
            problems.append(error)
    if problems and not tasks:
        raise problems[0]
    if problems:
        left_out, reason = len(problems), problems[0]
        logger.warning(
            "source %s: %d of %d tasks are left out: %s", source, left_out, len(found), reason
        )
    return tasks


def load_task(folder: Path, *, compose: bool = False) -> HarborTask:
    """Reads one task; `compose` as for `load_tasks`.

    Raises:
        DataError: the task is invalid, or needs a feature that agentrl's containers lack.
    """
    path = _own(folder / "task.toml", folder)
    try:
        given = tomllib.loads(path.read_text())
        table = TaskTable.model_validate(given)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise DataError(f"{path}: {key}: {problem['msg']}") from error
    environment = _own(folder / "environment", folder)
    composed = environment / "docker-compose.yaml"  # the only name that Harbor reads
    has_services = composed.exists()
    if has_services and not compose:
        raise DataError(
            f"{composed}: agentrl starts one container per task and no services of a compose file: "
            'set sandbox = "harbor:docker", or leave this task out with `task_ids`'
        )
    has_image = table.environment.docker_image is not None or has_services
    if not has_image and not (environment / "Dockerfile").is_file():
        raise DataError(
            f"{folder} has no environment/Dockerfile, and {path} no environment.docker_image"
        )
    steps = tuple(_step(folder, table, step) for step in table.steps or [None])
    solution_env, ignored = table.solution.get("env", {}), tuple(dict.fromkeys(_ignored(given)))
    return HarborTask(folder.resolve().name, folder, table, steps, solution_env, ignored)


def resolve(variables: Mapping[str, str], allowed: list[str], where: str) -> dict[str, str]:
    """Returns a task's variables with `${NAME}` and `${NAME:-default}` replaced by values of this
    process's variables.

    Args:
        allowed: names of the variables of this process that a task may read.
        where: names the table in errors.

    Raises:
        DataError: the task asks for another variable of this process, or one that is not set.
    """

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name in allowed and name in os.environ:
            return os.environ[name]
        if default is not None:
            return default
        if name in allowed:
            raise DataError(f"{where} asks for the variable {name}, which is not set")
        raise DataError(
            f"{where} asks for this machine's variable {name}: name it in the environment's "
            "`host_variables` if the task's container may see it"
        )

    return {name: _VARIABLE.sub(value, text) for name, text in variables.items()}


def pack(folders: tuple[Path, ...]) -> bytes:
    """Returns a tar archive of the contents of folders, owned by root. Of two files with the same
    path, the last folder's is taken.

    Raises:
        DataError: a link leads out of its folder, an entry is neither a file nor a folder, or the
            files are too large together.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            _own(path, folder)
            if not (path.is_file() or path.is_dir()):
                raise DataError(f"{path} is neither a file nor a folder")
            found[path.relative_to(folder).as_posix()] = path
    if sum(each.stat().st_size for each in found.values() if each.is_file()) > MAX_FILES_BYTES:
        raise DataError(f"{folders[-1]} holds more than {MAX_FILES_BYTES >> 20} MiB")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
        for name, path in found.items():
            member = archive.gettarinfo(path, name)
            if path.is_symlink() and path.is_dir():  # its target's files are packed where they are
                above = os.path.realpath(path.parent)
                member.type = tarfile.SYMTYPE
                member.linkname = os.path.relpath(os.path.realpath(path), above)
            if member.islnk():  # pack hard links as separate files
                member.type, member.size = tarfile.REGTYPE, path.stat().st_size
            member.uid = member.gid = member.mtime = 0  # the archive depends only on the contents
            member.uname = member.gname = ""
            if name.endswith(".sh"):
                member.mode |= 0o555
            if member.isfile():
                with path.open("rb") as file:
                    archive.addfile(member, file)
            else:
                archive.addfile(member)
    return packed.getvalue()


def _step(folder: Path, table: TaskTable, step: StepTable | None) -> Step:
    base = folder if step is None else _own(folder / "steps" / step.name, folder)
    agent, verifier = table.agent, table.verifier
    if step is not None:
        agent = _over(step.agent, table.agent)
        verifier = _over(step.verifier, table.verifier)
    tests = tuple(
        dict.fromkeys(
            _own(each, folder) for each in (folder / "tests", base / "tests") if each.is_dir()
        )
    )
    # A step's own test script takes precedence over the task's.
    scripts = [each for each in reversed(tests) if (each / "test.sh").is_file()]
    separate = verifier.separate() or False
    own_image = verifier.environment and verifier.environment.docker_image
    bundled = next(
        (each for each in reversed(tests) if separate and (each / "Dockerfile").is_file()), None
    )
    if not scripts and not (separate and own_image):
        raise DataError(f"{base} has no tests/test.sh")
    instruction = _own(base / "instruction.md", folder)
    try:
        text = _without_canary(instruction.read_text()) if instruction.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{instruction} can't be read: {error}") from error
    if not text or not text.strip():
        raise DataError(f"{instruction} is missing or empty")
    solution = next(
        (
            _own(each, folder)
            for each in (base / "solution", folder / "solution")
            if (each / "solve.sh").is_file()
        ),
        None,
    )
    gates = step.min_reward if step is not None else None
    artifacts = [*table.artifacts, *(step.artifacts if step is not None else [])]
    workdir = _own(base / "workdir", folder) if step is not None else None
    return Step(
        name="" if step is None else step.name,
        instruction=text.strip(),
        folders=tests,
        solution=solution,
        workdir=workdir if workdir is not None and workdir.is_dir() else None,
        agent=agent,
        verifier=verifier,
        separate=separate,
        bundled=bundled,
        artifacts=tuple(dict.fromkeys(["/logs/artifacts", *(a.source for a in artifacts)])),
        min_reward=gates if isinstance(gates, dict) else {} if gates is None else {"reward": gates},
        healthcheck=step.healthcheck if step is not None else None,
    )


def _own(path: Path, folder: Path) -> Path:
    """Returns the path, unless it leads out of the folder by a link."""
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise DataError(f"{path} leads out of {folder}")
    return path


def _absolute(path: str) -> str:
    """Returns an absolute path in a container in its shortest form."""
    parts = PurePosixPath(path).parts
    if not _PATH.fullmatch(path) or ".." in parts:
        raise ValueError(f"{path!r} must be an absolute path without '..'")
    return "/" + "/".join(parts[1:])


def _ignored(given: Mapping[str, Any]) -> Iterator[str]:
    """Yields the keys of [environment], [agent] and [verifier] that have no effect here."""
    known = {"environment": EnvironmentTable, "agent": AgentTable, "verifier": VerifierTable}
    for table in (given, *given.get("steps", ()), given.get("verifier", {})):
        for name, model in known.items():
            for key in table.get(name, {}):
                if key.startswith("storage") or key not in model.model_fields.keys() | _NO_FIELDS:
                    yield f"{name}.{key}"


def _over(step: T, task: T) -> T:
    """Returns the step's table, filled up with the task's values."""
    given = {name: getattr(step, name) for name in step.model_fields_set}
    return task.model_copy(update=given)


def _without_canary(text: str) -> str:
    """Returns a text without a leading canary, the mark that keeps it out of training data."""
    canary = _CANARY.match(text)
    return text[canary.end() :] if canary else text


def _megabytes(size: Any) -> int:
    match = _SIZE.fullmatch(str(size).strip())
    if match is None:
        raise ValueError(f"{size!r} is not a size such as '2G' or '512M'")
    return int(float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[match[2].upper()])
