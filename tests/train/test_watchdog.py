import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from agentrl.model import watchdog
from agentrl.model.watchdog import Standing, verdict

WAITS = Standing("a, process 1", "learn: torch/distributed/x.py:1 in wait", True)
WORKS = Standing("b, process 2", "learn: agentrl/train/loop.py:7 in f", False)


@pytest.mark.parametrize(
    ("standings", "said"),
    [
        ({0: WAITS, 2: WAITS}, "rank 1 of 3 does not answer"),
        ({0: WAITS, 1: WORKS, 2: WAITS}, "wait for rank 1 (b, process 2; learn: agentrl/train/"),
        ({0: WAITS, 1: WAITS, 2: WAITS}, "all ranks wait for each other"),
    ],
    ids=["stopped", "at work", "out of step"],
)
def test_the_verdict_names_whom_the_others_wait_for(standings, said):
    message = verdict("learn", 30, 3, standings)
    assert said in message
    assert "30 s during learn (train.parallel.deadline_s)" in message


HANGS = """
import sys, time
from torch.distributed import HashStore
from agentrl.model import watchdog

def never_returns():
    time.sleep(600)

watchdog.CLOSE_S = 0.5
dog = watchdog.Watchdog(HashStore(), 0, 2, 1800.0)
if sys.argv[1] == "at its end":
    sys.hang = type("Hang", (), {"__del__": lambda _: never_returns()})()
    dog.broke()
    dog.closed()
else:
    dog.broke()
    never_returns()
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["as it closes", "at its end"])
def test_a_rank_whose_connection_broke_ends_whatever_it_waits_for(when):
    rank = subprocess.run(
        [sys.executable, "-c", HANGS, when], capture_output=True, text=True, timeout=120
    )
    assert rank.returncode == 1
    assert ("in never_returns" in rank.stderr) == (when == "as it closes")


def test_a_rank_that_writes_a_trace_is_not_called_lost():
    store = HashStore()
    dogs = [watchdog.Watchdog(store, rank, 2, 1800.0) for rank in range(2)]
    for each in dogs:
        each.close()  # and look by hand
    store.delete_key("closed/1")
    watching, watched = dogs

    def is_silent_after(seconds: float) -> bool:
        watching._silent_s = seconds
        return watching._next_is_silent()

    is_silent_after(0)
    assert is_silent_after(2 * watchdog.SILENT_S)
    with watched.silent():
        assert not is_silent_after(2 * watchdog.SILENT_S)
    assert not watching._next_is_silent(), "counts anew"
    assert is_silent_after(2 * watchdog.SILENT_S)


WAITS_FOR_EVER = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from agentrl.model import watchdog

watchdog.SILENT_S, watchdog.LOOK_S, watchdog.ANSWER_S = 3.0, 0.1, 1.0
rank, port = int(sys.argv[1]), int(sys.argv[2])
dog = watchdog.Watchdog(TCPStore("127.0.0.1", port), rank, 3, 1800.0)
print("watches", flush=True)
with dog.working("learn"):
    sys.stdin.readline()  # as a collective of NCCL: nothing breaks when another rank is gone
dog.close()
time.sleep(600)
"""


@pytest.fixture
def three_ranks():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WAITS_FOR_EVER, str(rank), str(store.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    for each in started:
        assert each.stdout is not None and each.stdout.readline() == "watches\n"
    yield store, started
    for each in started:
        each.kill()
        each.communicate()


@pytest.mark.slow
def test_a_stopped_rank_is_named_though_no_connection_breaks(three_ranks):
    _, started = three_ranks
    started[1].send_signal(signal.SIGSTOP)
    for rank in (0, 2):
        started[rank].wait(60)  # `communicate` would close what it reads from
    said = [started[rank].stderr.read() for rank in (0, 2)]
    errors = [line for each in said for line in each.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert "rank 1 (" in errors[0] and "of 3 gave no sign of life for 3 s" in errors[0]
    assert started[0].returncode == started[2].returncode == 1


@pytest.mark.slow
def test_a_rank_that_closed_is_not_called_lost(three_ranks):
    store, started = three_ranks
    started[1].stdin.write("\n")
    started[1].stdin.flush()
    store.wait(["closed/1"], timedelta(seconds=60))
    beats = store.add("beat/0", 0)
    deadline = time.monotonic() + 60
    while store.add("beat/0", 0) < beats + 60:  # twice as many looks as make a rank silent
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert [each.poll() for each in started] == [None, None, None]
