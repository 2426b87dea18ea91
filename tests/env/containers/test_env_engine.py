"""The client of the Docker engine without an engine, and to whom containers belong."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentrl.env.container.engine import (
    Engine,
    EngineError,
    Owner,
    abandoned,
    connect,
    current_owner,
    labels,
)
from agentrl.errors import ConfigError, EnvUnavailable


def test_an_owner_is_alive_until_it_ends_and_never_again():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        code = "from agentrl.env.container.engine import current_owner; print(current_owner())"
        child = Owner.parse(
            subprocess.check_output([sys.executable, "-c", code], text=True).strip()
        )
        assert child is not None and child.alive() is False

        me = current_owner()
        assert me.alive() is True
        assert Owner.parse(str(me)) == me
        reused = Owner(me.boot_id, me.pid_namespace, me.pid, me.start_ticks - 1)
        assert reused.alive() is False
    finally:
        process.kill()
        process.wait()


def test_a_zombie_does_not_own_anything():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = current_owner()
    ticks = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    child = Owner(me.boot_id, me.pid_namespace, process.pid, ticks)
    assert child.alive() is True
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not waited for
    assert child.alive() is False
    process.communicate()


def test_only_what_is_surely_nobodys_is_abandoned():
    mine = labels("run", "agent")
    now = time.time()
    assert abandoned(mine, now) is None
    me = current_owner()
    gone = labels("run", "agent", owner=Owner(me.boot_id, me.pid_namespace, 2**30, 1))
    assert "is gone" in (abandoned(gone, now) or "")
    elsewhere = labels("run", "agent", owner=Owner("other", "1", 5, 5))
    assert abandoned(elsewhere, now) is None
    assert "life" in (abandoned(elsewhere, now + 10 * 3600) or "")
    assert abandoned({"agentrl.owner": "nonsense"}, now) is None
    assert Owner.parse("a/b/-1/c") is None


@pytest.mark.parametrize(
    "host", ["pigeon://there", "tcp:2375", "tcp://there", "/var/run/docker.sock"]
)
def test_an_address_that_is_none_is_named(monkeypatch, host):
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(ConfigError, match="DOCKER_HOST"):
        connect()


def test_without_an_engine_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(EnvUnavailable, match=r"no Docker engine answers at .*none.sock.*dockerd"):
        connect()


def test_without_the_docker_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl-gym\[containers\]'"):
        connect()


@pytest.mark.docker
def test_what_the_engine_refuses_is_an_error_with_its_status(engine_is_there):
    with pytest.raises(EngineError, match="No such container") as caught:
        asyncio.run(Engine().call(lambda client: client.api.inspect_container("no-such-thing")))
    assert caught.value.engine_status == 404


@pytest.mark.docker
def test_what_a_cancelled_caller_asked_for_is_undone(engine_is_there):
    go_on, undone = threading.Event(), threading.Event()

    async def play():
        engine = Engine()
        call = engine.call(lambda client: go_on.wait(20), undo=lambda client, made: undone.set())
        calling = asyncio.create_task(call)
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        assert not undone.is_set()
        go_on.set()
        await engine.settle()
        assert undone.is_set()

    asyncio.run(play())
