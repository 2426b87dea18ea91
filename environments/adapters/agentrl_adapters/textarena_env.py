"""Games of TextArena: `textarena:NAME`.

    agentrl train run.toml --env.id textarena:GuessTheNumber-v0 --env.config.num_players 1
    agentrl train run.toml --env.id textarena:TicTacToe-v0 --env.config.opponent mine.py:careful

A game of several players needs an opponent of yours, because TextArena tells no legal moves. It
draws from the process-wide random state, so a seed gives the same game only where one is played at
a time. Its games of words download word lists by nltk when they are made.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agentrl.env.registry import register
from agentrl.errors import ConfigError
from agentrl_adapters.games_env import GameEnvironment, GamesConfig
from agentrl_adapters.packages import import_package


class TextArenaConfig(GamesConfig):
    """Settings of the game, the agent's seat and the opponent."""

    num_players: int = Field(default=2, ge=1)
    """Seats of the game."""


class TextArenaGame:
    """A game that reads its moves from text and judges itself what is legal."""

    def __init__(self, config: TextArenaConfig, seed: int) -> None:
        self.game = import_package("textarena", "games").make(config.game, **config.kwargs)
        self.game.reset(num_players=config.num_players, seed=seed)
        self.seats = list(range(config.num_players))
        self.rewards = [0.0] * config.num_players
        self.done = False

    def to_move(self) -> int | None:
        """Returns the seat to move; None when the game is over."""
        return None if self.done else self.game.state.current_player_id

    def show(self) -> tuple[str, list[str]]:
        """Returns what the seat to move sees; no legal moves are known."""
        shown = self.game.get_observation()[1]
        if not isinstance(shown, str):
            shown = "\n".join(message for _, message, *_ in shown)
        return shown, []

    def move(self, written: str) -> None:
        """Gives the game a move as text, which the game itself judges."""
        self.done, _ = self.game.step(action=written)
        if self.done:
            self.rewards = [float(self.game.close()[0][seat]) for seat in self.seats]

    def close(self) -> None:
        """Frees nothing: a game holds none."""


@register("textarena")
class TextArenaEnvironment(GameEnvironment):
    """A game of TextArena."""

    Config = TextArenaConfig
    Game = TextArenaGame

    @classmethod
    def load_shared(cls, config: Any) -> Any:
        if config.opponent == "random" and config.num_players > 1:
            raise ConfigError(
                "env.config.opponent: TextArena tells no legal moves to draw from; name a function "
                "(observation, legal) -> move as module:function, or set num_players = 1"
            )
        return super().load_shared(config)
