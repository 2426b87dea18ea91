"""Retries failed calls with growing, jittered pauses, until a deadline."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def retry(
    attempt: Callable[[float], Awaitable[T]],
    *,
    timeout_s: float = math.inf,
    retry_after_s: Callable[[Exception], float | None],
    first_pause_s: float = 0.05,
    max_pause_s: float = 2.0,
    max_attempts: int | None = None,
) -> T:
    """Calls `attempt` until it succeeds, its error is final, there were `max_attempts`, or the next
    pause would pass the deadline; then raises the last error.

    Args:
        attempt: called with the seconds that are left.
        retry_after_s: the least pause in seconds that an error asks for; None: it is final.
        first_pause_s: pauses double from this one up to `max_pause_s`, each within 25% of that.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    pause_s = first_pause_s
    num_attempts = 0
    while True:
        num_attempts += 1
        try:
            return await attempt(deadline - clock())
        except Exception as error:
            asked_s = retry_after_s(error)
            if asked_s is None or num_attempts == max_attempts:
                raise
            # Never less than was asked for.
            wait_s = max(asked_s * random.uniform(1.0, 1.25), pause_s * random.uniform(0.75, 1.25))
            if clock() + wait_s >= deadline:
                raise
        await asyncio.sleep(wait_s)
        pause_s = min(2 * pause_s, max_pause_s)
