"""Removes containers whose owner is gone.

Any process may be killed at any time, so three mechanisms work together:

1. An episode's container ends by itself about a second after its owner's connection to the engine
   closes (`container.py`), unless it was created but not started yet.
2. Each process that makes containers starts one *watchdog*, which is this module as a program, in
   its own session. It removes containers whose owner is gone every half minute, and again for
   `_LAST_REAPS_S` after its own owner has ended; then it ends too.
3. `guard` at the start of a program, and `agentrl swebench reap`, remove what earlier programs
   left.

Only containers with agentrl's owner label are removed, and only if their owner is known to be gone
or their lifetime is over.
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
"""Seconds between two looks at the owner."""
REAP_EVERY_S = 30.0
"""Seconds between two removals while the owner is alive."""
_LAST_REAPS_S = 45.0
"""Seconds that a watchdog goes on after its owner's end: a child process may still be ending, or
the engine may be restarting."""

_started = threading.Lock()
_watchdog: subprocess.Popen | None = None
_watched: Owner | None = None


def guard(timeout_s: float | None = None) -> None:
    """Removes abandoned containers, and starts the watchdog of this process.

    Args:
        timeout_s: seconds in which the engine must answer each call; None: the default.

    Raises:
        ConfigError: the `docker` package is missing or DOCKER_HOST is malformed.
        EnvUnavailable: no engine answers.
    """
    client = connect() if timeout_s is None else connect(timeout_s)
    try:
        reap(client)
    finally:
        client.close()
    start_watchdog()


def start_watchdog() -> None:
    """Starts the watchdog of this process unless it is running; a forked process gets its own."""
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
    """Removes abandoned containers while the owner is alive and for a while after its end."""
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
    """Removes abandoned containers; errors are ignored, since the engine may answer next time."""
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
