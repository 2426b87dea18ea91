"""Search-R1's tags: `<think>`, `<search>`, `<information>`, `<answer>`, in plain text.

A turn ends with its first `</search>` or `</answer>`, whatever was written behind it, as if the
engine had stopped there; the pair that this tag closes is the action. That is how Search-R1 reads a
turn (Jin et al., "Search-R1", 2025, section 3), whose models and recipes thereby run as they are.
Nothing here takes more than linear time, whatever was written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_END = re.compile(r"</(search|answer)>")
_TAG = re.compile(r"</?(?:search|answer|information|think)>")
_LAST_TAG = re.compile(_TAG.pattern + r"\Z")
_LONGEST_TAG = len("</information>")


@dataclass(slots=True, frozen=True)
class TagAction:
    kind: Literal["search", "answer"]
    text: str


def cut_turn(text: str) -> str:
    """The turn up to its first `</search>` or `</answer>`; all of it where there is none."""
    end = _END.search(text)
    return text if end is None else text[: end.end()]


def read_action(text: str) -> TagAction | None:
    """Returns the action that the turn's first closing tag closes; None if there is no such tag, or
    nothing was opened."""
    end = _END.search(text)
    if end is None:
        return None
    kind: Literal["search", "answer"] = "search" if end[1] == "search" else "answer"
    opened = text.find(f"<{kind}>", 0, end.start())
    if opened < 0:
        return None
    return TagAction(kind, text[opened + len(kind) + 2 : end.start()].strip())


def is_well_formed(text: str, *, require_think: bool) -> bool:
    """Tells whether a turn is a thought (unless none is required), then one action, and nothing
    before it.

    The opening `<think>` may be missing, because many chat templates write it themselves.
    """
    before, thought, rest = cut_turn(text).strip().partition("</think>")
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
    """Text of a passage, which must not speak in the agent's or the environment's name.

    What the removal of a tag puts together is looked at again: `</infor</think>mation>` leaves
    nothing.
    """
    kept: list[str] = []
    for part in re.split("(?<=>)", text):
        kept.extend(part)
        while kept and (tag := _LAST_TAG.search("".join(kept[-_LONGEST_TAG:]))):
            del kept[-len(tag[0]) :]
    return "".join(kept)


def as_information(text: str) -> str:
    return f"\n\n<information>{text}</information>\n\n"
