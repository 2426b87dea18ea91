"""Real servers on loopback ports."""

import asyncio
import contextlib
import threading

import pytest
import sample_envs  # noqa: F401  (registers what the tests serve)
import uvicorn

from agentrl.env.server import listen, make_app, uvicorn_config


@contextlib.contextmanager
def running(environments, **options):
    """Serve an application from a thread; yields its URL and its session manager."""
    app = make_app(environments, **options)
    listener = listen("127.0.0.1", 0)
    config = uvicorn_config(app)
    server = uvicorn.Server(config)

    def run():
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets=[listener]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.manager
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
