"""The pages in a real Chromium, through Playwright: what is clicked, typed, tapped and drawn."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from attacks import ATTACKS
from planted import FAULTS, plant
from test_evaluations import REWARDS, evaluation
from test_pictures import shown_run
from test_report import hostile

from agentrl.api import load_config, train
from agentrl.evaluate.episodes import SUITE_FILE
from agentrl.rollout import TrajectoryLog
from agentrl.rollout.index import TrajectoryIndex
from agentrl.rollout.signals import RowSignals, SignalLog
from agentrl.types import StopReason, TokenRow, Trajectory, TrajectoryError, Turn
from agentrl.view.report import report_run
from agentrl.view.runs import RunFiles
from agentrl.view.tracking import read_metrics

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FAILED = TrajectoryError("step", "env_error", "it broke")
QUICKSTART = Path(__file__).parents[2] / "examples/quickstart/run.toml"
WIDE, NARROW = {"width": 1400, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def chromium():
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page that fails the test for an error in its script, or a request beyond its origin."""
    with watched(chromium, viewport=WIDE) as opened:
        yield opened


@contextmanager
def watched(chromium, **options):
    context = chromium.new_context(**options)
    opened, errors, requests = context.new_page(), [], []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: requests.append(request.url))
    opened.set_default_timeout(15_000)
    yield opened
    origins = {"/".join(url.split("/")[:3]) for url in requests}
    context.close()
    assert not errors
    assert len(origins - {"file://"}) <= 1, f"requests beyond the page's origin: {origins}"


@contextmanager
def serving(*paths: Path, options: tuple[str, ...] = ()) -> Iterator[tuple[str, subprocess.Popen]]:
    """`agentrl view` as a process of its own; its address."""
    command = [sys.executable, "-m", "agentrl", "view", *map(str, paths), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        while line and "http" not in line:
            line = server.stdout.readline()
        try:
            yield line.split()[0], server
        finally:
            server.send_signal(signal.SIGINT)


def drawn(page, address: str = "#/") -> None:
    """Wait until the page of this address is drawn."""
    page.wait_for_selector(f"body[data-drawn*='{address}'] main h1")


def test_each_planted_fault_is_found_within_four_clicks(tmp_path, page):
    runs = tmp_path / "runs"
    for rule in FAULTS:
        plant(runs / rule.replace("_", "-"), rule)
    with serving(runs) as (url, _):
        for rule in FAULTS:
            page.goto(url)
            name = rule.replace("_", "-")
            clicks = 0

            def click(locator):
                nonlocal clicks
                clicks += 1
                locator.click()

            click(page.get_by_role("link", name=name, exact=True))
            drawn(page, "#/run/")
            click(page.get_by_role("link", name="Diagnosis"))
            drawn(page, "/diagnosis")
            card = page.locator(f"section.rule.found[data-rule='{rule}']")
            assert card.count() == 1, rule
            assert page.locator("section.rule").first.get_attribute("data-rule") == rule
            examples = card.get_by_role("link", name=re.compile("^(examples|groups of step)"))
            if examples.count():
                click(examples)
                drawn(page, "/groups")
                page.wait_for_selector(".members tbody tr")
                click(page.locator(".members tr:not(.dim) a.open").first)
                page.wait_for_selector(".tokens i")
            else:
                click(card.locator("a.button"))
                page.wait_for_selector(".plot path", state="attached")  # flat: no height
            assert clicks <= 4, rule


def test_a_new_step_appears_and_a_killed_trainer_is_named(tmp_path, page):
    """A real run, watched while it goes on."""
    run_dir = tmp_path / "quickstart"
    toml = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
    small = ["--rollout.groups_per_step", "2", "--rollout.group_size", "4"]
    command = [sys.executable, "-m", "agentrl", "train", str(toml), *small]
    command += ["--run.dir", str(run_dir), "--run.num_steps", "500", "--run.save_every", "500"]
    log = (tmp_path / "log").open("w")
    with (
        serving(tmp_path) as (url, _),
        subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        as trainer,
    ):  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while not (run_dir / "metrics.jsonl").exists() or not read_metrics(run_dir):
                assert trainer.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            page.goto(f"{url}#/run/{RunFiles(run_dir).id}")
            drawn(page, "#/run/")
            assert page.locator(".state.training").count() == 1
            for _ in range(3):
                seen = len(read_metrics(run_dir))
                while len(read_metrics(run_dir)) == seen:
                    time.sleep(0.01)
                started, wanted = time.monotonic(), seen + 1
                while True:
                    shown = page.locator("span.step").inner_text().split()[1]
                    if int(shown) >= wanted:
                        break
                    assert time.monotonic() - started < 10
                    time.sleep(0.02)
                print(f"step {wanted} is on the page {time.monotonic() - started:.2f} s after it")
            trainer.kill()
            started = time.monotonic()
            page.wait_for_selector(".state.dead")
            print(f"killed trainer named after {time.monotonic() - started:.2f} s")
            assert "dead since" in page.locator(".state.dead").inner_text()
            assert "--resume" in page.locator(".failure").inner_text()
        finally:
            trainer.kill()


def test_a_step_is_clicked_and_filters_sort_and_search(tmp_path, page):
    run_dir = plant(tmp_path / "run", "errors")
    with serving(run_dir) as (url, _):
        page.goto(f"{url}#/run/{RunFiles(run_dir).id}")
        drawn(page)
        page.locator(".plot.clickable .area").first.click(position={"x": 2, "y": 40})
        drawn(page, "step=1")
        page.wait_for_selector("a.which:text-is('step 1')")
        assert page.locator("a.which").count() == 4
        page.locator("[name=step]").fill("")
        page.locator("[name=step]").press("Enter")
        drawn(page, "/groups")
        page.locator("[name=show]").select_option("failed")
        drawn(page, "show=failed")
        assert page.locator("tr.dim").count() and page.locator(".tag.bad").count()
        page.locator("[name=text]").fill("what is 5 * 2?")
        page.locator("[name=text]").press("Enter")
        drawn(page, "text=")
        page.locator("[name=show]").select_option("all")
        page.wait_for_selector("a.which:text-is('step 5')")


AT_ONCE = """(chosen) => {
    for (const [name, value] of Object.entries(chosen)) {
        const field = document.querySelector(`[name=${name}]`);
        field.value = value;
        field.dispatchEvent(new Event("change"));
    }
    const task = document.querySelector("[name=task]");
    task.focus();
    task.value = "train/";
}"""
"""Choices without a pause in which an answer could come, and a text that is still being written."""


def test_a_choice_made_before_the_answer_came_loses_no_filter(tmp_path, page):
    run_dir = plant(tmp_path / "run", "errors")
    with serving(run_dir) as (url, _):
        page.goto(f"{url}#/run/{RunFiles(run_dir).id}/groups?show=failed")
        drawn(page, "show=failed")
        page.evaluate(AT_ONCE, {"text": "what is 5 * 2?", "sort": "oldest"})
        page.wait_for_selector("a.which:text-is('step 5')")
        assert {"show=failed", "sort=oldest"} < set(page.url.split("?")[1].split("&"))
        assert page.locator("[name=text]").input_value() == "what is 5 * 2?"
        assert page.locator("[name=task]").input_value() == "train/", "what was being written"


def test_a_search_that_one_answer_does_not_end_goes_on_by_itself(tmp_path, page):
    run_dir = plant(tmp_path / "run")
    begun = []

    def end_early(route):
        answer = route.fetch()
        begun.append(route.request.url)
        route.fulfill(response=answer, json=answer.json() | {"groups": [], "searched": 3})

    with serving(run_dir) as (url, _):
        page.route(re.compile("/groups\\?text=[^&]*$"), end_early)
        page.goto(f"{url}#/run/{RunFiles(run_dir).id}/groups?text=what is 5 * 2?")
        page.wait_for_selector("a.which:text-is('step 5')")
        page.wait_for_selector("text=1 group with this text (96 of 96 groups searched)")
        assert begun


def test_a_token_shows_its_advantage_by_pointer_and_by_keyboard(tmp_path, page):
    run_dir = plant(tmp_path / "run")
    with serving(run_dir) as (url, _):
        page.goto(f"{url}#/run/{RunFiles(run_dir).id}/groups?sort=best&show=mixed")
        page.locator(".members a.open").first.click()
        page.wait_for_selector(".tokens i")
        page.locator(".tokens i").nth(4).hover()
        said = page.locator(".tip.shown").inner_text()
        assert "advantage" in said and "ratio 1" in said and "policy version" in said
        page.locator(".tokens").first.focus()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        assert "position 6" in page.locator(".detail").inner_text()
        colours = {}
        for colour in ("author", "logprob", "advantage", "ratio", "difference", "mask", "version"):
            page.locator("select[aria-label='colour by']").select_option(colour)
            token = page.locator(".tokens i").nth(4)
            colours[colour] = token.get_attribute("class")
        assert len(set(colours.values())) >= 4
        page.get_by_label("raw ids").check()
        assert page.locator(".tokens i").nth(4).inner_text().strip().isdigit()
        page.locator("select[aria-label='compare with']").select_option(index=1)
        page.wait_for_selector("text=are the same")


def test_runs_are_laid_over_each_other_and_their_configurations_compared(tmp_path, page):
    for name, rule in (("one", None), ("two", "clipping")):
        plant(tmp_path / name, rule, steps=20 if rule else 24)
    with serving(tmp_path) as (url, _):
        page.goto(url)
        for name in ("one", "two"):
            page.get_by_label(f"compare {name}").check()
            drawn(page, "runs=")
        page.wait_for_selector("table.diff")
        assert "run.num_steps" in page.locator("table.diff").inner_text()
        page.get_by_label("metric").select_option("policy/clip_fraction_high")
        drawn(page, "metric=")
        assert page.locator(".plot path.line").count() == 2


def test_runs_are_found_and_sorted_and_the_address_holds_it(tmp_path, page):
    for name, rule in (("run-2", "never_rewarded"), ("run-10", None), ("other", "too_far")):
        plant(tmp_path / name, rule, steps=4)
    shown = page.locator("a.name")
    with serving(tmp_path) as (url, _):
        page.goto(url)
        page.get_by_role("button", name="run", exact=True).click()
        drawn(page, "sort=run")
        assert shown.all_inner_texts() == ["other", "run-2", "run-10"], "numbers count as numbers"
        page.get_by_label("find").fill("run- math")
        page.get_by_label("find").press("Enter")
        drawn(page, "find=run-")
        assert shown.all_inner_texts() == ["run-2", "run-10"]
        page.get_by_role("button", name="reward").click()
        drawn(page, "sort=reward")
        page.reload()
        drawn(page, "sort=reward")
        assert shown.all_inner_texts() == ["run-10", "run-2"], "the largest first"


def test_curves_are_chosen_by_expression_smoothed_and_drawn_on_a_logarithmic_axis(tmp_path, page):
    run_dir = plant(tmp_path / "run", "entropy_collapse")
    with serving(run_dir) as (url, _):
        page.goto(f"{url}#/run/{RunFiles(run_dir).id}")
        page.get_by_label("metrics").fill("entropy|^train/grad")
        page.get_by_label("metrics").press("Enter")
        drawn(page, "metrics=")
        cards = page.locator(".multiples .head span:first-child")
        assert set(cards.all_inner_texts()) == {"policy/entropy", "train/grad_norm"}
        entropy = page.locator(".card.small", has_text="policy/entropy").locator("path.line")
        drawings = [entropy.get_attribute("d")]
        for name in ("logarithmic", "smoothed"):
            page.get_by_label(name).check()
            drawn(page, {"logarithmic": "log=1", "smoothed": "smooth=1"}[name])
            drawings.append(entropy.get_attribute("d"))
        assert len(set(drawings)) == 3
        # An entropy that falls by the same factor each step is a straight line there.
        points = [float(p.split()[1]) for p in re.split("[ML]", drawings[1])[1:]]
        steps = np.diff(points)
        assert np.allclose(steps, steps[0], atol=0.05)
        page.get_by_label("metrics").fill("(")
        page.get_by_label("metrics").press("Enter")
        page.wait_for_selector("text=not a regular expression")


def test_a_long_result_is_folded_notes_are_shown_and_brackets_lead_on(tmp_path, page):
    log = TrajectoryLog(tmp_path)
    members = []
    for member in range(3):
        row = TokenRow()
        row.messages = [
            {"role": "user", "content": "Which?"},
            {"role": "tool", "content": f"found {member}\n" + "line\n" * 1000},
            {"role": "assistant", "content": f"That {member}."},
        ]
        row.append_context([1, 2], 0)
        row.append_sampled([3], [-0.5], [0], 0)
        turn = Turn(0, 2, 1, "stop", "text", message=2)
        members.append(
            Trajectory(
                *(f"m{member}", "g", "e", "t", 0, [row], [turn]),
                info={"seen": f"<b>{member}</b>"},
                stop_reason=StopReason.TERMINATED,
            )
        )
    log.append(1, members)
    with serving(tmp_path) as (url, _):
        page.goto(f"{url}#/run/{RunFiles(tmp_path).id}/t/1/0")
        page.wait_for_selector("details.folded")
        body = page.locator("details.folded .body")
        assert not body.is_visible()
        page.locator("details.folded summary").click()
        assert body.is_visible() and "found 0" in body.inner_text()
        assert page.locator("details.info dd").inner_text() == "<b>0</b>"
        for key, said in (("]", "That 1."), ("]", "That 2."), ("[", "That 1.")):
            page.keyboard.press(key)
            page.wait_for_selector(f"text={said}")


def test_seeds_are_one_band_and_curves_stand_over_time_and_samples(tmp_path, page):
    for name, rule in (("a", None), ("b", "rising"), ("other", "noisy")):
        run_dir = plant(tmp_path / name, rule, steps=6)
        seed = f"\nseed = {len(name)}{ord(name[0])}\n[model]"
        config = (run_dir / "config.toml").read_text().replace("\n[model]", seed)
        (run_dir / "config.toml").write_text(config.replace('"grpo"', f'"{rule == "noisy"}"'))
    ids = {name: RunFiles(tmp_path / name).id for name in ("a", "b", "other")}
    with serving(tmp_path) as (url, _):
        page.goto(f"{url}#/?runs={','.join(ids.values())}")
        page.get_by_label("seeds as bands").check()
        drawn(page, "bands=1")
        page.wait_for_selector(".legend:has-text('a and 1 other seed')")
        assert page.locator("path.band").count() == 1
        assert page.locator(".plot path.line").count() == 2
        for axis, unit in (("time", "seconds"), ("samples", "episodes")):
            page.locator("[name=axis]").select_option(axis)
            drawn(page, f"axis={axis}")
            page.wait_for_selector(f".plot text:has-text('{unit}')")
        assert "96 episodes" in page.locator(".plot").first.inner_text()


def downloaded(page, click) -> str:
    with page.expect_download() as expected:
        click()
    return Path(expected.value.path()).read_text()


def test_charts_and_chosen_trajectories_are_exported(tmp_path, page):
    run_dir = plant(tmp_path / "run", steps=4)
    with serving(run_dir) as (url, _):
        base = f"{url}#/run/{RunFiles(run_dir).id}"
        page.goto(base)
        drawn(page)
        card = page.locator("section.card", has=page.locator(".plot")).first
        rows = downloaded(page, card.get_by_role("button", name="CSV").click).splitlines()
        assert rows[0] == '"curve","step","value"' and len(rows) == 5
        means = [float(row.split(",")[2]) for row in rows[1:]]
        expected = [row["reward/mean"] for row in read_metrics(run_dir)]
        assert means == pytest.approx(expected, rel=1e-5)
        picture = downloaded(page, card.get_by_role("button", name="SVG").click)
        drawing = ElementTree.fromstring(picture)
        lines = [e for e in drawing.iter() if e.get("class") == "line main"]
        assert len(lines) == 1 and lines[0].get("stroke", "").startswith("rgb")
        page.goto(f"{base}/groups?step=2")
        page.wait_for_selector(".members td.pick input")
        for place in (0, 2):
            page.locator(".members td.pick input").nth(place).check()
        chosen = page.get_by_text("download 2 chosen trajectories")
        assert len(downloaded(page, chosen.click).splitlines()) == 2
        page.reload()
        page.wait_for_selector(".members td.pick input")
        assert page.locator(".members td.pick input:checked").count() == 2, "the address holds it"


def test_one_task_is_seen_in_two_runs(tmp_path, page):
    for name in ("one", "two"):
        plant(tmp_path / name, "noisy" if name == "two" else None, steps=3)
    ids = [RunFiles(tmp_path / name).id for name in ("one", "two")]
    with serving(tmp_path) as (url, _):
        page.goto(f"{url}#/?runs={','.join(ids)}")
        page.locator("details.tasks summary").click()
        link = page.locator("details.tasks a").first
        task = link.inner_text()
        link.click()
        drawn(page, "tasks?")
        assert page.locator("h1").inner_text() == task
        assert page.locator(".group .task").all_inner_texts() == [task] * 2


MARKDOWN = """# A plan
* first **bold** `code`
  1. inner
> quoted

| a | b |
|---|---|
| 1 | [safe](https://example.com/x) |

```python
def double(x):  # twice
    return 2 * x + "s"
```
<script>document.title = "owned"</script> <img src=x onerror=alert(1)>
[bad](javascript:alert(1)) [data](data:text/html,<b>) ![picture](https://example.com/p.png)
"""


def test_markdown_is_drawn_without_markup_and_links_lead_away_only(tmp_path, page):
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-old\n+new\n"
    call = {"function": {"name": "edit", "arguments": {"path": "x.py", "patch": patch}}}
    row = TokenRow()
    row.messages = [
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": MARKDOWN, "tool_calls": [call]},
        {"role": "tool", "content": patch},
        {"role": "assistant", "content": "Done."},
    ]
    row.append_context([1, 2], 0)
    row.append_sampled([3], [-0.5], [0], 0)
    made = Trajectory(
        *("m", "g", "e", "t", 0, [row], [Turn(0, 2, 1, "stop", "text", message=1)]),
        reward=0.5,
        reward_components={"tests": 1.0, "style": -0.5},
        info={"reference": "new"},
        stop_reason=StopReason.TERMINATED,
    )
    TrajectoryLog(tmp_path).append(1, [made])
    with serving(tmp_path) as (url, _):
        page.on("dialog", lambda dialog: pytest.fail("a script ran"))
        page.goto(f"{url}#/run/{RunFiles(tmp_path).id}/t/1/0")
        page.wait_for_selector(".formatted table")
        said = page.locator(".message.assistant").first
        assert said.locator("b:text-is('bold')").count() == 1
        assert said.locator("pre.code .tok-comment").inner_text() == "# twice"
        links = said.locator("a").evaluate_all("links => links.map((a) => [a.href, a.rel])")
        assert links == [
            ["https://example.com/x", "noopener noreferrer nofollow"],
            ["https://example.com/p.png", "noopener noreferrer nofollow"],
        ]
        assert "[bad](javascript:alert(1))" in said.inner_text()
        assert page.locator("main img, main script").count() == 0 and page.title() != "owned"
        assert page.locator(".patch .added:text-is('+new')").count() == 2, "of call and result"
        asked = page.locator(".asked").inner_text()
        assert "Fix it." in asked and "new" in asked and "Done." in asked
        assert "style" in page.locator(".parts").inner_text()
        for key, text in (("j", "Fix it."), ("j", "A plan"), ("k", "Fix it.")):
            page.keyboard.press(key)
            assert text in page.evaluate("document.activeElement.textContent")
        page.get_by_label("formatted").uncheck()
        drawn(page, "plain=1")
        assert "# A plan" in page.locator(".message.assistant").first.inner_text()


@pytest.mark.parametrize("exported", [False, True])
def test_pictures_are_small_until_they_are_clicked(tmp_path, page, exported):
    run_dir = shown_run(tmp_path / "run", "<img src=x onerror=alert(1)>")
    with serving(run_dir) as (url, _):
        page.on("dialog", lambda dialog: pytest.fail("a script ran"))
        start = f"file://{report_run(run_dir)}" if exported else url
        page.goto(f"{start}#/run/{RunFiles(run_dir).id}/t/1/0")
        pictures = page.locator(".message.user .picture img")
        pictures.nth(1).wait_for()
        page.wait_for_function("[...document.images].every((each) => each.naturalWidth > 0)")
        assert [pictures.nth(i).evaluate("(i) => i.naturalWidth") for i in (0, 1)] == [300, 1600]
        assert all(pictures.nth(i).bounding_box()["width"] <= 160 for i in (0, 1))
        said = page.locator(".message.user .body").inner_text()
        assert said == "[image 1]<img src=x onerror=alert(1)>[image 2]"
        assert page.locator("main img").count() == 4
        page.screenshot(path=tmp_path / "small.png")
        page.get_by_role("button", name="image 2").first.click()
        assert page.locator("dialog img").bounding_box()["width"] == 1600
        page.screenshot(path=tmp_path / "whole.png")
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")
        tokens = page.locator(".tokens i.image")
        assert tokens.count() == 5
        tokens.nth(3).click()
        assert "stands for image 2 of the row" in page.locator(".detail").inner_text()


def test_the_address_holds_colour_and_token_and_the_theme_is_kept(tmp_path, page):
    run_dir = plant(tmp_path / "run", steps=2)
    with serving(run_dir) as (url, _):
        page.goto(f"{url}#/run/{RunFiles(run_dir).id}/groups")
        page.locator(".members a.open").first.click()
        page.wait_for_selector(".tokens i")
        page.get_by_label("colour by").select_option("mask")
        page.get_by_label("raw ids").check()
        page.locator(".tokens i").nth(4).click()
        assert "colour=mask" in page.url and "token=4" in page.url
        page.goto("about:blank")
        page.go_back()
        page.wait_for_selector(".tokens i.current")
        assert page.get_by_label("colour by").input_value() == "mask"
        assert "position 4" in page.locator(".detail").inner_text()
        background = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(background)
        for _ in range(2):
            page.locator("button.theme").click()
        assert page.locator("button.theme").inner_text() == "theme: dark"
        dark = page.evaluate(background)
        page.reload()
        page.wait_for_selector(".tokens i")
        assert page.evaluate(background) == dark != light


def test_a_prompt_of_a_hundred_thousand_tokens_opens_quickly(tmp_path, page):
    row, prompt = (
        TokenRow(),
        "\n".join(f"{i}. **line** `{i}` of a long prompt" for i in range(12_000)),
    )
    row.messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "Yes."}]
    row.append_context([5] * 100_000, 0)
    row.append_sampled([3], [-0.5], [0], 0)
    turn = Turn(0, 100_000, 1, "stop", "text", message=1)
    made = Trajectory("m", "g", "e", "t", 0, [row], [turn], stop_reason=StopReason.TERMINATED)
    TrajectoryLog(tmp_path).append(1, [made])
    with serving(tmp_path) as (url, _):
        page.goto(url)
        page.wait_for_selector("a.name")
        started = time.monotonic()
        page.goto(f"{url}#/run/{RunFiles(tmp_path).id}/t/1/0")
        page.wait_for_selector(".tokens i")
        print(f"a prompt of 100,000 tokens: first paint after {time.monotonic() - started:.2f} s")
        started = time.monotonic()
        page.get_by_role("button", name="characters left out: show all").click()
        page.wait_for_selector("text=11999.")
        print(f"{len(prompt):,} characters shown whole after {time.monotonic() - started:.2f} s")


def test_everything_is_reached_with_the_keyboard_and_by_tapping(tmp_path, chromium):
    run_dir = plant(tmp_path / "run", "malformed_calls")
    with (
        serving(run_dir) as (url, _),
        watched(chromium, viewport=NARROW, has_touch=True, is_mobile=True) as page,
    ):
        page.goto(url)
        page.wait_for_selector("a.name")
        reached = set()
        for _ in range(6):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.textContent"))
        assert "run" in reached, "the run's link"
        page.get_by_role("link", name="run", exact=True).press("Enter")
        drawn(page, "#/run/")
        page.locator(".plot.clickable").first.focus()
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        drawn(page, "step=1")
        page.locator("a.open").first.tap()
        page.wait_for_selector(".tokens i")
        page.locator(".tokens i").nth(5).tap()
        assert "position 5" in page.locator(".detail").inner_text()
        for tab in ("Curves", "Groups", "Diagnosis", "Configuration"):
            page.get_by_role("link", name=tab).tap()
            page.wait_for_selector(f"nav.tabs a[aria-current]:text-is('{tab}')")
            page.wait_for_timeout(100)
            width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(width) <= 0, f"{tab} overflows"


HANDLERS = """[...document.querySelectorAll('*')].some(
    (element) => [...element.attributes].some((attribute) => attribute.name.startsWith('on')))"""


def test_injected_markup_stays_text(tmp_path, page):
    for number, attack in enumerate(ATTACKS):
        name = "".join(c for c in attack if c.isprintable() and c != "/")[:40]
        markup = "<img src=x onerror=alert(1)>"
        hostile(tmp_path / "runs" / (f"{number}{name}" if number else markup), attack)
    with serving(tmp_path / "runs") as (url, _):
        page.on("dialog", lambda dialog: pytest.fail("a script ran"))
        page.goto(url)
        page.wait_for_selector("a.name")
        assert page.locator("a.name").count() == len(ATTACKS)
        assert page.locator("main img, main iframe, main script").count() == 0
        for run_dir in (tmp_path / "runs").iterdir():
            base = f"{url}#/run/{RunFiles(run_dir).id}"
            for where in ("", "/groups", "/t/1/0", "/config", "/diagnosis"):
                page.goto(base + where)
                drawn(page, base.split("#")[1] + where)
                assert page.title() != "owned"
                assert page.locator("main img, main iframe, main script").count() == 0
                assert not page.evaluate(HANDLERS)


def test_a_report_opens_as_a_file_and_its_links_lead_somewhere(tmp_path, page):
    run_dir = plant(tmp_path / "run", "truncation")
    page.goto(report_run(run_dir).as_uri())
    drawn(page, "#/run/")
    assert page.locator(".plot path").count() > 5
    page.get_by_role("link", name="Diagnosis").click()
    page.locator("[data-rule=truncation] a:has-text('examples')").click()
    page.wait_for_selector(".members a.open")
    page.locator("tr:not(.dim) a.open").first.click()
    page.wait_for_selector(".tokens i")
    page.goto(page.url.split("/t/")[0] + "/groups?sort=longest")
    page.wait_for_selector("text=agentrl view RUN_DIR")
    assert page.evaluate("fetch('https://example.com').then(() => 'sent', () => 'blocked')") == (
        "blocked"
    )


def memory(pid: int) -> int:
    """Resident megabytes."""
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in x]
    return int(line.split()[1]) // 1024


def test_a_hundred_thousand_trajectories(tmp_path, page):
    run_dir = tmp_path / "large"
    large_run(run_dir, num_steps=400, num_groups=32, members=8)
    with serving(run_dir) as (url, server):
        started = time.monotonic()
        page.goto(f"{url}#/run/{RunFiles(run_dir).id}/groups")
        page.wait_for_selector(".members tbody tr")
        print(f"102,400 trajectories open in {time.monotonic() - started:.2f} s")
        assert "12.8k" in page.locator(".count").inner_text()
        for name, value in (("show", "failed"), ("sort", "surprising"), ("task", "train/75")):
            field = page.locator(f"[name={name}]")
            started = time.monotonic()
            if name == "task":
                field.fill(value)
                field.press("Enter")
            else:
                field.select_option(value)
            page.wait_for_selector(f"body[data-drawn*='{name}=']")
            print(f"filter {name} = {value}: {time.monotonic() - started:.3f} s")
        print(f"server holds {memory(server.pid)} MB")
        assert memory(server.pid) < 600


def large_run(run_dir: Path, *, num_steps: int, num_groups: int, members: int) -> None:
    """Trajectories of one record each, with the index that their writer makes of them."""
    log = TrajectoryLog(run_dir)
    row = TokenRow(messages=[{"role": "user", "content": "?"}])
    row.append_context([1, 2], 0)
    row.append_sampled([3] * 4, [-0.1, -0.2, -0.3, -0.4], [0] * 4, 0)
    for step in range(1, num_steps + 1):
        log.append(
            step,
            [
                Trajectory(
                    *(f"{step}-{group}-{member}", f"{step}-{group}", "e"),
                    *(f"train/{group * 3}", 0, [row], [Turn(0, 2, 4, "stop", "text")]),
                    reward=float((step + group + member) % 3 == 0),
                    stop_reason=StopReason.TERMINATED,
                    error=None if member < 7 or step % 9 else FAILED,
                )
                for group in range(num_groups)
                for member in range(members)
            ],
        )
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.3}\n')


def test_a_trajectory_of_a_million_tokens(tmp_path, page):
    run_dir = tmp_path / "long"
    turns, row, place = [], TokenRow(), 0
    rng = np.random.default_rng(1)
    for turn in range(500):
        row.append_context(rng.integers(0, 50_000, 1000).tolist(), turn)
        logprobs = (-rng.exponential(0.5, 1000)).tolist()
        row.append_sampled(rng.integers(0, 50_000, 1000).tolist(), logprobs, [0] * 1000, turn)
        row.messages += [
            {"role": "tool", "content": "observed " * 50},
            {"role": "assistant", "content": f"turn {turn} " * 50},
        ]
        turns.append(Turn(0, place + 1000, 1000, "stop", "text", message=2 * turn + 1))
        place += 2000
    made = Trajectory("a", "g", "e", "t", 0, [row], turns, stop_reason=StopReason.TERMINATED)
    TrajectoryLog(run_dir).append(1, [made])
    trained = np.asarray(row.loss_mask, bool)
    values = np.where(trained, 0.5, np.nan).astype(np.float32)
    with SignalLog(run_dir) as signals:
        signals.write(1, lambda: [RowSignals("a", 0, trained, values, values, values, values)])
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.3}\n')
    del made
    with serving(run_dir) as (url, server):
        page.goto(url)
        page.wait_for_selector("a.name")
        started = time.monotonic()
        page.goto(f"{url}#/run/{RunFiles(run_dir).id}/t/1/0")
        page.wait_for_selector(".tokens i")
        print(f"1,000,000 tokens: first paint after {time.monotonic() - started:.2f} s")
        started = time.monotonic()
        page.get_by_label("first token shown").fill("998000")
        page.get_by_label("first token shown").press("Enter")
        page.wait_for_selector("text=998k to 999k of 1M")
        print(f"another window after {time.monotonic() - started:.2f} s")
        assert page.locator(".tokens i").count() == 1024
        assert page.locator(".message").count() == 200
        heap = page.evaluate("performance.memory.usedJSHeapSize") // 2**20
        print(f"server holds {memory(server.pid)} MB, the page's heap {heap} MB")
        assert memory(server.pid) < 900 and heap < 100


def test_evaluations_are_compared_down_to_a_sample(tmp_path, page):
    for model, rewards in REWARDS.items():
        evaluation(tmp_path / "table" / model / "sums", rewards)
    (tmp_path / "table" / SUITE_FILE).write_text("")
    with serving(tmp_path) as (url, _):
        page.goto(url)
        page.get_by_role("link", name="evaluations").click()
        drawn(page, "#/evaluations")
        for model in ("strong", "weak"):
            page.get_by_label(f"choose {model}, sums").check()
            page.wait_for_selector(f".matrix th:has-text('{model}, sums')")
        assert page.locator(".matrix tbody tr").count() == 4
        page.locator("select[name=show]").select_option("A right, B wrong")
        page.wait_for_selector(".matrix .count:has-text('1 task of 4')")
        row = page.locator(".matrix tbody tr")
        assert row.locator(".sample.solved").count() == 2 and row.locator(".sample").count() == 4
        row.locator(".sample").first.click()
        drawn(page, "/t/0/")
        page.go_back()
        page.locator(".matrix tbody tr a").first.click()
        drawn(page, "#/tasks")
        assert page.locator(".two h2 a").all_text_contents() == ["strong/sums", "weak/sums"]


def test_a_page_samples_on_from_an_edited_token_and_from_an_edited_message(
    tmp_path, chromium, page
):
    keys = [f"--run.dir={tmp_path / 'run'}", "--run.num_steps=1", "--eval.num_tasks=2"]
    run = train(load_config(QUICKSTART, keys), quiet=True).run_dir
    played = [entry for entry in TrajectoryIndex(run).refresh() if entry.turns == 1]
    failed = next(entry for entry in played if not entry.reward and not entry.error)
    address = f"#/run/{RunFiles(run).id}/t/{failed.step}/{failed.offset}"
    with serving(run) as (url, _), watched(chromium, viewport=WIDE) as reading:
        reading.goto(url + address)
        reading.locator(".tokens i").last.click()
        assert reading.get_by_role("button", name="sample").count() == 0
    with serving(run, options=("--play",)) as (url, _):
        page.goto(url + address)
        page.wait_for_selector(".tokens i")
        first = page.locator(".tokens i:not(.ctx)").first
        first.click()
        page.get_by_role("button", name="sample from position").click()
        page.get_by_label("text in its place").fill("<tool_call>")
        page.get_by_role("button", name="sample", exact=True).click()
        page.wait_for_selector(".forkresult", timeout=60_000)
        cards = page.locator(".branch")
        assert cards.count() == 1 + 4
        assert "recorded" in cards.first.inner_text()
        for card in cards.all()[1:]:
            assert "<tool_call>" in card.inner_text()
            assert re.search(r"reward [01]", card.inner_text())
            assert re.search(r"advantage [+-]?[0-9]", card.inner_text())
        page.get_by_role("button", name="edit, and sample from here").last.click()
        page.wait_for_selector("p:has-text('The next turn reads this text')")
        written = page.get_by_label("text in its place")
        assert written.input_value() == page.locator("article.message.user .body").inner_text()
        written.fill("12*12=?")
        page.get_by_role("button", name="sample", exact=True).click()
        page.wait_for_selector(".forkresult:has-text('edited')", timeout=60_000)
        page.goto(f"{url}#/run/{RunFiles(run).id}/groups?step=1")
        page.get_by_role("button", name="play both").click()
        page.wait_for_selector(
            ".taught tr:has-text('first turn: calls calculator')", timeout=60_000
        )
        page.set_viewport_size(NARROW)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= NARROW["width"]
