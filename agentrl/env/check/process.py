"""Checks that an environment does not disturb the process that it runs in."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import math
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from agentrl.env.check.episodes import NO_OP
from agentrl.env.check.subject import (
    CheckFailed,
    CheckSkipped,
    Subject,
    place,
    process_state,
    short,
)
from agentrl.env.transport import InProcess, Transport
from agentrl.errors import EnvError

MAX_BLOCK_S = 0.05
"""Longest time that an episode may hold up the event loop."""
MAX_GROWTH_BYTES = 4096
"""Largest growth of the process per episode, which makes 4 MB in a thousand episodes."""
MEMORY_TIME_S = 5.0
"""Seconds after which the memory check stops, even with fewer episodes; sixty times that with
`thorough`."""
MIN_MEMORY_EPISODES = 50
"""With fewer episodes, connections and caches that fill only once would outweigh the growth."""
LEAK_ROUNDS = 3
LEAK_WAIT_S = 2.0
"""Seconds that the resources of closed sessions may take to be freed."""


async def check_event_loop(subject: Subject) -> str:
    """An episode never holds up the event loop for more than 50 ms, during which all other sessions
    would stand still."""
    subject.local()
    worst = 0.0
    cases = [(spec, seed) for seed, spec in enumerate(subject.specs(4))]
    async with subject.transport() as transport:
        moves = [await subject.moves(spec, seed) for spec, seed in cases]
        await subject.play(transport, *cases[0], moves[0])  # so that imports do not count
        for (spec, seed), actions in zip(cases, moves, strict=True):
            # A busy machine causes a delay now and then; blocking code causes one every time.
            block, culprit = math.inf, ""
            for attempt in range(8):
                async with _Watch() as watch:
                    await subject.play(transport, spec, seed, actions)
                    await subject.play(transport, spec, seed, [NO_OP])
                    await asyncio.sleep(0.02)  # while it is closed
                if watch.worst < block:
                    block, culprit = watch.worst, watch.where
                if block < MAX_BLOCK_S:
                    break
                await asyncio.sleep(0.1 * attempt)
            else:
                raise CheckFailed(
                    f"{place(spec)}: the event loop stood still for {block * 1000:.0f} ms"
                    + culprit,
                    "make that method a plain def (it then runs in a thread), or await an async "
                    "library",
                )
            worst = max(worst, block)
    return f"at most {worst * 1000:.0f} ms in {len(cases)} tasks' episodes"


class _Watch(threading.Thread):
    """Measures how long the event loop was held up, and where its code was then."""

    def __init__(self) -> None:
        super().__init__(name="agentrl-env-worker-watch")
        self.worst = 0.0
        self.where = ""
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._ended = threading.Event()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended.set()
        await asyncio.to_thread(self.join)

    def run(self) -> None:
        while not self._ended.wait(0.005):
            answered, asked = threading.Event(), time.monotonic()
            self._loop.call_soon_threadsafe(answered.set)
            if not answered.wait(0.75 * MAX_BLOCK_S):
                self._look()
                answered.wait()
            self.worst = max(self.worst, time.monotonic() - asked)

    def _look(self) -> None:
        stack = traceback.extract_stack(sys._current_frames().get(self._watched))
        package = str(Path(__file__).parents[1])
        own = [each for each in stack if not each.filename.startswith(package)]
        if own and not own[-1].filename.endswith("selectors.py"):
            self.where = f" near {Path(own[-1].filename).name}:{own[-1].lineno}"


async def check_globals(subject: Subject) -> str:
    """Episodes do not change the state of the whole process: the working directory, environment
    variables, standard output, the seeds of global generators, limits, hooks and settings."""
    subject.local()
    folder, variables, before = subject.folder, subject.variables, subject.process_state
    printed = _Printed()
    # An import adds entries here only once; what an episode adds comes back.
    sys.path[:] = subject.search_path
    warnings.filters[:] = subject.warnings_filters  # type: ignore[index]
    try:
        with contextlib.redirect_stdout(printed):
            async with subject.transport() as transport:
                for seed, spec in enumerate(subject.specs(3)):
                    await subject.play(transport, spec, seed)
                    await subject.play(transport, spec, seed, [NO_OP])
            replaced = sys.stdout is not printed
        after = process_state()
        seeded = await _seeded_generator(subject)
        changed = [
            name
            for name in sorted({*variables, *os.environ})
            if variables.get(name) != os.environ.get(name) and name != "PYTEST_CURRENT_TEST"
        ]
        now = os.getcwd()
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
    if now != folder:
        raise CheckFailed(
            f"an episode changed the working directory to {now}",
            "use absolute paths, or pass cwd= to child processes: all sessions share the directory",
        )
    if changed:
        raise CheckFailed(
            f"an episode changed os.environ: {', '.join(changed)}",
            "pass env= to the processes that you start: other sessions share os.environ",
        )
    for name, value in after.items():
        if value != before.get(name):
            raise CheckFailed(
                f"an episode changed {name} of the process from {short(before.get(name), 60)} to "
                f"{short(value, 60)}",
                "other sessions and the trainer share this: start a process for code that needs it "
                "changed",
            )
    if seeded:
        raise CheckFailed(
            f"an episode seeds {seeded}, which other sessions and the trainer use as well",
            "draw from self.rng, which is seeded, or make a generator of your own",
        )
    if printed.text or replaced:
        what = f"prints {short(printed.text.strip(), 60)!r} on standard output"
        raise CheckFailed(
            f"an episode {what if printed.text else 'replaces sys.stdout'}",
            "use the logging module: programs read a server's standard output",
        )
    return "the working directory, os.environ, output, generators and settings as before"


class _Printed(io.TextIOBase):
    """Replaces standard output, and keeps the first 200 characters that are printed."""

    text = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self.text = (self.text + text)[:200]
        return len(text)


async def _seeded_generator(subject: Subject) -> str | None:
    """Returns the name of a global generator that an episode seeds; None if it seeds none.

    A generator was seeded if its state afterwards does not depend on its state before.
    """
    spec = subject.specs(1)[0]
    actions = await subject.moves(spec)
    states: dict[str, list[str]] = {}
    numpy = sys.modules.get("numpy")
    saved = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        for start in (1, 2):
            random.seed(start)
            if numpy:
                numpy.random.seed(start)
            with contextlib.suppress(EnvError):  # other checks report it
                await subject.play_direct(spec, actions)
            states.setdefault("the module random", []).append(repr(random.getstate()))
            if numpy:
                state = repr(list(numpy.random.get_state()[1]))
                states.setdefault("numpy.random", []).append(state)
    finally:
        random.setstate(saved[0])
        if numpy:
            numpy.random.set_state(saved[1])
    return next((name for name, (one, other) in states.items() if one == other), None)


async def check_leaks(subject: Subject) -> str:
    """Sessions of clients that disappear in the middle of a step leave no session, thread, asyncio
    task, process, open file or temporary file behind."""
    subject.local()
    if subject.close_hangs:
        raise CheckSkipped("close() hangs, so nothing is freed")
    spec = subject.specs(1)[0]
    action = (await subject.moves(spec))[0]
    count = min(8, subject.info.max_sessions)

    async def disappear(transport: Transport) -> None:
        opened = await asyncio.gather(
            *(subject.open(transport, spec, seed, lease_s=0.5) for seed in range(count))
        )
        steps = [
            asyncio.ensure_future(subject.step(transport, session.id, 0, action))
            for session in opened
        ]
        await asyncio.sleep(0)
        for step in steps[::2]:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)

    async def run() -> None:
        async with subject.transport() as transport:
            assert isinstance(transport, InProcess)
            await disappear(transport)
            deadline = time.monotonic() + 15.0
            while transport.manager.num_live:
                if time.monotonic() > deadline:
                    raise CheckFailed(
                        f"{transport.manager.num_live} of {count} sessions are still open 15 s "
                        "after their client disappeared",
                        "close() must return",
                    )
                await asyncio.sleep(0.05)

    with _own_temporary_folder() as folder:
        await run()  # so that what is started once and kept, such as a thread, does not count
        # A pool of connections or containers may still grow in some rounds; a leak grows in all.
        left = ""
        for _ in range(LEAK_ROUNDS):
            gc.collect()
            before = _resources(folder)
            await run()
            deadline = time.monotonic() + LEAK_WAIT_S
            while (left := _left(before, folder)) and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
                gc.collect()
            if not left:
                return f"{count} sessions; {', '.join(sorted(before))} as before"
    raise CheckFailed(
        f"each time, {count} sessions whose client disappeared left {left}",
        "end and close in close() whatever reset() and steps started and opened",
    )


@contextlib.contextmanager
def _own_temporary_folder() -> Iterator[Path]:
    """Makes `tempfile` use a new folder while in the context, so that files of other processes do
    not count."""
    usual = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="agentrl-check-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = usual


def _resources(folder: Path) -> dict[str, dict[str, str]]:
    """Returns the resources of this process: kind -> identity -> name.

    The kinds are threads, asyncio tasks and temporary files; on Linux also child processes and open
    files.
    """
    found = {
        "threads": {
            str(each.ident): each.name
            for each in threading.enumerate()
            if not each.name.startswith("agentrl-env-worker")
        },
        "asyncio tasks": {
            str(id(each)): getattr(each.get_coro(), "__qualname__", each.get_name())
            for each in asyncio.all_tasks()
        },
        "temporary files": {str(path): path.name for path in folder.rglob("*")},
    }
    proc = Path("/proc/self")
    if proc.exists():
        children, files = {}, {}
        # /proc/self/task/*/children may leave some out while others end.
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
                if int(rest.split()[1]) == os.getpid():
                    children[stat.parent.name] = name
        for link in proc.glob("fd/*"):
            with contextlib.suppress(OSError):
                files[f"{link.name} {os.readlink(link)}"] = os.readlink(link)
        found |= {"processes": children, "open files": files}
    return found


def _left(before: dict[str, dict[str, str]], folder: Path) -> str:
    """Describes the kinds of resources that have become more; empty if none has."""
    parts = []
    for kind, now in _resources(folder).items():
        new = [name for key, name in now.items() if key not in before[kind]]
        growth = len(now) - len(before[kind])
        if growth > 0 and new:
            parts.append(f"{growth} more {kind} ({short(sorted(new)[0])})")
    return ", ".join(parts)


async def check_memory(subject: Subject) -> str:
    """The process grows by at most 4 KiB per episode, measured over up to a thousand episodes."""
    subject.local()
    if subject.close_hangs:
        raise CheckSkipped("close() hangs, so no session frees its memory")
    count, limit_s = 1000, MEMORY_TIME_S * (60 if subject.thorough else 1)
    specs = subject.specs(8)
    moves = [await subject.moves(spec) for spec in specs]
    async with subject.transport() as transport:

        async def play(count: int, until: float) -> int:
            for number in range(count):
                if time.monotonic() > until:
                    return number
                await subject.play(transport, specs[number % 8], 0, moves[number % 8])
            return count

        def used() -> tracemalloc.Snapshot:
            gc.collect()
            own = (tracemalloc.Filter(False, tracemalloc.__file__),)
            return tracemalloc.take_snapshot().filter_traces(own)

        started = time.monotonic()
        was_tracing = tracemalloc.is_tracing()
        if not was_tracing:
            tracemalloc.start()
        try:
            warm = await play(count // 4, started + limit_s / 3)
            before = used()
            played = await play(count - warm, started + limit_s)
            await asyncio.sleep(0.1)  # while the last sessions are closed
            growth = used().compare_to(before, "lineno")
        finally:
            if not was_tracing:
                tracemalloc.stop()
    if played < MIN_MEMORY_EPISODES:
        raise CheckSkipped(f"only {warm + played} episodes in {limit_s:g} s; use --thorough")
    per_episode = sum(each.size_diff for each in growth) / played
    if per_episode > MAX_GROWTH_BYTES:
        first = max(growth, key=lambda each: each.size_diff)
        line = first.traceback[0]
        raise CheckFailed(
            f"the process grew by {per_episode:,.0f} bytes per episode over {played} episodes, "
            f"mostly at {Path(line.filename).name}:{line.lineno}",
            "keep an episode's data on self, and limit what the class, the module or self.shared "
            "collects",
        )
    return f"{per_episode:+,.0f} bytes per episode over {warm + played} episodes"
