"""The answer that a reward function judges, with its reasoning apart from its final answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.types import JSON, Message


@dataclass(slots=True, frozen=True)
class RewardInput:
    """One answer to be scored."""

    text: str
    """The policy's text. Its reasoning, up to `</think>`, is moved to `whole_text`."""
    reference: JSON = None
    """The task's gold answer, in the format that the function expects."""
    prompt: str | list[Message] = ""
    """The prompt that the policy answered: a string, or messages."""
    num_tokens: int | None = None
    """Number of tokens that the policy sampled in all turns; None if unknown."""
    metadata: dict[str, JSON] = field(default_factory=dict)
    """The task's metadata."""
    turns: Sequence[list[Message]] = ()
    """One list per turn: the policy's message, then the messages it got in reply."""
    whole_text: str = ""
    """The text with its reasoning; taken from `text` if empty."""

    def __post_init__(self) -> None:
        if not self.whole_text:
            object.__setattr__(self, "whole_text", self.text)
            object.__setattr__(self, "text", without_reasoning(self.text))


def without_reasoning(text: str) -> str:
    """Returns what follows the last `</think>`, up to a `<think>` that is not closed.

    A text without these tags is returned unchanged.
    """
    if "</think>" in text:
        text = text[text.rfind("</think>") + len("</think>") :].lstrip()
    return text.partition("<think>")[0]
