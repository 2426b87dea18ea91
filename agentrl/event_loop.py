"""The event loop of runs and servers: uvloop's, where there is one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")

_stops: list[Callable[[], object]] = []
"""Functions that a KeyboardInterrupt calls in a thread that waits for a loop in another."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Lets the garbage collector look at young objects less often.

    Hundreds of concurrent episodes are tens of thousands of objects, none of them garbage. With
    Python's own threshold of 700, the repeated collections take a quarter of a rollout's time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 10, 4)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine like `asyncio.run`, on uvloop's loop if installed; in a thread if a loop is
    already running, as in a notebook.

    A first KeyboardInterrupt asks the work to stop, if it can be asked (`stopped_by`), and its
    result is returned; a second one cancels it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with _rare_collections(), asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(coroutine)
    loop = new_event_loop()
    work = loop.create_task(coroutine)
    with (
        _rare_collections(),
        ThreadPoolExecutor(1, thread_name_prefix="agentrl-loop") as thread,
    ):
        done = thread.submit(_run_in_thread, loop, work)
        while True:
            try:
                return done.result()
            except KeyboardInterrupt:
                if not _stops:
                    with suppress(RuntimeError):  # the loop is closed, its work done
                        loop.call_soon_threadsafe(work.cancel)
                    raise
                _stops.pop()()


def _run_in_thread(loop: asyncio.AbstractEventLoop, work: asyncio.Task[T]) -> T:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.get_loop().run_until_complete(work)


@contextmanager
def stopped_by(stop: Callable[[], object]) -> Iterator[None]:
    """Calls `stop` on a first KeyboardInterrupt in the waiting thread, while in the context."""
    _stops.append(stop)
    try:
        yield
    finally:
        if stop in _stops:
            _stops.remove(stop)
