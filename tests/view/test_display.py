import fcntl
import io
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
from rich.console import Console

from agentrl.view.display import Display

METRICS = {
    "reward/mean": 0.4375,
    "reward/std": 0.25,
    "loss/policy": -0.0021,
    "policy/kl_old_new": 1.5e-5,
    "policy/rollout_train_logprob_diff_mean": float("nan"),
    "train/tokens_per_s": 12345.0,
    "rollout/error_fraction": 0.0,
}


def written(total_steps: int, steps: range, **changes) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=changes.pop("encoding", "utf-8"))
    with Display(total_steps, "a run", file=file, **changes) as display:
        for step in steps:
            display.phase("rollout", 3, 8)
            display.phase("train", 1, 2)
            display.step(step, METRICS | {"reward/mean": step / 10})
        display.note(
            "checkpoint of step 2 not saved: a remedy that is much longer than a line " * 2
        )
    file.flush()
    return file.buffer.getvalue().decode(file.encoding)


def test_a_log_gets_one_line_per_step_and_the_curve():
    text = written(5, range(1, 4))
    lines = text.splitlines()
    steps = [line for line in lines if re.match(r"step \d/5  ", line)]
    assert len(steps) == 3
    assert "reward 0.2  errors 0  tokens/s 12.3k" in steps[1]
    assert "mismatch" not in text, "a value that is not finite is left out"
    assert "\x1b" not in text and "\r" not in text
    note = next(line for line in lines if line.startswith("checkpoint of step 2"))
    assert note.count("a remedy") == 2, "a note is not wrapped"
    assert "reward: 0.1 at step 1, 0.3 at step 3, 0.3 at best (step 3)" in lines
    assert "3 steps in 0 s" in lines
    assert re.search("[⠀-⣿]", text)


def test_evaluations_are_shown_where_they_were_played():
    file = io.StringIO()
    with Display(3, "a run", file=file) as display:
        display.step(1, METRICS | {"eval/avg@4": 0.5, "eval/pass@4": 1.0})
        display.step(2, METRICS)
        display.step(3, METRICS | {"eval/avg@4": 0.75, "eval/hard/avg@1": 0.125})
    lines = file.getvalue().splitlines()
    assert "  held-out 0.5  " in lines[0] and "held-out" not in lines[1]
    assert "  held-out 0.75  held-out hard 0.125  " in lines[2]
    assert "held-out: 0.5 at step 1, 0.75 at step 3, 0.75 at best (step 3)" in lines


def test_an_ascii_log_gets_ascii():
    text = written(5, range(1, 4), encoding="ascii")
    assert text.isascii() and "*" in text


def test_escape_sequences_in_a_title_or_note_do_not_reach_the_terminal():
    file = io.StringIO()
    with Display(3, "a\x1b]0;owned\x07run", file=file) as display:
        display.note("warning: \x1b[2J\u202ecleared")
    assert file.getvalue().startswith("warning: [ESC][2J[U+202E]cleared\n")
    assert display.title == "a[ESC]]0;owned[U+0007]run"


def test_quiet_is_silent():
    assert written(5, range(1, 4), quiet=True) == ""


def test_a_resumed_run_counts_on_from_its_step(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    file = io.StringIO()
    with Display(10, "a run", file=file) as display:
        for step in (8, 9):
            clock[0] += 60
            display.step(step, METRICS)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("step 8/10") and lines[0].endswith("(60.0 s, 2:00 left)")
    assert lines[1].endswith("(60.0 s, 1:00 left)")


def test_the_curve_of_a_resumed_run_begins_where_the_run_did():
    file = io.StringIO()
    earlier = [{"step": 1, "reward/mean": 0.125}, {"step": 2, "eval/avg@1": 0.25}]
    with Display(10, "a run", earlier=earlier, file=file) as display:
        display.step(3, METRICS)
    assert "reward: 0.125 at step 1" in file.getvalue()
    assert "held-out: 0.25 at step 2" in file.getvalue()
    assert "1 step in" in file.getvalue()


def test_an_error_passes_through_and_what_was_reached_is_shown():
    file = io.StringIO()
    with pytest.raises(ZeroDivisionError), Display(10, "a run", file=file) as display:
        display.step(1, METRICS)
        raise ZeroDivisionError
    assert "1 step in" in file.getvalue()
    early = io.StringIO()
    with pytest.raises(ZeroDivisionError), Display(10, "a run", file=early):
        raise ZeroDivisionError
    assert early.getvalue() == "", "nothing was reached: the error speaks for itself"


def rendered(width: int, height: int, num_steps: int, phase, encoding: str = "utf-8") -> list[str]:
    display = Display(200, "a run with a rather long name that goes on and on " * 3)
    for step in range(1, num_steps + 1):
        display.step(step, METRICS | {"reward/mean": step % 7 / 7})
    if phase:
        display.phase(*phase)
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, height=height, force_terminal=True, color_system=None)
    display.console = console
    console.print(display)
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 150])
@pytest.mark.parametrize("phase", [None, ("rollout", 42, 64), ("checkpoint", 0, 1), ("odd", 0, 0)])
def test_the_panel_fits_the_terminal(width, num_steps, phase):
    lines = rendered(width, 24, num_steps, phase)
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert f"step {num_steps}/200" in text
    if phase and phase[0] == "rollout":
        assert "42/64 episodes" in text


def test_a_low_terminal_gets_a_low_panel():
    assert len(rendered(80, 12, 150, None)) <= 10
    assert len(rendered(80, 18, 150, None)) <= 18


def test_the_panel_in_ascii():
    assert all(line.isascii() for line in rendered(80, 24, 20, ("train", 1, 4), "ascii"))


PROGRAM = """
import logging, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
logging.basicConfig(level="INFO", format="LOG %(message)s")
from agentrl.view.display import Display
with Display(6, "pty run") as display:
    for step in range(1, 7):
        display.phase("rollout", 5, 8)
        display._live.refresh()  # as it does by itself, four times a second
        display.step(step, {"reward/mean": step / 6})
        logging.getLogger("agentrl.test").warning("of step %d", step)
        if step == 2:
            print("printed")
        if step == 3 and len(sys.argv) > 1:
            print("READY", flush=True)
            while True:
                time.sleep(0.01)
"""


def run_in_terminal(columns: int, *, interrupt: bool = False) -> tuple[str, int]:
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *(["interrupt"] if interrupt else [])],
        stdin=side,
        stdout=side,
        stderr=side,
        env=environment | {"TERM": "xterm-256color", "PYTHONUTF8": "1"},
    )
    os.close(side)
    chunks: list[bytes] = []
    interrupted = False
    while True:
        try:
            data = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        chunks.append(data)
        if interrupt and not interrupted and b"READY" in b"".join(chunks):
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.close(main)
    # A signal may cut a write in the middle of a character.
    return b"".join(chunks).decode("utf-8", "replace"), process.wait(timeout=30)


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal(columns):
    output, code = run_in_terminal(columns)
    assert code == 0
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1, "the cursor comes back"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert "pty run" in plain and "5/8 episodes" in plain and "elapsed" in plain
    # Log lines and prints stand on lines of their own, above the panel.
    for step in range(1, 7):
        assert re.search(rf"(^|[\r\n]) *LOG of step {step}\s*[\r\n]", plain), step
    assert re.search(r"(^|[\r\n]) *printed\s*[\r\n]", plain)
    end = plain[plain.rindex("reward: ") :]
    assert "1 at best (step 6)" in end and "6 steps in" in end
    assert "╭" not in end, "the panel is gone at the end"
    borders = [line for line in re.split(r"[\r\n]+", plain) if "╭" in line]
    assert max(map(len, borders)) == columns - 2, "^C fits behind it, and moves nothing"


def test_an_interrupt_leaves_a_usable_terminal():
    output, code = run_in_terminal(80, interrupt=True)
    assert code == -signal.SIGINT
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1
    assert "3 steps in" in output


def test_log_handlers_get_their_streams_back(monkeypatch):
    handler = logging.StreamHandler(sys.__stderr__)
    logger = logging.getLogger("agentrl")
    logger.addHandler(handler)
    try:
        console = Console(file=io.StringIO(), force_terminal=True, width=80)
        display = Display(3)
        display.console = console
        with display:
            assert handler.stream is not sys.__stderr__
        assert handler.stream is sys.__stderr__
    finally:
        logger.removeHandler(handler)


def test_threads_may_report_at_once():
    file = io.StringIO()
    with Display(400, file=file) as display:

        def report(start: int) -> None:
            for step in range(start, start + 100):
                display.phase("train", step, 400)
                display.step(step, METRICS)

        threads = [threading.Thread(target=report, args=(s,)) for s in (1, 101, 201, 301)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(re.findall(r"^step \d+/400 ", file.getvalue(), re.MULTILINE)) == 400
