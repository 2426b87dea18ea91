"""Who may call what: hosts, origins, tokens and protocol versions.

Two kinds of token, sent as `Authorization: Bearer <token>`:

* the *server token* opens everything;
* a *session token* opens the calls of one session: `/v1/sessions/{id}` and what is below it.

A server on a loopback address needs no server token; there, a session's id is what protects it.
Such a server answers only requests that name a loopback host and come from no page of another
origin, so that a website open in a browser on the same machine cannot reach it.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers

from agentrl.env import protocol
from agentrl.env.protocol import make_error

PUBLIC_PATHS = ("/healthz", "/readyz")
"""Asked by what watches over processes, which holds no token."""
VERSIONLESS_PATHS = ("/v1/server", *PUBLIC_PATHS)
"""Answered whatever protocol version the client speaks, so that it can find out."""
_SESSION_PATH = re.compile(r"/v1/sessions/([^/]+)(?:/[a-z]+)?")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?")


@dataclass(slots=True, frozen=True)
class Access:
    token: str | None
    """The server token; None leaves everything open."""
    loopback_only: bool
    """Answer only requests for a loopback host, from no other origin."""
    secret: bytes
    """What session tokens are made with."""

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Let a request pass, or refuse it.

        Args:
            headers: names in lower case, and values.

        Raises:
            EnvError: `forbidden`, `unauthorized`, or `invalid_request` for a protocol version that
                is not spoken here.
        """
        given = Headers(raw=list(headers))
        if self.loopback_only:
            _check_loopback(given.getlist("host"), given.getlist("origin"))
        if self.token is not None and path not in PUBLIC_PATHS:
            scheme, _, token = given.get("authorization", "").partition(" ")
            self._check_token(self.token, path, token if scheme.lower() == "bearer" else None)
        _check_version(path, given.get(protocol.PROTOCOL_HEADER))

    def _check_token(self, token: str, path: str, given: str | None) -> None:
        if given is not None and _equal(given, token):
            return
        session = _SESSION_PATH.fullmatch(path)
        if given is not None and session is not None:
            if _equal(given, protocol.session_token(self.secret, session[1])):
                return
            raise make_error("forbidden", "this is the token of neither the server nor the session")
        raise make_error(
            "unauthorized",
            f"send the server's token as 'Authorization: Bearer ...' "
            f"(clients read it from {protocol.TOKEN_VARIABLE})",
        )


def usable_token(token: str | None) -> str | None:
    """The token without blanks around it; None where nothing is left, which protects nothing."""
    return (token or "").strip() or None


def is_loopback(host: str) -> bool:
    """Whether a host name or address stands for this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_loopback(hosts: list[str], origins: list[str]) -> None:
    if len(hosts) != 1 or not names_loopback(hosts[0]):
        named = ", ".join(hosts)[:200]
        raise make_error("forbidden", f"this server answers on localhost, not as '{named}'")
    own = (f"http://{hosts[0].lower()}", f"https://{hosts[0].lower()}")
    if origins and (len(origins) > 1 or origins[0].lower() not in own):
        named = ", ".join(origins)[:200]
        raise make_error("forbidden", f"requests from the origin '{named}' are refused")


@functools.lru_cache(maxsize=64)
def names_loopback(host: str) -> bool:
    match = _HOST.fullmatch(host)
    return match is not None and is_loopback(match[1] or match[2])


def _check_version(path: str, spoken: str | None) -> None:
    """A client may name several versions it speaks, separated by commas."""
    if spoken is None:
        return
    versions = [version.strip() for version in spoken.split(",")]
    if protocol.PROTOCOL_VERSION not in versions and path not in VERSIONLESS_PATHS:
        raise make_error(
            "invalid_request",
            f"this server speaks protocol {protocol.PROTOCOL_VERSION}, not {spoken[:20]}",
        )


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
