"""`agentrl harbor`: attacks tasks' verifiers. Commands import what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

app = App("harbor", help="Harbor tasks: attack their verifiers.")


@app.command
def attack(
    tasks: Path,
    /,
    *,
    only: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    policy: Literal["strict", "all"] = "strict",
    shared: bool = False,
    no_network: bool = False,
) -> int:
    """Play attacks on tasks' verifiers.

    Plays attacks that do none of a task's work, as an agent would, in containers of the local
    Docker engine, and compares their reward with that of doing nothing. The exit status is 1 if an
    attack is paid more than that, or the task's own solution is not.

    Args:
        tasks: A task's folder, or a folder of tasks.
        only: Ids of the tasks to attack; all if not given.
        policy: Which of the agent's changes the verifier sees.
        shared: Run the tests in the agent's own container, as Harbor does unless a task sets
            otherwise.
        no_network: Play all without a network.
    """
    import asyncio

    from agentrl_harbor.attack import attack as play_attacks
    from agentrl_harbor.env import HarborConfig, HarborEnvironment

    config = HarborConfig(
        source=str(tasks),
        task_ids=only,
        policy=policy,
        verifier="shared" if shared else "fresh",
        network="none" if no_network else "task",
    )
    loaded = HarborEnvironment.load_shared(config)
    bad = False
    for task_id in loaded.tasks:
        rows = asyncio.run(play_attacks(loaded, config, task_id))
        nothing = rows[0].reward
        print(f"{task_id}: nothing is paid {nothing:g}")
        for row in rows[1:]:
            wrong = (row.reward <= nothing) == (row.name == "solution")
            bad |= wrong
            kept = f", {row.left_out} changes left out" if row.left_out else ""
            mark = "FAILED" if wrong else "ok"
            print(f"  {mark:6} {row.name}: {row.reward:g}{kept}")
    return int(bad)
