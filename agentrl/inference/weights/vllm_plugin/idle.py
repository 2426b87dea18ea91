"""Makes vLLM's processes on a CPU sleep instead of spin while they wait for each other."""

from __future__ import annotations

import functools

SPIN_S = 0.001
"""Seconds that a process spins for its next message before it sleeps."""

RECHECK_MS = 20
"""Milliseconds after which a sleeping process checks for a message in case it missed a wake-up."""


def sleep_when_idle() -> None:
    """Shortens the second for which processes spin after every message. Between the turns of slow
    environments, it takes a core away from the model, or from the trainer's gradient.

    A sleeping process is woken over a socket and occasionally misses the wake-up. vLLM rechecks
    every 5 s, which is too long when a reply takes a fifth of a second.
    """
    try:
        from vllm.distributed.device_communicators import (  # pyright: ignore[reportMissingImports]
            shm_broadcast,
        )
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        SpinCondition = shm_broadcast.SpinCondition
    except (ImportError, AttributeError):
        return  # another version of vLLM, which works as well but spins
    if not hasattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS"):
        return  # a version whose sleeping processes never recheck
    if not current_platform.is_cpu() or hasattr(SpinCondition.__init__, "__wrapped__"):
        return
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
    make = SpinCondition.__init__

    @functools.wraps(make)
    def impatient(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, SPIN_S)

    SpinCondition.__init__ = impatient
