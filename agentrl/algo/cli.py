"""Implements `agentrl algo list` and `agentrl algo show PRESET`."""

from __future__ import annotations

import argparse
import json

from agentrl.errors import ConfigError


def add_algo_commands(commands: argparse._SubParsersAction) -> None:
    """Adds the `algo` command to the command line."""
    algo = commands.add_parser(
        "algo",
        help="list presets of the objective and show their formulas",
        description="Shows what the objective's presets compute and where they come from.",
    )
    actions = algo.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = actions.add_parser(
        "list",
        help="list every preset on one line",
        description="Lists every preset on one line. `agentrl algo show PRESET` prints its "
        "formulas.",
    )
    listing.set_defaults(handler=_list)
    show = actions.add_parser(
        "show",
        help="print the formulas, sources and requirements of one preset",
        description="Prints a preset's stages as formulas. A run file starts from a preset with "
        '[objective] preset = "NAME" and overrides it in tables such as [objective.surrogate].',
    )
    show.add_argument("preset", metavar="PRESET")
    function = "package.module:function or path/to/file.py:function"
    show.add_argument("--loss", metavar="FUNCTION", help=f"check and show your own: {function}")
    show.add_argument("--advantage", metavar="FUNCTION", help="the same for your own advantage")
    show.add_argument("--json", action="store_true", help="print the resolved keys as JSON")
    show.set_defaults(handler=_show)


def _list(arguments: argparse.Namespace) -> int:
    from agentrl.algo.presets import PRESET_DATA

    width = max(map(len, PRESET_DATA))
    for name, note in PRESET_DATA.items():
        print(f"{name:<{width}}  {note.title}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from agentrl.algo.explain import NOTATION, describe
    from agentrl.algo.objective import Objective
    from agentrl.algo.presets import require_known

    try:
        require_known(arguments.preset)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    own = {"loss": arguments.loss, "advantage": arguments.advantage}
    own = {key: reference for key, reference in own.items() if reference is not None}
    try:
        objective = Objective.from_preset(arguments.preset, own)
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    if own:
        from agentrl.algo.split_check import check_user_functions

        check_user_functions(objective)
    if arguments.json:
        print(json.dumps(objective.model_dump(mode="json"), indent=2))
        return 0
    print(f"{describe(objective)}\n\n{NOTATION}")
    if objective.loss:
        print("\nChecked: 1, 2 and 3 micro-batches give the same loss and gradient.")
    if objective.advantage:
        print("\nChecked: the advantages do not depend on the order of the rows.")
    return 0
