"""`agentrl env init`: what it writes works."""

import ast
import asyncio
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.env import make, resolve
from agentrl.env.scaffold import make_project, templates
from agentrl.errors import ConfigError

PLUGIN = ("-p", "agentrl.env.pytest_plugin")


@pytest.mark.parametrize("template", templates())
def test_a_project_is_whole_and_small(tmp_path, template):
    folder = make_project("word-game", template=template, path=tmp_path)
    files = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    assert files >= {
        "word_game/__init__.py",
        "word_game/env.py",
        "tests/test_env.py",
        "pyproject.toml",
        "Dockerfile",
        "README.md",
    }
    for each in folder.rglob("*"):
        if each.is_file():
            text = each.read_text()
            assert not any(name in text for name in ("my-env", "my_env", "MyEnv")), each
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["agentrl.environments"] == {
        "word-game": "word_game.env:WordGame"
    }
    lines = [line for line in (folder / "word_game" / "env.py").read_text().splitlines() if line]
    assert 10 <= len(lines) <= (35 if template == "docker" else 20)
    assert list(tmp_path.iterdir()) == [folder]


def test_hello_world_is_ten_lines(tmp_path):
    """Without the import, and the oracle, which is for the checks alone."""
    folder = make_project("adder", path=tmp_path)
    source = (folder / "adder" / "env.py").read_text()
    (oracle,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "oracle"
    ]
    lines = source.splitlines()
    del lines[oracle.lineno - 1 : oracle.end_lineno]
    assert len([line for line in lines if line.strip() and not line.startswith("from ")]) == 10


@pytest.mark.parametrize("template", templates())
def test_its_image_serves_what_the_project_offers_whatever_it_is_called_by_then(tmp_path, template):
    """The Dockerfile's command for that, in the folder of a project that was renamed."""
    folder = make_project("word-game", template=template, path=tmp_path)
    project = folder / "pyproject.toml"
    project.write_text(project.read_text().replace("word-game", "sentence-game"))
    dockerfile = (folder / "Dockerfile").read_text()
    assert "word" not in dockerfile
    (command,) = re.findall(r"^RUN (ids=.*?[^\\])\n", dockerfile, re.DOTALL | re.MULTILINE)
    command = command.replace("> /opt/agentrl/environments", "")
    for variables, served in ({}, "sentence-game"), ({"ENVIRONMENT": "math"}, "math"):
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=folder,
            env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables},
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == served, done.stderr
    project.write_text("[project]\nname = 'word-game'\n")
    assert subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True).returncode != 0


def test_a_reset_that_failed_leaves_nothing_to_close(tmp_path):
    """The docker template's, whose `reset` gets the container that `close` removes."""
    folder = make_project("word-game", template="docker", path=tmp_path)
    environment = resolve(f"{folder / 'word_game' / 'env.py'}:WordGame")
    asyncio.run(environment().close())


@pytest.mark.parametrize(("template", "answer"), [("tool", {"number": 42}), ("text", "42")])
def test_it_plays(tmp_path, template, answer):
    folder = make_project(f"plays-{template}", template=template, path=tmp_path)
    name = f"Plays{template.capitalize()}"
    target = f"{folder / f'plays_{template}' / 'env.py'}:{name}"
    assert resolve(target).id == f"plays-{template}"
    env = make(target).sync
    env.reset("test", 41)
    result = env.call("answer", **answer) if template == "tool" else env.step(answer)
    assert result.terminated and result.reward == 1.0
    env.close()


def run_tests(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, "-q", "--no-header", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("template", ["tool", "text"])
def test_its_own_tests_pass(tmp_path, template):
    run_tests(make_project("word-game", template=template, path=tmp_path), "-k", "not memory")


@pytest.mark.docker
def test_its_own_tests_pass_in_containers(tmp_path, base_image):
    folder = make_project("word-game", template="docker", path=tmp_path)
    source = folder / "word_game" / "env.py"
    source.write_text(source.read_text().replace("python:3.12-slim", base_image))
    run_tests(folder, "-k", "tasks or tools or bad_actions or oracle or leaks or an_episode")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Word", "lower-case letters"),
        ("word game", "lower-case letters"),
        ("../word", "lower-case letters"),
        ("-word", "lower-case letters"),
        ("word--game", "lower-case letters"),
        ("", "lower-case letters"),
        ("json", "another"),
        ("class", "another"),
        ("tests", "another"),
        ("environment", "another"),
    ],
)
def test_names(tmp_path, name, says):
    with pytest.raises(ConfigError, match=says):
        make_project(name, path=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "word-game").mkdir()
    (tmp_path / "word-game" / "notes").write_text("mine")
    arguments = ["env", "init", "word-game", "--path", str(tmp_path)]
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "word-game" / "notes").read_text() == "mine"
    assert main([*arguments, "--template", "web"]) == 2
    assert "choose one of " in capsys.readouterr().err


def test_the_command_is_quick_and_says_what_to_do_next(tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "agentrl", "env", "init", "word-game"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0
    assert "agentrl env check word_game.env:WordGame" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"pydantic", "aiohttp", "fastapi", "granian", "rich", "torch"}


def test_the_templates_travel_with_the_package():
    import agentrl.env.scaffold as scaffold

    assert scaffold.TEMPLATES.parent == Path(scaffold.__file__).parent
    assert templates() == ["docker", "text", "tool"]
