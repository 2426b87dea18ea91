"""The client of the Docker engine without an engine, and to whom containers belong."""

import asyncio
import os
import subprocess
import sys
import threading
import time

import pytest

from agentrl.env.container.engine import (
    Engine,
    EngineError,
    abandoned,
    connect,
    current_owner,
    labels,
    owner_name,
)
from agentrl.errors import ConfigError, EnvUnavailable


def why_abandoned(owner, *, later_s=0.0):
    return abandoned(labels("run", "agent", owner=owner), time.time() + later_s) or ""


def test_an_owner_is_alive_until_it_ends_and_never_again():
    me = current_owner()
    assert why_abandoned(me) == ""
    code = "from agentrl.env.container.engine import current_owner; print(current_owner())"
    child = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    assert child.rpartition("/")[0] != me.rpartition("/")[0]
    assert "is gone" in why_abandoned(child)
    place, _, ticks = me.rpartition("/")
    assert "is gone" in why_abandoned(f"{place}/{int(ticks) - 1}")  # the id was used again


def test_a_zombie_does_not_own_anything():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = owner_name(process.pid)
    assert why_abandoned(child) == ""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not waited for
    assert "is gone" in why_abandoned(child)
    process.communicate()


def test_only_what_is_surely_nobodys_is_abandoned():
    for elsewhere in ("other/1/5/5", "nonsense", "a/b/-1/c"):
        assert why_abandoned(elsewhere) == ""
        assert "life" in why_abandoned(elsewhere, later_s=10 * 3600)
    assert abandoned({"agentrl.owner": "nonsense"}, time.time()) is None


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
async def test_what_a_cancelled_caller_asked_for_is_undone(engine_is_there):
    go_on, undone = threading.Event(), threading.Event()
    call = Engine().call(lambda client: go_on.wait(20), undo=lambda client, made: undone.set())
    calling = asyncio.create_task(call)
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    assert not undone.is_set()
    go_on.set()
    assert await asyncio.to_thread(undone.wait, 30)
