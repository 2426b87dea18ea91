"""An agentrl environment for TRL's `GRPOTrainer(environment_factory=...)`.

    from datasets import Dataset

    trainer = GRPOTrainer(
        ...,
        train_dataset=Dataset.from_list(make_trl_rows("train", 1000)),
        environment_factory=make_trl_factory("search", url="http://127.0.0.1:8700"),
        reward_funcs=episode_reward,
    )

TRL calls `reset(**row)` before each generation and appends the returned text to the prompt. It
offers the class's public methods as tools: here one per tool of the environment, with a signature
and docstring from which TRL derives the same schema. TRL passes text without a tool call to reward
functions only, so `episode_reward` gives it to the environment as the last turn and returns the
reward of the whole episode.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import operator
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal

from agentrl.env import registry
from agentrl.env.base import Environment
from agentrl.env.client import EnvClient, EnvSession, connect, in_process
from agentrl.env.sync import LoopThread
from agentrl.errors import ConfigError, EnvError
from agentrl.images import content_parts, join_contents
from agentrl.types import JSON, Action, Message, StepResult, ToolCall, ToolSpec

_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "object": dict}
_TYPES |= {"null": type(None), "array": list}
_TOLD = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern")
"""Limits that a type hint cannot express, which are added to the description."""


def make_trl_rows(split: str, stop: int, start: int = 0) -> list[dict[str, Any]]:
    """Makes the rows of a dataset for TRL, one per task from `start` up to, not including, `stop`.

    TRL appends the environment's prompt to the row's empty message. All rollouts of a row share its
    task and seed.
    """
    prompt = [{"role": "user", "content": ""}]
    return [
        {"prompt": prompt, "split": split, "index": index, "seed": index}
        for index in range(start, stop)
    ]


def make_trl_factory(
    environment: str | type[Environment],
    *,
    url: str | None = None,
    token: str | None = None,
    config: Mapping[str, JSON] | None = None,
    timeout_s: float = 600.0,
) -> Callable[[], TrlEnvironment]:
    """Makes a class for TRL's argument `environment_factory`.

    Args:
        environment: a class, or a name for `agentrl.env.registry.resolve`; with `url`, the id of
            an environment on that server.
        url: an environment server, or several, comma-separated; None runs it in this process.
        token: the server's token.
        config: configuration of every session.
        timeout_s: deadline of one step, in seconds.

    Raises:
        ConfigError: TRL cannot offer one of the tools.
    """
    if isinstance(environment, str) and url is None:
        environment = registry.resolve(environment)
    env_id = environment if isinstance(environment, str) else registry.with_id(environment).id
    if isinstance(environment, str) or url is not None:
        client = connect(url, token=token)
    else:
        client = in_process(environment)
    wait = LoopThread().wait
    tools = wait(client.info(env_id, config)).tools
    members: dict[str, Any] = {_name(tool): _method(tool) for tool in tools}
    members |= {"_client": client, "_env_id": env_id, "_config": dict(config or {})}
    members |= {"_wait": staticmethod(wait), "_timeout_s": timeout_s}
    return type(f"Trl_{env_id}", (TrlEnvironment,), members)


class TrlEnvironment:
    """The environment of one rollout at a time; `reset` starts the next.

    TRL treats public methods as tools, so there are none besides `reset` and the tools.
    """

    _client: EnvClient
    _env_id: str
    _config: dict[str, JSON]
    _timeout_s: float
    _wait: Callable[[Coroutine[Any, Any, Any]], Any]
    _session: EnvSession | None = None
    _reward = 0.0
    _ended = False
    _error: EnvError | None = None

    def reset(self, **row: Any) -> str | list[dict[str, Any]]:
        """Starts the episode of a row of `make_trl_rows` and returns its first prompt."""
        if row.get("split") is None or row.get("index") is None:
            raise ConfigError("a row needs 'split' and 'index'; make rows with make_trl_rows()")
        self._wait(self._close())
        self._reward, self._ended, self._error = 0.0, False, None
        opening = self._client.session(
            self._env_id,
            split=row["split"],
            index=row["index"],
            seed=row.get("seed") or 0,
            config=self._config,
        )
        self._session = session = self._wait(opening)
        return _shown(session.messages)

    def _call(self, name: str, arguments: dict[str, JSON]) -> str | list[dict[str, Any]]:
        if self._ended or self._session is None:
            return "Not run: the episode had ended."
        action = Action(tool_calls=(ToolCall("call-0", name, arguments),))
        result = self._wait(self._step(action, last=False))
        return _shown(result.observation)

    async def _step(self, action: Action, last: bool) -> StepResult:
        assert self._session is not None
        try:
            result = await self._session.step(action, timeout_s=self._timeout_s, last=last)
        except EnvError as error:
            self._error, self._ended = error, True
            raise
        self._reward += result.reward
        self._ended = result.terminated or result.truncated
        return result

    async def _finish(self, completion: Any) -> float | None:
        """Ends the episode with the last text and returns its reward; None after a failure."""
        try:
            if not self._ended:
                await self._step(Action(text=_last_text(completion)), last=True)
        except EnvError:
            pass  # kept in _error; for TRL, None is a completion that cannot be scored
        await self._close()
        return None if self._error is not None else self._reward

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def episode_reward(
    completions: Sequence[Any], environments: Sequence[TrlEnvironment], **_: object
) -> list[float | None]:
    """Ends all episodes and returns their rewards. Pass it to TRL as a reward function."""

    async def finish_all() -> list[float | None]:
        pairs = zip(environments, completions, strict=True)
        return await asyncio.gather(*(each._finish(completion) for each, completion in pairs))

    return environments[0]._wait(finish_all()) if environments else []


def _shown(messages: list[Message]) -> str | list[dict[str, Any]]:
    """Returns the messages as one string, or, with images, as TRL's list of texts and images."""
    content = join_contents((message["content"] for message in messages), "\n\n")
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part.picture}
        for part in content_parts(content)
    ]


def _last_text(completion: Any) -> str:
    """Returns the model's last text, or "" if a tool result came after it."""
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    return str(last.get("content") or "") if last.get("role") == "assistant" else ""


def _name(tool: ToolSpec) -> str:
    function: Any = tool["function"]
    name = function["name"]
    if name in ("reset", "get_reward") or name.startswith("_") or not name.isidentifier():
        raise ConfigError(
            f"TRL cannot offer a tool named '{name}'; rename it to a public Python identifier, but "
            "not to reset or get_reward"
        )
    return name


def _method(tool: ToolSpec) -> Callable[..., Any]:
    """Makes a method with the signature and docstring that match a tool's specification."""
    function: Any = tool["function"]
    name, schema = function["name"], function["parameters"]
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    lines = [" ".join((function["description"] or name).split()), "", "Args:"]
    hints: dict[str, Any] = {}
    for key, each in schema.get("properties", {}).items():
        if not key.isidentifier():
            raise ConfigError(
                f"TRL cannot offer tool {name}: its argument '{key}' is not a Python identifier"
            )
        default = each.get("default")
        if key in schema.get("required", ()):
            default = inspect.Parameter.empty
        hints[key] = _hint(each)
        parameters.append(
            inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[key]
            )
        )
        told = ", ".join(f"{limit} {each[limit]}" for limit in _TOLD if limit in each)
        described = " ".join((each.get("description") or key).split())
        lines.append(f"    {key}: {described}" + (f" ({told})" if told else ""))

    def method(self: TrlEnvironment, **arguments: JSON) -> str | list[dict[str, Any]]:
        return self._call(name, arguments)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = "\n".join(lines if hints else lines[:1])
    method.__annotations__ = hints
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


def _hint(schema: Mapping[str, Any]) -> Any:
    """Returns the type hint for which transformers generates this JSON schema."""
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if "anyOf" in schema:
        return functools.reduce(operator.or_, map(_hint, schema["anyOf"]))
    if isinstance(schema.get("type"), list):
        return functools.reduce(operator.or_, (_TYPES[each] for each in schema["type"]))
    if schema.get("type") == "array" and "items" in schema:
        return list[_hint(schema["items"])]
    return _TYPES.get(schema.get("type", ""), Any)
