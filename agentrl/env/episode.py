"""Plays one episode of an environment instance: first prompt, turns, and reward at the end."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from agentrl.env.base import Answer, Environment, Episode, NoEpisodeError
from agentrl.env.tools import choose_tools, rewards_of, tools_of
from agentrl.env.values import describe, to_finite, to_observation
from agentrl.errors import EnvError, GraderError
from agentrl.images import MAX_EPISODE_IMAGES, count_images
from agentrl.types import JSON, Action, Message, StepResult, Task, ToolSpec, assistant_message


async def start_episode(
    environment: Environment, task: Task, seed: int, max_turns: int | None = None
) -> list[Message]:
    """Resets the instance to a task and returns the first prompt.

    Raises:
        EnvError: the task's id is not a string, the first prompt is empty or invalid, or `reset`
            called `self.finish`.
    """
    name = type(environment).__name__
    if not isinstance(task.id, str):
        raise EnvError(f"{name}.get() returned a task whose id is {task.id!r}; make it a str")
    task = own_copy(task)
    environment._episode = Episode(task, seed, max_turns=max_turns)
    environment._finish = None
    environment._rng = None
    first = await environment.call(environment.reset, task, seed=seed)
    if environment._finish is not None:
        raise EnvError(
            f"{name}.reset() called self.finish(), but the agent has not had a turn: call it in a "
            "tool, on_text() or step()"
        )
    messages = environment.to_messages(first)
    if not messages:
        raise EnvError(
            f"{name}.reset() returned no first prompt: return a text or messages, such as "
            "task.prompt"
        )
    _tell(environment.episode, messages)
    offer_tools(environment)
    return messages


async def take_turn(environment: Environment, action: Action, *, last: bool = False) -> StepResult:
    """Gives the instance one action. If that ends the episode, runs the reward methods.

    A turn that fails leaves `episode.actions` and `episode.messages` as they were.

    Args:
        last: the agent gets no further turn, so the episode is truncated unless the environment
            ends it in this turn.

    Raises:
        GraderError: a reward method raised or timed out.
        EnvError: the environment raised it, or returned something invalid.
    """
    episode = environment.episode
    num_actions, num_messages = len(episode.actions), len(episode.messages)
    episode.actions.append(action)
    episode.messages.append(assistant_message(action))
    episode.last_turn = last
    try:
        answer = await environment.call(environment.step, action)
        result = _to_result(environment, answer)
        _tell(episode, result.observation)
        episode.reward += result.reward
        episode.info.update(result.info)
        if result.terminated or result.truncated:
            for name, mark in rewards_of(type(environment)).items():
                value = await _grade(environment, name, mark.timeout_s)
                result.reward_components[name] = value
                result.reward += mark.weight * value
        result.reward = to_finite(result.reward, "the reward")
        result.metrics = _finite(episode.metrics, "metric")
        check_json(result.info, "info")
        if not (result.terminated or result.truncated):
            offer_tools(environment)
        return result
    except BaseException:
        del episode.actions[num_actions:], episode.messages[num_messages:]
        environment._finish = None
        raise


def _tell(episode: Episode, observation: list[Message]) -> None:
    """Appends an observation to the record."""
    episode.messages += observation
    if any(not isinstance(message["content"], str) for message in observation):
        num_images = sum(count_images(message["content"]) for message in episode.messages)
        if num_images > MAX_EPISODE_IMAGES:
            raise EnvError(
                f"the episode has shown {num_images} images, but at most {MAX_EPISODE_IMAGES} are "
                "allowed; end it earlier or show fewer"
            )


def offer_tools(environment: Environment) -> None:
    """Asks the instance which tools the agent may call in its next turn, and remembers them."""
    environment._offered = choose_tools(type(environment), environment.offered_tools())


def tools_before_reset(environment: Environment) -> list[ToolSpec]:
    """Returns the tools that an instance without an episode offers.

    Raises:
        ConfigError: `offered_tools` names something that is not a tool.
    """
    try:
        offered = environment.offered_tools()
    except (NoEpisodeError, AttributeError):  # it depends on the episode
        offered = tools_of(type(environment))
    return [tool.spec for tool in choose_tools(type(environment), offered).values()]


def own_copy(task: Task) -> Task:
    """Copies the task for one episode.

    Other episodes share the task that `get` returned, and must not see what an author changes in
    its metadata.
    """
    return replace(
        task,
        prompt=_copied(task.prompt),
        reference=_copied(task.reference),
        metadata=_copied(task.metadata),
    )


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) is list:
        return [_copied(item) for item in value]
    return value


def _to_result(environment: Environment, answer: Answer) -> StepResult:
    episode = environment.episode
    if isinstance(answer, StepResult):
        result = StepResult(
            observation=to_observation(answer.observation, "StepResult.observation"),
            reward=to_finite(answer.reward, "StepResult.reward"),
            terminated=bool(answer.terminated),
            truncated=bool(answer.truncated),
            reward_components=_finite(answer.reward_components, "reward component"),
            info=dict(answer.info),
        )
        episode.metrics.update(answer.metrics)
    else:
        has_step = type(environment).step is not Environment.step
        result = StepResult(to_observation(answer, "step()" if has_step else "on_text()"))
    finish = environment._finish
    if finish is not None:
        result.reward += finish.reward
        result.info.update(finish.info)
        result.truncated = result.truncated or finish.truncated
        result.terminated = result.terminated or not finish.truncated
    if episode.last_turn and not result.terminated:
        result.truncated = True
    return result


async def _grade(environment: Environment, name: str, timeout_s: float | None) -> float:
    where = f"reward {type(environment).__name__}.{name}"
    try:
        value = await environment.call(
            getattr(environment, name), environment.episode, timeout_s=timeout_s
        )
    except EnvError:
        raise
    except Exception as error:  # a failed grader must not count as a wrong answer
        raise GraderError(f"{where} raised {describe(error, environment.task)}") from error
    return to_finite(value, where)


def _finite(numbers: dict[str, float], kind: str) -> dict[str, float]:
    finite = {}
    for name, value in numbers.items():
        if type(value) is not float or not math.isfinite(value):
            value = to_finite(value, f"{kind} '{name}'")
        finite[name] = value
    return finite


def check_json(value: JSON, where: str) -> None:
    """Refuses NaN and infinity, which an encoder would silently turn into null.

    Raises:
        EnvError: names the place of the number, such as `info.scores[0]`.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise EnvError(f"{where} is {value}, which JSON cannot represent; leave it out")
    if isinstance(value, dict):
        for key, item in value.items():
            check_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            check_json(item, f"{where}[{position}]")
