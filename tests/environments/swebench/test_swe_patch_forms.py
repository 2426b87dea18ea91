"""Patches in the forms that people bring, compared with what the official harness' commands make of
them in a real repository."""

import os
import random
import re
import shutil
import subprocess

import pytest
from patches import file_diff
from swe_rows import instance_of

from agentrl_swebench.diff import parse_patch
from agentrl_swebench.policy import make_submission

pytestmark = pytest.mark.skipif(
    not (shutil.which("git") and shutil.which("patch")), reason="git or patch is not installed"
)

COMMANDS = (
    "git apply --verbose",
    "git apply --verbose --3way",
    "git apply --verbose --reject",
    "patch --batch --forward --fuzz=5 -p1 -i",
)
"""The harness' own, in its order."""

CORE = "".join(f"line {k}\n" for k in range(1, 21)).replace("line 3\n", "\n")
EDITED = CORE.replace("line 2\n", "line two\n").replace("line 15\n", "line 15\nline new\n")
FILES = {"src/core.py": CORE, "top.py": CORE, "a b.py": CORE, "conftest.py": "a\n", "run.sh": "x\n"}
INSTANCE = instance_of()


class Repository:
    def __init__(self, folder):
        self.folder = folder
        for name, text in FILES.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        self.run("git init -q && git add -A && git commit -qm base && git tag base")

    def run(self, command):
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder.parent),
            "GIT_CONFIG_NOSYSTEM": "1",
            **{f"GIT_{who}_NAME": "a" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "a@b" for who in ("AUTHOR", "COMMITTER")},
        }
        quiet = {"capture_output": True, "stdin": subprocess.DEVNULL}
        return subprocess.run(command, cwd=self.folder, env=environment, shell=True, **quiet)

    def tree(self):
        """Returns each file's content and whether it is a program."""
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        return {
            str(file.relative_to(self.folder)): (file.read_bytes(), bool(file.stat().st_mode & 64))
            for file in files
            if ".git" not in file.parts and file.suffix not in (".orig", ".rej")
        }

    def apply(self, patch):
        """Returns the files that the harness changes with a patch, by name; None if no command
        takes it."""
        file = self.folder.parent / "patch.diff"
        file.write_bytes(patch.encode())
        for command in COMMANDS:
            self.run("git reset -q --hard base; git clean -qfdx")
            before = self.tree()
            if self.run(f"{command} {file}").returncode == 0:
                after = self.tree()
                return {n: after.get(n) for n in before | after if before.get(n) != after.get(n)}
        return None

    def made(self, change, diff="git diff --cached"):
        self.run(f"git reset -q --hard base; git clean -qfdx; {change}; git add -A")
        if "format-patch" in diff:
            self.run("git commit -qm 'Mend it\n\nA body with - and + at 1c1.'")
        return self.run(diff).stdout.decode()

    def edited(self, *names, diff="git diff --cached"):
        edit = "sed -i -e 's/^line 2$/line two/' -e '/^line 15$/a line new'"
        return self.made(edit + "".join(f" '{name}'" for name in names), diff)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms") / "repository"
    folder.mkdir()
    return Repository(folder)


def plain(patch):
    return re.sub(r"(?m)^(diff|index|new|deleted) .*\n", "", patch)


MAIL = "git format-patch -1 --stdout"
STAMP = "2024-01-02 03:04:05.000000000 +0000"
FENCE = "```"


def renamed(patch, old, new):
    return re.sub(rf"(?m)^((?:---|\+\+\+) )[ab]/{old}", rf"\1{new}", patch)


def recounted(patch, old, new, *, hunk):
    """Changes the counts of one hunk's header."""
    heads = list(re.finditer(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@", patch))
    at = heads[hunk]
    first_old, num_old, first_new, num_new = map(int, at.groups())
    head = f"@@ -{first_old},{num_old + old} +{first_new},{num_new + new} @@"
    return patch[: at.start()] + head + patch[at.end() :]


FORMS = {
    "git": lambda r: r.edited("src/core.py"),
    "unified": lambda r: plain(r.edited("src/core.py", "top.py")),
    "format-patch": lambda r: r.edited("src/core.py", "top.py", diff=MAIL),
    "format-patch of a new file": lambda r: r.made("echo x > src/new.py", MAIL),
    "format-patch of a deletion": lambda r: r.made("rm run.sh", MAIL),
    "format-patch of a rename": lambda r: r.made("mv src/core.py src/moved.py", MAIL),
    "format-patch of a mode": lambda r: r.made("chmod +x run.sh", MAIL),
    "two mails": lambda r: r.edited("src/core.py", diff=MAIL) + r.made("chmod +x run.sh", MAIL),
    "svn": lambda r: "Index: src/core.py\n" + "=" * 67 + "\n" + plain(r.edited("src/core.py")),
    "svn at the root": lambda r: "Index: top.py\n" + "=" * 67 + "\n"
    + renamed(plain(r.edited("top.py")), "top.py", "top.py\t(revision 1)"),
    "no prefix at the root": lambda r: renamed(plain(r.edited("top.py")), "top.py", "top.py"),
    "no prefix at the root, last": lambda r: plain(r.edited("src/core.py"))
    + renamed(plain(r.edited("top.py")), "top.py", "top.py"),
    "no prefix, new at the root": lambda r: plain(r.made("echo x > new.py")).replace("b/", ""),
    "hg": lambda r: "# HG changeset patch\n# User a\n\nMend\n\ndiff -r 1 -r 2 src/core.py\n"
    + plain(r.edited("src/core.py")),
    "bzr": lambda r: "=== modified file 'src/core.py'\n" + plain(r.edited("src/core.py")),
    "diff -ruN": lambda r: "diff -ruN a/src/core.py b/src/core.py\nOnly in b: c\n"
    + plain(r.edited("src/core.py")),
    "byte order mark": lambda r: "\ufeff" + r.edited("src/core.py", "top.py"),
    "byte order mark, unified": lambda r: "\ufeff" + plain(r.edited("src/core.py", "top.py")),
    "byte order mark, new file": lambda r: "\ufeff" + r.made("echo x > src/new.py"),
    "fence": lambda r: f"{FENCE}diff\n{r.edited('src/core.py')}{FENCE}\n",
    "fences and prose": lambda r: f"I did:\n\n{FENCE}diff\n{r.edited('src/core.py')}{FENCE}\n"
    f"- and\n{FENCE}\n{r.edited('top.py')}{FENCE}",
    "tags": lambda r: f"<patch>\n{r.edited('src/core.py')}</patch>\n",
    "prose": lambda r: f"From: me\n---\nI did it.\n{r.edited('src/core.py')}\nThat is all.\n",
    "./ for a/": lambda r: renamed(plain(r.edited("src/core.py")), "src", "./src"),
    "a/./": lambda r: renamed(plain(r.edited("src/core.py")), "src", "a/./src"),
    "a/./, git": lambda r: r.edited("src/core.py").replace("/src/", "/./src/"),
    "a//": lambda r: r.edited("src/core.py").replace("/src/", "//src//"),
    "other prefixes": lambda r: r.edited(
        "src/core.py", diff="git diff --cached --src-prefix=i/ --dst-prefix=w/"
    ),
    "--no-prefix, new file": lambda r: r.made(
        "echo x > src/new.py", "git diff --cached --no-prefix"
    ),
    "no diff --git, index kept": lambda r: re.sub("(?m)^diff .*\n", "", r.edited("src/core.py")),
    "no names": lambda r: re.sub(r"(?m)^(---|\+\+\+) .*\n", "", r.edited("src/core.py")),
    "CRLF": lambda r: r.edited("src/core.py").replace("\n", "\r\n"),
    "CRLF, unified": lambda r: plain(r.edited("src/core.py")).replace("\n", "\r\n"),
    "CRLF, new file": lambda r: r.made("echo x > src/new.py").replace("\n", "\r\n"),
    "CRLF, mail": lambda r: r.edited("src/core.py", diff=MAIL).replace("\n", "\r\n"),
    "CRLF, mode": lambda r: r.made("chmod +x run.sh").replace("\n", "\r\n"),
    "no last newline": lambda r: r.edited("src/core.py").rstrip(),
    "tab and time": lambda r: renamed(
        plain(r.edited("src/core.py")), "src/core.py", f"a/src/core.py\t{STAMP}"
    ),
    "space and time": lambda r: renamed(
        plain(r.edited("src/core.py")), "src/core.py", f"a/src/core.py {STAMP}"
    ),
    "new by its time": lambda r: plain(r.made("echo x > src/new.py")).replace(
        "/dev/null", "a/src/new.py\t1970-01-01 00:00:00 +0000"
    ),
    "quoted": lambda r: renamed(plain(r.edited("src/core.py")), "src/core.py", '"a/src/core.py"'),
    "name with a blank": lambda r: r.edited("a b.py"),
    "name with a blank, unified": lambda r: plain(r.edited("a b.py")),
    "mode": lambda r: r.made("chmod +x run.sh"),
    "rename": lambda r: r.made("git mv src/core.py src/moved.py"),
    "empty file": lambda r: r.made("touch src/empty.py"),
    "no newline at the end": lambda r: r.made("printf y > run.sh"),
    "context without its space": lambda r: re.sub(r"(?m)^ $", "", r.edited("src/core.py")),
    "indented": lambda r: re.sub("(?m)^", "    ", r.edited("src/core.py")),
    "blank lines": lambda r: r.edited("src/core.py").replace("\n---", "\n\n---").replace(
        "core.py\n@@", "core.py\n\n@@"
    ),
    "wrong line numbers": lambda r: re.sub(r"@@ -\d", "@@ -9", r.edited("src/core.py")),
    "context beyond the count": lambda r: recounted(r.edited("src/core.py"), -1, -1, hunk=1),
    "context beyond the count, two": lambda r: recounted(
        r.edited("src/core.py", "top.py"), -2, -2, hunk=3
    ),
    "count beyond the end": lambda r: recounted(r.edited("src/core.py"), 1, 1, hunk=1),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_the_harness_takes_is_read_as_the_harness_reads_it(repository, form):
    patch = FORMS[form](repository)
    official = repository.apply(patch)
    assert official
    submission = make_submission(INSTANCE, patch, "strict")
    assert (submission.dropped, submission.refused) == ((), "")
    assert repository.apply(submission.patch) == official
    # A section about a protected file is left out of any form, whatever is around it.
    hidden = file_diff("conftest.py", "a\n", "b\n")
    for both in (hidden + patch.removeprefix("\ufeff"), patch + "\n" + hidden):
        submission = make_submission(INSTANCE, both, "strict")
        kept = (repository.apply(submission.patch) if submission.patch else None) or {}
        assert submission.refused or [name for name, _ in submission.dropped] == ["conftest.py"]
        assert "conftest.py" not in kept


@pytest.mark.parametrize(
    "change", ["echo x > src/new.py", "mv src/core.py src/moved.py", "chmod +x run.sh"]
)
def test_what_no_command_takes_for_its_form_is_read_as_it_was_meant(repository, change):
    patch = repository.made(change)
    meant = repository.apply(patch)
    for form in ("\ufeff" + patch, patch.removesuffix("\n")):
        submission = make_submission(INSTANCE, form, "strict")
        assert repository.apply(submission.patch) == meant


def test_no_line_is_lost_where_a_count_is_too_small(repository):
    patch = repository.edited("src/core.py")
    meant = repository.apply(patch)
    for hunk in (0, 1):
        for less in range(1, 6):
            altered = recounted(patch, -less, -less, hunk=hunk)
            submission = make_submission(INSTANCE, altered, "strict")
            assert submission.refused or repository.apply(submission.patch) == meant


def names(patch):
    """Returns the names that the policy judges: also those that end at a blank."""
    paths = [path for each in parse_patch(patch) for path in each.paths]
    return {*paths, *(path.split(" ")[0] for path in paths)}


NUM_READ = 40


@pytest.mark.parametrize("part", range(3))
def test_no_file_is_changed_that_was_not_judged(repository, part):
    """Puts together pieces of patches at random, with lines lost, doubled and altered."""
    r = repository
    mine = [form(r) for form in FORMS.values()]
    theirs = [
        r.made(change, diff)
        for change in ("echo b > conftest.py", "echo > json.py", "mkdir tests; echo > tests/x.py")
        for diff in ("git diff --cached", MAIL, "git diff --cached --no-prefix")
    ]
    theirs += [plain(each) for each in theirs]
    lines = [
        "--- a/conftest.py\n",
        "+++ b/conftest.py\n",
        "*** a/conftest.py\n",
        "Index: conftest.py\n",
        "Index: a/conftest.py\n1c1\n< a\n---\n> b\n",
        "@@ -1 +1 @@\n-a\n+b\n",
        "@@ -1,0 +1 @@\n+b\n",
        "diff --git a/conftest.py b/conftest.py\n",
        "rename from conftest.py\n",
        "rename to json.py\n",
        "new file mode 100644\n",
        "deleted file mode 100644\n",
        "index 1..2 100644\n",
        "--- /dev/null\n",
        "\n",
        " \n",
        FENCE + "\n",
        "\\ No newline at end of file\n",
    ]
    choose = random.Random(part)
    num_read = 0
    while num_read < NUM_READ:
        pieces = [choose.choice(choose.choice((mine, theirs, lines))) for _ in range(3)]
        text = "".join(pieces).splitlines(keepends=True)
        for _ in range(choose.randrange(4)):
            at = choose.randrange(len(text))
            text[at : at + 1] = choose.choice(
                (
                    [],
                    [text[at]] * 2,
                    [choose.choice(lines), text[at]],
                    [choose.choice(" \t-+") + text[at]],
                    [text[at][1:]],
                    [text[at].replace("a/", "", 1)],
                    [text[at].replace("b/", "./", 1)],
                    [text[at].replace("\n", "\r\n")],
                    [text[at].replace("\n", f" {STAMP}\n")],
                    [re.sub(r",(\d)", lambda found: f",{int(found[1]) - 1}", text[at])],
                )
            ) or ["\n"]
        patch = "".join(text)
        submission = make_submission(INSTANCE, patch, "strict")
        if submission.refused:
            continue
        num_read += 1
        judged, kept = names(patch), names(submission.patch)
        assert (repository.apply(patch) or {}).keys() <= judged, patch
        changed = (repository.apply(submission.patch) or {}).keys() if submission.patch else set()
        assert changed <= kept, patch
        assert not any(re.match("conftest.py|json.py|tests/", path) for path in changed), patch
