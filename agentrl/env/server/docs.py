"""Adds problem details and tokens to FastAPI's schema, and renders it as a page that loads nothing
from other sites."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from pydantic import TypeAdapter

from agentrl.env import protocol

PROBLEM: dict[str, Any] = {
    "description": "problem details",
    "content": {protocol.PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
_CODES = ", ".join(f"`{code}` ({status})" for code, (status, _) in protocol.PROBLEMS.items())
DESCRIPTION = f"""\
Serves environments for language-model agents in sessions. `POST /v1/sessions` opens a session,
`POST /v1/sessions/{{id}}/step` takes a step in it, exactly once. Every reply has the header
`{protocol.PROTOCOL_HEADER}: {protocol.PROTOCOL_VERSION}`. Errors are answered as
`{protocol.PROBLEM_TYPE}` (RFC 9457): `code` names the error, and `retryable` is true if the same
call may succeed later. The codes are {_CODES}. Send bodies as `Content-Type: application/json`, and
the token of a server that has one as `Authorization: Bearer ...`."""


def complete_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Adds what FastAPI's OpenAPI document lacks: the message of an error, and the token."""
    components = schema["components"]
    components["schemas"]["Problem"] = TypeAdapter(protocol.Problem).json_schema()
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"token": []}, {}]  # {}: for a server without a token
    return schema


def make_page(schema: dict[str, Any]) -> str:
    """Renders the document as an HTML page with a block per call and one per message."""
    calls = [
        _fold(f"{method.upper()} {path}", call.get("description", ""), call)
        for path, methods in schema["paths"].items()
        for method, call in methods.items()
    ]
    messages = [
        _fold(name, message.get("description", ""), message)
        for name, message in schema["components"]["schemas"].items()
    ]
    title = escape(schema["info"]["title"])
    return (
        f"<!doctype html><title>{title}</title>"
        "<style>body {font: 16px sans-serif; max-width: 60em; margin: 2em auto}</style>"
        f"<h1>{title}</h1><p>{escape(DESCRIPTION)}"
        "<p>For programs: <a href=/openapi.json>/openapi.json</a>"
        f"<h2>Calls</h2>{''.join(calls)}<h2>Messages</h2>{''.join(messages)}"
    )


def _fold(head: str, text: str, details: dict[str, Any]) -> str:
    return (
        f"<details><summary><code>{escape(head)}</code> {escape(text)}</summary>"
        f"<pre>{escape(json.dumps(details, indent=2))}</pre></details>"
    )
