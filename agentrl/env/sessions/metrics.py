"""Counts what a session manager does, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

STEP_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the step durations' histogram, in seconds; a last bucket has no bound."""


class Metrics:
    """The metrics of one session manager. Their names begin with `agentrl_env_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.opened = self._counter("sessions_opened", "Episodes started.", "env")
        self.closed = self._counter("sessions_closed", "Episodes ended.", "env", "outcome")
        """The outcome is `terminated`, `truncated`, `abandoned` (closed before its end), `expired`,
        or the code of the error that ended the episode."""
        self.steps = self._counter("steps", "Steps that ran, failed ones included.", "env")
        self.step_seconds = Histogram(
            "agentrl_env_step_seconds",
            "Duration of steps.",
            buckets=STEP_BUCKETS_S,
            registry=self.registry,
        )
        self.refused = self._counter("creations_refused", "Refused creations.", "code")
        self.replayed = self._counter("replays", "Repeated calls answered as before.")
        self._live = Gauge(
            "agentrl_env_sessions_live",
            "Sessions that count against the capacity.",
            ["env"],
            registry=self.registry,
        )

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"agentrl_env_{name}", help, labels, registry=self.registry)

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Adds a gauge whose value is read whenever the metrics are requested."""
        Gauge(f"agentrl_env_{name}", help, registry=self.registry).set_function(read)

    def text(self, live: Mapping[str, int]) -> bytes:
        """Returns the metrics in Prometheus' text format.

        Args:
            live: environment id -> its sessions.
        """
        for env_id, count in live.items():
            self._live.labels(env_id).set(count)
        return generate_latest(self.registry)
