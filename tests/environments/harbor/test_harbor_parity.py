"""The same rewards as `harbor run`, on all twelve tasks, from Harbor's oracle and its idle agent.

Harbor wants Python 3.12, so it is in an environment of its own: AGENTRL_HARBOR_VENV, or
~/.cache/agentrl/harbor/venv (`python3.12 -m venv DIR && DIR/bin/pip install harbor`).
"""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import harbor_tasks
import pytest

from agentrl_harbor.attack import play
from agentrl_harbor.env import HarborConfig, HarborEnvironment

HERE = Path(__file__).parent
VENV = Path(os.environ.get("AGENTRL_HARBOR_VENV", "~/.cache/agentrl/harbor/venv")).expanduser()

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (VENV / "bin" / "harbor").exists(), reason=f"no harbor in {VENV} (AGENTRL_HARBOR_VENV)"
    ),
]


def rewards_of_harbor(folder, agent, tmp_path):
    """Task -> the rewards that `harbor run` reports."""
    plugins = tmp_path / "docker" / "cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    has_compose = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    variables = os.environ | {"HARBOR_TELEMETRY": "off", "DO_NOT_TRACK": "1"}
    if has_compose != 0:
        stand_in = plugins / "docker-compose"
        text = (HERE / "docker-compose").read_text()
        stand_in.write_text(f"#!{VENV}/bin/python\n" + text.partition("\n")[2])
        stand_in.chmod(0o755)
        variables["DOCKER_CONFIG"] = str(plugins.parent)
    command = [str(VENV / "bin" / "harbor"), "run", "-p", str(folder), "-a", agent, "-e", "docker"]
    command += ["-o", str(tmp_path), "--job-name", agent, "-n", "2", "-q", "-y"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    results = [json.loads(path.read_text()) for path in (tmp_path / agent).glob("*/result.json")]
    return {each["task_name"]: each["verifier_result"]["rewards"] for each in results}


@pytest.mark.parametrize("agent", ["oracle", "nop"])
def test_harbor_run_gives_the_same_rewards(base_image, task_folder, tmp_path, agent):
    folder = harbor_tasks.write(tmp_path / "tasks")
    for path in folder.glob("*/task.toml"):  # Harbor keeps it by what not every kernel has
        path.write_text(path.read_text().replace('network_mode = "no-network"\n', ""))
    theirs = rewards_of_harbor(folder, agent, tmp_path)
    config = HarborConfig(source=str(task_folder))
    shared = HarborEnvironment.load_shared(config)

    async def ours():
        return {
            task_id: await play(shared, config, task_id, None if agent == "oracle" else [])
            for task_id in shared.tasks
        }

    results = asyncio.run(ours())
    assert {task_id: each.info["rewards"] for task_id, each in results.items()} == theirs
    assert {each.reward for each in results.values()} == {1.0 if agent == "oracle" else 0.0}
