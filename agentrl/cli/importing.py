"""`agentrl import`: a run file from the script or configuration of another trainer."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from agentrl.algo.objective import deep_merge
from agentrl.config import RunConfig
from agentrl.config.load import load_config
from agentrl.config.peers import Peer, Row, peers
from agentrl.config.toml_text import toml_key, toml_value
from agentrl.errors import AgentRLError, ConfigError, DataError

_TRL_CONFIGS = {"GRPOConfig", "GRPOTrainer", "LoraConfig", "ModelConfig", "ScriptArguments"}
PROMPT_ROOM = 4096
"""Tokens for the prompt where the other trainer does not say; also the default of the whole."""
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}
"""LoraConfig's names that say too little by themselves."""
_LISTS = {"reward.functions", "rollout.keep", "rollout.stop_strings", "inference.urls"}


@dataclass(slots=True)
class Imported:
    """A run file in the making."""

    trainer: str
    """Its name in `peers()`."""
    path: Path
    given: Mapping[str, Any]
    """The settings of the file, as they are called there."""
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Key here -> its value, and what it was there."""
    differs: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    """Setting there, or key here -> why it was not taken, and what a person has to do."""
    nothing: list[str] = field(default_factory=list)
    """What is always so here."""

    @property
    def peer(self) -> Peer:
        """The other trainer."""
        return peers()[self.trainer]

    def set(self, key: str, value: Any, comment: str) -> None:
        """Records the value of a key here, and what it was there: names of settings, which then
        need nothing more."""
        self.keys[key] = (value, comment)
        for word in re.split(r",? ", comment):
            if word in self.peer.rows:
                self.left.pop(word, None)

    def set_whole(self, key: str, value: float, comment: str) -> None:
        """Records a number that was computed, if it is whole."""
        if value >= 1 and value == int(value):
            self.set(key, int(value), comment)
        else:
            self.left[key] = f"{comment} = {value:g}: not a whole number; set {key}"

    def copy(self, key: str, theirs: str, default: Any) -> None:
        """Records a setting, or its default there, unless only running the program would tell."""
        if not isinstance(value := self.given.get(theirs, default), Unknown):
            self.set(key, value, theirs)

    def value(self, key: str, otherwise: Any = None) -> Any:
        """Returns the value of a key here."""
        return self.keys.get(key, (otherwise, ""))[0]

    def number(self, theirs: str, otherwise: Any = None) -> Any:
        """Returns a setting that is a number."""
        value = self.given.get(theirs)
        return value if isinstance(value, int | float) else otherwise


def import_file(path: Path, trainer: str | None = None) -> Imported:
    """Reads another trainer's file and returns what a run file takes of it.

    Args:
        path: a Python script with TRL's `GRPOConfig`, a yaml of TRL, verl or AReaL, a shell script
            that starts verl or slime, or a toml of prime-rl.
        trainer: a name of `peers()`; None finds it out.

    Raises:
        DataError: the file cannot be read as any of these; names the line where there is one.
        ConfigError: no trainer has such settings.
    """
    read, names = _FILES.get(path.suffix, _SHELL)
    try:
        given = read(path.read_text(encoding="utf-8-sig"))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    known = {each: len(given.keys() & peers()[each].rows.keys()) for each in names}
    name = trainer or max(names, key=known.__getitem__)
    if trainer is None and not known[name]:
        raise ConfigError(
            f"{path}: no settings of {', '.join(peers())}; name one with --from if there are"
        )
    found = Imported(name, path, given)
    _take_rows(found)
    if not given.keys().isdisjoint(found.peer.betas):
        betas = [found.number(*each) for each in zip(found.peer.betas, (0.9, 0.999), strict=True)]
        found.set("train.betas", betas, ", ".join(found.peer.betas))
    for follow in _FOLLOWS.get(name, ()):
        follow(found)
    _fill(found)
    _check(found)
    return found


def _take_rows(found: Imported) -> None:
    rows = found.peer.rows
    unknown, placed = {}, []
    for theirs, value in found.given.items():
        if theirs in rows:
            _take(found, rows[theirs], value)
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
        found.left["unknown"] = f"unknown here: {listed}"
    for theirs in found.peer.asked:
        if theirs not in found.given:
            wanted = rows[theirs].to or rows[theirs].note
            found.left[theirs] = f"{theirs}: not given; set {wanted}"


def _take(found: Imported, row: Row, value: Any) -> None:
    was = f"{row.theirs} = {_shown(value)}"
    needs_nothing = row.note.startswith("nothing")
    line = ""
    if isinstance(value, Unknown):
        line = f"{row.theirs}: {value.why}" + (f"; {row.note}" if row.note else "")
    elif row.needs and not _is_on(found.given.get(row.needs)):
        line, needs_nothing = f"{was}: without effect, since {row.needs} is off", True
    elif (mine := row.values.get(str(value).lower())) is not None:
        for key, each in mine.items():
            found.set(key, each, was)
        line, needs_nothing = "" if mine else f"{was}: the default here", True
    elif row.to is None:
        line = f"{was}: {row.note or 'no such value here'}"
    elif value is None:
        line, needs_nothing = f"{was}: the default here", True
    else:
        mine = [value] if row.to in _LISTS and not isinstance(value, list) else value
        found.set(row.to, mine, f"{was}; {row.note}" if row.note else was)
        if row.note:
            found.differs.append(f"{row.to}: {row.note}")
        for key, other in row.also.items() if _is_on(value) else ():
            found.set(key, other, was)
    if line and needs_nothing:
        found.nothing.append(line)
    elif line:
        found.left[row.theirs] = line


def _is_on(value: Any) -> bool:
    return value not in (None, False, 0, "") and str(value).lower() != "false"


def _fill(found: Imported) -> None:
    """Sets what the other trainer has as its default, and what follows from other keys."""
    if "objective.preset" not in found.keys:
        found.set("objective.preset", found.peer.preset, f"{found.peer.name}'s own defaults")
    for key, mine in found.peer.defaults.items():
        if key not in found.keys:
            found.set(key, mine, f"{found.peer.name}'s default")
    low, high = "objective.surrogate.low", "objective.surrogate.high"
    if low in found.keys and high not in found.keys:
        found.set(high, found.keys[low][0], f"{found.keys[low][1]}: both bounds")
    if not found.value("objective.kl.coef", 1):
        for key in [key for key in found.keys if key.startswith("objective.kl.")]:
            found.nothing.append(f"{found.keys.pop(key)[1]}: there is no KL")
    turn = found.value("rollout.max_turn_tokens", 0)
    if turn >= PROMPT_ROOM and "rollout.max_context_tokens" not in found.keys:
        comment = f"rollout.max_turn_tokens and {PROMPT_ROOM} for the prompt"
        found.set("rollout.max_context_tokens", turn + PROMPT_ROOM, comment)


# what follows from several settings ---------------------------------------------------------------


def _trl_sizes(found: Imported) -> None:
    per_device = found.number("per_device_train_batch_size", 8)
    accumulated = found.number("gradient_accumulation_steps", 1)
    per_step = found.number("steps_per_generation", accumulated)
    if (batch := found.number("generation_batch_size")) is None:
        batch = per_device * per_step
        text = "per_device_train_batch_size x steps_per_generation / num_generations"
    else:
        text = "generation_batch_size / num_generations"
        per_step = max(1, batch // per_device)
    found.set_whole("rollout.groups_per_step", batch / found.number("num_generations", 8), text)
    text = "steps_per_generation / gradient_accumulation_steps"
    found.set_whole("train.num_minibatches", per_step / accumulated, text)
    updates = found.value("train.num_minibatches", 1) * found.number("num_iterations", 1)
    if (most := found.number("max_steps", -1)) > 0:
        found.set_whole("run.num_steps", most / updates, "max_steps / updates-of-a-step")
    if isinstance(rounds := found.given.get("max_tool_calling_iterations"), int):
        found.set("rollout.max_turns", rounds + 1, "max_tool_calling_iterations, and the answer")


def _trl_objective(found: Imported) -> None:
    given = found.given
    if "objective.kl.coef" in found.keys and "objective.kl.gradient" not in found.keys:
        found.set("objective.kl.gradient", "unbiased", "use_bias_correction_kl = True, its default")
    low, high, cap = (f"objective.surrogate.{name}" for name in ("low", "high", "cap"))
    kind = found.value("objective.surrogate.kind")
    if kind:
        was = found.keys.pop(low, None), found.keys.pop(high, None), found.keys.pop(cap, None)
        if kind == "cispo":  # TRL's bound is of the ratio itself there, and there is no lower one
            bound = (was[1] or was[0] or (0.2, ""))[0]
            found.set(high, bound, "epsilon_high, or else epsilon")
        elif any(was):
            found.nothing.append(f"epsilon, epsilon_high, delta: without effect in {kind}")
    if found.value("objective.aggregate.kind") == "constant":
        found.copy("objective.aggregate.max_tokens", "max_completion_length", 512)
    if found.value("objective.preset") == "bnpo":
        found.copy("objective.aggregate.local_rows", "per_device_train_batch_size", 8)
    corrected = _is_on(given.get("vllm_importance_sampling_correction", True))
    if corrected and _is_on(given.get("use_vllm")):
        if "vllm_importance_sampling_mode" not in given:
            comment = "vllm_importance_sampling_mode = sequence_mask, its default"
            found.set("objective.off_policy.level", "sequence_product", comment)
            found.set("objective.off_policy.outside", "zero", comment)
        if kind == "vespo":
            found.left["vespo"] = "vespo: TRL weights by the sampler's ratio in phi, here beside it"
    if found.value("objective.ratio.level") == "sequence" and _is_on(given.get("beta")):
        found.left["beta"] = (
            "beta: TRL weights the KL with the ratio of the sequence, here each token's own does"
        )


def _trl_environment(found: Imported) -> None:
    """Names the environment, if the script has its class or reads its rows from a file."""
    made, rows = found.given.get("environment_factory"), found.given.get("train_dataset")
    is_file = isinstance(rows, str) and rows.endswith((".jsonl", ".parquet"))
    if isinstance(made, _Function):
        found.set("env.id", f"trl:{found.path}:{made}", "environment_factory")
    elif made is None and is_file:
        found.set("env.id", "trl", "rows with prompts")
    if "env.id" in found.keys and is_file:
        found.set("env.config.tasks", rows, "train_dataset")


def _trl_rewards(found: Imported) -> None:
    if (functions := found.given.get("reward_funcs")) is None:
        return
    path = found.path
    named = [str(each) for each in functions if isinstance(each, _Function)]
    if not named or len(named) != len(functions):
        found.left["reward_funcs"] = (
            "reward_funcs: not functions of this file; name them in reward.functions"
        )
        return
    found.set("reward.functions", [f"{path}:{each}" for each in named], "reward_funcs")
    if not re.search(r"__name__\s*==", path.read_text(encoding="utf-8-sig")):
        found.left["__main__"] = (
            f"{path} is imported for its functions: put what trains below "
            '`if __name__ == "__main__":`'
        )


def _verl(found: Imported) -> None:
    mini_key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    batch, mini = (found.number(key) for key in ("data.train_batch_size", mini_key))
    if batch and mini:
        text = f"data.train_batch_size / {mini_key}"
        found.set_whole("train.num_minibatches", batch / mini, text)
    prompt, answer = (found.number(f"data.max_{part}_length") for part in ("prompt", "response"))
    if prompt and answer:
        text = "data.max_prompt_length + data.max_response_length"
        found.set_whole("rollout.max_context_tokens", prompt + answer, text)
    if file := found.given.get("custom_reward_function.path"):
        function = found.given.get("custom_reward_function.name", "compute_score")
        text = "custom_reward_function.path custom_reward_function.name"
        found.set("reward.functions", [f"{file}:{function}"], text)


def _slime(found: Imported) -> None:
    played = found.number("--rollout-batch-size", 0) * found.number("--n-samples-per-prompt", 0)
    batch = found.number("--global-batch-size")
    if "train.num_minibatches" not in found.keys and batch and played:
        text = "--rollout-batch-size x --n-samples-per-prompt / --global-batch-size"
        found.set_whole("train.num_minibatches", played / batch, text)


def _prime_rl(found: Imported) -> None:
    sources = found.given.get("orchestrator.train.source")
    if isinstance(sources, list) and len(sources) == 1:
        taskset = dict(sources[0].get("env", {}).get("taskset", {}))
        if taskset_id := taskset.pop("id", None):
            found.set("env.id", f"verifiers:{taskset_id}", "orchestrator.train.source")
            if taskset:
                found.set("env.config.settings", taskset, "its taskset")
    if "orchestrator.algo.type" not in found.given:
        found.set("objective.scale.kind", "none", "prime-rl's default, GRPO without a deviation")
    if batch := found.number("orchestrator.batch_size"):
        samples = found.value("rollout.group_size", 8)
        text = "orchestrator.batch_size / group_size"
        found.set_whole("rollout.groups_per_step", batch / samples, text)


_FOLLOWS: dict[str, tuple[Callable[[Imported], None], ...]] = {
    "trl": (_trl_sizes, _trl_objective, _trl_environment, _trl_rewards),
    "verl": (_verl,),
    "slime": (_slime,),
    "prime-rl": (_prime_rl,),
}
"""What to add after the rows of the table, by trainer."""


def _check(found: Imported) -> None:
    """Names what a run file cannot do without, and what the schema refuses."""
    if "model.path" not in found.keys:
        found.left["model.path"] = "model.path: set it"
    if not any(key.startswith("env.") for key in found.keys):
        found.left["env"] = (
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
                found.left["configuration"] = line
                return
            _, comment = found.keys.pop(key)
            found.left[key] = f"{comment}: {line}"


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
    for title, lines in (("For you to do", found.left.values()), ("Nothing to set", found.nothing)):
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


def _of_toml(text: str) -> dict[str, Any]:
    return _flat(tomllib.loads(text))


def _of_yaml(text: str) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(loaded, dict):
        raise ValueError("it is not a table of settings")
    return _resolved(_flat(loaded))


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
    slime, trl = (peers()[name].rows.keys() for name in ("slime", "trl"))
    # `trl grpo --num_generations 8` has the names of GRPOConfig with dashes before them.
    if slime.isdisjoint(given) and any(name.lstrip("-") in trl for name in given):
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


_Reader = Callable[[str], dict[str, Any]]
_OF_YAML: tuple[_Reader, tuple[str, ...]] = _of_yaml, ("trl", "verl", "areal")
_FILES: dict[str, tuple[_Reader, tuple[str, ...]]] = {
    ".py": (_of_python, ("trl",)),
    ".toml": (_of_toml, ("prime-rl",)),
    ".yaml": _OF_YAML,
    ".yml": _OF_YAML,
}
"""By suffix: what reads the settings of such a file, and the trainers that have such files."""
_SHELL: tuple[_Reader, tuple[str, ...]] = _of_shell, ("trl", "verl", "slime")
