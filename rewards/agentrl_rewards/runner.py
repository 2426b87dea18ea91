"""Runs reward functions: loads them by name, limits them, and keeps failures apart from 0 rewards.

    runner = RewardRunner(["math", "my_pkg.mod:fn"], weights=[1.0, 0.2])
    result = await runner.score(RewardInput(text="#### 42", reference="42"))
    result.reward, result.components          # 1.2, {"math": 1.0, "my_pkg.mod:fn": 1.0}

A reward function is `fn(text, reference, **options)`, plain or async. It returns a number, or a
dictionary of numbers whose `score` is the reward and whose other entries are logged. `text` is the
final answer, without the reasoning. If the function has parameters named `prompt`, `num_tokens`,
`metadata`, `turns` or `whole_text` (the text with its reasoning), it is passed those fields of the
input. A function that asks for `turns` may return a list with one number or dictionary per turn. A
function whose first parameter is named `samples` is a group reward: it gets the inputs of all
answers to one prompt, `async def fn(samples, **options)`, and returns a list with one such result
per answer. Functions of other trainers are called in their own form (`agentrl_rewards.foreign`).

If a function raises, or returns something other than finite numbers, the result is a `GraderError`
and the answer has no reward. If more than 1% of recent calls fail, one error is logged.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl import user_modules
from agentrl.errors import ConfigError, GraderError
from agentrl_rewards.foreign import Arguments, Form, recognise
from agentrl_rewards.inputs import RewardInput

logger = logging.getLogger("agentrl.rewards")

REWARDS = {
    "math": "agentrl_rewards.math:math_reward_async",
    "gsm8k": "agentrl_rewards.recipes:gsm8k_reward",
    "dapo": "agentrl_rewards.recipes:dapo",
    "deepscaler": "agentrl_rewards.recipes:deepscaler",
    "em": "agentrl_rewards.qa:em",
    "f1": "agentrl_rewards.qa:f1",
    "substring": "agentrl_rewards.qa:substring",
    "gpqa": "agentrl_rewards.choice:gpqa",
    "ifeval": "agentrl_rewards.instructions:ifeval",
    "ifbench": "agentrl_rewards.ifbench:ifbench",
    "format": "agentrl_rewards.style:format",
    "length": "agentrl_rewards.style:length",
    "repetition": "agentrl_rewards.style:repetition",
    "code": "agentrl_rewards.code:code",
    "remote_rm": "agentrl_rewards.remote:remote_rm",
    "llm_judge": "agentrl_rewards.judge:llm_judge",
    "rubric": "agentrl_rewards.judge:rubric",
}
"""Name -> `module:function`, imported when a run asks for it."""

Scores = dict[str, float] | list[dict[str, float]]
"""The scores of a whole answer, or a list with those of each turn."""
ALARM_FRACTION = 0.01
WINDOW = 1000
"""Number of recent calls that the alarm considers."""
MIN_WINDOW = 100
"""With fewer calls, the fraction is taken of this many, so that one failure raises no alarm."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_FROM_INPUT = ("prompt", "num_tokens", "metadata", "turns", "whole_text")

RewardFunction = Callable[..., Any]
"""A reward function or a group reward; see the module's docstring."""


@dataclass(slots=True, frozen=True)
class RewardResult:
    """The reward of one answer."""

    reward: float
    """Weighted sum of the functions' scores, over all turns."""
    components: dict[str, float]
    """Unweighted results: `name` for a function's score, `name/entry` for its other entries. For a
    function that rewards turns, the sum over the turns."""
    turns: Sequence[TurnReward] = ()
    """The reward of each turn of the input; they add up to `reward`. The score of a function that
    rewards the whole answer goes to the last turn."""


@dataclass(slots=True)
class TurnReward:
    """The part of a reward that one turn gets."""

    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class _Resolved:
    name: str
    function: RewardFunction
    weight: float
    form: Form
    by_turn: bool
    """Whether a list that it returns for an answer holds one result per turn."""
    on_thread: bool
    """Whether to call it on a thread: a user's plain function may block the event loop."""


class RewardRunner:
    """Scores answers with several functions at once. Belongs to one event loop.

    Args:
        functions: names from `REWARDS`, `"pkg.mod:fn"` strings, or functions.
        weights: one per function; None gives each the weight 1.
        options: function name, as given in `functions` -> keyword arguments.
        deadline_s: seconds one call may take. A coroutine is then cancelled. A user's plain
            function cannot be stopped: its thread keeps running until it returns.
        max_concurrency: maximum number of concurrent calls; waiting does not count towards the
            deadline.

    Attributes:
        needs_reference: names of the functions that need a reference.

    Raises:
        ConfigError: a function is not found, or an option is unknown or missing.
    """

    def __init__(
        self,
        functions: Sequence[str | RewardFunction],
        *,
        weights: Sequence[float] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        deadline_s: float = 60.0,
        max_concurrency: int = 64,
    ) -> None:
        if not functions:
            raise ConfigError("reward.functions is empty; name at least one function")
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(
                f"reward.weights has {len(weights)} numbers for {len(functions)} functions"
            )
        if not all(map(math.isfinite, weights or ())):
            raise ConfigError(
                f"reward.weights is {list(weights or ())}; all of them have to be finite numbers"
            )
        options = options or {}
        resolved = [
            _prepare(function, weight, options)
            for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True)
        ]
        names = [function.name for function in resolved]
        if len(set(names)) < len(names):
            raise ConfigError(f"reward.functions names a function twice: {', '.join(names)}")
        if unknown := set(options) - set(names):
            raise ConfigError(
                f"reward.options has {sorted(unknown)}, but reward.functions does not list them"
            )
        self._functions = resolved
        self.needs_reference = [each.name for each in resolved if each.form.needs_reference]
        self.deadline_s = deadline_s
        self._free = asyncio.Semaphore(max_concurrency)
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._num_failed = 0
        self._alarm = False

    async def score(self, answer: RewardInput) -> RewardResult:
        """Scores a single answer, as a group of one.

        Raises:
            GraderError: one of the functions failed.
        """
        (result,) = await self.score_group([answer])
        if isinstance(result, GraderError):
            raise result
        return result

    async def score_group(self, answers: Sequence[RewardInput]) -> list[RewardResult | GraderError]:
        """Scores all answers to one prompt.

        Returns:
            One result per answer, in the same order; an error for each answer without a reward.
        """
        calls = [self._outcomes(function, answers) for function in self._functions]
        by_function = await asyncio.gather(*calls)
        return [
            self._combine(answer, [outcomes[index] for outcomes in by_function])
            for index, answer in enumerate(answers)
        ]

    def _combine(
        self, answer: RewardInput, outcomes: Sequence[Scores | GraderError]
    ) -> RewardResult | GraderError:
        turns = [TurnReward() for _ in answer.turns or [None]]
        total: dict[str, float] = {}
        num_judged = 0
        for function, outcome in zip(self._functions, outcomes, strict=True):
            if isinstance(outcome, GraderError):
                return outcome
            num_judged += outcome != {}
            scored = turns if isinstance(outcome, list) else turns[-1:]
            each = outcome if isinstance(outcome, list) else [outcome]
            for turn, scores in zip(scored, each, strict=True):
                turn.reward += function.weight * scores.get("score", 0.0)
                for entry, value in scores.items():
                    name = function.name if entry == "score" else f"{function.name}/{entry}"
                    turn.components[name] = value
                    total[name] = total.get(name, 0.0) + value
        if not num_judged:
            return GraderError("every reward function returned None for this answer")
        reward = sum(turn.reward for turn in turns)
        return RewardResult(reward, total, turns if answer.turns else ())

    async def _outcomes(
        self, function: _Resolved, answers: Sequence[RewardInput]
    ) -> list[Scores | GraderError]:
        """Calls a function for all answers and returns what it says of each."""
        if function.form.is_group:
            values = await self._guarded(function, answers)
            if function.form.trainer and hasattr(values, "tolist"):
                values = values.tolist()
            if not isinstance(values, GraderError) and (
                not isinstance(values, Sequence)
                or isinstance(values, str | bytes)
                or len(values) != len(answers)
            ):
                values = GraderError(
                    f"reward function {function.name!r} returned {str(values)[:80]!r} for "
                    f"{len(answers)} samples; a group reward returns a list of as many numbers"
                )
            if isinstance(values, GraderError):
                values = [values] * len(answers)
        else:
            values = await asyncio.gather(*(self._guarded(function, [each]) for each in answers))
        outcomes = [
            _read_outcome(function, value, len(answer.turns))
            for value, answer in zip(values, answers, strict=True)
        ]
        for outcome in outcomes:
            self._count(outcome)
        return outcomes

    async def _guarded(self, function: _Resolved, answers: Sequence[RewardInput]) -> Any:
        """Calls the function within its limits; returns its result, or its failure as an error."""
        async with self._free:
            limit = asyncio.timeout(self.deadline_s)  # its clock starts here
            try:
                positional, arguments = function.form.arguments(answers)
                if function.on_thread:
                    call = _on_thread(function.function, positional, arguments)
                else:
                    call = function.function(*positional, **arguments)
                if not inspect.isawaitable(call):
                    return call
                async with limit:
                    return await call
            except GraderError as error:
                return error
            except ConfigError:
                raise
            # A user's function may raise anything, and one answer's failure must not stop the
            # scoring of the others. If nobody cancelled this task, the cancellation comes from
            # inside the function.
            except (Exception, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                    raise
                reason = f"{type(error).__name__}: {error}"
                if isinstance(error, TimeoutError) and limit.expired():
                    reason = f"no result within {self.deadline_s:g} s"
                failure = GraderError(f"reward function {function.name!r} failed: {reason}")
                failure.__cause__ = error
                return failure

    def _count(self, outcome: Scores | GraderError) -> None:
        """Logs once when more than ALARM_FRACTION of the last WINDOW calls have failed."""
        failed = isinstance(outcome, GraderError)
        self._num_failed += failed - (len(self._recent) == WINDOW and self._recent[0])
        self._recent.append(failed)
        alarm = self._num_failed > ALARM_FRACTION * max(len(self._recent), MIN_WINDOW)
        if alarm and not self._alarm:
            logger.error(
                "%d of the last %d reward calls failed; those answers have no reward. Last: %s",
                self._num_failed,
                len(self._recent),
                outcome,
            )
        self._alarm = alarm


def resolve(name: str) -> RewardFunction:
    """Loads a reward function.

    Args:
        name: a name from `REWARDS`, `"package.module:function"` or `"path/to/file.py:function"`.

    Raises:
        ConfigError: there is no such name, module or function.
    """
    reference = REWARDS.get(name, name)
    if ":" not in reference:
        raise ConfigError(
            f"unknown reward function {name!r}; use one of {', '.join(REWARDS)}, or give "
            '"package.module:function" or "path/to/file.py:function"'
        )
    try:
        function = user_modules.load(reference)
    except (ConfigError, ImportError, SyntaxError) as error:
        raise ConfigError(f"reward function {name!r} cannot be loaded: {error}") from error
    if not callable(function):
        raise ConfigError(
            f"reward function {name!r} is not callable; it is a {type(function).__name__}"
        )
    return function


def _prepare(
    function: str | RewardFunction, weight: float, options: Mapping[str, Mapping[str, Any]]
) -> _Resolved:
    if isinstance(function, str):
        name, function = function, resolve(function)
    else:
        name = getattr(function, "__name__", type(function).__name__)
    chosen = options.get(name, {})
    form = recognise(function, name, chosen)
    if form is None:
        form = _own_form(function, name, chosen)
    else:
        often = "group" if form.is_group else "answer"
        logger.info("reward %s: in %s's form, called once per %s", name, form.trainer, often)
    by_turn = not form.trainer and (
        form.is_group or "turns" in inspect.signature(function).parameters
    )
    module = getattr(function, "__module__", "") or ""
    on_thread = not (inspect.iscoroutinefunction(function) or module.startswith("agentrl_rewards."))
    return _Resolved(name, function, weight, form, by_turn, on_thread)


def _own_form(function: RewardFunction, name: str, chosen: Mapping[str, Any]) -> Form:
    """Returns the form of a function that no other trainer would call."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := set(chosen) - set(parameters)):
        raise ConfigError(f"reward function {name!r} has no option {', '.join(sorted(unknown))}")
    is_group = next(iter(parameters), "") == "samples"
    from_input = [] if is_group else [each for each in _FROM_INPUT if each in parameters]
    given = {*chosen, *from_input}
    required = {key: p.kind for key, p in parameters.items() if p.default is p.empty}
    options = [key for key, kind in required.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    if missing := [key for key in options if key not in given]:
        raise ConfigError(f"reward function {name!r} needs the option {', '.join(missing)}")

    def arguments(answers: Sequence[RewardInput]) -> Arguments:
        if is_group:
            return (list(answers),), dict(chosen)
        (answer,) = answers
        asked = {each: getattr(answer, each) for each in from_input}
        return (answer.text, answer.reference), asked | dict(chosen)

    second = next((kind for key, kind in [*required.items()][1:2]), None)
    needs_reference = not is_group and second in _POSITIONAL
    return Form("", is_group, needs_reference, arguments)


def _read_outcome(function: _Resolved, value: Any, num_turns: int) -> Scores | GraderError:
    """Validates a function's result for one answer: scores of the whole answer or of each turn."""
    name = function.name
    if isinstance(value, GraderError):
        return value
    if function.form.trainer and value is None:
        return {}
    if function.form.trainer and isinstance(value, Mapping):
        value = {k: v for k, v in value.items() if k == "score" or isinstance(v, int | float)}
    if not isinstance(value, list | tuple):
        return _read_scores(name, value)
    if not function.by_turn:
        return GraderError(
            f"reward function {name!r} returned a list for one answer; return a number, or, to "
            "reward each turn, name a parameter `turns` and return one number per entry of it"
        )
    if len(value) != num_turns:
        return GraderError(
            f"reward function {name!r} returned {len(value)} rewards for {num_turns} turns; return "
            "one for each entry of its parameter `turns`, or one number for the whole answer"
        )
    scores = [_read_scores(name, each) for each in value]
    failed = next((each for each in scores if isinstance(each, GraderError)), None)
    return failed or [each for each in scores if not isinstance(each, GraderError)]


def _read_scores(name: str, value: Any) -> dict[str, float] | GraderError:
    scores = dict(value) if isinstance(value, Mapping) else {"score": value}
    if "score" not in scores:
        return GraderError(
            f"reward function {name!r} returned the entries {sorted(map(str, scores))}; `score` "
            "is missing"
        )
    try:
        if any(isinstance(number, str | bytes) for number in scores.values()):
            raise TypeError("a string is not a number")
        numbers = {str(entry): float(number) for entry, number in scores.items()}
    except (TypeError, ValueError, OverflowError):
        numbers = {}
    if not numbers or not all(map(math.isfinite, numbers.values())):
        return GraderError(
            f"reward function {name!r} returned {str(value)[:80]!r}, not a finite number"
        )
    return numbers


async def _on_thread(
    function: RewardFunction, positional: tuple[Any, ...], arguments: Mapping[str, Any]
) -> Any:
    """Calls a plain function on a daemon thread, which does not delay the interpreter's exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def finish(outcome: tuple[Any, Exception | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def work() -> None:
        try:
            outcome = function(*positional, **arguments), None
        except Exception as error:  # passed to the event loop and raised below
            outcome = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, outcome)

    threading.Thread(target=work, daemon=True, name="reward-function").start()
    value, error = await done
    if error is not None:
        raise error
    return await value if inspect.isawaitable(value) else value
