"""Serves an index over HTTP with Search-R1's retriever protocol, for this and other trainers.

    POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id", "title", "contents"}, "score"}]]}

Without `return_scores`, the inner lists contain the documents directly.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket

import msgspec
from aiohttp import web

from agentrl_search.retrieval import Hit, Retriever

MAX_BODY_BYTES = 16 << 20
MAX_QUERIES = 8192
"""Search-R1's trainer sends the queries of a whole batch in one request."""
MAX_TOPK = 100
QUERIES_PER_CALL = 64


class RetrieveRequest(msgspec.Struct):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def make_app(retriever: Retriever, *, topk: int = 3, num_threads: int = 4) -> web.Application:
    """Makes an application that answers `POST /retrieve` and `GET /healthz`.

    Args:
        topk: passages per query if a request does not set `topk`.
        num_threads: search threads; the queries of a large request are spread over them.
    """
    pool = concurrent.futures.ThreadPoolExecutor(num_threads, "search")

    async def retrieve(request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=RetrieveRequest)
        except msgspec.DecodeError as error:
            return _refuse(f"the body must be {{queries, topk?, return_scores?}}: {error}")
        k = topk if asked.topk is None else asked.topk
        if not 1 <= k <= MAX_TOPK:
            return _refuse(f"topk has to be from 1 to {MAX_TOPK}, not {k}")
        if len(asked.queries) > MAX_QUERIES:
            return _refuse(f"a request may have at most {MAX_QUERIES} queries")
        loop = asyncio.get_running_loop()
        blocks = await asyncio.gather(
            *(
                loop.run_in_executor(
                    pool, retriever.search, asked.queries[i : i + QUERIES_PER_CALL], k
                )
                for i in range(0, len(asked.queries), QUERIES_PER_CALL)
            )
        )
        result = [
            [_to_json(hit, asked.return_scores) for hit in hits]
            for block in blocks
            for hits in block
        ]
        return web.Response(
            body=msgspec.json.encode({"result": result}), content_type="application/json"
        )

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def close(_: web.Application) -> None:
        pool.shutdown(wait=False, cancel_futures=True)

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/retrieve", retrieve)
    app.router.add_get("/healthz", healthz)
    app.on_cleanup.append(close)
    return app


def serve(retriever: Retriever, listener: socket.socket, *, topk: int, num_threads: int) -> None:
    """Serves until the process is interrupted or terminated."""
    app = make_app(retriever, topk=topk, num_threads=num_threads)
    web.run_app(app, sock=listener, print=None, shutdown_timeout=5)


def _to_json(hit: Hit, with_score: bool) -> dict:
    passage = hit.passage
    document = {"id": passage.id, "title": passage.title, "contents": passage.contents}
    return {"document": document, "score": hit.score} if with_score else document


def _refuse(reason: str) -> web.Response:
    return web.json_response({"detail": reason}, status=422)
