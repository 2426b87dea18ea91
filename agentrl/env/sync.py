"""The client without `await`, for scripts and notebooks.

    with connect("http://127.0.0.1:8700").sync as client:
        session = client.session("math", split="train", index=0)
        result = session.step(Action(text="42"), timeout_s=60)

Each method here is the one of the same name over there, run by an event loop in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from agentrl.env.client import Client, EnvSession, LocalEnv
from agentrl.types import Message, ToolSpec

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
Method = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]


class _Thread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agentrl-env", daemon=True).start()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


class _Blocking:
    _thread: _Thread
    _wrapped: Any


def _calls(
    method: Method[P, T], then: Callable[[_Thread, T], R]
) -> Callable[Concatenate[_Blocking, P], R]:
    """A method that waits for the asynchronous one, and hands on what `then` makes of it."""

    @functools.wraps(method)
    def call(self: _Blocking, /, *args: P.args, **kwargs: P.kwargs) -> R:
        bound: Callable[P, Coroutine[Any, Any, T]] = getattr(self._wrapped, method.__name__)
        return then(self._thread, self._thread.wait(bound(*args, **kwargs)))

    return call


def _as_is(_: _Thread, result: T) -> T:
    return result


class SyncSession(_Blocking):
    """An `EnvSession` whose methods wait."""

    def __init__(self, thread: _Thread, session: EnvSession) -> None:
        self._thread, self._wrapped = thread, session

    @property
    def id(self) -> str:
        return self._wrapped.id

    @property
    def task_id(self) -> str:
        return self._wrapped.task_id

    @property
    def messages(self) -> list[Message]:
        return self._wrapped.messages

    @property
    def tools(self) -> list[ToolSpec]:
        return self._wrapped.tools

    step = _calls(EnvSession.step, _as_is)
    reset = _calls(EnvSession.reset, _as_is)
    snapshot = _calls(EnvSession.snapshot, _as_is)
    fork = _calls(EnvSession.fork, lambda thread, sessions: _wrap(thread, sessions))
    close = _calls(EnvSession.close, _as_is)


def _wrap(thread: _Thread, sessions: Sequence[EnvSession]) -> list[SyncSession]:
    return [SyncSession(thread, session) for session in sessions]


class SyncClient(_Blocking):
    """A `Client` whose methods wait. Close it, or use it as `with connect(...).sync`."""

    def __init__(self, client: Client) -> None:
        self._thread, self._wrapped = _Thread(), client
        self._closed = False

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    info = _calls(Client.info, _as_is)
    tasks = _calls(Client.tasks, _as_is)
    session = _calls(Client.session, SyncSession)
    group = _calls(Client.group, _wrap)
    fork = _calls(Client.fork, _wrap)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.wait(self._wrapped.aclose())
            self._thread.stop()


class SyncEnv(_Blocking):
    """A `LocalEnv` whose methods wait."""

    def __init__(self, env: LocalEnv) -> None:
        self._thread, self._wrapped = _Thread(), env
        self._closed = False

    info = _calls(LocalEnv.info, _as_is)
    reset = _calls(LocalEnv.reset, _as_is)
    step = _calls(LocalEnv.step, _as_is)
    call = _calls(LocalEnv.call, _as_is)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.wait(self._wrapped.close())
            self._thread.stop()
