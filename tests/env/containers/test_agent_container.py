"""Agents in containers: they reach the endpoint and nothing else, and none outlives its episode."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from agent_play import LIMITS, play
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import make_tokenizer

from agentrl.config import AgentSection
from agentrl.env import Environment, Task, register, tool
from agentrl.errors import ConfigError
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.container import ContainerRunner

pytestmark = pytest.mark.docker

ROOT = Path(__file__).parents[3]

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
    command = ["docker", "ps", "-aq", "--filter", "label=agentrl.run=agent"]
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


ANSWERS = """
import json, os, time, urllib.request

headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = {"messages": [{"role": "user", "content": os.environ["AGENTRL_PROMPT"]}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
reply = json.load(urllib.request.urlopen(request))
time.sleep(3)
print(reply["choices"][0]["message"]["content"])
"""


@pytest.mark.timeout(300)
def test_nothing_is_left_of_a_trainer_that_was_killed_and_it_goes_on(base_image, tmp_path):
    command = ["python3", "-c", ANSWERS]
    run_file = tmp_path / "run.toml"
    quickstart = ROOT / "examples" / "quickstart" / "model"
    run_file.write_text(f"""
run = {{ num_steps = 2, save_every = 1, dir = {json.dumps(str(tmp_path / "run"))} }}
model.path = {json.dumps(str(quickstart))}
agent = {{ container = {json.dumps(base_image)}, command = {json.dumps(command)}, memory_mb = 256 }}
env = {{ id = "math", config = {{ source = "arithmetic" }} }}
rollout = {{ groups_per_step = 2, group_size = 2, max_turn_tokens = 8, max_context_tokens = 512 }}
""")

    def start(*arguments):
        train = [sys.executable, "-m", "agentrl", "train", str(run_file), "--quiet", *arguments]
        return subprocess.Popen(train, stdout=log, stderr=log)

    def left(process):
        """Containers of a process, which the label of its owner names."""
        shape = '{{.ID}} {{.Label "agentrl.owner"}}'
        listing = ["docker", "ps", "-a", "--filter", "label=agentrl.run=agent", "--format", shape]
        listed = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
        return [line for line in listed.splitlines() if f"/{process.pid}/" in line]

    def wait(condition, seconds=100):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and killed.poll() is None, log_file.read_text()
            time.sleep(0.05)

    log_file, metrics = tmp_path / "log", tmp_path / "run" / "metrics.jsonl"
    with log_file.open("w") as log:
        killed = start()
        wait(lambda: metrics.exists() and metrics.read_text() and left(killed))
        killed.send_signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        resumed = start("--resume")
        assert resumed.wait() == 0, log_file.read_text()
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2]
    assert not left(killed) and not left(resumed)
