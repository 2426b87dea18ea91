"""`agentrl harbor`: attacks tasks' verifiers. Handlers import what they need."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path


def add_harbor_commands(commands: argparse._SubParsersAction) -> None:
    """Adds `harbor` and its subcommands. Each sets `handler`, which returns an exit status."""
    harbor = commands.add_parser(
        "harbor",
        help="Harbor tasks: attack their verifiers",
        description="Check tasks in Harbor's format, in containers of the local Docker engine.",
    )
    subcommands = harbor.add_subparsers(title="commands", metavar="COMMAND", required=True)
    attack = subcommands.add_parser(
        "attack",
        help="play attacks on tasks' verifiers",
        description="Play attacks that do none of a task's work, as an agent would, and compare "
        "their reward with that of doing nothing. The exit status is 1 if an attack is paid more "
        "than that, or the task's own solution is not.",
    )
    attack.add_argument("tasks", type=Path, help="a task's folder, or a folder of tasks")
    attack.add_argument("--only", nargs="+", metavar="ID", help="only these tasks (default: all)")
    attack.add_argument(
        "--policy",
        choices=["strict", "all"],
        default="strict",
        help="which of the agent's changes the verifier sees (default: %(default)s)",
    )
    attack.add_argument(
        "--shared",
        action="store_true",
        help="run the tests in the agent's own container, as Harbor does unless a task says "
        "otherwise",
    )
    attack.add_argument("--no-network", action="store_true", help="play all without a network")
    attack.set_defaults(handler=_attack)


def _attack(arguments: argparse.Namespace) -> int:
    from agentrl_harbor.attack import attack
    from agentrl_harbor.env import HarborConfig, HarborEnvironment

    config = HarborConfig(
        source=str(arguments.tasks),
        task_ids=arguments.only,
        policy=arguments.policy,
        verifier="shared" if arguments.shared else "fresh",
        network="none" if arguments.no_network else "task",
    )
    shared = HarborEnvironment.load_shared(config)
    bad = False
    for task_id in shared.tasks:
        rows = asyncio.run(attack(shared, config, task_id))
        nothing = rows[0].reward
        print(f"{task_id}: nothing is paid {nothing:g}")
        for row in rows[1:]:
            wrong = (row.reward <= nothing) == (row.name == "solution")
            bad |= wrong
            kept = f", {row.left_out} changes left out" if row.left_out else ""
            mark = "FAILED" if wrong else "ok"
            print(f"  {mark:6} {row.name}: {row.reward:g}{kept}")
    return int(bad)
