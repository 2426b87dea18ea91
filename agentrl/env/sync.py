"""Makes blocking methods of coroutine methods, for scripts and notebooks.

An event loop in a thread runs the coroutines, so they also work where an event loop runs already.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class LoopThread:
    """An event loop that runs in its own daemon thread until `stop`, so that a program that forgets
    to close what it made can still end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="agentrl-env", daemon=True
        )
        self._thread.start()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine and returns its result or raises its error.

        Raises:
            RuntimeError: the loop was stopped.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError("this client or environment was closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # if this thread was interrupted

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class Blocking:
    """Wraps an object whose coroutine methods run on the event loop of a thread."""

    def __init__(self, thread: LoopThread, wrapped: Any) -> None:
        self._thread, self._wrapped = thread, wrapped


class BlockingOwner(Blocking):
    """A `Blocking` that owns its thread and ends it when it is closed."""

    def __init__(self, wrapped: Any, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__(LoopThread(), wrapped)
        self._close: Callable[[], Coroutine[Any, Any, None]] | None = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the wrapped object and ends the thread. A second call does nothing."""
        close, self._close = self._close, None
        if close is not None:
            self._thread.wait(close())
            self._thread.stop()


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Makes a method for a `Blocking` that calls `method` of the wrapped object and waits."""
    return blocking_then(method, lambda _, result: result)


def blocking_then(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
    wrap: Callable[[LoopThread, T], R],
) -> Callable[Concatenate[Any, P], R]:
    """Does the same as `blocking`, but the method returns `wrap(thread, result)`."""

    @functools.wraps(method)
    def call(self: Blocking, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return wrap(self._thread, self._thread.wait(method(self._wrapped, *args, **kwargs)))

    return call
