"""A worker's front: what belongs to another worker of the fleet is sent on to it.

Clients of this package ask the right worker at once. This is for all others, and for connections
that outlive one session. Who holds what follows from the request alone:

* a session, a snapshot and an agent token begin with their worker's number and how often it was
  started again; what an earlier incarnation held is `session_lost`;
* a creation with an Idempotency-Key belongs to a worker that follows from the key, so that the
  repetition meets the first attempt;
* anything else is answered where it arrives.

`/healthz`, `/readyz` and `/metrics` speak for all workers: the worst status, the sums of the
counts, and each worker's metrics with a label `worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import zlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import aiohttp
import msgspec
from msgspec import Raw, Struct
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected
from yarl import URL

from agentrl.env import protocol
from agentrl.env.protocol import make_error
from agentrl.env.server.app import App
from agentrl.errors import EnvError

BODY_TIMEOUT_S = 30.0
_LOOKED_INTO = ("/v1/sessions", "/v1/batch", "/reset", "/step")
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
_STATUS_TIMEOUT_S = 2.0
_ID = re.compile(r"(\d{1,9})-(\d{1,9})-")
_SESSION_PATH = re.compile(r"/v1/sessions/([^/]+)")
_SID = re.compile(r'"(?:sid|from_snapshot)"\s*:\s*"(\d{1,9}-\d{1,9}-)')
LOST = -1
"""In place of a worker's number: an earlier incarnation of this worker held it."""
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?( .*)")
# Of one connection, so not for the next one; aiohttp writes its own.
_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer")
)


class _Holder(Struct):
    """What tells the worker of a frame or body."""

    id: int | None = None
    op: str | None = None
    sid: str | None = None
    session: str | None = None
    from_snapshot: str | None = None
    key: str | None = None


_holder = msgspec.json.Decoder(_Holder)
_parts = msgspec.json.Decoder(list[Raw])


class Forwarding:
    """The ASGI application of one worker of several."""

    def __init__(
        self,
        app: App,
        *,
        worker: int,
        incarnation: int,
        num_workers: int,
        folder: Path,
    ) -> None:
        """
        Args:
            incarnation: how often this worker was started again.
            folder: holds the workers' Unix sockets.
        """
        self._app = app
        self._incarnation = incarnation
        self.worker = worker
        self._num_workers = num_workers
        self._folder = folder
        self._clients: dict[int, aiohttp.ClientSession] = {}

    def path(self, worker: int) -> Path:
        """Where a worker listens for the others."""
        return self._folder / f"{worker}.sock"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await _Socket(self, scope, receive, send).run(self._app)
            return
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        path: str = scope["path"]
        if path in ("/healthz", "/readyz", "/metrics") and not _is_internal(scope):
            await self._answer_for_all(scope, send)
            return
        target = self.worker
        if match := _SESSION_PATH.match(path):
            target = self.target_of_id(match[1])
        elif path.startswith("/v1/agent/"):
            target = self.target_of_id(_header(scope, b"authorization").partition(" ")[2])
        elif scope["method"] == "POST" and path in _LOOKED_INTO and self._is_allowed(scope):
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    body, receive = await _look_ahead(receive, self._app.max_body_bytes)
            except TimeoutError:
                late = make_error("request_timeout", "the body did not arrive in time")
                await _problem(send, late)
                return
            if path == "/v1/batch":
                await self._batch(body, scope, receive, send)
                return
            target = self._of_body(body, _header(scope, b"idempotency-key"))
        if target == self.worker:
            await self._app(scope, receive, send)
        elif target == LOST:
            await _problem(send, lost())
        else:
            await self._forward(target, scope, receive, send)

    def target_of_id(self, held_id: str) -> int:
        """Its worker; this one, which answers `not_found`, if there is none; or LOST."""
        match = _ID.match(held_id)
        if match is None or int(match[1]) >= self._num_workers:
            return self.worker
        if int(match[1]) == self.worker and int(match[2]) < self._incarnation:
            return LOST
        return int(match[1])

    def target_of_frame(self, frame: Raw | bytes) -> int:
        holder = _hold(frame)
        key = holder.key if holder.op == "create" and holder.from_snapshot is None else None
        return self._of(holder.sid or holder.from_snapshot, key)

    def _of_body(self, body: bytes, key: str) -> int:
        holder = _hold(body)
        return self._of(holder.session or holder.from_snapshot, key)

    def _of(self, held_id: str | None, key: str | None) -> int:
        if held_id is not None:
            return self.target_of_id(held_id)
        if key:
            return zlib.crc32(key.encode()) % self._num_workers
        return self.worker

    # One request

    async def _forward(self, target: int, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with self._request(
                target, scope["method"], _url(scope), _headers(scope), _body(receive)
            ) as response:
                headers = [(k.lower(), v) for k, v in response.raw_headers if k.lower() not in _HOP]
                start = {"type": "http.response.start", "status": response.status}
                await send({**start, "headers": headers})
                started = True
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (OSError, aiohttp.ClientError):
            if started:
                raise
            await _problem(send, unavailable(target))

    async def post_frames(
        self, target: int, frames: list[Raw], headers: list[tuple[str, str]], scope: Scope
    ) -> tuple[int, bytes]:
        """Status and body of another worker's answer to some frames that came with `scope`."""
        if target == LOST:
            return 200, _errors(frames, lost())
        try:
            async with self._request(
                target, "POST", _batch_url(scope), headers, _array(frames)
            ) as response:
                return response.status, await response.read()
        except (OSError, aiohttp.ClientError):
            return 200, _errors(frames, unavailable(target))

    def _request(
        self, target: int, method: str, url: URL, headers: Iterable[tuple[str, str]], body: Any
    ):
        client = self._clients.get(target)
        if client is None:
            client = self._clients[target] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self.path(target)), limit=0),
                timeout=_TIMEOUT,
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return client.request(method, url, headers=headers, data=body, allow_redirects=False)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            for client in self._clients.values():
                await client.close()

    # Many frames

    async def _batch(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        frames = _split(body)
        targets = [self.target_of_frame(frame) for frame in frames]
        if all(target == self.worker for target in targets):
            await self._app(scope, receive, send)
            return
        groups: dict[int, list[int]] = {}
        for position, target in enumerate(targets):
            groups.setdefault(target, []).append(position)
        headers = [(k, v) for k, v in _headers(scope) if k.lower() != "content-length"]
        answers = await asyncio.gather(
            *(
                self.post_frames(target, [frames[each] for each in positions], headers, scope)
                for target, positions in groups.items()
            )
        )
        replies: list[Raw] = [Raw(b"null")] * len(frames)
        for positions, (status, answer) in zip(groups.values(), answers, strict=True):
            if status != 200:  # refused as a whole: every worker would
                await _respond(send, status, answer, protocol.PROBLEM_TYPE)
                return
            for position, reply in zip(positions, _parts.decode(answer), strict=True):
                replies[position] = reply
        await _respond(send, 200, _array(replies), "application/json")

    # All workers

    def _is_allowed(self, scope: Scope) -> bool:
        """False leaves it to the application, which refuses it without reading the body."""
        try:
            self._app.check(scope)
        except EnvError:
            return False
        return True

    async def _answer_for_all(self, scope: Scope, send: Send) -> None:
        path = scope["path"]
        answers = await asyncio.gather(
            *(self._ask(worker, scope, path) for worker in range(self._num_workers))
        )
        refused = next((each for each in answers if each[0] not in (200, 503)), None)
        if refused is not None:  # a wrong token, say
            await _respond(send, *refused)
        elif path == "/metrics":
            text = merge_metrics([body.decode() for status, body, _ in answers if status == 200])
            media_type = next((kind for status, _, kind in answers if status == 200), "text/plain")
            await _respond(send, 200, text.encode(), media_type)
        else:
            worst = max(answers, key=lambda each: each[0])
            if worst[0] == 200:
                merged = merge_health([msgspec.json.decode(body) for _, body, _ in answers])
                worst = (200, msgspec.json.encode(merged), worst[2])
            await _respond(send, *worst)

    async def _ask(self, worker: int, scope: Scope, path: str) -> tuple[int, bytes, str]:
        headers = [*_headers(scope), ("Agentrl-Worker", "1")]
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                url = URL(f"http://worker{path}")
                async with self._request(worker, "GET", url, headers, None) as response:
                    kind = response.headers.get("Content-Type", "")
                    return response.status, await response.read(), kind
        except (OSError, aiohttp.ClientError):  # TimeoutError is an OSError
            body = protocol.encode(protocol.to_problem(unavailable(worker)))
            return 503, body, protocol.PROBLEM_TYPE


class _Socket:
    """A WebSocket whose frames may be for several workers."""

    def __init__(self, front: Forwarding, scope: Scope, receive: Receive, send: Send) -> None:
        self._front = front
        self._scope = scope
        self._receive_message = receive
        self._send = send
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        finally:
            for task in self._under_way:
                task.cancel()

    async def _receive(self) -> Message:
        while True:
            message = await self._receive_message()
            if message["type"] != "websocket.receive":
                return message
            text = message.get("text") or (message.get("bytes") or b"").decode("utf-8", "replace")
            front = self._front
            starts = set(_SID.findall(text))
            if all(front.target_of_id(start) == front.worker for start in starts):
                return message
            own: list[Raw] = []
            others: dict[int, list[Raw]] = {}
            body = text.encode()
            for frame in _split(body) or [Raw(body)]:
                target = front.target_of_frame(frame)
                (own if target == front.worker else others.setdefault(target, [])).append(frame)
            for target, frames in others.items():
                task = asyncio.get_running_loop().create_task(self._pass_on(target, frames))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
            if own or not others:
                return message if not others else {**_TEXT, "text": _array(own).decode()}

    async def _pass_on(self, target: int, frames: list[Raw]) -> None:
        headers = [(k, v) for k, v in _headers(self._scope) if not k.lower().startswith("sec-")]
        status, answer = await self._front.post_frames(target, frames, headers, self._scope)
        if status != 200:
            error = protocol.from_problem(protocol.decode_reply(answer, protocol.Problem))
            answer = _errors(frames, error)
        with contextlib.suppress(ClientDisconnected):
            await self._send({"type": "websocket.send", "text": answer.decode()})


def _batch_url(scope: Scope) -> URL:
    """With the session that a session token is for."""
    query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
    return URL("http://worker/v1/batch").with_query({k: v for k, v in query.items() if k == "sid"})


_TEXT: Message = {"type": "websocket.receive", "bytes": None}


def merge_metrics(texts: list[str]) -> str:
    """One Prometheus text from each worker's, in the order of the workers."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for worker, text in enumerate(texts):
        samples: list[str] = []
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                comments, samples = families.setdefault(name, ([], []))
                if line not in comments:
                    comments.append(line)
            elif match := _SAMPLE.fullmatch(line):
                labels = f'worker="{worker}"' + (f",{match[2]}" if match[2] else "")
                samples.append(f"{match[1]}{{{labels}}}{match[3]}")
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return "\n".join(lines) + "\n"


def merge_health(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers are summed; of texts the first that is not `ok`."""
    merged: dict[str, Any] = {}
    for answer in answers:
        for key, value in answer.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                merged[key] = merged.get(key, 0) + value
            elif merged.get(key, "ok") == "ok":
                merged[key] = value
    return merged


def lost() -> EnvError:
    return make_error("session_lost", "the worker process that held it has ended")


def unavailable(worker: int) -> EnvError:
    return make_error(
        "unavailable", f"worker {worker} of this server is being started", retry_after_s=1.0
    )


def _errors(frames: list[Raw], error: EnvError) -> bytes:
    return _array([Raw(protocol.error_frame(_hold(frame).id, error)) for frame in frames])


def _hold(body: Raw | bytes) -> _Holder:
    try:
        return _holder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _Holder()  # the application says what is wrong with it


def _split(body: bytes) -> list[Raw]:
    """The elements of an array; none if it is something else."""
    try:
        return _parts.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []


def _array(parts: list[Raw]) -> bytes:
    return b"[" + b",".join(bytes(part) for part in parts) + b"]"


async def _look_ahead(receive: Receive, max_bytes: int) -> tuple[bytes, Receive]:
    """The body, unless it is larger, and a `receive` that gives it again."""
    messages: list[Message] = []
    size, more = 0, True
    while more and size <= max_bytes:
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
        more = messages[-1].get("more_body", False)
    body = b"".join(message.get("body", b"") for message in messages)
    waiting = iter(messages)

    async def again() -> Message:
        for message in waiting:
            return message
        return await receive()

    return (b"" if more else body), again


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise aiohttp.ClientError("the client went away")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _url(scope: Scope) -> URL:
    raw_path = scope.get("raw_path") or scope["path"].encode()
    query = scope["query_string"]
    target = raw_path + b"?" + query if query else raw_path
    return URL("http://worker" + target.decode("latin-1"), encoded=True)


def _headers(scope: Scope) -> list[tuple[str, str]]:
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name not in _HOP
    ]


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _is_internal(scope: Scope) -> bool:
    """Asked by another worker: a Unix socket has no client address."""
    return bool(_header(scope, b"agentrl-worker")) and not scope.get("client")


async def _problem(send: Send, error: EnvError) -> None:
    body = protocol.encode(protocol.to_problem(error))
    await _respond(send, error.status, body, protocol.PROBLEM_TYPE)


async def _respond(send: Send, status: int, body: bytes, media_type: str) -> None:
    headers = [
        (protocol.PROTOCOL_HEADER.lower().encode(), protocol.PROTOCOL_VERSION.encode()),
        (b"content-type", media_type.encode()),
        (b"content-length", str(len(body)).encode()),
    ]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
