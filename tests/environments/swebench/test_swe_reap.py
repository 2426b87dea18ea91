"""No container outlives who made it: processes are killed with SIGKILL while eight are alive."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from docker.errors import APIError

from agentrl.env.container.engine import current_owner, labels, reap

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

IMAGE = "agentrl/swebench-fixture:agentrl-spans-1"

TRAINER = """
import asyncio, sys
import agentrl_swebench.env
from agentrl.env.client import connect

async def main(dataset, *urls):
    client = connect(list(urls) or None)
    config = {"source": dataset, "min_free_gb": 1}
    sessions = [
        client.session("swebench", split="test", index=i % 3, seed=0, config=config, timeout_s=200)
        for i in range(8)
    ]
    held = await asyncio.gather(*sessions)
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""

SERVER = """
import sys
import agentrl_swebench.env
from agentrl.cli.main import main
sys.exit(main(["env", "serve", "swebench", "--host", "127.0.0.1", "--port", sys.argv[1]]))
"""

GRADER = """
import asyncio, sys
from agentrl_swebench.dataset import load_instances, parse_row
from agentrl_swebench.grade import grade

async def main(dataset):
    row = load_instances(dataset)[1].row()
    row["eval_script"] = row["eval_script"].replace("cd /testbed", "cd /testbed; sleep 600", 1)
    slow = parse_row(row, "slow")
    await asyncio.gather(*(
        grade(slow, slow.patch, policy="strict", run_id=f"slow{i}", timeout_s=900, workers=8)
        for i in range(8)
    ))

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def python(code, *arguments, tmp_path, **environment):
    with open(tmp_path / "errors", "ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"AGENTRL_STATE_DIR": str(tmp_path)} | environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def of_run(engine, role, prefix="", **filters):
    """Containers with this role whose run's name begins so."""
    found = engine.api.containers(all=True, filters={"label": f"agentrl.role={role}"} | filters)
    return [each for each in found if each["Labels"]["agentrl.run"].startswith(prefix)]


def wait_for(condition, timeout_s):
    """Waits for the condition and returns how long that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "it did not happen in time"
        time.sleep(0.1)
    return time.monotonic() - started


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_of_a_killed_trainer_nothing_is_left(fixture_dir, engine, tmp_path):
    with python(TRAINER, fixture_dir / "dataset.jsonl", tmp_path=tmp_path) as trainer:
        assert trainer.stdout.readline() == "ready\n", (tmp_path / "errors").read_text()
        assert len(of_run(engine, "agent")) == 8
        kill(trainer)
        seconds = wait_for(lambda: not of_run(engine, "agent"), 60)
        print(f"eight containers of a killed trainer were gone after {seconds:.2f} s")
        assert seconds < 15


def test_of_a_killed_server_nothing_is_left(fixture_dir, engine, tmp_path, unused_port):
    dataset = fixture_dir / "dataset.jsonl"
    token = {"AGENTRL_ENV_TOKEN": "secret"}
    with python(SERVER, unused_port, tmp_path=tmp_path, **token) as server:
        url = f"http://127.0.0.1:{unused_port}"
        with python(TRAINER, dataset, url, tmp_path=tmp_path, **token) as trainer:
            assert trainer.stdout.readline() == "ready\n", (tmp_path / "errors").read_text()
            assert len(of_run(engine, "agent")) == 8
            kill(server)
            seconds = wait_for(lambda: not of_run(engine, "agent"), 60)
            print(f"eight containers of a killed server were gone after {seconds:.2f} s")
            assert seconds < 15


def test_what_a_killed_grader_left_is_removed_at_the_next_start(fixture_dir, engine, tmp_path):
    with python(GRADER, fixture_dir / "dataset.jsonl", tmp_path=tmp_path) as grader:
        wait_for(lambda: len(of_run(engine, "grade", "slow", status="running")) == 8, 150)
        kill(grader)
        time.sleep(3)
        reap(engine)
        assert not of_run(engine, "grade", "slow")


@pytest.mark.parametrize("wait_s", [0.0, 0.5, 2.0])
def test_an_interrupted_evaluation_leaves_nothing(fixture_dir, engine, tmp_path, wait_s):
    run_id = f"interrupted-{os.getpid()}-{wait_s:g}"

    words = ["--dataset", fixture_dir / "dataset.jsonl", "--predictions", "gold"]
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl", "swebench", "eval", *words, "--run-id", run_id],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: of_run(engine, "grade", run_id), 60)
    time.sleep(wait_s)  # another moment of the grading
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert of_run(engine, "grade", run_id) == [] and process.returncode != 0
    assert "official_worker.py" not in errors


def test_reaping_takes_what_is_nobodys_and_nothing_else(fixture_dir, engine):
    gone = current_owner() + "0"  # a process that started much later
    elsewhere = "another-boot/1/1/1"
    made = {}
    try:
        for name, its_labels in {
            "gone": labels("run", "grade", owner=gone),
            "mine": labels("run", "grade"),
            "elsewhere": labels("run", "grade", owner=elsewhere),
            "expired": labels("run", "grade", owner=elsewhere) | {"agentrl.expires": "1"},
            "foreign": {"somebody": "else"},
        }.items():
            made[name] = engine.containers.create(
                IMAGE, ["sleep", "100"], labels=its_labels, network_mode="none"
            )
            try:
                made[name].start()
            except APIError:
                assert name in ("gone", "expired"), "another process was quicker"
        reap(engine)  # or another process was quicker
        left = {container.id for container in engine.containers.list(all=True, ignore_removed=True)}
        found = {name for name, container in made.items() if container.id in left}
        assert found == {"mine", "elsewhere", "foreign"}
    finally:
        for container in made.values():
            subprocess.run(["docker", "rm", "-f", container.id], capture_output=True, check=False)


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
