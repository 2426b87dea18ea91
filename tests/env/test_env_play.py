"""`agentrl env play`, as a process and as a function."""

import asyncio
import io
import subprocess
import sys

import pytest
import sample_envs
from rich.console import Console

from agentrl.cli.main import main
from agentrl.env.play import kind_of, play, read_value

ENVIRONMENTS = sample_envs.__file__
WORKSHOP = f"{ENVIRONMENTS}:Workshop"


def type_in(text, *arguments):
    """Run `agentrl env play` with piped input; returns status and output."""
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "env", "play", *arguments],
        input=text,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_an_episode_with_tools_and_text():
    lines = ["what now", "add", "ten", "10", 'add {"number": 5}', "greet", "submit", "1"]
    status, out = type_in("\n".join(lines) + "\n", WORKSHOP, "--config", "greeting=moin")
    assert status == 0, out
    assert "workshop, task train/0" in out
    assert "'ten' is not of type integer" in out
    assert '{"count":10}' in out and '{"count":15}' in out and "moin" in out
    assert "terminated after 5 turns: reward" in out and "component" in out


def test_input_that_ends_gives_the_episode_up():
    for text in ("", "/quit\n"):
        status, out = type_in(text, WORKSHOP)
        assert status == 1 and "given up" in out, out


def test_text_of_several_lines(monkeypatch):
    answers = iter(["first \\", "#### 7"])
    console = Console(file=io.StringIO(), width=100)
    monkeypatch.setattr(console, "input", lambda question: next(answers))
    reward = asyncio.run(play("math", split="test", console=console))
    shown = console.file.getvalue()
    assert reward == 0.0 and '"7"' in shown and "component" in shown


def test_on_a_server(served, monkeypatch):
    answers = iter(["answer", "43"])
    console = Console(file=io.StringIO(), width=100)
    monkeypatch.setattr(console, "input", lambda question: next(answers))
    reward = asyncio.run(play("hello", url=served, split="train", index=42, console=console))
    assert reward == 1.0


def test_wrong_input_is_one_line(capsys):
    assert main(["env", "play", "nothing"]) == 2
    assert main(["env", "play", "hello", "--split", "dev"]) == 2
    assert "has no split 'dev'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "kind", "value"),
    [
        ("7", "integer", 7),
        ("7", "string", "7"),
        ("x", "string or null", "x"),
        ("null", "integer or null", None),
        ("true", "boolean", True),
        ("[1]", "array", [1]),
        ("a b", "x | y", "a b"),
    ],
)
def test_values(line, kind, value):
    assert read_value(line, kind) == value


@pytest.mark.parametrize(
    ("line", "kind"), [("x", "integer"), ("1.5", "integer"), ("true", "number"), ("{}", "array")]
)
def test_values_of_another_kind(line, kind):
    with pytest.raises(ValueError, match=f"is not of type {kind}"):
        read_value(line, kind)


def test_kinds():
    assert kind_of({"enum": ["a", "b"]}) == "a | b"
    assert kind_of({"anyOf": [{"type": "integer"}, {"type": "null"}]}) == "integer or null"
    assert kind_of({}) == "JSON"
