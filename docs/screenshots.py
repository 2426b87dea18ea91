"""Makes the pictures of docs/view.md: `python docs/screenshots.py RUN`, of a finished quickstart.

Needs playwright and a Chromium (Debian: apt install chromium). Serves the run and looks at its
pages, wide and narrow, light and dark.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from agentrl.view.runs import RunFiles

OUT = Path(__file__).parent / "view"
SIZES = {"": (1400, 900), "_narrow": (420, 900)}


def main(run: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    command = [sys.executable, "-m", "agentrl", "view", str(run.parent), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        base = next(line for line in server.stdout if "http://" in line).split()[-1].rstrip("/")
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=chromium, args=["--no-sandbox"]
                )
                for suffix, (width, height) in SIZES.items():
                    for scheme in ("light", "dark"):
                        page = browser.new_page(
                            viewport={"width": width, "height": height}, color_scheme=scheme
                        )
                        shoot(
                            page,
                            base,
                            RunFiles(run).id,
                            suffix + ("_dark" if scheme == "dark" else ""),
                        )
                        page.close()
                browser.close()
        finally:
            server.terminate()


def shoot(page: Page, base: str, run: str, suffix: str) -> None:
    """Takes the five pictures of one size and colour scheme."""

    def picture(name: str) -> None:
        page.wait_for_timeout(1500)  # charts are drawn
        page.screenshot(path=OUT / f"{name}{suffix}.png")

    for name, path in (("run", ""), ("groups", "/groups?sort=best"), ("diagnosis", "/diagnosis")):
        page.goto(f"{base}#/run/{run}{path}")
        page.reload()
        picture(name)
    page.goto(f"{base}#/run/{run}/groups?sort=best&show=mixed")
    page.reload()
    page.locator(".members a.open").first.click()
    page.locator(".tokens i").nth(4).hover()
    picture("trajectory")
    page.goto(base)
    page.reload()
    picture("runs")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
