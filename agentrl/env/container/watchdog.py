"""No container outlives who made it.

Three things see to that, because any process may be killed at any time:

1. An agent's container ends by itself when its maker's connection to the engine closes
   (`container.py`), within about a second; one that was made and not yet started does not.
2. Each process that makes containers starts one *watchdog*, this module as a program, in a session
   of its own. Every half minute it removes containers whose owner is gone; when its own process is
   gone it does so at once, and ends when none is left.
3. A start removes what earlier ones left, and so does `agentrl swebench reap`.

Only containers with our owner's label are ever removed, and only when the owner is known to be
gone, or cannot be seen from here and the container is past its maximal life.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time

from agentrl.env.container.engine import Owner, connect, current_owner, reap
from agentrl.errors import AgentRLError

POLL_S = 1.0
REAP_EVERY_S = 30.0
_LAST_REAPS_S = 45.0
"""How long a watchdog looks after its owner's end: a worker may be ending, an engine starting."""

_started = threading.Lock()
_watchdog: subprocess.Popen | None = None
_watched: Owner | None = None


def guard(timeout_s: float | None = None) -> None:
    """Remove what earlier processes left, and have this one's containers removed after it.

    Raises:
        ConfigError: a package or the engine's address is missing or wrong.
        EnvUnavailable: no engine answers.
    """
    client = connect() if timeout_s is None else connect(timeout_s)
    try:
        reap(client)
    finally:
        client.close()
    start_watchdog()


def start_watchdog() -> None:
    """Have containers removed when this process is gone. Once per process; a fork has its own."""
    global _watchdog, _watched
    with _started:
        owner = current_owner()
        if _watched == owner and _watchdog is not None and _watchdog.poll() is None:
            return
        _watchdog = subprocess.Popen(
            [sys.executable, "-m", "agentrl.env.container.watchdog", str(owner)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _watched = owner


def watch(owner: Owner) -> None:
    """Runs the watchdog: waits for the owner's end, and reaps what it left meanwhile and then."""
    last_reap = time.monotonic()
    while owner.alive():
        time.sleep(POLL_S)
        if time.monotonic() - last_reap > REAP_EVERY_S:
            last_reap = time.monotonic()
            _try_reap()
    until = time.monotonic() + _LAST_REAPS_S
    while time.monotonic() < until:
        _try_reap()
        time.sleep(3 * POLL_S)


def _try_reap() -> None:
    """An engine that is away now may be back in the next round."""
    with contextlib.suppress(AgentRLError):
        reap(connect())


def main(arguments: list[str]) -> int:
    owner = Owner.parse(arguments[0]) if len(arguments) == 1 else None
    if owner is None:
        print("usage: python -m agentrl.env.container.watchdog OWNER", file=sys.stderr)
        return 2
    watch(owner)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
