"""Identifies the caller on whose behalf code runs, so that queues are fair."""

from __future__ import annotations

from contextvars import ContextVar

caller: ContextVar[str] = ContextVar("agentrl_caller", default="")
"""The client whose session an environment's code runs for, as an environment server knows it: a
client names itself before the first slash of its idempotency keys. Queues that sessions share, such
as that of graders, take callers in turns."""
