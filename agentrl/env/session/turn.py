"""A turn: a step or a reset of a session, and those who wait for its outcome."""

from __future__ import annotations

import asyncio

from msgspec import Struct

from agentrl.errors import EnvError


class Turn(Struct, eq=False):
    """What takes an index of a session. Made for every step, hence a Struct, which is cheap."""

    index: int
    body: bytes
    """What was asked for, to tell a repetition from a conflict."""
    previous: Turn | None
    """The turn before, while this one runs."""
    started: float
    """On the event loop's clock."""
    waiters: list[asyncio.Future[bytes]] = []
    """One for each caller that waits, so that a caller who goes away disturbs no other."""
    outcome: bytes | EnvError | None = None
    """The encoded reply, or why there is none; None while the turn runs."""
    task: asyncio.Task[None] | None = None
    deadline: float | None = None
    """Of a step, on the event loop's clock."""

    def waiter(self) -> asyncio.Future[bytes]:
        """A future of the outcome of a turn that runs."""
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        return waiter

    async def wait(self) -> bytes:
        """The reply, once there is one.

        Raises:
            EnvError: why there is none.
        """
        if self.outcome is None:
            return await self.waiter()
        if isinstance(self.outcome, EnvError):
            raise self.outcome
        return self.outcome

    def settle(self, outcome: bytes | EnvError) -> None:
        self.previous = None
        self.outcome = outcome
        for waiter in self.waiters:
            if waiter.done():  # its caller went away
                continue
            if isinstance(outcome, EnvError):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)
        self.waiters.clear()
