"""Parses patches to the last line: those that git writes, and plain unified diffs.

The parser is stricter than `git apply` and `patch` and refuses text between the sections: those
programs might find a file in text that a parser skips.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEADER_LINE = re.compile(
    r"(?:old mode|new mode|deleted file mode|new file mode|copy from|copy to|rename from|rename to"
    r"|similarity index|dissimilarity index|index|Binary files) "
)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_BINARY_LINE = re.compile(r"(?:literal|delta) \d+|[A-Za-z][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]+|")


class PatchFormatError(ValueError):
    """The text is not a patch that can be parsed to the last line."""


@dataclass(slots=True, frozen=True)
class Section:
    """The part of a patch about one file."""

    paths: tuple[str, ...]
    """Every name that the section gives the file, relative to the repository."""
    is_new: bool
    text: str


def parse_patch(patch: str) -> list[Section]:
    """Returns the sections of a patch as git writes it, or of a plain unified diff.

    Raises:
        PatchFormatError: a line belongs to no section, a hunk's length differs from its header, or
            a name leads out of the repository.
    """
    lines = patch.split("\n")
    if lines[-1] == "":
        lines.pop()
    sections = []
    at = 0
    while at < len(lines):
        start = at
        if not lines[at].strip():
            at += 1
            if at == len(lines) and sections:
                break
            continue
        paths: list[str] = []
        header_names: tuple[str, ...] = ()
        is_new = False
        if lines[at].startswith("diff --git "):
            header_names = _header_names(lines[at][len("diff --git ") :])
            at += 1
            while at < len(lines) and _HEADER_LINE.match(lines[at]):
                line = lines[at]
                is_new = is_new or line.startswith(("new file mode", "rename to", "copy to"))
                if match := re.match(r"(?:rename|copy) (?:from|to) (.*)", line):
                    paths.append(_checked(_unquote(match.group(1), at), at))
                at += 1
        elif not lines[at].startswith("--- "):
            raise PatchFormatError(f"line {at + 1} belongs to no file")
        if at < len(lines) and lines[at].startswith("--- "):
            if at + 1 >= len(lines) or not lines[at + 1].startswith("+++ "):
                raise PatchFormatError(f"line {at + 2} should name the new file")
            old, new = (_file_name(lines[at + k][4:], at + k) for k in (0, 1))
            is_new = is_new or old is None
            paths += [name for name in (old, new) if name is not None]
            at = _skip_hunks(lines, at + 2)
        elif at < len(lines) and lines[at] == "GIT binary patch":
            at += 1
            while at < len(lines) and _BINARY_LINE.fullmatch(lines[at]):
                at += 1
        paths = [*(_checked(_strip(name, start), start) for name in header_names), *paths]
        if not paths:
            raise PatchFormatError(f"the section at line {start + 1} names no file")
        text = "".join(line + "\n" for line in lines[start:at])
        sections.append(Section(tuple(dict.fromkeys(paths)), is_new, text))
    return sections


def patched(before: str | None, section: Section) -> str | None:
    """Returns a file's text with a section applied, each hunk at the line that it names; None if
    the section deletes the file.

    Args:
        before: the file's text; None if there is no file.

    Raises:
        PatchFormatError: the text does not match the section, or the section has no hunks because
            it moves or copies the file or the file is binary.
    """
    lines = section.text.split("\n")[:-1]
    head = next((k for k, line in enumerate(lines) if _HUNK.match(line)), None)
    if len(section.paths) != 1 or head is None or section.is_new is not (before is None):
        raise PatchFormatError(f"the section of {section.paths[0]} does more than change lines")
    old = re.findall(r"[^\n]*\n|[^\n]+", before or "")
    new: list[str] = []
    at = taken = 0
    for k, line in enumerate(lines[head:], head):
        if match := _HUNK.match(line) if not taken else None:
            num_old, num_new = (int(match.group(k) or 1) for k in (2, 4))
            first = int(match.group(1)) - (num_old > 0)
            if first < at:
                raise PatchFormatError(f"the hunks of {section.paths[0]} are out of order")
            new += old[at:first]
            at, taken = first, num_old + num_new
        elif not line.startswith("\\"):
            mark, content = line[:1] or " ", line[1:]
            if not lines[k + 1 : k + 2] or not lines[k + 1].startswith("\\"):
                content += "\n"
            if mark != "+":
                if old[at : at + 1] != [content]:
                    raise PatchFormatError(f"line {at + 1} of {section.paths[0]} differs")
                at += 1
            if mark != "-":
                new.append(content)
            taken -= 2 if mark == " " else 1
    new += old[at:]
    return None if lines[head - 1].startswith("+++ /dev/null") else "".join(new)


def _header_names(rest: str) -> tuple[str, ...]:
    """Returns both names of a `diff --git` line; () if only the rename lines below it can tell
    them apart."""
    if rest.startswith('"'):
        match = re.fullmatch(r'("(?:[^"\\]|\\.)*") ("(?:[^"\\]|\\.)*"|\S+)', rest)
        return (_unquote(match.group(1), 0), _unquote(match.group(2), 0)) if match else ()
    if match := re.fullmatch(r'(\S+) ("(?:[^"\\]|\\.)*")', rest):
        return match.group(1), _unquote(match.group(2), 0)
    if rest.count(" ") == 1:
        old, new = rest.split(" ")
        return old, new
    for match in re.finditer(" ", rest):
        old, new = rest[: match.start()], rest[match.end() :]
        if old.partition("/")[2] == new.partition("/")[2]:
            return old, new
    return ()


def _file_name(text: str, at: int) -> str | None:
    """Returns the name on a `---` or `+++` line; None for /dev/null."""
    # git writes a tab after a name that holds a blank, quoted or not.
    name = _unquote(text.rstrip("\t"), at) if text[:1] == '"' else text.partition("\t")[0]
    if name == "/dev/null" or re.match(r"/dev/null\s", name):
        return None
    return _checked(_strip(name, at), at)


def _skip_hunks(lines: list[str], at: int) -> int:
    """Returns the index of the line after the last hunk. Counts the lines of each hunk, so that
    nothing can hide between hunks."""
    num_hunks = 0
    while at < len(lines) and (head := _HUNK.match(lines[at])):
        num_old, num_new = (int(head.group(k)) if head.group(k) else 1 for k in (2, 4))
        at += 1
        num_hunks += 1
        while num_old > 0 or num_new > 0:
            if at >= len(lines):
                raise PatchFormatError("the last hunk is cut off")
            mark = lines[at][:1]
            if mark in (" ", ""):
                num_old, num_new = num_old - 1, num_new - 1
            elif mark == "-":
                num_old -= 1
            elif mark == "+":
                num_new -= 1
            elif mark != "\\":
                raise PatchFormatError(f"line {at + 1} does not belong to a hunk")
            if num_old < 0 or num_new < 0:
                raise PatchFormatError(f"the hunk at line {at + 1} is longer than its header says")
            at += 1
        while at < len(lines) and lines[at].startswith("\\"):
            at += 1
    if not num_hunks:
        raise PatchFormatError(f"line {at + 1} should start a hunk")
    return at


def _strip(name: str, at: int) -> str:
    """Removes a name's first part (`a/`, `b/`), as `git apply` and `patch` do with -p1."""
    _, slash, rest = name.partition("/")
    if not slash:
        raise PatchFormatError(f"line {at + 1}: the name {name!r} should start with a/ or b/")
    return rest


def _checked(path: str, at: int) -> str:
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") or part.lower() == ".git" for part in parts):
        raise PatchFormatError(f"line {at + 1}: the name {path!r} leads out of the repository")
    return path


def _unquote(text: str, at: int) -> str:
    """Returns the file name that git wrote, either plainly or in quotes with C's escapes."""
    if not text.startswith('"'):
        return text
    if len(text) < 2 or not text.endswith('"'):
        raise PatchFormatError(f"line {at + 1}: the quoted name is not closed")
    escapes = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
    raw = bytearray()
    inner = text[1:-1]
    for match in re.finditer(r"\\([0-7]{1,3})|\\(.)|([^\\]+)", inner, re.DOTALL):
        octal, escaped, plain = match.groups()
        if octal:
            raw.append(int(octal, 8) & 0xFF)
        else:
            raw += (plain or escapes.get(escaped, escaped)).encode()
    return raw.decode(errors="replace")
