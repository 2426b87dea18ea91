"""`/openapi.json`, written from the table of calls in `agentrl.env.server.routes`."""

from __future__ import annotations

import http
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from agentrl.env import protocol
from agentrl.env.protocol import PROBLEMS
from agentrl.env.server.routes import JSON_TYPE, OPERATIONS, Operation, SocketQuery

SOCKET_PATH = "/v1/ws"
_REF = "#/components/schemas/{name}"
_ANY_CALL = ("invalid_request", "unauthorized", "forbidden")
_ANY_BODY = ("payload_too_large", "request_timeout")
_ID = {"type": "string", "pattern": "^[A-Za-z0-9_-]+$", "maxLength": 64}
_ENV_ID = {"type": "string"}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 description of the server."""
    paths: dict[str, dict[str, Any]] = {}
    kinds: list[Any] = [protocol.Problem, list[protocol.Frame]]
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation)
        kinds += [kind for kind in (operation.request, operation.reply) if kind is not None]
    paths[SOCKET_PATH] = {"get": _socket()}
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    schemas["ReplyFrame"] = {
        "type": "object",
        "properties": {
            "id": {"type": ["integer", "null"]},
            "ok": {"description": "the reply of the call; {} where it has none"},
            "error": {"$ref": _REF.format(name="Problem")},
        },
        "required": ["id"],
        "oneOf": [{"required": ["ok"]}, {"required": ["error"]}],
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "agentrl environments",
            "version": protocol.PROTOCOL_VERSION,
            "description": "Sessions of environments for language-model agents.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "server": _bearer("everything but the agent plane"),
                "session": _bearer("the calls of one session"),
                "agent": _bearer("the agent plane of one session"),
            },
        },
    }


def _describe(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.handler.__name__,
        "parameters": [*_path_parameters(operation), *_header_parameters(operation)],
        "responses": _responses(operation),
        "security": _security(operation.path),
    }
    if operation.query is not None:
        described["parameters"] += query_parameters(operation.query)
    if operation.request is not None:
        described["requestBody"] = {
            "required": not operation.optional_body,
            **_content(_ref(operation.request)),
        }
    if operation.raw_body:
        array = {
            "type": "array",
            "maxItems": protocol.MAX_FRAMES,
            "items": _frame_schema(),
        }
        described["requestBody"] = {"required": True, **_content(array)}
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    success: dict[str, Any] = {"description": operation.summary, "headers": _VERSION_HEADERS}
    if operation.reply is not None:
        success |= _content(_ref(operation.reply))
    elif operation.raw_body:
        replies = {"type": "array", "items": {"$ref": _REF.format(name="ReplyFrame")}}
        success |= _content(replies)
    elif operation.status != 204:
        success |= _content({"type": "string"}, operation.media_type)
    codes = [*_ANY_CALL, *operation.errors]
    if operation.request is not None or operation.raw_body:
        codes += _ANY_BODY
    return {str(operation.status): success, **problem_responses(codes)}


def problem_responses(codes: Iterable[str]) -> dict[str, Any]:
    """Problem details by status; each says which codes it may have."""
    by_status: dict[int, list[str]] = {}
    for code in dict.fromkeys(codes):
        by_status.setdefault(PROBLEMS[code][0], []).append(code)
    responses: dict[str, Any] = {
        "400": {
            "description": "no HTTP request that can be read",
            **_content({"type": "string"}, "text/plain; charset=utf-8"),
        }
    }
    for status, names in sorted(by_status.items()):
        responses[str(status)] = {
            "description": f"{http.HTTPStatus(status).phrase}: {', '.join(names)}",
            "headers": _VERSION_HEADERS,
            **_content(_ref(protocol.Problem), protocol.PROBLEM_TYPE),
        }
    return responses


def _socket() -> dict[str, Any]:
    return {
        "summary": "Many sessions on one WebSocket: frames, answered in any order",
        "description": f"Subprotocol {protocol.SUBPROTOCOL}. A message is a frame or an array of "
        f"at most {protocol.MAX_FRAMES}, as in /v1/batch.",
        "operationId": "socket",
        "parameters": [*query_parameters(SocketQuery), _VERSION_PARAMETER],
        "responses": {
            "101": {"description": "frames from here on"},
            "426": {
                "description": "this is a WebSocket: send a handshake",
                **_content(_ref(protocol.Problem), protocol.PROBLEM_TYPE),
            },
            **problem_responses(_ANY_CALL),
        },
        "security": _security(SOCKET_PATH),
    }


_VERSION_PARAMETER = {
    "name": protocol.PROTOCOL_HEADER,
    "in": "header",
    "description": "the versions of this protocol that the client speaks",
    "schema": {"type": "string", "enum": [protocol.PROTOCOL_VERSION]},
}
_VERSION_HEADERS = {
    protocol.PROTOCOL_HEADER: {
        "description": "the version spoken",
        "schema": {"type": "string"},
    }
}
_KEY_PARAMETER = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "a repeated call with the same key opens nothing new",
    "schema": {"type": "string"},
}


def _header_parameters(operation: Operation) -> list[dict[str, Any]]:
    if operation.request is protocol.CreateRequest:
        return [_VERSION_PARAMETER, _KEY_PARAMETER]
    return [_VERSION_PARAMETER]


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": _ID if name == "session_id" else _ENV_ID,
        }
        for name in re.findall(r"\{(\w+)\}", operation.path)
    ]


def query_parameters(kind: type[Struct]) -> list[dict[str, Any]]:
    _, schemas = msgspec.json.schema_components((kind,), ref_template=_REF)
    schema = schemas[kind.__name__]
    parameters = []
    for name, each in schema["properties"].items():
        required = name in schema.get("required", ())
        # A query cannot say null; leaving the parameter out does.
        choices = [choice for choice in each.get("anyOf", [each]) if choice != {"type": "null"}]
        plain = {key: value for key, value in choices[0].items() if key != "default"}
        parameter = {"name": name, "in": "query", "required": required, "schema": plain}
        if "description" in each:
            parameter["description"] = each["description"]
        parameters.append(parameter)
    return parameters


def _security(path: str) -> list[dict[str, list[str]]]:
    if path.startswith("/v1/agent/"):
        return [{"agent": []}]
    if path in ("/healthz", "/readyz"):
        return []
    # `{}`: a server on a loopback address may need no token.
    open_or_server: list[dict[str, list[str]]] = [{}, {"server": []}]
    if path.startswith("/v1/sessions/") or path in ("/v1/batch", SOCKET_PATH):
        return [*open_or_server, {"session": []}]
    return open_or_server


def _frame_schema() -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components((protocol.Frame,), ref_template=_REF)
    return schema


def _bearer(description: str) -> dict[str, str]:
    return {"type": "http", "scheme": "bearer", "description": description}


def _ref(kind: type[Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _content(schema: dict[str, Any], media_type: str = JSON_TYPE) -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}
