"""A proxy in front of an inference server that spoils a share of the answers."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

TRANSIENT = ("reset", "503", "429", "500", "truncated", "nan")
"""A client has to get over these. NaN is not JSON, so such an answer is as good as a cut one."""
BROKEN = ("null", "missing", "short", "positive")
"""Answers no trainer may learn from: the sample is dropped."""


class FaultProxy:
    def __init__(self, upstream: str, share: float, seed: int) -> None:
        self.faults: Counter[str] = Counter()
        self.url = ""
        self._upstream = upstream
        self._share = share
        self._chance = random.Random(seed)
        self._http: aiohttp.ClientSession | None = None

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault = None
        if b'"request_id":"g' in body.replace(b" ", b"") and self._chance.random() < self._share:
            fault = self._chance.choice(TRANSIENT + BROKEN)
        if fault == "reset":
            self.faults[fault] += 1
            request.transport.abort()
            return web.Response()
        if fault in ("503", "429", "500"):
            self.faults[fault] += 1
            headers = {"Retry-After": "0.05"} if fault != "500" else {}
            return web.json_response({"error": fault}, status=int(fault), headers=headers)
        async with self._http.request(
            request.method,
            self._upstream + request.path_qs,
            data=body,
            headers={"Content-Type": "application/json"},
        ) as answer:
            content, status = await answer.read(), answer.status
        # Only now: a connection to the server may have broken by itself, which costs no episode.
        if fault is not None and status == 200:
            self.faults[fault] += 1
            content = _spoil(content, fault)
        return web.Response(body=content, status=status, content_type="application/json")


def _spoil(content: bytes, fault: str) -> bytes:
    if fault == "truncated":
        return content[: len(content) // 2]
    answer = json.loads(content)
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    if fault == "nan":
        entries[0]["logprob"] = float("nan")
    elif fault == "null":
        entries[0]["logprob"] = None
    elif fault == "missing":
        choice["logprobs"] = None
    elif fault == "positive":
        entries[0]["logprob"] = 0.5
    else:
        entries.pop()
    return json.dumps(answer).encode()


@contextlib.asynccontextmanager
async def fault_proxy(upstream: str, *, share: float, seed: int) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(upstream, share, seed)
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", proxy._forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    proxy.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        proxy._http = http
        try:
            yield proxy
        finally:
            await runner.cleanup()
