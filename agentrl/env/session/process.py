"""Sessions in processes of their own: `Environment.isolation = "process"`.

Threads cannot be stopped and share one heap. A process can be killed, and what it does to itself
(a segmentation fault, `os._exit`, a full memory) is the end of one session only.

    server ── guard ── host ─┬─ tasks     answers get()
                             ├─ session   one episode
                             └─ session   one episode

For every configuration a *host* is started from scratch (`python -m agentrl.env.session.process`).
It imports the class by its name, runs `load_shared` once and forks a child for every session,
which finds everything loaded (copy-on-write) and talks to the server over a Unix socket of its
own: length-prefixed JSON, never pickle. After loading, the host runs no code of the author's, so
it always answers and always kills.

Nothing is left behind. A child leads a process group and adopts what its own children abandon; when
it ends or is killed, the host kills the group and then whatever still falls to it. The *guard*
waits for the end of the host or of the server, SIGKILL included, and kills all that is below it.

What `load_shared` must not do: leave a thread running. A fork copies only the thread that forks,
so the others' locks stay locked for ever in every session. Python threads are therefore refused;
threads of native libraries are logged as a warning. Connections opened there are shared by all
sessions, which garbles them: open those in `reset`.

Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import itertools
import logging
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
from msgspec import Struct
from pydantic import BaseModel

from agentrl.env import protocol, registry
from agentrl.env.base import Environment, describe, load_config
from agentrl.env.protocol import InlineTask, StepReply, WireAction, make_error
from agentrl.env.session.runner import LocalRunner
from agentrl.env.threads import WorkerPool
from agentrl.errors import AgentRLError, ConfigError, DataError, EnvError
from agentrl.types import JSON, Action, Message, StepResult, Task, ToolSpec

logger = logging.getLogger("agentrl.env")

CLOSE_TIMEOUT_S = 30.0
"""Deadline of `close_shared` and of all processes' end after it."""
_SESSION_THREADS = 8
"""Threads for the plain `def` methods of one session: one runs, the rest replaces hung ones."""
_MAX_TRACE = 20_000

# Kinds of frames. The server asks a child, which answers in order; CANCEL has no answer.
_START, _TURN, _SNAPSHOT, _RESTORE, _CLOSE, _GET, _CANCEL = range(1, 8)
_OK, _FAILED = 16, 17
# Between the server and the host.
_SESSION, _TASKS, _KILL, _STOP = range(32, 36)
_LOADED, _EXITED = range(48, 50)

_HEAD = struct.Struct("!IB")


class _Setup(Struct):
    """What a host is told to load."""

    environment: str
    id: str
    config: dict[str, Any]
    sys_path: list[str]


class _Loaded(Struct):
    splits: dict[str, int | None]
    tools: list[dict[str, Any]]
    num_native_threads: int


class _Start(Struct):
    task: InlineTask
    seed: int


class _Turn(Struct):
    action: WireAction
    last: bool


class _Get(Struct):
    split: str
    indices: list[int]


class _Exited(Struct):
    child: int
    how: str
    code: str = "env_error"


class _Failure(Struct):
    """An exception on its way to the server."""

    kind: Literal["config", "data", "env"]
    problem: protocol.Problem
    trace: str = ""


class _Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            size, kind = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield kind, body


def _frame(kind: int, body: bytes = b"") -> bytes:
    return _HEAD.pack(len(body), kind) + body


# The server's side


class ProcessHost:
    """One configuration of an environment, loaded in a host process that forks its sessions.

    Used from one event loop. A host that died is started again by the next call.
    """

    def __init__(
        self,
        environment: type[Environment] | str,
        config: Mapping[str, JSON] | BaseModel | None = None,
    ) -> None:
        """
        Raises:
            ConfigError: `config` is wrong, the class cannot be imported by name, or this is not
                Linux.
        """
        if sys.platform != "linux":
            raise ConfigError(
                "environments with isolation = 'process' need Linux; set isolation = 'thread'"
            )
        if isinstance(environment, str):
            environment = registry.resolve(environment)
        self.environment = environment
        values = load_config(environment, config if config is None else _plain(config))
        self._setup = _Setup(
            _import_name(environment),
            environment.id or environment.__name__,
            values.model_dump(mode="json"),
            [os.path.abspath(path) for path in sys.path],
        )
        self._link: _Link | None = None
        self._tasks: _Child | None = None
        self._tasks_lock = asyncio.Lock()

    async def load(self) -> tuple[dict[str, int | None], list[ToolSpec]]:
        """Start the host, which imports the class and runs `load_shared`; once, unless it died.

        Returns:
            The environment's splits and its tools.

        Raises:
            ConfigError, DataError, EnvError: what loading raised, or how its process died.
        """
        link = await self._loaded()
        tools: Any = link.loaded.result().tools
        return dict(link.loaded.result().splits), tools

    async def get(self, split: str, indices: Iterable[int]) -> list[Task]:
        """Tasks of a split. Calls wait for each other; one that is cancelled is killed."""
        body = protocol.encode(_Get(split, list(indices)))
        async with self._tasks_lock:
            link = await self._loaded()
            if self._tasks is None or self._tasks.ended is not None:
                self._tasks = await link.fork(_TASKS)
            try:
                answer = await self._tasks.ask(_GET, body)
            except asyncio.CancelledError:
                self._tasks.kill()
                self._tasks = None
                raise
        return [protocol.from_inline(t) for t in msgspec.json.decode(answer, type=list[InlineTask])]

    async def runner(self) -> ProcessRunner:
        """Fork a process for one session."""
        link = await self._loaded()
        tools: Any = link.loaded.result().tools
        return ProcessRunner(await link.fork(_SESSION), tools)

    async def aclose(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Kill the sessions, run `close_shared` and end the host, by force after the deadline.

        Raises:
            EnvError: `close_shared` did not end by then. Nothing is left running.
        """
        link, self._link, self._tasks = self._link, None, None
        if link is not None:
            await link.aclose(timeout_s)

    async def _loaded(self) -> _Link:
        link = self._link
        if link is None or link.ended.done() or (link.loaded.done() and link.loaded.exception()):
            link = self._link = _Link(self._setup)
        await asyncio.shield(link.loaded)
        return link


class ProcessRunner:
    """A session in a process of its own; see `agentrl.env.session.runner.Runner`."""

    starts_at_once = False
    closes_at_once = False

    def __init__(self, child: _Child, tools: list[ToolSpec]) -> None:
        self.tools = tools
        self._child = child

    async def start(self, task: Task, seed: int) -> list[Message]:
        spec = protocol.to_task_spec(task).inline
        assert spec is not None
        return msgspec.json.decode(
            await self._child.ask(_START, protocol.encode(_Start(spec, seed)))
        )

    async def turn(self, action: Action, *, last: bool) -> StepResult:
        body = protocol.encode(_Turn(protocol.to_wire_action(action), last))
        reply = protocol.decode_reply(await self._child.ask(_TURN, body), StepReply)
        return protocol.from_step_reply(reply)

    async def snapshot(self) -> bytes:
        return await self._child.ask(_SNAPSHOT)

    async def restore(self, blob: bytes) -> list[Message]:
        return msgspec.json.decode(await self._child.ask(_RESTORE, blob))

    async def close(self) -> None:
        """Run the environment's `close`, then end its process and all that is below it.

        A process that has ended has nothing to close.
        """
        try:
            if self._child.ended is None:
                await self._child.ask(_CLOSE)
        finally:
            self._child.kill()

    def kill(self) -> None:
        """End the process and all that is below it, whatever they are doing."""
        self._child.kill()


class _Child(asyncio.Protocol):
    """The server's end of a forked process. Questions are answered in the order they came."""

    def __init__(self, link: _Link, number: int) -> None:
        self.ended: EnvError | None = None
        """Why there will be no more answers."""
        self._link = link
        self._number = number
        self._frames = _Frames()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._transport: asyncio.Transport | None = None
        self._lost = False
        """The socket has reached its end."""
        self._exited: tuple[str, str] | None = None

    def connection_made(self, transport: Any) -> None:  # uvloop's is no asyncio.Transport
        self._transport = transport

    async def ask(self, kind: int, body: bytes = b"") -> bytes:
        """Send a question and wait for the answer; cancelling the wait cancels what runs there.

        Raises:
            EnvError: what the process answered, or how it died.
        """
        if self.ended is not None:
            raise self.ended
        assert self._transport is not None
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._transport.write(_frame(kind, body))
        try:
            return await future
        except asyncio.CancelledError:
            if self.ended is None:
                self._transport.write(_frame(_CANCEL))
            raise

    def data_received(self, data: bytes) -> None:
        for kind, body in self._frames.feed(data):
            if not self._waiting:  # it broke the protocol: no answer of it can be trusted
                self.kill()
                return
            future = self._waiting.popleft()
            if future.done():  # cancelled
                continue
            if kind == _OK:
                future.set_result(body)
            else:
                future.set_exception(_from_failure(msgspec.json.decode(body, type=_Failure)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._exited is None:  # it ended, or gave up its socket and must end
            self._link.kill(self._number)
        else:
            self.end(*self._exited)

    def on_exit(self, how: str, code: str) -> None:
        """The host has buried it. What it said before may still be in the socket."""
        self._exited = (how, code)
        if self._lost:
            self.end(how, code)

    def kill(self) -> None:
        if self.ended is None:
            self._link.kill(self._number)
            self.end("was killed")

    def end(self, how: str, code: str = "env_error") -> None:
        """Fail what waits for an answer, and what is asked from now on."""
        if self.ended is not None:
            return
        self.ended = make_error(code, f"the process of this session {how}")
        if self._transport is not None:
            self._transport.abort()
        for future in self._waiting:
            if not future.done():
                future.set_exception(self.ended)
        self._waiting.clear()


class _Link:
    """The server's end of a host process."""

    def __init__(self, setup: _Setup) -> None:
        self._loop = asyncio.get_running_loop()
        self._id = setup.id
        self.loaded: asyncio.Future[_Loaded] = self._loop.create_future()
        self.loaded.add_done_callback(lambda future: future.exception())  # perhaps nobody asks
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._frames = _Frames()
        self._outgoing: deque[tuple[memoryview, socket.socket | None]] = deque()
        self._numbers = itertools.count()
        self._children: dict[int, _Child] = {}
        self._control, control = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        environ = {key: each for key, each in os.environ.items() if key != protocol.TOKEN_VARIABLE}
        with control, lifeline:
            fds = (control.fileno(), lifeline.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env=environ,
                start_new_session=True,  # a Ctrl-C in the terminal is the server's to handle
            )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._read)
        self._loop.add_reader(self._pidfd, self._on_end)
        self._send(_frame(0, protocol.encode(setup)))

    async def fork(self, kind: int) -> _Child:
        """A new child. It may still be starting: what it is asked meanwhile waits in its socket."""
        number = next(self._numbers)
        child = self._children[number] = _Child(self, number)
        ours, theirs = socket.socketpair()
        self._send(_frame(kind, str(number).encode()), theirs)
        try:
            await self._loop.create_unix_connection(lambda: child, sock=ours)
        except BaseException:
            ours.close()
            child.kill()
            raise
        return child

    def kill(self, number: int) -> None:
        if number in self._children:
            self._send(_frame(_KILL, str(number).encode()))

    async def aclose(self, timeout_s: float) -> None:
        for child in list(self._children.values()):
            child.kill()
        late = False
        try:
            if self.loaded.done() and not self.ended.done():
                self._send(_frame(_STOP))
                await asyncio.wait({self.ended}, timeout=timeout_s)
                late = not self.ended.done()
        finally:
            self._lifeline.close()  # the guard then kills all
        await self.ended
        if late:
            raise make_error("env_error", f"close_shared() of '{self._id}' ran out of time")

    def _send(self, data: bytes, descriptor: socket.socket | None = None) -> None:
        if self.ended.done():
            if descriptor is not None:
                descriptor.close()
            return
        self._outgoing.append((memoryview(data), descriptor))
        if len(self._outgoing) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            data, descriptor = self._outgoing[0]
            try:
                # The descriptor travels with the first byte.
                fds = [] if descriptor is None else [descriptor.fileno()]
                sent = socket.send_fds(self._control, [data], fds)
            except BlockingIOError:
                self._loop.add_writer(self._control, self._flush)
                return
            except OSError:  # the host is gone, which `_on_end` is about to hear
                sent = len(data)
            if descriptor is not None:
                descriptor.close()
            if sent < len(data):
                self._outgoing[0] = (data[sent:], None)
            else:
                self._outgoing.popleft()
        self._loop.remove_writer(self._control)

    def _read(self) -> None:
        try:
            data = self._control.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._control)
            return
        for kind, body in self._frames.feed(data):
            if kind == _LOADED:
                loaded = msgspec.json.decode(body, type=_Loaded)
                if loaded.num_native_threads:
                    logger.warning(
                        "environment '%s': libraries it loaded run %d threads of their own, which "
                        "its sessions, being forks, do not have; if they hang, set their number "
                        "of threads to 1 (OMP_NUM_THREADS=1) or load them in reset",
                        self._id,
                        loaded.num_native_threads,
                    )
                self.loaded.set_result(loaded)
            elif kind == _FAILED:
                failure = msgspec.json.decode(body, type=_Failure)
                self.loaded.set_exception(_from_failure(failure))
            else:
                exited = msgspec.json.decode(body, type=_Exited)
                child = self._children.pop(exited.child, None)
                if child is not None:
                    child.on_exit(exited.how, exited.code)

    def _on_end(self) -> None:
        """The guard has ended, so nothing below it lives."""
        if self._loop.remove_reader(self._control):
            self._read()  # what it still said
            self._loop.remove_reader(self._control)
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_writer(self._control)
        os.close(self._pidfd)
        status = self._process.wait()
        self._control.close()
        self._lifeline.close()
        for _, descriptor in self._outgoing:
            if descriptor is not None:
                descriptor.close()
        self._outgoing.clear()
        how = _how_ended(status)
        if status:
            logger.warning("the host process of environment '%s' %s", self._id, how)
        self.ended.set_result(None)
        for child in list(self._children.values()):
            child.end(f"was lost: its host {how}")
        self._children.clear()
        if not self.loaded.done():
            error = make_error("env_error", f"the process that loads '{self._id}' {how}")
            self.loaded.set_exception(error)


def _plain(config: Mapping[str, JSON] | BaseModel) -> dict[str, JSON] | BaseModel:
    return config if isinstance(config, BaseModel) else dict(config)


def _import_name(environment: type[Environment]) -> str:
    """What `registry.resolve` finds the class by in another process."""
    if "." in environment.__qualname__:
        raise ConfigError(
            f"{environment.__qualname__} is defined inside a function or class, where its own "
            "process cannot import it; move it to the top of its module"
        )
    module = environment.__module__
    if module != "__main__":
        with contextlib.suppress(ValueError):
            if importlib.util.find_spec(module) is not None:
                return f"{module}:{environment.__name__}"
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise ConfigError(
            f"{environment.__name__} stands in no file, so its own process cannot import it"
        )
    return f"{Path(file).resolve()}:{environment.__name__}"


def _from_failure(failure: _Failure) -> AgentRLError:
    if failure.trace:
        logger.error("%s\n%s", failure.problem.detail, failure.trace)
    if failure.kind == "config":
        return ConfigError(failure.problem.detail)
    if failure.kind == "data":
        return DataError(failure.problem.detail)
    return protocol.from_problem(failure.problem)


def _to_failure(error: BaseException, env_id: str, task: Task | None) -> _Failure:
    """What an author's exception is on the other side: the same as in the server's process."""
    kind: Literal["config", "data", "env"] = "env"
    trace = ""
    if isinstance(error, EnvError):
        known = error
    elif isinstance(error, AgentRLError):
        if isinstance(error, ConfigError | DataError):
            kind = "config" if isinstance(error, ConfigError) else "data"
        known = make_error("env_error", str(error))
    else:
        known = make_error("env_error", f"'{env_id}' raised {describe(error, task)}")
        trace = "".join(traceback.format_exception(error))[-_MAX_TRACE:]
    return _Failure(kind, protocol.to_problem(known), trace)


def _how_ended(status: int) -> str:
    """In words, from a status of `subprocess` or `os.waitstatus_to_exitcode`."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"died of {signal.Signals(-status).name}"
    except ValueError:
        return f"died of signal {-status}"


# The guard


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _children() -> list[int]:
    """Processes whose parent is this one, ended ones that were not waited for included."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main(control_fd: int, lifeline_fd: int) -> NoReturn:
    """Be the guard of a host, which this forks; ends as the host ended, when nothing is left.

    Args:
        control_fd: the host's socket to the server.
        lifeline_fd: a socket that the server closes to end everything.
    """
    watched = [lifeline_fd]
    with contextlib.suppress(ProcessLookupError):  # the server has ended: the lifeline says so
        watched.append(os.pidfd_open(os.getppid()))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    host = os.fork()
    if host == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in watched:
            os.close(descriptor)
        with socket.socket(fileno=control_fd) as control:
            _leave(_host(control))
    os.close(control_fd)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the server, and not before
    poll = select.poll()
    for descriptor in (*watched, os.pidfd_open(host)):
        poll.register(descriptor, select.POLLIN)
    poll.poll()
    status = -signal.SIGKILL
    while True:
        for pid in _children():
            _kill(pid)
        try:
            pid, raw = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if pid == host:
            status = os.waitstatus_to_exitcode(raw)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL cannot be set, nor needs it
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _leave(status: int) -> NoReturn:
    """End a forked process without what its parent registered for the end."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


# The host


def _host(control: socket.socket) -> int:
    """Load what the server asks for, then fork on demand. Returns the exit status."""
    faulthandler.enable()  # where a segmentation fault happened is told in the log
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    frames = _Frames()
    setup = None
    while setup is None:
        data = control.recv(2**16)
        if not data:
            return 0
        for _, body in frames.feed(data):
            setup = msgspec.json.decode(body, type=_Setup)
    try:
        source, loaded = _load(setup)
    except (Exception, SystemExit) as error:  # the author's, carried to the server's boundary
        failure = _to_failure(error, setup.id, None)
        control.sendall(_frame(_FAILED, msgspec.json.encode(failure)))
        return 0
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, what the children share
    control.sendall(_frame(_LOADED, msgspec.json.encode(loaded)))
    return _Forks(control, frames, source).serve()


def _load(setup: _Setup) -> tuple[Environment, _Loaded]:
    sys.path[:] = setup.sys_path
    num_threads = _num_threads()
    environment = registry.resolve(setup.environment)
    environment.id = setup.id
    config = load_config(environment, setup.config)
    source = environment(config, shared=environment.load_shared(config))
    tools: Any = [tool.spec for tool in source._tools.values()]
    splits = dict(source.splits())
    others = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    if others:
        raise ConfigError(
            f"importing or loading '{setup.id}' left threads running ({', '.join(others)}), which "
            "its sessions, being forks, would not have; start them in reset, or set isolation = "
            "'thread'"
        )
    return source, _Loaded(splits, tools, max(_num_threads() - num_threads, 0))


def _num_threads() -> int:
    """Threads of this process, those Python knows nothing of included."""
    return len(os.listdir("/proc/self/task"))


class _Forks:
    """The host's loop: forks, kills, and buries what ended."""

    def __init__(self, control: socket.socket, frames: _Frames, source: Environment) -> None:
        self._control = control
        self._frames = frames
        self._source = source
        self._descriptors: deque[int] = deque()
        self._pids: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        """By process, the number the server knows it by."""

    def serve(self) -> int:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # A child's end must wake the loop below, which no handler of Python's would.
        self._wakeup, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._inherited = (self._wakeup, wakeup, self._control.fileno())
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 2**16)
                self._reap()
            if self._control.fileno() not in ready:
                continue
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._control, 2**16, 8, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionResetError:
                data, descriptors = b"", []
            if not data:  # the server is gone
                return 0
            self._descriptors += descriptors
            for kind, body in self._frames.feed(data):
                if kind == _STOP:
                    return self._stop()
                if kind == _KILL:
                    self._kill(int(body))
                else:
                    self._fork(kind, int(body))

    def _fork(self, kind: int, number: int) -> None:
        with socket.socket(fileno=self._descriptors.popleft()) as connection:
            sys.stdout.flush()
            sys.stderr.flush()
            try:
                pid = os.fork()
            except OSError as error:
                how = f"could not be started: {error.strerror}"
                self._report(_Exited(number, how, "unavailable"))
                return
            if pid == 0:
                self._become_child(kind, connection)
            self._pids[number], self._numbers[pid] = pid, number

    def _become_child(self, kind: int, connection: socket.socket) -> NoReturn:
        status = 1
        try:
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in self._inherited:
                os.close(descriptor)
            _limit_memory(self._source.memory_mb)
            if kind == _TASKS:
                _answer_tasks(self._source, connection)
            else:
                asyncio.run(_play(self._source, connection))
            status = 0
        except BaseException:  # nothing may return into the host's loop
            traceback.print_exc()
        _leave(status)

    def _kill(self, number: int) -> None:
        pid = self._pids.get(number)
        if pid is not None:
            _kill(pid)  # the rest of its group goes when it is buried

    def _reap(self) -> None:
        """Bury what has ended, and what that leaves behind."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                break
            number = self._numbers.pop(ended.si_pid, None)
            if number is not None:
                # Not waited for yet, so the group's number cannot belong to anybody else.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(ended.si_pid, signal.SIGKILL)
            _, raw = os.waitpid(ended.si_pid, 0)
            if number is not None:
                del self._pids[number]
                self._report(_Exited(number, _how_ended(os.waitstatus_to_exitcode(raw))))
        for pid in _children():
            if pid not in self._numbers:
                _kill(pid)

    def _report(self, exited: _Exited) -> None:
        self._control.sendall(_frame(_EXITED, msgspec.json.encode(exited)))

    def _stop(self) -> int:
        for pid in self._numbers:
            _kill(pid)
        while self._numbers:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            self._reap()
        try:
            type(self._source).close_shared(self._source.shared)
        except (Exception, SystemExit):  # the author's; nobody waits for it any more
            logger.exception("close_shared of environment '%s' failed", self._source.id)
        return 0


def _limit_memory(memory_mb: int | None) -> None:
    """Let this process have so much more address space than it was forked with."""
    if memory_mb is None:
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# The children


def _answer_tasks(source: Environment, connection: socket.socket) -> None:
    frames = _Frames()
    while data := connection.recv(2**16):
        for _, body in frames.feed(data):
            connection.sendall(_frame(*_get_tasks(source, body)))


def _get_tasks(source: Environment, body: bytes) -> tuple[int, bytes]:
    request = msgspec.json.decode(body, type=_Get)
    try:
        tasks = [source.get(request.split, index) for index in request.indices]
        specs = [protocol.to_task_spec(task).inline for task in tasks]
        return _OK, protocol.encode(specs)
    except (Exception, SystemExit) as error:  # the author's, carried to the server's boundary
        return _FAILED, msgspec.json.encode(_to_failure(error, source.id, None))


async def _play(source: Environment, connection: socket.socket) -> None:
    """One session: answer the server until it closes the session or the connection."""
    environment = type(source)(source.config, shared=source.shared)
    environment._workers = WorkerPool(_SESSION_THREADS, max_abandoned=_SESSION_THREADS)
    questions: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    player = _Player(environment, LocalRunner(environment))
    line = _Line(questions, player)
    await asyncio.get_running_loop().create_unix_connection(lambda: line, sock=connection.dup())
    kind = 0
    while kind != _CLOSE:
        kind, body = await questions.get()
        line.send(*await player.answer(kind, body))


class _Line(asyncio.Protocol):
    """The session's end of its socket."""

    def __init__(self, questions: asyncio.Queue[tuple[int, bytes]], player: _Player) -> None:
        self._questions = questions
        self._player = player
        self._frames = _Frames()

    def connection_made(self, transport: Any) -> None:  # uvloop's is no asyncio.Transport
        self._transport = transport

    def send(self, kind: int, body: bytes) -> None:
        self._transport.write(_frame(kind, body))

    def data_received(self, data: bytes) -> None:
        for kind, body in self._frames.feed(data):
            if kind == _CANCEL:
                self._player.cancel()
            else:
                self._questions.put_nowait((kind, body))

    def connection_lost(self, exc: Exception | None) -> None:
        _leave(0)  # the server gave the session up


class _Player:
    """Runs what the server asks of a session, one question at a time."""

    def __init__(self, environment: Environment, runner: LocalRunner) -> None:
        self._environment = environment
        self._runner = runner
        self._task: Task | None = None
        self._running: asyncio.Task[bytes] | None = None

    def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def answer(self, kind: int, body: bytes) -> tuple[int, bytes]:
        self._running = asyncio.get_running_loop().create_task(self._run(kind, body))
        env_id = self._environment.id
        try:
            return _OK, await self._running
        except asyncio.CancelledError:
            error: BaseException = make_error("env_error", f"'{env_id}' cancelled its own call")
        except (Exception, SystemExit) as raised:  # carried to the server's session boundary
            error = raised
        finally:
            self._running = None
        return _FAILED, msgspec.json.encode(_to_failure(error, env_id, self._task))

    async def _run(self, kind: int, body: bytes) -> bytes:
        if kind == _START:
            start = msgspec.json.decode(body, type=_Start)
            self._task = protocol.from_inline(start.task)
            return protocol.encode(await self._runner.start(self._task, start.seed))
        if kind == _TURN:
            turn = msgspec.json.decode(body, type=_Turn)
            action = protocol.from_wire_action(turn.action)
            result = await self._runner.turn(action, last=turn.last)
            return protocol.encode(protocol.to_step_reply(result, 0))
        if kind == _SNAPSHOT:
            return await self._runner.snapshot()
        if kind == _RESTORE:
            return protocol.encode(await self._runner.restore(body))
        await self._runner.close()
        return b""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
