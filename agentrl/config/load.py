"""Reads a run file and the flags that override its keys."""

from __future__ import annotations

import copy
import difflib
import json
import logging
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.peers import hint_for
from agentrl.config.run import RunConfig
from agentrl.config.sections import EnvSection, MixedEnvSection
from agentrl.errors import ConfigError

logger = logging.getLogger(__name__)

CHANGEABLE = (
    "train.learning_rate",
    "rollout.temperature",
    "objective.kl.coef",
    "objective.entropy.coef",
    "run.save_every",
    "run.eval_every",
)
"""Keys that a callback may change between two steps. `train.learning_rate` is the peak of the
schedule. `rollout.temperature` can change only with the embedded engine, which never plays ahead.
"""


def load_config(
    source: Path | str | Mapping[str, JsonValue], overrides: Sequence[str] = ()
) -> RunConfig:
    """Loads a run file, or a nested dictionary with the same keys, and applies overrides.

    Relative paths of models and of the user's code that exist beside the file are resolved there,
    so that a run file works from any directory.

    Args:
        source: path of a TOML file, or `{"model": {"path": ...}, "run": {"num_steps": 10}, ...}`.
        overrides: arguments as on the command line, such as `["--run.seed", "2"]`.

    Raises:
        ConfigError: the configuration is not valid. The message has one line per problem, with the
            file or flag, the dotted key, the problem and the closest valid key.
    """
    if isinstance(source, Mapping):
        config = _validated(copy.deepcopy(dict(source)), "configuration", list(overrides))
    else:
        config = _load_file(Path(source), list(overrides))
    for said in config.objective.warnings():
        logger.warning("%s", said)
    return config


def _load_file(path: Path, overrides: list[str]) -> RunConfig:
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; give a run file, such as run.toml") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return _validated(data, str(path), overrides, beside=path)


def load_tables(tables: Sequence[Mapping[str, Any]], source: str, *, beside: Path) -> RunConfig:
    """Merges several tables of a run file's keys, later ones over earlier ones, and validates them.

    Args:
        source: name of the source, with which error messages begin.
        beside: path of the file that the tables are from, for its relative paths.

    Raises:
        ConfigError: see `load_config`.
    """
    data: dict[str, Any] = {}
    for table in tables:
        _merge(data, copy.deepcopy(dict(table)))
    return _validated(data, source, [], beside=beside)


def with_change(config: RunConfig, key: str, value: JsonValue) -> RunConfig:
    """Returns a configuration in which one key of `CHANGEABLE` has another value.

    Raises:
        ConfigError: the key cannot change during a run, or the value is not valid.
    """
    if key not in CHANGEABLE:
        close = difflib.get_close_matches(key, CHANGEABLE, n=1, cutoff=0.6)
        raise ConfigError(
            f"{key} cannot change during a run"
            + (f"; did you mean {close[0]}?" if close else f"; these can: {', '.join(CHANGEABLE)}")
        )
    *sections, name = key.split(".")
    data = table = config.model_dump()
    for section in sections:
        table = table[section]
    table[name] = value
    return _validated(data, "change", [])


def _validated(
    data: dict[str, JsonValue], source: str, overrides: list[str], beside: Path | None = None
) -> RunConfig:
    from_command_line = _override(data, overrides)
    if beside is not None:
        _resolve_beside(data, beside)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            dotted = ".".join(str(part) for part in problem["loc"])
            dotted = re.sub("^envs(?=[.])", "env", dotted)  # as it is written in the file
            typed = any(dotted == key or dotted.startswith(f"{key}.") for key in from_command_line)
            # If a whole section is wrong, the cause may be a flag that sets one of its keys.
            flags = [
                f"--{key}" for key in sorted(from_command_line) if key.startswith(f"{dotted}.")
            ]
            flags = [flag for flag in flags if flag[2:] in problem["msg"]] or flags
            file = f"{source} with {', '.join(flags)}" if flags else source
            where = f"--{dotted}" if typed else f"{file}: {dotted}" if dotted else file
            lines.append(f"{where}: {_explain(problem, dotted, typed=typed)}")
        raise ConfigError("\n".join(lines)) from None


def _override(data: dict[str, JsonValue], overrides: list[str]) -> set[str]:
    """Applies overrides; another `env.id` drops the file's `[env.config]`.

    Its keys belong to the file's environment.
    """
    typed: dict[str, JsonValue] = {}
    keys = apply_overrides(typed, overrides)
    own, section = typed.get("env"), data.get("env")
    if isinstance(own, dict) and isinstance(section, list):
        del typed["env"]
        _override_by_name(section, own)
    if isinstance(own, dict) and isinstance(section, dict) and "id" in own:
        other = own["id"] != section.get("id", EnvSection.model_fields["id"].default)
        if other and section.pop("config", None):
            logger.warning("--env.id %s: the file's [env.config] is ignored", own["id"])
    _merge(data, typed)
    return keys


def _override_by_name(tables: list[Any], own: dict[str, Any]) -> None:
    """Writes `--env.NAME.key value` into the `[[env]]` table of that name."""
    default = EnvSection.model_fields["id"].default
    by_name = {str(t.get("name") or t.get("id", default)): t for t in tables if isinstance(t, dict)}
    for name, values in own.items():
        if name not in by_name or not isinstance(values, dict):
            raise ConfigError(
                f"--env.{name}: the run file has several environments; write --env.NAME.KEY, where "
                f"NAME is one of {', '.join(by_name)}"
            )
        _merge(by_name[name], values)


def _merge(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Merges `source` into `target` key by key; an empty table in `source` replaces the other."""
    for key, value in source.items():
        if isinstance(value, dict) and value and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def apply_overrides(data: dict[str, JsonValue], overrides: list[str]) -> set[str]:
    """Writes `--a.b value`, `--a.b=value`, `a.b=value` and `+a.b=value` into `data`.

    A value is parsed as TOML or JSON if it is valid (numbers, booleans, lists, tables), else it is
    a string. A table is merged key by key. A bare `--a.b` means true.

    Returns:
        The dotted keys that were set.

    Raises:
        ConfigError: an argument is not an override, or lacks a value that its key needs.
    """
    keys: set[str] = set()
    position = 0
    while position < len(overrides):
        argument = overrides[position]
        position += 1
        if _ASSIGNMENT.match(argument):
            argument = f"--{argument.removeprefix('+')}"
        if not argument.startswith("--") or len(argument) < 3:
            raise ConfigError(f"unexpected argument {argument!r}; overrides look like --run.seed 2")
        key, has_value, text = argument[2:].partition("=")
        key = key.replace("-", "_")
        if not all(key.split(".")):
            raise ConfigError(f"unexpected argument {argument!r}; overrides look like --run.seed 2")
        type_ = _type_of(key)
        if not has_value:
            if position < len(overrides) and not overrides[position].startswith("--"):
                text = overrides[position]
                position += 1
            elif type_ is Any or bool in (type_, *get_args(type_)):
                text = "true"
            else:
                raise ConfigError(f"--{key} needs a value{_example(key, type_)}")
        target = data
        *parents, last = key.split(".")
        for parent in parents:
            inner = target.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--{key}: {parent} is not a section")
            target = inner
        value = _parse_value(text, type_)
        if _is_table(type_) and not isinstance(value, dict):
            raise ConfigError(f"--{key}: {text!r} is not a table{_example(key, type_)}")
        _merge(target, {last: value})
        keys.add(key)
    return keys


FIRST_KEYS = (
    "run.name",
    "run.seed",
    "run.num_steps",
    "run.save_every",
    "run.eval_every",
    "run.keep_best",
    "run.resume",
    "model.path",
    "model.dtype",
    "model.device",
    "model.gradient_checkpointing",
    "model.lora.rank",
    "env.id",
    "env.url",
    "env.split",
    "env.config",
    "rollout.groups_per_step",
    "rollout.group_size",
    "rollout.max_concurrent",
    "rollout.max_turns",
    "rollout.max_turn_tokens",
    "rollout.max_context_tokens",
    "rollout.temperature",
    "rollout.keep",
    "rollout.max_staleness",
    "agent.run",
    "inference.backend",
    "inference.urls",
    "inference.python",
    "inference.num_servers",
    "reward.functions",
    "objective.preset",
    "objective.kl.coef",
    "train.learning_rate",
    "train.token_budget",
    "train.num_epochs",
    "train.num_minibatches",
    "eval.num_tasks",
    "eval.samples_per_task",
    "track.sinks",
)
"""The keys that users set first, which `--help` shows; `--help-all` shows every key."""


def valid_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, tuple[str, str]]:
    """Returns dotted key -> (default, description), in the order of definition."""
    keys: dict[str, tuple[str, str]] = {}
    for name, field in model.model_fields.items():
        if name == "envs":  # written as [[env]]; its keys are in docs/mixtures.md
            continue
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys |= valid_keys(inner, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True, validated_data={})
            shown = "required" if field.is_required() else json.dumps(default, default=str)
            keys[f"{prefix}{name}"] = (shown, " ".join((field.description or "").split()))
    return keys


_ASSIGNMENT = re.compile(r"[+]?[A-Za-z][\w-]*(\.[\w-]+)+=")
"""`a.b=value`, the overrides of other programs."""


def _type_of(key: str) -> Any:
    """Returns the type of a dotted key; Any for unknown keys and those within free-form tables."""
    type_: Any = RunConfig
    for name in key.split("."):
        if not (isinstance(type_, type) and issubclass(type_, BaseModel)):
            return Any
        field = type_.model_fields.get(name)
        if field is None:
            return Any
        type_ = field.annotation
    return type_


def _is_table(type_: Any) -> bool:
    return get_origin(type_) is dict or (isinstance(type_, type) and issubclass(type_, BaseModel))


def _example(key: str, type_: Any) -> str:
    """Returns the end of a message, with an example of setting the key on the command line."""
    if isinstance(type_, type) and issubclass(type_, BaseModel):
        name = next(iter(type_.model_fields))
        return (
            f"; set its keys, such as --{key}.{name}, or give JSON: --{key} '{{\"{name}\": ...}}'"
        )
    if get_origin(type_) is dict:
        return f"; give JSON or TOML, such as --{key} '{{\"name\": 1}}', or one key: --{key}.name 1"
    if get_origin(type_) is list and get_args(type_)[0] in (str, int, float):
        items = '"a", "b"' if get_args(type_)[0] is str else "1, 2"
        return f"; give JSON or TOML, such as --{key} '[{items}]'"
    if get_origin(type_) is list:
        return f"; give JSON or TOML, such as --{key} '[{{\"kind\": ...}}]'"
    return f", such as --{key} {_EXAMPLES.get(type_, 'VALUE')}"


_EXAMPLES: dict[Any, str] = {int: "10", float: "0.5", str: "NAME"}


def _parse_value(text: str, type_: Any) -> JsonValue:
    """Parses a value as TOML, else as JSON, else as a string.

    For a key of type str it is always a string, so that a name may be 7 or a date.
    """
    value: Any = text
    try:
        table = tomllib.loads(f"value = {text}")
        value = table["value"] if len(table) == 1 else text
    except tomllib.TOMLDecodeError:
        if text.lstrip()[:1] in ("{", "["):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                return text
    only_text = type_ is str or set(get_args(type_)) == {str, type(None)}
    is_json = isinstance(value, str | bool | int | float | list | dict)
    return text if not is_json or (only_text and not isinstance(value, str)) else value


def _resolve_beside(data: dict[str, JsonValue], path: Path) -> None:
    """Resolves relative paths of models, functions and classes that exist beside the run file."""
    for section, key in (
        ("model", "path"),
        ("model", "chat_template"),
        ("critic", "path"),
        ("teacher", "path"),
        ("objective", "loss"),
        ("objective", "advantage"),
        ("reward", "functions"),
        ("agent", "run"),
        ("agent", "home"),
        ("rollout", "generate"),
        ("rollout", "keep"),
    ):
        table = data.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(value, str):
            table[key] = _beside(value, path.parent)
        elif isinstance(table, dict) and isinstance(value, list):
            table[key] = [_beside(each, path.parent) for each in value]
    tables = data.get("env")
    for env in tables if isinstance(tables, list) else [tables]:
        # With a server, the id is the name that the server was started with.
        if isinstance(env, dict) and not env.get("url") and ".py:" in str(env.get("id")):
            env["id"] = _beside(env["id"], path.parent)
        if isinstance(env, dict) and isinstance(env.get("reward"), dict):
            _resolve_beside({"reward": env["reward"]}, path)


def _beside(text: JsonValue, folder: Path) -> JsonValue:
    if not isinstance(text, str):
        return text
    # path/to/file.py:function
    name, colon, function = text.rpartition(":") if ".py:" in text else (text, "", "")
    moved = not Path(name).exists() and (folder / name).exists()
    return f"{folder / name}{colon}{function}" if moved else text


def _explain(problem: ErrorDetails, dotted: str, *, typed: bool) -> str:
    """Returns a message for one validation error.

    Args:
        typed: whether the key was given on the command line.
    """
    kind, message = problem["type"], problem["msg"]
    if kind == "extra_forbidden" and "." not in dotted and isinstance(problem["input"], dict):
        return f"unknown section; {_closest_section(dotted, list(problem['input']))}"
    if kind == "extra_forbidden":
        return f"unknown key; {_closest(dotted)}"
    if kind in ("list_type", "dict_type", "model_type"):
        shown = json.dumps(problem["input"], default=str)
        what = "list" if kind == "list_type" else "table"
        key = ".".join(part for part in dotted.split(".") if not part.isdecimal())
        return f"{shown} is not a {what}" + (_example(key, _type_of(key)) if typed else "")
    if kind == "missing":
        return "missing; this key has no default"
    if message.startswith("Input should") and isinstance(problem["input"], str | int | float):
        return f"{message}, but it is {json.dumps(problem['input'])}"
    return message.removeprefix("Value error, ")


def _closest_section(name: str, keys: list[str]) -> str:
    sections = _sections()
    if close := difflib.get_close_matches(name, sections, n=1, cutoff=0.5):
        return f"did you mean [{close[0]}]?"
    holding = (s for s in sections if keys and all(_type_of(f"{s}.{k}") is not Any for k in keys))
    if section := next(holding, None):
        return f"did you mean [{section}]? It has {', '.join(keys)}"
    return f"sections are {', '.join(sections)} (see agentrl train --help)"


def _sections() -> list[str]:
    return [name for name in RunConfig.model_fields if name != "envs"]


GONE = {
    "run.force_resume": 'set run.resume = "force"',
    "rollout.drop_zero_variance": 'set rollout.keep = ["zero_variance"]',
    "rollout.min_group_size": "set rollout.stragglers = [min_group_size, straggler_timeout_s]",
    "rollout.straggler_timeout_s": "set rollout.stragglers = [min_group_size, straggler_timeout_s]",
    "inference.align_rounding": "leave it out",
    "train.max_nonfinite_steps": "leave it out; five skipped updates in a row end a run",
}
"""Keys of older releases, and what to do instead."""


def _closest(dotted: str) -> str:
    """Returns a hint for an unknown key: a similar key, its section's keys, or the sections."""
    if dotted in GONE:
        return GONE[dotted]
    keys, sections = list(valid_keys()), _sections()
    if re.match(r"env\.\d+\.", dotted):
        dotted = re.sub(r"\.\d+", "", dotted, count=1)
        keys = [*valid_keys(MixedEnvSection, "env."), *keys]
    section, _, leaf = dotted.rpartition(".")
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    names = {key.rsplit(".", 1)[-1]: key for key in reversed(siblings or keys)}
    initials = {"".join(word[0] for word in name.split("_")): name for name in names}
    short = initials.get(leaf) if siblings else None
    if not section and (key := next((key for key in keys if key.endswith(f"_{leaf}")), None)):
        return f"did you mean {key}?"  # `steps` is `run.num_steps`
    close = difflib.get_close_matches(leaf, names, n=1, cutoff=0.65)
    if name := short or next(iter(close), None):
        return f"did you mean {names[name]}?"
    elsewhere = next((f"did you mean {key}? " for key in keys if key.endswith(f".{leaf}")), "")
    if not elsewhere and (hint := hint_for(dotted)) is not None:
        return hint
    if siblings:
        return f"{elsewhere}the keys of {section} are {', '.join(reversed(names))}"
    if close := difflib.get_close_matches(dotted, sections, n=1, cutoff=0.5):
        return f"did you mean {close[0]}?"
    return f"sections are {', '.join(sections)} (see agentrl train --help)"
