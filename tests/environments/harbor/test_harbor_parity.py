"""The same rewards as `harbor run`, on all twelve tasks and on an exported instance of SWE-bench,
from Harbor's oracle and its idle agent.

Harbor wants Python 3.12, so it is in an environment of its own: `make test-harbor` makes one.
"""

import asyncio
import json
import shutil
import subprocess

import harbor_tasks
import pytest
from swe_fixtures.build import build

from agentrl.cli.main import main
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


def rewards_of_agentrl(folder, agent):
    """Task -> the rewards of its solution, or of doing nothing."""
    config = HarborConfig(source=str(folder))
    shared = HarborEnvironment.load_shared(config)

    async def rewards():
        return {
            task_id: (await play(shared, config, task_id, None if agent == "oracle" else [])).info[
                "rewards"
            ]
            for task_id in shared.tasks
        }

    return asyncio.run(rewards())


@pytest.fixture(scope="module")
def exported(task_folder, tmp_path_factory):
    """A folder with one instance of SWE-bench as a task; needs the engine of the others."""
    folder = tmp_path_factory.mktemp("exported")
    build(folder / "fixtures")  # which have images already where the Docker tests ran
    rows, out = folder / "fixtures" / "dataset.jsonl", folder / "tasks"
    command = ["swebench", "export", "--dataset", str(rows), "--out", str(out)]
    assert main([*command, "--instance-ids", "agentrl__ledger-1"]) == 0
    return out


@pytest.mark.parametrize("agent", ["oracle", "nop"])
def test_harbor_run_gives_the_same_rewards(harbor_python, task_folder, exported, tmp_path, agent):
    folder = harbor_tasks.write(tmp_path / "tasks")
    for path in folder.glob("*/task.toml"):  # Harbor keeps it by what not every kernel has
        path.write_text(path.read_text().replace('network_mode = "no-network"\n', ""))
    shutil.copytree(exported, folder, dirs_exist_ok=True)
    theirs = rewards_of_harbor(harbor_python, folder, agent, tmp_path)
    assert "agentrl__ledger-1" in theirs
    assert rewards_of_agentrl(task_folder, agent) | rewards_of_agentrl(exported, agent) == theirs
    assert {each["reward"] for each in theirs.values()} == {1.0 if agent == "oracle" else 0.0}
