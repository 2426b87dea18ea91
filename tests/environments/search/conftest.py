"""Real environment servers on loopback ports."""

import asyncio
import contextlib
import threading

import pytest
import uvicorn

from agentrl.env.server.app import listen, make_app


@contextlib.contextmanager
def _running(environments):
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(make_app(environments), log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@pytest.fixture
def serve_environments():
    """`with serve_environments([...]) as (url, server)`."""
    return _running
