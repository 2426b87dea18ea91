"""Agents' containers on a real engine."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from agentrl.env.container.container import ContainerGone
from agentrl_swebench import images
from agentrl_swebench.containers import File, InstanceContainer

pytestmark = pytest.mark.docker

IMAGE = "agentrl/swebench-fixture:agentrl-spans-1"


@asynccontextmanager
async def container():
    made = await InstanceContainer.start(IMAGE, run_id="test", memory_mb=256, max_processes=48)
    try:
        yield made
    finally:
        await made.remove()


async def run(made, command, timeout_s=20.0, max_chars=2000):
    return await made.run(command, timeout_s=timeout_s, max_chars=max_chars)


async def test_a_command_gives_output_and_exit_code_and_keeps_no_state(fixture_dir):
    async with container() as made:
        leave = "cd /; export A=1; echo out; echo err >&2; touch /testbed/x; exit 3"
        first = await run(made, leave)
        assert (first.output, first.exit_code) == ("out\nerr\n", 3)
        second = await run(made, 'pwd; echo "[$A]"; ls x')
        assert second.output == "/testbed\n[]\nx\n"
        assert (await run(made, "printf '\\377'")).output == "�"


def test_an_image_is_local_by_each_of_its_names(engine, fixture_dir):
    image_id = engine.images.get(IMAGE).id
    for name in (IMAGE, f"docker.io/{IMAGE}", image_id, image_id.partition(":")[2][:12]):
        assert images.is_local(engine, name), name
    assert not images.is_local(engine, IMAGE.partition(":")[0] + ":another")
    assert not images.is_local(engine, "agentrl/never-built")


async def test_input_is_at_its_end(fixture_dir):
    async with container() as made:
        ran = await run(made, "cat; read x; echo read gave $?; python -c 'input()' 2>&1 | tail -1")
        assert ran.output == "read gave 1\nEOFError: EOF when reading a line\n"
        assert ran.seconds < 5


async def test_limits_hold(fixture_dir):
    async with container() as made:
        status = (await run(made, "grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status")).output
        assert status.split() == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]
        assert (await run(made, "ls /sys/class/net")).output == "lo\n"
        connects = 'import socket; socket.create_connection(("192.0.2.1", 80), 3)'
        assert "rror" in (await run(made, f"python -c '{connects}' 2>&1 | tail -1")).output
        bomb = await run(made, ":(){ :|:& };:", timeout_s=6)
        assert "fork" in bomb.output or bomb.timed_out
        await made.sweep()
        assert (await run(made, "echo here")).output == "here\n"


async def test_out_of_memory_is_reported_and_survived(fixture_dir):
    async with container() as made:
        eat = "python -c 'x = b\"a\" * (1 << 30)'"
        alone = await run(made, eat)
        assert alone.exit_code == 137 and alone.out_of_memory
        caught = await run(made, f"{eat} || echo caught")
        assert caught.output.endswith("caught\n") and caught.out_of_memory
        killed = await run(made, "python -c 'import os; os.kill(os.getpid(), 9)'")
        assert killed.exit_code == 137 and not killed.out_of_memory


async def test_at_its_deadline_the_whole_tree_is_killed(fixture_dir):
    async with container() as made:
        started = time.monotonic()
        ran = await run(
            made,
            "echo begun; trap '' TERM INT; (trap '' TERM; setsid sleep 300) & "
            "python -c 'import signal, time; signal.signal(15, lambda *a: None); time.sleep(300)'",
            timeout_s=1.5,
        )
        assert ran.timed_out and ran.exit_code is None and ran.output == "begun\n"
        assert time.monotonic() - started < 15
        assert await made.processes() == []


async def test_what_is_left_in_the_background_does_not_hold_a_command_up(fixture_dir):
    async with container() as made:
        ran = await run(made, "setsid sleep 300 & echo started")
        assert (ran.output, ran.exit_code) == ("started\n", 0)
        assert ran.seconds < 10
        assert await made.processes() == ["sleep 300"]
        await made.sweep()
        assert await made.processes() == []


async def test_a_flood_is_cut_and_stopped(fixture_dir):
    async with container() as made:
        many = await run(made, "seq 100000", max_chars=100)
        assert many.output.startswith("1\n2\n") and many.output.endswith("99999\n100000\n")
        assert many.num_dropped == 588_895 - 100 and many.exit_code == 0
        endless = await run(made, "yes", timeout_s=60)
        assert endless.flooded and endless.exit_code is None
        assert await made.processes() == []


async def test_the_first_process_cannot_be_killed_or_talked_to_and_reaps(fixture_dir):
    async with container() as made:
        for command in (
            "kill -9 -1; echo alive",
            "for s in $(seq 1 64); do kill -$s 1; done; echo x > /proc/1/fd/0; sleep 2; echo alive",
        ):
            assert (await run(made, command)).output.endswith("alive\n")
        for command in (
            "open('/proc/1/mem', 'r+b')",
            "os.kill(1, 0)",
            "os.readlink('/proc/1/cwd')",
        ):
            reached = await run(made, f'python3 -c "import os; {command}"')
            assert "PermissionError" in reached.output, reached
        await run(made, "for i in 1 2 3 4 5; do (sleep 0.1 &) ; done")
        await asyncio.sleep(3)
        assert await made.processes() == []  # not even zombies


async def test_files_are_read_and_written_as_they_are(fixture_dir):
    async with container() as made:
        await run(made, "printf 'a\\0b\\377' > /tmp/x; chmod 750 /tmp/x; ln -s /tmp/x /tmp/link")
        assert await made.read_file("/tmp/link", 100) == File("/tmp/x", 0o750, b"a\0b\xff")
        await made.write("/tmp/x", b"new\n", mode=0o750)
        assert (await run(made, "cat /tmp/link; stat -c %a /tmp/x")).output == "new\n750\n"
        for path in ("/tmp", "/nowhere", "/tmp/x/y", "-"):
            assert await made.read_file(path, 100) is None
        assert await made.read_file("/tmp/x", 3) is None


async def test_a_container_that_is_gone_is_an_error(fixture_dir):
    async with container() as made:
        await made.remove()
        await made.remove()
        with pytest.raises(ContainerGone):
            await run(made, "true")


async def test_commands_run_side_by_side_and_the_loop_stays_free(fixture_dir):
    async with container() as made:
        held_up = 0.0

        async def heartbeat():
            nonlocal held_up
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                held_up = max(held_up, time.monotonic() - before - 0.01)

        beating = asyncio.create_task(heartbeat())
        started = time.monotonic()
        await asyncio.gather(*(run(made, "sleep 2") for _ in range(8)))
        assert time.monotonic() - started < 10  # not 16
        beating.cancel()
        assert held_up < 1.0
