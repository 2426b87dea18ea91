import subprocess
import sys

import pytest

from agentrl.train.watchdog import Standing, verdict

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
from agentrl.train import watchdog

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
