"""Builds tasks' images from their folders, once per content, or finds them by name."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.env.container.engine import ImageMissing, connect, engine_errors
from agentrl.errors import DataError
from agentrl_harbor.sandbox import Image
from agentrl_harbor.task import EnvironmentTable, pack

logger = logging.getLogger("agentrl.env")

REPOSITORY = "agentrl/harbor"


def build_or_find(
    known: dict[str, Image], lock: threading.Lock, folder: Path, table: EnvironmentTable
) -> Image:
    """Returns the image that the table names, or builds the one of a folder with a Dockerfile.

    An image is built again if its folder's files change, but not if the tag of its base image
    moves.

    Args:
        known: images found so far; this call adds to it.
        lock: held while an image is built or pulled.

    Raises:
        DataError: the Dockerfile does not build, or takes too long.
        ImageMissing: the named image is not local and cannot be pulled.
        EnvError: the engine failed.
    """
    key = table.docker_image or str(folder)
    if key in known:  # without the lock, so that a known image need not wait for a build
        return known[key]
    with lock:
        if key not in known:
            client = connect(timeout_s=table.build_timeout_sec)
            try:
                with engine_errors():
                    known[key] = (
                        _pulled(client, table.docker_image)
                        if table.docker_image
                        else _built(client, folder, table.build_timeout_sec)
                    )
            finally:
                client.close()
        return known[key]


def _pulled(client: Any, name: str) -> Image:
    from docker.errors import APIError, ImageNotFound

    try:
        return replace(_image(client.images.get(name)), is_named=True)
    except ImageNotFound:
        try:
            return replace(_image(client.images.pull(name)), is_named=True)
        except APIError as error:
            raise ImageMissing(f"image {name} is not local and can't be pulled: {error}") from error


def _built(client: Any, folder: Path, timeout_s: float) -> Image:
    from docker.errors import APIError, ImageNotFound
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    tag = f"{REPOSITORY}:{hashlib.sha256(pack((folder,))).hexdigest()[:24]}"
    try:
        return _image(client.images.get(tag))
    except ImageNotFound:
        pass
    dockerfile, said, deadline = folder / "Dockerfile", "", time.monotonic() + timeout_s
    late = f"{dockerfile} took longer to build than build_timeout_sec = {timeout_s:g}"
    try:
        for line in client.api.build(
            path=str(folder), tag=tag, rm=True, forcerm=True, decode=True, timeout=timeout_s
        ):
            said = f"{said}{line.get('stream', '')}"[-2000:]
            if "error" in line:
                raise DataError(f"{dockerfile} does not build: {line['error']}\n{said}")
            if time.monotonic() > deadline:
                raise DataError(late)
    except APIError as error:
        raise DataError(f"{dockerfile} does not build: {error}") from error
    except (RequestException, HTTPError) as error:
        if time.monotonic() > deadline:
            raise DataError(late) from error
        raise
    return _image(client.images.get(tag))


def _image(found: Any) -> Image:
    config = found.attrs.get("Config") or {}
    if entrypoint := config.get("Entrypoint"):
        logger.warning(
            "image %s: its ENTRYPOINT %s is not run, so a service that it starts is missing: start "
            'it in the task, or set sandbox = "harbor:docker"',
            (found.tags or [found.id])[0],
            " ".join(entrypoint)[:80],
        )
    user, workdir = config.get("User") or "0", config.get("WorkingDir") or "/"
    return Image(found.id, user, workdir, frozenset(), tuple(config.get("Volumes") or ()))
