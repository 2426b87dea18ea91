"""The same rewards as `harbor run`, on all twelve tasks, from Harbor's oracle and its idle agent.

Harbor wants Python 3.12, so it is in an environment of its own: `make test-harbor` makes one.
"""

import asyncio
import json
import subprocess

import harbor_tasks
import pytest

from agentrl_harbor.attack import play
from agentrl_harbor.env import HarborConfig, HarborEnvironment

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1800)]


def rewards_of_harbor(python, folder, agent, tmp_path):
    """Task -> the rewards that `harbor run` reports."""
    command = [str(python.parent / "harbor"), "run", "-p", str(folder), "-a", agent, "-e", "docker"]
    command += ["-o", str(tmp_path), "--job-name", agent, "-n", "2", "-q", "-y"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    results = [json.loads(path.read_text()) for path in (tmp_path / agent).glob("*/result.json")]
    return {each["task_name"]: each["verifier_result"]["rewards"] for each in results}


@pytest.mark.parametrize("agent", ["oracle", "nop"])
def test_harbor_run_gives_the_same_rewards(harbor_python, task_folder, tmp_path, agent):
    folder = harbor_tasks.write(tmp_path / "tasks")
    for path in folder.glob("*/task.toml"):  # Harbor keeps it by what not every kernel has
        path.write_text(path.read_text().replace('network_mode = "no-network"\n', ""))
    theirs = rewards_of_harbor(harbor_python, folder, agent, tmp_path)
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
