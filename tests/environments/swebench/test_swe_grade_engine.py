"""An engine that stops, hangs and fills up while it grades. It is one of the test's own.

Needs root, `dockerd`, loop devices and minutes: markers `docker` and `slow`.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from swe_attacks import ATTACKS

from agentrl.env.client import connect
from agentrl.errors import EnvError
from agentrl.types import Action, ToolCall
from agentrl_swebench import env as environment
from agentrl_swebench import images
from agentrl_swebench.containers import InstanceContainer, current_engine
from agentrl_swebench.grade import GradingLimits, grade
from agentrl_swebench.patch import extract

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("swebench", reason="the official harness is missing: agentrl-gym[swebench]")

SPANS = "agentrl__spans-1"
DISK_MB = 1800


class PrivateEngine:
    """A `dockerd` with its data on a small disk of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.host = f"unix://{folder}/engine.sock"
        self.process: subprocess.Popen | None = None

    def mount(self, filesystem: str = "ext4") -> None:
        self.data.mkdir()
        image = self.folder / "disk"
        with image.open("wb") as file:
            file.truncate(DISK_MB << 20)
        if shutil.which(f"mkfs.{filesystem}") is None:
            pytest.skip(f"no disk of {filesystem} can be made: mkfs.{filesystem} is missing")
        subprocess.run([f"mkfs.{filesystem}", "-q", image], check=True, capture_output=True)
        done = subprocess.run(["mount", "-o", "loop", image, self.data], capture_output=True)
        if done.returncode:
            pytest.skip(f"no loop device can be mounted: {done.stderr.decode().strip()}")

    def start(self) -> None:
        # In a network of its own: it would take the other engine's bridge away.
        self.process = subprocess.Popen(
            [
                *("unshare", "--net", "dockerd", "-H", self.host, "--data-root", self.data),
                *("--exec-root", self.folder / "exec", "--pidfile", self.folder / "pid"),
                *("--bridge=none", "--iptables=false", "--ip-forward=false", "--ip-masq=false"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "log").open("ab"),
            start_new_session=True,
        )
        until = time.monotonic() + 60
        while self.docker("info", check=False).returncode:
            assert time.monotonic() < until, (self.folder / "log").read_text()[-1000:]
            time.sleep(0.5)

    def stop(self, with_signal: int = signal.SIGTERM) -> None:
        if self.process is None:
            return
        os.kill(self.process.pid, with_signal)
        self.process.wait(60)
        self.process = None

    def close(self) -> None:
        if self.process is not None:
            self.docker("ps", "-aq", check=False)
        self.stop()
        subprocess.run(["umount", "-l", self.data], capture_output=True)

    def docker(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["docker", "-H", self.host, *arguments], check=check, capture_output=True, text=True
        )

    def running(self) -> str:
        """The id of a container in which a patch is graded; not of one that makes an image."""
        ps = ("ps", "-q", "--filter", "label=agentrl.role=grade")
        return self.docker(*ps, check=False).stdout.split("\n")[0]


@pytest.fixture(scope="module")
def private_engine(engine, fixture_instances, tmp_path_factory):
    with started(fixture_instances, tmp_path_factory, "ext4") as private:
        yield private


@pytest.fixture
def engine_on_btrfs(engine, fixture_instances, tmp_path_factory):
    with started(fixture_instances, tmp_path_factory, "btrfs") as private:
        yield private


@contextlib.contextmanager
def started(fixture_instances, tmp_path_factory, filesystem):
    """An engine with the image of `SPANS`."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("an engine of the test's own needs root and dockerd")
    private = PrivateEngine(tmp_path_factory.mktemp("engine"))
    private.mount(filesystem)
    try:
        private.start()
        save = subprocess.Popen(
            ["docker", "save", fixture_instances[SPANS].image], stdout=subprocess.PIPE
        )
        subprocess.run(
            ["docker", "-H", private.host, "load"],
            stdin=save.stdout,
            check=True,
            capture_output=True,
        )
        assert save.wait() == 0
        yield private
    finally:
        private.close()


def patch_named(name, instance):
    return next(each for each in ATTACKS if each.name == name).make_patch(instance)


def grade_while(private, instance, patch, act, *, limits=None, timeout_s=120.0, after_s=0.8):
    """Grade, and call `act` so long after the container started."""

    async def both():
        verdict = asyncio.create_task(
            grade(
                instance,
                patch,
                policy="strict",
                run_id="engine",
                timeout_s=timeout_s,
                limits=limits,
            )
        )
        while not await asyncio.to_thread(private.running) and not verdict.done():
            await asyncio.sleep(0.1)
        await asyncio.sleep(after_s)
        await asyncio.to_thread(act)
        return await verdict

    return asyncio.run(both())


def test_engine_that_answers_again_grades_again(private_engine, fixture_instances, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", private_engine.host)
    instance = fixture_instances[SPANS]

    def restart():
        private_engine.stop()
        private_engine.start()

    verdict = grade_while(private_engine, instance, instance.patch, restart)
    assert (verdict.outcome, verdict.attempts) == ("resolved", 2)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_engine_that_stops_masks(private_engine, fixture_instances, monkeypatch, sent):
    monkeypatch.setenv("DOCKER_HOST", private_engine.host)
    instance = fixture_instances[SPANS]
    try:
        verdict = grade_while(
            private_engine,
            instance,
            patch_named("noop", instance),
            lambda: private_engine.stop(sent),
        )
    finally:
        private_engine.start()
    assert (verdict.outcome, verdict.resolved, verdict.reward) == ("infrastructure", None, None)
    # What could not be removed then is removed by the next grading.
    grade_while(private_engine, instance, instance.patch, lambda: None)
    assert private_engine.docker("ps", "-aq").stdout == ""


def test_engine_that_hangs_masks(private_engine, fixture_instances, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", private_engine.host)
    monkeypatch.setattr("agentrl_swebench.harness.WALL_GRACE_S", 15.0)
    instance = fixture_instances[SPANS]

    def hang():
        os.kill(private_engine.process.pid, signal.SIGSTOP)

    started = time.monotonic()
    try:
        verdict = grade_while(
            private_engine, instance, patch_named("noop", instance), hang, timeout_s=5
        )
    finally:
        os.kill(private_engine.process.pid, signal.SIGCONT)
    assert (verdict.outcome, verdict.reward) == ("infrastructure", None)
    assert time.monotonic() - started < 120


def test_full_disk_masks(private_engine, fixture_instances, monkeypatch):
    """The disk fills up while the tests of a wrong patch run, by nothing that the patch does."""
    monkeypatch.setenv("DOCKER_HOST", private_engine.host)
    instance = fixture_instances[SPANS]
    ballast = private_engine.data / "ballast"

    def fill():
        free = shutil.disk_usage(private_engine.data).free
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - (16 << 20))  # at once: the tests are short

    try:
        verdict = grade_while(
            private_engine,
            instance,
            patch_named("noop", instance),
            fill,
            limits=GradingLimits(min_free_bytes=64 << 20),
            after_s=0,
        )
    finally:
        ballast.unlink(missing_ok=True)
    assert (verdict.outcome, verdict.resolved, verdict.reward) == ("infrastructure", None, None)


async def test_a_fix_is_submitted_from_a_full_disk(
    private_engine, fixture_instances, monkeypatch, tmp_path
):
    """A neighbour filled the disk before the agent submits."""
    monkeypatch.setenv("DOCKER_HOST", private_engine.host)
    monkeypatch.setenv("AGENTRL_STATE_DIR", str(tmp_path))
    ballast = private_engine.data / "ballast"

    source = await images.resolve(fixture_instances[SPANS].image)
    made = await images.scrubbed(source)
    container = await InstanceContainer.start(made.image_id, run_id="full")
    try:
        fix = "sed -i 's/start </start <=/' spans/core.py; chmod 000 setup.py"
        await container.run(fix, timeout_s=30)
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        full = await container.run("seq 100000 > more.txt", timeout_s=30)
        assert "No space left" in full.output
        extracted = await extract(container, made.base)
    finally:
        ballast.unlink(missing_ok=True)
        await container.remove()
    assert extracted.problem == "" and "start <= merged" in extracted.patch


async def test_an_agent_fills_its_own_quota_and_is_graded(
    engine_on_btrfs, fixture_instances, monkeypatch, tmp_path
):
    monkeypatch.setenv("DOCKER_HOST", engine_on_btrfs.host)
    monkeypatch.setenv("AGENTRL_STATE_DIR", str(tmp_path))

    source = await images.resolve(fixture_instances[SPANS].image)
    made = await images.scrubbed(source)
    about = await current_engine().call(lambda client: client.images.get(made.image_id).attrs)
    disk_mb = (about["Size"] >> 20) + 100  # on btrfs the image counts
    container = await InstanceContainer.start(made.image_id, run_id="quota", disk_mb=disk_mb)
    try:
        await container.run("sed -i 's/start </start <=/' spans/core.py", timeout_s=30)
        full = await container.run("head -c 400M /dev/zero > /ballast", timeout_s=300)
        free = shutil.disk_usage(engine_on_btrfs.data).free
        output, free, extracted = full.output, free, await extract(container, made.base)
    finally:
        await container.remove()
    assert "quota exceeded" in output
    assert free > 400 << 20, "the neighbours' disk is not full"
    assert extracted.problem == "" and "start <= merged" in extracted.patch


def test_an_engine_without_quotas_names_the_key(private_engine, fixture_instances, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", private_engine.host)
    image = fixture_instances[SPANS].image
    with pytest.raises(EnvError, match="disk_mb = 512 is more than this engine can do"):
        asyncio.run(InstanceContainer.start(image, run_id="quota", disk_mb=512))


# --- an engine that restarts, and a container that freezes, while an episode is played ------------


async def seen(private, number):
    """Wait for the next `number` runs of the harness to have containers that run."""
    ids: set[str] = set()
    while len(ids) < number:
        ps = ("ps", "-q", "--filter", "label=agentrl.role=grade")
        ids |= {*(await asyncio.to_thread(private.docker, *ps, check=False)).stdout.split()}
        await asyncio.sleep(0.1)


def freeze_agent(private):
    private.docker("pause", *private.docker("ps", "-q").stdout.split())


def restart(private):
    private.stop()
    private.start()


@pytest.mark.parametrize(
    ("what", "act"),
    [
        ("start", restart),
        ("command", restart),
        ("command", freeze_agent),
        ("submission", restart),
        ("submission", freeze_agent),
        ("grading", restart),
        ("official run", restart),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
async def test_trouble_in_an_episode_is_no_reward_of_0(
    private_engine, fixture_dir, fixture_instances, monkeypatch, tmp_path, what, act
):
    """The agent fixes the bug, and what happens meanwhile is nothing that it did."""
    monkeypatch.setenv("DOCKER_HOST", private_engine.host)
    monkeypatch.setenv("AGENTRL_STATE_DIR", str(tmp_path))
    monkeypatch.setattr("agentrl_swebench.grade.BACK_OFF_S", (3.0, 10.0))
    config = {"source": str(fixture_dir / "dataset.jsonl"), "min_free_gb": 0}
    config |= {"instance_ids": [SPANS], "command_timeout_s": 20}
    before = {*private_engine.docker("ps", "-aq").stdout.split()}
    fix = f"sleep 3; git apply - <<'END'\n{fixture_instances[SPANS].patch}END\n"
    real = environment.extract

    async def disturbed_extract(container, base):
        _, extracted = await asyncio.gather(
            asyncio.to_thread(act, private_engine), real(container, base), return_exceptions=True
        )
        if isinstance(extracted, BaseException):
            raise extracted
        return extracted

    if what == "submission":
        monkeypatch.setattr(environment, "extract", disturbed_extract)

    async def then_act(ready):
        await ready
        await asyncio.to_thread(act, private_engine)

    async def episode(client):
        readies = {
            "start": lambda: asyncio.sleep(0.3),
            "grading": lambda: seen(private_engine, 1),
            "official run": lambda: seen(private_engine, 2),
        }
        disturbance = asyncio.create_task(then_act(readies.get(what, lambda: asyncio.sleep(1e6))()))
        try:
            session = await client.session(
                "swebench", split="test", index=0, config=config, timeout_s=300
            )
            if what == "command":
                disturbance.cancel()
                disturbance = asyncio.create_task(then_act(asyncio.sleep(1)))
            for name, arguments in (("bash", {"command": fix}), ("submit", {})):
                action = Action(tool_calls=(ToolCall(name, name, arguments),))
                result = await session.step(action, timeout_s=600)
            return result.reward
        except EnvError as error:
            return f"masked: {error.code}"
        finally:
            if what in ("start", "command", "grading", "official run"):
                await disturbance
            else:
                disturbance.cancel()

    client = connect()
    try:
        outcome = await episode(client)
    finally:
        await client.aclose()
    until = time.monotonic() + 20
    while left := {*private_engine.docker("ps", "-aq").stdout.split()} - before:
        if time.monotonic() > until:
            break
        time.sleep(0.5)
    print(f"{act.__name__:14} during {what:12} {outcome}, {len(left)} containers left")
    assert outcome == 1.0 or str(outcome).startswith("masked")
    assert not left
