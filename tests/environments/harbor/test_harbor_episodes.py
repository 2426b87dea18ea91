"""Whole episodes on a real engine: solutions paid, nothing else, and nothing left behind."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time

import harbor_tasks
import pytest

from agentrl.env.container.engine import connect
from agentrl.env.episode import start_episode, take_turn
from agentrl_harbor.attack import ATTACKS, bash, play, submit
from agentrl_harbor.env import HarborConfig, HarborEnvironment

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


OF_PYTHON = [name for name in ATTACKS if name.startswith("Python's")]


def shared_for(folder, *task_ids, **config):
    settings = HarborConfig(source=str(folder), task_ids=list(task_ids) or None, **config)
    return HarborEnvironment.load_shared(settings), settings


def played(folder, task_id, commands=None, **config):
    shared, settings = shared_for(folder, task_id, **config)
    actions = None if commands is None else [bash(command) for command in commands]
    return asyncio.run(play(shared, settings, task_id, actions))


def containers():
    """Ids of this process's containers."""
    client = connect()
    try:
        mine = f"/{os.getpid()}/"
        found = client.api.containers(all=True, filters={"label": "agentrl.owner"})
        return [each["Id"] for each in found if mine in each["Labels"]["agentrl.owner"]]
    finally:
        client.close()


def test_solutions_are_paid_and_doing_nothing_is_not(task_folder):
    # Those whose work is carried in different ways; `test_harbor_parity.py` plays all.
    for task_id in ("own-verifier", "user", "variables", "layout"):
        assert played(task_folder, task_id).reward == 1.0, task_id
    assert played(task_folder, "layout", []).reward == 0.0
    assert containers() == []


def test_steps_are_played_in_order_and_a_missed_one_ends_the_task(task_folder):
    shared, settings = shared_for(task_folder, "steps")

    async def episode(first_command):
        environment = HarborEnvironment(settings, shared=shared)
        try:
            prompt = await start_episode(environment, environment.get("test", 0), 0)
            assert "Write 1 to /app/one" in str(prompt) and "/app/two" not in str(prompt)
            await take_turn(environment, bash(first_command))
            return await take_turn(environment, submit())
        finally:
            await environment.close()

    going_on = asyncio.run(episode("echo 1 > /app/one"))
    assert not going_on.terminated and "/app/two" in str(going_on.observation)
    missed = asyncio.run(episode("echo 2 > /app/one"))
    assert missed.terminated and missed.reward == 0.0
    assert len(missed.info["steps"]) == 1
    whole = played(task_folder, "steps")
    assert whole.reward == 1.0 and [each["step"] for each in whole.info["steps"]] == [
        "first",
        "second",
    ]


def test_rewards_are_read_as_the_verifier_wrote_them(task_folder):
    part = played(task_folder, "in-part", ["touch a b c"])
    assert part.reward == 0.75
    two = played(task_folder, "two-rewards", ["printf 'yes\\nyes\\n' > answer"])
    assert two.info["rewards"] == {"reward": 2.0, "lines": 2.0}
    two = played(task_folder, "two-rewards", ["printf 'yes\\n\\n' > answer"], reward_key="lines")
    assert two.reward == 2.0
    none = played(task_folder, "two-rewards", ["chmod -x /tmp; rm -rf /logs; touch /logs"])
    assert none.reward == 0.0 and none.metrics["no_reward"] == 1.0
    assert "script failed" in none.info["steps"][0]["problem"]


def write_task(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_reward_of_another_name_counts_and_is_named_once(task_folder, tmp_path, caplog):
    write_task(
        tmp_path / "scored",
        {
            "task.toml": harbor_tasks.NONE,
            "instruction.md": "Do nothing.",
            "environment/Dockerfile": harbor_tasks.FROM,
            "tests/test.sh": harbor_tasks.SH
            + "echo '{\"score\": 0.5}' > /logs/verifier/reward.json\n",
        },
    )
    (tmp_path / "scored" / "tests" / "test.sh").chmod(0o755)
    shared, settings = shared_for(tmp_path)
    for _ in range(2):
        result = asyncio.run(play(shared, settings, "scored", []))
        assert result.reward == 0.5 and result.info["rewards"] == {"score": 0.5}
    said = [each.args for each in caplog.records if "scored" in (each.args or ())]
    assert said == [("scored", "reward", "score")]


def test_an_images_entry_point_is_named_and_not_run(task_folder, tmp_path, caplog):
    write_task(
        tmp_path / "service",
        {
            "task.toml": harbor_tasks.NONE,
            "instruction.md": "Make the file /app/made.",
            "environment/Dockerfile": harbor_tasks.FROM + 'ENTRYPOINT ["/bin/touch", "/app/ran"]\n',
            "tests/test.sh": harbor_tasks.check("[ -e /app/made ] && [ ! -e /app/ran ]"),
        },
    )
    (tmp_path / "service" / "tests" / "test.sh").chmod(0o755)
    assert played(tmp_path, "service", ["touch made"]).reward == 1.0
    said = [each.getMessage() for each in caplog.records if "ENTRYPOINT" in each.getMessage()]
    assert len(said) == 1 and "/bin/touch /app/ran" in said[0]


def test_files_that_nothing_builds_from_come_into_the_working_folder(task_folder, tmp_path):
    for source in (task_folder / "image").rglob("*.*"):
        target = tmp_path / "image" / source.relative_to(task_folder / "image")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    (tmp_path / "image" / "environment").mkdir()
    (tmp_path / "image" / "environment" / "made").write_text("")
    config = HarborConfig(source=str(tmp_path))
    shared = HarborEnvironment.load_shared(config)
    done = asyncio.run(play(shared, config, "image", [bash("test -f made && mkdir /srv/made")]))
    assert done.reward == 1.0


@pytest.mark.parametrize(
    ("task_id", "names"),
    [
        ("mend", ("reward written early", "a process that rewrites the tests", *OF_PYTHON)),
        ("hello", ("tests folder is a link", "interpreters replaced", "programs shadowed")),
        ("artifacts", ("reward folder is a link", "a process that pays later", "tools replaced")),
    ],
)
def test_attacks_are_refused(task_folder, task_id, names):
    shared, settings = shared_for(task_folder, task_id)
    for name in names:
        result = asyncio.run(play(shared, settings, task_id, [bash(ATTACKS[name])]))
        assert result.reward == 0.0, (name, result.info)
    assert containers() == []


@pytest.mark.parametrize("name", OF_PYTHON)
def test_an_attack_is_paid_where_the_tests_run_in_the_agents_container(task_folder, name):
    shared, settings = shared_for(task_folder, "mend", verifier="shared")
    assert asyncio.run(play(shared, settings, "mend", [bash(ATTACKS[name])])).reward == 1.0


def test_a_shared_verifier_has_its_own_user_and_the_next_agent_the_agents(tmp_path):
    files = {
        "task.toml": harbor_tasks.NONE
        + '[agent]\nuser = "worker"\n[verifier]\nuser = "root"\n'
        + '[[steps]]\nname = "one"\nmin_reward = 1.0\n[[steps]]\nname = "two"\n',
        "environment/Dockerfile": harbor_tasks.FROM + "RUN useradd worker && chown worker /app\n",
    }
    for step in ("one", "two"):
        files[f"steps/{step}/instruction.md"] = f"Write your user's name to /app/{step}."
        files[f"steps/{step}/tests/test.sh"] = harbor_tasks.check(
            f'[ "$(id -un) $(cat /app/{step})" = "root worker" ]'
        )
        files[f"steps/{step}/solution/solve.sh"] = harbor_tasks.SH + f"id -un > /app/{step}\n"
    write_task(tmp_path / "users", files)
    done = played(tmp_path, "users", verifier="shared")
    assert done.reward == 1.0 and len(done.info["steps"]) == 2
    assert played(tmp_path, "users", []).reward == 0.0


async def test_the_limits_of_a_task_hold(task_folder):
    shared, settings = shared_for(task_folder, "mend", command_timeout_s=5)

    environment = HarborEnvironment(settings, shared=shared)
    try:
        await start_episode(environment, environment.get("test", 0), 0)
        results = []
        for command in (
            "python3 -c 'bytearray(700 << 20)'",
            "sleep 60",
            "ls /sys/class/net",
            "cat /tests/test.sh",
        ):
            results.append(await take_turn(environment, bash(command)))
        memory, slept, network, tests = [str(each.observation) for each in results]
    finally:
        await environment.close()
    assert "want of memory" in memory
    assert "stopped after 5 seconds" in slept
    assert "lo\n" in network.replace("\\n", "\n") and "eth0" not in network
    assert "No such file" in tests


SCRIPT = """
import asyncio, sys
from agentrl_harbor.attack import play
from agentrl_harbor.env import HarborConfig, HarborEnvironment
config = HarborConfig(source=sys.argv[1], task_ids=["steps"])
shared = HarborEnvironment.load_shared(config)
print("ready", flush=True)
async def forever():
    while True:
        await play(shared, config, "steps")
asyncio.run(forever())
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_whenever_a_process_is_ended(task_folder, sent, tmp_path):
    """At ten moments of an episode and its gradings: no container of the process stays."""
    client = connect()
    networks = {each["Id"] for each in client.api.networks()}
    for moment in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(task_folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2 + 0.7 * moment)  # the moment is what is tried, not waited for
        process.send_signal(sent)
        process.wait(60)
        mine = f"/{process.pid}/"
        deadline = time.monotonic() + 60
        while True:
            found = client.api.containers(all=True, filters={"label": "agentrl.owner"})
            left = [each for each in found if mine in each["Labels"]["agentrl.owner"]]
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        assert left == [], (moment, left)
    assert {each["Id"] for each in client.api.networks()} <= networks
    assert list(tmp_path.iterdir()) == []
    client.close()
