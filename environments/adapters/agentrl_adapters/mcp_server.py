"""Serves an agentrl environment as an MCP server, for any MCP client.

    python -m agentrl_adapters.mcp_server math        # on standard input and output
    uvicorn.run(make_mcp_app("math"), port=8000)      # at http://127.0.0.1:8000/mcp

The current protocol has no sessions, so every episode has an id: `start_episode` returns it, and
every other tool takes it. `say` is a turn of plain text. The client sees what an agent sees, so
it sees no rewards unless `show_reward` is set.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from agentrl.env import registry
from agentrl.env.base import Environment
from agentrl.env.client import EnvSession, in_process
from agentrl.env.server.access import Access, headers_of, usable_token
from agentrl.errors import EnvError
from agentrl.images import content_parts, join_contents, mcp_blocks
from agentrl.types import JSON, Action, Content, ToolCall, ToolSpec
from agentrl_adapters.packages import import_package

STEP_TIMEOUT_S = 600.0
MAX_EPISODES = 64
"""Maximum number of open episodes; beyond it, the least recently used one is closed."""
_EPISODE = {"type": "string", "description": "the id that start_episode gave"}


class Episodes:
    """The episodes of one server."""

    def __init__(
        self, environment: type[Environment], config: Mapping[str, JSON], show_reward: bool
    ) -> None:
        self._id = environment.id
        self._client = in_process(environment, max_sessions=MAX_EPISODES + 1, config=config)
        self._show_reward = show_reward
        self._open: OrderedDict[str, EnvSession] = OrderedDict()
        self._listed: list[dict[str, Any]] | None = None

    async def tools(self) -> list[dict[str, Any]]:
        """Returns the functions that the client may call."""
        if self._listed is None:
            info = await self._client.info(self._id)
            splits = ", ".join(
                f"{name} ({size or 'endless'})" for name, size in info.splits.items()
            )
            start = {
                "split": {"type": "string", "description": f"one of {splits}"},
                "index": {"type": "integer", "minimum": 0, "default": 0},
                "seed": {"type": "integer", "default": 0},
            }
            own = [
                _function(
                    "start_episode",
                    f"Start an episode and return its id and first prompt. {info.description}",
                    start,
                    ["split"],
                ),
                _function(
                    "say",
                    "Take a turn of plain text, such as the final answer.",
                    {"episode_id": _EPISODE, "text": {"type": "string"}},
                    ["episode_id", "text"],
                ),
                _function(
                    "end_episode", "Give an episode up.", {"episode_id": _EPISODE}, ["episode_id"]
                ),
            ]
            self._listed = [*own, *(_with_episode(spec) for spec in info.tools)]
        return self._listed

    async def call(self, name: str, arguments: dict[str, Any]) -> Content:
        """Runs a call and returns the result to show to the client.

        Raises:
            EnvError: there is no such episode, or the environment failed.
            TypeError: the function does not take these arguments.
        """
        arguments = dict(arguments)
        if name == "start_episode":
            return await self._start(**arguments)
        episode_id = str(arguments.pop("episode_id", ""))
        session = self._open.get(episode_id)
        if session is None:
            raise EnvError(f"there is no open episode '{episode_id}': call start_episode")
        self._open.move_to_end(episode_id)
        if name == "end_episode":
            await self._close(episode_id)
            return "The episode has ended."
        if name == "say":
            action = Action(text=str(arguments.get("text", "")))
        else:
            action = Action(tool_calls=(ToolCall("call-0", name, arguments),))
        result = await session.step(action, timeout_s=STEP_TIMEOUT_S)
        shown, separator = [each["content"] for each in result.observation], "\n\n"
        if result.terminated or result.truncated:
            await self._close(episode_id)
            reward = f" Its last reward was {result.reward:g}." if self._show_reward else ""
            text = f"The episode has ended.{reward}"
            shown, separator = [join_contents(shown, separator), text], "\n"
        return join_contents(filter(None, shown), separator)

    async def _start(self, split: str = "train", index: int = 0, seed: int = 0) -> Content:
        session = await self._client.session(self._id, split=split, index=index, seed=seed)
        episode_id = secrets.token_hex(4)
        self._open[episode_id] = session
        while len(self._open) > MAX_EPISODES:
            await self._close(next(iter(self._open)))
        shown = [f"episode_id: {episode_id}", *(each["content"] for each in session.messages)]
        return join_contents(shown, "\n\n")

    async def _close(self, episode_id: str) -> None:
        await self._open.pop(episode_id).close()

    async def aclose(self) -> None:
        await self._client.aclose()


def _function(
    name: str, description: str, properties: dict[str, Any], required: list[str]
) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": description.strip(), "parameters": schema}


def _with_episode(spec: ToolSpec) -> dict[str, Any]:
    function: dict[str, Any] = copy.deepcopy(spec["function"])  # type: ignore[arg-type]
    schema = function.setdefault("parameters", {"type": "object"})
    schema["properties"] = {"episode_id": _EPISODE, **schema.get("properties", {})}
    schema["required"] = ["episode_id", *schema.get("required", [])]
    return function


def make_mcp_server(
    environment: str | type[Environment],
    *,
    config: Mapping[str, JSON] | None = None,
    show_reward: bool = False,
) -> Any:
    """Makes an `mcp.server.lowlevel.Server` for one environment.

    Args:
        environment: a class, or a name for `agentrl.env.registry.resolve`.
        config: the environment's configuration.
        show_reward: whether to show the client the last reward at the end of an episode.

    Raises:
        ConfigError: the environment cannot be found, or the package `mcp` is not installed.
    """
    types = import_package("mcp.types", "mcp")
    lowlevel = import_package("mcp.server.lowlevel", "mcp")
    found = registry.resolve(environment) if isinstance(environment, str) else environment
    episodes = Episodes(registry.with_id(found), config or {}, show_reward)

    async def list_tools(_context: Any, _params: Any) -> Any:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=each["name"],
                    description=each.get("description"),
                    input_schema=each["parameters"],
                )
                for each in await episodes.tools()
            ]
        )

    async def call_tool(_context: Any, params: Any) -> Any:
        try:
            shown, failed = await episodes.call(params.name, params.arguments or {}), False
        except (EnvError, TypeError) as error:  # TypeError: unknown or missing arguments
            shown, failed = str(error), True
        return types.CallToolResult(content=mcp_blocks(content_parts(shown)), is_error=failed)

    server = lowlevel.Server(found.id, on_list_tools=list_tools, on_call_tool=call_tool)
    server.aclose_episodes = episodes.aclose
    return server


def make_mcp_app(
    environment: str | type[Environment],
    *,
    config: Mapping[str, JSON] | None = None,
    token: str | None = None,
    show_reward: bool = False,
) -> Any:
    """Makes an ASGI application that serves MCP at `/mcp`, over streamable HTTP.

    Args:
        token: the token that clients have to send as `Authorization: Bearer`. None or "" requires
            no token, but only accepts requests on loopback addresses and not from web pages of
            other origins.

    Raises:
        ConfigError: see `make_mcp_server`.
    """
    server = make_mcp_server(environment, config=config, show_reward=show_reward)
    token = usable_token(token)
    access = Access(token, loopback_only=token is None)
    # The package's own host check rejects every name but localhost; `access` checks hosts instead.
    security = import_package("mcp.server.transport_security", "mcp")
    unchecked = security.TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(
        json_response=True, stateless_http=True, transport_security=unchecked
    )

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            try:
                access.check(scope["path"], headers_of(scope))
            except EnvError as error:
                headers = [(b"content-type", b"text/plain; charset=utf-8")]
                start = {"type": "http.response.start", "status": error.status, "headers": headers}
                await send(start)
                await send({"type": "http.response.body", "body": str(error).encode()})
                return
        await app(scope, receive, send)

    return guarded


def main() -> None:
    """Serves an environment on standard input and output."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("id", help="an environment's id, or module:Class")
    parser.add_argument("--config", default="{}", help="its configuration, as JSON")
    parser.add_argument("--show-reward", action="store_true")
    arguments = parser.parse_args()
    server = make_mcp_server(
        arguments.id, config=json.loads(arguments.config), show_reward=arguments.show_reward
    )

    async def serve() -> None:
        stdio = import_package("mcp.server.stdio", "mcp")
        async with stdio.stdio_server() as (reading, writing):
            try:
                await server.run(reading, writing, server.create_initialization_options())
            finally:
                await server.aclose_episodes()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
