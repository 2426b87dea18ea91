"""No container outlives who made it.

Three things see to that, because any process may be killed at any time:

1. An agent's container ends by itself when its maker's connection to the engine closes
   (`agentrl.env.container.pool`), within about a second.
2. Each process that makes containers starts one *watchdog*, `python -m agentrl_swebench.leases`,
   in a session of its own. Every half minute it removes containers whose owner is gone; when its
   own process is gone it does so at once, and ends when none is left.
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
from typing import TYPE_CHECKING

from agentrl.env.container.engine import (
    OWNER_LABEL,
    ROLE_LABEL,
    RUN_LABEL,
    Owner,
    abandoned,
    current_owner,
)
from agentrl.errors import AgentRLError
from agentrl_swebench.engine import connect

if TYPE_CHECKING:
    import docker

POLL_S = 1.0
REAP_EVERY_S = 30.0
_LAST_REAPS_S = 45.0
"""How long a watchdog looks after its owner's end: a worker may be ending, an engine starting."""

_started = threading.Lock()
_watchdog: subprocess.Popen | None = None
_watched: Owner | None = None


def reap(client: docker.DockerClient | None = None, *, everything: bool = False) -> list[str]:
    """Remove abandoned containers; a line about each.

    Args:
        everything: also those whose owner lives or cannot be seen.

    Raises:
        EnvUnavailable: there is no engine.
    """
    from docker.errors import APIError, NotFound

    client = client or connect()
    removed = []
    for summary in client.api.containers(all=True, filters={"label": OWNER_LABEL}):
        its_labels: dict[str, str] = summary["Labels"]
        reason = "asked for" if everything else abandoned(its_labels, time.time())
        if reason is None:
            continue
        try:
            client.api.remove_container(summary["Id"], force=True, v=True)
        except NotFound:
            continue
        except APIError as error:
            if error.status_code == 409:  # the engine is removing it
                continue
            raise
        removed.append(
            f"{summary['Id'][:12]} {its_labels.get(ROLE_LABEL, '?')} "
            f"{its_labels.get(RUN_LABEL, '?')}: {reason}"
        )
    return removed


def start_watchdog() -> None:
    """Have containers removed when this process is gone. Once per process; a fork has its own."""
    global _watchdog, _watched
    with _started:
        owner = current_owner()
        if _watched == owner and _watchdog is not None and _watchdog.poll() is None:
            return
        _watchdog = subprocess.Popen(
            [sys.executable, "-m", "agentrl_swebench.leases", str(owner)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _watched = owner


def watch(owner: Owner) -> None:
    """What the watchdog does."""
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
    from docker.errors import DockerException

    with contextlib.suppress(AgentRLError, DockerException, OSError):
        reap()


def main(arguments: list[str]) -> int:
    owner = Owner.parse(arguments[0]) if len(arguments) == 1 else None
    if owner is None:
        print("usage: python -m agentrl_swebench.leases OWNER", file=sys.stderr)
        return 2
    watch(owner)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
