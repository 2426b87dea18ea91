"""Environments of tinker-cookbook, as they are: `tinker:module:Class`.

    agentrl train run.toml --env.id tinker:my_recipe.env:MyEnv --env.config.tasks rows.jsonl

CLASS is a `MessageEnv` or a `ProblemEnv`; each row's columns are its arguments (rows need no
`prompt`, the class writes it). An `Env` whose observations are tokens is refused: tokens are the
trainer's here. tinker-cookbook is imported by your class alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.env.registry import register
from agentrl.env.rows import read_rows
from agentrl.env.values import to_observation
from agentrl.errors import ConfigError
from agentrl.types import Action, Message, StepResult, Task
from agentrl.user_modules import load
from agentrl_adapters.packages import to_json
from agentrl_adapters.rows_env import RowsEnvironment


@register("tinker")
class TinkerEnvironment(RowsEnvironment):
    """A MessageEnv or ProblemEnv of tinker-cookbook."""

    @classmethod
    def load_shared(cls, config: Any) -> Any:
        _class_of(config.target)
        files = {"train": config.tasks, "test": config.test}
        return {
            split: [
                Task(f"{split}/{number}", "", metadata=to_json(row))  # type: ignore[arg-type]
                for number, (_, row) in enumerate(read_rows(Path(name)))
            ]
            for split, name in files.items()
            if name
        }

    async def reset(self, task: Task, *, seed: int) -> list[Message]:
        made = _class_of(self.config.target)
        if _is_problem(made):
            self.played = made(**{"renderer": None} | task.metadata)
            asked = {"role": "user", "content": self.played.get_question()}
            self.shown = [*self.played.convo_prefix, asked]
        else:
            self.played = made(**task.metadata)
            self.shown = await self.played.initial_observation()
        return to_observation(list(self.shown), "initial_observation()")

    async def step(self, action: Action) -> StepResult:
        if _is_problem(type(self.played)):
            return await self.call(self._graded, action.text)
        said = {"role": "assistant", "content": action.text}
        result = await self.played.step(said)
        # What comes back is the whole conversation: the turn just taken is no observation.
        fresh = list(result.next_messages)[len(self.shown) :]
        self.shown = list(result.next_messages) or self.shown
        observation = [m for m in fresh if m["role"] != "assistant"]
        self.metrics.update({k: float(v) for k, v in result.metrics.items()})
        info: Any = to_json(result.logs)
        return StepResult(
            to_observation(observation, "step()"),
            float(result.reward),
            terminated=bool(result.episode_done),
            info=info,
        )

    def _graded(self, text: str) -> StepResult:
        """Returns a ProblemEnv's reward: its format counts as kept where the turn has ended."""
        correct, kept = (
            float(f(text)) for f in (self.played.check_answer, self.played.check_format)
        )
        self.metrics.update(correct=correct, format=kept)
        reward = self.played.format_coef * (kept - 1) + correct
        return StepResult([], reward, terminated=True)


def _is_problem(made: Any) -> bool:
    return all(hasattr(made, name) for name in ("get_question", "check_answer", "check_format"))


def _class_of(target: str) -> Any:
    made: Any = load(target)
    if not (_is_problem(made) or any(c.__name__ == "MessageEnv" for c in made.__mro__)):
        raise ConfigError(
            f"tinker:{target} is neither a MessageEnv nor a ProblemEnv of tinker-cookbook; an Env "
            "of tokens is not played here: name the MessageEnv that it wraps"
        )
    return made
