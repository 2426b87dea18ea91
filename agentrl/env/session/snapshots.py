"""Snapshots: states of episodes, kept by the server for a while, to fork sessions from."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from agentrl.env.protocol import SnapshotReply, make_error
from agentrl.env.session.sources import Source
from agentrl.types import Task

MAX_SNAPSHOTS = 4096
MAX_SNAPSHOT_BYTES = 256 * 2**20
"""Of all snapshots together."""


@dataclass(slots=True, eq=False)
class Snapshot:
    id: str
    source: Source
    task: Task
    seed: int
    step: int
    turns: int
    """Of the episode so far; `step` counts those of earlier ones too."""
    reward: float
    """Of the episode so far, `@reward` components included."""
    blob: bytes
    lease_s: float
    expires: float
    """On the event loop's clock."""


class Snapshots:
    """Bounded in number and bytes. A full store refuses: dropping another's would fail a fork."""

    def __init__(
        self, max_snapshots: int = MAX_SNAPSHOTS, max_bytes: int = MAX_SNAPSHOT_BYTES
    ) -> None:
        self.num_bytes = 0
        self._max_snapshots = max_snapshots
        self._max_bytes = max_bytes
        self._snapshots: dict[str, Snapshot] = {}

    def __len__(self) -> int:
        return len(self._snapshots)

    def add(
        self,
        snapshot_id: str,
        source: Source,
        task: Task,
        seed: int,
        step: int,
        turns: int,
        reward: float,
        blob: bytes,
        lease_s: float,
    ) -> SnapshotReply:
        """
        Raises:
            EnvError: `at_capacity`, retryable: leases run out.
        """
        now = asyncio.get_running_loop().time()
        self.drop_expired()
        if len(blob) > self._max_bytes:
            raise make_error(
                "payload_too_large", f"a snapshot of {len(blob)} bytes; {self._max_bytes} fit"
            )
        full = len(self._snapshots) >= self._max_snapshots
        if full or self.num_bytes + len(blob) > self._max_bytes:
            raise make_error(
                "at_capacity",
                f"{len(self._snapshots)} snapshots of {self.num_bytes} bytes are kept; ask for "
                "shorter leases",
                retry_after_s=5.0,
            )
        snapshot = Snapshot(
            snapshot_id, source, task, seed, step, turns, reward, blob, lease_s, now + lease_s
        )
        self._snapshots[snapshot.id] = snapshot
        self.num_bytes += len(blob)
        source.num_users += 1
        return SnapshotReply(snapshot.id, step, time.time() + lease_s)

    def get(self, snapshot_id: str) -> Snapshot:
        """The snapshot, whose lease begins anew.

        Raises:
            EnvError: `session_expired`: its lease ran out, or it never was.
        """
        self.drop_expired()
        snapshot = self._snapshots.get(snapshot_id)
        if snapshot is None:
            raise make_error("session_expired", "there is no such snapshot, or its lease ran out")
        snapshot.expires = asyncio.get_running_loop().time() + snapshot.lease_s
        return snapshot

    def drop_expired(self) -> None:
        now = asyncio.get_running_loop().time()
        for snapshot in [each for each in self._snapshots.values() if each.expires <= now]:
            self._drop(snapshot)

    def clear(self) -> None:
        for snapshot in list(self._snapshots.values()):
            self._drop(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        del self._snapshots[snapshot.id]
        self.num_bytes -= len(snapshot.blob)
        snapshot.source.num_users -= 1
