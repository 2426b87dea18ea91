"""Environment servers on loopback ports, in threads of the test's process or in their own."""

import asyncio
import concurrent.futures
import contextlib
import subprocess
import sys
import threading

from agentrl import runtime
from agentrl.env.server import serve
from agentrl.env.server.app import make_app


@contextlib.contextmanager
def running(environments, **options):
    """Serve an application from a thread; yields its URL and its session manager."""
    app = make_app(environments, **options)
    started = concurrent.futures.Future()

    async def main():
        stop = asyncio.Event()
        async with serve.running(app) as url:
            started.set_result((url, asyncio.get_running_loop(), stop))
            await stop.wait()
            await app.state.manager.aclose()

    def run():
        try:
            runtime.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    url, loop, stop = started.result(30)
    try:
        yield url, app.state.manager
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def in_process_of_its_own(*arguments):
    """Runs a Python program whose first line ends with a URL; yields the process and the URL."""
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as run:
        try:
            yield run, run.stdout.readline().split()[-1]
        finally:
            run.kill()
