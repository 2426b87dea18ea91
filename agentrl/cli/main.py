"""The `agentrl` command. Commands import what they need, so that `--help` stays quick."""

from __future__ import annotations

import errno
import inspect
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points

from cyclopts import App, CycloptsError

from agentrl.cli import data, env
from agentrl.cli.commands import app
from agentrl.errors import AgentRLError, ConfigError

_HELP = frozenset({"--help", "-h", "--help-all"})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status (2 for wrong input, 130 when interrupted)."""
    tokens = [*(sys.argv[1:] if argv is None else argv)]
    add_plugins(app)
    return run(app, tokens)


def add_plugins(app: App) -> None:
    """Adds the commands that environments bring: the apps of the entry points' group."""
    # By name: an older installation beside this one lists them as well.
    found = {each.name: each for each in entry_points(group="agentrl.commands")}
    for name in sorted(found.keys() - {*app}):
        app.command(found[name].load())


def run(app: App, tokens: list[str]) -> int:
    """Runs a command of an app; an error becomes one line per problem and an exit status."""
    try:
        words = [token for token in tokens if token not in _HELP]
        path, apps, rest = app.parse_commands(words)
        command = apps[-1].default_command
        if len(words) < len(tokens) or (command is None and not rest):
            return _help(app, path, apps[-1], tokens)
        if takes_keys(command):
            _refuse_misspelt(apps[-1], rest)
        return app(tokens) or 0
    except CycloptsError as error:
        return _refused(error, 2)
    except AgentRLError as error:
        return _refused(error, error.exit_code)
    except KeyboardInterrupt:
        print("agentrl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except OSError as error:
        # A file that cannot be read or written is the caller's to mend; a socket would be a bug.
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        return _refused(f"{where}{error.strerror}", 1)


def takes_keys(command: Callable[..., object] | None) -> bool:
    """Returns whether the keys of a run file are options of a command."""
    return command is not None and "keys" in inspect.signature(command).parameters


def _help(app: App, path: Sequence[str], command: App, tokens: list[str]) -> int:
    """Prints the help of a command or of a group; nobody asked for it where no command is named."""
    from rich.console import Console

    asked = not _HELP.isdisjoint(tokens)
    if command.default_command is not None:
        command.help_format = "markdown"  # joins the lines of a paragraph
    app.help_print(path, console=Console(stderr=not asked))
    if takes_keys(command.default_command):
        _print_keys("--help-all" in tokens)
    return 0 if asked else 2


def _refuse_misspelt(command: App, words: Sequence[str]) -> None:
    """Refuses options that are close to one of the command's own: they would be read as keys."""
    known = [name for argument in command.assemble_argument_collection() for name in argument.names]
    for word in words:
        name = word.partition("=")[0]
        wrong = name.startswith("--") and "." not in name and name not in known
        if wrong and (close := get_close_matches(name, known, 1, 0.8)):
            raise ConfigError(f"{name}: unknown option; did you mean {close[0]}?")


def _refused(error: object, status: int) -> int:
    for line in str(error).splitlines() or [repr(error)]:
        print(f"agentrl: error: {line}", file=sys.stderr)
    return status


def _print_keys(everything: bool) -> None:
    """Prints the keys of a run file; reading them needs pydantic."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from agentrl.config.load import FIRST_KEYS, valid_keys

    keys = valid_keys()
    console = Console(highlight=False)
    if everything:
        console.print("\nKeys of a run file, with their defaults:")
    else:
        console.print(
            f"\nKeys of a run file that people set first, with their defaults (--help-all shows "
            f"all {len(keys)}):"
        )
        keys = {key: keys[key] for key in FIRST_KEYS}
    section = ""
    for key, (default, meaning) in keys.items():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            console.print(f"\n[bold]\\[{section}][/]")
        console.print(Text.assemble(("  --" + key, "cyan"), f"  {default}"), soft_wrap=True)
        if meaning:
            console.print(Padding(Text(meaning), (0, 0, 0, 6)))


app.command(env.app)
app.command(data.app)
app.register_install_completion_command()
