"""Starting, watching and ending servers, with a small server in vLLM's place."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.errors import InferenceError
from agentrl.inference import launcher as launcher_module
from agentrl.inference.http import make_client
from agentrl.inference.launcher import ServerLauncher
from agentrl.inference.program import ServerSettings, server_environment
from agentrl.inference.sglang_command import SGLANG
from agentrl.inference.vllm_command import VLLM

FAKE = Path(__file__).parent / "fake_vllm"


def make_launcher(log_dir: Path, **settings) -> ServerLauncher:
    arguments = dict(
        python=sys.executable,
        model="toy",
        dtype="float32",
        log_dir=log_dir,
        plugin_dir=FAKE,
        startup_timeout_s=30,
    )
    settings = ServerSettings(**arguments | settings)  # pyright: ignore[reportArgumentType]
    return ServerLauncher(settings)


def started(log: Path) -> list[tuple[int, Path]]:
    """Engine process and shared memory of every server whose start the log tells of."""
    found = re.findall(r"engine (\d+) memory (\S+)", log.read_text())
    return [(int(pid), Path("/dev/shm", name.lstrip("/"))) for pid, name in found]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def server_pid(url: str) -> int:
    port = url.rpartition(":")[2]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = command_of(int(entry.name))
            except OSError:
                continue
            if port in command and "-m" in command and "guard.py" not in " ".join(command):
                return int(entry.name)
    raise AssertionError(f"no process serves {url}")


async def until(condition, timeout_s: float = 20) -> float:
    """Seconds until `condition()` held."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, "it never came true"
        await asyncio.sleep(0.02)
    return time.monotonic() - begin


def can_connect(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), 0.5).close()
    except OSError:
        return False
    return True


async def test_servers_start_with_exact_flags_and_leave_nothing(tmp_path):
    launcher = make_launcher(
        tmp_path, num_servers=2, max_model_len=512, seed=3, extra_args=["--block-size", "16"]
    )
    await launcher.start()
    assert len(set(launcher.urls)) == 2
    for url in launcher.urls:
        async with make_client(url) as http:
            assert (await http.get("/health")).status_code == 200
    command = command_of(server_pid(launcher.urls[0]))
    sockets = Path(launcher._sockets_dir or "")
    assert sockets.is_dir()
    await launcher.aclose()
    await launcher.aclose()
    assert not sockets.exists()
    line = " ".join(command)
    for flags in (
        "--served-model-name policy",
        "--dtype float32",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--enable-scale-out",
        "--enable-prefix-caching",
        "--host 127.0.0.1",
        "--max-model-len 512",
        "--seed 3",
        '--weight-transfer-config {"backend": "agentrl"}',
        "--block-size 16",
    ):
        assert flags in line
    assert not any(map(can_connect, launcher.urls))
    for number in range(2):
        [(engine, memory)] = started(tmp_path / f"vllm-{number}.log")
        assert not alive(engine)
        assert not memory.exists()


@pytest.mark.slow
def test_a_stubborn_server_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_module, "GRACE_S", 1.0)

    async def go():
        launcher = make_launcher(tmp_path, env={"FAKE_VLLM_STUBBORN": "1"})
        await launcher.start()
        begin = time.monotonic()
        await launcher.aclose()
        return time.monotonic() - begin

    assert 1 < asyncio.run(go()) < 4
    [(engine, memory)] = started(tmp_path / "vllm-0.log")
    assert not alive(engine)
    assert not memory.exists()


async def test_a_server_that_died_is_restarted_on_its_port(tmp_path):
    launcher = make_launcher(tmp_path)
    await launcher.start()
    url = launcher.urls[0]
    os.kill(server_pid(url), signal.SIGKILL)
    await until(lambda: not can_connect(url))
    await until(lambda: can_connect(url))
    await until(lambda: launcher.restarts == 1)
    [(engine, memory), _] = started(tmp_path / "vllm-0.log")
    assert not alive(engine)
    assert not memory.exists()
    await launcher.aclose()
    assert not can_connect(url)


@pytest.mark.slow
async def test_none_is_restarted_while_the_trainer_has_the_gpu(tmp_path):
    launcher = make_launcher(tmp_path)
    await launcher.start()
    url = launcher.urls[0]
    launcher.hold()
    await launcher.stop(url)
    await asyncio.sleep(3 * launcher_module.POLL_S)  # that nothing happens cannot be waited for
    assert len(started(tmp_path / "vllm-0.log")) == 1
    launcher.release()
    await until(lambda: launcher.restarts == 1 and can_connect(url))
    await launcher.aclose()


def test_a_server_that_sleeps_is_started_so_where_there_is_a_gpu(tmp_path):
    settings = ServerSettings(python="p", model="m", log_dir=tmp_path, sleeps=True)
    for program, flag in ((VLLM, "--enable-sleep-mode"), (SGLANG, "--enable-memory-saver")):
        assert flag in program.command(settings, 1, "cuda")
        assert flag not in program.command(settings, 1, "cpu")


@pytest.mark.slow
async def test_a_server_that_hangs_is_restarted(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_module, "HEALTH_TIMEOUT_S", 0.3)
    monkeypatch.setattr(launcher_module, "GRACE_S", 1.0)

    launcher = make_launcher(tmp_path, unhealthy_after_s=1.0)
    await launcher.start()
    first = server_pid(launcher.urls[0])
    os.kill(first, signal.SIGSTOP)
    await until(lambda: launcher.restarts == 1)
    await until(lambda: len(started(tmp_path / "vllm-0.log")) == 2)
    assert not alive(first)
    await launcher.aclose()


@pytest.mark.slow
async def test_a_server_whose_engine_hangs_is_restarted(tmp_path, monkeypatch):
    """/health says that all is well."""
    monkeypatch.setattr(launcher_module, "HEALTH_TIMEOUT_S", 0.3)
    monkeypatch.setattr(launcher_module, "ENGINE_POLL_S", 0.1)
    monkeypatch.setattr(launcher_module, "GRACE_S", 1.0)

    launcher = make_launcher(tmp_path, hung_after_s=2.0)
    await launcher.start()
    [(engine, _)] = started(tmp_path / "vllm-0.log")
    os.kill(engine, signal.SIGSTOP)
    await asyncio.sleep(0.8)
    os.kill(engine, signal.SIGCONT)  # a long step
    await asyncio.sleep(1.5)
    assert launcher.restarts == 0
    os.kill(engine, signal.SIGSTOP)
    await until(lambda: launcher.restarts == 1)
    await until(lambda: len(started(tmp_path / "vllm-0.log")) == 2)
    assert not alive(engine)
    await launcher.aclose()


@pytest.mark.slow
def test_a_server_that_keeps_dying_is_given_up_on(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_module, "MAX_RESTARTS_PER_HOUR", 1)

    async def go():
        launcher = make_launcher(tmp_path)
        await launcher.start()
        for restarts in (1, 2):
            os.kill(server_pid(launcher.urls[0]), signal.SIGKILL)
            await until(lambda n=restarts: launcher.restarts == n or launcher.failure is not None)
            await until(lambda: launcher.failure is not None or can_connect(launcher.urls[0]))
        await launcher.aclose()
        return launcher.failure

    assert re.search(r"after 1 restarts within an hour; see .*vllm-0.log", asyncio.run(go()) or "")


async def test_the_run_goes_on_while_one_server_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_module, "MAX_RESTARTS_PER_HOUR", 0)
    launcher = make_launcher(tmp_path, num_servers=2)
    await launcher.start()
    first, second = launcher.urls
    os.kill(server_pid(first), signal.SIGKILL)
    await until(lambda: launcher._servers[0].given_up)
    assert launcher.failure is None and can_connect(second)
    os.kill(server_pid(second), signal.SIGKILL)
    await until(lambda: launcher.failure is not None)
    assert second in (launcher.failure or "") and launcher.restarts == 0
    await launcher.aclose()


TRAINER = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_launcher import make_launcher
async def main():
    launcher = make_launcher(Path({log_dir!r}))
    await launcher.start()
    if os.fork() == 0:      # a worker that inherits every descriptor and outlives the trainer
        import time
        time.sleep(30)
        os._exit(0)
    print(launcher.urls[0], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_nothing_outlives_a_killed_trainer(tmp_path):
    code = TRAINER.format(tests=str(FAKE.parent), log_dir=str(tmp_path))
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    url = trainer.stdout.readline().decode().strip()
    server = server_pid(url)
    [(engine, memory)] = started(tmp_path / "vllm-0.log")
    assert alive(server) and alive(engine)
    trainer.kill()
    trainer.wait()
    took = await until(lambda: not (alive(server) or alive(engine) or memory.exists()), 10)
    os.killpg(trainer.pid, signal.SIGKILL)  # its forked worker
    trainer.stdout.close()
    assert took < 5
    assert not memory.exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_a_bfloat16_server_keeps_its_logits_in_float32(tmp_path, dtype):
    launcher = make_launcher(tmp_path, dtype=dtype)
    launcher._environment["PYTHONPATH"] = str(FAKE)  # where this test's vLLM lies
    await launcher.start()
    command = command_of(server_pid(launcher.urls[0]))
    await launcher.aclose()
    assert ("head_dtype" in " ".join(command)) == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"plugin_dir": None}, r"cannot import vllm \(ModuleNot.*--inference.python"),
        ({"python": "/nowhere/python"}, r"cannot run /nowhere/python .*--inference.python"),
    ],
)
async def test_an_interpreter_without_vllm_is_named_with_the_remedy(tmp_path, settings, says):
    with pytest.raises(InferenceError, match=says):
        await make_launcher(tmp_path, **settings).start()


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("unrecognized arguments: --enable-scale-out", "too old for these flags"),
        ("the moon is full", "the moon is full"),
    ],
)
async def test_a_failed_start_shows_the_end_of_the_log(tmp_path, failure, reason):
    launcher = make_launcher(tmp_path, env={"FAKE_VLLM_FAIL": failure})
    with pytest.raises(InferenceError, match=f"(?s)ended with status 1.*{reason}"):
        await launcher.start()
    assert launcher._sockets_dir is None


@pytest.mark.slow
def test_a_server_that_a_rank_starts_knows_nothing_of_the_ranks(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    environment = server_environment(VLLM, ServerSettings(python="", model="", log_dir=tmp_path))
    # As vLLM's workers begin; it would wait for torchrun's store at that port.
    begin = (
        "import datetime, torch.distributed as dist; dist.init_process_group('gloo', rank=0, "
        f"world_size=1, init_method='tcp://127.0.0.1:{port}', timeout=datetime.timedelta(0, 10))"
    )
    assert subprocess.run([sys.executable, "-c", begin], env=environment).returncode == 0
    assert environment["HOME"] and "RANK" not in environment


@pytest.mark.parametrize(
    "env", [{"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"FAKE_VLLM_DEVICES": "4"}], ids=["named", "all"]
)
async def test_servers_share_the_devices_that_are_visible(tmp_path, env):
    launcher = make_launcher(tmp_path, num_servers=2, env=env)
    await launcher.start()
    first, second = (
        Path(f"/proc/{server_pid(url)}/environ").read_text().split("\0") for url in launcher.urls
    )
    await launcher.aclose()
    assert "CUDA_VISIBLE_DEVICES=0,1" in first
    assert "CUDA_VISIBLE_DEVICES=2,3" in second
