"""examples/browser: a real Chromium behind an environment, alone and over HTTP."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession

from agentrl.cli.main import main
from agentrl.env import connect
from agentrl.env.base import Episode
from agentrl.images import content_images

pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium"),
]
EXAMPLE = Path(__file__).parents[1] / "examples" / "browser"
SHOP = f"{EXAMPLE / 'shop.py'}:Shop"
STEP_S = 120


@pytest.fixture
def shop(monkeypatch):
    """The example's module."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    import shop

    return shop


@contextmanager
def serving():
    """`agentrl env serve` as a process of its own; it and its address."""
    command = [sys.executable, "-m", "agentrl", "env", "serve", SHOP, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.wait()


def solution(shop, index):
    environment = shop.Shop(shared=None)
    environment._episode = Episode(environment.get("train", index), 0)
    return environment.oracle()


def family(pid):
    """Ids of the processes that this one started, and those that they did."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *family(child)]
    return found


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_sixteen_agents_order_over_http_and_start_over_when_the_server_is_killed(shop):
    async def start(client, index):
        return await client.session(SHOP, split="train", index=index)

    async def finish(session, actions):
        shown = [*session.messages]
        for action in actions:
            result = await session.step(action, timeout_s=STEP_S)
            shown += result.observation
        assert result.terminated
        await session.close()
        return result.reward, [i for m in shown for i in content_images(m["content"])]

    async def killed(process, url):
        async with connect(url) as client:
            sessions = await asyncio.gather(*(start(client, index) for index in range(16)))
            for index, session in enumerate(sessions):
                await session.step(solution(shop, index)[0], timeout_s=STEP_S)
            browsers = family(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()
        return browsers

    async def whole(url):
        async with connect(url) as client, ClientSession() as http:
            sessions = await asyncio.gather(*(start(client, index) for index in range(16)))
            async with http.get(f"{url}/healthz") as answer:
                assert (await answer.json())["sessions"] == 16
            played = (finish(s, solution(shop, index)) for index, s in enumerate(sessions))
            return await asyncio.gather(*played)

    with serving() as (process, url):
        browsers = asyncio.run(killed(process, url))
    assert len(browsers) > 16  # a process for each page
    while not all(map(gone, browsers)):
        time.sleep(0.05)
    with serving() as (_, url):
        played = asyncio.run(whole(url))
    assert [reward for reward, _ in played] == [1.0] * 16
    for _, images in played:
        assert [(image.width, image.height) for image in images] == [(320, 240)] * 6
        assert len({image.sha256 for image in images}) == 6


def test_the_environment_keeps_its_promises():
    names = ["tools", "close", "schema", "ends", "determinism", "oracle"]
    only = [word for name in names for word in ("--only", name)]
    assert main(["env", "check", SHOP, *only]) == 0


def test_a_page_reaches_nothing(shop):
    """Neither by its own script, which its policy forbids, nor by going elsewhere."""

    async def play(port):
        chromium = await shop.Shop.load_shared(shop.Shop.Config())
        environment = shop.Shop(shared=chromium)
        environment._episode = Episode(environment.get("train", 0), 0)
        try:
            await environment.reset(environment.task, seed=0)
            said = await environment.page.evaluate(
                """async url => {
                    const tried = [];
                    await fetch(url).catch(() => tried.push("fetch"));
                    await new Promise(end => {
                        const socket = new WebSocket(url.replace("http", "ws"));
                        socket.onerror = () => { tried.push("socket"); end(); };
                    }).catch(() => tried.push("socket"));
                    await new Promise(end => {
                        const image = new Image();
                        image.onerror = () => { tried.push("image"); end(); };
                        image.src = url;
                    });
                    return tried;
                }""",
                f"http://127.0.0.1:{port}/",
            )
            assert said == ["fetch", "socket", "image"]
            with pytest.raises(Exception, match="ERR_FAILED"):
                await environment.page.goto(f"http://127.0.0.1:{port}/")
            # Its own requests would be refused by the browser as well.
            await environment.page.unroute_all()
            with pytest.raises(Exception, match="ERR_NAME_NOT_RESOLVED"):
                await environment.page.goto(f"http://127.0.0.1:{port}/")
        finally:
            await environment.close()
            await shop.Shop.close_shared(chromium)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        asyncio.run(play(listening.getsockname()[1]))
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_a_browser_that_dies_is_started_anew(shop):
    async def play():
        async with connect() as client:
            first = await client.session(SHOP, split="train", index=0)
            for pid in family(os.getpid()):
                if "chromium" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
                    break
            result = await first.step(solution(shop, 0)[0], timeout_s=STEP_S)
            assert "closed" in result.observation[0]["content"]
            await first.close()
            session = await client.session(SHOP, split="train", index=0)
            for action in solution(shop, 0):
                result = await session.step(action, timeout_s=STEP_S)
            assert result.reward == 1.0

    asyncio.run(play())
