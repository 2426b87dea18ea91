"""Who may call what: hosts, origins, tokens and protocol versions.

Three planes, each with a token of its own, sent as `Authorization: Bearer <token>`:

* the *server token* opens everything but the agent plane;
* a *session token* opens the calls of one session: `/v1/sessions/{id}` and what is below it, and
  `/v1/ws?sid={id}` and `/v1/batch?sid={id}` for frames of that session;
* an *agent token* opens `/v1/agent` for one session, and nothing else anywhere: an agent that can
  reach `reset` or read its reward is not being measured any more.

A server on a loopback address needs no server token; then only the agent plane is closed, and a
session's id is what protects it. Such a server answers only requests that name a loopback host, and
no page of another origin, so that a website open in a browser on the same machine cannot reach it.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from agentrl.env import protocol
from agentrl.env.protocol import make_error
from agentrl.errors import EnvError

PUBLIC_PATHS = ("/healthz", "/readyz")
"""Asked by what watches over processes, which holds no token."""
VERSIONLESS_PATHS = ("/v1/server", *PUBLIC_PATHS)
"""Answered whatever protocol version the client speaks, so that it can find out."""
_AGENT_PREFIX = "/v1/agent/"
_SESSION_PATH = re.compile(r"/v1/sessions/([^/]+)(?:/[a-z]+)?")
_SESSION_TOKEN = re.compile(r"[A-Za-z0-9_-]{22}")


@dataclass(slots=True, frozen=True)
class Grant:
    """What a request may touch."""

    session: str | None = None
    """The one session it is for; None: all of them."""


_EVERYTHING = Grant()


@dataclass(slots=True, frozen=True)
class Access:
    token: str | None
    """The server token; None leaves everything but the agent plane open."""
    loopback_only: bool
    """Answer only requests for a loopback host, from no foreign origin."""
    secret: bytes
    """What session and agent tokens are made with."""

    def check(self, path: str, query: bytes, headers: Mapping[bytes, bytes]) -> Grant:
        """What a request may touch, HTTP or WebSocket handshake.

        Args:
            headers: by name in lower case.

        Raises:
            EnvError: `forbidden`, `unauthorized`, or `invalid_request` for a protocol version that
                is not spoken here.
        """
        if self.loopback_only:
            _check_loopback(headers)
        grant = self._grant(path, query, _bearer(headers.get(b"authorization")))
        spoken = headers.get(_VERSION_KEY)
        if spoken is not None and spoken != _VERSION:
            _check_version(path, spoken.decode("latin-1"))
        return grant

    def _grant(self, path: str, query: bytes, given: str | None) -> Grant:
        is_agent_path = path.startswith(_AGENT_PREFIX)
        if given is not None:
            if self.token is not None and _equal(given, self.token) and not is_agent_path:
                return _EVERYTHING
            agent = protocol.agent_session(self.secret, given) if "." in given else None
            if agent is not None and is_agent_path:
                return Grant(agent)
            if agent is not None:
                raise make_error("forbidden", f"an agent token opens {_AGENT_PREFIX}* alone")
        if is_agent_path:
            raise make_error(
                "unauthorized",
                "send the session's agent_token as 'Authorization: Bearer ...': it says which "
                "session the call is for",
            )
        if self.token is None or path in PUBLIC_PATHS:
            return _EVERYTHING
        if given is not None and _SESSION_TOKEN.fullmatch(given):
            session = _named_session(path, query)
            if session and _equal(given, protocol.session_token(self.secret, session)):
                return Grant(session)
            raise make_error("forbidden", "this token opens one session, and not this call")
        raise make_error(
            "unauthorized",
            f"send the server's token as 'Authorization: Bearer ...' "
            f"(clients read it from {protocol.TOKEN_VARIABLE})",
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address stands for this machine alone."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_VERSION_KEY = protocol.PROTOCOL_HEADER.lower().encode()
_VERSION = protocol.PROTOCOL_VERSION.encode()


def _check_loopback(headers: Mapping[bytes, bytes]) -> None:
    host, origin = headers.get(b"host", b""), headers.get(b"origin")
    if not _names_loopback(b"//" + host):
        named = host[:200].decode("latin-1")
        raise make_error("forbidden", f"this server answers on localhost, not as '{named}'")
    if origin is not None and not _names_loopback(origin):
        named = origin[:200].decode("latin-1")
        raise make_error("forbidden", f"requests from the origin '{named}' are refused")


@functools.lru_cache(maxsize=256)
def _names_loopback(url: bytes) -> bool:
    try:
        return is_loopback(urlsplit(url.decode("latin-1")).hostname or "")
    except ValueError:
        return False


def _check_version(path: str, spoken: str) -> None:
    """A client may name several versions it speaks, separated by commas."""
    versions = [version.strip() for version in spoken.split(",")]
    if protocol.PROTOCOL_VERSION not in versions and path not in VERSIONLESS_PATHS:
        raise make_error(
            "invalid_request",
            f"this server speaks protocol {protocol.PROTOCOL_VERSION}, not {spoken[:20]}",
        )


def _bearer(authorization: bytes | None) -> str | None:
    if authorization is None:
        return None
    scheme, _, given = authorization.decode("latin-1").partition(" ")
    return given if scheme.lower() == "bearer" else None


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _named_session(path: str, query: bytes) -> str | None:
    """The session that a path, or the query of a path for frames, names."""
    if match := _SESSION_PATH.fullmatch(path):
        return match[1]
    if path in ("/v1/ws", "/v1/batch"):
        return parse_qs(query.decode("latin-1")).get("sid", [None])[0]
    return None


def check_frame(grant: Grant, session_id: str | None) -> EnvError | None:
    """Why a frame is refused on a connection that was opened for one session; None if it is not.

    Args:
        session_id: the frame's session, None if it is for none.
    """
    if grant.session is None or session_id == grant.session:
        return None
    return make_error("forbidden", "this token opens one session, and not this call")
