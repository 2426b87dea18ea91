"""A kit for Harbor's providers: what agentrl asks of a sandbox, of any provider.

    AGENTRL_HARBOR_PROVIDERS="modal daytona" AGENTRL_HARBOR_IMAGE=debian:bookworm-slim \
        pytest tests/environments/harbor/test_harbor_providers.py

plays it on others than the three that need no account. Where one cannot be had here, it is skipped
with what Harbor says of it.
"""

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import harbor_tasks
import pytest

from agentrl.errors import ConfigError, DataError, EnvError
from agentrl_harbor.attack import bash, play
from agentrl_harbor.env import HarborConfig, HarborEnvironment
from agentrl_harbor.provider import Provider, ProviderSandbox
from agentrl_harbor.task import EnvironmentTable

HERE = Path(__file__).parent
STAND_IN = "chroot_provider:ChrootEnvironment"
NAMES = os.environ.get("AGENTRL_HARBOR_PROVIDERS", f"docker podman {STAND_IN}").split()
IMAGE = os.environ.get("AGENTRL_HARBOR_IMAGE", harbor_tasks.BASE)
TABLE = EnvironmentTable(docker_image=IMAGE, workdir="/srv")

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("name", NAMES),
]


@pytest.fixture
def provider(name, harbor_python, task_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("AGENTRL_CHROOTS", str(tmp_path))
    if name == STAND_IN and subprocess.run(["unshare", "--mount", "true"]).returncode != 0:
        pytest.skip("no namespaces of mounts for the stand-in")
    try:
        found = Provider(name, {}, str(harbor_python))
    except ConfigError as error:
        pytest.skip(str(error))
    yield found
    found.close()


async def test_commands_files_and_their_bounds(provider, tmp_path):
    folder = tmp_path / "environment"
    folder.mkdir()

    async def one(**more):
        settings = {"name": "kit", "network": "bridge", "user": None, "upload": True}
        settings |= {"environment": {"COLOUR": "green"}} | more
        return await ProviderSandbox.start(provider, folder, TABLE, **settings)

    sandbox, other = await asyncio.gather(one(), one())
    ran = await sandbox.run("pwd; echo $COLOUR; echo bad >&2; exit 3", timeout_s=30)
    assert (ran.output, ran.exit_code) == ("/srv\ngreen\nbad\n", 3)
    quoted = await sandbox.run("""printf '%s|' "it's" '$HOME' "a\\\\b" 'ü'""", timeout_s=30)
    assert quoted.output == "it's|$HOME|a\\b|ü|"
    assert (await sandbox.run("cat; echo end", timeout_s=30)).output == "end\n"
    slept = await sandbox.run("echo a; sleep 60; echo b", timeout_s=2)
    assert slept.timed_out and slept.exit_code is None and slept.output == "a\n"
    # It is no deadline that a command tells of itself.
    assert (await sandbox.run("exit 124", timeout_s=30)).exit_code == 124
    flood = await sandbox.run("yes", timeout_s=120, max_chars=100)
    assert flood.flooded and flood.num_dropped > 1 << 20 and len(flood.output) < 300
    assert (await sandbox.run("'" * 60_000, timeout_s=30)).exit_code == 126

    content = bytes(range(256)) * 300
    await sandbox.run("mkdir d; printf 12345 > d/five; ln -s five d/link", timeout_s=30)
    assert await sandbox.get("/srv/d/five", 5) == b"12345"
    for path, limit in (("d/five", 4), ("d/link", 9), ("d", 9), ("none", 9)):
        assert await sandbox.get(f"/srv/{path}", limit) is None, path
    await sandbox.run("mkdir '/opt/new folder'", timeout_s=30)
    await sandbox.put(_archive({"deep/er/bytes": content}), "/opt/new folder")
    assert await sandbox.get("/opt/new folder/deep/er/bytes", 1 << 20) == content
    wrote = await sandbox.script('printf %s "$1$X"', "a b", timeout_s=30, environment={"X": "!"})
    assert (wrote.output, wrote.exit_code) == (b"a b!", 0)

    # Of the work, the artifacts alone come to another sandbox.
    await sandbox.run(
        "mkdir -p out/in; echo 1 > out/in/a; ln -s in/a out/good; ln -s /tests out/bad; "
        "mkfifo out/pipe; echo 2 > not",
        timeout_s=30,
    )
    left_out = await sandbox.carry_folders(other, ["/srv/out", "/srv/missing"])
    assert sorted(each.partition(":")[0] for each in left_out) == ["/srv/out/bad", "/srv/out/pipe"]
    found = await other.run("cat out/good; ls out; ls", timeout_s=30)
    assert found.output == "1\ngood\nin\nout\n"
    for each in (sandbox, other, other):
        await each.end()
    with pytest.raises(EnvError):
        await other.run("true", timeout_s=30)


def test_episodes(provider, name, harbor_python, tmp_path):
    """A task whose tests come into the agent's sandbox, and one whose tests have their own."""
    own = '[verifier]\nenvironment_mode = "separate"\n'
    for task, table, path in (("one", "", "/srv/n"), ("apart", own, "/logs/artifacts/n")):
        files = {
            "task.toml": f'[environment]\ndocker_image = "{IMAGE}"\nworkdir = "/srv"\n{table}',
            "instruction.md": f"Write 7 to {path}.",
            "environment/data.txt": "7\n",
            "tests/test.sh": harbor_tasks.check(f'[ "$(cat {path})" = 7 ]'),
            "solution/solve.sh": f"#!/bin/bash\ncp data.txt {path}\n",
        }
        for file, text in files.items():
            target = tmp_path / "tasks" / task / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    config = HarborConfig(
        source=str(tmp_path / "tasks"),
        sandbox=f"harbor:{name}",
        harbor_python=str(harbor_python),
        verifier="shared",
    )
    shared = HarborEnvironment.load_shared(config)
    try:
        for task in ("one", "apart"):
            assert asyncio.run(play(shared, config, task)).reward == 1.0, task
            wrong = asyncio.run(play(shared, config, task, [bash("ls; echo 8 > n")]))
            assert wrong.reward == 0.0 and "no_reward" in wrong.metrics
    finally:
        HarborEnvironment.close_shared(shared)


def test_a_compose_file(provider, name, harbor_python, tmp_path):
    if name not in ("docker", "podman"):
        pytest.skip("a provider without compose files")
    files = {
        "task.toml": '[environment]\nworkdir = "/srv"\n',
        "instruction.md": "Write the colour to n.",
        "environment/Dockerfile": f"FROM {IMAGE}\n",
        "environment/docker-compose.yaml": f"services: {{main: {{image: '{IMAGE}', "
        "command: [sleep, infinity], environment: {COLOUR: green}}}\n",
        "tests/test.sh": harbor_tasks.check('[ "$(cat /srv/n)" = green ]'),
    }
    for file, text in files.items():
        (tmp_path / "task" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / file).write_text(text)
    with pytest.raises(DataError, match='set sandbox = "harbor:docker"'):
        HarborEnvironment.load_shared(HarborConfig(source=str(tmp_path / "task")))
    config = HarborConfig(
        source=str(tmp_path / "task"),
        sandbox=f"harbor:{name}",
        harbor_python=str(harbor_python),
        verifier="shared",
    )
    shared = HarborEnvironment.load_shared(config)
    try:
        done = asyncio.run(play(shared, config, "task", [bash("echo $COLOUR > n")]))
        assert done.reward == 1.0
    finally:
        HarborEnvironment.close_shared(shared)


SCRIPT = """
import asyncio, sys
from pathlib import Path
from agentrl_harbor.provider import Provider, ProviderSandbox
from agentrl_harbor.task import EnvironmentTable
async def main():
    table = EnvironmentTable(docker_image=sys.argv[2], workdir="/srv")
    provider = Provider(sys.argv[1], {}, sys.argv[4])
    sandbox = await ProviderSandbox.start(provider, Path(sys.argv[3]), table,
        name="killed", network="bridge", user=None, environment={}, upload=False)
    print(sandbox.id, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_nothing_is_left_of_a_process_that_was_killed(provider, name, harbor_python, tmp_path):
    if name not in ("docker", STAND_IN):
        pytest.skip("where its sandboxes are is not known here")
    (tmp_path / "environment").mkdir()
    command = [sys.executable, "-c", SCRIPT, name, IMAGE, str(tmp_path / "environment")]
    command.append(str(harbor_python))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    sandbox_id = process.stdout.readline().strip()

    def left():
        if name == STAND_IN:
            return [each.name for each in tmp_path.glob(f"{sandbox_id}*")]
        listed = ["docker", "ps", "-aq", "--filter", f"name={sandbox_id}"]
        return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()

    assert sandbox_id and left()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 120
    while left() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left() == []


def _archive(files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()
