"""Rows of the Berkeley Function Calling Leaderboard: the agent calls functions in a single turn.

    agentrl data get bfcl
    agentrl eval RUN.toml --env.id bfcl --env.config.source data/bfcl --eval.split simple_python

The agent is offered the functions of its row. They are described as the leaderboard describes them
to models with tool calling: `_` for `.` in names, JSON Schema types, and two added remarks. Calls
are not run; `agentrl_rewards.bfcl` judges them. Each category is a split.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from agentrl.data.hub import DATA_SETS
from agentrl.data.rows import read_rows
from agentrl.env.base import EnvConfig, Environment
from agentrl.env.registry import register
from agentrl.errors import DataError, GraderError
from agentrl.types import JSON, Action, StepResult, Task, ToolCall, ToolSpec
from agentrl_rewards.bfcl import TYPES, offered_name, why_wrong

_SCHEMA_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_SCHEMA_TYPES |= {list: "array", dict: "object"}


class BfclConfig(EnvConfig):
    """Settings of the data."""

    source: str = "data/bfcl"
    """Folder written by `agentrl data get bfcl`, with one split per `.jsonl` file; or a single such
    file."""
    report_reference: bool = False
    """Put the wanted calls and the functions into the `info` of the step that ends the episode, for
    the reward functions of a run file. The agent never sees them, but anyone who can set this can
    read references."""


@register("bfcl", max_sessions=4096)
class BfclEnvironment(Environment):
    """Tool calls with the right functions and arguments, in a single turn."""

    Config = BfclConfig

    @classmethod
    def load_shared(cls, config: BfclConfig) -> dict[str, list[Task]]:
        """Loads the tasks of each split.

        Raises:
            DataError: a file cannot be read, or a row is not in the leaderboard's format.
        """
        source = Path(config.source).expanduser()
        files = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
        if not files:
            raise DataError(
                f"folder {source} contains no .jsonl file; `agentrl data get bfcl` writes them"
            )
        return {
            file.stem: [_to_task(row, where) for where, row in read_rows(file)] for file in files
        }

    def splits(self) -> dict[str, int]:
        return {split: len(tasks) for split, tasks in self.shared.items()}

    def get(self, split: str, index: int) -> Task:
        return self.shared[split][index]

    def offered_tools(self) -> list[ToolSpec]:
        return [_to_tool(each) for each in self._row()["function"]]

    async def step(self, action: Action) -> StepResult:
        calls = [(each.name, each.arguments) for each in action.tool_calls]
        problem = why_wrong(calls, self._row())
        right = float(not problem)
        info: dict[str, JSON] = {"wrong": problem} if problem else {}
        if self.config.report_reference:
            info |= {"reference": self.task.reference, "metadata": self.task.metadata}
        return StepResult(
            [], right, terminated=True, reward_components={"correct": right}, info=info
        )

    def oracle(self) -> list[Action]:
        """Returns calls that the row accepts, without the arguments that may be left out."""
        calls = [
            ToolCall(f"call-{index}", name, arguments)
            for index, (name, arguments) in enumerate(_solution(self._row()))
        ]
        return [Action(text="" if calls else "None of them fits.", tool_calls=tuple(calls))]

    def _row(self) -> dict[str, Any]:
        reference: Any = self.task.reference
        return self.task.metadata | reference


def _solution(row: Any) -> list[tuple[str, dict[str, Any]]]:
    required = {each["name"]: each["parameters"].get("required", ()) for each in row["function"]}
    wanted = row["ground_truth"]
    if wanted is None:  # any call is right
        wanted = [{next(iter(required), ""): {}}]
    solved = []
    for ((name, accepted),) in (each.items() for each in wanted):
        arguments = _first(accepted, required[name])
        solved.append((offered_name(name), {key: _solve(arguments[key]) for key in arguments}))
    return solved


def _first(accepted: dict[str, list[Any]], required: Collection[str] = ()) -> dict[str, Any]:
    """Returns the first value of each key, without keys whose values include "" (optional)."""
    return {
        key: next((each for each in values if each != ""), "")
        for key, values in accepted.items()
        if key in required or "" not in values
    }


def _solve(value: Any) -> Any:
    """Resolves a listed value: nested objects list values, too, of which the first is taken."""
    if isinstance(value, list):
        return [_first(each) if isinstance(each, dict) else each for each in value]
    return _first(value) if isinstance(value, dict) else value


def _to_task(row: dict[str, Any], where: str) -> Task:
    if absent := sorted({"id", "question", "function", "ground_truth"} - row.keys()):
        raise DataError(
            f"{where}: missing column {', '.join(absent)}; `agentrl data get bfcl` writes it"
        )
    category = str(row["id"]).rpartition("_")[0]
    if category.startswith("simple_java"):
        raise DataError(f"{where}: {DATA_SETS['bfcl'].left_out}")
    try:
        (messages,) = row["question"]
        for each in row["function"]:
            _to_tool(each)
        why_wrong(_solution(row), row)
    except (GraderError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{where}: not a single-turn row of BFCL: {error!r}") from error
    metadata: dict[str, JSON] = {"category": category, "function": row["function"]}
    return Task(str(row["id"]), messages, {"ground_truth": row["ground_truth"]}, metadata)


def _to_tool(function: dict[str, Any]) -> ToolSpec:
    described = {
        "name": offered_name(function["name"]),
        "description": f"{function['description']} Note that the provided function is in Python 3 "
        "syntax.",
        "parameters": _to_schema(function["parameters"]),
    }
    return {"type": "function", "function": described}


def _to_schema(described: dict[str, Any]) -> dict[str, Any]:
    schema = {**described, "type": _SCHEMA_TYPES[TYPES[described.get("type", "any")]]}
    if "items" in described:
        schema["items"] = _to_schema(described["items"])
    if "properties" in described:
        schema["properties"] = {key: _to_schema(v) for key, v in described["properties"].items()}
        for each in schema["properties"].values():
            if each["type"] == "number":
                each["format"] = "float"
                each["description"] = f"{each.get('description', '')} This is a float type value."
    return schema
