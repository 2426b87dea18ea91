"""Plays the same tasks and episodes in two fresh processes with different hash seeds.

Whatever differs between the two depends on more than split, index and seed. An episode that is the
same in both, but changes when it is played again, was changed by the episodes in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from agentrl import user_modules
from agentrl.env import protocol
from agentrl.env.check.subject import Event, Subject, load_subject
from agentrl.errors import AgentRLError
from agentrl.runtime import run_guarded
from agentrl.types import JSON

TIMEOUT_S = 20.0
"""Seconds that each process may take; if one takes longer, nothing is compared."""
NUM_TASKS = 20
"""Tasks of each split to read."""
NUM_EPISODES = 4
_SEEN = ("observation", "tools", "reward", "reward_components", "terminated", "truncated", "error")
"""Keys of a reply that are compared. Metrics and info may rightly differ, such as with a cache."""


@dataclass(slots=True)
class FreshRun:
    """The observations of one fresh process."""

    tasks: dict[str, JSON]
    """`split/index` -> task."""
    first: list[list[Event]]
    """The episodes, each played for the first time."""
    again: list[Event]
    """The first episode, played again after the others."""


async def fresh_runs(subject: Subject) -> tuple[FreshRun, FreshRun] | None:
    """Returns the observations of two fresh processes, which are started once per subject; None if
    `run_twice` returns None."""
    if subject.fresh is None:
        subject.fresh = asyncio.ensure_future(run_twice(subject))
    return await subject.fresh


async def run_twice(subject: Subject) -> tuple[FreshRun, FreshRun] | None:
    """Plays the subject in two processes with different hash seeds.

    Returns:
        None if the subject is behind a URL, its class cannot be imported by name, or a process
        failed or took too long.
    """
    environment = subject.environment
    if environment is None or environment.__module__ == "__main__":
        return None
    if "." in environment.__qualname__:  # defined inside a function or class
        return None
    module = user_modules.files.get(environment.__module__, environment.__module__)
    target = f"{module}:{environment.__qualname__}"
    request = {"target": target, "config": subject.config, "path": sys.path}
    one, other = await asyncio.gather(_run(request, "1"), _run(request, "2"))
    return None if one is None or other is None else (one, other)


async def _run(request: dict[str, Any], hash_seed: str) -> FreshRun | None:
    with tempfile.TemporaryDirectory(prefix="agentrl-fresh-", ignore_cleanup_errors=True) as folder:
        status, out, _ = await run_guarded(
            [sys.executable, "-m", "agentrl.env.check.fresh", json.dumps(request)],
            grace_s=0.0,
            timeout_s=TIMEOUT_S,
            max_bytes=sys.maxsize,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "TMPDIR": folder},
        )
    return FreshRun(**json.loads(out)) if status == 0 and out else None


def seen(events: list[Event]) -> list[Event]:
    """Returns the parts of an episode that are compared."""
    return [{key: event[key] for key in _SEEN if key in event} for event in events]


# In the fresh process


async def _play(request: dict[str, Any]) -> FreshRun:
    subject = await load_subject(request["target"], config=request["config"])
    tasks = {}
    for split, size in subject.info.splits.items():
        last = [] if size is None else [size - 1]
        for index in dict.fromkeys([*range(min(NUM_TASKS, size or NUM_TASKS)), *last]):
            spec = protocol.TaskSpec(split, index)
            tasks[f"{split}/{index}"] = protocol.as_json(await subject.task(spec))
    cases = [(spec, seed) for seed, spec in enumerate(subject.specs(NUM_EPISODES))]
    episodes = []
    async with subject.transport() as transport:
        for spec, seed in [*cases, cases[0]]:
            moves = await subject.moves(spec, seed)
            episodes.append(seen(await subject.play(transport, spec, seed, moves)))
    return FreshRun(tasks, episodes[:-1], episodes[-1])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the environment's own prints must not mix with the answer
    request = json.loads(sys.argv[1])
    sys.path[:] = request["path"]
    with contextlib.suppress(AgentRLError):
        json.dump(dataclasses.asdict(asyncio.run(_play(request))), answers)
    answers.flush()
    os._exit(0)  # without waiting for the environment's threads


if __name__ == "__main__":
    main()
