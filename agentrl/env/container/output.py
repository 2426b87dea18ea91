"""Reads the output of a command from the engine's frames, and shortens it."""

from __future__ import annotations

import codecs
from collections.abc import Iterator


def take_frames(buffer: bytearray) -> Iterator[tuple[int, bytes]]:
    """Removes the complete frames at the front of a command's stream and yields (kind, payload).

    A frame is one byte with its kind (1: output, 2: errors), three zero bytes, the payload's length
    in 4 bytes (big-endian), and the payload.
    """
    while len(buffer) >= 8:
        end = 8 + int.from_bytes(buffer[4:8], "big")
        if len(buffer) < end:
            return
        yield buffer[0], bytes(buffer[8:end])
        del buffer[:end]


class Clip:
    """Decodes output as it arrives and keeps its first and last `max_chars // 2` characters."""

    def __init__(self, max_chars: int) -> None:
        self._half = max(max_chars // 2, 1)
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._kept = ""
        self._num_chars = 0

    def add(self, kind: int, payload: bytes, *, final: bool = False) -> None:
        text = self._decode(payload, final)
        self._num_chars += len(text)
        self._kept += text
        if len(self._kept) > 8 * self._half:
            self._kept = self._kept[: self._half] + self._kept[-self._half :]

    def text(self) -> tuple[str, int]:
        """Returns the text and the number of characters left out, which a line in it states too."""
        self.add(1, b"", final=True)
        dropped = self._num_chars - 2 * self._half
        if dropped <= 0:
            return self._kept, 0
        head, tail = self._kept[: self._half], self._kept[-self._half :]
        return f"{head}\n[... {dropped:,} characters left out ...]\n{tail}", dropped
