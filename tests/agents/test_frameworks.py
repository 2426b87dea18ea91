"""Agents of frameworks that have an environment of their own, and commands of npm, as shipped.

Each plays the scripted episodes of `agentrl doctor --play`, which show its rows and why they begin,
and episodes on the quickstart's model, whose tokens and log-probabilities have to be the trainer's.
`pytest -s` prints a line of figures for each (docs/agent_endpoint.md). `make test-agents` installs
them; those that are slow to import are left to `make test-agents-nightly`.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from agent_play import LIMITS, TASKS, Recording, play, require_trained_alike

from agentrl.cli.doctor_agent import check
from agentrl.config import AgentRole, AgentSection
from agentrl.inference.embedded import EmbeddedEngine
from agentrl.model.load import load_model, load_tokenizer, resolve_dtype
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.runner import Agents, CallableRunner, make_agents
from agentrl.rollout.agent.server import AgentServer

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "examples" / "quickstart" / "model"
PREFIX = Path(sys.prefix)
PACKAGES = PREFIX / "npm" / "node_modules"
CONTEXT = 65_536
SECONDS = 300

FRAMEWORKS = {
    **dict.fromkeys(("ag2", "agno", "autogen", "instructor", "strands"), "one"),
    **dict.fromkeys(("openai_node", "openai_agents_js", "vercel", "vercel_chat"), "npm"),
}
"""Agent -> the environment that it is in."""
SLOW_FRAMEWORKS = {
    **dict.fromkeys(("haystack", "llama_index", "semantic_kernel"), "one"),
    **dict.fromkeys(("dspy", "google_adk"), "two"),
    "crewai": "crewai",
    "openhands": "openhands",
}
SEVERAL_DIALOGUES = {"dspy"}
"""Agents that ask anew in other words by design."""
CODEX_PROVIDER = (
    'model_providers.p={name="p",base_url="{base_url}",env_key="OPENAI_API_KEY",'
    'wire_api="responses"}'
)
OPENCODE = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
    "models": {"policy": {}},
}
COMMANDS = {
    "claude": [
        *("env", "IS_SANDBOX=1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "claude"),
        *("--dangerously-skip-permissions", "--model", "policy", "-p", "{prompt}"),
    ],
    "codex": [
        *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("-m", "policy", "-c", "model_provider=p", "-c", CODEX_PROVIDER, "{prompt}"),
    ],
    "opencode": [
        "env",
        "OPENCODE_CONFIG_CONTENT=" + json.dumps({"provider": {"p": OPENCODE}}),
        *("opencode", "run", "-m", "p/policy", "{prompt}"),
    ],
}


@pytest.fixture
def framework(request, tmp_path):
    """The agent's name, version and function; its process is started once, as importing it takes
    seconds."""
    name = request.param
    environment = {**FRAMEWORKS, **SLOW_FRAMEWORKS}[name]
    if environment == "npm":
        started = ["node", str(HERE / "frameworks.mjs"), name, str(PACKAGES)]
        is_there = PACKAGES.joinpath("@openai", "agents").exists()
    else:
        python = PREFIX / environment / "bin" / "python"
        started = [str(python), str(HERE / "frameworks.py"), name]
        is_there = python.exists()
    if not is_there:
        pytest.skip(f"no {name}: see `make test-agents`")
    path = os.pathsep.join([str(PREFIX / "bin"), os.environ["PATH"]])
    quiet = {
        "PATH": path,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "CREWAI_DISABLE_TELEMETRY": "true",
    }
    with subprocess.Popen(
        started,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | quiet | {"HOME": str(tmp_path), "OTEL_SDK_DISABLED": "true"},
    ) as process:
        version, one_at_a_time = process.stdout.readline().strip(), threading.Lock()
        assert version, "it did not start"

        def solve(task, base_url, api_key):
            with one_at_a_time:
                process.stdin.write(json.dumps([task.prompt, base_url, api_key]) + "\n")
                process.stdin.flush()
                return json.loads(process.stdout.readline())[0]

        yield name, version, solve
        process.stdin.close()


def require_checked(agents, dialogues=1):
    """The scripted episodes: one row per dialogue, nothing refused. Returns calls and rows, and the
    trajectories."""
    renderer = Renderer(load_tokenizer(str(MODEL)))
    played = asyncio.run(check(agents, renderer, prompt="17*3=?", timeout_s=SECONDS))
    for each in played:
        assert each.trajectory.error is None, each.trajectory.error
        assert each.is_clean, (each.script, each.new_rows, each.trajectory.info)
        assert each.num_dialogues <= dialogues
    calls = "+".join(str(len(each.trajectory.turns)) for each in played)
    rows = "+".join(str(len(each.trajectory.branches)) for each in played)
    told = f"{calls} scripted calls in {rows} rows"
    return told, [each.trajectory for each in played]


def require_exact_play(folder, runner, *, groups, roles=(), **limits):
    """Episodes on the quickstart's model, its context made long enough."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    model = load_model(str(folder), dtype=resolve_dtype("float32"), device="cpu")
    engine = Recording(EmbeddedEngine(model, seed=1, patience_s=0.05))
    waits = {"turn_timeout_s": SECONDS, "episode_timeout_s": 2 * SECONDS}
    batch = play(
        engine,
        Renderer(load_tokenizer(str(folder))),
        runner,
        groups=groups,
        roles=roles,
        env_config=TASKS,
        limits=replace(LIMITS, **waits, **limits),
        max_turn_tokens=24,
        max_context_tokens=CONTEXT,
    )
    for trajectory in batch.trajectories:
        assert trajectory.error is None and trajectory.turns, trajectory.error
    return require_trained_alike(model, batch.trajectories, engine.calls)


def require_exact_framework(framework, folder):
    name, version, solve = framework
    server = AgentServer()
    dialogues = 8 if name in SEVERAL_DIALOGUES else 1
    told, _ = require_checked(Agents(server, CallableRunner(solve)), dialogues)
    exact = require_exact_play(folder / "model", solve, groups=8, max_turns=8)
    print(f"\n| {name} {version} | {told} | {exact} |")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", FRAMEWORKS, indirect=True)
def test_a_frameworks_agent_is_one_row_and_exact(framework, tmp_path):
    require_exact_framework(framework, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("framework", SLOW_FRAMEWORKS, indirect=True)
def test_an_agent_of_the_long_tail_is_one_row_and_exact(framework, tmp_path):
    require_exact_framework(framework, tmp_path)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_exact_as_it_is_shipped(name, tmp_path):
    binaries = PACKAGES / ".bin"
    if shutil.which(name, path=str(binaries)) is None:
        pytest.skip(f"no {name}: see `make test-agents`")
    path = os.pathsep.join([str(binaries), str(PREFIX / "bin"), os.environ["PATH"]])
    command = ["env", f"PATH={path}", *COMMANDS[name]]
    section = AgentSection(command=command, answer="policy")
    told, trajectories = require_checked(make_agents(section, max_concurrent=1), dialogues=2)
    for trajectory in trajectories:
        served = trajectory.info.get("served_turns", [])
        assert len(served) == (name == "opencode"), "its title"
        for turn in (trajectory.turns[number] for number in served):
            row = trajectory.branches[turn.branch]
            assert not any(row.loss_mask[turn.start : turn.start + turn.num_tokens])
    # Titles are trained here, so that their tokens are compared as well.
    roles = [AgentRole(role="trained")]
    runner = make_agents(section, max_concurrent=1).runner
    exact = require_exact_play(tmp_path / "model", runner, roles=roles, groups=1, max_turns=3)
    print(f"\n| {name} | {told} | {exact} |")
