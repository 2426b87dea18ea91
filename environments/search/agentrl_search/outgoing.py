"""POSTs JSON to a retriever or embedding server, and to private addresses only if allowed.

Host names are resolved once per connection, every address is checked, and the connection is made to
a checked address, so that DNS cannot change between check and use. Redirects are not followed, and
proxies are not used.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from typing import Any
from urllib.parse import SplitResult, urlsplit

import orjson

from agentrl.errors import ConfigError, EnvError

MAX_REPLY_BYTES = 64 << 20
NUM_ATTEMPTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def check_url(url: str, *, allow_private: bool) -> SplitResult:
    """Parses an http(s) URL and checks that requests to it are allowed.

    Raises:
        ConfigError: it is not a valid http(s) URL, or its host has a private address that is not
            allowed.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"'{url}': {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ConfigError(f"'{url}' has to be an http:// or https:// URL without a user name")
    # A name that cannot be resolved now may be resolved later; every request checks again.
    with contextlib.suppress(socket.gaierror):
        _checked_addresses(parts.hostname, port or 0, allow_private)
    return parts


def post_json(url: str, body: object, *, allow_private: bool, timeout_s: float = 10.0) -> Any:
    """POSTs `body` as JSON and returns the JSON answer.

    Makes up to three attempts if the server cannot be reached or answers 429 or 5xx.

    Args:
        timeout_s: limit on all attempts together, up to the last byte of the answer.

    Raises:
        ConfigError: the URL is not valid, or leads to a private address that is not allowed.
        EnvError: no attempt returned a JSON answer.
    """
    parts = check_url(url, allow_private=allow_private)
    data = orjson.dumps(body)
    problem = ""
    end = time.monotonic() + timeout_s
    for attempt in range(NUM_ATTEMPTS):
        pause_s = 0.2 * 2**attempt if attempt else 0.0
        left_s = end - time.monotonic() - pause_s
        if left_s <= 0:
            problem = f"no answer within {timeout_s:g} s; {problem}"
            break
        time.sleep(pause_s)
        try:
            status, reply = _post(parts, data, allow_private, left_s)
        except (OSError, http.client.HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if status == 200:
            try:
                return orjson.loads(reply)
            except orjson.JSONDecodeError as error:
                raise EnvError(f"the answer of {url} is not JSON: {error}") from error
        problem = f"status {status}: {reply[:200].decode(errors='replace')}"
        if status < 500 and status != 429:
            break
    raise EnvError(f"POST {url} failed ({problem}); check that the server is running")


def _post(
    parts: SplitResult, data: bytes, allow_private: bool, timeout_s: float
) -> tuple[int, bytes]:
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = _checked_addresses(host, port, allow_private)[0]
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    connected = socket.create_connection((address, port), timeout_s)
    # The socket's timeout limits each read only, and a server may send one byte at a time.
    too_late = threading.Event()

    def give_up() -> None:
        too_late.set()
        with contextlib.suppress(OSError):
            raw.shutdown(socket.SHUT_RDWR)

    raw = connected.dup()
    timer = threading.Timer(timeout_s, give_up)
    timer.start()
    try:
        if parts.scheme == "https":
            connected = ssl.create_default_context().wrap_socket(connected, server_hostname=host)
        connection.sock = connected
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        reply = response.read(MAX_REPLY_BYTES + 1)
    finally:
        timer.cancel()
        raw.close()
        connected.close()
    if too_late.is_set():
        raise TimeoutError("the answer was not complete in time")
    if len(reply) > MAX_REPLY_BYTES:
        raise EnvError(f"the answer of {host} is longer than {MAX_REPLY_BYTES >> 20} MB")
    return response.status, reply


def _checked_addresses(host: str, port: int, allow_private: bool) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    if not allow_private:
        for address in addresses:
            if not _is_public(address):
                raise ConfigError(
                    f"{host} has the private address {address}; set allow_private to true if you "
                    "trust this server"
                )
    return addresses


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        else:
            ip = ip.ipv4_mapped or ip.sixtofour or ip
    return ip.is_global and not ip.is_multicast
