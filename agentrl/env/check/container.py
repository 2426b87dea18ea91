"""Images: a hardened container to check, and what only a container can be asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from agentrl.env.check.subject import CheckFailed, CheckSkipped, Subject

STOP_S = 10.0
"""What container engines grant between SIGTERM and SIGKILL."""
_WRITE = (
    "import os, sys, tempfile\n"
    "print(os.getuid())\n"
    "for folder in ('/', '/opt', '/etc', '/usr', os.path.dirname(sys.prefix)):\n"
    "    try:\n"
    "        os.close(os.open(folder + '/agentrl-check', os.O_CREAT | os.O_WRONLY))\n"
    "        print(folder)\n"
    "    except OSError:\n"
    "        pass\n"
    "tempfile.TemporaryFile(dir='/tmp').close()\n"
)


@dataclass(slots=True, frozen=True)
class Served:
    url: str
    token: str
    container_id: str


@contextlib.contextmanager
def served_image(name: str) -> Iterator[Served]:
    """A container of an image, hardened as `agentrl env run` does it, and removed afterwards.

    Args:
        name: what `agentrl env run` takes: an environment's id, a project's folder, or an image.

    Raises:
        ConfigError: there is no such image, or it does not start.
        EnvUnavailable: there is no Docker engine.
    """
    from agentrl.env import image

    token = secrets.token_urlsafe(24)
    server = image.start_server(image.find_image(name), token=token)
    try:
        image.wait_until_healthy(server)
        yield Served(server.url, token, server.container_id)
    finally:
        image.stop_servers([server])


async def check_container(subject: Subject) -> str:
    """The image runs as a user who is not root, on a file system it cannot change, has a health
    check that succeeds, and ends within 10 s of SIGTERM."""
    if subject.container_id is None:
        raise CheckSkipped("not an image")
    from agentrl.env.image import docker

    async def ask(*arguments: str) -> str:
        return await asyncio.to_thread(docker, *arguments)

    container = subject.container_id
    user, *written = (await ask("exec", container, "python3", "-c", _WRITE)).split()
    if user == "0":
        raise CheckFailed("the server runs as root", "end the Dockerfile with USER 10001:10001")
    if written:
        raise CheckFailed(
            f"the server could write to {', '.join(written)}", "run the container with --read-only"
        )
    await _wait_for_health(container, ask)
    started = time.monotonic()
    await ask("kill", "--signal", "TERM", container)
    while await ask("inspect", "--format", "{{.State.Running}}", container) == "true":
        if time.monotonic() - started > STOP_S:
            raise CheckFailed(
                f"the server was still running {STOP_S:g} s after SIGTERM",
                "start it with `exec`, so that the shell does not keep the signal to itself",
            )
        await asyncio.sleep(0.1)
    seconds = time.monotonic() - started
    return f"user {user}, nothing writable but /tmp, healthy, ended {seconds:.1f} s after SIGTERM"


async def _wait_for_health(container: str, ask: Callable[..., Awaitable[str]]) -> None:
    remedy = "give the Dockerfile a HEALTHCHECK that python3 runs on the server's own port"
    deadline = time.monotonic() + 45.0
    while True:
        health = json.loads(await ask("inspect", "--format", "{{json .State}}", container)).get(
            "Health"
        )
        if health is None:
            raise CheckFailed("the image has no health check", remedy)
        if health["Status"] == "healthy":
            return
        if health["Status"] == "unhealthy" or time.monotonic() > deadline:
            output = (health["Log"] or [{"Output": "it has not run"}])[-1]["Output"].strip()
            raise CheckFailed(f"the health check says {health['Status']}: {output[-200:]}", remedy)
        await asyncio.sleep(0.3)
