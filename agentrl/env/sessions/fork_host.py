"""The host of `isolation = "process"`: loads an environment once and forks its sessions.

`process.ProcessHost` runs it as `python -m agentrl.env.sessions.fork_host DESCRIPTOR`, with a
`Setup` on standard input. It imports the class by its name, runs `load_shared` and forks a process
for every session, which finds everything loaded (copy-on-write). After loading, the host runs none
of the author's code but `close_shared`, so it always kills what it is told to.

Nothing is left behind, whichever process is killed. When the server shuts down a session's socket,
as the end of the server does with all of them, the host kills the session's process group. What had
left the group falls to the host, the nearest "subreaper" (see prctl(2)), and is killed, too.

What `load_shared` must not do: leave a thread running. A fork copies only the thread that forks,
so the others' locks stay locked for ever in every session. Python's threads are therefore refused;
a native library's are better set to one (OMP_NUM_THREADS=1). Connections opened there are shared
by all sessions, which garbles them: open those in `reset`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import inspect
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from agentrl.env import registry
from agentrl.env.base import Environment, load_config
from agentrl.env.episode import tools_before_reset
from agentrl.env.protocol import Problem, decode, encode, make_error, to_problem
from agentrl.env.sessions.boundary import to_env_error
from agentrl.env.sessions.runner import LocalRunner
from agentrl.errors import ConfigError, EnvError
from agentrl.types import JSON, Action, Message, StepResult, Task, ToolSpec

FORK, STOP = b"fork", b"stop"
"""What the server tells the host: fork a session, whose socket comes along; close and end."""
MAX_LINE = 2**30
"""Bytes of a request or an answer."""


@dataclass(slots=True)
class Setup:
    """What a host is told to load."""

    environment: str
    """For `registry.resolve`."""
    id: str
    config: dict[str, JSON]
    sys_path: list[str]


@dataclass(slots=True)
class Request:
    """What the server asks of a session's process."""

    call: Literal["describe", "get", "start", "turn", "close"]
    split: str = ""
    indices: list[int] = field(default_factory=list)
    task: Task | None = None
    seed: int = 0
    action: Action | None = None
    last: bool = False


@dataclass(slots=True)
class Answer:
    """The field that was asked for, or a problem."""

    splits: dict[str, int | None] | None = None
    tasks: list[Task] | None = None
    messages: list[Message] | None = None
    result: StepResult | None = None
    tools: list[ToolSpec] | None = None
    """What the agent is offered now; None: the same as before."""
    problem: Problem | None = None
    ended: bool = False
    """The process has ended, as `problem` says. This comes from the host."""


def how_ended(status: int) -> str:
    """In words, from a status of `subprocess` or `os.waitstatus_to_exitcode`."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"died of {signal.Signals(-status).name}"
    except ValueError:
        return f"died of signal {-status}"


def main(control_fd: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _leave_a_guard(control_fd)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # while the author's code runs
    faulthandler.enable()  # where a segmentation fault happened is told in the log
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    setup = decode(sys.stdin.buffer.read(), Setup)
    with socket.socket(fileno=control_fd) as control:
        try:
            environment, loaded = _load(setup)
        except (Exception, SystemExit) as error:  # the author's, for the server's boundary
            _, (descriptor, *_), _, _ = socket.recv_fds(control, 64, 1)
            with socket.socket(fileno=descriptor) as connection:
                _send_last(connection, to_env_error(error, setup.id))
            return
        decode(encode(Request("describe")), Request)  # pydantic's reader is made once, not per fork
        gc.collect()
        gc.freeze()  # the collector would touch, and so copy, what the sessions share
        _prctl(_PR_SET_PDEATHSIG, 0)  # it outlives the server, to kill what is left
        if _Forks(control, environment, loaded).serve():
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            type(environment).close_shared(environment.shared)


def _leave_a_guard(control_fd: int) -> None:
    """Return in a child of this process, which is the host from then on.

    This process stays as the next subreaper: where the host is killed, what its sessions had
    started falls to it and is killed. It ends as the host did. (Where it is killed itself, the
    server lets go of the host, which then ends as it does after the server's own end.)
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    host = os.fork()
    if host == 0:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)  # until it serves
        return
    os.close(control_fd)
    _, status = os.waitpid(host, 0)
    while children := _children():
        for pid in children:
            _kill(pid)
        os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _load(setup: Setup) -> tuple[Environment, Answer]:
    sys.path[:] = setup.sys_path
    cls = registry.resolve(setup.environment)
    cls.id = setup.id
    config = load_config(cls, setup.config)
    if inspect.iscoroutinefunction(cls.load_shared):
        raise ConfigError(f"with isolation = 'process', load_shared of '{setup.id}' must be `def`")
    environment = cls(config, shared=cls.load_shared(config))
    loaded = Answer(splits=dict(environment.splits()), tools=tools_before_reset(environment))
    others = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    if others:
        raise ConfigError(
            f"importing or loading '{setup.id}' left threads running ({', '.join(others)}), which "
            "its sessions, being forks, would not have; start them in reset, or set isolation = "
            "'thread'"
        )
    return environment, loaded


class _Forks:
    """The loop of a host: forks, kills, and waits for what has ended."""

    def __init__(self, control: socket.socket, environment: Environment, loaded: Answer) -> None:
        self._control = control
        self._environment = environment
        self._loaded = loaded
        self._sessions: dict[int, socket.socket] = {}
        """By process, its end of the connection: to notice that the server shut down the other,
        and to say how the process ended."""
        self._poll = select.poll()

    def serve(self) -> bool:
        """Serve the server until it says stop (True) or is gone; no child is left then."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # A child's end must wake the poll below, which no handler of Python's would.
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._wakeup[0], select.POLLIN)
        message = FORK
        while message == FORK or _children():
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if self._wakeup[0] in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup[0], 2**16)
            if self._control.fileno() in ready:
                message = self._read_message()
            for pid, connection in self._sessions.items():
                if message != FORK or connection.fileno() in ready:
                    _kill(pid)
                    with contextlib.suppress(KeyError):  # killed before, but still ending
                        self._poll.unregister(connection)
            self._reap()
        return message == STOP

    def _read_message(self) -> bytes:
        message, descriptors = b"", []
        with contextlib.suppress(ConnectionResetError):
            message, descriptors, _, _ = socket.recv_fds(
                self._control, 64, 1, socket.MSG_CMSG_CLOEXEC
            )
        if message == FORK:
            self._fork(socket.socket(fileno=descriptors[0]))
        else:
            self._poll.unregister(self._control)
        return message

    def _fork(self, connection: socket.socket) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            with connection:
                how = f"the process of this session could not be started: {error.strerror}"
                _send_last(connection, make_error("unavailable", how))
            return
        if pid == 0:
            self._become_session(connection)
        self._sessions[pid] = connection
        self._poll.register(connection, 0)  # poll(2) tells of the other end's shutdown regardless

    def _become_session(self, connection: socket.socket) -> NoReturn:
        status = 1
        try:
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # What its children abandon is its own, not the host's, which kills it.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (self._control, *self._sessions.values()):
                each.close()
            for descriptor in self._wakeup:
                os.close(descriptor)
            _limit_memory(self._environment.memory_mb)
            asyncio.run(_serve_session(self._environment, self._loaded, connection))
            status = 0
        except BaseException:  # nothing may return into the host's loop
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)  # without what the host registered for its own end

    def _reap(self) -> None:
        """Wait for what has ended, kill what that leaves behind, and tell the server."""
        while (pid := _next_ended()) is not None:
            _kill(pid)  # the rest of its group; not waited for yet, the number is its own still
            _, status = os.waitpid(pid, 0)
            connection = self._sessions.pop(pid, None)
            if connection is not None:
                with connection, contextlib.suppress(KeyError):
                    how = how_ended(os.waitstatus_to_exitcode(status))
                    error = make_error("env_error", f"the process of this session {how}")
                    _send_last(connection, error)
                    self._poll.unregister(connection)
        for pid in _children():
            if pid not in self._sessions:
                _kill(pid)


def _send_last(connection: socket.socket, error: EnvError) -> None:
    """Tell the server how a session ended, after whatever its process has written."""
    line = b"\n" + encode(Answer(problem=to_problem(error), ended=True)) + b"\n"
    with contextlib.suppress(OSError):  # nobody reads any more
        connection.send(line, socket.MSG_DONTWAIT)


def _next_ended() -> int | None:
    with contextlib.suppress(ChildProcessError):  # there is no child
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if ended is None else ended.si_pid
    return None


def _children() -> list[int]:
    """Processes whose parent is this one, ended ones that were not waited for included."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _kill(pid: int) -> None:
    """Kill a child, and its process group if it leads one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _limit_memory(memory_mb: int | None) -> None:
    """Let this process have so much more address space than it was forked with."""
    if memory_mb is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


async def _serve_session(shared: Environment, loaded: Answer, connection: socket.socket) -> None:
    """Answer the server until it closes the session.

    Args:
        shared: the instance that plays no episode.
    """
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE)
    runner = LocalRunner(type(shared)(shared.config, shared=shared.shared))
    tools = loaded.tools
    call, task = "", None
    while call != "close" and (line := await reader.readline()):
        request = decode(line, Request)
        call, task = request.call, request.task or task
        try:
            answer = await _answer(request, runner, shared, loaded)
            if call in ("start", "turn") and runner.tools != tools:
                answer.tools = tools = runner.tools
            line = encode(answer)
        except (Exception, SystemExit) as error:  # the author's, for the server's boundary
            line = encode(Answer(problem=to_problem(to_env_error(error, shared.id, task))))
        writer.write(line + b"\n")
        await writer.drain()


async def _answer(
    request: Request, runner: LocalRunner, shared: Environment, loaded: Answer
) -> Answer:
    if request.call == "describe":
        return loaded
    if request.call == "get":
        return Answer(tasks=[shared.get(request.split, index) for index in request.indices])
    if request.call == "start" and request.task is not None:
        return Answer(messages=await runner.start(request.task, request.seed))
    if request.call == "turn" and request.action is not None:
        return Answer(result=await runner.turn(request.action, last=request.last))
    await runner.close()
    return Answer()


if __name__ == "__main__":
    main(int(sys.argv[1]))
