"""aiohttp applications on real ports of this machine, for as long as a block lasts."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

from aiohttp import web


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, port: int = 0, host: str = "127.0.0.1", **options
) -> AsyncIterator[str]:
    """Serves an application until the block ends; yields its address."""
    runner = web.AppRunner(app, shutdown_timeout=0.1, **options)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def in_thread(served: contextlib.AbstractAsyncContextManager, timeout_s: float = 30) -> Iterator:
    """Enters an async context in a thread with an event loop of its own; yields what it yields."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        value = asyncio.run_coroutine_threadsafe(served.__aenter__(), loop).result(timeout_s)
        try:
            yield value
        finally:
            left = served.__aexit__(None, None, None)
            asyncio.run_coroutine_threadsafe(left, loop).result(timeout_s)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
