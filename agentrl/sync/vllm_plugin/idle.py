"""vLLM's processes on a CPU wait for each other asleep instead of spinning."""

from __future__ import annotations

import functools

SPIN_S = 0.001
"""The time that a process on a CPU spins for its next message before it sleeps."""

RECHECK_MS = 20
"""The longest that it sleeps before it looks for a message that it was not woken for."""


def sleep_when_idle() -> None:
    """Have vLLM's processes on a CPU wait for each other asleep instead of spinning.

    After every message they look for the next one for a whole second, which between the turns of
    slow environments keeps a core busy that computes the model, or the trainer's gradient.

    Who sleeps is woken over a socket, and misses a call now and then. vLLM has sleepers look for
    themselves every 5 s; for a reply of a fifth of a second that is too long.
    """
    try:
        from vllm.distributed.device_communicators import (  # pyright: ignore[reportMissingImports]
            shm_broadcast,
        )
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        SpinCondition = shm_broadcast.SpinCondition
    except (ImportError, AttributeError):
        return  # another version of vLLM: it computes the same, and spins
    if not hasattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS"):
        return  # one whose sleepers never look for themselves
    if not current_platform.is_cpu() or hasattr(SpinCondition.__init__, "__wrapped__"):
        return
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
    make = SpinCondition.__init__

    @functools.wraps(make)
    def impatient(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, SPIN_S)

    SpinCondition.__init__ = impatient
