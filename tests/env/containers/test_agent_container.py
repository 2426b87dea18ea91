"""Agents in containers: they reach the endpoint and nothing else, and none outlives its episode."""

import json
import subprocess
import time
from dataclasses import replace

import pytest
from agent_play import LIMITS, play
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import make_tokenizer

from agentrl.config import AgentSection
from agentrl.env import Environment, Task, register, tool
from agentrl.errors import ConfigError
from agentrl.rollout.agent.container import ContainerRunner
from agentrl.rollout.render import Renderer

pytestmark = pytest.mark.docker

PROGRAM = """
import json, os, socket, subprocess, sys, time, urllib.request

def call(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=20))

messages = [{"role": "user", "content": sys.argv[2]}]
reply = call(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})
subprocess.Popen(["sleep", "600"], start_new_session=True)
if sys.argv[1] == "fails":
    sys.exit("it broke")
if sys.argv[1] == "hangs":
    time.sleep(600)
seen = {"user": os.getuid(), "prompt": os.environ["AGENTRL_PROMPT"]}
try:
    socket.create_connection((sys.argv[3], 8000), timeout=3).close()
    seen["neighbour"] = "reached"
except OSError:
    seen["neighbour"] = "out of reach"
call(os.environ["AGENTRL_TOOLS_URL"] + "/note", {"seen": seen})
print("some noise", file=sys.stderr)
print(reply["choices"][0]["message"]["content"])
"""


@register("agent-container-test")
class AgentContainerTest(Environment):
    def splits(self):
        return {"train": 3}

    def get(self, split, index):
        return Task(f"{split}-{index}", f"question {index}")

    @tool
    async def note(self, seen: dict) -> str:
        self.episode.info["seen"] = seen
        return "noted"

    async def on_text(self, text: str):
        self.finish(reward=float(text == "right"), info=dict(self.episode.info))


def containers():
    command = ["docker", "ps", "-aq", "--filter", "label=agentrl.run=pool"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def neighbour(base_image):
    """The address of a server in a container of the engine's default network."""
    serve = ["python3", "-m", "http.server", "8000"]
    command = ["docker", "run", "-d", "--rm", "--label", "agentrl.test=1", base_image, *serve]
    name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    shape = "{{.NetworkSettings.IPAddress}}"
    address = subprocess.run(
        ["docker", "inspect", "-f", shape, name], capture_output=True, text=True, check=True
    )
    yield address.stdout.strip()
    subprocess.run(["docker", "rm", "-f", name], capture_output=True, check=True)


@pytest.mark.parametrize(
    ("how", "network"),
    [("answers", None), ("answers", "bridge"), ("fails", None), ("hangs", None)],
)
def test_an_agent_in_a_container_reaches_the_endpoint_and_ends_with_its_episode(
    base_image, neighbour, how, network
):
    before = set(containers())
    section = AgentSection(
        container=base_image,
        command=["python3", "-c", PROGRAM, how, "{prompt}", neighbour],
        memory_mb=256,
        network=network,
    )
    runner = ContainerRunner(section, max_concurrent=4)
    engine = ScriptedEngine(Renderer(make_tokenizer()), lambda *_: "right")
    started = time.monotonic()
    batch = play(
        engine,
        engine.renderer,
        runner,
        host=runner.host,
        groups=3,
        env_id="agent-container-test",
        split_size=3,
        limits=replace(LIMITS, episode_timeout_s=8 if how == "hangs" else 100),
    )
    assert time.monotonic() - started < 90
    assert not set(containers()) - before
    for trajectory in batch.trajectories:
        assert len(trajectory.turns) == 1
        if how == "answers":
            assert (trajectory.error, trajectory.reward) == (None, 1.0)
            prompt = trajectory.messages[0]["content"]
            assert trajectory.info["seen"] == {
                "user": 0,
                "prompt": prompt,
                "neighbour": "reached" if network else "out of reach",
            }
        else:
            assert trajectory.error is not None and trajectory.error.stage == "agent"
            code = "agent_error" if how == "fails" else "episode_timeout"
            assert trajectory.error.code == code
            assert how == "hangs" or "status 1: it broke" in trajectory.error.message


def test_what_is_missing_is_named(engine_is_there):
    def runner(**section):
        return ContainerRunner(AgentSection(command=["x"], **section), max_concurrent=1)

    with pytest.raises(ConfigError, match="docker pull no-such-image"):
        runner(container="no-such-image")


def test_a_network_without_this_machine_is_refused(base_image):
    for network, says in (("no-such-network", "not found"), ("none", "no address")):
        section = AgentSection(container=base_image, command=["x"], network=network)
        with pytest.raises(ConfigError, match=says):
            ContainerRunner(section, max_concurrent=1)


def test_a_command_goes_with_a_container():
    with pytest.raises(ValueError, match=r"needs agent\.command"):
        AgentSection(container="image")
    assert (
        json.loads(AgentSection(container="image", command=["x"]).model_dump_json())["host"] is None
    )
