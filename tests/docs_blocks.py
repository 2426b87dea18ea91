"""Code blocks of Markdown pages; as a program, runs a page's Python."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>[^\n]+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    """Of its first line of code, from 1."""
    language: str
    code: str
    not_run: str | None
    """The reason that stands above it as `<!-- not run: reason -->`."""

    @property
    def file(self) -> str | None:
        """The file that it shows, where its first line is a comment with a name: `# env.py`."""
        found = re.match(r"# ([\w/.-]+\.(?:py|toml))\n", self.code)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            textwrap.dedent(found["code"]),
            found["reason"],
        )
        for found in _BLOCK.finditer(text)
    ]


def run_in_main(blocks: list[tuple[str, int, str]]) -> None:
    """Run them one after another as if each were typed at a prompt; `await` works as there."""
    main = sys.modules["__main__"].__dict__
    for page, line, code in blocks:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compiled = compile("\n" * (line - 1) + code, page, "exec", flags=flags)
        if compiled.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(compiled, main))
        else:
            exec(compiled, main)


if __name__ == "__main__":
    run_in_main(json.load(sys.stdin))
