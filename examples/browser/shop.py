"""A shop that an agent sees and uses through a real Chromium: screenshots in, clicks and keys out.

Nothing but screenshots comes back from the page, so what a page says stays a picture. Each episode
has a browser context of its own. No request leaves this process: the shop's only page is handed to
Chromium by Playwright, which answers or refuses every request, and no name or address resolves.
"""

import asyncio
import html
import random
import shutil
from pathlib import Path
from typing import Annotated

from playwright.async_api import async_playwright
from pydantic import Field

from agentrl.env import Action, EnvConfig, Environment, Task, ToolCall, tool
from agentrl.errors import ConfigError
from agentrl.images import image_part

WIDTH, HEIGHT = 320, 240
"""Of the window, in pixels, which are also those of a screenshot."""
ORIGIN = "http://shop.test/"
TEAS = ["assam", "mint", "oolong", "rooibos", "sencha"]
NAMES = ["Ada", "Blaise", "Emmy", "Grace", "Kurt"]
PAGE = (Path(__file__).parent / "shop.html").read_text("utf-8")
X = Annotated[int, Field(ge=0, lt=WIDTH)]
Y = Annotated[int, Field(ge=0, lt=HEIGHT)]


class Chromium:
    """One browser for all sessions, started anew if it died."""

    def __init__(self, executable: str) -> None:
        self.executable = executable
        self.starting = asyncio.Lock()
        self.playwright = self.browser = None

    async def new_page(self):
        async with self.starting:
            if self.playwright is None:
                self.playwright = await async_playwright().start()
            if self.browser is None or not self.browser.is_connected():
                self.browser = await self.playwright.chromium.launch(
                    executable_path=self.executable,
                    args=["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND"],
                )
        context = await self.browser.new_context(
            viewport={"width": WIDTH, "height": HEIGHT},
            service_workers="block",  # their requests would be answered by nobody here
            accept_downloads=False,
        )
        context.set_default_timeout(60_000)
        page = await context.new_page()
        context.on("page", lambda opened: asyncio.ensure_future(opened.close()))  # pop-ups
        return page

    async def aclose(self) -> None:
        if self.playwright is not None:
            await self.playwright.stop()


class Shop(Environment):
    """Order a tea for somebody and report the number of the order."""

    max_sessions = 16  # a process of Chromium each
    reset_timeout_s = 120  # the first one starts Chromium, which takes long on a busy machine

    class Config(EnvConfig):
        chromium: str | None = None
        """Path of the program; None: `chromium` or `google-chrome` on PATH."""

    @classmethod
    async def load_shared(cls, config):
        found = config.chromium or shutil.which("chromium") or shutil.which("google-chrome")
        if found is None:
            raise ConfigError(
                "there is no Chromium on PATH; install one (Debian: apt install chromium) or set "
                "env.config.chromium"
            )
        return Chromium(found)

    @classmethod
    async def close_shared(cls, shared):
        await shared.aclose()

    def splits(self):
        return {"train": 1000, "test": 100}

    def get(self, split, index):
        draw = random.Random(f"{split}-{index}")
        numbers = draw.sample(range(1000, 10_000), len(TEAS))
        wanted = {
            "tea": draw.choice(TEAS),
            "name": draw.choice(NAMES),
            "teas": draw.sample(TEAS, len(TEAS)),  # in the order of their buttons
            "numbers": numbers,
        }
        prompt = (
            f"Order {wanted['tea']} for {wanted['name']}: type the name into the field, choose the "
            "tea, scroll down and press Order. Then call done with the number that is shown."
        )
        return Task(f"{split}-{index}", prompt, reference=wanted)

    async def reset(self, task, *, seed):
        self.page = await self.shared.new_page()
        await self.page.route("**/*", self.answer_request)
        await self.page.goto(ORIGIN)
        content = [{"type": "text", "text": task.prompt}, *await self.look()]
        return [{"role": "user", "content": content}]

    async def answer_request(self, route):
        if route.request.url != ORIGIN:
            await route.abort()
            return
        wanted = self.task.reference
        buttons = "".join(
            f'<button data-number="{number}">{html.escape(tea)}</button>'
            for tea, number in zip(wanted["teas"], wanted["numbers"], strict=True)
        )
        body = PAGE.replace("{name}", html.escape(wanted["name"])).replace("{buttons}", buttons)
        await route.fulfill(body=body, content_type="text/html; charset=utf-8")

    async def look(self):
        """What the window shows, as parts of a message."""
        return [image_part(await self.page.screenshot(animations="disabled"))]

    @tool(timeout_s=20)
    async def click(self, x: X, y: Y):
        """Click into the window and look at it.

        Args:
            x: pixels from the left edge.
            y: pixels from the upper edge.
        """
        await self.page.mouse.click(x, y)
        return await self.look()

    @tool(timeout_s=20)
    async def type(self, text: Annotated[str, Field(max_length=200)]):
        """Type a text where the last click was, and look at the window.

        Args:
            text: what to type.
        """
        await self.page.keyboard.type(text)
        return await self.look()

    @tool(timeout_s=20)
    async def scroll(self, pixels: Annotated[int, Field(ge=-2000, le=2000)]):
        """Scroll the page and look at the window.

        Args:
            pixels: downwards; a negative number scrolls up.
        """
        await self.page.evaluate("pixels => scrollBy({top: pixels, behavior: 'instant'})", pixels)
        return await self.look()

    @tool(terminal=True, timeout_s=20)
    async def done(self, answer: str) -> float:
        """End the episode.

        Args:
            answer: the number of the order.
        """
        # The order must stand on the page, or the number was guessed.
        shown = await self.page.locator("p").text_content()
        number = str(self.number())
        return float(answer.strip() == number and shown == f"Order number {number}")

    def number(self):
        wanted = self.task.reference
        return wanted["numbers"][wanted["teas"].index(wanted["tea"])]

    async def close(self):
        page = getattr(self, "page", None)
        if page is not None:
            await page.context.close()

    def oracle(self):
        wanted = self.task.reference
        # The teas stand below each other, and Order at the end of the page.
        steps = [
            ("click", {"x": 100, "y": 55}),
            ("type", {"text": wanted["name"]}),
            ("click", {"x": 60, "y": 95 + 30 * wanted["teas"].index(wanted["tea"])}),
            ("scroll", {"pixels": 1000}),
            ("click", {"x": 60, "y": 150}),
            ("done", {"answer": str(self.number())}),
        ]
        return [
            Action(tool_calls=(ToolCall(f"c{number}", name, arguments),))
            for number, (name, arguments) in enumerate(steps)
        ]
