"""Limits what an agent sees of a repository's history, and extracts what the agent changed.

Before an agent sees it, the repository is *scrubbed*. One branch at HEAD and the tags of its past
(from which some projects take their version) stay; other references, remotes, reflogs, objects that
neither reaches, and caches of package installers are removed. Then the state of the work tree is
*recorded* as a tree in a private repository. The agent's change is the difference from that tree,
taken with the private repository's index and configuration, so that nothing the agent did to `.git`
(commits, hooks, filters, external diff programs, excluded files) affects it.

The scripts run in the container under bash. Each fails if any of its commands fails.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePosixPath

from agentrl.env.container.programs import PROGRAM_PATH
from agentrl.errors import EnvError
from agentrl_swebench.containers import WORKDIR, InstanceContainer
from agentrl_swebench.diff import PatchFormatError, Section, parse_patch
from agentrl_swebench.policy import MAX_PATCH_BYTES

SCRUB_VERSION = 4
"""Part of a scrubbed image's tag; rises when the scripts change."""

SCRUB_TIMEOUT_S = 900.0
CHECK_TIMEOUT_S = 60.0
EXTRACT_TIMEOUT_S = 300.0
_MAX_DIFF_BYTES = 64 << 20
"""Number of bytes that are read of a difference, before files are left out."""

_STORE = "/var/lib/agentrl/base.git"

_GIT = (
    r"""
set -euo pipefail
unset $(compgen -e GIT_) BASH_ENV ENV 2>/dev/null || true
HOME=$(mktemp -d -p "${SCRATCH:-/tmp}"); export HOME GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1
export GIT_OPTIONAL_LOCKS=0 GIT_TERMINAL_PROMPT=0 LC_ALL=C
printf '%s\n' '[safe]' 'directory = *' '[core]' 'hooksPath = /dev/null' 'fsmonitor = false' \
    '[gc]' 'auto = 0' > "$HOME/.gitconfig"
cd """
    + f"{WORKDIR}\nSTORE={_STORE}\n"
)

_SCRUB = (
    _GIT
    + r"""
[ "$(stat -c %u .)" = 0 ] || chown -R 0:0 .
git rev-parse --show-toplevel | grep -qx "$PWD"
dir=$(git rev-parse --absolute-git-dir)
head=$(git rev-parse --verify 'HEAD^{commit}')
branch=$(git symbolic-ref -q HEAD || echo refs/heads/main)
for remote in $(git remote); do git remote remove "$remote"; done
git for-each-ref --merged "$head" --format='create %(refname) %(objectname)' refs/tags \
    > "$HOME/tags"
git update-ref --no-deref HEAD "$head"
git for-each-ref --format='delete %(refname)' | git update-ref --no-deref --stdin
rm -rf "$dir"/logs "$dir"/refs/original "$dir"/rr-cache "$dir"/worktrees "$dir"/sequencer \
    "$dir"/rebase-merge "$dir"/rebase-apply "$dir"/objects/info/commit-graph* \
    "$dir"/info/refs "$dir"/packed-refs
find "$dir" -maxdepth 1 -type f \( -name '*_HEAD' -o -name 'BISECT_*' -o -name '*MSG' \) -delete
git update-ref "$branch" "$head"
git symbolic-ref HEAD "$branch"
git update-ref --no-deref --stdin < "$HOME/tags"
git reset -q
rm -rf "$dir"/logs "$dir"/ORIG_HEAD
# git never drops an object of packs with these marks; the second one is a partial clone's.
find "$dir"/objects/pack \( -name '*.keep' -o -name '*.promisor' \) -delete
git config --unset extensions.partialClone || true
git repack -a -d -q -n
rm -f "$dir"/objects/info/alternates
git prune --expire=now
rm -rf /root/.cache/pip /root/.cache/uv /root/.cache/pypoetry
"""
)

_ASSERT_CHEAP = r"""
[ "$(git for-each-ref --format='%(refname)' | grep -cv '^refs/tags/')" = 1 ] \
    && [ -z "$(git for-each-ref --no-merged HEAD)" ] \
    || { echo 'other references are left' >&2; exit 3; }
[ -z "$(git remote)" ] || { echo 'a remote is left' >&2; exit 3; }
[ -z "$(git rev-list --all --reflog --not HEAD)" ] || { echo 'other commits are left' >&2; exit 3; }
dir=$(git rev-parse --absolute-git-dir)
[ ! -e "$dir"/logs ] || { echo 'a reflog is left' >&2; exit 3; }
"""

_ASSERT_ALL = (
    _ASSERT_CHEAP
    + r"""
git fsck --full --unreachable --no-reflogs --connectivity-only > "$HOME/fsck" 2>&1 \
    || { head -c 300 "$HOME/fsck" >&2; exit 3; }
! grep -q '^unreachable' "$HOME/fsck" || { echo 'unreachable objects are left' >&2; exit 3; }
"""
)

_RECORD = r"""
rm -rf "$STORE"
git init -q --bare "$STORE"
printf '%s\n' "$dir/objects" > "$STORE/objects/info/alternates"
export GIT_DIR="$STORE" GIT_WORK_TREE="$PWD" GIT_INDEX_FILE="$HOME/index"
git read-tree "$head"
git add -A
tree=$(git write-tree)
# With that tree's objects as its own: an agent may do to .git what it likes.
{ echo "$tree"; git ls-tree -r -t "$tree" | grep -v '^160000' | cut -d' ' -f3 | cut -f1; } \
    | git pack-objects -q "$STORE/objects/pack/pack" > /dev/null
rm "$STORE/objects/info/alternates"
git cat-file -e "$tree^{tree}"
printf '%s %s\n' "$head" "$tree"
rm -rf "$HOME"
"""

_CHECK = _GIT + _ASSERT_CHEAP + 'git rev-parse HEAD\nrm -rf "$HOME"\n'


_TOOLS_GONE, _BASE_GONE = 70, 71
"""Exit statuses for damage that only an agent can have done."""

_EXTRACT = (
    r"""
# Memory, since the disk may be full, and not by this agent.
SCRATCH=$2
for tool in git find sed grep mktemp; do command -v $tool > /dev/null || exit """
    + f"{_TOOLS_GONE}"
    + r"""; done
[ "$SCRATCH" != /dev/shm ] || find /dev/shm -mindepth 1 -delete || true
"""
    + _GIT
    + r"""
mkdir "$HOME/store" "$HOME/store/refs" "$HOME/store/info" "$HOME/store/objects"
mkdir "$HOME/store/objects/info"
echo 'ref: refs/heads/none' > "$HOME/store/HEAD"
printf '[core]\n\trepositoryformatversion = 0\n' > "$HOME/store/config"
printf '%s\n' "$STORE/objects" > "$HOME/store/objects/info/alternates"
export GIT_DIR="$HOME/store" GIT_WORK_TREE="$PWD" GIT_INDEX_FILE="$HOME/index"
git cat-file -e "$1^{tree}" || exit """
    + f"{_BASE_GONE}"
    + r"""
find . -path ./.git -prune -o -type d ! -perm -500 -exec chmod u+rx {} \; 2> /dev/null || true
find . -path ./.git -prune -o -type f ! -perm -400 -exec chmod u+r {} + 2> /dev/null || true
# A repository within the repository is added as a commit's name or not at all, so its files are
# made ordinary ones, unless it is a submodule of the project's.
{ git ls-tree -r -z "$1" | grep -z '^160000' | cut -z -f2; } > "$HOME/submodules" || true
find . -path ./.git -prune -o -name .git -prune -print0 | while IFS= read -r -d '' path; do
    parent=${path%/.git}
    grep -zqxF -- "${parent#./}" "$HOME/submodules" || rm -rf -- "$path"
done
# A new file that can't be part of a submission by its size alone. A tracked one stays.
find . -path ./.git -prune -o -type f -size +"$3"c -printf '/%P\n' \
    | sed 's/[][*?\\ !#]/\\&/g' > "$GIT_DIR/info/exclude"
[ "$4" = all ] || echo '*' > "$GIT_DIR/info/exclude"
git read-tree "$1"
git -c core.quotePath=false ls-files --others --ignored --exclude-from="$GIT_DIR/info/exclude" \
    --directory | sed 's/^/left out: /' >&2
printf '%s' "$5" > "$GIT_DIR/info/attributes"
git add -A --ignore-errors 2> "$HOME/errors" || grep -q 'can only add regular' "$HOME/errors" \
    || { head -c 300 "$HOME/errors" >&2; exit 72; }
git -c core.quotePath=true diff --cached --binary --full-index --no-color --no-ext-diff \
    --no-textconv --no-renames --src-prefix=a/ --dst-prefix=b/ "$1"
rm -rf "$HOME"
"""
)


@dataclass(slots=True, frozen=True)
class Base:
    """The state that an agent starts from."""

    commit: str
    tree: str
    """Tree of the work tree as the agent found it, untracked files included."""


@dataclass(slots=True, frozen=True)
class Extracted:
    patch: str
    problem: str = ""
    """Reason for which there is no patch; only for damage that the agent has certainly done."""
    left_out: tuple[str, ...] = ()
    """Files, or groups of files, that were left out because the change was too large."""


class ScrubError(Exception):
    """The history could not be scrubbed, or a part of it is left."""


async def scrub(container: InstanceContainer) -> Base:
    """Scrubs the repository, checks that no history is left, and records its state.

    Raises:
        ScrubError: this failed; the container must not be used.
        EnvError: the container or the engine failed.
    """
    script = _SCRUB + _ASSERT_ALL + _RECORD
    wrote = await container.script(script, timeout_s=SCRUB_TIMEOUT_S)
    words = wrote.output.decode(errors="replace").split()
    if wrote.exit_code != 0 or len(words) != 2:
        raise ScrubError(wrote.errors[-300:] or f"exit status {wrote.exit_code}")
    return Base(*words)


async def check_scrubbed(container: InstanceContainer, base: Base) -> None:
    """Checks, in the container that an agent is about to get, that the repository is at `base`
    and has no other branches, remotes or commits.

    Raises:
        ScrubError: the check failed; the container must not be used.
        EnvError: the container or the engine failed.
    """
    wrote = await container.script(_CHECK, timeout_s=CHECK_TIMEOUT_S)
    if wrote.exit_code != 0:
        raise ScrubError(wrote.errors[-300:] or f"exit status {wrote.exit_code}")
    if wrote.output.decode(errors="replace").strip() != base.commit:
        raise ScrubError(f"HEAD is not at {base.commit}")


async def extract(container: InstanceContainer, base: Base) -> Extracted:
    """Returns the agent's change as a patch for `git apply`. The agent's processes must have ended.

    From a change larger than MAX_PATCH_BYTES the largest groups of new files are left out, then the
    largest files, until it fits. Files that are not UTF-8 become git's binary patches.

    Raises:
        EnvError: the container or the engine failed, or the difference could not be taken for a
            reason that the agent may not have caused, such as a full disk or a slow machine.
    """
    output, problem, left_out = await _difference(container, base, attributes="")
    if problem:
        return Extracted("", problem)
    try:
        text = output.decode()
    except UnicodeDecodeError:
        # Take the difference once more and tell git that these files are binary.
        sections = _sections(output)
        attributes = "".join(
            f"{_as_pattern(each)} -diff\n" for each in sections if not _is_utf8(each)
        )
        output, problem, left_out = await _difference(container, base, attributes=attributes)
        text = output.decode(errors="replace")
    if len(output) <= MAX_PATCH_BYTES:
        return Extracted(text, problem, left_out)
    patch, cut = cut_to_size(parse_patch(text), MAX_PATCH_BYTES)
    return Extracted(patch, problem, (*left_out, *cut))


async def _difference(
    container: InstanceContainer, base: Base, *, attributes: str
) -> tuple[bytes, str, tuple[str, ...]]:
    """Returns the patch, the reason if the agent made it impossible, and the new files that were
    left out because each is too large by itself."""
    errors = ""
    if len(attributes) > 100_000:  # longer than a command's argument may be
        attributes = "* -diff\n"
    # In memory first, because the disk may be full; then on the disk, because /dev/shm is small.
    for scratch, which in (("/dev/shm", "all"), ("/tmp", "all"), ("/tmp", "tracked")):
        wrote = await container.script(
            _EXTRACT,
            base.tree,
            scratch,
            str(MAX_PATCH_BYTES),
            which,
            attributes,
            timeout_s=EXTRACT_TIMEOUT_S,
            max_bytes=_MAX_DIFF_BYTES,
        )
        if wrote.exit_code == 0:
            lines = wrote.errors.splitlines()
            left_out = [line[10:] for line in lines if line.startswith("left out: ")]
            return wrote.output, "", tuple(left_out)
        if wrote.exit_code in (_TOOLS_GONE, 126, 127):
            return b"", "the agent removed the programs that take the difference", ()
        if wrote.exit_code == _BASE_GONE:
            return b"", "the agent removed the repository's first state", ()
        errors = wrote.errors[-300:] or (
            f"more than {_MAX_DIFF_BYTES:,} bytes" if wrote.flooded else "it took too long"
        )
    # As the engine lists it, since no program in the container can be trusted.
    if changed := [path for path in await container.changes() if PROGRAM_PATH.fullmatch(path)]:
        return b"", f"the agent changed the programs that take the difference ({changed[0]})", ()
    raise EnvError(f"git could not take the difference: {errors}", code="extract_failed")


def cut_to_size(sections: list[Section], max_bytes: int) -> tuple[str, tuple[str, ...]]:
    """Cuts a patch to `max_bytes`; returns it and the names of what was left out.

    Leaves out whole groups of new files first (of one folder and one suffix, as programs leave them
    behind), the largest first, and then the largest changes of existing files.
    """
    groups: dict[str, list[Section]] = defaultdict(list)
    for section in sections:
        path = PurePosixPath(section.paths[-1])
        is_group = section.is_new and path.suffix
        groups[f"{path.parent}/*{path.suffix}" if is_group else str(path)].append(section)
    sizes = {name: sum(len(each.text.encode()) for each in group) for name, group in groups.items()}
    order = sorted(groups, key=lambda name: (not groups[name][0].is_new, -sizes[name]))
    total = sum(sizes.values())
    cut: set[str] = set()
    for name in order:
        if total <= max_bytes:
            break
        total -= sizes[name]
        cut.add(name)
    kept = [each.text for name, group in groups.items() if name not in cut for each in group]
    return "".join(kept), tuple(sorted(cut))


def _sections(output: bytes) -> list[Section]:
    try:
        return parse_patch(output.decode("latin-1"))  # any bytes, one character each
    except PatchFormatError as error:
        raise EnvError(f"git wrote a difference that can't be read: {error}") from error


def _is_utf8(section: Section) -> bool:
    try:
        section.text.encode("latin-1").decode()
    except UnicodeDecodeError:
        return False
    return True


def _as_pattern(section: Section) -> str:
    """Returns the file's name for a line of git's attributes: quoted as in the patch, with the
    special characters of patterns escaped."""
    head = section.text.partition("\n")[0].removeprefix("diff --git ")
    quoted = re.match(r'"a/((?:[^"\\]|\\.)*)"', head)
    name = quoted.group(1) if quoted else section.paths[-1]
    name = re.sub(r"[*?\[]", r"\\\\\g<0>", name)
    return f'"/{name}"'
