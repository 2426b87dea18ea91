"""Serves an agentrl environment to OpenEnv clients over WebSockets, without OpenEnv's package.

    uvicorn.run(make_openenv_app("math"), port=8000)      # GenericEnvClient("http://127.0.0.1:8000")

Each WebSocket is one environment; closing it closes the session. An action is `{"text": ...}`,
`{"tool_calls": [{"name", "arguments"}]}`, or OpenEnv's `{"type": "call_tool", "tool_name",
"arguments"}`; `{"type": "list_tools"}` lists the tools at any time. `reset` takes `split`, `index`,
`seed` and `config`; without `index`, the seed chooses the task, and without a seed, the next task
is taken. Steps before a reset or after the end are errors. OpenEnv's `POST /reset` and `/step`,
each of which uses a new environment, and its `/mcp` are not supported.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from agentrl.env import registry
from agentrl.env.base import Environment
from agentrl.env.client import EnvClient, EnvSession, in_process
from agentrl.env.server.access import Access, headers_of, usable_token
from agentrl.errors import EnvError
from agentrl.images import content_text
from agentrl.types import JSON, Action, Message, StepResult, ToolCall, ToolSpec

STEP_TIMEOUT_S = 600.0
"""Deadline of a step; OpenEnv's clients do not send one. The environment may set a shorter one."""

ACTION_SCHEMA: JSON = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
    },
}
ANYTHING: JSON = {"type": "object"}


class Invalid(Exception):
    """The client sent something that is not a valid action or reset."""


def make_openenv_app(
    environment: str | type[Environment],
    *,
    config: Mapping[str, JSON] | None = None,
    token: str | None = None,
    max_sessions: int | None = None,
) -> FastAPI:
    """Makes an application that serves one environment.

    Args:
        environment: a class, or a name for `agentrl.env.registry.resolve`.
        config: the environment's configuration, which a reset's `config` adds to.
        token: the token that clients have to send as `Authorization: Bearer`. None or "" requires
            no token, but only accepts requests on loopback addresses and not from web pages of
            other origins.
        max_sessions: maximum number of WebSockets with a session at the same time.

    Raises:
        ConfigError: the environment cannot be found.
    """
    found = registry.resolve(environment) if isinstance(environment, str) else environment
    found = registry.with_id(found)
    token = usable_token(token)
    access = Access(token, loopback_only=token is None)
    client = in_process(found, max_sessions=max_sessions, config=config)
    shared = Shared(client, found.id, max_sessions or found.max_sessions)

    @asynccontextmanager
    async def lifespan(_: FastAPI):
        yield
        await client.aclose()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, JSON]:
        return {"status": "healthy"}

    @app.get("/metadata")
    async def metadata() -> dict[str, JSON]:
        return {"name": found.id, "description": (found.__doc__ or found.id).strip()}

    @app.get("/schema")
    async def schema() -> dict[str, JSON]:
        return {"action": ACTION_SCHEMA, "observation": ANYTHING, "state": ANYTHING}

    @app.websocket("/ws")
    async def play(socket: WebSocket) -> None:
        try:
            access.check("/ws", headers_of(socket.scope))
        except EnvError as error:
            await socket.close(1008, str(error))
            return
        await socket.accept()
        player = Player(shared)
        try:
            while True:
                reply = await player.answer(await socket.receive_text())
                if reply is None:
                    break
                await socket.send_text(orjson.dumps(reply).decode())
            await socket.close()
        except WebSocketDisconnect:
            pass
        finally:
            await player.close()

    return app


@dataclass
class Shared:
    """State that the WebSockets of one application share."""

    client: EnvClient
    env_id: str
    max_sessions: int
    playing: set[Player] = field(default_factory=set)
    """Players with a session."""
    resets: itertools.count[int] = field(default_factory=itertools.count)
    """Index of the task for the next reset without a seed or an index."""


class Player:
    """Plays the episodes of one WebSocket."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._session: EnvSession | None = None
        self._num_steps = 0

    async def answer(self, text: str) -> dict[str, Any] | None:
        """Returns the reply to a message; None for `close`."""
        try:
            message = orjson.loads(text)
            kind = message.get("type") if isinstance(message, dict) else None
            data = message.get("data") or {} if isinstance(message, dict) else {}
            if not isinstance(data, dict):
                raise Invalid("data has to be an object")
            if kind == "close":
                return None
            if kind == "state":
                episode = self._session.id if self._session else None
                state = {"episode_id": episode, "step_count": self._num_steps}
                return {"type": "state", "data": state}
            if kind == "reset":
                return {"type": "observation", "data": await self._reset(data)}
            if kind == "step":
                return {"type": "observation", "data": await self._step(data)}
            return _error("UNKNOWN_TYPE", f"Unknown message type: {kind}")
        except orjson.JSONDecodeError as error:
            return _error("INVALID_JSON", f"Invalid JSON: {error}")
        except (Invalid, TypeError) as error:
            return _error("VALIDATION_ERROR", str(error))
        except EnvError as error:
            codes = {"at_capacity": "CAPACITY_REACHED", "invalid_request": "VALIDATION_ERROR"}
            return _error(codes.get(error.code, "EXECUTION_ERROR"), f"{error.code}: {error}")

    async def close(self) -> None:
        self._shared.playing.discard(self)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _reset(self, data: dict[str, Any]) -> dict[str, Any]:
        await self.close()
        self._num_steps = 0
        shared = self._shared
        seed, config = data.get("seed"), data.get("config") or {}
        splits = (await shared.client.info(shared.env_id, config)).splits
        split = data.get("split") or next(iter(splits), None)
        if split not in splits:
            raise Invalid(f"there is no split '{split}'; there are {', '.join(splits) or 'none'}")
        index = data.get("index")
        if not all(each is None or isinstance(each, int) for each in (seed, index)):
            raise Invalid("seed and index have to be whole numbers")
        if not isinstance(config, dict):
            raise Invalid("config has to be an object")
        if index is None:
            index = (next(shared.resets) if seed is None else seed) % (splits[split] or 2**31)
        if len(shared.playing) >= shared.max_sessions:
            message = f"{shared.max_sessions} sessions are open"
            raise EnvError(message, code="at_capacity", status=429)
        shared.playing.add(self)
        self._session = await shared.client.session(
            shared.env_id, split=split, index=index, seed=seed or 0, config=config
        )
        observation = _observation(self._session.messages)
        observation["task_id"] = self._session.task_id
        return {"observation": observation, "reward": None, "done": False}

    async def _step(self, data: dict[str, Any]) -> dict[str, Any]:
        if data.get("type") == "list_tools":
            tools = self._session.tools if self._session else None
            if tools is None:
                tools = (await self._shared.client.info(self._shared.env_id)).tools
            listed = [_listed(tool) for tool in tools]
            return {"observation": {"tools": listed}, "reward": None, "done": False}
        if self._session is None:
            raise EnvError("call reset before step", code="not_reset", status=409)
        result = await self._session.step(read_action(data), timeout_s=STEP_TIMEOUT_S)
        self._num_steps += 1
        observation = _observation(result.observation)
        if data.get("type") == "call_tool":
            text = observation["text"]
            observation = {"tool_name": data["tool_name"], "result": text, "error": None}
        extra = _extra(result)
        done = result.terminated or result.truncated
        observation["metadata"] = extra
        return {
            "observation": observation,
            "reward": result.reward,
            "done": done,
            "metadata": extra,
        }


def read_action(data: dict[str, Any]) -> Action:
    """Parses an action that an OpenEnv client sent.

    Raises:
        Invalid: the data is in none of the supported forms.
    """
    if data.get("type") == "call_tool":
        calls = [{"name": data.get("tool_name"), "arguments": data.get("arguments") or {}}]
    else:
        calls = data.get("tool_calls") or []
    text = data.get("text", "")
    if not isinstance(text, str) or not (calls or "text" in data):
        raise Invalid("an action needs `text`, `tool_calls` or the type `call_tool`")
    parsed: list[ToolCall] = []
    for number, call in enumerate(calls):
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not isinstance(call.get("arguments", {}), dict):
            raise Invalid("a tool call needs a `name`, and its `arguments` have to be an object")
        parsed.append(ToolCall(f"call-{number}", name, call.get("arguments", {})))
    return Action(text, tuple(parsed))


def _observation(messages: list[Message]) -> dict[str, Any]:
    """Returns messages as an observation; in its `text`, images are replaced by `[image]`."""
    text = "\n\n".join(content_text(each["content"], "[image]") for each in messages)
    return {"text": text, "messages": messages}


def _extra(result: StepResult) -> dict[str, Any]:
    return {
        "terminated": result.terminated,
        "truncated": result.truncated,
        "reward_components": result.reward_components,
        "info": result.info,
    }


def _listed(tool: ToolSpec) -> dict[str, Any]:
    function: Any = tool["function"]
    shown = {key: function[key] for key in ("name", "description")}
    return shown | {"input_schema": function["parameters"]}


def _error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message}}
