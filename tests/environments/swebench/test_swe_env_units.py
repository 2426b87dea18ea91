"""The environment's parts that need no engine."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.env.container.engine import Owner, current_owner, engine_host, labels
from agentrl.errors import ConfigError, DataError, EnvUnavailable
from agentrl_swebench import leases, suspicion
from agentrl_swebench.engine import connect
from agentrl_swebench.env import SWEBenchEnvironment


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
    pid = os.fork()
    if pid == 0:
        time.sleep(0.3)
        os._exit(0)
    me = current_owner()
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    child = Owner(me.boot_id, me.pid_namespace, pid, ticks)
    assert child.alive() is True
    time.sleep(0.6)  # it has ended and nobody has waited for it
    assert child.alive() is False
    os.waitpid(pid, 0)


def test_only_what_is_surely_nobodys_is_abandoned():
    mine = labels("run", "agent")
    now = time.time()
    assert leases.abandoned(mine, now) is None
    me = current_owner()
    gone = labels("run", "agent", owner=Owner(me.boot_id, me.pid_namespace, 2**30, 1))
    assert "is gone" in (leases.abandoned(gone, now) or "")
    elsewhere = labels("run", "agent", owner=Owner("other", "1", 5, 5))
    assert leases.abandoned(elsewhere, now) is None
    assert "life" in (leases.abandoned(elsewhere, now + 10 * 3600) or "")
    assert leases.abandoned({"agentrl.owner": "nonsense"}, now) is None
    assert Owner.parse("a/b/-1/c") is None


@pytest.mark.parametrize("host", ["ssh://there", "unix://", "tcp:2375", "/var/run/docker.sock"])
def test_an_address_that_is_none_is_named(monkeypatch, host):
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(ConfigError, match="DOCKER_HOST"):
        engine_host()


def test_without_an_engine_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(EnvUnavailable, match=r"no Docker engine answers at .*none.sock.*dockerd"):
        connect()


@pytest.mark.parametrize(
    "command,flag",
    [
        ("git log --all --oneline", "git_history"),
        ("cd /testbed && git reflog", "git_history"),
        ("git fsck --unreachable", "git_history"),
        ("git show origin/main:spans/core.py", "git_history"),
        ("ls .git/objects/pack", "git_history"),
        ("pip download spans==2.0", "network"),
        ("pip install spans==2.0", "network"),
        ("curl -s https://github.com/x/y/pull/3.diff", "network"),
        ("git fetch", "network"),
        ("sed -i 's/1/2/' tests/test_spans.py", "test_edit"),
        ("echo 'def test_x(): pass' > tests/test_spans.py", "test_edit"),
        ("rm tests/test_spans.py", "test_edit"),
        ("cat > conftest.py <<'E'\nE", "test_runner"),
        ("echo 'import x' > /opt/testbed/lib/x.pth", "test_runner"),
        ("nohup python watch.py >/dev/null 2>&1", "daemon"),
        ("python watch.py &", "daemon"),
        ("find / -name eval.sh", "grader"),
        ("curl --unix-socket /var/run/docker.sock x", "grader"),
        ("kill -9 -1", "kill_all"),
    ],
)
def test_suspicious_commands_are_flagged(command, flag):
    assert flag in suspicion.command_flags(command)


@pytest.mark.parametrize(
    "command",
    [
        "git log --oneline | head",
        "git diff && git status --short",
        "git stash && git stash pop",
        "pytest -q tests/test_spans.py",
        "cat tests/test_spans.py | head -50",
        "python -m pip install -e . --no-deps --no-index",
        "pip install -e .",
        "sed -i 's/a/b/' spans/core.py && python -c 'import spans'",
        "grep -rn merge --include=*.py . 2>&1",
        "make && ls -la",
    ],
)
def test_ordinary_commands_are_not(command):
    assert suspicion.command_flags(command) == set()


def test_a_patch_of_tests_or_their_configuration_is_flagged():
    def patch(path):
        return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n"

    for path in ("tests/test_x.py", "conftest.py", "a/conftest.py", "setup.cfg", "lib/x.pth"):
        assert suspicion.patch_flags(patch(path)) == {"submits_tests"}, path
    for path in ("spans/core.py", "spans/latest.py", "docs/contest.py"):
        assert suspicion.patch_flags(patch(path)) == set(), path
    assert suspicion.patch_flags("--- a/tests/test_x.py\n+++ /dev/null\n") == {"submits_tests"}


def test_wrong_configuration_is_named():
    with pytest.raises(ConfigError, match="did you mean policy"):
        SWEBenchEnvironment({"polcy": "strict"})
    with pytest.raises(ConfigError, match="policy"):
        SWEBenchEnvironment({"policy": "lenient"})
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        SWEBenchEnvironment.load_shared(SWEBenchEnvironment.Config(source="nowhere.jsonl"))
