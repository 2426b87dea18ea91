"""An episode's tools over MCP, by the official package: its streamable HTTP server, stateless.

Every request is answered on its own with one JSON body, so no state between two requests can get
lost. The package speaks ASGI; `answer` is the bridge from the
endpoint's own server.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from agentrl.images import content_parts, mcp_blocks
from agentrl.rollout.agent.tools import EnvTools
from agentrl.rollout.messages import RequestRefused


async def answer(request: web.Request, tools: EnvTools) -> web.Response:
    """Answers one MCP request with the episode's tools.

    Raises:
        RequestRefused: the package is not installed.
    """
    try:
        from mcp.server.streamable_http_manager import (  # pyright: ignore
            StreamableHTTPSessionManager,
        )
    except ImportError:
        raise RequestRefused(
            "tools over MCP need its package where agentrl runs: pip install 'agentrl-gym[mcp]'; "
            f"plain HTTP needs none: GET {request.path.removesuffix('mcp')}tools",
            status=501,
            code="mcp_missing",
        ) from None

    body = await request.read()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "raw_path": request.raw_path.encode(),
        "root_path": "",
        "query_string": request.query_string.encode(),
        "headers": [(name.lower(), value) for name, value in request.raw_headers],
        "client": None,
        "server": None,
    }
    status, headers, content = 500, [], bytearray()
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not unread:
            await asyncio.Future()  # until the request is cancelled with its client
        return unread.pop()

    async def send(message: Any) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], message["headers"]
        else:
            content.extend(message.get("body", b""))

    manager = StreamableHTTPSessionManager(_server(tools), json_response=True, stateless=True)
    async with manager.run():
        await manager.handle_request(scope, receive, send)
    skipped = (b"content-length", b"transfer-encoding")
    kept = [(name.decode(), value.decode()) for name, value in headers if name not in skipped]
    return web.Response(body=bytes(content), status=status, headers=kept)


def _server(tools: EnvTools) -> Any:
    from mcp import types  # pyright: ignore
    from mcp.server.lowlevel import Server  # pyright: ignore

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        listed = []
        for spec in tools.specs:
            function: Any = spec["function"]
            listed.append(
                types.Tool(
                    name=function["name"],
                    description=function.get("description"),
                    input_schema=function.get("parameters") or {"type": "object"},
                )
            )
        return types.ListToolsResult(tools=listed)

    async def call_tool(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            reply = await tools.call(params.name, params.arguments or {})
            shown, failed = content_parts(reply.content), False
        except RequestRefused as refused:
            shown, failed = [str(refused)], True
        return types.CallToolResult(content=mcp_blocks(shown), is_error=failed)

    return Server("agentrl", on_list_tools=list_tools, on_call_tool=call_tool)
