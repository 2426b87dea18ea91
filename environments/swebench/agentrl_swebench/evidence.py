"""The evidence on which gradings and control runs are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True, frozen=True)
class Evidence:
    """The results of one run of the harness."""

    ended: Literal["done", "wall_limit", "crashed"]
    """End of the worker: it gave a result, was killed for taking too long, or ended without a
    result."""
    report: dict[str, dict] | None = None
    """The official report by instance id; None if the harness made none."""
    statuses: dict[str, str] = field(default_factory=dict)
    """Status by test, for every test that the official parser found in the log."""
    complete: bool = False
    """True if the log has the marks of the tests' start and end."""
    num_marks: tuple[int, int] = (1, 1)
    """Counts of the start mark and of the end mark in the log; (1, 1) is normal."""
    changed: Sequence[str] | None = ()
    """Files that decide how tests run and that differ from the image, and the evaluation script if
    it differs from what was put there. Listed from outside the container; None if that failed."""
    error_kind: str = ""
    error: str = ""
    container_end: str = ""
    out_of_memory: bool = False
    least_free_bytes: int | None = None
    image_id: str = ""
    log_dir: str = ""
    """The harness' log folder, relative to the worker's folder."""
    seconds: float = 0.0
