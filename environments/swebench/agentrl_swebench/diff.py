"""Parses patches as `git apply` and `patch -p1` do: what git writes, and plain unified diffs.

Text around the sections is left out: a mail's header, a signature, the fences of Markdown. A patch
is refused if those programs might find a change in such text, so that its sections are all that
they apply.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEADER_LINE = re.compile(
    r"(?:old mode|new mode|deleted file mode|new file mode|copy from|copy to|rename from|rename to"
    r"|similarity index|dissimilarity index|index|Binary files) "
)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_BINARY_LINE = re.compile(
    r"(?:(?:literal|delta) \d+|[A-Za-z][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]+|)\r?"
)
_HIDDEN_CHANGE = re.compile(
    r"[-X \t]*(?:@@ -|(?:---|\+\+\+|\*\*\*) |diff --git |\d+(?:,\d+)?[acds](?:\d+(?:,\d+)?)?\s*$)"
)
"""A line outside of the sections in which `patch` may find a name or a hunk: of an indented patch,
or of a context, normal or ed diff."""


class PatchFormatError(ValueError):
    """The text is not a patch, or holds changes that can't be attributed to a file."""


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
        PatchFormatError: there is no section in a text that is not blank, text outside of the
            sections may change a file, a hunk's length differs from its header, or a name leads out
            of the repository.
    """
    lines = patch.removeprefix("\ufeff").removesuffix("\n").split("\n")
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip(" \t"))]
    if all(line.startswith(indent) or not line.strip() for line in lines):
        lines = [line.removeprefix(indent) for line in lines]
    sections: list[Section] = []
    is_bare = False
    at = 0
    while at < len(lines):
        is_git = lines[at].startswith("diff --git ")
        if not is_git and not _names_file(lines, at):
            if _HIDDEN_CHANGE.match(lines[at]):
                raise PatchFormatError(f"line {at + 1} may change a file but belongs to none")
            at += 1
            continue
        if not is_git and any("\n@@ " not in each.text for each in sections):
            raise PatchFormatError(f"line {at + 1} may belong to a section above without hunks")
        names = [re.sub("^/dev/null", "", line[4:]) for line in lines[at : at + 2]]
        if not is_git and "/" not in "".join(names):
            # `git apply` takes these names, and all that follow, without removing a first part.
            is_bare = True
            for k in (at, at + 1):
                lines[k] = re.sub(r'^(.{4}"?)(?!/dev/null)', r"\1a/", lines[k])
        elif is_bare:
            raise PatchFormatError(f"line {at + 1}: the names above have no a/ or b/, this one has")
        section, at = _section(lines, at)
        sections.append(section)
    if not sections and patch.strip():
        raise PatchFormatError("no line names a file to change")
    return sections


def _section(lines: list[str], start: int) -> tuple[Section, int]:
    """Returns the section that starts at a line, and the index of the line after it."""
    at = start
    paths: list[str] = []
    header_names: tuple[str, ...] = ()
    is_new = False
    if lines[at].startswith("diff --git "):
        header_names = _header_names(lines[at].rstrip("\r")[len("diff --git ") :])
        at += 1
        while at < len(lines) and _HEADER_LINE.match(lines[at]):
            line = lines[at].rstrip("\r")
            is_new = is_new or line.startswith(("new file mode", "rename to", "copy to"))
            if match := re.match(r"(?:rename|copy) (?:from|to) (.*)", line):
                paths.append(_checked(_unquote(match.group(1), at), at))
            at += 1
    text = lines[start:at]
    if is_incomplete := all(line.startswith(("diff --git ", "index ")) for line in text):
        at = _after_blanks(lines, at)  # as `patch` does, also above the hunks
    if names_file := _names_file(lines, at):
        old, new = (_file_name(lines[at + k].rstrip("\r")[4:], at + k) for k in (0, 1))
        is_new = is_new or old is None
        if text and new is None and not any(line.startswith("deleted file") for line in text):
            header_names = ("a/dev/null", *header_names)  # `git apply` creates it
        paths += [name for name in (old, new) if name is not None]
        text += lines[at : at + 2]
        at = _after_blanks(lines, at + 2)
    if names_file or (at < len(lines) and _HUNK.match(lines[at])):
        hunks, at = _hunks(lines, at)
        text += hunks
    elif at < len(lines) and lines[at].rstrip("\r") == "GIT binary patch":
        first = at
        at += 1
        while at < len(lines) and _BINARY_LINE.fullmatch(lines[at]):
            at += 1
        text += lines[first:at]
    elif is_incomplete:
        raise PatchFormatError(f"the section at line {start + 1} changes nothing")
    paths = [*(_checked(_strip(name, start), start) for name in header_names), *paths]
    if not paths:
        raise PatchFormatError(f"the section at line {start + 1} names no file")
    return Section(tuple(dict.fromkeys(paths)), is_new, "\n".join(text) + "\n"), at


def _after_blanks(lines: list[str], at: int) -> int:
    while at < len(lines) and not lines[at].strip():
        at += 1
    return at


def _names_file(lines: list[str], at: int) -> bool:
    pair = lines[at : at + 2]
    return len(pair) == 2 and pair[0].startswith("--- ") and pair[1].startswith("+++ ")


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


def _hunks(lines: list[str], at: int) -> tuple[list[str], int]:
    """Returns the lines of a section's hunks, and the index of the line after them. Counts the
    lines of each hunk, as `git apply` and `patch` do, so that nothing can hide between hunks."""
    taken: list[str] = []
    while at < len(lines) and (head := _HUNK.match(lines[at])):
        first_old, first_new = head.group(1), head.group(3)
        num_old, num_new = (int(head.group(k) or 1) for k in (2, 4))
        left_old, left_new = num_old, num_new
        start = at
        at += 1
        while (left_old > 0 or left_new > 0) and at < len(lines):
            mark = lines[at].rstrip("\r")[:1] or " "
            if mark not in " +-\\":
                raise PatchFormatError(f"line {at + 1} does not belong to a hunk")
            left_old -= mark in " -"
            left_new -= mark in " +"
            if left_old < 0 or left_new < 0:
                raise PatchFormatError(f"the hunk at line {at + 1} is longer than its header says")
            at += 1
        if left_old != left_new:
            raise PatchFormatError("the last hunk is cut off")
        if left_old:  # `patch` supposes that context is missing at the end
            counts = f"-{first_old},{num_old - left_old} +{first_new},{num_new - left_new}"
            lines[start] = f"@@ {counts} @@{lines[start][head.end() :]}"
        while at < len(lines) and lines[at].startswith("\\"):
            at += 1
        taken += lines[start:at]
        # Context beyond the header's count: `git apply` and `patch` leave it out.
        while (
            at < len(lines)
            and lines[at].rstrip("\r")[:1] in ("", " ")
            and not _HIDDEN_CHANGE.match(lines[at])
        ):
            at += 1
        if at < len(lines) and re.match(r"\+|-(?!-)", lines[at]):
            raise PatchFormatError(f"the hunk at line {start + 1} is longer than its header says")
    if not taken:
        raise PatchFormatError(f"line {at + 1} should start a hunk")
    return taken, at


def _strip(name: str, at: int) -> str:
    """Removes a name's first part (`a/`, `b/`), as `git apply` and `patch` do with -p1."""
    _, slash, rest = name.partition("/")
    if not slash:
        raise PatchFormatError(f"line {at + 1}: the name {name!r} should start with a/ or b/")
    return rest


def _checked(path: str, at: int) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or any(part == ".." or part.lower() == ".git" for part in parts):
        raise PatchFormatError(f"line {at + 1}: the name {path!r} leads out of the repository")
    return "/".join(parts)


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
