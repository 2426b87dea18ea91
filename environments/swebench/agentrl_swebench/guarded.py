"""Wraps the Docker client that the harness is given: the container it creates gets limits and
labels and is watched.

Every command of the harness runs in the container as the harness wrote it. The container is removed
over the client's connection instead of by two `docker` programs.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from agentrl.env.container.engine import remove
from agentrl.env.container.system_calls import seccomp_options

if TYPE_CHECKING:
    import docker

_CLEAN_UP_S = 30.0
"""Seconds that each request of the clean-up may take, as in the harness' own."""


class GuardedClient:
    """Docker client that adds limits and labels to every container created through it."""

    def __init__(self, client: docker.DockerClient, options: dict[str, Any], watch: Watch) -> None:
        self._client = client
        self.containers = _GuardedContainers(client, options, watch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _GuardedContainers:
    def __init__(self, client: docker.DockerClient, options: dict[str, Any], watch: Watch) -> None:
        self._client = client
        self._options = options
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client.containers, name)

    def create(self, image: str, command: Any = None, **arguments: Any) -> Any:
        if not self._options["sys_admin"]:
            arguments.pop("cap_add", None)
        arguments |= self._options["arguments"]
        sys_admin = "SYS_ADMIN" in (arguments.get("cap_add") or ())
        options = seccomp_options(self._client, sys_admin=sys_admin)
        if options:
            arguments["security_opt"] = [*(arguments.get("security_opt") or ()), *options]
        container = self._client.containers.create(image, command, **arguments)
        self._watch.follow(self._client, str(container.id))
        self._watch.image_id = self._client.images.get(image).id or ""
        return _GuardedContainer(container)


class _GuardedContainer:
    """A container that is removed over the client's connection."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)

    def clean_up(self) -> None:
        """Stops and removes the container. If the engine does not answer, the container is left,
        and a later run finds it by its label."""
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        with contextlib.suppress(DockerException, RequestException, OSError):
            client = self._container.client
            client.api.timeout = _CLEAN_UP_S  # an engine that hangs here must not cost the verdict
            with contextlib.suppress(DockerException):
                # The events show this signal, and so that nobody else killed the container.
                client.api.kill(self._container.id, int(signal.SIGTERM))
            remove(client, self._container.id)


class Watch:
    """Records the engine's events about one container."""

    def __init__(self) -> None:
        self.image_id = ""
        self._events: list[tuple[str, str]] = []
        self._lost = False
        self._over = threading.Event()
        self._followed = False

    def follow(self, client: docker.DockerClient, container_id: str) -> None:
        self._followed = True
        # Opened before the container starts, so that no event is missed.
        stream = client.api.events(filters={"container": [container_id]}, decode=True)
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: Iterator[dict[str, Any]]) -> None:
        from docker.errors import DockerException
        from requests.exceptions import RequestException
        from urllib3.exceptions import HTTPError

        try:
            for event in stream:
                attributes = event.get("Actor", {}).get("Attributes", {})
                self._events.append((event.get("Action", ""), attributes.get("signal", "")))
                if event.get("Action") == "destroy":
                    break
            else:
                self._lost = True
        except (DockerException, RequestException, HTTPError, OSError, ValueError):
            self._lost = True
        self._over.set()

    def end(self, wait_s: float) -> tuple[str, bool]:
        """Returns what ended the container, and whether a process in it ran out of memory.

        Waits at most `wait_s` seconds for the container to be gone.

        Returns:
            The end and the flag. The end is `stopped` (by the harness' own clean-up), `removed`
            (killed or frozen from outside), `died` (its main process was killed from inside),
            `lost` (the connection to the engine broke), or "" (there was no container, or it still
            runs).
        """
        if self._followed:
            self._over.wait(wait_s)
        out_of_memory = any(action == "oom" for action, _ in self._events)
        for action, sent in list(self._events):
            if action == "pause":
                return "removed", out_of_memory
            if action == "kill":
                return ("stopped" if sent == str(int(signal.SIGTERM)) else "removed"), out_of_memory
            if action == "die":
                return "died", out_of_memory
        return ("lost" if self._lost else ""), out_of_memory
