"""Makes the pictures and the demonstration of the docs: `python docs/screenshots.py RUNS`.

RUNS holds three runs of the quickstart's run file: `quickstart`, `quickstart-seed-2` (another
`run.seed`) and `too-fast` (`train.learning_rate` 0.03). Needs playwright and a Chromium (Debian:
apt install chromium). Serves the runs and looks at their pages, wide and narrow, light and dark.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from agentrl.rollout.index import TrajectoryIndex
from agentrl.view import report
from agentrl.view.runs import RunFiles

OUT = Path(__file__).parent / "view"
SIZES = {"": (1400, 900), "_narrow": (390, 844)}
PICTURES = {
    ("", "light"): ("runs", "run", "groups", "trajectory", "diagnosis", "edit", "fork"),
    ("", "dark"): ("runs", "trajectory"),
    ("_narrow", "light"): ("groups", "trajectory"),
    ("_narrow", "dark"): ("trajectory",),
}
"""Those that the docs show, by size and theme."""
FORKS = ("edit", "fork")
"""Of them, those of a viewer that plays."""
MAX_DEMONSTRATION_BYTES = 150_000
NO_DITHER = Image.Dither.NONE


def main(runs: Path, out: Path = OUT, *, every: bool = False) -> None:
    """Takes the pictures that the docs show, or every page in every size and theme."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    all_pages = PICTURES["", "light"]
    with serving(runs) as reading, serving(runs, "--play") as playing, sync_playwright() as api:
        browser = api.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for (size, theme), names in PICTURES.items():
            width, height = SIZES[size]
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if theme == "dark" else "light",
            )
            for name in all_pages if every else names:
                show(page, playing if name in FORKS else reading, runs, name)
                suffix = size + ("_dark" if theme == "dark" else "")
                picture = out / f"{name}{suffix}.png"
                page.screenshot(path=picture)
                few = Image.open(picture).convert("RGB").quantize(128, dither=NO_DITHER)
                few.save(picture, optimize=True)  # a third of the size, and looks the same
            page.close()
        browser.close()
    demonstration(runs, out / "demonstration.html")


@contextmanager
def serving(runs: Path, *options: str) -> Iterator[str]:
    """Yields the address of a viewer of the runs."""
    command = [sys.executable, "-m", "agentrl", "view", str(runs), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield next(line for line in server.stdout if "http://" in line).split()[0]
        finally:
            server.terminate()


def show(page: Page, base: str, runs: Path, name: str) -> None:
    """Opens the page that a picture is of, and waits until it is drawn."""
    quickstart, other, too_fast = (
        RunFiles(runs / run).id for run in ("quickstart", "quickstart-seed-2", "too-fast")
    )
    address = {
        "runs": f"#/?runs={quickstart},{other},{too_fast}&bands=1",
        "run": f"#/run/{quickstart}",
        "groups": f"#/run/{quickstart}/groups?sort=oldest&show=mixed",
        "trajectory": f"#/run/{quickstart}/groups?sort=oldest&show=mixed",
        "diagnosis": f"#/run/{too_fast}/diagnosis",
    }.get(name, "")
    position, digit = 0, ""
    if name in FORKS:
        step, offset, position, digit = corrected_guess(base, runs / "quickstart")
        address = f"#/run/{quickstart}/t/{step}/{offset}?colour=logprob"
    page.goto("about:blank")
    page.goto(base + address)
    page.wait_for_selector("body[data-drawn] main h1")
    if name == "trajectory":
        page.locator("tr:has-text('calculator') a.open, a.open").first.click()
        page.wait_for_selector(".tokens i")
        if page.viewport_size and page.viewport_size["width"] < 600:
            page.locator(".tokenpanel").scroll_into_view_if_needed()
        else:
            page.locator(".tokens i").nth(30).hover()

    if name in FORKS:
        page.wait_for_selector(".tokens i")
        page.locator(".tokens i").nth(position).click()
        page.get_by_role("button", name="sample from position").click()
        page.get_by_label("text in its place").fill(digit)
        if name == "fork":
            page.get_by_role("button", name="sample", exact=True).click()
            page.wait_for_selector(".forkresult")
            page.locator(".fork").scroll_into_view_if_needed()
            page.mouse.move(0, 0)


@functools.cache
def corrected_guess(base: str, run: Path) -> tuple[int, int, int, str]:
    """Finds a wrong guess such that one of four branches is right once its first wrong digit is
    corrected. Returns step, offset, the digit's position, and the right digit."""
    path = f"{base}api/runs/{RunFiles(run).id}/trajectories"
    for entry in TrajectoryIndex(run).refresh():
        if entry.reward or entry.turns != 1 or entry.step > 5:
            continue
        place = f"{path}/{entry.step}/{entry.offset}"
        tokens = json.loads(urlopen(f"{place}/tokens").read())
        texts, first = tokens["texts"], tokens["sampled"].index(True) + 1
        question = re.search(r"(\d+)([-+*])(\d+)=", "".join(texts))
        if question is None:
            continue
        a, b = int(question[1]), int(question[3])
        right = str({"+": a + b, "-": a - b, "*": a * b}[question[2]])
        guessed = texts[first:-1]
        wrong = next((n for n, digit in enumerate(right) if guessed[n : n + 1] != [digit]), None)
        if wrong is None or wrong >= len(guessed):
            continue
        position, digit = first + wrong, right[wrong]
        asked = {"row": 0, "player": "start", "position": position, "text": digit}
        request = Request(f"{place}/fork", json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        branches = json.loads(urlopen(request).read())["branches"]
        if sum(branch["reward"] or 0 for branch in branches) == 1:
            return entry.step, entry.offset, position, digit
    raise SystemExit(f"{run}: no wrong guess of which one branch in four is right")


def demonstration(runs: Path, file: Path) -> None:
    """Writes a small report of a run, without the paths of this machine."""
    report.MAX_BYTES = MAX_DEMONSTRATION_BYTES
    run = RunFiles(runs / "quickstart")
    page = report.report_html(run)
    page = page.replace(str(run.path.parent), "runs")
    file.write_text(re.sub(r'/[^"\\]*/(?=examples/quickstart/)', "", page), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), every="--every" in sys.argv)
