"""Rewards for the form of a text: tags, length, repetition, gibberish. All linear in its length."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Literal

from agentrl.types import JSON

FormatName = Literal["think_answer", "search"]
_TAGS = re.compile(r"<(/?)(think|search|information|answer)>")


def format(text: str, reference: JSON = None, *, style: FormatName = "think_answer") -> float:
    """1.0 if the text is well formed in `style`, else 0.0.

    `think_answer`: `<think>...</think>` and then `<answer>...</answer>`, each once, neither empty,
    and nothing but white space around them (DeepSeek-R1, arXiv:2501.12948). A prompt that ends in
    `<think>` leaves its opening tag out of the text, which is accepted.

    `search`: Search-R1's dialect (Jin et al. 2025, arXiv:2503.09516). Blocks follow one another
    with only white space between them: any number of rounds of `<think>`, `<search>` and
    `<information>`, a `<think>` before each action, and `<answer>` as the last block.
    """
    blocks = _read_blocks(text, optional_first=style == "think_answer")
    if blocks is None or not all(content for name, content in blocks if name != "information"):
        return 0.0
    names = " ".join(name for name, _ in blocks)
    pattern = "think answer" if style == "think_answer" else _SEARCH_ROUNDS
    return float(re.fullmatch(pattern, names) is not None)


_SEARCH_ROUNDS = r"(?:think search information )*think answer"


def _read_blocks(text: str, *, optional_first: bool) -> list[tuple[str, str]] | None:
    """`(tag, stripped content)` of each block; None when tags nest, dangle or leave text out."""
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
) -> float:
    """Soft penalty for length: 0 up to `max_length - buffer`, then linearly down to -1.

    Equation 13 of DAPO (Yu et al. 2025, arXiv:2503.14476). With `buffer` 0 it is a step.

    Args:
        max_length: length from which on the penalty is -1 in full.
        buffer: width of the slope below `max_length`.
        num_tokens: length of the text in tokens; None counts words.

    Raises:
        ValueError: `buffer` is negative or longer than `max_length`.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}; it must be between 0 and max_length = {max_length}")
    size = len(text.split()) if num_tokens is None else num_tokens
    if size <= max_length - buffer:
        return 0.0
    return -1.0 if size > max_length or not buffer else (max_length - buffer - size) / buffer


def repetition(text: str, reference: JSON = None, *, n: int = 4) -> float:
    """Minus the share of n-grams of words that already occurred before, -1 to 0.

    0 means that no sequence of `n` words occurs twice, as in every text of at most `n` words.

    Raises:
        ValueError: `n` is below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; an n-gram has at least 1 word")
    words = text.lower().split()
    num_grams = len(words) - n + 1
    if num_grams <= 1:
        return 0.0
    distinct = len(set(zip(*(words[i:] for i in range(n)), strict=False)))
    return distinct / num_grams - 1.0


_WORD = re.compile(r"[^\W\d_]+")
_RUN = re.compile(r"(\S)\1{9,}")


def gibberish(text: str, reference: JSON = None) -> float:
    """Measures how little a text resembles writing: a penalty from -1 (gibberish) to 0 (none seen).

    The worst of four signs, each of which is absent from prose, code and mathematics: share of
    replacement, control and private-use characters; share of one character repeated ten times or
    more; share of letters in words of more than 30; and how far the entropy of the characters
    falls below 2 bits (texts of 50 characters or more). A heuristic for collapse of the policy,
    not a judgement of quality.
    """
    if not text.strip():
        return 0.0
    size = len(text)
    odd = sum(
        char == "\ufffd" or "\ue000" <= char <= "\uf8ff" or (char < " " and char not in "\t\n\r")
        for char in text
    )
    runs = sum(len(match[0]) for match in _RUN.finditer(text) if match[1] not in "-=_*#.~|")
    words = _WORD.findall(text)
    letters = sum(map(len, words))
    # Scripts that put no spaces between words have long runs of letters by right.
    long = sum(len(word) for word in words if len(word) > 30 and word.isascii())
    signs = [odd / size, runs / size, long / letters if letters else 0.0]
    if size >= 50:
        shares = [count / size for count in Counter(text).values()]
        entropy = -sum(share * math.log2(share) for share in shares)
        signs.append(1.0 - min(entropy, 2.0) / 2.0)
    return -min(1.0, max(signs))
