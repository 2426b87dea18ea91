"""The submission policy: what is dropped, what is exempt, and that nothing passes unread."""

import difflib
import os
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patches import file_diff
from swe_rows import instance_of

from agentrl_swebench.diff import PatchFormatError, parse_patch
from agentrl_swebench.policy import MAX_PATCH_BYTES, make_submission


def submitted(model_patch, policy="strict", **instance):
    return make_submission(instance_of(**instance), model_patch, policy)


def dropped(path, **values):
    submission = submitted(file_diff(path, None, "x = 1\n"), **values)
    return [name for name, _ in submission.dropped]


DECIDE = """
conftest.py src/b/conftest.py tests/test_core.py src/b/tests/helper.py test/support.py
src/b/core_test.py src/b/tests.py lib/thing.test.ts pkg/thing_test.go __tests__/a.js pytest.ini
.pytest.ini tox.ini setup.cfg setup.py pyproject.toml package.json jest.config.js
sitecustomize.py src/usercustomize.py evil.pth pytest.py _pytest/runner.py src/pluggy.py json.py
unittest/__init__.py evil-1.0.dist-info/entry_points.txt evil.egg-info/entry_points.txt
checks/hidden.py checks/verify.py
"""


@pytest.mark.parametrize("path", DECIDE.split())
def test_files_that_decide_about_tests_are_dropped(path):
    assert dropped(path) == [path]


SOURCE = """
src/b/core.py src/b/json.py src/b/latest.py src/b/contest.py src/b/testing/tools.py
django/test/client.py docs/changes.md README Makefile src/b/attestation.py unittest.md
html/index.html lib/types/Units.pm src/queue/mod.rs src/b/test_utils.py
"""


@pytest.mark.parametrize("path", SOURCE.split())
def test_source_is_kept(path):
    patch = file_diff(path, None, "x = 1\n")
    submission = submitted(patch)
    assert (submission.patch, submission.dropped) == (patch, ())


def test_makefile_is_dropped_where_it_builds_what_is_tested():
    assert dropped("Makefile", eval_script="make\npytest -rA a.py\n") == ["Makefile"]


SHIPPED = """
pandas/_testing/asserters.py numpy/testing/_private/utils.py xarray/testing/assertions.py
xarray/testing.py django/test/testcases.py sklearn/utils/_testing.py src/b/test_utils.py
"""


@pytest.mark.parametrize("path", SHIPPED.split())
def test_assertions_that_a_project_ships_are_dropped_unless_the_reference_edits_them(path):
    patch = file_diff(path, "a\n", "b\n")
    assert submitted(patch).dropped == ((path, "assertion helper"),)
    assert submitted(patch, patch=patch).patch == patch
    shadow = f"{path.removesuffix('.py')}/__init__.py"
    if path.endswith("_testing.py"):
        assert dropped(shadow) == [shadow]


MAKE = (
    "CFLAGS ?= -O1\n\nlib.so: src/a.c\n\t$(CC) $(CFLAGS) -shared -o $@ src/a.c\n\nclean:\n\trm x\n"
)
MAKES = "make\npip install -e .\npytest -rA a.py\n"
SETUP = "from setuptools import setup\n\nsetup(\n    name='b',\n    packages=['b'],\n)\n"


@pytest.mark.parametrize(
    ("path", "before", "old", "new"),
    [
        ("Makefile", MAKE, "src/a.c", "src/a.c src/b.c"),
        ("Makefile", MAKE, "CFLAGS ?=", "SRCS = src/a.c src/b.c\nCFLAGS ?="),
        ("setup.py", SETUP, "['b']", "['b', 'b.sub']"),
        ("setup.py", SETUP, "['b'],", '["b"],\n    package_data={"b": ["data/*.txt"]},'),
        ("setup.py", SETUP, "['b'],", "[\n        'b',\n        'b.sub',\n    ],"),
    ],
)
def test_a_build_file_may_name_new_sources(path, before, old, new):
    patch = file_diff(path, before, before.replace(old, new))
    submission = submitted(patch, eval_script=MAKES)
    assert (submission.patch, submission.dropped) == (patch, ())


@pytest.mark.parametrize(
    ("path", "before", "old", "new"),
    [
        ("Makefile", MAKE, "CFLAGS ?=", "OBJ = $(foreach x,a,$(shell cp a b))\nCFLAGS ?="),
        ("Makefile", MAKE, "rm x", "cp forge.py conftest.py"),
        ("Makefile", MAKE, "lib.so: src/a.c", "lib.so: src/a.c; cp a b"),
        ("Makefile", MAKE, "CFLAGS ?=", "SRC = $(shell cp a b)\nCFLAGS ?="),
        ("Makefile", MAKE, "-shared", "-shared -fplugin=./x.so"),
        ("Makefile", MAKE, "CFLAGS ?=", "CC = ./forge\nCFLAGS ?="),
        ("Makefile", MAKE, "CFLAGS ?=", "include forge.mk\nCFLAGS ?="),
        ("setup.py", SETUP, "['b']", "[open('x', 'w') and 'b']"),
        ("setup.py", SETUP, "name='b'", "name='b', entry_points={'pytest11': ['x = b']}"),
        ("setup.py", SETUP, "    name", "    entry_points={'pytest11': ['x = b']},\n    name"),
        ("setup.py", SETUP, "['b']", "['b', 'b = c']"),
        ("setup.py", SETUP, "\n\nsetup", "\nimport forge\n\nsetup"),
    ],
)
def test_a_build_file_that_does_more_is_dropped(path, before, old, new):
    patch = file_diff(path, before, before.replace(old, new))
    assert patch.count("\n+") > 1
    submission = submitted(patch, eval_script=MAKES)
    assert [name for name, _ in submission.dropped] == [path]


def test_a_mark_in_an_added_comment_is_defused_and_elsewhere_refused():
    mark = ">>>>> Start Test Output"
    patch = file_diff("src/b/log.py", "a\n", f"a\n    # The log has '{mark}'.\nb\n")
    submission = submitted(patch)
    assert submission.patch == patch.replace(">>>>> ", ">>>> ") and not submission.refused
    assert parse_patch(submission.patch)
    for line in (f"print('{mark}')", f"x = 1  # {mark}", f"# {mark} {mark}\nprint('{mark}')"):
        patch = file_diff("src/b/log.py", "a\n", f"a\n{line}\n")
        assert "marks" in submitted(patch).refused


def test_existing_module_with_a_standard_name_is_source():
    patch = file_diff("json.py", "a\n", "b\n")
    assert submitted(patch).patch == patch


def test_the_product_may_be_a_testing_module():
    gold = file_diff("src/_pytest/runner.py", "a\n", "b\n")
    patch = file_diff("src/_pytest/added.py", None, "x = 1\n")
    assert submitted(patch, patch=gold).patch == patch
    assert dropped("src/_pytest/added.py") == ["src/_pytest/added.py"]


@pytest.mark.parametrize("path", ["setup.cfg", "tests/helper.py", "conftest.py"])
def test_what_the_reference_solution_edits_is_exempt(path):
    gold = file_diff(path, "a\n", "b\n")
    patch = file_diff(path, "a\n", "c\n")
    assert submitted(patch, patch=gold).patch == patch


def test_only_forbidden_files_is_a_refusal_and_official_takes_all():
    patch = file_diff("conftest.py", None, "x = 1\n")
    strict = submitted(patch)
    assert strict.patch == "" and "none of the 1 changed files" in strict.refused
    assert submitted(patch, "official").patch == patch


def test_kept_and_dropped_parts_are_separated():
    good = file_diff("src/b/core.py", "a\n", "b\n")
    bad = file_diff("conftest.py", None, "x = 1\n")
    submission = submitted(bad + good + bad)
    assert submission.patch == good
    assert [path for path, _ in submission.dropped] == ["conftest.py", "conftest.py"]


@pytest.mark.parametrize("blank", ["", "\n", "  \n\n"])
def test_nothing_is_nothing(blank):
    submission = submitted(blank)
    assert (submission.patch, submission.refused) == ("", "")


HIDDEN = "--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x = 1\n"
GOOD = file_diff("src/b/core.py", "a\n", "b\n")


@pytest.mark.parametrize(
    "patch",
    [
        "Here is my fix.\n",
        GOOD + "*** a/x\n--- b/conftest.py\n",
        GOOD + "Index: conftest.py\n@@ -0,0 +1 @@\n+x = 1\n",
        GOOD + "Index: conftest.py\n1c1\n< a\n---\n> b\n",
        GOOD + "Index: conftest.py\n1d\n",
        GOOD + HIDDEN.replace("--- ", " --- ").replace("+++ ", " +++ ").replace("@@ -", " @@ -"),
        "diff --git a/x b/y\nrename from x\nrename to y\n+++ b/conftest.py\n",
        GOOD.replace("@@ -1 +1 @@", "@@ -1,9 +1,8 @@"),
        GOOD.replace("@@ -1 +1 @@", "@@ -1 +1,0 @@"),
        GOOD.replace("src/b/core.py", "../conftest.py"),
        GOOD.replace("src/b/core.py", ".git/hooks/x"),
        "diff --git conftest.py conftest.py\n" + HIDDEN.replace("b/", ""),
        "--- core.py\n+++ core.py\n@@ -1 +1 @@\n-a\n+b\n" + HIDDEN.replace("b/", "test/"),
        "diff --git a/x b/x\n--- a/x\n@@ -1 +1 @@\n-a\n+b\n",
        "diff --git a/x b/x\n--- a/x\n+++ b/x\n",
        "diff --git a/x b/x\nindex 1..2\n" + GOOD,
        "\udcff" + GOOD,
        GOOD + "x" * MAX_PATCH_BYTES,
    ],
)
def test_what_may_change_a_file_unseen_is_refused(patch):
    submission = submitted(patch)
    assert submission.patch == "" and submission.refused


@pytest.mark.parametrize(
    "hidden",
    [
        HIDDEN,
        HIDDEN.replace("b/conftest.py", "b/conftest.py\t2024-01-01"),
        HIDDEN.replace("b/conftest.py", "b/conftest.py 2024-01-01 12:00"),
        HIDDEN.replace("b/conftest.py", '"b/conftes\\164.py"'),
        HIDDEN.replace("b/conftest.py", "other/conftest.py"),
        HIDDEN.replace("b/conftest.py", "b/.//conftest.py"),
        HIDDEN.replace("\n", "\r\n"),
        "Index: conftest.py\n===\n" + HIDDEN,
        HIDDEN.replace("/dev/null", "a/json.py").replace("conftest", "json"),
        HIDDEN.replace("/dev/null", "a/json.py\t1970-01-01 00:00:00 +0000").replace(
            "conftest", "json"
        ),
        HIDDEN.replace("/dev/null", "a/json.py")
        .replace("conftest", "json")
        .replace("-0,0", "-1,0"),
        "diff --git a/src/b/core.py b/src/b/core.py\nindex 1..2\n" + HIDDEN,
        "diff --git a/x.py b/conftest.py\nrename from x.py\nrename to conftest.py\n",
        "diff --git a/x.py b/conftest.py\ncopy from x.py\ncopy to conftest.py\n",
        "diff --git a/conftest.py b/conftest.py\nnew file mode 100644\nindex 0..e69\n",
        "diff --git a/conftest.py b/conftest.py\nnew file mode 120000\nindex 0..1\n" + HIDDEN,
        "diff --git a/conftest.py b/x.py\nsimilarity index 100%\nrename from conftest.py\n"
        "rename to x.py\n",
        "diff --git a/conftest.py b/conftest.py\nindex 1..2\nGIT binary patch\nliteral 1\n"
        "IcmZ<`0ssI2\n\nliteral 0\nHcmV?d00001\n\n",
    ],
)
def test_every_way_to_name_a_file_is_seen(hidden):
    submission = submitted(GOOD + hidden)
    assert submission.patch == GOOD
    assert submission.dropped


NAMES = st.lists(
    st.text('abcxyz_-. é"', min_size=1, max_size=6).filter(
        lambda part: part.strip() == part and part not in (".", "..")
    ),
    min_size=1,
    max_size=3,
).map("/".join)
TEXTS = st.lists(st.sampled_from(["a", "b", "", "-- x", "++ y", "@@", " ", "diff --git"])).map(
    lambda lines: "".join(f"{line}\n" for line in lines)
)


@given(st.lists(st.tuples(NAMES, TEXTS, TEXTS), min_size=1, max_size=4))
def test_sections_join_to_the_patch_and_keep_their_names(files):
    parts = []
    for path, before, after in files:
        lines = difflib.unified_diff(
            before.splitlines(keepends=True),
            after.splitlines(keepends=True),
            quoted(f"a/{path}"),
            quoted(f"b/{path}"),
            lineterm="\n",
        )
        body = "".join(lines)
        if body:
            parts.append((path, f"diff --git {quoted('a/' + path)} {quoted('b/' + path)}\n{body}"))
    sections = parse_patch("".join(text for _, text in parts))
    assert [section.text for section in sections] == [text for _, text in parts]
    assert [section.paths[-1] for section in sections] == [path for path, _ in parts]


def quoted(name):
    """As git writes a name."""
    if all(32 <= ord(each) < 127 and each not in '"\\' for each in name):
        return name
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03o}"
        for byte in name.encode()
    )
    return f'"{escaped}"'


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text):
    submission = submitted(text)
    assert not (submission.patch and submission.refused)
    try:
        parse_patch(text)
    except PatchFormatError:
        assert submission.patch == ""


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("options", [["--no-renames"], ["-M"], ["-C", "--find-copies-harder"]])
def test_what_git_writes_is_read(tmp_path, options):
    def git(*arguments):
        environment = {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            cwd=tmp_path,
            env=environment | {"PATH": os.environ["PATH"]},
            capture_output=True,
            check=True,
        )
        return done.stdout.decode()

    git("init", "-q")
    lines = "".join(f"line {number}\n" for number in range(30))
    for name in ("edited", "deleted", "moved", "mode only", "a name b", "copied", "bärig", 'q"uo'):
        (tmp_path / name).write_text(f"{name}\n{lines}")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "link").symlink_to("edited")
    git("add", "-A")
    git("commit", "-qm", "one")
    (tmp_path / "edited").write_text(lines.replace("line 3\n", "-- a\n") + "no newline")
    (tmp_path / "deleted").unlink()
    (tmp_path / "moved").rename(tmp_path / "new place")
    (tmp_path / "mode only").chmod(0o755)
    (tmp_path / "a name b").write_text("+++ b/conftest.py\n--- a/x\n")
    shutil.copy(tmp_path / "copied", tmp_path / "copy")
    (tmp_path / "bärig").write_text(lines + "ä\x0c\x85\u2028 \r\n\rb\n")
    (tmp_path / 'q"uo').write_text("\n\n")
    (tmp_path / "binary").write_bytes(bytes(range(255, -1, -1)))
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("copied")
    (tmp_path / "empty file").touch()
    git("add", "-A")
    patch = git("diff", "--cached", "--binary", *options)
    sections = parse_patch(patch)
    assert "".join(section.text for section in sections) == patch
    names = git("diff", "--cached", "--name-only", "-z", *options).split("\0")[:-1]
    assert [section.paths[-1] for section in sections] == names
    kept = submitted(patch)
    assert (kept.patch, kept.dropped, kept.refused) == (patch, (), "")


def test_only_whole_marks_of_the_harness_are_refused():
    for line, refused in (
        (">>>>> Start Test Output", True),
        (">>>>>>> Tests Errored", True),  # the mark stands in it
        *((each, False) for each in (">>>>>>> branch", ">>>>> quoted in a mail", ">>>>> test")),
    ):
        submission = submitted(file_diff("notes.txt", None, line + "\n"))
        assert bool(submission.refused) == refused != bool(submission.patch), line
