"""Search-R1's tags: `<think>`, `<search>`, `<information>`, `<answer>`, in plain text.

A turn ends with its first `</search>` or `</answer>`, as if the engine had stopped there; text
after it is ignored. The pair that this tag closes is the action. Search-R1 reads turns the same way
(Jin et al., "Search-R1", 2025, section 3), so its models and recipes work unchanged. Everything
here takes linear time, whatever the policy writes.
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
    """Returns the turn up to its first `</search>` or `</answer>`, or all of it without one."""
    end = _END.search(text)
    return text if end is None else text[: end.end()]


def read_action(text: str) -> TagAction | None:
    """Returns the action that ends with the turn's first `</search>` or `</answer>`.

    Returns None if there is no such tag, or no opening tag before it.
    """
    end = _END.search(text)
    if end is None:
        return None
    kind: Literal["search", "answer"] = "search" if end[1] == "search" else "answer"
    opened = text.find(f"<{kind}>", 0, end.start())
    if opened < 0:
        return None
    return TagAction(kind, text[opened + len(kind) + 2 : end.start()].strip())


def is_well_formed(text: str, *, require_think: bool) -> bool:
    """Returns whether a turn consists of a thought and one action.

    The thought may be missing unless `require_think`. The opening `<think>` may always be missing,
    because many chat templates write it themselves. Text after the action is ignored.
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
    """Removes the dialect's tags from a passage, so that it cannot imitate agent or environment.

    Removes tags that the removal of another tag creates, too: `</infor</think>mation>` becomes "".
    """
    kept: list[str] = []
    for part in re.split("(?<=>)", text):
        kept.extend(part)
        while kept and (tag := _LAST_TAG.search("".join(kept[-_LONGEST_TAG:]))):
            del kept[-len(tag[0]) :]
    return "".join(kept)


def as_information(text: str) -> str:
    return f"\n\n<information>{text}</information>\n\n"
