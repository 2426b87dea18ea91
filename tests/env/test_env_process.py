"""Sessions in processes of their own, against real processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvloop

from agentrl.env import registry
from agentrl.env.episode import tools_before_reset
from agentrl.env.protocol import CreateRequest, StepRequest, TaskSpec
from agentrl.env.sessions.manager import SessionManager
from agentrl.env.sessions.process import ProcessHost
from agentrl.env.sessions.runner import LocalRunner
from agentrl.errors import ConfigError, EnvError
from agentrl.types import Action, Task, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from manager_calls import until
from process_envs import Unlocking, Unruly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process isolation needs Linux")


def call(tool, **arguments):
    return Action(tool_calls=(ToolCall("call", tool, arguments),))


async def content(runner, tool, **arguments):
    result = await runner.turn(call(tool, **arguments), last=False)
    return result.observation[0]["content"]


def descendants(pid):
    """Processes below one, as far as `/proc` tells."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, front = set(), {pid}
    while front:
        front = {child for child, parent in parents.items() if parent in front} - found
        found |= front
    return found


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def eventually(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def play(scenario, environment=Unruly, config=None, loop_factory=None):
    """Run `scenario(host)` with a host, and check that nothing of it is left."""

    async def main():
        host = ProcessHost(environment, config)
        try:
            return await scenario(host)
        finally:
            await host.aclose()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.sleep(0))  # uvloop keeps two descriptors of its first loop
    before = set(os.listdir("/proc/self/fd"))
    below = descendants(os.getpid())
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        outcome = runner.run(main())
    assert descendants(os.getpid()) <= below
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    return outcome


async def started(host, index=0, seed=0):
    (task,) = await host.get("train", [index])
    runner = await host.runner()
    await runner.start(task, seed)
    return runner


def test_load_tells_splits_and_tools_and_get_gives_tasks():
    async def scenario(host):
        splits, tools = await host.load()
        assert splits == {"train": None, "test": 3}
        assert tools == tools_before_reset(Unruly())
        tasks = await host.get("train", [3, 4])
        assert tasks == [Unruly().get("train", 3), Unruly().get("train", 4)]

    play(scenario)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_sessions_are_forks_of_what_was_loaded(loop):
    async def scenario(host):
        assert type(asyncio.get_running_loop()).__module__.startswith(loop)
        runners = [await started(host) for _ in range(3)]
        found = [json.loads(await content(runner, "where")) for runner in runners]
        assert len({each["pid"] for each in found}) == 3
        assert len({each["loaded_by"] for each in found} - {os.getpid()}) == 1
        assert len({each["descriptors"] for each in found}) == 1  # none of the others'
        for each in found:
            assert each["threads"] == 2  # its loop and the one that runs the tool
            assert each["token"] == 0

    os.environ["AGENTRL_ENV_TOKEN"] = "secret"
    try:
        play(scenario, loop_factory=uvloop.new_event_loop if loop == "uvloop" else None)
    finally:
        del os.environ["AGENTRL_ENV_TOKEN"]


def test_episodes_are_bit_identical_to_threads():
    actions = [
        call("add", number=2),
        call("add_in_thread", number=3),
        call("fail", message="for the secret reason"),
        call("nonsense"),
        call("add", number="x"),
        Action("just text"),
        Action(parse_error="no closing brace"),
        call("submit", value=0.1 + 0.2),
    ]

    async def episode(runner, task, seed):
        first = await runner.start(task, seed)
        results = [await runner.turn(action, last=False) for action in actions]
        await runner.close()
        return first, results

    async def scenario(host):
        for seed in range(5):
            (task,) = await host.get("train", [seed])
            ours = await episode(await host.runner(), task, seed)
            assert ours == await episode(LocalRunner(Unruly()), task, seed)

    play(scenario)


def test_an_error_of_the_environment_keeps_its_class_and_code():
    async def scenario(host):
        runner = await started(host)
        with pytest.raises(EnvError, match=r"'unruly' raised RuntimeError: no such task") as raised:
            await host.get("train", [666])
        assert raised.value.code == "env_error"
        assert "caf" in await content(runner, "fail", message="café")

    play(scenario)


@pytest.mark.parametrize(
    "how, code, match",
    [
        ("data", "invalid_request", "rows.jsonl, line 3"),
        ("bug", "env_error", "'unruly' raised ValueError: a bug"),
        pytest.param("segfault", "env_error", "died of SIGSEGV", marks=pytest.mark.slow),
        ("thread", "invalid_request", "left threads running .stray."),
    ],
)
def test_loading_that_fails_says_why(how, code, match):
    async def scenario(host):
        for _ in range(2):  # each call tries again
            with pytest.raises(EnvError, match=match) as raised:
                await host.load()
            assert raised.value.code == code

    play(scenario, config={"fail_loading": how})


def test_loading_that_hangs_is_killed():
    async def scenario(host):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(host.load(), 1.5)

    began = time.monotonic()
    play(scenario, config={"fail_loading": "hang"})
    assert time.monotonic() - began < 10


def test_a_hanging_get_is_killed_and_the_next_one_answered():
    async def scenario(host):
        await host.load()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(host.get("train", [667]), 0.5)
        assert (await host.get("train", [1]))[0].id == "train/1"

    play(scenario)


@pytest.mark.parametrize("tool", ["hang", "hang_in_c"])
def test_kill_ends_a_hanging_turn_at_once(tool):
    async def scenario(host):
        runner, other = await started(host), await started(host)
        pid = json.loads(await content(runner, "where"))["pid"]
        turn = asyncio.ensure_future(content(runner, tool))
        await asyncio.sleep(0.2)
        assert not turn.done()
        began = time.monotonic()
        runner.kill()
        with pytest.raises(EnvError, match="was killed"):
            await turn
        while alive(pid):
            assert time.monotonic() - began < 2
            await asyncio.sleep(0.005)
        await runner.close()  # nothing is left to close
        assert '"count":1' in await content(other, "add")

    play(scenario)


@pytest.mark.parametrize(
    "tool, arguments, match",
    [
        ("exit", {"status": 7}, "ended with exit status 7"),
        ("segfault", {}, "died of SIGSEGV"),
    ],
)
def test_a_process_that_ends_by_itself_is_the_error_of_its_session_alone(tool, arguments, match):
    async def scenario(host):
        runner, other = await started(host), await started(host)
        with pytest.raises(EnvError, match=match) as raised:
            await content(runner, tool, **arguments)
        assert raised.value.code == "env_error" and not raised.value.retryable
        with pytest.raises(EnvError, match=match):
            await content(runner, "add")
        assert '"count":1' in await content(other, "add")

    play(scenario)


def test_memory_is_limited():
    async def scenario(host):
        runner = await started(host)
        assert "MemoryError" in await content(runner, "eat_memory")
        assert '"count":1' in await content(runner, "add")

    play(scenario)


@pytest.mark.parametrize("how", ["close", "kill", "hang"])
def test_grandchildren_end_with_their_session_even_as_daemons(how, tmp_path):
    file = tmp_path / "pids"

    async def scenario(host):
        runner, other = await host.runner(), await started(host)
        await runner.start(Task("t", str(file)), 0)
        turn = asyncio.ensure_future(content(runner, "start_children", hang=how == "hang"))
        while not file.exists() or len(file.read_text().split()) < 3:
            await asyncio.sleep(0.02)
        pids = [int(pid) for pid in file.read_text().split()]
        assert all(map(alive, pids))
        if how == "close":
            await turn
            await runner.close()
        else:
            runner.kill()
            await asyncio.wait({turn})
            turn.exception()
        deadline = time.monotonic() + 3
        while any(map(alive, pids)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert '"count":1' in await content(other, "add")

    play(scenario)


def test_close_runs_the_authors_close_and_aclose_close_shared(tmp_path, monkeypatch):
    monkeypatch.setenv("UNRULY_CLOSED", str(tmp_path / "closed"))

    async def scenario(host):
        runner, killed = await started(host), await started(host)
        await runner.close()
        killed.kill()

    play(scenario, config={"closed_file": str(tmp_path / "closed")})
    assert (tmp_path / "closed").read_text() == "session\nshared\n"


def test_close_shared_that_hangs_is_killed():
    async def scenario(host):
        await host.load()
        with pytest.raises(EnvError, match=r"close_shared\(\) of 'unruly' ran out of time"):
            await host.aclose(0.2)

    play(scenario, config={"hang_closing": True})


def test_tools_follow_the_task_and_the_turn():
    async def scenario(host):
        def names(runner):
            return [each["function"]["name"] for each in runner.tools]

        _, tools = await host.load()
        assert len(tools) == 3  # without a task, all
        runner, other = await host.runner(), await host.runner()
        await runner.start(Task("t", "push"), 0)
        await other.start(Task("t", "pull"), 0)
        assert names(runner) == ["push"] and names(other) == ["pull"]
        assert await content(runner, "push") == "it opens"
        assert names(runner) == ["push", "leave"] and names(other) == ["pull"]
        assert await content(runner, "leave") == "outside"
        assert names(runner) == ["push", "leave"]

    play(scenario, Unlocking)


MINE = """
import asyncio
from agentrl.env import Environment, Task
from agentrl.env.sessions.process import ProcessHost
from agentrl.types import Action

class Mine(Environment):
    isolation = "process"

    def on_text(self, text):
        return text[::-1]

async def play(host):
    runner = await host.runner()
    await runner.start(Task("t", "go"), 0)
    result = await runner.turn(Action("abc"), last=False)
    print(result.observation[0]["content"])

async def main():
    host = ProcessHost(Mine)
    await play(host)
    await host.aclose()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_class_of_a_file_is_loaded_from_it(tmp_path, capsys):
    file = tmp_path / "env.py"
    file.write_text(MINE)
    mine = registry.resolve(f"{file}:Mine")
    play(sys.modules[mine.__module__].play, mine)
    assert capsys.readouterr().out == "cba\n"
    # and where the file is the program
    assert subprocess.check_output([sys.executable, file], text=True) == "cba\n"


@pytest.mark.parametrize("killed", ["host", "guard"])
def test_a_killed_host_loses_its_sessions_and_all_below_and_is_started_again(killed, tmp_path):
    async def scenario(host):
        runner = await host.runner()
        await runner.start(Task("t", str(tmp_path / "pids")), 0)
        where = json.loads(await content(runner, "where"))
        await content(runner, "start_children")
        below = descendants(where["loaded_by"])
        assert len(below) == 5  # get()'s process, the session's, and three below that
        os.kill(where["loaded_by"] if killed == "host" else host._process.pid, signal.SIGKILL)
        await host._process.wait()
        again = await started(host)
        assert json.loads(await content(again, "where"))["loaded_by"] != where["loaded_by"]
        await asyncio.to_thread(
            eventually, lambda: not any(map(alive, {*below, where["loaded_by"]}))
        )
        with pytest.raises(EnvError) as err:
            while True:
                await content(runner, "add")
        if killed == "host":
            assert "host process died of SIGKILL" in str(err.value)
            assert err.value.code == "session_lost"

    play(scenario)


SERVER = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from agentrl.env.sessions.process import ProcessHost
from agentrl.types import Action, Task, ToolCall
from process_envs import Unruly

async def main():
    host = ProcessHost(Unruly)
    hanging, daemons, idle = [await host.runner() for _ in range(3)]
    for runner in (hanging, daemons, idle):
        await runner.start(Task("t", {file!r}), 0)
    await daemons.turn(Action(tool_calls=(ToolCall("c", "start_children", {{}}),)), last=False)
    asyncio.ensure_future(
        hanging.turn(Action(tool_calls=(ToolCall("c", "hang_in_c", {{}}),)), last=False)
    )
    await asyncio.sleep(0.3)
    print("ready", flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@pytest.mark.parametrize("is_loading", [False, True])
def test_the_servers_sigkill_ends_everything_below_it(is_loading, tmp_path):
    loading = tmp_path / "loading"
    script = SERVER.format(folder=str(Path(__file__).parent), file=str(tmp_path / "pids"))
    if is_loading:
        config = {"fail_loading": "hang", "loading_file": str(loading)}
        script = script.replace("ProcessHost(Unruly)", f"ProcessHost(Unruly, {config!r})")
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    if is_loading:
        eventually(loading.exists)
    else:
        assert server.stdout.readline() == "ready\n"
    below = descendants(server.pid)
    assert len(below) == (2 if is_loading else 9)  # guard, host, get()'s, 3 sessions and 3 below
    # A Ctrl-C in the terminal goes to the server's process group alone.
    assert os.getpgid(server.pid) not in map(os.getpgid, below)
    server.kill()
    server.wait()
    server.stdout.close()
    eventually(lambda: not any(map(alive, below)))


@pytest.mark.slow
def test_many_episodes_leave_no_process_no_descriptor_and_no_thread():
    async def one(host, index):
        runner = await host.runner()
        await runner.start(Task("t", "hello"), index)
        await content(runner, "add_in_thread")
        if index % 10 == 0:
            hanging = asyncio.ensure_future(content(runner, "hang_in_c"))
            await asyncio.sleep(0.01)
            runner.kill()
            await asyncio.wait({hanging})
            hanging.exception()
        else:
            await runner.close()

    def left(host):
        guard = host._process.pid
        (below_guard,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        return (
            descendants(os.getpid()),
            threading.active_count(),
            *(len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), below_guard)),
        )

    async def scenario(host):
        await host.get("train", [1])
        before = left(host)
        for start in range(0, 48, 16):
            await asyncio.gather(*(one(host, index) for index in range(start, start + 16)))
        await asyncio.to_thread(eventually, lambda: len(left(host)[0]) == len(before[0]))
        await asyncio.sleep(0)
        now = left(host)
        assert now[0] == before[0] and now[1] <= before[1] + 1  # that of to_thread
        assert now[2:] == before[2:]

    play(scenario)


def test_deadlines_of_a_session_manager_kill_and_leave_nothing():
    """Steps that never return, in C code and with children below them."""

    async def main():
        manager = SessionManager(lambda _: Unruly)
        before = descendants(os.getpid())

        async def one(index):
            task = TaskSpec(inline=Task("t", str(index)))
            opened = await manager.create(CreateRequest("unruly", task, seed=index))
            session = opened.sessions[0].id
            if index % 5 == 0:
                with pytest.raises(EnvError) as raised:
                    await manager.step(session, StepRequest(0, call("hang_in_c"), timeout_s=0.5))
                assert raised.value.code == "step_timeout"
            else:
                assert b"1 " in await manager.step(session, StepRequest(0, call("add_in_thread")))
            manager.delete(session)

        await asyncio.gather(*(one(index) for index in range(20)))
        # The host and the process that answers get().
        await until(lambda: not manager.num_live and len(descendants(os.getpid()) - before) == 3)
        assert manager.workers.num_abandoned == 0
        await manager.aclose()
        assert descendants(os.getpid()) <= before

    asyncio.run(main())


def test_a_crash_is_the_error_of_its_step_in_a_session_manager():
    async def main():
        manager = SessionManager(lambda _: Unruly)
        task = TaskSpec(split="train", index=3)
        opened = await manager.create(CreateRequest("unruly", task, count=2))
        crashing, other = [each.id for each in opened.sessions]
        with pytest.raises(EnvError, match="died of SIGSEGV") as raised:
            await manager.step(crashing, StepRequest(0, call("segfault")))
        assert (raised.value.code, raised.value.retryable) == ("env_error", False)
        assert b"count" in await manager.step(other, StepRequest(0, call("add")))
        await manager.aclose()

    asyncio.run(main())


def test_a_class_that_cannot_be_imported_is_refused():
    class Inner(Unruly):
        pass

    with pytest.raises(ConfigError, match="inside a function"):
        ProcessHost(Inner)
