"""Rewards for a text's form: tags, length, repetition. All take linear time.

They judge the reasoning too: `whole_text`, which the runner passes, takes the place of `text`.
"""

from __future__ import annotations

import re
from typing import Literal

from agentrl.types import JSON

FormatName = Literal["think_answer", "search"]
_TAGS = re.compile(r"<(/?)(think|search|information|answer)>")


def format(
    text: str, reference: JSON = None, *, style: FormatName = "think_answer", whole_text: str = ""
) -> float:
    """Returns 1.0 if the text is well formed in the given style, else 0.0.

    `think_answer`: one `<think>...</think>` followed by one `<answer>...</answer>`, neither empty,
    with nothing but white space around them (DeepSeek-R1, arXiv:2501.12948). The opening `<think>`
    may be missing, because it may be the end of the prompt.

    `search`: Search-R1's format (Jin et al. 2025, arXiv:2503.09516). Any number of rounds of
    `<think>`, `<search>` and `<information>`, then `<think>` and `<answer>`, with nothing but white
    space between the blocks. Only `<information>` may be empty.
    """
    blocks = _read_blocks(whole_text or text, optional_first=style == "think_answer")
    if blocks is None or not all(content for name, content in blocks if name != "information"):
        return 0.0
    names = " ".join(name for name, _ in blocks)
    pattern = "think answer" if style == "think_answer" else _SEARCH_ROUNDS
    return float(re.fullmatch(pattern, names) is not None)


_SEARCH_ROUNDS = r"(?:think search information )*think answer"


def _read_blocks(text: str, *, optional_first: bool) -> list[tuple[str, str]] | None:
    """Returns `(tag, stripped content)` per block.

    Returns None if tags are nested or not closed, or if there is text outside of them.
    """
    if optional_first and not text.lstrip().startswith("<think>"):
        text = "<think>" + text
    blocks: list[tuple[str, str]] = []
    opened, end = None, 0
    for match in _TAGS.finditer(text):
        between = text[end : match.start()].strip()
        closing, name = match.groups()
        if opened is None:
            if closing or between:
                return None
            opened = name
        else:
            if not closing or name != opened:
                return None
            blocks.append((name, between))
            opened = None
        end = match.end()
    return None if opened is not None or text[end:].strip() else blocks


def length(
    text: str,
    reference: JSON = None,
    *,
    max_length: int,
    buffer: int = 0,
    num_tokens: int | None = None,
    whole_text: str = "",
) -> float:
    """Penalises length: 0 up to `max_length - buffer`, then falling linearly to -1.

    Equation 13 of DAPO (Yu et al. 2025, arXiv:2503.14476). With `buffer` 0 it is a step function.

    Args:
        max_length: the length at which the penalty reaches -1.
        buffer: width of the slope below `max_length`.
        num_tokens: length of the text in tokens; None counts words instead.

    Raises:
        ValueError: `buffer` is negative or larger than `max_length`.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}; it must be between 0 and max_length = {max_length}")
    size = len((whole_text or text).split()) if num_tokens is None else num_tokens
    if size <= max_length - buffer:
        return 0.0
    return -1.0 if size > max_length or not buffer else (max_length - buffer - size) / buffer


def repetition(text: str, reference: JSON = None, *, n: int = 4, whole_text: str = "") -> float:
    """Returns minus the fraction of word n-grams that repeat an earlier one, -1 to 0.

    0 means that no sequence of `n` words occurs twice.

    Raises:
        ValueError: `n` is below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; an n-gram has at least 1 word")
    words = (whole_text or text).lower().split()
    num_grams = len(words) - n + 1
    if num_grams <= 1:
        return 0.0
    distinct = len(set(zip(*(words[i:] for i in range(n)), strict=False)))
    return distinct / num_grams - 1.0
