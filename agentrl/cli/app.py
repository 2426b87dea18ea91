"""The root of the command line, and what its commands have in common."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from agentrl import __version__

if TYPE_CHECKING:
    from agentrl.config import RunConfig

RunFile = Annotated[Path, Parameter(help="Run file, such as run.toml.")]
Key = Annotated[
    str,
    Parameter(
        name="--section.key",
        allow_leading_hyphen=True,
        help="Any key of the run file, such as --run.seed 2 or --objective.preset dapo.",
    ),
]
"""Every further argument of a command whose options are the keys of a run file."""
DryRun = Annotated[bool, Parameter(help="Print the resolved configuration and stop.")]
Environment = Annotated[
    str | None, Parameter(help="Name of the environment, if the run file has several [[env]].")
]
Checkpoint = Annotated[
    str | None,
    Parameter(
        help="A checkpoint's folder, or `latest` of the run directory, in place of model.path."
    ),
]
Json = Annotated[bool, Parameter(name="--json", help="Print the result as JSON.")]


def make_app(name: str, help: str) -> App:
    """Makes an app, or a group of commands. Errors reach `agentrl.cli.main.main`, and so does what
    a command returns: its exit status."""
    return App(
        name,
        help=help,
        version=f"agentrl {__version__}",
        help_format="plaintext",
        default_parameter=Parameter(negative=(), show_default=_is_shown),
        print_error=False,
        exit_on_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )


def _is_shown(default: object) -> str | None:
    return None if default in (None, False, (), [], "") else str(default)


app = make_app(
    "agentrl",
    "A Gym for language-model agents and the trainer that learns from it.\n\n"
    "Start with: agentrl examples, then agentrl train examples/quickstart/run.toml",
)


def resolved(
    run_file: Path,
    keys: tuple[str, ...],
    environment: str | None = None,
    *,
    plays_one_environment: bool = True,
    dry_run: bool = False,
) -> RunConfig | None:
    """Reads a run file and the keys given as options. With `dry_run` prints the configuration and
    returns None.

    Args:
        environment: name of the environment to play, of a run file with several.
        plays_one_environment: one of the file's environments has to be named.

    Raises:
        ConfigError: the configuration is not valid, or the environment has to be named.
    """
    from agentrl.config import load_config

    config = load_config(run_file, keys)
    if plays_one_environment:
        config = _one_environment(config, environment)
    if "id" not in config.env.model_fields_set:
        print(
            f"agentrl: the run file names no environment, so it is env.id = {config.env.id!r} "
            "(agentrl env list)",
            file=sys.stderr,
        )
    envs = []
    # Before torch is loaded; of several ranks the first says it when they have met.
    if dry_run or "RANK" not in os.environ:
        envs = [_env_of(alone) for alone in config.environments.values()]
    if not dry_run:
        return config
    print(config.to_toml(), *envs, _dialect_of(config), sep="\n")
    return None


def _one_environment(config: RunConfig, name: str | None) -> RunConfig:
    """Returns the configuration for one environment of the run."""
    from agentrl.errors import ConfigError

    names = ", ".join(env.name for env in config.envs)
    if not config.envs:
        if name is not None:
            raise ConfigError("--environment: the run file has one environment only; leave it out")
        return config
    if name not in config.environments:
        raise ConfigError(f"the run file has several environments; give --environment, of {names}")
    return config.environments[name]


def _env_of(config: RunConfig) -> str:
    """Returns, as a comment, whether the environment takes its configuration."""
    if config.env.url:
        return f"# env: asked of {', '.join(config.env.url)} when the run starts"
    from agentrl.env.base import load_config
    from agentrl.env.registry import resolve

    load_config(resolve(config.env.id), config.env.config)
    return f"# env: {config.env.id} takes this configuration"


def _dialect_of(config: RunConfig) -> str:
    """Returns, as a comment, the dialect that calls are read in."""
    from agentrl.model.text.template import named_dialect, read_template

    path, wanted = config.model.path, config.rollout.dialect
    if config.inference.backend == "openai":
        said = f"{named_dialect(wanted).name}, where the server leaves calls in the text"
    elif template := read_template(
        path, config.rollout.template, wanted, config.rollout.tools, config.model.chat_template
    ):
        said = f"{template.dialect.name}, {template.note}"
    else:
        said = f"{wanted}; {path} has no chat template on this disk to ask"
    return f"# rollout.dialect: {said}"
