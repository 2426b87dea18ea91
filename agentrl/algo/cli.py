"""`agentrl algo list` and `agentrl algo show PRESET`."""

from __future__ import annotations

import argparse
import json

from agentrl.errors import ConfigError


def add_algo_commands(commands: argparse._SubParsersAction) -> None:
    """Add the `algo` command to the command line."""
    algo = commands.add_parser(
        "algo",
        help="list presets of the objective and show their formulas",
        description="The objective's presets: what they compute and where they come from.",
    )
    actions = algo.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = actions.add_parser(
        "list",
        help="every preset in one line",
        description="Every preset in one line; `agentrl algo show PRESET` prints its formulas.",
    )
    listing.set_defaults(handler=_list)
    show = actions.add_parser(
        "show",
        help="stages, formulas, sources and needs of one preset",
        description="Stages of a preset as formulas. It is a starting point in a run file: "
        '[objective] preset = "NAME", overridden by tables such as [objective.surrogate].',
    )
    show.add_argument("preset", metavar="PRESET")
    show.add_argument("--json", action="store_true", help="the resolved keys as JSON")
    show.set_defaults(handler=_show)


def _list(arguments: argparse.Namespace) -> int:
    from agentrl.algo.explain import PRESET_NOTES
    from agentrl.algo.objective import PRESETS

    width = max(map(len, PRESETS))
    for name in PRESETS:
        print(f"{name:<{width}}  {PRESET_NOTES[name].title}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from agentrl.algo.explain import describe
    from agentrl.algo.objective import PRESETS

    if arguments.preset not in PRESETS:
        raise ConfigError(f"unknown preset {arguments.preset!r}; presets are {', '.join(PRESETS)}")
    objective = PRESETS[arguments.preset]
    if arguments.json:
        print(json.dumps(objective.model_dump(mode="json"), indent=2))
        return 0
    description = describe(objective)
    print(f"{description.name}: {description.title}\n")
    width = max(len(stage) for stage, _ in description.stages)
    for stage, formula in description.stages:
        print(f"  {stage:<{width}}  {formula}")
    print(f"\nWhen: {description.when}")
    for source in description.sources:
        print(f"Source: {source}")
    if description.needs:
        print(f"Needs: {', '.join(description.needs)}")
    return 0
