"""Multiple choice: shuffles the options with a seed and reads the letter that was chosen.

question = shuffle_choices(["Paris", "Rome", "Oslo", "Bern"], correct=0, seed="task-17")
question.text            # "(A) Oslo\\n(B) Paris\\n..."
gpqa("... Answer: B", question.letter)
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_rewards.inputs import without_reasoning


@dataclass(slots=True, frozen=True)
class ShuffledChoices:
    """A question's options in another order."""

    text: str
    """One line `(A) option` per option, for the prompt."""
    letter: str
    """The correct option's letter: the reference for `gpqa`."""
    order: tuple[int, ...]
    """`order[i]` is the original index of the option at position i."""


def shuffle_choices(choices: Sequence[str], *, correct: int, seed: int | str) -> ShuffledChoices:
    """Puts the options in an order that depends on `seed` alone, not on the process.

    Seed it with the task's id, so that every sample of a task sees the same order.

    Raises:
        ValueError: there are fewer than 2 or more than 26 options, or `correct` is out of range.
    """
    if not 2 <= len(choices) <= 26 or not 0 <= correct < len(choices):
        raise ValueError(
            f"{len(choices)} options with correct = {correct}: give 2 to 26 options and the index "
            "of one of them"
        )
    order = list(range(len(choices)))
    random.Random(str(seed)).shuffle(order)
    lines = [f"({string.ascii_uppercase[i]}) {choices[j]}" for i, j in enumerate(order)]
    return ShuffledChoices(
        "\n".join(lines), string.ascii_uppercase[order.index(correct)], tuple(order)
    )


# Possessive quantifiers throughout: a long run of spaces is scanned once, without backtracking.
_LETTER = (
    r"\s*+(?:\*\*|[(\[{{$\"'`]|\\text(?:bf)?\{{|\\mathrm\{{|\\boxed\{{)*+"
    r"(?P<{}>[A-Z])(?![A-Za-z0-9])"
)
_MARKED = re.compile(
    r"\\boxed\s*+\{"
    + _LETTER.format("boxed")
    + r"|<answer>"
    + _LETTER.format("tagged")
    # "answer" in any case; the letter itself only as a capital, for "a" is an article
    + r"|(?<!<)(?<!/)(?i:answer)\b\s*+(?i:(?:is|choice|option)\b\s*+){0,2}+"
    + r"(?:\*\*\s*+)?+(?::\s*+)?+(?:\*\*\s*+)?+"
    + _LETTER.format("said")
)
_ALONE = re.compile(r"[(\[*$]{0,3}([A-Za-z])[)\].:*$]{0,4}")


def extract_choice(text: str, num_choices: int = 4) -> str | None:
    """Returns the capital letter of the option that a text chooses, or None if it chooses none.

    The last of `\\boxed{B}`, `<answer>B</answer>` and `answer is (B)` counts; without any of them,
    the last line counts if it consists of a single letter. Reasoning up to `</think>` is ignored.
    Returns None for a letter beyond the options.
    """
    text = without_reasoning(text).strip()
    letter = None
    for match in _MARKED.finditer(text):
        letter = match[match.lastgroup or 0]
    if letter is None and (alone := _ALONE.fullmatch(text.rpartition("\n")[2].strip())):
        letter = alone[1].upper()
    if letter is None or letter not in string.ascii_uppercase[:num_choices]:
        return None
    return letter


def gpqa(text: str, reference: str, *, num_choices: int = 4) -> float:
    """Returns 1.0 if the text chooses the letter `reference`, else 0.0.

    Named after the benchmark it is mostly used for (Rein et al. 2023, arXiv:2311.12022).
    """
    return float(extract_choice(text, num_choices) == reference.strip(" ()").upper())
