"""Checks the host, origin, token and protocol version of requests.

A server's token, sent as `Authorization: Bearer <token>`, gives access to everything. A server on a
loopback address does not need one; there, a session is protected by its id, which cannot be
guessed. Such a server answers only requests that name a loopback host and do not come from a page
of another origin, so that a website open in a browser on the same machine cannot reach it.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env import protocol
from agentrl.env.protocol import make_error

PUBLIC_PATHS = ("/healthz", "/readyz")
"""Answered without the token, for programs that monitor the process."""
VERSIONLESS_PATHS = ("/v1/server", *PUBLIC_PATHS)
"""Answered for every protocol version, so that a client can find out which one is spoken here."""
_PROTOCOL_HEADER = protocol.PROTOCOL_HEADER.lower()
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?")


@dataclass(slots=True, frozen=True)
class Access:
    """The rules by which a server accepts or refuses requests."""

    token: str | None
    """The token that requests must present; None: none is needed."""
    loopback_only: bool
    """Refuse requests that name another host than a loopback one or come from another origin."""

    def check(self, path: str, headers: Mapping[str, list[str]]) -> None:
        """Raises an error if a request is to be refused.

        Args:
            headers: from `headers_of`.

        Raises:
            EnvError: `forbidden`: host or origin; `unauthorized`: token; `invalid_request`: the
                protocol version is not spoken here.
        """
        if self.loopback_only:
            _check_loopback(headers.get("host", []), headers.get("origin", []))
        if self.token is not None and path not in PUBLIC_PATHS:
            scheme, _, token = headers.get("authorization", [""])[0].partition(" ")
            if scheme.lower() != "bearer" or not _equal(token, self.token):
                raise make_error(
                    "unauthorized",
                    "send the server's token as 'Authorization: Bearer ...' "
                    f"(clients read it from {protocol.TOKEN_VARIABLE})",
                )
        spoken = headers.get(_PROTOCOL_HEADER)
        if spoken is not None and spoken[0] != protocol.PROTOCOL_VERSION:
            _check_version(path, spoken[0])


def headers_of(scope: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the headers of an ASGI request: a name in lower case -> its values."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    return headers


def usable_token(token: str | None) -> str | None:
    """Returns the token without surrounding whitespace; None if nothing is left of it."""
    return (token or "").strip() or None


def is_loopback(host: str) -> bool:
    """Returns True if a host name or address can only be reached from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_loopback(hosts: list[str], origins: list[str]) -> None:
    if len(hosts) != 1 or not names_loopback(hosts[0]):
        named = ", ".join(hosts)[:200]
        raise make_error(
            "forbidden", f"this server answers on localhost only, not for the host '{named}'"
        )
    own = (f"http://{hosts[0].lower()}", f"https://{hosts[0].lower()}")
    if origins and (len(origins) > 1 or origins[0].lower() not in own):
        named = ", ".join(origins)[:200]
        raise make_error("forbidden", f"requests from the origin '{named}' are refused")


@functools.lru_cache(maxsize=64)
def names_loopback(host: str) -> bool:
    """Returns True if a Host header names a loopback host, with or without a port."""
    match = _HOST.fullmatch(host)
    return match is not None and is_loopback(match[1] or match[2])


def _check_version(path: str, spoken: str) -> None:
    """Refuses a request unless one of the versions that its client speaks is spoken here."""
    versions = [version.strip() for version in spoken.split(",")]
    if protocol.PROTOCOL_VERSION not in versions and path not in VERSIONLESS_PATHS:
        raise make_error(
            "invalid_request",
            f"this server speaks protocol {protocol.PROTOCOL_VERSION}, not {spoken[:20]}",
        )


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
