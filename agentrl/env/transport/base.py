"""The ways from a client to a session manager: what each can do, and the one in this process.

`websocket` and `http` are the ways to a server. A way has no retries of its own
but one: where no answer came for a while, it asks again, because an answer may have been lost and
asking twice is the same as asking once. What failed on the way is `EnvUnavailable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agentrl.env import protocol
from agentrl.env.protocol import (
    CreateReply,
    CreateRequest,
    EnvInfo,
    ResetRequest,
    SessionReply,
    SnapshotReply,
    SnapshotRequest,
    StepReply,
    StepRequest,
    TaskPreview,
)
from agentrl.env.session.manager import SessionManager
from agentrl.errors import EnvUnavailable
from agentrl.types import JSON

CONNECT_S = 5.0
"""How long a connection may take to open."""
PATIENCE_S = 10.0
"""No answer for so long: the call is sent again, then after twice as long, and so on."""
MAX_PATIENCE_S = 60.0


class ConnectionLost(EnvUnavailable):
    """A connection on which the server had answered is gone; the server need not be."""


class Transport(Protocol):
    """Every call ends within `timeout_s`. Repeating one with the same step or key is safe."""

    deletes_at_once: bool
    """`delete` does not wait for anything, so that nothing can interrupt it."""

    async def info(self, env_id: str, config: Mapping[str, JSON], timeout_s: float) -> EnvInfo: ...
    async def tasks(
        self,
        env_id: str,
        split: str,
        start: int,
        stop: int,
        config: Mapping[str, JSON],
        timeout_s: float,
    ) -> list[TaskPreview]: ...
    async def create(self, request: CreateRequest, key: str, timeout_s: float) -> CreateReply: ...
    async def step(self, session_id: str, request: StepRequest, timeout_s: float) -> StepReply: ...
    async def reset(
        self, session_id: str, request: ResetRequest, timeout_s: float
    ) -> SessionReply: ...
    async def snapshot(
        self, session_id: str, request: SnapshotRequest, timeout_s: float
    ) -> SnapshotReply: ...
    async def renew(self, session_id: str, timeout_s: float) -> None: ...
    async def delete(self, session_id: str, timeout_s: float) -> None: ...
    async def aclose(self) -> None: ...


class InProcess:
    """A session manager of this process. Messages pass through JSON, so nothing is shared."""

    deletes_at_once = True

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager

    async def info(self, env_id: str, config: Mapping[str, JSON], timeout_s: float) -> EnvInfo:
        reply = protocol.encode(
            await self._manager.info(env_id, protocol.as_json(dict(config)), timeout_s)
        )
        return protocol.decode_reply(reply, EnvInfo)

    async def tasks(
        self,
        env_id: str,
        split: str,
        start: int,
        stop: int,
        config: Mapping[str, JSON],
        timeout_s: float,
    ) -> list[TaskPreview]:
        config = protocol.as_json(dict(config))
        previews = await self._manager.preview(env_id, split, start, stop, config)
        reply = protocol.encode(protocol.TaskList(split, previews))
        return protocol.decode_reply(reply, protocol.TaskList).tasks

    async def create(self, request: CreateRequest, key: str, timeout_s: float) -> CreateReply:
        request = protocol.decode_request(protocol.encode(request), CreateRequest)
        reply = protocol.encode(await self._manager.create(request, key))
        return protocol.decode_reply(reply, CreateReply)

    async def step(self, session_id: str, request: StepRequest, timeout_s: float) -> StepReply:
        request = protocol.decode_request(protocol.encode(request), StepRequest)
        return protocol.decode_reply(await self._manager.step(session_id, request), StepReply)

    async def reset(self, session_id: str, request: ResetRequest, timeout_s: float) -> SessionReply:
        request = protocol.decode_request(protocol.encode(request), ResetRequest)
        reply = protocol.encode(await self._manager.reset(session_id, request))
        return protocol.decode_reply(reply, SessionReply)

    async def snapshot(
        self, session_id: str, request: SnapshotRequest, timeout_s: float
    ) -> SnapshotReply:
        return await self._manager.snapshot(session_id, request)

    async def renew(self, session_id: str, timeout_s: float) -> None:
        self._manager.renew(session_id, None)

    async def delete(self, session_id: str, timeout_s: float) -> None:
        self._manager.delete(session_id)

    async def aclose(self) -> None:
        await self._manager.aclose()
