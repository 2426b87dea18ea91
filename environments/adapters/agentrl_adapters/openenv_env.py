"""Uses an OpenEnv server as an agentrl environment, over its WebSocket protocol.

    agentrl env serve openenv --config url=http://127.0.0.1:8000

Each session has one WebSocket, which is one environment on the server. If the connection is lost,
the environment's state is lost with it: the session ends with `session_lost` and is never continued
on a new connection. The OpenEnv package is not needed. Anyone who can set the configuration decides
which address this process connects to.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any, Literal

import aiohttp
import orjson
from pydantic import Field

from agentrl.env.base import EnvConfig, Environment, Observation
from agentrl.env.registry import register
from agentrl.env.values import to_content, to_observation
from agentrl.errors import ConfigError, EnvError, EnvUnavailable, GraderError
from agentrl.images import join_contents
from agentrl.types import JSON, Action, Content, Message, StepResult, Task, ToolSpec

_MAX_MESSAGE_BYTES = 100 * 2**20


class OpenEnvConfig(EnvConfig):
    """Settings of the server, its observations and its actions."""

    url: str = "http://127.0.0.1:8000"
    headers: dict[str, str] = Field(default={})
    """HTTP headers sent with every connection, such as `Authorization`."""
    actions: Literal["tool", "mcp", "text"] = "tool"
    """How the agent acts. `tool`: with the tool `act`, whose arguments are the fields of the
    server's action schema. `mcp`: with the server's own MCP tools. `text`: with its text, which
    becomes one field of the action."""
    text_field: str = "message"
    """For `text`: the field of the action that gets the agent's text."""
    fixed_fields: dict[str, Any] = Field(default={})
    """For `tool` and `text`: further fields of every action, which the agent does not see."""
    observation_field: str | None = None
    """The field of the observation to show to the agent, with dots for nested fields; None shows
    the whole observation as JSON."""
    prompt: str = ""
    """Beginning of the prompt; the first observation follows."""
    reset: dict[str, Any] = Field(default={})
    """Arguments of every reset besides `seed`; a task's metadata `reset` adds to them."""
    index_field: str | None = None
    """The argument of reset that gets the task's index."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Size of the split `train`; None for unlimited."""
    missing_reward: float | None = None
    """Reward if the episode's last step has none (OpenEnv sends null, also for NaN); None makes it
    a `grader_error`."""
    connect_timeout_s: float = Field(default=10.0, gt=0)


class Refused(EnvError):
    """The server answered with an error."""

    def __init__(self, problem: dict[str, Any]) -> None:
        self.reason = problem.get("code", "UNKNOWN")
        self.text = str(problem.get("message", ""))[:500]
        details = orjson.dumps(problem["errors"]).decode()[:500] if "errors" in problem else ""
        self.text = f"{self.text} {details}".strip()
        super().__init__(f"the OpenEnv server answered {self.reason}: {self.text}")


class Connection:
    """One WebSocket, which is one environment on the server."""

    def __init__(self, config: OpenEnvConfig) -> None:
        self._url = config.url.rstrip("/")
        self._config = config
        self._stack = contextlib.AsyncExitStack()

    async def open(self) -> Connection:
        """Connects to the server.

        Raises:
            EnvUnavailable: the server cannot be reached.
        """
        client = aiohttp.ClientSession(headers=self._config.headers)
        await self._stack.enter_async_context(client)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                socket = client.ws_connect(f"{self._url}/ws", max_msg_size=_MAX_MESSAGE_BYTES)
                self._socket = await self._stack.enter_async_context(socket)
        except (aiohttp.ClientError, TimeoutError) as error:
            await self.close()
            raise _unreachable(self._config, error) from error
        # A receive() is always pending, so that the server's pings are answered between steps. We
        # send none ourselves: a server busy with a step may answer late, and steps have deadlines.
        self._next = asyncio.create_task(self._socket.receive())
        return self

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Sends one message and returns the data of its reply.

        Raises:
            EnvUnavailable: the server is at capacity.
            Refused: the server answered with another error.
            EnvError: code `session_lost`; the connection was lost.
        """
        with contextlib.suppress(aiohttp.ClientError):  # its last message can still be read below
            await self._socket.send_str(orjson.dumps({"type": kind, "data": data}).decode())
        received = await self._next
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise EnvError(
                f"the connection to the OpenEnv server {self._url} was lost, and with it the "
                "environment's state",
                code="session_lost",
                status=410,
            )
        self._next = asyncio.create_task(self._socket.receive())
        message = orjson.loads(received.data)
        if message.get("type") != "error":
            return message.get("data") or {}
        refused = Refused(message.get("data") or {})
        if refused.reason == "CAPACITY_REACHED":
            raise EnvUnavailable(str(refused))
        raise refused

    async def close(self) -> None:
        await self._stack.aclose()


def _unreachable(config: OpenEnvConfig, error: Exception) -> EnvUnavailable:
    return EnvUnavailable(f"the OpenEnv server {config.url} cannot be reached ({error})")


async def _action_schema(config: OpenEnvConfig) -> dict[str, Any]:
    url = f"{config.url.rstrip('/')}/schema"
    timeout = aiohttp.ClientTimeout(total=config.connect_timeout_s)
    try:
        async with aiohttp.request("GET", url, headers=config.headers, timeout=timeout) as reply:
            if reply.status != 200:
                raise ConfigError(f"{url} answered {reply.status}; is url an OpenEnv server?")
            return orjson.loads(await reply.read())["action"]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _unreachable(config, error) from error


async def read_tools(config: OpenEnvConfig) -> list[ToolSpec]:
    """Returns the tools that the agent may call, read from the server."""
    if config.actions == "text":
        return []
    if config.actions == "mcp":
        connection = await Connection(config).open()
        try:
            reply = await connection.ask("step", {"type": "list_tools"})
        finally:
            await connection.close()
        listed = reply["observation"]["tools"]
        return [_spec(each["name"], each["description"], each["input_schema"]) for each in listed]
    schema = await _action_schema(config)
    hidden = {"metadata", *config.fixed_fields}
    fields = {key: each for key, each in schema["properties"].items() if key not in hidden}
    required = [key for key in schema.get("required", ()) if key not in hidden]
    kept = {key: each for key, each in schema.items() if key not in ("title", "description")}
    return [_spec("act", "Take one step.", kept | {"properties": fields, "required": required})]


def _spec(name: str, description: str, parameters: dict[str, Any]) -> ToolSpec:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


@register("openenv")
class OpenEnvEnvironment(Environment):
    """An environment on an OpenEnv server."""

    Config = OpenEnvConfig
    connection: Connection | None = None

    @classmethod
    def load_shared(cls, config: OpenEnvConfig) -> list[ToolSpec]:
        return asyncio.run(read_tools(config))

    def offered_tools(self) -> list[ToolSpec]:
        return self.shared

    def splits(self) -> dict[str, int | None]:
        return {"train": self.config.num_tasks}

    def get(self, split: str, index: int) -> Task:
        field = self.config.index_field
        arguments: dict[str, JSON] = {field: index} if field else {}
        return Task(f"{split}/{index}", self.config.prompt, metadata={"reset": arguments})

    async def reset(self, task: Task, *, seed: int) -> list[Message]:
        self.connection = await Connection(self.config).open()
        arguments: Any = task.metadata.get("reset") or {}
        # Tasks without reset arguments differ by their seed only.
        own_seed = seed if arguments else random.Random(f"{task.id} {seed}").randrange(2**31)
        data = {"seed": own_seed} | self.config.reset | arguments
        reply = await self.connection.ask("reset", data)
        messages = [message.copy() for message in to_observation(task.prompt, "the task's prompt")]
        shown = self._show(reply.get("observation") or {})
        prompt = messages[-1]["content"]
        messages[-1]["content"] = join_contents([prompt, shown], "\n\n") if prompt else shown
        return messages

    async def step(self, action: Action) -> StepResult:
        self._result = StepResult([])
        observation = await self.run_tools(action)
        self._result.observation = to_observation(observation, "run_tools()")
        return self._result

    async def on_text(self, text: str) -> Observation:
        if self.config.actions != "text":
            return f"Call one of the tools: {', '.join(self._tools)}."
        shown = await self._act({self.config.text_field: text} | self.config.fixed_fields)
        return [{"role": "user", "content": shown}]

    async def on_call(self, name: str, arguments: dict[str, JSON]) -> Content:
        if self._result.terminated:
            return "Not run: the episode had ended."
        if self.config.actions == "mcp":
            call = {"tool_name": name, "arguments": arguments}
            return await self._act({"type": "call_tool"} | call)
        return await self._act(arguments | self.config.fixed_fields)

    async def _act(self, action: dict[str, Any]) -> Content:
        assert self.connection is not None
        try:
            reply = await self.connection.ask("step", action)
        except Refused as error:
            if error.reason != "VALIDATION_ERROR":
                raise
            self._count("invalid_calls")
            return f"Wrong arguments: {error.text}"
        number = reply.get("reward")
        if reply.get("done"):
            self._result.terminated = True
            number = self.config.missing_reward if number is None else number
            if number is None:
                raise GraderError(
                    "the OpenEnv server ended the episode with the reward null; set missing_reward "
                    "to give such episodes a reward"
                )
        self._result.reward += float(number or 0.0)
        return self._show(reply.get("observation") or {})

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()

    def _show(self, observation: dict[str, Any]) -> Content:
        shown: Any = observation
        if "tool_name" in observation and self.config.actions == "mcp":
            error, result = observation.get("error"), observation.get("result")
            shown = error["message"] if error else result
            if isinstance(result, dict) and not error:
                shown = result.get("data", result)
        elif self.config.observation_field is not None:
            for key in self.config.observation_field.split("."):
                if not isinstance(shown, dict) or key not in shown:
                    raise ConfigError(
                        f"observation_field '{self.config.observation_field}' is not in the "
                        f"observation, which has {', '.join(observation) or 'no fields'}"
                    )
                shown = shown[key]
        else:
            shown = {key: each for key, each in observation.items() if key != "metadata"}
        return to_content(shown)
