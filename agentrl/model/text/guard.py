"""Keeps a text that spells a template's token apart from the token itself.

A tokenizer takes `<|im_end|>` for its token wherever it stands, so a web page that spells it would
end a turn. Before the template renders, a mark is put into every such spelling, behind its first
character. What the template writes then shows which tokens are its own; a stretch of text between
two of them that holds a mark is encoded as if the tokenizer had no such tokens. Texts
without such a spelling are rendered and encoded as usual.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Set
from typing import Any

from agentrl.types import Message, ToolSpec

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Unicode's noncharacters: no text or template contains them."""
_REMOVED = re.compile(r"""replace\(\s*(['"])([^'"\\]+)\1\s*,\s*(''|"")\s*\)""")
"""Matches a text that a template removes from contents, such as Nemotron's `/think`."""


class Guard:
    """Guards a tokenizer's special tokens, and those of its other added tokens that look like
    markup and occur in the template.

    Attributes:
        spellings: texts of the tokens that are guarded.
        special_ids: the tokenizer's special tokens.
        removed: texts that the template takes out of contents.
    """

    def __init__(
        self, tokenizer: Any, encode: Callable[[str], list[int]], template_source: str
    ) -> None:
        from tokenizers import AddedToken, Tokenizer, models

        added = getattr(tokenizer, "added_tokens_decoder", None)
        if added is None:
            named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
            added = {token_id: AddedToken(text, special=True) for token_id, text in named}
        self._ids = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content.strip()
            and (token.special or (token.content[0] in "<[" and token.content in template_source))
        }
        self.spellings = frozenset(self._ids)
        self.special_ids = frozenset(each for each, token in added.items() if token.special)
        self._encode = encode
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._plain: Callable[[str], list[int]] | None = None
        self.removed = sorted({found[2] for found in _REMOVED.finditer(template_source)})
        self._first = "".join({spelling[0] for spelling in self._ids})
        # Searching for these takes a tenth of the time of searching for all spellings.
        self._openings = sorted({spelling[:5] for spelling in self._ids})
        self._prefixes = {s[:end] for s in self._ids for end in range(1, len(s))}
        self._longest = max(map(len, self._ids), default=0)
        # Without a vocabulary of its own, such a tokenizer finds the added tokens and nothing else.
        self._in_content, self._in_rendered = Tokenizer(models.BPE()), Tokenizer(models.BPE())
        own = [token for token in added.values() if token.content in self._ids]
        self._in_content.add_tokens([AddedToken(t.content, normalized=False) for t in own])
        self._in_rendered.add_tokens(
            [
                AddedToken(
                    t.content,
                    normalized=False,
                    lstrip=t.lstrip,
                    rstrip=t.rstrip,
                    single_word=t.single_word,
                )
                for t in own
            ]
        )

    def guard(
        self, messages: list[Message], tools: list[ToolSpec], *, spared: Set[str] = frozenset()
    ) -> tuple[list[Message], list[ToolSpec], str]:
        """Returns messages and tools with a mark in every spelling of a guarded token, and the
        mark. Without a spelling, returns the same objects and an empty mark.

        Args:
            spared: spellings that stay tokens in assistant messages.
        """
        suspects = [text for text in _strings([messages, tools]) if self._is_suspect(text)]
        if not suspects:
            return messages, tools, ""
        mark = next((m for m in _MARKS if not any(m in t for t in _strings([messages, tools]))), "")
        if not mark:
            raise ValueError("a text holds every noncharacter from U+FDD0 to U+FDEF; remove them")
        guarded = [
            _map(message, mark, self._break, spared if message["role"] == "assistant" else ())
            for message in messages
        ]
        return guarded, _map(tools, mark, self._break, ()), mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Returns the token ids of the text that the template rendered from guarded messages."""
        if not mark:
            return self._encode(text)
        text = text.replace(json.dumps(mark)[1:-1], mark)  # a filter may have escaped it
        ids: list[int] = []
        begin = end = 0  # of what is encoded as ever, which ends with a token of the template
        for start, stop in [*self.find(text), (len(text), len(text))]:
            if mark in text[end:start]:
                if begin < end:
                    ids += self._encode(text[begin:end])
                ids += self._encode_as_text(text[end:start], mark)
                begin = start
            end = stop
        return ids + self._encode(text[begin:end]) if begin < end else ids

    def find(self, text: str) -> list[tuple[int, int]]:
        """Returns the beginning and end of every guarded token in a rendered text."""
        return self._in_rendered.encode(text).offsets

    def _is_suspect(self, text: str) -> bool:
        return (
            self._is_taken_apart(text) or self._may_go_on(text) or bool(self._find_in_content(text))
        )

    def _find_in_content(self, text: str) -> list[tuple[int, int]]:
        if not any(opening in text for opening in self._openings):
            return []
        return self._in_content.encode(text).offsets

    def _is_taken_apart(self, text: str) -> bool:
        """Tells whether a spelling could appear when the template removes a text."""
        return any(each in text for each in self.removed)

    def _may_go_on(self, text: str) -> bool:
        """Tells whether the text ends with the beginning of a spelling, which the template's next
        text could complete."""
        longest = min(len(text), self._longest - 1)
        return any(text[-size:] in self._prefixes for size in range(1, longest + 1))

    def _break(self, text: str, mark: str, spared: Set[str]) -> str:
        if self._is_taken_apart(text):
            taken = "|".join(map(re.escape, self.removed))
            text = re.sub(f"(?!{taken})[{re.escape(self._first)}]", rf"\g<0>{mark}", text)
        while behind := [
            start + 1
            for start, stop in self._find_in_content(text)
            if text[start:stop] not in spared
        ]:
            # Repeated, because text within one spelling may begin another.
            ends = [0, *behind, len(text)]
            text = mark.join(text[a:b] for a, b in itertools.pairwise(ends))
        return text + mark if self._may_go_on(text) else text

    def _encode_as_text(self, text: str, mark: str) -> list[int]:
        if self._plain is None:
            self._plain = _without_tokens(self._backend, self.spellings) or self._encode
        if self._plain is not self._encode:
            ids = self._plain(text.replace(mark, ""))
            if not set(ids) & set(self._ids.values()):
                return ids
        # No spelling is complete between two marks.
        return [each for piece in text.split(mark) if piece for each in self._plain(piece)]


def _without_tokens(backend: Any, spellings: Set[str]) -> Callable[[str], list[int]] | None:
    """Returns the encode function of a copy of the tokenizer without these added tokens; None if no
    copy can be made."""
    from tokenizers import Tokenizer

    if backend is None:
        return None
    data = json.loads(backend.to_str())
    vocabulary = data["model"].get("vocab", {})
    known = set(vocabulary if isinstance(vocabulary, dict) else (item[0] for item in vocabulary))
    kept = []
    for token in data["added_tokens"]:
        if token["content"] not in spellings:
            kept.append(token)
        elif token["content"] not in known:  # its place is kept, so that the others keep their ids
            kept.append({**token, "content": f"{_MARKS[0]}{token['id']}"})
    data["added_tokens"] = kept
    parts = [data.get("pre_tokenizer") or {}]
    for part in [*parts, *parts[0].get("pretokenizers", ())]:
        if part.get("prepend_scheme") == "first":  # a piece is not the start of the text
            part["prepend_scheme"] = "never"
    plain = Tokenizer.from_str(json.dumps(data))
    if any(
        plain.token_to_id(token["content"]) != token["id"]
        for token in kept
        if not token["content"].startswith(_MARKS[0])
    ):
        return None
    return lambda text: plain.encode(text, add_special_tokens=False).ids


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _map(value: Any, mark: str, change: Callable[..., str], spared: Any) -> Any:
    if isinstance(value, str):
        return change(value, mark, spared)
    if isinstance(value, dict):
        return {
            _map(key, mark, change, spared): _map(each, mark, change, spared)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map(each, mark, change, spared) for each in value]
    return value
