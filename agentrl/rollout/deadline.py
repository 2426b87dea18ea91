"""A deadline that moves often, as an episode's does: with every stage."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Deadline:
    """Ends the block it stands around with TimeoutError, as `asyncio.timeout` does.

    Moving it further away is nearly free: the alarm that stands is left standing, and set again
    for the deadline of the day when it goes off. `asyncio.timeout` makes and cancels a timer each
    time; it is left with what it does best, telling its own cancellation from another's.
    """

    def __init__(self) -> None:
        self._timeout = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._when = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Deadline:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if self._alarm is not None:
            self._alarm.cancel()
        return await self._timeout.__aexit__(kind, error, trace)

    def move(self, when: float) -> None:
        """Set the deadline, on the event loop's clock."""
        self._when = when
        if self._alarm is None:
            self._timeout.reschedule(None)  # it went off, but the block was quicker
        elif self._alarm.when() <= when:
            return
        else:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(when, self._on_alarm)

    def _on_alarm(self) -> None:
        if self._when > self._loop.time():
            self._alarm = self._loop.call_at(self._when, self._on_alarm)
        else:
            self._alarm = None
            self._timeout.reschedule(self._when)
