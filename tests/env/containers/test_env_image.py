"""Images: what goes into a build, and the real thing on an engine: built, run, played and ended."""

import asyncio
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest

from agentrl.env.base import Environment
from agentrl.env.client import connect
from agentrl.env.container import engine, image
from agentrl.env.container.engine import OWNER_LABEL, ROLE_LABEL
from agentrl.env.container.image import build_image, docker_build
from agentrl.env.container.serve import (
    find_image,
    start_server,
    stop_servers,
    wait_until_healthy,
)
from agentrl.env.registry import resolve
from agentrl.env.scaffold import make_project
from agentrl.errors import ConfigError, EnvUnavailable
from agentrl.types import Action, ToolCall

# Building takes minutes where the package index is slow.
pytestmark = pytest.mark.timeout(1800)

CA_BUNDLE = Path(os.environ["PIP_CERT"]) if os.environ.get("PIP_CERT") else None


# ---- without an engine


def prepare(target, context, wheels=()):
    name, arguments = image._prepare(str(target), context, list(wheels))
    files = {each.relative_to(context).as_posix() for each in context.rglob("*") if each.is_file()}
    return name, arguments, files


@pytest.mark.docker  # no engine, but the package index, as builds do
def test_of_a_checkout_a_wheel_goes_in_which_is_always_the_same(tmp_path):
    name, arguments, files = prepare("math", tmp_path / "one")
    (wheel,) = files - {"Dockerfile"}
    assert name == "agentrl-math"
    assert arguments == {
        "AGENTRL": f"/deps/{wheel.removeprefix('.agentrl/')}[math]",
        "PROJECT": "",
        "ENVIRONMENT": "math",
    }
    with zipfile.ZipFile(tmp_path / "one" / wheel) as archive:
        names = set(archive.namelist())
        assert {"agentrl/env/container/container.py", "agentrl_math/env.py"} <= names
    prepare("math", tmp_path / "two")
    # Otherwise every build would install everything again.
    assert (tmp_path / "one" / wheel).read_bytes() == (tmp_path / "two" / wheel).read_bytes()


@pytest.fixture
def wheel(tmp_path):
    """A file that passes for a wheel of agentrl, so that none has to be made."""
    path = tmp_path / "agentrl_gym-0.1.0-py3-none-any.whl"
    path.write_bytes(b"wheel")
    return path


def test_what_came_from_an_index_comes_from_it_again(tmp_path):
    version = importlib.metadata.version("prometheus-client")
    named = image._requirement("prometheus-client", tmp_path, [], "twisted")
    assert named == f"prometheus-client[twisted]=={version}"


def test_a_wheel_of_the_caller_s_goes_in(tmp_path, wheel):
    _, arguments, files = prepare("swebench", tmp_path / "context", [wheel])
    assert files == {"Dockerfile", f".agentrl/{wheel.name}"}
    assert arguments["AGENTRL"] == f"/deps/{wheel.name}[swebench]"
    with pytest.raises(ConfigError, match="--wheel"):
        prepare("math", tmp_path / "other", [tmp_path / "agentrl_gym-no-such.whl"])


def test_a_project_s_context_leaves_out_what_belongs_to_this_machine(tmp_path, wheel):
    project = make_project("word-game", path=tmp_path)
    for name in (".env", ".git/config", ".venv/bin/python", "runs/a/log", "x.pyc"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("secret")
    (project / ".dockerignore").write_text("*\n!word_game\n!pyproject.toml\n")
    name, arguments, files = prepare(project, tmp_path / "context", [wheel])
    assert {"pyproject.toml", "Dockerfile", "word_game/env.py", f".agentrl/{wheel.name}"} <= files
    assert not any(each.read_bytes() == b"secret" for each in files_under(tmp_path / "context"))
    assert (
        (tmp_path / "context" / ".dockerignore").read_text().endswith("!.agentrl\n!.agentrl/**\n")
    )
    assert name == "word-game" and arguments == {"AGENTRL": f"/deps/{wheel.name}"}
    (project / "Dockerfile").unlink()
    *_, files = prepare(project, tmp_path / "again", [wheel])
    assert "Dockerfile" in files


def files_under(folder):
    return [each for each in folder.rglob("*") if each.is_file()]


@pytest.mark.parametrize(
    "target,reason",
    [("no-such", "no installed environment 'no-such'"), ("./nowhere", "no pyproject.toml")],
)
def test_what_can_not_be_built_is_named(target, reason):
    with pytest.raises(ConfigError, match=reason):
        build_image(target)


def test_without_an_engine_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(EnvUnavailable, match="dockerd"):
        find_image("math")


# ---- on an engine


@pytest.fixture(scope="module")
def built(base_image):
    """Build by id or folder, once."""
    tags: dict[str, str] = {}

    def build(target):
        if target not in tags:
            tags[target] = build_image(target, base_image=base_image, cert=CA_BUNDLE)
        return tags[target]

    return build


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return make_project("image-test-env", path=tmp_path_factory.mktemp("project"))


MATH = ({"digits": 3, "operators": "*"}, "train", 0, [])
SEARCH_CALL = Action(tool_calls=(ToolCall("a", "search", {"query": "Osmere burnt down", "k": 1}),))
SEARCH = (
    {"weights": {"em": 1.0, "retrieval": 0.2}},
    "train",
    2,
    [SEARCH_CALL, Action(tool_calls=(ToolCall("b", "answer", {"text": "1791"}),))],
)


async def episode(client, env_id, config, split, index, actions):
    """Everything a session says, as text."""
    session = await client.session(
        env_id, split=split, index=index, seed=3, config=config, timeout_s=120
    )
    said = [repr(session.messages), repr(session.tools)]
    for action in actions:
        said.append(repr(await session.step(action, timeout_s=60)))
    await session.close()
    return said


async def both(server, *where):
    async with connect() as here_client, connect(server.url, token="t0ken") as there_client:
        here = await episode(here_client, *where)
        assert here == await episode(there_client, *where)
    return here


@pytest.mark.docker
@pytest.mark.parametrize("env_id,played", [("math", MATH), ("search", SEARCH)])
def test_a_built_in_environment_is_the_same_from_its_image(built, env_id, played):
    config, split, index, actions = played
    server = start_server(built(env_id), token="t0ken")
    try:
        wait_until_healthy(server)
        if env_id == "math":
            task = resolve("math")(config).get(split, index)
            actions = [Action(text=f"#### {task.reference}")]
        said = asyncio.run(both(server, env_id, config, split, index, actions))
        assert "reward=1." in said[-1], said[-1]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server.url}/v1/envs", timeout=5)
    finally:
        stop_servers([server])


@pytest.mark.docker
def test_a_project_of_env_init_is_the_same_from_its_image(built, project, monkeypatch):
    server = start_server(built(str(project)), token="t0ken")
    try:
        wait_until_healthy(server)
        monkeypatch.syspath_prepend(project)
        here = resolve("image_test_env.env:ImageTestEnv")
        assert issubclass(here, Environment)
        actions = [Action(tool_calls=(ToolCall("a", "answer", {"number": 42}),))]
        said = asyncio.run(both(server, "image-test-env", {}, "test", 41, actions))
        assert "reward=1.0" in said[-1]
    finally:
        stop_servers([server])


@pytest.mark.docker
def test_a_failed_build_says_what_to_change(base_image, tmp_path, capsys):
    (tmp_path / "Dockerfile").write_text(f"FROM {base_image}\nRUN echo no luck today; false\n")
    with pytest.raises(ConfigError, match=r"can't be built: .*--base-image.*--pip-cert"):
        docker_build("agentrl-test-fails:1", tmp_path, {})
    assert "no luck today" in capsys.readouterr().err


@pytest.mark.docker
def test_the_engine_was_told_to_harden(built):
    server = start_server(built("math"), token="very-secret", memory="512m", max_processes=99)
    try:
        description = server.container.attrs
        status = server.container.exec_run("cat /proc/1/status").output.decode()
    finally:
        stop_servers([server], drain_s=1)
    host = description["HostConfig"]
    assert host["ReadonlyRootfs"] and host["Init"]
    assert re.search(r"^CapPrm:\t0+$", status, re.MULTILINE)
    assert re.search(r"^CapBnd:\t0+$", status, re.MULTILINE)
    assert "no-new-privileges" in host["SecurityOpt"] and not host["Binds"]
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (512 << 20, 512 << 20, 99)
    assert {each["HostIp"] for each in host["PortBindings"]["8700/tcp"]} == {"127.0.0.1"}


@pytest.mark.docker
def test_what_does_not_start_shows_its_log(built, capsys, tmp_path):
    tag = "agentrl-test-dies:1"
    dockerfile = f'FROM {built("math")}\nCMD ["sh", "-c", "echo no luck today; exit 3"]\n'
    (tmp_path / "Dockerfile").write_text(dockerfile)
    docker_build(tag, tmp_path, {})
    server = start_server(tag, token="t0ken")
    try:
        with pytest.raises(ConfigError, match=r"the container ended .*no luck today"):
            wait_until_healthy(server)
    finally:
        stop_servers([server])
        subprocess.run(["docker", "rmi", tag], capture_output=True)
    assert "no luck today" in capsys.readouterr().err


def run_command(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl", "env", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "AGENTRL_ENV_TOKEN"},
    )


def containers_of(process):
    found = engine.connect().containers.list(
        all=True, filters={"label": f"{ROLE_LABEL}=server"}, ignore_removed=True
    )
    return [each for each in found if each.labels[OWNER_LABEL].split("/")[2] == str(process.pid)]


def until_serving(process):
    assert process.stdout is not None
    said = ""
    while "AGENTRL_ENV_TOKEN=" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    urls = re.findall(r"http://127\.0\.0\.1:\d+", said)
    return urls, said.rpartition("AGENTRL_ENV_TOKEN=")[2].strip()


@pytest.mark.docker
def test_env_run_serves_until_told_to_stop_and_leaves_nothing(built):
    process = run_command("run", built("math"), "--port", "0", "--count", "2")
    try:
        urls, token = until_serving(process)
        assert len(set(urls)) == 2 and len(containers_of(process)) == 2

        async def play():
            async with connect(urls, token=token) as client:
                return await client.info("math")

        assert asyncio.run(play()).id == "math"
        port = urls[0].rpartition(":")[2]
        taken = run_command("run", built("math"), "--port", port)
        said, _ = taken.communicate(timeout=60)
        assert taken.returncode and f"port {port} is taken" in said, said
        assert containers_of(taken) == []
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert time.monotonic() - started < 20
    finally:
        process.kill()
        process.communicate()
    assert containers_of(process) == []


@pytest.mark.docker
def test_what_a_killed_env_run_left_is_removed_by_the_next(built):
    process = run_command("run", built("math"), "--port", "0")
    until_serving(process)
    assert len(containers_of(process)) == 1
    process.kill()
    process.communicate()
    assert len(containers_of(process)) == 1, "nobody was there to remove it"
    reaping = run_command("run", "--reap")
    said, _ = reaping.communicate(timeout=60)
    assert reaping.returncode == 0 and "1 leftover container" in said, said
    assert containers_of(process) == []


@pytest.mark.docker
def test_a_missing_image_is_named(engine_is_there):
    process = run_command("run", "no-such-env")
    said, _ = process.communicate(timeout=60)
    assert process.returncode and "agentrl env build no-such-env" in said
    with pytest.raises(ConfigError, match="--network none"):
        start_server("x", token="t", network="none")
