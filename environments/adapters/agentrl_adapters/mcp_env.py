"""An MCP server's tools as an environment: the agent calls them, and its last text is the answer.

    agentrl train run.toml --env.id mcp:http://127.0.0.1:9000/mcp --env.config.tasks tasks.jsonl
    agentrl train run.toml --env.id 'mcp:python my_server.py' --env.config.tasks tasks.jsonl

Each episode opens its own connection and, if the server is a command, starts its own process. The
environment gives no reward; the functions in `[reward]` of the run file do, based on the task's
reference in `info`. A row of the task file has `prompt` and optionally `id` and `reference`; its
other columns become the task's metadata.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from agentrl.env.base import EnvConfig, Environment, Observation
from agentrl.env.registry import register
from agentrl.env.secret import Secret
from agentrl.errors import ConfigError, EnvUnavailable, ImageError, SessionLost
from agentrl.images import Image, content_of_parts, read_image
from agentrl.types import JSON, Action, Content, Task, ToolSpec
from agentrl_adapters.packages import import_package, to_json
from agentrl_adapters.rows_env import class_for, read_files

if TYPE_CHECKING:
    from mcp.client import Client  # pyright: ignore


class McpConfig(EnvConfig):
    """Settings of the server, its tools and the tasks."""

    server: str = ""
    """A URL (streamable HTTP), or a command that speaks MCP on its standard input and output.
    Anyone who can set this decides what this process starts or connects to."""
    tasks: str | None = None
    """File with the training tasks, `.jsonl` or `.parquet`."""
    test: str | None = None
    """File with the test tasks."""
    tools: list[str] = Field(default=[])
    """Names of the tools to offer to the agent; empty for all."""
    system_prompt: str | None = None
    """System prompt of every episode."""
    token: Secret | None = None
    """Token for a server behind a URL, sent as `Authorization: Bearer ...`."""
    variables: dict[str, str] = Field(default={})
    """Environment variables for a command. It inherits only PATH, HOME and the like."""
    show_images: bool = False
    """Show PNG and JPEG images in tool results, for vision-language models. Without it, and for
    other formats, the agent sees a text such as `[image image/png]` instead."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that connecting may take, including the start of a command."""


@dataclass(frozen=True)
class Shared:
    """The tools and tasks that all sessions of a configuration use."""

    tools: list[ToolSpec]
    tasks: dict[str, list[Task]]
    """Split -> tasks."""


class ToolFailed(Exception):
    """A tool call returned an error."""


@register("mcp")
class McpEnvironment(Environment):
    """The tools of an MCP server, with tasks from a file."""

    Config = McpConfig
    connection: Connection | None = None

    @classmethod
    def for_target(cls, target: str) -> type[Environment]:
        """Returns the environment class for the id `mcp:TARGET`."""
        return class_for(cls, "server", target)

    @classmethod
    async def load_shared(cls, config: McpConfig) -> Shared:
        tasks = await asyncio.to_thread(read_files, config)
        connection = await Connection(config).open()
        try:
            tools = await connection.tools()
        finally:
            await connection.close()
        missing = set(config.tools) - {tool["function"]["name"] for tool in tools}  # type: ignore[index]
        if missing:
            raise ConfigError(
                f"tools: the server {config.server} has no tool {', '.join(sorted(missing))}"
            )
        wanted = config.tools
        tools = [t for t in tools if not wanted or t["function"]["name"] in wanted]  # type: ignore[index]
        return Shared(tools, tasks)

    def splits(self) -> dict[str, int | None]:
        return {split: len(tasks) for split, tasks in self.shared.tasks.items()}

    def get(self, split: str, index: int) -> Task:
        return self.shared.tasks[split][index]

    def offered_tools(self) -> list[ToolSpec]:
        return self.shared.tools

    async def reset(self, task: Task, *, seed: int) -> Observation:
        self.system_prompt = self.config.system_prompt
        self.connection = await Connection(self.config).open()
        return task.prompt

    async def step(self, action: Action) -> Observation:
        observation = await self.run_tools(action)
        if self.episode.last_turn and self._finish is None:
            self.finish(info=self._info(""), truncated=True)
        return observation

    async def on_text(self, text: str) -> None:
        self.finish(info=self._info(text))

    async def on_call(self, name: str, arguments: dict[str, JSON]) -> Content:
        assert self.connection is not None
        return await self.connection.call(name, arguments)

    def _info(self, answer: str) -> dict[str, JSON]:
        task = self.task
        return {"reference": task.reference, "metadata": task.metadata, "answer": answer}

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()


class Connection:
    """A connection to an MCP server, usable from any asyncio task.

    The `mcp` client has to be opened and closed by the same task, so this class keeps one for it.
    """

    def __init__(self, config: McpConfig) -> None:
        """
        Raises:
            ConfigError: `config` names no server, or the package `mcp` is not installed.
        """
        if not config.server:
            raise ConfigError(
                "no MCP server is given: set --env.id mcp:URL, --env.id mcp:COMMAND or "
                "env.config.server"
            )
        import_package("mcp", "mcp")
        self._config = config
        self._end = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> Connection:
        """Connects to the server, which it starts if it is a command.

        Raises:
            ConfigError: the command could not be started.
            EnvUnavailable: the server could not be reached or exited immediately.
        """
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep())
        await asyncio.wait(
            (self._client, self._keeper),
            timeout=self._config.connect_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not self._client.done():
            ended = self._keeper.done() and not self._keeper.cancelled()
            error = _innermost(self._keeper.exception()) if ended else None
            await self.close()
            timeout_s = self._config.connect_timeout_s
            reason = error or f"no answer within {timeout_s:g} s (connect_timeout_s)"
            message = f"MCP server {self._config.server}: {reason}"
            if isinstance(error, FileNotFoundError | PermissionError):
                raise ConfigError(f"{message}; it is neither a URL nor a command") from error
            raise EnvUnavailable(message) from error
        return self

    async def _keep(self) -> None:
        from mcp.client import Client  # pyright: ignore

        async with Client(await self._server()) as client:
            self._client.set_result(client)
            await self._end.wait()

    async def _server(self) -> Any:
        from mcp.client.stdio import StdioServerParameters  # pyright: ignore

        config = self._config
        if not config.server.startswith(("http://", "https://")):
            command, *arguments = shlex.split(config.server)
            return StdioServerParameters(command=command, args=arguments, env=config.variables)
        if config.token is None:
            return config.server
        import httpx2  # pyright: ignore  # the one that mcp uses
        from mcp.client.streamable_http import streamable_http_client  # pyright: ignore

        client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {config.token.value()}"},
            timeout=httpx2.Timeout(config.connect_timeout_s, read=None),
        )
        return streamable_http_client(config.server, http_client=client)

    async def tools(self) -> list[ToolSpec]:
        """Returns the server's tools as function specifications."""
        client, specs, cursor = self._client.result(), [], None
        while True:
            listed = await client.list_tools(cursor=cursor)
            for each in listed.tools:
                function = {
                    "name": each.name,
                    "description": each.description or "",
                    "parameters": {"properties": {}, **each.input_schema},
                }
                specs.append({"type": "function", "function": function})
            cursor = listed.next_cursor
            if not cursor:
                return specs

    async def call(self, name: str, arguments: dict[str, JSON]) -> Content:
        """Calls a tool and returns its result as text, or as text and images.

        Raises:
            ToolFailed: the tool returned an error.
            SessionLost: the connection was lost, and with it the server's state.
        """
        from mcp.shared.exceptions import MCPError  # pyright: ignore

        assert self._keeper is not None
        calling = asyncio.ensure_future(self._client.result().call_tool(name, arguments))
        try:
            # If the server exits, the keeper ends; the call alone might wait forever.
            await asyncio.wait((calling, self._keeper), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise SessionLost(f"the connection to MCP server {self._config.server} was lost")
            result = calling.result()
        except MCPError as error:
            if error.code == _CONNECTION_CLOSED:
                message = f"the connection to MCP server {self._config.server} was lost"
                raise SessionLost(message) from error
            raise ToolFailed(error.message) from error
        finally:
            calling.cancel()
        text = "\n".join(_text_of(each) for each in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(to_json(result.structured_content), ensure_ascii=False)
        if result.is_error:
            raise ToolFailed(text)
        if not (self._config.show_images and any(map(_is_image, result.content))):
            return text
        return content_of_parts(list(map(_shown, result.content)))

    async def close(self) -> None:
        """Closes the connection and ends the server's process if this class started it."""
        self._end.set()
        if self._keeper is not None:
            await asyncio.wait((self._keeper,), timeout=_CLOSE_S)
            self._keeper.cancel()
            await asyncio.wait((self._keeper,), timeout=_CLOSE_S)
            if self._keeper.done() and not self._keeper.cancelled():
                self._keeper.exception()  # retrieved, so that asyncio does not log it


_CLOSE_S = 5.0
_CONNECTION_CLOSED = -32000


def _is_image(block: Any) -> bool:
    return block.type == "image" and block.mime_type in ("image/png", "image/jpeg")


def _shown(block: Any) -> Image | str:
    if not _is_image(block):
        return _text_of(block)
    try:
        return read_image(base64.b64decode(block.data))
    except (ImageError, ValueError) as error:  # the server's fault, which the agent may work around
        return f"[{block.type} {block.mime_type} that cannot be read: {error}]"


def _text_of(block: Any) -> str:
    if block.type == "text":
        return block.text
    resource = getattr(block, "resource", None)
    if resource is not None and getattr(resource, "text", None) is not None:
        return resource.text
    return f"[{block.type} {getattr(block, 'mime_type', None) or ''}".rstrip() + "]"


def _innermost(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
