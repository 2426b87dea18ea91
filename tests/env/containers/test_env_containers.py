"""Containers for episodes: what is in them, on a real engine, and that none is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.container.container import Container, ContainerSpec
from agentrl.env.container.engine import (
    OWNER_LABEL,
    Engine,
    EngineError,
    ImageMissing,
    connect,
    current_owner,
    labels,
    owner_name,
    reap,
)
from agentrl.env.container.output import Clip, take_frames


@given(st.text(max_size=300), st.integers(1, 40), st.integers(1, 7))
def test_a_clipped_text_keeps_both_ends_and_counts_what_it_drops(text, max_chars, piece):
    clip = Clip(max_chars)
    raw = text.encode()
    for start in range(0, len(raw), piece):
        clip.add(1, raw[start : start + piece])
    shown, dropped = clip.text()
    half = max(max_chars // 2, 1)
    if len(text) <= 2 * half:
        assert (shown, dropped) == (text, 0)
    else:
        assert dropped == len(text) - 2 * half
        assert shown.startswith(text[:half]) and shown.endswith(text[-half:])
        assert f"{dropped:,} characters left out" in shown


def test_bytes_that_are_no_text_are_shown_as_replaced():
    clip = Clip(100)
    clip.add(1, b"\xff ok \xe2\x82")
    assert clip.text() == ("� ok �", 0)


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=30)), max_size=8),
    st.integers(1, 11),
)
def test_frames_come_out_whole_however_the_stream_is_cut(frames, piece):
    stream = b"".join(
        bytes([kind, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload
        for kind, payload in frames
    )
    buffer = bytearray()
    found = []
    for start in range(0, len(stream), piece):
        buffer += stream[start : start + piece]
        found += take_frames(buffer)
    assert found == frames and not buffer


def of_this_process():
    found = subprocess.check_output(
        ["docker", "ps", "-aq", "--filter", f"label={OWNER_LABEL}={current_owner()}"], text=True
    )
    return found.split()


@contextlib.asynccontextmanager
async def small_container(base_image):
    spec = ContainerSpec(base_image, memory_mb=128, max_processes=48)
    container = await Container.create(Engine(), spec)
    try:
        yield container
    finally:
        await container.remove()
    assert of_this_process() == []


LOOK = (
    "id -u; pwd; touch /x /etc/x 2>/dev/null || echo read-only; touch /tmp/x && echo scratch; "
    "grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status | tr -d '\\t'; "
    "ls /sys/class/net; ls /var/run/docker.sock 2>/dev/null || echo no socket"
)


@pytest.mark.docker
@pytest.mark.parametrize(
    ("missing", "error", "says"),
    [
        ({"image": "no-such-image"}, ImageMissing, "docker pull no-such-image"),
        ({"network": "no-such-network"}, EngineError, "network no-such-network not found"),
    ],
)
async def test_what_is_missing_is_named(base_image, missing, error, says):
    spec = ContainerSpec(**{"image": base_image, **missing})
    with pytest.raises(error, match=says):
        await Container.create(Engine(), spec, labels("missing", "episode"))
    assert of_this_process() == []


@pytest.mark.docker
async def test_a_container_may_do_next_to_nothing(base_image):
    async with small_container(base_image) as container:
        output = (await container.run(LOOK, timeout_s=20)).output
    assert output.split("\n") == [
        "10001",
        "/tmp",
        "read-only",
        "scratch",
        "CapEff:0000000000000000",
        "CapBnd:0000000000000000",
        "NoNewPrivs:1",
        "lo",
        "no socket",
        "",
    ]


CALLS = """
import ctypes, errno, os, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    failed = libc.syscall(number, *arguments) < 0
    return errno.errorcode.get(ctypes.get_errno()) if failed else "done"
page = ctypes.create_string_buffer(8192)
start = ctypes.c_void_p((ctypes.addressof(page) + 4095) & ~4095)
zero = [ctypes.c_long(0)] * 4
file = os.open("/bin/bash", os.O_RDONLY)
print("mincore", call(27, start, ctypes.c_size_t(4096), page))
print("fadvise64", call(221, file, *zero))
print("preadv2", call(327, file, *zero))
print("io_uring_setup", call(425, 8, page))
print("cachestat", call(451, file, *zero))
print("readahead", call(187, file, *zero))
print("unshare", call(272, 0x10000000))
print("namespaces", call(56, 0x10000000 | 17, *zero))
print("keyctl", call(250, 0, -3, 0))
print("program", subprocess.call(["/bin/bash", "-c", "cat /bin/bash | wc -c | grep ."]))
"""


@pytest.mark.docker
async def test_no_call_tells_what_is_in_the_page_cache(base_image):
    async with small_container(base_image) as container:
        output = (await container.run(f"python3 - <<'E'\n{CALLS}E", timeout_s=30)).output
    refused = {each.split()[0] for each in output.splitlines() if each.split()[-1] != "done"}
    assert {"mincore", "fadvise64", "preadv2", "io_uring_setup", "cachestat"} <= refused, output
    assert {"readahead", "unshare", "namespaces", "keyctl"} <= refused, output
    assert "program 0" in output


@pytest.mark.docker
async def test_the_engine_was_told_so(base_image):
    async with small_container(base_image) as container:
        description = connect().api.inspect_container(container.id)
    host = description["HostConfig"]
    assert host["CapDrop"] == ["ALL"] and not host["CapAdd"] and not host["Binds"]
    assert "no-new-privileges" in host["SecurityOpt"] and not host["Privileged"]
    assert host["ReadonlyRootfs"] and host["NetworkMode"] == "none"
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (128 << 20, 128 << 20, 48)
    # Of the first process; commands have the user that the test above reads in the container.
    assert description["Config"]["User"] == "65533:65533" and description["Mounts"] == []


@pytest.mark.docker
async def test_a_deadline_kills_the_command_and_all_it_started(base_image):
    async with small_container(base_image) as container:
        started = time.monotonic()
        ran = await container.run(
            "trap '' TERM INT; setsid sleep 300 & (trap '' TERM; while :; do :; done) & "
            "echo before; sleep 300",
            timeout_s=1.0,
        )
        seconds = time.monotonic() - started
        left = await container.processes()
        after = await container.run("echo", timeout_s=9)
    assert ran.timed_out and ran.exit_code is None and ran.output == "before\n"
    assert seconds < 15 and left == [] and after.exit_code == 0


OWNER = """
import asyncio, sys
from agentrl.env.container.container import Container, ContainerSpec
from agentrl.env.container.engine import Engine

async def main():
    engine, spec = Engine(), ContainerSpec(sys.argv[1], memory_mb=128)
    container, *_ = [await Container.create(engine, spec) for _ in range(3)]
    print("ready", flush=True)
    await container.run("sleep 300", timeout_s=300)

asyncio.run(main())
"""


@pytest.mark.docker
def test_nothing_is_left_of_an_owner_that_was_killed(base_image):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, base_image], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    owner = owner_name(process.pid)
    command = ["docker", "ps", "-aq", "--filter", f"label={OWNER_LABEL}={owner}"]
    # One that was made and not started is another test's matter.
    running = ["docker", "ps", "-q", *command[3:]]
    deadline = time.monotonic() + 20
    while len(subprocess.check_output(running).split()) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(subprocess.check_output(running).split()) == 3
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while subprocess.check_output(command) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert subprocess.check_output(command) == b"", "containers outlived their owner"


@pytest.mark.docker
async def test_what_never_started_is_removed_by_the_next_start(base_image):
    gone = owner_name(os.getpid()) + "0"  # started much later
    client = connect()
    made = client.containers.create(base_image, ["true"], labels=labels("x", "episode", owner=gone))
    async with small_container(base_image) as alive:
        lines = reap(client)
        assert any(line.startswith(made.id[:12]) and "gone" in line for line in lines)
        assert await alive.alive(), "a living owner's container was removed"
