"""What a session manager counts, for `/metrics` and for tests."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

STEP_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histogram of step durations, in seconds; one bucket more is without end."""


@dataclass(slots=True)
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))
    """Observations per bucket, not cumulative."""
    total: float = 0.0
    """Sum of the observations."""

    def add(self, value: float) -> None:
        self.counts[bisect_left(STEP_BUCKETS_S, value)] += 1
        self.total += value


@dataclass(slots=True)
class Stats:
    opened: dict[str, int] = field(default_factory=dict)
    """By environment: episodes begun, by opening, forking or resetting a session."""
    closed: dict[tuple[str, str], int] = field(default_factory=dict)
    """By environment and outcome: `terminated`, `truncated`, `abandoned`, `expired`, or the code
    of the error that ended the episode."""
    steps: dict[str, int] = field(default_factory=dict)
    """By environment: steps and resets in place that ran, failed ones included."""
    step_seconds: Histogram = field(default_factory=Histogram)
    replayed: int = 0
    """Repeated calls that were answered with what the first had given."""
    refused: dict[str, int] = field(default_factory=dict)
    """By problem code: creations that opened nothing."""
    snapshots: int = 0
    """Snapshots taken."""
    # As they are now:
    live: dict[str, int] = field(default_factory=dict)
    """By environment: slots in use."""
    waiting: int = 0
    """Creations that wait for a slot."""
    breakers: dict[str, str] = field(default_factory=dict)
    """By environment, where it is not `closed`: `open` or `half_open`."""
    snapshot_bytes: int = 0
    abandoned_threads: int = 0
    """Threads whose call passed its deadline and has not returned."""
    stuck_calls: int = 0
    """Coroutines that passed their deadline and have not stopped; after 2 s they are closed."""

    def add_step(self, env_id: str, seconds: float) -> None:
        self.steps[env_id] = self.steps.get(env_id, 0) + 1
        self.step_seconds.add(seconds)


def count(counts: dict, key: object) -> None:
    counts[key] = counts.get(key, 0) + 1
