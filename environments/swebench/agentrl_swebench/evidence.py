"""The evidence by which gradings and control runs are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True, frozen=True)
class Evidence:
    """The results that one run of the harness left."""

    ended: Literal["done", "wall_limit", "crashed"]
    """The worker: gave a result, was killed for taking too long, ended without a result."""
    report: dict[str, dict] | None = None
    """The official report, by instance id; None where the harness made none."""
    statuses: dict[str, str] = field(default_factory=dict)
    """Every test that the official parser found in the log, with its status."""
    complete: bool = False
    """The log has both of the evaluation script's marks."""
    num_marks: tuple[int, int] = (1, 1)
    """How often the log has the mark of the tests' start and that of their end."""
    changed: Sequence[str] | None = ()
    """Files that decide how tests run and are not what they were in the image, or, of the
    evaluation script, not what was put there. Seen by the engine, from outside the container; None:
    it could not look."""
    error_kind: str = ""
    error: str = ""
    container_end: str = ""
    out_of_memory: bool = False
    least_free_bytes: int | None = None
    image_id: str = ""
    log_dir: str = ""
    """Of the harness, relative to the worker's folder."""
    seconds: float = 0.0
