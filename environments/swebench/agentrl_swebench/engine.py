"""The Docker engine through the `docker` package, which blocks: for what is done once, such as
pulling, building and reaping. Agents' commands go through `agentrl.env.container.engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.env.container.engine import engine_host
from agentrl.errors import ConfigError, EnvUnavailable

if TYPE_CHECKING:
    import docker

_REMEDY = (
    "start one (`dockerd`, or `systemctl start docker`), let this user reach its socket, or name "
    "another in DOCKER_HOST"
)


def connect(timeout_s: float = 60.0) -> docker.DockerClient:
    """A client of the engine that DOCKER_HOST names (by default the local socket).

    `timeout_s` is for each answer of the engine.

    Raises:
        ConfigError: the `docker` package is missing or DOCKER_HOST can't be read.
        EnvUnavailable: no engine answers there. (An `EnvError`, and retryable.)
    """
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as error:
        raise ConfigError(
            "SWE-bench needs the docker package: pip install 'agentrl[swebench]'"
        ) from error
    host = engine_host()
    try:
        client = docker.from_env(timeout=int(timeout_s), version="auto")
        client.ping()
    except (DockerException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EnvUnavailable(f"no Docker engine answers at {host} ({reason}): {_REMEDY}") from error
    return client
