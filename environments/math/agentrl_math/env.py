"""Math problems with one final answer, in a single turn or with a calculator.

Task sets, calculator and grader are in other modules; this one runs the episodes. A turn without a
tool call is the agent's final answer: it is graded, and the episode ends. Only the grader reads the
reference; the agent never sees it.
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
    """Settings of the tasks, the prompt and the grading."""

    source: str | dict[str, str] = "arithmetic"
    """`arithmetic` (generated), `sample` (ten word problems), a .jsonl or .parquet file, a folder
    of them (one split per file), a table from split to file, or a Hugging Face name such as
    `openai/gsm8k`."""
    subset: str | None = None
    """Configuration of a Hugging Face dataset; None uses `main` for openai/gsm8k."""
    input_key: str = "question"
    """Column with the question: a string, or chat messages that end with the user's."""
    label_key: str = "answer"
    """Column with the reference: bare, after `####`, or in `\\boxed{}`."""
    metadata_key: str | None = None
    """Column with an object, or its JSON text, that becomes the task's metadata."""
    public_keys: tuple[str, ...] = ()
    """Columns that a function of `rollout.generate` or an agent finds in `task.metadata`."""

    operators: str = "+-*"
    """Arithmetic: any of `+`, `-` and `*`."""
    min_digits: int = Field(default=1, ge=1, le=50)
    """Arithmetic: minimum number of digits of a number."""
    digits: int = Field(default=2, ge=1, le=50)
    """Arithmetic: maximum number of digits. All lengths from `min_digits` are equally likely."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Arithmetic: size of the `train` split; None for unlimited."""
    num_test_tasks: int = Field(default=200, ge=1)
    """Arithmetic: size of the `test` split."""
    seed: int = 0
    """Arithmetic: seed of the tasks. The splits are disjoint for every pair of seeds."""

    instruction: str = DEFAULT_INSTRUCTION
    """Text put below every question, after an empty line; "" adds nothing."""
    system_prompt: str | None = None
    """System prompt, unless the task is a chat that has its own."""

    tools: bool = False
    """Offer a calculator; the agent may then take several turns."""
    max_tool_calls: int = Field(default=8, ge=1)
    """Tool calls per episode; further calls are not run but answered with a request for the final
    answer."""

    equivalence: Equivalence | None = None
    """How an answer may express the reference: `literal`, `numeric` or `symbolic` (see
    agentrl_rewards.math). None: literal for arithmetic, so that repeating the question is not an
    answer; numeric for `sample` and openai/gsm8k; otherwise symbolic."""
    require_marker: bool = True
    """False judges the whole text if it contains no `####`, `\\boxed{}` or `<answer>`."""
    format_weight: float = Field(default=0.0, ge=0.0, le=1.0)
    """Extra reward for a marked answer, right or wrong. A right answer's reward is 1.0."""
    grade_timeout_s: float = Field(default=2.0, gt=0, le=30)
    """CPU seconds that one symbolic comparison may take."""
    report_reference: bool = False
    """Put the reference into the `info` of the step that ends the episode, for the reward functions
    of a run file. The agent never sees it, but anyone who can set this can read references."""

    @field_validator("operators")
    @classmethod
    def _check_operators(cls, operators: str) -> str:
        if not operators or set(operators) - set("+-*"):
            raise ValueError(f"operators is '{operators}'; give one or more of + - *")
        return operators

    @model_validator(mode="after")
    def _check_digits(self) -> MathConfig:
        if self.min_digits > self.digits:
            raise ValueError(
                f"min_digits = {self.min_digits} is larger than digits = {self.digits}"
            )
        return self


@register("math", max_sessions=4096)
class MathEnvironment(Environment):
    """Math problems with one final answer, optionally with a calculator as a tool."""

    Config = MathConfig

    @classmethod
    def load_shared(cls, config: MathConfig) -> TaskSet:
        """Loads the task set.

        Raises:
            ConfigError: a package needed for grading or loading is missing, or `source` is not
                valid.
            DataError: the source cannot be read, or a row is not in the expected format.
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
        if config.label_key in config.public_keys:
            raise ConfigError(
                f"public_keys names {config.label_key!r}, the column with the reference: whoever "
                "plays would be shown the answer; leave it out"
            )
        keys = Keys(config.input_key, config.label_key, config.metadata_key, config.public_keys)
        return load_rows(config.source, config.subset, keys)

    def splits(self) -> dict[str, int | None]:
        return self.shared.splits()

    def get(self, split: str, index: int) -> Task:
        return self.shared.get(split, index)

    def offered_tools(self) -> list[str]:
        return ["calculator"] if self.config.tools else []

    async def reset(self, task: Task, *, seed: int) -> list[Message]:
        if isinstance(task.reference, bool) or not isinstance(task.reference, str | int | float):
            raise DataError(f"task {task.id}: the reference has to be a string or a number")
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
        self, expression: Annotated[str, Field(description="for example (3 + 4) * 2.5 / 7")]
    ) -> str:
        """Calculate an arithmetic expression exactly: + - * / // % ** and parentheses."""
        return show(calculate(expression))

    async def step(self, action: Action) -> StepResult:
        calls_a_tool = bool(action.tool_calls) or action.parse_error is not None
        if not (self.config.tools and calls_a_tool):
            return await self._judge(action.text)
        observation = await self._calculate(action)
        if self.episode.last_turn:  # no answer counts as a wrong one
            return StepResult(
                observation,
                truncated=True,
                reward_components={"correct": 0.0, "format": 0.0},
                info=self._reference(),
            )
        return StepResult(observation)

    def oracle(self) -> list[Action]:
        """Returns the reference, marked as a final answer."""
        return [Action(text=f"#### {self.task.reference}")]

    async def _calculate(self, action: Action) -> list[Message]:
        """Runs the calls that `max_tool_calls` still allows and refuses the others."""
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
