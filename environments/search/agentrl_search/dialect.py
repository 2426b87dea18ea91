"""Search-R1's tags: `<think>`, `<search>`, `<information>`, `<answer>`, in plain text.

An action is the first pair of `<search>` or `<answer>` tags in a turn; the rest of the turn has no
effect. That is how Search-R1 reads it (Jin et al., "Search-R1", 2025, section 3), whose models and
recipes thereby run as they are. Nothing here takes more than linear time, whatever was written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_TAG = re.compile(r"</?(?:search|answer|information|think)>")


@dataclass(slots=True, frozen=True)
class TagAction:
    kind: Literal["search", "answer"]
    text: str


def read_action(text: str) -> TagAction | None:
    """The first `<search>` or `<answer>` of a turn; None where no pair is whole."""
    found: tuple[int, TagAction] | None = None
    kinds: tuple[Literal["search", "answer"], ...] = ("search", "answer")
    for kind in kinds:
        opened = text.find(f"<{kind}>")
        start = opened + len(kind) + 2
        closed = text.find(f"</{kind}>", start) if opened >= 0 else -1
        if closed >= 0 and (found is None or opened < found[0]):
            found = (opened, TagAction(kind, text[start:closed].strip()))
    return found[1] if found else None


def is_well_formed(text: str, *, require_think: bool) -> bool:
    """Whether a turn is thought (unless not required), then one action, and nothing else.

    The opening `<think>` may be missing, because many chat templates write it themselves.
    """
    before, thought, rest = text.strip().partition("</think>")
    if thought:
        if _TAG.search(before.removeprefix("<think>")):
            return False
    elif require_think:
        return False
    else:
        rest = before
    rest = rest.strip()
    tags = _TAG.findall(rest)
    if tags not in (["<search>", "</search>"], ["<answer>", "</answer>"]):
        return False
    return rest.startswith(tags[0]) and rest.endswith(tags[1]) and len(rest) > len("".join(tags))


def without_tags(text: str) -> str:
    """Text of a passage, which must not speak in the agent's or the environment's name."""
    return _TAG.sub("", text)


def as_information(text: str) -> str:
    return f"\n\n<information>{text}</information>\n\n"
