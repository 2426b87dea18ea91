"""Wraps the Docker client that the harness is given: the container it creates gets limits and
labels and is watched.

Every command of the harness runs in the container as the harness wrote it. When the evaluation
script is over, the paths that the tests changed are listed before the harness runs anything else.
The container is removed over the client's connection instead of by two `docker` programs.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import stat
import tarfile
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from agentrl.env.container.engine import remove
from agentrl.env.container.programs import RUNNER_PATH

if TYPE_CHECKING:
    import docker

_SCRIPT_FILE = "/eval.sh"
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
        container = self._client.containers.create(image, command, **arguments)
        self._watch.follow(self._client, str(container.id))
        self._watch.image_id = self._client.images.get(image).id or ""
        return _GuardedContainer(container, self._watch)


class _GuardedContainer:
    """A container that lists what the tests changed in it, if the run is worth a look."""

    def __init__(self, container: Any, watch: Watch) -> None:
        self._container = container
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)

    def put_archive(self, path: str, data: bytes) -> Any:
        if path == "/" and (script := _unpacked(data).get("eval.sh")) is not None:
            self._watch.script = script
        return self._container.put_archive(path, data)

    def exec_run(self, command: Any, **options: Any) -> Any:
        # The harness runs the evaluation script through the engine's own interface, so the first
        # command after the script was put there comes when the tests are over.
        if self._watch.script is not None and self._watch.changed is None:
            if self._watch.worth_a_look():
                self._look()
            else:
                self._watch.changed = set()
        return self._container.exec_run(command, **options)

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

    def _look(self) -> None:
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        with contextlib.suppress(
            DockerException, RequestException, OSError, KeyError, tarfile.TarError
        ):
            changed = {path for path in self._changes() if RUNNER_PATH.fullmatch(path)}
            if self._read_script() != self._watch.script:
                changed.add(_SCRIPT_FILE)
            self._watch.changed = changed

    def _read_script(self) -> bytes | None:
        """Returns the script as it is in the container now; None if it is not a regular file."""
        if layer := self._layer():
            # A link in a container's layer would lead out of it, and a pipe would never end.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            try:
                with open(os.open(layer + _SCRIPT_FILE, flags), "rb") as file:
                    regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                    return file.read(len(self._watch.script or b"") + 1) if regular else None
            except OSError:
                return None
        chunks, _ = self._container.get_archive(_SCRIPT_FILE)
        return _unpacked(b"".join(chunks)).get("eval.sh")

    def _layer(self) -> str:
        """Returns the folder with all that the container changed in its image; "" where this
        process cannot read it."""
        stored = (self._container.attrs.get("GraphDriver") or {}).get("Data") or {}
        layer = stored.get("UpperDir", "")
        return layer if os.access(layer, os.R_OK | os.X_OK) else ""

    def _changes(self) -> Iterator[str]:
        """Yields the paths that differ from the image. Reads the container's layer if it can,
        because the engine compares every file of the image, which takes longer than the tests of a
        small instance."""
        layer = self._layer()
        if not layer:
            yield from (change["Path"] for change in self._container.diff() or [])
            return

        def unseen(error: OSError) -> None:
            raise error  # `_look` then leaves `changed` at None

        for folder, folders, files in os.walk(layer, onerror=unseen):
            for name in (*folders, *files):
                yield os.path.join(folder, name).removeprefix(layer)


def _unpacked(archive: bytes) -> dict[str, bytes]:
    """Returns the regular files of a tar archive by name."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = ((member.name, tar.extractfile(member)) for member in tar.getmembers())
        return {name: file.read() for name, file in files if file is not None}


class Watch:
    """Records the engine's events about one container, and what the tests changed in it."""

    def __init__(self, worth_a_look: Callable[[], bool] = lambda: True) -> None:
        self.worth_a_look = worth_a_look
        """Tells whether the changed paths are needed; called when the tests are over."""
        self.image_id = ""
        self.changed: set[str] | None = None
        """Changed paths that decide how tests run; None if they could not be listed."""
        self.script: bytes | None = None
        """The evaluation script, as it was put into the container."""
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
