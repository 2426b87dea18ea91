"""`agentrl import`: a run file from the script or configuration of another trainer."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from agentrl.algo.objective import deep_merge
from agentrl.config import RunConfig
from agentrl.config.load import load_config
from agentrl.config.peers import PEERS, Peer, Row
from agentrl.config.toml_text import toml_key, toml_value
from agentrl.errors import AgentRLError, ConfigError, DataError

_TRL_CONFIGS = {"GRPOConfig", "GRPOTrainer", "LoraConfig", "ModelConfig", "ScriptArguments"}
PROMPT_ROOM = 4096
"""Tokens for the prompt where the other trainer does not say; also the default of the whole."""
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}
"""LoraConfig's names that say too little by themselves."""


@dataclass(slots=True)
class Imported:
    """A run file in the making."""

    trainer: str
    """Its name in `PEERS`."""
    given: Mapping[str, Any]
    """The settings of the file, as they are called there."""
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Key here -> its value, and what it was there."""
    differs: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What was not taken and why, and what a person has to do."""
    nothing: list[str] = field(default_factory=list)
    """What is always so here."""

    @property
    def peer(self) -> Peer:
        """The other trainer."""
        return PEERS[self.trainer]

    def set(self, key: str, value: Any, comment: str) -> None:
        """Records the value of a key here, and what it was there."""
        self.keys[key] = (value, comment)


def import_file(path: Path, trainer: str | None = None) -> Imported:
    """Reads another trainer's file and returns what a run file takes of it.

    Args:
        path: a Python script with TRL's `GRPOConfig`, a yaml of TRL, verl or AReaL, a shell script
            that starts verl or slime, or a toml of prime-rl.
        trainer: a name of `PEERS`; None finds it out.

    Raises:
        DataError: the file cannot be read as any of these; names the line where there is one.
        ConfigError: no trainer has such settings.
    """
    try:
        given = _settings(path, path.read_text(encoding="utf-8-sig"))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    name = trainer or _trainer_of(path, given)
    if name is None:
        known = ", ".join(PEERS)
        raise ConfigError(f"{path}: no settings of {known}; name one with --from if there are")
    found = Imported(name, given)
    rows = {row.theirs: row for row in found.peer.rows}
    unknown, placed = {}, []
    for theirs, value in given.items():
        if theirs in rows:
            _take(found, rows[theirs], value, given)
        elif any(fnmatchcase(theirs, pattern) for pattern in found.peer.placement):
            placed.append(theirs)
        else:
            unknown[theirs] = value
    if placed:
        found.nothing.append(
            f"{len(placed)} settings of machines, memory and servers: {', '.join(placed)}"
        )
    if unknown:
        listed = ", ".join(f"{theirs} = {_shown(value)}" for theirs, value in unknown.items())
        found.left.append(f"unknown here: {listed}")
    _sizes(found, name, given)
    if "objective.preset" not in found.keys:
        found.set("objective.preset", found.peer.preset, f"{found.peer.name}'s own defaults")
    for key, mine in found.peer.defaults.items():
        if key not in found.keys:
            found.set(key, mine, f"{found.peer.name}'s default")
    low, high = "objective.surrogate.low", "objective.surrogate.high"
    if low in found.keys and high not in found.keys:
        found.set(high, found.keys[low][0], f"{found.keys[low][1]}: both bounds")
    for theirs in found.peer.asked:
        if theirs not in given:
            found.left.append(f"{theirs}: not given; set {rows[theirs].to or rows[theirs].note}")
    if not found.keys.get("objective.kl.coef", (1, ""))[0]:
        for key in [key for key in found.keys if key.startswith("objective.kl.")]:
            found.nothing.append(f"{found.keys.pop(key)[1]}: there is no KL")
    turn = found.keys.get("rollout.max_turn_tokens", (0, ""))[0]
    if turn >= PROMPT_ROOM and "rollout.max_context_tokens" not in found.keys:
        comment = f"rollout.max_turn_tokens and {PROMPT_ROOM} for the prompt"
        found.set("rollout.max_context_tokens", turn + PROMPT_ROOM, comment)
    if name == "trl":
        _trl(found, given, path)
    if name == "verl" and "custom_reward_function.path" in given:
        file = given["custom_reward_function.path"]
        function = given.get("custom_reward_function.name", "compute_score")
        found.set("reward.functions", [f"{file}:{function}"], "custom_reward_function")
        found.left = [line for line in found.left if not line.startswith("custom_reward_function.")]
    _check(found)
    return found


def _take(found: Imported, row: Row, value: Any, given: Mapping[str, Any]) -> None:
    """Records one setting."""
    was = f"{row.theirs} = {_shown(value)}"
    if isinstance(value, Unknown):
        lines = found.nothing if row.note.startswith("nothing") else found.left
        lines.append(f"{row.theirs}: {value.why}" + (f"; {row.note}" if row.note else ""))
        return
    if row.needs and not _is_on(given.get(row.needs)):
        found.nothing.append(f"{was}: without effect, since {row.needs} is off")
        return
    by_value = row.values.get(str(value).lower()) if row.values else None
    if by_value is not None:
        for key, mine in by_value.items():
            found.set(key, mine, was)
        if not by_value:
            found.nothing.append(f"{was}: the default here")
    elif row.to is None:
        line = f"{was}: {row.note or 'no such value here'}"
        (found.nothing if row.note.startswith("nothing") else found.left).append(line)
    elif value is None:
        found.nothing.append(f"{was}: the default here")
    else:
        mine = [value] if row.to in _LISTS and not isinstance(value, list) else value
        found.set(row.to, mine, f"{was}; {row.note}" if row.note else was)
        if row.note:
            found.differs.append(f"{row.to}: {row.note}")
        for key, other in row.also.items() if _is_on(value) else ():
            found.set(key, other, was)


_LISTS = {"reward.functions", "rollout.keep", "rollout.stop_strings", "inference.urls"}


def _is_on(value: Any) -> bool:
    return value not in (None, False, 0, "") and str(value).lower() != "false"


def _sizes(found: Imported, name: str, given: Mapping[str, Any]) -> None:
    """Sets what follows from several settings: groups and minibatches of a step, betas, lengths."""

    def number(key: str, otherwise: Any = None) -> Any:
        value = given.get(key)
        return value if isinstance(value, int | float) else otherwise

    def whole(key: str, value: float, comment: str) -> None:
        if value >= 1 and value == int(value):
            found.set(key, int(value), comment)
            for part in comment.split(" ")[::2]:
                found.left = [line for line in found.left if not line.startswith(f"{part} = ")]
        else:
            found.left.append(f"{comment} = {value:g}: not a whole number; set {key}")

    for first, second in (
        ("adam_beta1", "adam_beta2"),
        ("--adam-beta1", "--adam-beta2"),
        ("actor.optimizer.beta1", "actor.optimizer.beta2"),
    ):
        if first in given or second in given:
            betas = [number(first, 0.9), number(second, 0.999)]
            found.set("train.betas", betas, f"{first}, {second}")
            prefix = (f"{first} = ", f"{second} = ")
            found.left = [line for line in found.left if not line.startswith(prefix)]
    if name == "trl":
        samples, accumulated = (
            number("num_generations", 8),
            number("gradient_accumulation_steps", 1),
        )
        per_step = number("steps_per_generation", accumulated)
        batch = number("generation_batch_size")
        if batch is None:
            batch = number("per_device_train_batch_size", 8) * per_step
            text = "per_device_train_batch_size x steps_per_generation / num_generations"
        else:
            text = "generation_batch_size / num_generations"
            per_step = max(1, batch // number("per_device_train_batch_size", 8))
        whole("rollout.groups_per_step", batch / samples, text)
        whole(
            "train.num_minibatches",
            per_step / accumulated,
            "steps_per_generation / gradient_accumulation_steps",
        )
        updates = found.keys.get("train.num_minibatches", (1, ""))[0] * number("num_iterations", 1)
        if (number("max_steps") or -1) > 0:
            whole("run.num_steps", given["max_steps"] / updates, "max_steps / updates-of-a-step")
    if name == "verl":
        batch, mini = (number(key) for key in ("data.train_batch_size", _MINI))
        if batch and mini:
            whole("train.num_minibatches", batch / mini, f"data.train_batch_size / {_MINI}")
        prompt, answer = (number(f"data.max_{part}_length") for part in ("prompt", "response"))
        if prompt and answer:
            whole(
                "rollout.max_context_tokens",
                prompt + answer,
                "data.max_prompt_length + data.max_response_length",
            )
    if name == "slime" and "train.num_minibatches" not in found.keys:
        played = number("--rollout-batch-size", 0) * number("--n-samples-per-prompt", 0)
        if (batch := number("--global-batch-size")) and played:
            text = "--rollout-batch-size x --n-samples-per-prompt / --global-batch-size"
            whole("train.num_minibatches", played / batch, text)
    sources = given.get("orchestrator.train.source")
    if name == "prime-rl" and isinstance(sources, list) and len(sources) == 1:
        taskset = dict(sources[0].get("env", {}).get("taskset", {}))
        if taskset_id := taskset.pop("id", None):
            found.set("env.id", f"verifiers:{taskset_id}", "orchestrator.train.source")
            found.left = [line for line in found.left if "train.source" not in line]
            if taskset:
                found.set("env.config.settings", taskset, "its taskset")
    if name == "prime-rl" and "orchestrator.algo.type" not in given:
        found.set("objective.scale.kind", "none", "prime-rl's default, GRPO without a deviation")
    if name == "prime-rl" and (batch := number("orchestrator.batch_size")):
        samples = found.keys.get("rollout.group_size", (8, ""))[0]
        whole("rollout.groups_per_step", batch / samples, "orchestrator.batch_size / group_size")


_MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


def _trl(found: Imported, given: Mapping[str, Any], path: Path) -> None:
    """Adds what follows from TRL's other settings, and its functions by their names."""
    if "objective.kl.coef" in found.keys and "objective.kl.gradient" not in found.keys:
        found.set("objective.kl.gradient", "unbiased", "use_bias_correction_kl = True, its default")
    low, high, cap = (f"objective.surrogate.{name}" for name in ("low", "high", "cap"))
    kind = found.keys.get("objective.surrogate.kind", ("", ""))[0]
    if kind:
        was = found.keys.pop(low, None), found.keys.pop(high, None), found.keys.pop(cap, None)
        if kind == "cispo":  # TRL's bound is of the ratio itself there, and there is no lower one
            bound = (was[1] or was[0] or (0.2, ""))[0]
            found.set(high, bound, "epsilon_high, or else epsilon")
        elif any(was):
            found.nothing.append(f"epsilon, epsilon_high, delta: without effect in {kind}")
    if found.keys.get("objective.aggregate.kind", ("", ""))[0] == "constant":
        longest = given.get("max_completion_length", 512)
        found.set("objective.aggregate.max_tokens", longest, "max_completion_length")
    if found.keys.get("objective.preset", ("", ""))[0] == "bnpo":
        local = given.get("per_device_train_batch_size", 8)
        found.set("objective.aggregate.local_rows", local, "per_device_train_batch_size")
    corrected = _is_on(given.get("vllm_importance_sampling_correction", True))
    if _is_on(given.get("use_vllm")) and corrected:
        if "vllm_importance_sampling_mode" not in given:
            comment = "vllm_importance_sampling_mode = sequence_mask, its default"
            found.set("objective.off_policy.level", "sequence_product", comment)
            found.set("objective.off_policy.outside", "zero", comment)
        if kind == "vespo":
            found.left.append("vespo: TRL weights by the sampler's ratio in phi, here beside it")
    if found.keys.get("objective.ratio.level", ("", ""))[0] == "sequence" and _is_on(
        given.get("beta")
    ):
        found.left.append(
            "beta: TRL weights the KL with the ratio of the sequence, here each token's own does"
        )
    if isinstance(rounds := given.get("max_tool_calling_iterations"), int):
        found.set("rollout.max_turns", rounds + 1, "max_tool_calling_iterations, and the answer")
        found.left = [each for each in found.left if not each.startswith("max_tool_calling")]
    _trl_environment(found, given, path)
    functions = given.get("reward_funcs")
    if functions is None:
        return
    found.left = [line for line in found.left if not line.startswith("reward_funcs")]
    named = [str(each) for each in functions if isinstance(each, _Function)]
    if named and len(named) == len(functions):
        found.set("reward.functions", [f"{path}:{each}" for each in named], "reward_funcs")
        if not re.search(r"__name__\s*==", path.read_text(encoding="utf-8-sig")):
            found.left.append(
                f"{path} is imported for its functions: put what trains below "
                '`if __name__ == "__main__":`'
            )
    else:
        found.left.append("reward_funcs: not functions of this file; name them in reward.functions")


def _trl_environment(found: Imported, given: Mapping[str, Any], path: Path) -> None:
    """Names the environment, if the script has its class or reads its rows from a file."""
    made, rows = given.get("environment_factory"), given.get("train_dataset")
    is_file = isinstance(rows, str) and rows.endswith((".jsonl", ".parquet"))
    if isinstance(made, _Function):
        found.set("env.id", f"trl:{path}:{made}", "environment_factory")
    elif made is None and is_file:
        found.set("env.id", "trl", "rows with prompts")
    if "env.id" in found.keys:
        names = ("environment_factory",) + (("train_dataset",) if is_file else ())
        found.left = [line for line in found.left if not line.startswith(names)]
    if "env.id" in found.keys and is_file:
        found.set("env.config.tasks", rows, "train_dataset")


def _check(found: Imported) -> None:
    """Names what a run file cannot do without, and what the schema refuses."""
    if "model.path" not in found.keys:
        found.left.append("model.path: set it")
    if not any(key.startswith("env.") for key in found.keys):
        found.left.append(
            'env: name the environment; rows of questions and answers are env.id = "math" with '
            "env.config.source (docs/environment_keys.md)"
        )
    for _ in range(len(found.keys)):
        try:
            config_of(found)
            return
        except AgentRLError as error:
            line = str(error).splitlines()[0]
            key = next((each for each in found.keys if each in line), None)
            if key is None:
                found.left.append(line)
                return
            _, comment = found.keys.pop(key)
            found.left.append(f"{comment}: {line}")


def config_of(found: Imported) -> RunConfig:
    """Returns the imported run; its model is named MODEL if the other trainer names none.

    Raises:
        ConfigError: the schema refuses it.
    """
    data: dict[str, Any] = {"model": {"path": "MODEL"}}
    for key, (value, _) in found.keys.items():
        data = deep_merge(data, _nested(key, value))
    return load_config(data)


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


# the file that is written ---------------------------------------------------------------------


def run_file(found: Imported, source: Path) -> str:
    """Returns the run file: every key with what it was there, then what was not taken."""
    order = {section: place for place, section in enumerate(RunConfig.model_fields)}
    tables: dict[str, list[str]] = {}
    for key, (value, comment) in found.keys.items():
        table, _, name = key.rpartition(".")
        line = f"{toml_key(name)} = {toml_value(value)}  # {comment}"
        tables.setdefault(table, []).append(line)
    text = f"# From {source.name}, settings of {found.peer.version.replace('`', '')}.\n"
    for table in sorted(tables, key=lambda name: (order.get(name.partition(".")[0], 99), name)):
        text += f"\n[{table}]\n" + "\n".join(tables[table]) + "\n"
    for title, lines in (("For you to do", found.left), ("Nothing to set", found.nothing)):
        if lines:
            text += f"\n# {title}:\n" + "".join(f"# * {line}\n" for line in lines)
    return text


# what is read ---------------------------------------------------------------------------------


class _Function(str):
    """The name of a function or class of the script."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only running the program would tell."""

    why: str


def _shown(value: Any) -> str:
    return "?" if isinstance(value, Unknown) else str(value)


def _settings(path: Path, text: str) -> dict[str, Any]:
    if path.suffix == ".py":
        return _of_python(text)
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            loaded = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
        if not isinstance(loaded, dict):
            raise ValueError("it is not a table of settings")
        return _resolved(_flat(loaded))
    if path.suffix == ".toml":
        return _flat(tomllib.loads(text))
    return _of_shell(text)


def _trainer_of(path: Path, given: Mapping[str, Any]) -> str | None:
    """Returns the trainer that has most of the settings, of those that read such files."""
    of_suffix = {".py": ("trl",), ".toml": ("prime-rl",), ".yaml": ("trl", "verl", "areal")}
    of_suffix[".yml"] = of_suffix[".yaml"]
    names = of_suffix.get(path.suffix, ("trl", "verl", "slime"))
    known = {name: given.keys() & {row.theirs for row in PEERS[name].rows} for name in names}
    most = max(names, key=lambda name: len(known[name]))
    return most if known[most] else None


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted keys; a table that is itself a value there stays one."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        whole = isinstance(value, Mapping) and not f"{prefix}{key}".endswith("_kwargs")
        flat |= _flat(value, f"{prefix}{key}.") if whole else {f"{prefix}{key}": value}
    return flat


def _resolved(flat: dict[str, Any]) -> dict[str, Any]:
    """Replaces references to other settings (`${actor.path}`); numbers such as 1e-6 are numbers."""

    def resolve(value: Any, depth: int = 0) -> Any:
        if isinstance(value, list):
            return [resolve(each, depth) for each in value]
        if not isinstance(value, str):
            return value
        whole = re.fullmatch(r"\$\{([\w.]+)\}", value)
        if whole and whole[1] in flat and depth < 10:
            return resolve(flat[whole[1]], depth + 1)
        if "${" in value:
            return Unknown(f"{value} is known only when the program runs")
        return _number(value)

    return {key: resolve(value) for key, value in flat.items()}


def _number(text: str) -> Any:
    """Returns a number for text that is one, as yaml leaves 1e-6 a text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def _of_shell(text: str) -> dict[str, Any]:
    """Returns the settings of a script's commands: verl's `a.b=c`, slime's `--flag value`."""
    text = re.sub(r"\\\r?\n", " ", text)
    words = [word for line in text.splitlines() for word in (*_words(line), "\n")]
    variables = {}
    for word in words:
        if match := re.fullmatch(r"(\w+)=(?:\$\{\w+:-([^$}]*)\}|([^$]*))", word):
            variables[match[1]] = match[3] if match[2] is None else match[2]

    def value_of(word: str) -> Any:
        def variable(match: re.Match[str]) -> str:
            name, otherwise = match[1] or match[3], match[2]
            return variables.get(name, otherwise if otherwise is not None else match[0])

        word = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", variable, word)
        if "$" in word:
            return Unknown(f"{word} is known only when the script runs")
        if word.startswith(("[", "{")):
            try:
                return ast.literal_eval(word)
            except (ValueError, SyntaxError):
                return [each.strip("'\" ") for each in word.strip("[]").split(",")]
        return _number(word)

    given: dict[str, Any] = {}
    for place, word in enumerate(words):
        dotted = re.fullmatch(r"\+{0,2}([\w]+(?:\.[\w]+)+)=(.*)", word, re.DOTALL)
        if dotted:
            given[dotted[1]] = value_of(dotted[2])
        elif re.fullmatch(r"--[a-z][\w-]*(=.*)?", word, re.DOTALL):
            name, is_set, value = word.partition("=")
            following = []
            for other in words[place + 1 :]:
                if re.match(r"--[a-z]|[()\n]|\$\{\w+\[@\]\}", other):
                    break
                following.append(value_of(other))
            values = [value_of(value)] if is_set else following
            given[name] = True if not values else values[0] if len(values) == 1 else values
    slime, trl = ({row.theirs for row in PEERS[name].rows} for name in ("slime", "trl"))
    # `trl grpo --num_generations 8` has the names of GRPOConfig with dashes before them.
    if not slime & given.keys() and any(name.lstrip("-") in trl for name in given):
        return {name.lstrip("-"): value for name, value in given.items()}
    return given


def _words(line: str) -> list[str]:
    """Returns the words of a line of a script without its comment."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="()")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        return list(lexer)
    except ValueError:  # a quotation over several lines, such as JSON for ray
        return []


def _of_python(text: str) -> dict[str, Any]:
    """Returns the arguments of `GRPOConfig`, `GRPOTrainer` and `LoraConfig` in a script."""
    tree = ast.parse(text)
    constants: dict[str, Any] = {}
    functions = {
        each.name
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            constants[statement.targets[0].id] = statement.value

    def value_of(node: ast.expr, depth: int = 0) -> Any:
        if isinstance(node, ast.Name) and node.id in functions:
            return _Function(node.id)
        if isinstance(node, ast.Name) and node.id in constants and depth < 10:
            return value_of(constants[node.id], depth + 1)
        if isinstance(node, ast.List | ast.Tuple):
            return [value_of(each, depth) for each in node.elts]
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("load_dataset"):
            files = {each.arg: value_of(each.value, depth) for each in node.keywords}
            if isinstance(files.get("data_files"), str):
                return files["data_files"]
        try:
            return ast.literal_eval(node)
        except ValueError:
            return Unknown(f"{ast.unparse(node)} is known only when the script runs")

    given: dict[str, Any] = {}
    for call in ast.walk(tree):
        name = call.func if isinstance(call, ast.Call) else None
        named = name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", None)
        if not isinstance(call, ast.Call) or named not in _TRL_CONFIGS:
            continue
        for keyword in call.keywords:
            if keyword.arg is None:
                given[f"**{ast.unparse(keyword.value)}"] = Unknown("known only when it runs")
            elif not (named == "GRPOTrainer" and keyword.arg in ("args", "peft_config")):
                key = _LORA.get(keyword.arg, keyword.arg) if named == "LoraConfig" else keyword.arg
                given[key] = value_of(keyword.value)
    functions_given = given.get("reward_funcs")
    if isinstance(functions_given, _Function):
        given["reward_funcs"] = [functions_given]
    return given
