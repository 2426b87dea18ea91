"""Checks that an environment does not disturb the process that it runs in."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Self

from agentrl.env.check.episodes import NO_OP
from agentrl.env.check.subject import CheckFailed, Subject, place, short
from agentrl.env.protocol import TaskSpec

MAX_BLOCK_S = 0.05
"""Longest time that an episode may hold up the event loop."""


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
                if attempt and block > 3 * MAX_BLOCK_S:  # twice: no matter of chance
                    subject.hangs = True  # other checks play many episodes, each as slow
                    raise _blocks(spec, block, culprit)
                await asyncio.sleep(0.1 * attempt)
            else:
                raise _blocks(spec, block, culprit)
            worst = max(worst, block)
    return f"at most {worst * 1000:.0f} ms in {len(cases)} tasks' episodes"


def _blocks(spec: TaskSpec, seconds: float, where: str) -> CheckFailed:
    return CheckFailed(
        f"{place(spec)}: the event loop stood still for {seconds * 1000:.0f} ms{where}",
        "make that method a plain def (it then runs in a thread), or await an async library",
    )


class _Watch(threading.Thread):
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
    variables, standard output and the seeds of global generators."""
    subject.local()
    folder, variables = subject.folder, subject.variables
    printed = io.StringIO()
    generators: list[Any] = [random]
    if numpy := sys.modules.get("numpy"):
        generators.append(numpy.random)
    saved, after = [_state(each) for each in generators], []
    try:
        with contextlib.redirect_stdout(printed):
            async with subject.transport() as transport:
                spec = subject.specs(1)[0]
                for start in (1, 2):
                    for each in generators:
                        each.seed(start)
                    await subject.play(transport, spec)
                    after.append([repr(_state(each)) for each in generators])
                for seed, spec in enumerate(subject.specs(3)):
                    await subject.play(transport, spec, seed, [NO_OP])
            replaced = sys.stdout is not printed
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
        for each, state in zip(generators, saved, strict=True):
            (random.setstate if each is random else each.set_state)(state)
    # A generator was seeded if its state afterwards does not depend on its state before.
    named = [f"the module {each.__name__}" for each in generators]
    seeded = [name for name, one, other in zip(named, *after, strict=True) if one == other]
    problems = {
        f"changed the working directory to {now}": (
            now != folder,
            "use absolute paths, or pass cwd= to child processes: all sessions share the directory",
        ),
        f"changed os.environ: {', '.join(changed)}": (
            changed,
            "pass env= to the processes that you start: other sessions share os.environ",
        ),
        f"seeds {', '.join(seeded)}, which other sessions and the trainer use as well": (
            seeded,
            "draw from self.rng, which is seeded, or make a generator of your own",
        ),
        f"prints {short(printed.getvalue().strip(), 60)!r} on standard output": (
            printed.getvalue(),
            "use the logging module: programs read a server's standard output",
        ),
        "replaces sys.stdout": (replaced, "leave it: programs read a server's standard output"),
    }
    for what, (is_so, remedy) in problems.items():
        if is_so:
            raise CheckFailed(f"an episode {what}", remedy)
    return "the working directory, os.environ, output and generators as before"


def _state(generator: Any) -> Any:
    """Returns the state of `random` or of `numpy.random`, comparable as text."""
    if generator is random:
        return random.getstate()
    kind, keys, *rest = generator.get_state()
    return (kind, [int(key) for key in keys], *rest)
