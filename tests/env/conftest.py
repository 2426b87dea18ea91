"""Real servers on loopback ports."""

import asyncio
import contextlib
import threading

import pytest
import uvicorn

from agentrl.env.server import listen, make_app


@contextlib.contextmanager
def running(environments, **options):
    """Serve an application from a thread; yields its URL and its session manager."""
    app = make_app(environments, **options)
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.manager
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served():
    """URL of a server with the sample environments, shared by a module's tests."""
    with running(["hello", "workshop", "workshop-safe", "free-form"]) as (url, _):
        yield url


@pytest.fixture
def serve_environments():
    """`with serve_environments([...], token=...) as (url, manager)`."""
    return running
