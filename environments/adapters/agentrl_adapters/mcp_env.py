"""The tools of an MCP server as an environment: the agent calls them, and its last text answers.

    agentrl train run.toml --env.id mcp:http://127.0.0.1:9000/mcp --env.config.tasks tasks.jsonl
    agentrl train run.toml --env.id 'mcp:python my_server.py' --env.config.tasks tasks.jsonl

Every episode has a connection of its own, and a process of its own where the server is a command.
The environment gives no reward: the functions under `[reward]` of the run file do, which find the
task's reference in `info`. A row of the file of tasks has `prompt`, and may have `id` and
`reference`; its other columns are the task's metadata.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from agentrl.data.rows import read_rows
from agentrl.env.base import EnvConfig, Environment, Observation
from agentrl.env.registry import register
from agentrl.env.secret import Secret
from agentrl.errors import ConfigError, DataError, EnvUnavailable, SessionLost
from agentrl.images import content_of_parts, read_image
from agentrl.types import JSON, Action, Content, Task, ToolSpec
from agentrl_adapters.packages import import_package, to_json

if TYPE_CHECKING:
    from mcp.client import Client  # pyright: ignore


class McpConfig(EnvConfig):
    """Which server, and what to do with its tools."""

    server: str = ""
    """A URL (streamable HTTP), or a command that speaks MCP on its standard input and output.
    Whoever may set it decides what this process starts or connects to."""
    tasks: str | None = None
    """File of the tasks to train on, `.jsonl` or `.parquet`."""
    test: str | None = None
    """File of the tasks to test on."""
    tools: list[str] = Field(default=[])
    """Names of the tools that the agent is offered; empty: all."""
    system_prompt: str | None = None
    """Put before every prompt."""
    token: Secret | None = None
    """Of a server behind a URL: sent as `Authorization: Bearer ...`."""
    variables: dict[str, str] = Field(default={})
    """Environment variables of a command; it inherits PATH, HOME and the like, and nothing else."""
    show_images: bool = False
    """Show the PNG and JPEG images in answers of tools, for models that see; otherwise, and in
    place of other kinds, a text like `[image image/png]` says that there was one."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """How long a connection may take, with the start of a command."""


@dataclass(frozen=True)
class Shared:
    """The objects that all sessions of a configuration use."""

    tools: list[ToolSpec]
    tasks: dict[str, list[Task]]
    """By split."""


class ToolFailed(Exception):
    """A tool answered with an error."""


@register("mcp")
class McpEnvironment(Environment):
    """Tools of an MCP server, with tasks from a file."""

    Config = McpConfig
    connection: Connection | None = None

    @classmethod
    def for_target(cls, target: str) -> type[Environment]:
        """The environment that `mcp:TARGET` names."""
        return _for_target(cls, target)

    @classmethod
    async def load_shared(cls, config: McpConfig) -> Shared:
        tasks = {}
        for split, name in (("train", config.tasks), ("test", config.test)):
            if name is not None:
                tasks[split] = await asyncio.to_thread(_read_tasks, split, Path(name))
        connection = await Connection(config).open()
        try:
            tools = await connection.tools()
        finally:
            await connection.close()
        missing = set(config.tools) - {tool["function"]["name"] for tool in tools}  # type: ignore[index]
        if missing:
            raise ConfigError(f"{config.server} has no tool {', '.join(sorted(missing))}")
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


@functools.cache
def _for_target(base: type[McpEnvironment], target: str) -> type[Environment]:
    class Config(McpConfig):
        server: str = target

    # Of this module, where `_for_target` finds it again.
    return type("McpEnvironment", (base,), {"Config": Config, "__doc__": base.__doc__, "id": "mcp"})


def _read_tasks(split: str, path: Path) -> list[Task]:
    tasks = []
    for number, (place, row) in enumerate(read_rows(path)):
        prompt = row.pop("prompt", None)
        if not isinstance(prompt, str | list) or not prompt:
            raise DataError(f"{place}: needs `prompt`, a text or messages")
        identifier = str(row.pop("id", f"{split}/{number}"))
        reference: Any = to_json(row.pop("reference", None))
        metadata: Any = to_json(row)
        tasks.append(Task(identifier, prompt, reference, metadata))
    if not tasks:
        raise DataError(f"{path} has no rows")
    return tasks


class Connection:
    """A connection to an MCP server. The package wants to be entered and left by one task, which
    this class keeps; its calls may come from any."""

    def __init__(self, config: McpConfig) -> None:
        """
        Raises:
            ConfigError: the configuration names no server, or the package is not installed.
        """
        if not config.server:
            raise ConfigError("name a server: --env.id mcp:URL, mcp:COMMAND, or env.config.server")
        import_package("mcp", "mcp")
        self._config = config
        self._end = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> Connection:
        """
        Raises:
            ConfigError: the command could not be started.
            EnvUnavailable: the server could not be reached, or ended at once.
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
            message = f"MCP server {self._config.server}: {error or 'no answer in time'}"
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
        import httpx2  # pyright: ignore  # the package's own
        from mcp.client.streamable_http import streamable_http_client  # pyright: ignore

        client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {config.token.value()}"},
            timeout=httpx2.Timeout(config.connect_timeout_s, read=None),
        )
        return streamable_http_client(config.server, http_client=client)

    async def tools(self) -> list[ToolSpec]:
        """The server's tools, as functions."""
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
        """A tool's answer as text, or as texts and images.

        Raises:
            ToolFailed: it answered with an error.
            SessionLost: the connection is gone, and the server's state with it.
        """
        from mcp.shared.exceptions import MCPError  # pyright: ignore

        assert self._keeper is not None
        calling = asyncio.ensure_future(self._client.result().call_tool(name, arguments))
        try:
            # A server that is gone ends the keeper; the call alone might wait for ever.
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
        if result.is_error:
            raise ToolFailed(text)
        if not (self._config.show_images and any(map(_is_image, result.content))):
            return text
        return content_of_parts(
            [
                read_image(base64.b64decode(each.data)) if _is_image(each) else _text_of(each)
                for each in result.content
            ]
        )

    async def close(self) -> None:
        """End the connection, and the process where there is one."""
        self._end.set()
        if self._keeper is not None:
            await asyncio.wait((self._keeper,), timeout=_CLOSE_S)
            self._keeper.cancel()
            await asyncio.wait((self._keeper,), timeout=_CLOSE_S)
            if self._keeper.done() and not self._keeper.cancelled():
                self._keeper.exception()  # of a connection that nobody needs any more


_CLOSE_S = 5.0
_CONNECTION_CLOSED = -32000


def _is_image(block: Any) -> bool:
    return block.type == "image" and block.mime_type in ("image/png", "image/jpeg")


def _text_of(block: Any) -> str:
    """A block of a tool's answer as text."""
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
