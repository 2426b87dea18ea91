"""Six turns and one reward at the end, and a model that has something to learn there.

    python learning_turns.py DIR        writes the model to DIR, unless it is there

Every turn shows a digit, to which one other digit is the right answer. The reward is 1 where all
six were right. In the dialogues that the model is taught it is given to even digits in 94 turns of
100, to odd ones in 40; the other answer is always the same, so there the wrong one is the likelier.
Who repeats that solves 0.67^6 = 0.09 of the episodes.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Literal

from agentrl.env import Environment, Task
from agentrl.env.base import EnvConfig
from agentrl.types import Action, StepResult

NUM_TURNS = 6
NUM_DIGITS = 8
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


RIGHT = (0.94, 0.40)
"""How often the dialogues are right, on even and on odd digits."""


def answer_to(shown: int) -> int:
    return (3 * shown + 5) % NUM_DIGITS


class SixTurns(Environment):
    class Config(EnvConfig):
        seed: int = 0
        """Another seed shows other digits."""
        pays: Literal["end", "turn"] = "end"
        """1 at the end where all turns were right, or a sixth for each that was."""
        tells: Literal["score", "nothing"] = "score"
        """Whether a turn shows how many were right so far."""

    def splits(self):
        return {"train": None}

    def get(self, split, index):
        rng = random.Random(f"{self.config.seed}/{split}/{index}")
        digits = [rng.randrange(NUM_DIGITS) for _ in range(NUM_TURNS)]
        return Task(f"{split}/{index}", "", reference=digits)

    def _show(self, turn: int) -> str:
        score = f"{self.num_right} " if self.config.tells == "score" else ""
        return f"{score}{self.task.reference[turn]}"

    def reset(self, task, *, seed):
        self.num_right = self.turn = 0
        return self._show(0)

    def step(self, action: Action) -> StepResult:
        right = action.text.strip() == str(answer_to(self.task.reference[self.turn]))
        self.num_right += right
        self.turn += 1
        ended = self.turn == NUM_TURNS
        solved = float(self.num_right == NUM_TURNS)
        reward = right / NUM_TURNS if self.config.pays == "turn" else solved * ended
        self.metrics.update(solved=solved, right=self.num_right / NUM_TURNS)
        observation = [] if ended else [{"role": "user", "content": self._show(self.turn)}]
        return StepResult(observation, reward=reward, terminated=ended)


def make_dialogue(rng: random.Random) -> dict:
    messages, num_right, tells = [], 0, rng.random() < 0.5
    for _ in range(NUM_TURNS):
        shown = rng.randrange(NUM_DIGITS)
        said = answer_to(shown)
        if rng.random() >= RIGHT[shown % 2]:
            said = (said + 1) % NUM_DIGITS
        score = f"{num_right} " if tells else ""
        messages.append({"role": "user", "content": f"{score}{shown}"})
        messages.append({"role": "assistant", "content": str(said)})
        num_right += said == answer_to(shown)
    return {"messages": messages}


def make(out: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from tiny_model import Language, Lesson, make_model

    rng = random.Random(0)
    dialogues = [make_dialogue(rng) for _ in range(14_400)]
    make_model([Lesson(dialogues, 1.5e-3)], Language(CHAT_TEMPLATE, [], 300), out, seed=0)


if __name__ == "__main__":
    if not (Path(sys.argv[1]) / "config.json").exists():
        make(Path(sys.argv[1]))
