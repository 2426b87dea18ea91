"""Text that a model or an environment wrote, made harmless for a terminal and a page's title.

Pages do the same in `pages/dom.js`."""

from __future__ import annotations

import re

UNSAFE = re.compile(
    # C0 without tab and newline, DEL, C1; direction controls; invisible characters and tags;
    # lone surrogates, which no encoding can write.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    """Spells out control, direction and invisible characters. For HTML the text still has to be
    escaped."""
    return UNSAFE.sub(lambda match: f"[{_name(match.group())}]", text)


def _name(character: str) -> str:
    return "ESC" if character == "\x1b" else f"U+{ord(character):04X}"
