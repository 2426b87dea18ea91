"""Agents in containers: `command` runs in a container of the image `container`, one per episode.

The container is one of `agentrl.env.container`: without capabilities, bounded, gone with its
episode and with this process, however that ends. It is in a Docker network that leads to this
machine alone, where the endpoint listens; containers in it do not reach each other.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agentrl.config import AgentSection
from agentrl.env.container.box import Box
from agentrl.env.container.container import Container, ContainerSpec
from agentrl.env.container.engine import (
    Engine,
    EngineError,
    connect,
    engine_errors,
    labels,
    reap,
)
from agentrl.errors import ConfigError, EnvUnavailable
from agentrl.rollout.agent.command import CommandRunner

if TYPE_CHECKING:
    from docker import DockerClient

NETWORK = "agentrl-agents"
"""Made once per engine, and left there."""
START_TIMEOUT_S = 120.0
MAX_STARTING = 4
"""Containers that start at a time; an engine that starts dozens becomes very slow."""


class ContainerRunner(CommandRunner):
    def __init__(self, config: AgentSection, *, max_concurrent: int) -> None:
        """
        Raises:
            ConfigError: the image or the network does not exist, or this machine has no address in
                the network.
            EnvUnavailable: no engine answers.
        """
        image, self._command = config.container or "", config.command
        self._answer = config.answer
        client = connect()
        try:
            with engine_errors():
                settings = client.images.get(image).attrs["Config"]
        except EngineError as error:
            raise ConfigError(
                f"agent.container: no image {image!r} on the Docker engine: `docker pull {image}`, "
                f"or `docker build` it ({error})"
            ) from error
        network = config.network or _own_network(client)
        self.host = _address_in(client, network)
        """Address of this machine, as the containers see it."""
        with engine_errors():
            reap(client)
        client.close()
        # As the image is made to be run; what it writes is thrown away with the container.
        self._spec = ContainerSpec(
            image,
            workdir=settings.get("WorkingDir") or "/",
            user=settings.get("User") or "root",
            read_only=False,
            tmpfs=(),
            network=network,
            memory_mb=config.memory_mb,
        )
        self._engine = Engine()
        self._in_use = asyncio.Semaphore(max_concurrent)
        self._starting = asyncio.Semaphore(MAX_STARTING)

    @asynccontextmanager
    async def _box(self) -> AsyncIterator[Box]:
        """Starts a container, and removes it at the end."""
        async with self._in_use:
            try:
                async with asyncio.timeout(START_TIMEOUT_S), self._starting:
                    container = await Container.create(
                        self._engine, self._spec, labels("agent", "episode")
                    )
            except TimeoutError:
                raise EnvUnavailable(
                    f"no container of {self._spec.image} started within {START_TIMEOUT_S:g} s"
                ) from None
            try:
                yield container
            finally:
                await container.end()


def _own_network(client: DockerClient) -> str:
    from docker.errors import APIError, NotFound

    with engine_errors():
        try:
            client.networks.get(NETWORK)
        except NotFound:
            try:
                client.networks.create(
                    NETWORK,
                    driver="bridge",
                    internal=True,
                    check_duplicate=True,
                    options={"com.docker.network.bridge.enable_icc": "false"},
                )
            except APIError as error:
                if error.status_code != 409:  # another run has just made it
                    raise
    return NETWORK


def _address_in(client: DockerClient, name: str) -> str:
    """Returns this machine's address in a Docker network."""
    try:
        with engine_errors():
            pools = client.networks.get(name).attrs["IPAM"]["Config"] or []
    except EngineError as error:
        raise ConfigError(f"agent.network: {error}") from error
    for pool in pools:
        if gateway := pool.get("Gateway"):
            return gateway.partition("/")[0]
        if subnet := pool.get("Subnet"):  # of a bridge that the engine has just made, without it
            return str(ipaddress.ip_network(subnet)[1])
    raise ConfigError(
        f"agent.network: this machine has no address in {name!r}; name a bridge network, or leave "
        "it out"
    )
