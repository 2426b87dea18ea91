"""Runs an environment's image in hardened containers that only this machine can reach.

Their labels name this process, so that the next `agentrl env run` finds and removes what a killed
one left behind.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.env.container.container import hardened
from agentrl.env.container.engine import EngineError, connect, engine_errors, labels, remove
from agentrl.env.protocol import TOKEN_VARIABLE
from agentrl.env.registry import ENTRY_POINT_GROUP
from agentrl.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from docker.models.containers import Container

PORT = 8700
"""Port of the server inside a container."""


@dataclass(slots=True, frozen=True)
class Server:
    """A container that serves environments."""

    container: Container
    port: int
    """Port on this machine's loopback address."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def running(self) -> bool:
        """Returns True if the container is running."""
        with engine_errors():
            self.container.reload()
        return self.container.status == "running"


def read_project(folder: Path) -> tuple[str, list[str]]:
    """Returns a project's name, in lower case, and the ids of its environments.

    Raises:
        ConfigError: its pyproject.toml is malformed, or has no [project] with a name.
    """
    path = folder / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        entries = project.get("entry-points", {}).get(ENTRY_POINT_GROUP, {})
        return str(project["name"]).lower(), sorted(entries)
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(f"{path} needs a [project] table with a name ({error})") from error


def find_image(target: str) -> str:
    """Returns the name of a local image.

    Args:
        target: an environment's id, a project's folder, or the name of the image itself.

    Raises:
        ConfigError: there is no such image.
        EnvUnavailable: there is no engine.
    """
    names = [f"agentrl-{target}", target]
    if (Path(target) / "pyproject.toml").is_file():
        names = [read_project(Path(target))[0]]
    client = connect()
    for name in names:
        try:
            with engine_errors():
                client.images.get(name)
            return name
        except EngineError:  # there is no such image, or the name is malformed
            continue
    raise ConfigError(
        f"there is no local image of '{target}': build it with `agentrl env build {target}`"
    )


def start_server(
    image: str,
    *,
    token: str,
    port: int = 0,
    memory: str = "2g",
    cpus: float = 2.0,
    max_processes: int = 256,
    network: str = "bridge",
) -> Server:
    """Starts a container with a server. It may not answer yet; see `wait_until_healthy`.

    Args:
        token: the server's token.
        port: port on this machine's loopback address; 0 takes a free one.
        memory: limit such as `2g`, swap included.
        cpus: cores; fractions are allowed.

    Raises:
        ConfigError: the port is taken, there is no such image or network, or a limit is malformed.
        EnvUnavailable: there is no engine.
    """
    if network == "none":
        raise ConfigError(
            "--network none: a server without a network can't be reached; name another network, or "
            "leave --network out"
        )
    client = connect()
    inside = f"{PORT}/tcp"
    container = None
    try:
        with engine_errors():
            limits = hardened(client, memory=memory, cpus=cpus, max_processes=max_processes)
            container = client.containers.create(
                image,
                **limits,
                init=True,
                tmpfs={"/tmp": "rw,nosuid,nodev,size=1g"},
                network=network,
                ports={inside: ("127.0.0.1", port)},
                environment={TOKEN_VARIABLE: token},
                labels=labels(image, "server", life_s=None),
            )
            container.start()
            container.reload()
    except BaseException as error:
        if container is not None:
            remove(client, container.id or "")
        if isinstance(error, EngineError):
            if re.search(r"port is already allocated|address already in use", str(error)):
                raise ConfigError(f"port {port} is taken: choose another --port, or 0") from None
            raise ConfigError(f"image {image} can't be run: {error}") from error
        raise
    # Without a port the container has ended already; `wait_until_healthy` reports why.
    published = container.ports.get(inside) or [{"HostPort": "0"}]
    return Server(container, int(published[0]["HostPort"]))


def wait_until_healthy(server: Server, timeout_s: float = 60.0) -> float:
    """Waits for a server to answer, and returns how many seconds that took.

    Raises:
        ConfigError: it ended, or did not answer in time. The end of its log is printed to standard
            error.
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
        running = server.running()
        if not running or waited > timeout_s:
            with engine_errors():
                log = server.container.logs(tail=30).decode(errors="replace")
            print(log, file=sys.stderr)
            what = f"did not answer within {timeout_s:g} s" if running else "ended"
            last = next((line for line in reversed(log.splitlines()) if line.strip()), "no log")
            raise ConfigError(
                f"the container {what} ({' '.join(last.split())[:200]}). Its log is above; more "
                "memory or time may help (--memory, --ready-timeout)"
            )
        time.sleep(0.05)


def stop_servers(servers: list[Server], *, drain_s: int = 10) -> None:
    """Drains the servers for at most `drain_s` and removes their containers, all at once."""
    if not servers:
        return
    client = connect()

    def stop(server: Server) -> None:
        try:
            with contextlib.suppress(EnvError), engine_errors():
                server.container.stop(timeout=drain_s)
        finally:
            with engine_errors():
                remove(client, server.container.id or "")

    with ThreadPoolExecutor(len(servers)) as threads:
        list(threads.map(stop, servers))


def follow(servers: list[Server]) -> int:
    """Prints the containers' logs until one ends, and returns exit status 1."""
    ended = threading.Event()

    def print_log(server: Server) -> None:
        prefix = f"{server.port} | " if len(servers) > 1 else ""
        with contextlib.suppress(EnvError), engine_errors():
            for line in server.container.logs(stream=True, follow=True):
                print(prefix + line.decode(errors="replace"), end="", flush=True)
        ended.set()

    for server in servers:
        threading.Thread(target=print_log, args=(server,), daemon=True).start()
    while not ended.wait(0.5):
        pass
    print("agentrl: a container ended by itself; the others are stopped", file=sys.stderr)
    return 1


def serve(
    image: str, count: int, *, token: str, port: int, ready_timeout_s: float, **limits: Any
) -> int:
    """Serves an image from containers until SIGTERM, SIGINT or the end of one; returns the status.

    Must be called in the main thread.

    Args:
        port: of the first container, the others have those after it; 0 takes free ones.
        limits: further arguments of `start_server`.

    Raises:
        ConfigError, EnvUnavailable: see `start_server` and `wait_until_healthy`.
    """
    servers: list[Server] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number in range(count):
            own = port + number if port else 0
            servers.append(start_server(image, token=token, port=own, **limits))
        for server in servers:
            wait_until_healthy(server, ready_timeout_s)
        print(f"serving {image} at {' '.join(server.url for server in servers)}")
        print(f"{TOKEN_VARIABLE}={token}", flush=True)
        return follow(servers)
    except KeyboardInterrupt:
        return 0
    finally:
        # Ignore further signals, or containers could be left behind.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_servers(servers)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)
