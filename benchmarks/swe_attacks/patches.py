"""Writes patches in git's format without git."""

from __future__ import annotations

import difflib
import re


def file_diff(path: str, before: str | None, after: str | None) -> str:
    """Returns one file's section of a patch in git's format; None as `before` or `after` means that
    the file does not exist."""
    head = f"diff --git a/{path} b/{path}\n"
    head += "new file mode 100644\n" if before is None else ""
    head += "deleted file mode 100644\n" if after is None else ""
    lines = difflib.unified_diff(
        _lines(before),
        _lines(after),
        f"a/{path}" if before is not None else "/dev/null",
        f"b/{path}" if after is not None else "/dev/null",
    )
    # git marks a last line that has no newline; difflib does not.
    return head + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str | None) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text or "")  # `splitlines` splits at other characters too
