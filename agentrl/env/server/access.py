"""Access to a server: hosts, origins, tokens and protocol versions.

A server's token, sent as `Authorization: Bearer <token>`, opens everything. A server on a loopback
address needs none; there, a session's id is what protects it. Such a server answers only requests
that name a loopback host and come from no page of another origin, so that a website open in a
browser on the same machine cannot reach it.
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
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?")


@dataclass(slots=True, frozen=True)
class Access:
    token: str | None
    """The server token; None leaves everything open."""
    loopback_only: bool
    """Answer only requests for a loopback host, from no other origin."""

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
            if scheme.lower() != "bearer" or not _equal(token, self.token):
                raise make_error(
                    "unauthorized",
                    "send the server's token as 'Authorization: Bearer ...' "
                    f"(clients read it from {protocol.TOKEN_VARIABLE})",
                )
        _check_version(path, given.get(protocol.PROTOCOL_HEADER))


def usable_token(token: str | None) -> str | None:
    """The token without blanks around it; None where nothing is left, which protects nothing."""
    return (token or "").strip() or None


def is_loopback(host: str) -> bool:
    """Tells whether a host name or address stands for this machine alone."""
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
