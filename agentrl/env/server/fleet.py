"""Several worker processes behind one port: `agentrl env serve --workers N`.

    client ── parent ──(socket)──> worker 0   sessions 0-...
                     ──(socket)──> worker 1   sessions 1-...

The parent accepts a connection, looks at its first line without taking it from the socket, and
hands the socket itself to a worker (SCM_RIGHTS): that of the session the request names, or of
`/v1/ws?worker=n`, else the next in turn. From then on the parent has no part in it, so a step costs
what it costs with one process.

A kept-alive connection may go on with something of another worker. A request is then forwarded over
that worker's Unix socket, see `forwarding`; a WebSocket, which lasts, is given back to the parent,
connection and all, and so to its worker.

A worker that dies is started again; what it held is `session_lost`. The parent runs no code of an
environment's author beyond what importing it runs, and its own end, by SIGKILL too, is the end of
the workers. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from msgspec import Struct

from agentrl.env import protocol
from agentrl.env.server import app as server
from agentrl.env.server.forwarding import Forwarding
from agentrl.env.server.limits import LimitedProtocol
from agentrl.env.session.manager import SessionManager
from agentrl.errors import ConfigError
from agentrl.types import JSON

logger = logging.getLogger("agentrl.env")

PEEK_TIMEOUT_S = 1.0
"""A connection that has not sent its first line by then goes to the next worker in turn, which
forwards where it must and has deadlines of its own for slow requests."""
KILL_AFTER_S = 15.0
"""A worker that was told to end, or has lost its parent, is killed after so long."""
_PEEK_BYTES = 4096
_MAX_RESTART_DELAY_S = 10.0
_MAX_WAITING = 1024
"""Connections that wait for a worker which is being started again."""
_MAX_MESSAGE = 2**17
"""More than the largest head of a request."""
_READY, _CONNECTION = b"r", b"c"
_TARGET = re.compile(rb"[A-Z]+ /v1/(?:sessions/(\d+)-|ws\?(?:[^ ]*&)?worker=(\d+)\b)")


class _Setup(Struct):
    """What a worker is told."""

    environments: list[str]
    token: str | None
    loopback_only: bool
    max_sessions: int | None
    worker_threads: int
    max_body_bytes: int
    config: dict[str, dict[str, Any]]
    drain_s: float
    secret: bytes
    folder: str
    """Of the workers' Unix sockets."""
    num_workers: int
    worker: int = 0
    incarnation: int = 0


def serve_fleet(
    environments: Sequence[str],
    *,
    num_workers: int,
    host: str = "127.0.0.1",
    port: int = 8700,
    token: str | None = None,
    max_sessions: int | None = None,
    worker_threads: int = 32,
    max_body_bytes: int = server.MAX_BODY_BYTES,
    config: Mapping[str, Mapping[str, JSON]] | None = None,
    drain_s: float = server.DRAIN_S,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT, which stops the workers, or SIGTERM, which drains them first.

    Args:
        environments: names for `agentrl.env.registry.resolve`, which every worker imports.
        num_workers: processes, at least 1.
        port: 0 takes a free one.
        max_sessions: live sessions of all workers together; each takes an equal share.
        worker_threads: of each worker.
        max_body_bytes: larger requests and WebSocket messages are refused.
        config: by environment id, what every session's configuration starts from.
        drain_s: how long open sessions may go on after SIGTERM.
        ready: called with the server's URL once every worker answers.

    Raises:
        ConfigError: the address is in use or needs a token, this is not Linux, or a worker ended
            while it started.
    """
    if sys.platform != "linux":
        raise ConfigError("several workers need Linux; leave --workers out")
    if not token and not server.is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines: give --token or set "
            f"{protocol.TOKEN_VARIABLE}, or bind --host 127.0.0.1"
        )
    with (
        server.listen(host, port) as listener,
        tempfile.TemporaryDirectory(prefix="agentrl-workers-") as folder,
    ):
        setup = _Setup(
            environments=list(environments),
            token=token,
            loopback_only=server.is_loopback(host),
            max_sessions=max_sessions and -(-max_sessions // num_workers),
            worker_threads=worker_threads,
            max_body_bytes=max_body_bytes,
            config={name: dict(values) for name, values in (config or {}).items()},
            drain_s=drain_s,
            secret=secrets.token_bytes(32),
            folder=folder,
            num_workers=num_workers,
        )
        asyncio.run(_Parent(listener, setup, ready).run())


class _Parent:
    """Accepts, hands over, and keeps the workers alive."""

    def __init__(
        self, listener: socket.socket, setup: _Setup, ready: Callable[[str], None] | None
    ) -> None:
        self._listener = listener
        self._ready = ready
        self._drain_s = setup.drain_s
        self._workers = [
            _Worker(setup, number, self._changed, self._give) for number in range(setup.num_workers)
        ]
        self._event = asyncio.Event()
        self._next = 0
        self._ending = False
        self._peeked: dict[socket.socket, asyncio.TimerHandle] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, number)
        try:
            for worker in self._workers:
                worker.start()
            await self._until(
                lambda: all(worker.is_ready or not worker.is_alive for worker in self._workers)
            )
            failures = [worker.failure for worker in self._workers if worker.failure]
            if failures and not self._ending:
                raise ConfigError(failures[0])
            if not self._ending:
                self._listener.setblocking(False)
                loop.add_reader(self._listener, self._accept)
                if self._ready is not None:
                    host, port = self._listener.getsockname()[:2]
                    self._ready(
                        f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                    )
            # While the workers drain, connections still go to them: open sessions go on.
            await self._until(lambda: all(not worker.is_alive for worker in self._workers))
        finally:
            loop.remove_reader(self._listener)
            for connection, timer in self._peeked.items():
                timer.cancel()
                loop.remove_reader(connection)
                connection.close()
            for worker in self._workers:
                worker.kill()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._event.wait()
            self._event.clear()

    def _changed(self, worker: _Worker) -> None:
        """A worker became ready or ended."""
        self._event.set()

    def _end(self, number: int) -> None:
        if not self._ending:
            self._ending = True
            delay_s = KILL_AFTER_S + (self._drain_s if number == signal.SIGTERM else 0.0)
            for worker in self._workers:
                asyncio.get_running_loop().call_later(delay_s, worker.kill)
        for worker in self._workers:
            worker.end(number)
        self._event.set()

    # Connections

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(64):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # out of file descriptors
                logger.error("cannot accept connections: %s", error.strerror)
                loop.remove_reader(self._listener)
                loop.call_later(1.0, loop.add_reader, self._listener, self._accept)
                return
            connection.setblocking(False)
            self._peeked[connection] = loop.call_later(
                PEEK_TIMEOUT_S, self._hand_over, connection, None
            )
            loop.add_reader(connection, self._peek, connection)

    def _peek(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            data = connection.recv(_PEEK_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(connection)
            connection.close()
        elif b"\n" in data or len(data) == _PEEK_BYTES:
            match = _TARGET.match(data)
            self._hand_over(connection, int(match[1] or match[2]) if match else None)
        else:  # the rest is on its way, and what is there would be reported again and again
            loop.remove_reader(connection)
            loop.call_later(0.02, self._peek_again, connection)

    def _peek_again(self, connection: socket.socket) -> None:
        if connection in self._peeked:
            asyncio.get_running_loop().add_reader(connection, self._peek, connection)

    def _give(self, connection: socket.socket, target: int, data: bytes) -> None:
        """Take a connection back from a worker, with what it read, for another one."""
        self._workers[target].hand_over(connection, data)

    def _forget(self, connection: socket.socket) -> None:
        self._peeked.pop(connection).cancel()
        asyncio.get_running_loop().remove_reader(connection)

    def _hand_over(self, connection: socket.socket, target: int | None) -> None:
        self._forget(connection)
        if target is None or target >= len(self._workers):
            ready = [worker for worker in self._workers if worker.is_ready] or self._workers
            self._next += 1
            worker = ready[self._next % len(ready)]
        else:
            worker = self._workers[target]
        worker.hand_over(connection)


class _Worker:
    """The parent's side of one worker, over all its incarnations."""

    def __init__(
        self,
        setup: _Setup,
        number: int,
        changed: Callable[[_Worker], None],
        give: Callable[[socket.socket, int, bytes], None],
    ) -> None:
        self.is_ready = False
        self.is_alive = True
        """It runs, or will again."""
        self.failure: str | None = None
        """Why it never came to serve."""
        self._setup = msgspec.structs.replace(setup, worker=number)
        self._changed = changed
        self._give = give
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._waiting: deque[tuple[socket.socket, bytes]] = deque()
        self._ending = False
        self._was_ready = False
        self._deaths: deque[float] = deque(maxlen=8)
        self._restart: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = os.memfd_create("setup")
        os.write(setup, msgspec.msgpack.encode(self._setup))
        os.lseek(setup, 0, os.SEEK_SET)
        fds = (theirs.fileno(), setup)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
        )
        theirs.close()
        os.close(setup)
        channel.setblocking(False)
        self._channel = channel
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(channel, self._read)
        loop.add_reader(self._pidfd, self._on_end)

    def hand_over(self, connection: socket.socket, data: bytes = b"") -> None:
        """Give the connection to the worker now, or when it is there again.

        Args:
            data: what was read from it.
        """
        if not self.is_alive or len(self._waiting) >= _MAX_WAITING:
            connection.close()
            return
        self._waiting.append((connection, data))
        if self.is_ready and len(self._waiting) == 1:
            self._flush()

    def end(self, number: int) -> None:
        """Pass a signal on that ends it; it is not started again."""
        self._ending = True
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
            self._gone()
        elif self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        self._ending = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            self._on_end()

    def _flush(self) -> None:
        assert self._channel is not None
        loop = asyncio.get_running_loop()
        while self._waiting and self.is_ready:
            connection, data = self._waiting[0]
            try:
                socket.send_fds(self._channel, [_CONNECTION, data], [connection.fileno()])
            except BlockingIOError:
                loop.add_writer(self._channel, self._flush)
                return
            except (BrokenPipeError, ConnectionResetError):
                return  # it is dead, and the connection waits for its successor
            except OSError as error:  # too many sockets under way
                logger.error("cannot hand a connection over: %s", error.strerror)
            self._waiting.popleft()
            connection.close()
        loop.remove_writer(self._channel)

    def _read(self) -> None:
        assert self._channel is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._channel, _MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if descriptors:
            target = int.from_bytes(data[1:5], "big")
            self._give(socket.socket(fileno=descriptors[0]), target, data[5:])
        elif data:
            self.is_ready = self._was_ready = True
            self._changed(self)
            self._flush()
        else:
            asyncio.get_running_loop().remove_reader(self._channel)

    def _on_end(self) -> None:
        assert self._process is not None and self._channel is not None
        loop = asyncio.get_running_loop()
        status = self._process.wait()
        loop.remove_reader(self._pidfd)
        loop.remove_reader(self._channel)
        loop.remove_writer(self._channel)
        os.close(self._pidfd)
        self._channel.close()
        self.is_ready = False
        if self._ending:
            self._gone()
            return
        if not self._was_ready:
            self.failure = (
                f"worker {self._setup.worker} ended with status {status} while it started; its "
                "message stands above"
            )
            self._gone()
            return
        now = time.monotonic()
        self._deaths.append(now)
        recent = sum(now - death < 60 for death in self._deaths)
        delay_s = 0.0 if recent == 1 else min(0.1 * 2**recent, _MAX_RESTART_DELAY_S)
        logger.error(
            "worker %d ended with status %d and loses its sessions; it starts again%s",
            self._setup.worker,
            status,
            f" in {delay_s:g} s" if delay_s else "",
        )
        self._setup.incarnation += 1
        self._restart = loop.call_later(delay_s, self._start_again)

    def _start_again(self) -> None:
        self._restart = None
        self.start()

    def _gone(self) -> None:
        self.is_alive = False
        while self._waiting:
            self._waiting.popleft()[0].close()
        self._changed(self)


# The worker


def main(channel_fd: int, setup_fd: int) -> None:
    """Serve what the parent hands over, until it says so or is gone."""
    with open(setup_fd, "rb") as file:
        setup = msgspec.msgpack.decode(file.read(), type=_Setup)
    channel = socket.socket(fileno=channel_fd)
    parent = os.pidfd_open(os.getppid())
    threading.Thread(target=_end_with, args=(parent,), name="agentrl-parent", daemon=True).start()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s [worker {setup.worker}] %(message)s",
    )
    # Ids begin with it; the second number tells those of an earlier incarnation.
    worker_id: Any = f"{setup.worker}-{setup.incarnation}"
    app = server.make_app(
        setup.environments,
        token=setup.token,
        loopback_only=setup.loopback_only,
        max_sessions=setup.max_sessions,
        worker_threads=setup.worker_threads,
        max_body_bytes=setup.max_body_bytes,
        config=setup.config,
        worker=worker_id,
        num_workers=setup.num_workers,
        secret=setup.secret,
    )
    config = server.uvicorn_config(app)
    forwarding = Forwarding(
        app,
        worker=setup.worker,
        incarnation=setup.incarnation,
        num_workers=setup.num_workers,
        folder=Path(setup.folder),
    )
    config.app = forwarding
    path = forwarding.path(setup.worker)
    serving = _WorkerServer(config, app.manager, setup, channel, path)
    server.settle_memory()
    with channel, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serving.serve(sockets=[]))


def _end_with(parent: int) -> None:
    """Wait for the parent's end, then end this process, by force if it takes long.

    The socket to the parent says the same to an event loop that runs; this is for one that hangs.
    """
    select.select([parent], [], [])
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(KILL_AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)


class _WorkerServer(server._Server):
    """Serves connections that were accepted elsewhere, and its Unix socket."""

    def __init__(
        self,
        config: uvicorn.Config,
        manager: SessionManager,
        setup: _Setup,
        channel: socket.socket,
        path: Path,
    ) -> None:
        super().__init__(config, manager, setup.drain_s)
        self._setup = setup
        self._channel = channel
        self._path = path
        self._connecting: set[asyncio.Task[Any]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._path.unlink(missing_ok=True)  # of an earlier incarnation
        self.servers.append(await self._loop.create_unix_server(self._protocol, self._path))
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel, self._receive)
        self._channel.send(_READY)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop.remove_reader(self._channel)
        await super().shutdown(sockets)

    def _protocol(self) -> _Connection:
        """What uvicorn gives the connections it accepts itself."""
        connection = _Connection(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        connection.give_away = self._give_away
        return connection

    def _give_away(self, transport: asyncio.Transport, target: int, data: bytes) -> bool:
        """Return a connection, with what was read from it, to the parent, if it is not for here."""
        if target == self._setup.worker or target >= self._setup.num_workers:
            return False
        descriptor = transport.get_extra_info("socket").fileno()
        try:
            message = [_CONNECTION, target.to_bytes(4, "big"), data]
            socket.send_fds(self._channel, message, [descriptor])
        except OSError:  # the parent is busy: then its frames are forwarded
            return False
        transport.abort()
        return True

    def _receive(self) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._channel, _MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:  # the parent is gone
                self._loop.remove_reader(self._channel)
                self.should_exit = True
                return
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                with contextlib.suppress(OSError):  # asyncio sets it for what it accepts itself
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                task = self._loop.create_task(self._serve_connection(connection, data[1:]))
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)

    async def _serve_connection(self, connection: socket.socket, data: bytes) -> None:
        try:
            _, serving = await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client went away meanwhile
            connection.close()
            return
        if data:
            serving.data_received(data)


class _Connection(LimitedProtocol):
    """A connection whose next request may be a WebSocket to another worker."""

    give_away: Callable[[asyncio.Transport, int, bytes], bool]

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET /v1/ws?") and (match := _TARGET.match(data)):
            between = self.cycle is None or self.cycle.response_complete
            whole = data.endswith(b"\r\n\r\n")
            if between and whole and self.give_away(self.transport, int(match[2]), data):
                return
        super().data_received(data)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
