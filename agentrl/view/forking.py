"""Describes what a page of `agentrl view --play` asks for. The application is given who plays, as
playing needs torch; without a player the pages only read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

MOST_BRANCHES = 64


class ForkRequest(BaseModel):
    """A fork at a token that the policy sampled, or at a message of the environment."""

    model_config = ConfigDict(extra="forbid")

    player: str
    """One of those that `Plays.players` names."""
    row: Annotated[int, Field(ge=0)]
    position: Annotated[int, Field(ge=0)] = 0
    """Of the token in its row."""
    message: Annotated[int, Field(ge=0)] | None = None
    """Place of the edited message in its row, in place of `position`."""
    text: str | None = None
    """Stands in place of the token, or of the message's text; None samples the token anew."""
    ids: list[int] | None = None
    """Stand in place of the token."""
    count: Annotated[int, Field(ge=1, le=MOST_BRANCHES)] = 4
    seed: Annotated[int, Field(ge=0)] = 0
    """The same seed gives the same branches, where the run's own model plays."""


class Plays(Protocol):
    """Plays on from recorded trajectories; implemented by `agentrl.train.fork.Forks`."""

    def players(self, run_dir: Path, version: int) -> list[dict[str, Any]]:
        """Returns name and policy version (None: not known) of who can play, the one nearest to
        policy version `version` first."""
        ...

    async def play(
        self, run_dir: Path, step: int, offset: int, request: ForkRequest
    ) -> dict[str, Any]:
        """Returns the branches, and the advantages of the group's members beside them, as JSON."""
        ...

    async def taught(self, run_dir: Path, step: int, before: str, after: str) -> dict[str, Any]:
        """Plays a step's tasks with two players and returns what differs, as JSON."""
        ...
