"""`agentrl env build` and `agentrl env run`: an environment in an image, and in a container of it.

A build context holds what the image needs and nothing else, with the same bytes on every machine:
agentrl itself (its checkout's sources, or a wheel made again from the installed files), and for a
project of one's own the project. `Dockerfile` beside this file builds both.

A server's container is hardened and reached from this machine alone. Its labels name this process,
so that what a killed `env run` left behind is found and removed by the next.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import io
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.env.container.engine import (
    OWNER_LABEL,
    ROLE_LABEL,
    RUN_LABEL,
    abandoned,
    current_owner,
)
from agentrl.env.protocol import TOKEN_VARIABLE
from agentrl.env.registry import ENTRY_POINT_GROUP
from agentrl.errors import ConfigError, EnvUnavailable

DOCKERFILE = Path(__file__).with_name("Dockerfile")
BASE_IMAGE = "python:3.12-slim"
PORT = 8700
"""Of the server inside a container."""
_INSIDE = ".agentrl"
"""Folder of a build context with what this command adds; the Dockerfile copies it to /deps."""
_LEFT_OUT = {
    *(".agentrl", ".cache", ".env", ".git", ".hypothesis", ".mypy_cache", ".pytest_cache"),
    *(".ruff_cache", ".tox", ".venv", "__pycache__", "node_modules", "runs", "venv"),
}
"""Of a project, whatever its .dockerignore says."""


# ---- the command line


def add_image_commands(subcommands: argparse._SubParsersAction) -> None:
    """Add `build` and `run`. Each sets `handler`, which returns an exit status."""
    build = subcommands.add_parser(
        "build",
        help="build the image of an environment",
        description="Build an image that serves an environment: an installed one by its id, or the "
        "project in a folder, such as `agentrl env init` writes.",
    )
    build.add_argument("target", metavar="ID|DIR", help="such as math, or . for this project")
    build.add_argument("--tag", help="(default: agentrl-ID, or the project's name)")
    build.add_argument(
        "--base-image",
        default=BASE_IMAGE,
        metavar="IMAGE",
        help="with Debian's packages, python3, python3-venv and ca-certificates "
        "(default: %(default)s)",
    )
    for name, variable, text in (
        ("index-url", "PIP_INDEX_URL", "package index"),
        ("extra-index-url", "PIP_EXTRA_INDEX_URL", "package index beside it"),
        ("cert", "PIP_CERT", "file with the certificate authorities to trust while building"),
    ):
        build.add_argument(
            f"--pip-{name}",
            default=os.environ.get(variable),
            metavar="FILE" if name == "cert" else "URL",
            help=f"{text} (default: the variable {variable})",
        )
    build.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the Dockerfile, repeatable",
    )
    build.add_argument("--no-cache", action="store_true", help="build every layer again")
    build.set_defaults(handler=_build)

    run = subcommands.add_parser(
        "run",
        help="run an environment's image in a hardened container",
        description="Serve an environment from a container, or several, until interrupted: no "
        "capabilities, a read-only file system, limits on memory, CPU and processes, reached from "
        "this machine alone.",
    )
    run.add_argument("target", metavar="ID|DIR|IMAGE", nargs="?", help="what `env build` built")
    run.add_argument(
        "--port",
        type=int,
        default=PORT,
        help="on this machine; 0 takes a free one, further containers the next ones "
        "(default: %(default)s)",
    )
    run.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE),
        help=f"what clients must present (default: the variable {TOKEN_VARIABLE}, or a new one)",
    )
    run.add_argument("--memory", default="2g", help="(default: %(default)s)")
    run.add_argument("--cpus", type=float, default=2.0, help="(default: %(default)s)")
    run.add_argument(
        "--pids", type=int, default=256, help="processes and threads (default: %(default)s)"
    )
    run.add_argument(
        "--network", default="bridge", help="a network of the engine's (default: %(default)s)"
    )
    run.add_argument("--count", type=int, default=1, help="containers (default: %(default)s)")
    run.add_argument(
        "--ready-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for a container to become healthy (default: %(default)g)",
    )
    run.add_argument(
        "--reap", action="store_true", help="only remove what killed `env run`s left behind"
    )
    run.set_defaults(handler=_run)


def _build(arguments: argparse.Namespace) -> int:
    extra: dict[str, str] = {}
    for entry in arguments.build_arg:
        name, equals, value = entry.partition("=")
        if not equals:
            raise ConfigError(f"--build-arg {entry}: write NAME=VALUE")
        extra[name] = value
    started = time.monotonic()
    tag = build_image(
        arguments.target,
        tag=arguments.tag,
        base_image=arguments.base_image,
        index_url=arguments.pip_index_url,
        extra_index_url=arguments.pip_extra_index_url,
        cert=Path(arguments.pip_cert) if arguments.pip_cert else None,
        build_args=extra,
        cache=not arguments.no_cache,
    )
    size = int(docker("image", "inspect", "--format", "{{.Size}}", tag))
    print(f"built {tag}: {size / 1e6:,.0f} MB in {time.monotonic() - started:.0f} s")
    print(f"run it: agentrl env run {tag}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    if arguments.reap:
        print(f"{_reap()} leftover containers removed")
        return 0
    if arguments.target is None:
        raise ConfigError("name what to run: agentrl env run ID|DIR|IMAGE")
    if arguments.count < 1 or (arguments.port and arguments.port + arguments.count > 65536):
        raise ConfigError("--count is at least 1, and --port + --count at most 65536")
    _reap()
    token = arguments.token or secrets.token_urlsafe(24)
    image = find_image(arguments.target)
    servers: list[Server] = []

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        for number in range(arguments.count):
            servers.append(
                start_server(
                    image,
                    token=token,
                    port=arguments.port + number if arguments.port else 0,
                    memory=arguments.memory,
                    cpus=arguments.cpus,
                    pids=arguments.pids,
                    network=arguments.network,
                )
            )
        for server in servers:
            wait_until_healthy(server, arguments.ready_timeout)
        urls = " ".join(server.url for server in servers)
        print(f"serving {image} at {urls}")
        print(f"{TOKEN_VARIABLE}={token}", flush=True)
        return _follow(servers)
    except KeyboardInterrupt:
        return 0
    finally:
        # A second signal must not leave containers behind.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_servers(servers)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)


def _reap() -> int:
    removed = reap_servers()
    for line in removed:
        print(f"removed a leftover container: {line}", file=sys.stderr)
    return len(removed)


# ---- building


def build_image(
    target: str,
    *,
    tag: str | None = None,
    base_image: str = BASE_IMAGE,
    index_url: str | None = None,
    extra_index_url: str | None = None,
    cert: Path | None = None,
    build_args: dict[str, str] | None = None,
    cache: bool = True,
) -> str:
    """Build the image of an installed environment (by id) or of the project in a folder; its tag.

    The builder's output goes to the standard error. An environment whose package has a `Dockerfile`
    of its own gets what that adds to the image (`ARG SERVER_IMAGE`).

    Args:
        cert: trusted while packages are installed; it is not in the finished image.

    Raises:
        ConfigError: there is no such environment, or the build failed; says why.
        EnvUnavailable: there is no engine.
    """
    files, arguments, default_tag, addition = _context(target)
    arguments |= {"BASE_IMAGE": base_image}
    if index_url:
        arguments["PIP_INDEX_URL"] = index_url
    if extra_index_url:
        arguments["PIP_EXTRA_INDEX_URL"] = extra_index_url
    if cert is not None:
        try:
            files[f"{_INSIDE}/ca.pem"] = cert.read_bytes()
        except OSError as error:
            raise ConfigError(f"--pip-cert {cert} can't be read: {error.strerror}") from error
        arguments["PIP_CERT"] = "/deps/ca.pem"
    arguments |= build_args or {}
    tag = tag or default_tag
    server_tag = f"{tag.partition(':')[0]}-server" if addition else tag
    _docker_build(server_tag, files, arguments, cache)
    if addition is not None:
        add = {"SERVER_IMAGE": server_tag, **(build_args or {})}
        _docker_build(tag, {"Dockerfile": addition.read_bytes()}, add, cache)
    return tag


def _context(target: str) -> tuple[dict[str, bytes], dict[str, str], str, Path | None]:
    """Files, the Dockerfile's arguments, the default tag, and a Dockerfile to build on top."""
    files, agentrl = _packed("agentrl")
    folder = Path(target)
    if (folder / "pyproject.toml").is_file():
        name, environments = _project(folder)
        files |= _files_of(folder)
        arguments = {"AGENTRL": agentrl}
        if "Dockerfile" not in files:
            if len(environments) != 1:
                raise ConfigError(
                    f"{folder / 'pyproject.toml'} offers {len(environments)} environments under "
                    f"'{ENTRY_POINT_GROUP}': offer one, or write a Dockerfile"
                )
            files["Dockerfile"] = DOCKERFILE.read_bytes()
            arguments["ENVIRONMENT"] = environments[0]
        return files, arguments, name, None
    if folder.is_dir() or "/" in target:
        raise ConfigError(
            f"{folder} has no pyproject.toml: name an environment's id, or a project such as "
            "`agentrl env init` writes"
        )
    entries = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    entry = next((each for each in entries if each.name == target), None)
    if entry is None or entry.dist is None:
        known = ", ".join(sorted(each.name for each in entries)) or "none"
        raise ConfigError(
            f"no installed environment '{target}'; there are {known}. A class in a file has no "
            "image of its own: make it a project (`agentrl env init`)"
        )
    files["Dockerfile"] = DOCKERFILE.read_bytes()
    arguments = {"AGENTRL": agentrl, "PROJECT": "", "ENVIRONMENT": target}
    if entry.dist.name != "agentrl":
        added, arguments["PROJECT"] = _packed(entry.dist.name)
        files |= added
    elif target in (entry.dist.metadata.get_all("Provides-Extra") or []):
        arguments["AGENTRL"] += f"[{target}]"
    own = _package_folder(entry.value.partition(":")[0]) / "Dockerfile"
    return files, arguments, f"agentrl-{target}", own if own.is_file() else None


def _project(folder: Path) -> tuple[str, list[str]]:
    """A project's name and the ids of its environments."""
    path = folder / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        entries = project.get("entry-points", {}).get(ENTRY_POINT_GROUP, {})
        return str(project["name"]).lower(), sorted(entries)
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(f"{path}: no [project] with a name can be read ({error})") from error


def _package_folder(module: str) -> Path:
    import importlib.util

    spec = importlib.util.find_spec(module.partition(".")[0])
    return Path(spec.origin).parent if spec and spec.origin else Path()


def _packed(name: str) -> tuple[dict[str, bytes], str]:
    """An installed distribution as files of a context, and what pip is to be told for it."""
    distribution = importlib.metadata.distribution(name)
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    root = None
    if origin.get("dir_info", {}).get("editable"):
        root = Path(urllib.request.url2pathname(origin["url"].removeprefix("file://")))
    if root is not None and name == "agentrl":
        return {
            f"{_INSIDE}/source/{path}": content for path, content in _checkout(root).items()
        }, "/deps/source"
    if root is not None:
        return {
            f"{_INSIDE}/{name}/{path}": content for path, content in _files_of(root).items()
        }, f"/deps/{name}"
    wheel, content = _wheel(distribution)
    return {f"{_INSIDE}/{wheel}": content}, f"/deps/{wheel}"


def _checkout(root: Path) -> dict[str, bytes]:
    """What a wheel of agentrl is made of, from its repository."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    files = {
        name: (root / name).read_bytes() for name in ("pyproject.toml", "README.md", "LICENSE")
    }
    for package in packages:
        found = _files_of(root / package)
        files |= {f"{package}/{path}": content for path, content in found.items()}
    return files


def _files_of(folder: Path) -> dict[str, bytes]:
    """The files under a folder by relative path, less what never belongs into an image."""
    files = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(
            each for each in folders if each not in _LEFT_OUT and not each.endswith(".egg-info")
        )
        for name in sorted(names):
            path = Path(parent, name)
            if name in _LEFT_OUT or name.endswith((".pyc", ".pyo")) or not path.is_file():
                continue
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def _wheel(distribution: importlib.metadata.Distribution) -> tuple[str, bytes]:
    """The wheel that a distribution was installed from, made again from what it installed."""
    info = f"{distribution.metadata['Name'].replace('-', '_')}-{distribution.version}.dist-info"
    skipped = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
    files: dict[str, bytes] = {}
    for each in distribution.files or []:
        path = each.as_posix()
        # Scripts stand outside the packages' folder; pip writes them again.
        if path.startswith(("..", "/")) or path.endswith(".pyc"):
            continue
        if path.partition("/")[0].endswith(".dist-info") and each.name in skipped:
            continue
        files[path] = each.read_binary()
    if not any(path.endswith(".dist-info/WHEEL") for path in files):
        raise ConfigError(f"{distribution.name} is not installed from a wheel: reinstall it by pip")
    info = next(path for path in files if path.endswith(".dist-info/WHEEL")).rpartition("/")[0]
    record = "".join(
        f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    tags = re.findall(r"^Tag: (\S+)$", files[f"{info}/WHEEL"].decode(), re.MULTILINE)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(files):
            member = zipfile.ZipInfo(path)
            member.external_attr = 0o644 << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, files[path])
    return f"{info.removesuffix('.dist-info')}-{tags[0]}.whl", packed.getvalue()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _archive(files: dict[str, bytes]) -> bytes:
    """A tar of the files that depends on nothing but their names and content."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            archive.addfile(member, io.BytesIO(files[name]))
    return packed.getvalue()


_REMEDIES = (
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLCertVerificationError",
        "the package index shows a certificate that the base image does not trust: pass "
        "--pip-cert FILE with your certificate authorities",
    ),
    (
        r"pull access denied|manifest (for .* not found|unknown)|lookup registry|registry-1\.docker"
        r"|Client\.Timeout exceeded while awaiting headers",
        "the base image can't be pulled: name one that is here or can be with --base-image",
    ),
    (
        r"ensurepip is not\s+available|No module named venv|python3: (not found|command not found)",
        "the base image lacks python3 or python3-venv: name another with --base-image",
    ),
    (
        r"No matching distribution found|Temporary failure in name resolution|NewConnectionError",
        "pip found no package or no index: see --pip-index-url",
    ),
    (r"no space left on device", "the engine's disk is full: `docker system prune` frees some"),
)


def _docker_build(
    tag: str, files: dict[str, bytes], arguments: dict[str, str], cache: bool
) -> None:
    context = _archive(files)
    print(f"building {tag} from {len(files)} files, {len(context) / 1e6:.1f} MB", file=sys.stderr)
    command = ["build", "--force-rm", "--tag", tag, *([] if cache else ["--no-cache"])]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    with _start([*command, "-"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        sender = threading.Thread(target=_send, args=(process.stdin, context))
        sender.start()
        said = ""
        for line in process.stdout:
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()
            said = (said + line.decode(errors="replace"))[-20_000:]
        sender.join()
    if process.returncode == 0:
        return
    _check_engine(said)
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    remedy = next((text for pattern, text in _REMEDIES if re.search(pattern, said)), None)
    raise ConfigError(f"{tag} can't be built: {remedy or ' '.join(last.split())[:300]}")


def _send(pipe: io.BufferedWriter, content: bytes) -> None:
    try:
        with pipe:
            pipe.write(content)
    except BrokenPipeError:  # the builder ended early and says why
        pass


# ---- running


@dataclass(slots=True, frozen=True)
class Server:
    """A container that serves environments."""

    container_id: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def hardened_flags(*, memory: str = "2g", cpus: float = 2.0, pids: int = 256) -> list[str]:
    """What a server's container is run with: it can change nothing but /tmp, and little of that."""
    return [
        *("--init", "--read-only", "--tmpfs", "/tmp:rw,nosuid,nodev,size=1g"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--pids-limit", str(pids), "--cpus", f"{cpus:g}"),
        *("--memory", memory, "--memory-swap", memory),
    ]


def find_image(target: str) -> str:
    """The local image of an environment's id, a project's folder or an image's own name.

    Raises:
        ConfigError: there is none.
        EnvUnavailable: there is no engine.
    """
    names = [f"agentrl-{target}", target]
    if (Path(target) / "pyproject.toml").is_file():
        names = [_project(Path(target))[0]]
    for name in names:
        if re.fullmatch(r"[\w.:/@-]+", name) and _image_exists(name):
            return name
    raise ConfigError(f"no image of '{target}' is here: `agentrl env build {target}` builds it")


def start_server(
    image: str,
    *,
    token: str,
    port: int = 0,
    memory: str = "2g",
    cpus: float = 2.0,
    pids: int = 256,
    network: str = "bridge",
    role: Literal["server", "check"] = "server",
    inside_port: int = PORT,
) -> Server:
    """Start a container, reached at a port of this machine's loopback address; 0: a free one.

    Args:
        role: its label, `server` or `check`.
        inside_port: which the server is told to listen on.

    Raises:
        ConfigError: the port is taken, there is no such image or network, a limit is malformed.
        EnvUnavailable: there is no engine.
    """
    if network == "none":
        raise ConfigError("--network none: a server without a network can't be reached")
    labels = {OWNER_LABEL: str(current_owner()), ROLE_LABEL: role, RUN_LABEL: image}
    command = ["create", *hardened_flags(memory=memory, cpus=cpus, pids=pids)]
    command += ["--network", network, "--publish", f"127.0.0.1:{port or ''}:{inside_port}"]
    # Without a value: docker reads the token from its environment, and no process list shows it.
    command += ["--env", TOKEN_VARIABLE, "--env", f"AGENTRL_ENV_PORT={inside_port}"]
    for name, value in labels.items():
        command += ["--label", f"{name}={value}"]
    container_id = docker(*command, "--pull", "never", image, environment={TOKEN_VARIABLE: token})
    try:
        docker("start", container_id)
        try:
            published = docker("port", container_id, f"{inside_port}/tcp").splitlines()[0]
        except ConfigError:  # it has ended already; `wait_until_healthy` says why
            published = ":0"
    except BaseException as error:
        _remove(container_id)
        if re.search(r"port is already allocated|address already in use", str(error)):
            raise ConfigError(f"port {port} is taken: choose another --port, or 0") from None
        raise
    return Server(container_id, int(published.rpartition(":")[2]))


def wait_until_healthy(server: Server, timeout_s: float = 60.0) -> float:
    """Wait for a server to answer; how many seconds that took.

    Raises:
        ConfigError: it ended, or did not answer in time; with the end of its log.
    """
    started = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/healthz", timeout=2) as reply:
                if reply.status == 200:
                    return time.monotonic() - started
        except (OSError, urllib.error.URLError, ValueError):
            pass
        waited = time.monotonic() - started
        running = docker("inspect", "--format", "{{.State.Running}}", server.container_id)
        if running != "true" or waited > timeout_s:
            log = docker("logs", "--tail", "30", server.container_id, stderr=True)
            what = "ended" if running != "true" else f"did not answer within {timeout_s:g} s"
            print(log, file=sys.stderr)
            last = next((line for line in reversed(log.splitlines()) if line.strip()), "no log")
            raise ConfigError(
                f"the container {what} ({' '.join(last.split())[:200]}): its log is above; more "
                "memory or time may help (--memory, --ready-timeout)"
            )
        time.sleep(0.05)


def stop_servers(servers: list[Server], *, drain_s: int = 10) -> None:
    """Drain and remove containers, all at once."""
    stopping = [
        subprocess.Popen(
            ["docker", "stop", "--time", str(drain_s), server.container_id],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for server in servers
    ]
    for process in stopping:
        process.wait()
    for server in servers:
        _remove(server.container_id)


def reap_servers() -> list[str]:
    """Remove servers' containers whose `env run` is gone; a line about each.

    Raises:
        EnvUnavailable: there is no engine.
    """
    owned = ["--filter", f"label={OWNER_LABEL}"]
    columns = (".ID", f'.Label "{ROLE_LABEL}"', f'.Label "{OWNER_LABEL}"', ".Image")
    form = "\t".join(f"{{{{{column}}}}}" for column in columns)
    removed = []
    for line in docker("ps", "--all", *owned, "--format", form).splitlines():
        container_id, role, owner, image = line.split("\t")
        if role not in ("server", "check"):
            continue
        reason = abandoned({OWNER_LABEL: owner}, time.time())
        if reason is not None:
            _remove(container_id)
            removed.append(f"{container_id} of {image}: {reason}")
    return removed


def _follow(servers: list[Server]) -> int:
    """Print the containers' logs until one ends, which is an error."""
    ended = threading.Event()
    followers = []

    def print_log(server: Server, lines: Iterator[bytes]) -> None:
        prefix = f"{server.port} | " if len(servers) > 1 else ""
        for line in lines:
            print(prefix + line.decode(errors="replace"), end="", flush=True)
        ended.set()

    try:
        for server in servers:
            process = _start(["logs", "--follow", server.container_id], new_session=True)
            followers.append(process)
            assert process.stdout is not None
            threading.Thread(
                target=print_log, args=(server, iter(process.stdout)), daemon=True
            ).start()
        while not ended.wait(0.5):
            pass
    finally:
        for process in followers:
            process.kill()
            process.wait()
    print("agentrl: a container ended by itself; the others are stopped", file=sys.stderr)
    return 1


def _remove(container_id: str) -> None:
    subprocess.run(
        ["docker", "rm", "--force", "--volumes", container_id],
        capture_output=True,
        start_new_session=True,
    )


def _image_exists(name: str) -> bool:
    try:
        docker("image", "inspect", "--format", "{{.Id}}", name)
    except ConfigError:
        return False
    return True


# ---- the docker command


def docker(*arguments: str, environment: dict[str, str] | None = None, stderr: bool = False) -> str:
    """What a docker command prints, without the last line's end; `stderr`: its errors too.

    Raises:
        ConfigError: it failed; with its reason.
        EnvUnavailable: there is no docker command or no engine.
    """
    try:
        done = subprocess.run(
            ["docker", *arguments],
            capture_output=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # an interrupt is ours; a half-made container would stay
        )
    except FileNotFoundError as error:
        raise _no_command() from error
    errors = done.stderr.decode(errors="replace").strip()
    if done.returncode:
        _check_engine(errors)
        raise ConfigError(f"docker {arguments[0]}: {' '.join(errors.split())[:400]}")
    output = done.stdout.decode(errors="replace").rstrip("\n")
    return f"{output}\n{errors}".strip("\n") if stderr else output


def _start(
    arguments: list[str], *, stdin: int | None = None, new_session: bool = False
) -> subprocess.Popen[bytes]:
    """A docker command whose output and errors are one pipe."""
    try:
        return subprocess.Popen(
            ["docker", *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=new_session,
        )
    except FileNotFoundError as error:
        raise _no_command() from error


def _no_command() -> EnvUnavailable:
    return EnvUnavailable("there is no `docker` command: install Docker, or its client alone")


def _check_engine(errors: str) -> None:
    if re.search(r"Cannot connect to the Docker daemon|permission denied while trying", errors):
        reason = " ".join(errors.split())[:200]
        raise EnvUnavailable(
            f"no Docker engine answers ({reason}): start one (`dockerd`, or `systemctl start "
            "docker`), let this user reach its socket, or name another in DOCKER_HOST"
        )
