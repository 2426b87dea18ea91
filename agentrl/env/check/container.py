"""Images: a hardened container to check, and what only a container can be asked."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator

from agentrl.env.check.subject import CheckFailed, CheckSkipped, Subject


@contextlib.contextmanager
def served_image(name: str) -> Iterator[tuple[str, str]]:
    """URL and token of a container of an image, hardened as `agentrl env run` does it, and removed
    afterwards.

    Args:
        name: what `agentrl env run` takes: an environment's id, a project's folder, or an image.

    Raises:
        ConfigError: there is no such image, or it does not start.
        EnvUnavailable: there is no Docker engine.
    """
    from agentrl.env.container import serve

    token = secrets.token_urlsafe(24)
    server = serve.start_server(serve.find_image(name), token=token)
    try:
        serve.wait_until_healthy(server)
        yield server.url, token
    finally:
        serve.stop_servers([server])


async def check_container(subject: Subject) -> str:
    """The image runs without root and capabilities on a file system it cannot change, holds no
    secret, has a health check that succeeds, heeds its port, and ends within 10 s of SIGTERM."""
    if subject.image is None:
        raise CheckSkipped("not an image")
    from agentrl.env.container.image_check import check_image

    checks = await asyncio.to_thread(check_image, subject.image)
    failed = [(f"{name}: {detail}", remedy) for name, ok, detail, remedy in checks if not ok]
    if failed:
        details, remedies = zip(*failed, strict=True)
        raise CheckFailed("; ".join(details), "; ".join(remedies))
    return "; ".join(f"{name}: {detail}" for name, _, detail, _ in checks)
