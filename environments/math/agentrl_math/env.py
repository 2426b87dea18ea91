"""Math problems with one final answer, in a single turn or with a calculator.

The task sets, the calculator and the grader stand in modules of their own; this one says how an
episode goes. An agent's turn without a tool call is its final answer: it is graded and the episode
ends. References are read by the grader only and never shown.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.env.base import EnvConfig, Environment
from agentrl.env.registry import register
from agentrl.env.tools import tool
from agentrl.env.values import to_observation
from agentrl.errors import ConfigError, DataError
from agentrl.images import join_contents
from agentrl.types import JSON, Action, Message, StepResult, Task
from agentrl_math.calculator import calculate, show
from agentrl_math.tasks import Arithmetic, Keys, TaskSet, load_rows
from agentrl_rewards.math import Equivalence, extract_answer, grade_async

DEFAULT_INSTRUCTION = "Put the final answer on the last line, after `####`."


class MathConfig(EnvConfig):
    """Settings of the source of tasks, of their wording and of how answers are judged."""

    source: str | dict[str, str] = "arithmetic"
    """`arithmetic` (generated), `sample` (ten word problems), a .jsonl or .parquet file, a folder
    of them (one split per file), a table from split to file, or a Hugging Face name such as
    `openai/gsm8k`."""
    subset: str | None = None
    """Configuration of a Hugging Face dataset; `main` for openai/gsm8k."""
    input_key: str = "question"
    """Column with the question: a text, or chat messages that end with the user's."""
    label_key: str = "answer"
    """Column with the reference: bare, after `####`, or in `\\boxed{}`."""
    metadata_key: str | None = None
    """Column with an object, or its JSON text, that becomes the task's metadata."""

    operators: str = "+-*"
    """Arithmetic: any of `+`, `-` and `*`."""
    min_digits: int = Field(default=1, ge=1, le=50)
    """Arithmetic: fewest digits of a number."""
    digits: int = Field(default=2, ge=1, le=50)
    """Arithmetic: each number has `min_digits` to `digits` digits, every length equally often."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Arithmetic: size of the `train` split; None is endless."""
    num_test_tasks: int = Field(default=200, ge=1)
    """Arithmetic: size of the `test` split."""
    seed: int = 0
    """Arithmetic: another seed draws other tasks, of the same disjoint splits."""

    instruction: str = DEFAULT_INSTRUCTION
    """Put under every question, after an empty line; an empty text leaves the bare question."""
    system_prompt: str | None = None
    """Put first, unless the task is a chat that has one."""

    tools: bool = False
    """Offer a calculator; the agent may then use several turns."""
    max_tool_calls: int = Field(default=8, ge=1)
    """Further calls are answered by a request for the final answer."""

    equivalence: Equivalence | None = None
    """What equals the reference: `literal`, `numeric` or `symbolic` (see agentrl_rewards.math).
    None: literal for arithmetic, so that the question is no answer; numeric for `sample` and
    openai/gsm8k; else symbolic."""
    require_marker: bool = True
    """False judges the whole text where it holds no `####`, `\\boxed{}` or `<answer>`."""
    format_weight: float = Field(default=0.0, ge=0.0, le=1.0)
    """Reward for a marked answer, right or wrong; 1.0 is the reward for a right one."""
    grade_timeout_s: float = Field(default=2.0, gt=0, le=30)
    """Deadline of one symbolic comparison."""
    report_reference: bool = False
    """Put the reference into the info of the step that ends the episode, for the reward functions
    of a run file. The agent never sees it, but whoever may set this can read references."""

    @field_validator("operators")
    @classmethod
    def _known_operators(cls, operators: str) -> str:
        if not operators or set(operators) - set("+-*"):
            raise ValueError(f"'{operators}' must be one or more of + - *")
        return operators

    @model_validator(mode="after")
    def _digits_in_order(self) -> MathConfig:
        if self.min_digits > self.digits:
            raise ValueError(f"min_digits {self.min_digits} is above digits {self.digits}")
        return self


@register("math", max_sessions=4096)
class MathEnvironment(Environment):
    """Math problems with one final answer, which is graded; with `tools`, a calculator first."""

    Config = MathConfig

    @classmethod
    def load_shared(cls, config: MathConfig) -> TaskSet:
        """The task set of a configuration.

        Raises:
            ConfigError: a package that grading or loading needs is missing, or the source is odd.
            DataError: the source can't be read or breaks the row format.
        """
        if equivalence_of(config) == "symbolic" and not importlib.util.find_spec("math_verify"):
            raise ConfigError(
                "symbolic grading needs math-verify: pip install 'agentrl-gym[math]', or set "
                "equivalence to 'numeric'"
            )
        if config.source == "arithmetic":
            return Arithmetic(
                config.operators,
                config.min_digits,
                config.digits,
                config.num_tasks,
                config.num_test_tasks,
                config.seed,
            )
        keys = Keys(config.input_key, config.label_key, config.metadata_key)
        return load_rows(config.source, config.subset, keys)

    def splits(self) -> dict[str, int | None]:
        return self.shared.splits()

    def get(self, split: str, index: int) -> Task:
        return self.shared.get(split, index)

    def offered_tools(self) -> list[str]:
        return ["calculator"] if self.config.tools else []

    async def reset(self, task: Task, *, seed: int) -> list[Message]:
        if isinstance(task.reference, bool) or not isinstance(task.reference, str | int | float):
            raise DataError(f"task {task.id} needs a reference answer: a text or a number")
        self._num_calls = 0
        self.system_prompt = self.config.system_prompt
        if isinstance(task.prompt, str):
            messages: list[Message] = [{"role": "user", "content": task.prompt}]
        else:
            messages = [message.copy() for message in task.prompt]
        if self.config.instruction:
            last = messages[-1]
            last["content"] = join_contents([last["content"], self.config.instruction], "\n\n")
        return messages

    @tool
    async def calculator(
        self,
        expression: Annotated[str, Field(description="for example (3 + 4) * 2.5 / 7")],
    ) -> str:
        """Calculate an arithmetic expression exactly: + - * / // % ** and parentheses."""
        return show(calculate(expression))

    async def step(self, action: Action) -> StepResult:
        calls_a_tool = bool(action.tool_calls) or action.parse_error is not None
        if not (self.config.tools and calls_a_tool):
            return await self._judge(action.text)
        observation = await self._calculate(action)
        if self.episode.last_turn:  # no answer was given, which counts as a wrong one
            return StepResult(
                observation,
                truncated=True,
                reward_components={"correct": 0.0, "format": 0.0},
                info=self._reference(),
            )
        return StepResult(observation)

    def oracle(self) -> list[Action]:
        """The reference, marked as a final answer."""
        return [Action(text=f"#### {self.task.reference}")]

    async def _calculate(self, action: Action) -> list[Message]:
        """Run the calls that `max_tool_calls` still allows, and refuse the others."""
        left = max(self.config.max_tool_calls - self._num_calls, 0)
        num_calls = max(len(action.tool_calls), 1)  # an unreadable call counts too
        self._num_calls += num_calls
        if left >= num_calls:
            return to_observation(await self.run_tools(action), "run_tools()")
        request = (
            f"Not run: all {self.config.max_tool_calls} tool calls are used up. "
            "Reply with the final answer."
        )
        if action.parse_error is not None:
            return [{"role": "user", "content": request}]
        messages: list[Message] = []
        if left:
            allowed = replace(action, tool_calls=action.tool_calls[:left])
            messages = to_observation(await self.run_tools(allowed), "run_tools()")
        for call in action.tool_calls[left:]:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": request}
            )
        return messages

    def _reference(self) -> dict[str, JSON]:
        if not self.config.report_reference:
            return {}
        return {"reference": str(self.task.reference), "metadata": self.task.metadata}

    async def _judge(self, text: str) -> StepResult:
        """Grade the final answer and end the episode.

        Raises:
            GraderError: the grader failed; the episode has no reward.
        """
        result = await grade_async(
            text,
            str(self.task.reference),
            equivalence=equivalence_of(self.config),
            require_marker=self.config.require_marker,
            deadline_s=self.config.grade_timeout_s,
        )
        marked = float(extract_answer(text) is not None)
        info: dict[str, JSON] = {"extracted": result.extracted, "method": result.method}
        info |= self._reference()
        return StepResult(
            observation=[],
            reward=result.score + self.config.format_weight * marked,
            terminated=True,
            reward_components={"correct": result.score, "format": marked},
            info=info,
        )


def equivalence_of(config: MathConfig) -> Literal["literal", "numeric", "symbolic"]:
    if config.equivalence is not None:
        return config.equivalence
    if config.source == "arithmetic":
        return "literal"
    return "numeric" if config.source in ("sample", "openai/gsm8k") else "symbolic"
