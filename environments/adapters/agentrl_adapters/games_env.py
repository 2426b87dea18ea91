"""Turn-taking games of PettingZoo: `pettingzoo:MODULE`, and what TextArena's share with them.

    agentrl env play pettingzoo:pettingzoo.classic.tictactoe_v3

The agent has one seat, by default another in each task; the opponent has the others. The episode's
reward is the seat's sum of rewards. As with Gymnasium, a task is a seed.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

from pydantic import Field

from agentrl.env.base import EnvConfig, Environment
from agentrl.env.registry import register
from agentrl.errors import EnvError
from agentrl.types import Task
from agentrl.user_modules import load
from agentrl_adapters.packages import import_package, to_json
from agentrl_adapters.rows_env import class_for


class GamesConfig(EnvConfig):
    """Settings of the game, the agent's seat and the opponent."""

    game: str = ""
    """PettingZoo's module or TextArena's name. Anyone who can set it decides what is imported."""
    kwargs: dict[str, Any] = Field(default={})
    """Further arguments of the game."""
    seat: int | None = Field(default=None, ge=0)
    """The agent's seat, from 0; None takes another one in each task."""
    opponent: str = "random"
    """`random` draws a legal move, which only PettingZoo tells; else `module:function`, which gets
    the observation and the legal moves and returns a move."""


class PettingZooGame:
    """A game whose moves are numbers of a Discrete space, some of them masked."""

    def __init__(self, config: GamesConfig, seed: int) -> None:
        import_package("pettingzoo", "games")
        module = importlib.import_module(config.game)
        self.game = module.env(**config.kwargs)
        self.draws = "ansi" in (self.game.metadata.get("render_modes") or ())
        if self.draws:
            self.game = module.env(**{"render_mode": "ansi"} | config.kwargs)
        self.game.reset(seed=seed)
        self.seats = list(self.game.possible_agents)
        self.rewards = [0.0] * len(self.seats)

    def to_move(self) -> int | None:
        """Returns the seat to move; None when the game is over."""
        while self.game.agents:
            if not (self.game.last()[2] or self.game.last()[3]):
                return self.seats.index(self.game.agent_selection)
            self.game.step(None)  # the rules of AEC: a seat that is out is taken off so
        return None

    def show(self) -> tuple[str, list[str]]:
        """Returns what the seat to move sees, and its legal moves."""
        seat, shown = self.game.agent_selection, self.game.last()[0]
        space, mask = self.game.action_space(seat), self.game.infos[seat].get("action_mask")
        if isinstance(shown, dict):
            shown, mask = shown["observation"], shown.get("action_mask", mask)
        legal = [str(i) for i in range(space.n) if mask is None or mask[i]]
        text = self.game.render() if self.draws else to_json(shown)
        how = f"Write one of {', '.join(legal)} as <action>...</action>"
        return f"{text}\nYou are {seat}. {how}", legal

    def move(self, written: str) -> None:
        """Makes the move whose number is in the last `<action>...</action>`, or the whole text.

        Raises:
            ValueError: it is not legal.
        """
        number = written.rpartition("<action>")[2].partition("</action>")[0].strip()
        shown, legal = self.show()
        if number not in legal:
            raise ValueError(f"{number[:50]!r} is not legal. {shown.rpartition('. ')[2]}")
        self.game.step(int(number))
        pairs = zip(self.rewards, self.seats, strict=True)
        self.rewards = [total + self.game.rewards.get(seat, 0) for total, seat in pairs]

    def close(self) -> None:
        self.game.close()


class GameEnvironment(Environment):
    """A game in which the agent has one seat and writes its moves as text."""

    Config = GamesConfig
    Game: type[Any] = PettingZooGame
    game: Any = None

    @classmethod
    def for_target(cls, target: str) -> type[Environment]:
        """Returns the environment class for the id `NAME:GAME`."""
        return class_for(cls, "game", target)

    @classmethod
    def load_shared(cls, config: GamesConfig) -> Any:
        return None if config.opponent == "random" else load(config.opponent)

    def splits(self) -> dict[str, int | None]:
        return {"train": None, "test": 1000}

    def get(self, split: str, index: int) -> Task:
        return Task(f"{split}/{index}", "", metadata={"index": index})

    def reset(self, task: Task, *, seed: int) -> str:
        drawn = random.Random(f"{task.id} {seed}").randrange(2**31)
        self.game = self.Game(self.config, drawn)
        fixed: Any = self.config.seat
        index: Any = task.metadata.get("index", 0) if fixed is None else fixed
        self.seat = index % len(self.game.seats)
        if (shown := self._until_our_turn()) is None:
            raise EnvError("the opponent ended the game before the agent's first turn")
        return shown

    def on_text(self, text: str) -> str | None:
        try:
            self.game.move(text)
        except ValueError as error:
            self.metrics["invalid_calls"] = self.metrics.get("invalid_calls", 0.0) + 1.0
            return str(error)
        shown = self._until_our_turn()
        if shown is None:
            self.finish(self.game.rewards[self.seat], info={"seat": self.seat})
        return shown

    def _until_our_turn(self) -> str | None:
        """Lets the opponent move; returns what the agent sees, None when the game is over."""
        while (seat := self.game.to_move()) is not None:
            shown, legal = self.game.show()
            if seat == self.seat:
                return shown
            self.game.move(self.shared(shown, legal) if self.shared else self.rng.choice(legal))
        return None

    def close(self) -> None:
        if self.game is not None:
            self.game.close()


@register("pettingzoo")
class PettingZooEnvironment(GameEnvironment):
    """A turn-taking game of PettingZoo."""
