"""Selects the parts of a patch that count as a submission.

`official` takes a patch as it is, which numbers comparable with a leaderboard need. `strict` takes
only the source: it drops every file that decides how tests are found, run or reported, because such
a file can produce any official verdict. It never drops a file that the reference solution edits.

The policy is part of the task, so state `POLICY_TEXTS` in the prompt.

`strict` reads the forms of patches that `git apply` and `patch -p1` read, and submits the sections
alone, without the text around them. It refuses a patch in whose other text those programs might
find a change.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Literal

from agentrl_swebench.dataset import Instance
from agentrl_swebench.diff import PatchFormatError, Section, parse_patch

Policy = Literal["official", "strict"]
POLICY_VERSIONS: dict[Policy, str] = {"official": "official-1", "strict": "strict-4"}
"""Name and version recorded with every verdict; the number rises when the rules change."""

MAX_PATCH_BYTES = 4 << 20
"""Largest submission in bytes; the agent is told."""

_SIZE_TEXT = (
    f" Of a change larger than {MAX_PATCH_BYTES >> 20} MiB the largest new files are left out "
    "first, so clean up what your commands leave behind."
)

POLICY_TEXTS: dict[Policy, str] = {
    "official": "Your submission is the difference between the repository's first state and the "
    "state you leave it in." + _SIZE_TEXT,
    "strict": "Your submission is the difference between the repository's first state and the "
    "state you leave it in, without these: test files and test directories; configuration of test "
    "runners (conftest.py, pytest.ini, tox.ini and the like); packaging and build files "
    "(setup.py, setup.cfg, pyproject.toml, package.json, Cargo.toml and the like; but in setup.py "
    "and a Makefile you may name packages and source files); assertion helpers that the project "
    "ships (testing/ and the like); compiled Python, .pth files, sitecustomize.py, and new modules "
    "that shadow a standard or testing module. Changes to those are left out, so fix the source."
    + _SIZE_TEXT,
}

_TEST_FILE = re.compile(
    r"(?:test_.*|.*_tests?|tests?|conftest)\.(?:py|pyi|pyx)"
    r"|.*[._-](?:test|spec)s?\.[cm]?[jt]sx?"
    r"|.*_test\.(?:go|rs|rb|exs|c|cc|cpp)"
    r"|.*_spec\.rb"
)
_NEW_HELPER_FILE = re.compile(r"test_?(?:utils?|helpers?|tools?|support|data)\.py")
"""Names of new modules that count as source if they are below the root and outside test
directories: the hidden tests cannot know them."""
_SHIPPED_HELPER = re.compile(
    r"(?:.*/)?(?:_?testing/.*|_?testing|test_?utils?|_?test_?helpers?|utilities/pytest)\.py"
    r"|django/test/.*\.py"
)
"""Assertion helpers that a project ships and its own tests use."""
_TEST_DIRECTORIES = frozenset({"tests", "__tests__"})
_ROOT_TEST_DIRECTORIES = frozenset({"test", "spec"})
"""Directories of tests only if at the root: further down they are often part of the product."""

_RUNNER_FILE = re.compile(
    r"pytest\.ini|\.pytest\.ini|pytest\.toml|\.pytest\.toml|tox\.(?:ini|toml)|noxfile\.py"
    r"|\.coveragerc"
    r"|(?:jest|vitest|karma|babel|playwright|cypress)\.(?:config|conf)\.[a-z]+"
    r"|\.mocharc(?:\.[a-z]+)?|\.babelrc(?:\.[a-z]+)?|\.rspec(?:-local)?|\.simplecov|\.proverc"
    r"|(?:vite|webpack|rollup|tsup|nyc|ava|wdio)\.(?:config|conf)\.[a-z]+|\.nycrc(?:\.[a-z]+)?"
    r"|phpunit(?:\.[a-z.]+)?|nextest\.toml|testng\.xml|surefire\.properties|\.bazelrc"
)
_PACKAGING_FILE = re.compile(
    r"setup\.(?:py|cfg)|pyproject\.toml|MANIFEST\.in|package(?:-lock)?\.json|\.npmrc|\.yarnrc.*"
    r"|(?:requirements|constraints).*\.txt|yarn\.lock|pnpm-.*\.yaml|tsconfig.*\.json"
    r"|pom\.xml|(?:build|settings)\.gradle(?:\.kts)?|gradle\.properties|gradlew|mvnw|build\.xml"
    r"|Cargo\.(?:toml|lock)|build\.rs|rust-toolchain(?:\.toml)?|go\.(?:mod|sum|work)"
    r"|composer\.(?:json|lock)|Gemfile(?:\.lock)?|[Rr]akefile(?:\.rb)?|.*\.(?:gemspec|rake)"
    r"|CMakeLists\.txt|CMakePresets\.json|.*\.cmake|meson\.build|configure(?:\.ac)?|Justfile|justfile"
    r"|BUILD(?:\.bazel)?|WORKSPACE(?:\.bazel)?|MODULE\.bazel|cpanfile|Makefile\.PL|Build\.PL"
)
_TOOL_DIRECTORIES = frozenset({".cargo", ".mvn", ".gradle", ".github", ".git", ".bundle", ".husky"})
"""Directories that build tools read before or beside the project's own files."""
_COMPILED_FILE = re.compile(r".*\.py[cod]")
"""Compiled modules. Python runs one that has no source, or whose source has the recorded time."""
_START_FILE = re.compile(r"(?:site|user)customize(?:\.py)?|.*\.pth|.*\.egg-link")
_MAKE_FILE = re.compile(r"(?:GNU)?[Mm]akefile|.*\.mk")
_NAMING_LINE = {
    "setup.py": re.compile(
        r"\s*(?:(?:packages|py_modules|package_data|include_package_data|package_dir|sources)\s*=\s*)?"
        r"[\[\](){},\s]*(?:(?:True|False|[rb]?\"[\w./*-]*\"|[rb]?'[\w./*-]*')\s*[\[\](){},:\s]*)*"
    ),
    "Makefile": re.compile(
        r"(?:\w*(?:SRC|SOURCE|OBJ|HEADER)\w*\s*[:+?]?=NAMES|NAMES:NAMES"
        r"|\t\$\((?:CC|CXX)\)(?: (?:\$\(\w*FLAGS\)|-shared|-fPIC|-c|-o|-l\w+|\$[@<^]|[\w./]+))*"
        r"|\s+[\w./ \\-]*\.(?:c|cc|cpp|h|o)\b[\w./ \\-]*)?".replace(
            "NAMES", r"(?:[\w./ %\\-]|\$\(\w+\))*"
        )
    ),
}
"""Lines that only name packages and source files, by build file, and so run only the compiler."""
_METADATA_DIRECTORY = re.compile(r".*\.(?:dist-info|egg-info|egg)")
"""Directories with the entry points by which pytest finds its plugins."""

_TESTING_MODULES = frozenset(
    (
        "pytest",
        "_pytest",
        "py",
        "pluggy",
        "iniconfig",
        "packaging",
        "exceptiongroup",
        "tomli",
        "attr",
        "attrs",
        "six",
        "toml",
        "colorama",
        "more_itertools",
        "atomicwrites",
        "wcwidth",
        "importlib_metadata",
        "importlib_resources",
        "zipp",
        "pathlib2",
        "typing_extensions",
        "pyparsing",
        "argcomplete",
        "xmlschema",
        "elementpath",
        "roman",
        "zope",
        "twisted",
        "pygments",
        "xdist",
        "execnet",
        "hypothesis",
        "coverage",
        "nose",
        "mock",
        "pip",
        "setuptools",
        "wheel",
        "pkg_resources",
        "_distutils_hack",
        "distutils",
    )
)
_SOURCE_ROOTS = frozenset({"src", "lib"})

MARK = re.compile(
    ">>>>> (?:Start Test Output|End Test Output|Test Exit Code|Patch Apply Failed|Applied Patch"
    "|Reset Failed|Tests Errored|Some Tests Failed|All Tests Passed|Tests Timed Out)"
)
"""The harness' marks in a log. They matter in a patch because the evaluation script prints it."""


_COMMENTED_MARK = re.compile(r"^(\+[ \t]*(?:#|//|--|\*|/\*|;).*?)>>>>> ", re.MULTILINE)
"""A mark in an added comment. One of its characters is removed, which does not change the
program."""


@dataclass(slots=True, frozen=True)
class Submission:
    """The patch that is graded."""

    patch: str
    """Empty if there is nothing to grade."""
    dropped: tuple[tuple[str, str], ...] = ()
    """Files that were left out, each with the reason."""
    refused: str = ""
    """Reason for which the whole patch is refused; "" if it is not."""


def make_submission(instance: Instance, model_patch: str, policy: Policy) -> Submission:
    """Applies a policy to a patch. Never raises: a patch that cannot be parsed is refused."""
    if policy == "official":
        return Submission(model_patch)
    if not model_patch.strip():
        return Submission("")
    try:
        num_bytes = len(model_patch.encode())
    except UnicodeEncodeError:
        return Submission("", refused="the patch is not valid text")
    model_patch = _COMMENTED_MARK.sub(r"\1>>>> ", model_patch)
    if MARK.search(model_patch):
        return Submission(
            "", refused="the patch holds the marks by which the harness finds results"
        )
    if num_bytes > MAX_PATCH_BYTES:
        return Submission(
            "", refused=f"the patch has {num_bytes:,} bytes; {MAX_PATCH_BYTES:,} is the limit"
        )
    try:
        sections = parse_patch(model_patch)
    except PatchFormatError as error:
        return Submission("", refused=f"the patch can't be read: {error}")
    rules = _rules(instance)
    kept: list[str] = []
    dropped: list[tuple[str, str]] = []
    for section in sections:
        if reason := _why_dropped(section, rules):
            dropped.append((section.paths[-1], reason))
        else:
            kept.append(section.text)
    patch = "".join(kept)
    refused = "" if patch else f"none of the {len(dropped)} changed files belongs to a submission"
    return Submission(patch, tuple(dropped), refused)


@dataclass(slots=True, frozen=True)
class _Rules:
    exempt: frozenset[str]
    test_patch: frozenset[str]
    named: frozenset[str]
    """Files that the evaluation script names."""
    modules: frozenset[str]
    """Top-level modules that the reference solution edits; they are part of the product."""
    uses_make: bool


@lru_cache(maxsize=1024)
def _rules(instance: Instance) -> _Rules:
    named, uses_make = _script_files(instance.eval_script)
    exempt = frozenset(_patch_paths(instance.patch))
    return _Rules(
        exempt=exempt,
        modules=frozenset(_top_module(PurePosixPath(path).parts) for path in exempt),
        test_patch=frozenset(_patch_paths(instance.test_patch)),
        named=named,
        uses_make=uses_make,
    )


def _patch_paths(patch: str) -> set[str]:
    try:
        return {path for section in parse_patch(patch) for path in section.paths}
    except PatchFormatError:
        # The reference solution is trusted, so a lenient search for its paths is enough.
        return set(re.findall(r"^(?:\+\+\+ b|--- a)/([^\t\n]+)", patch, re.MULTILINE))


def _script_files(eval_script: str) -> tuple[frozenset[str], bool]:
    """Returns the paths that an evaluation script's commands name, and whether it runs `make`."""
    named: set[str] = set()
    uses_make = False
    end_of_text = ""
    for line in eval_script.split("\n"):
        if end_of_text:
            end_of_text = "" if line == end_of_text else end_of_text
            continue
        if here := re.search(r"<<-?\s*['\"]?(\w+)['\"]?", line):
            end_of_text = here.group(1)
        try:
            words = shlex.split(line)
        except ValueError:
            words = line.split()
        uses_make = uses_make or bool({"make", "gmake"} & set(words))
        for word in words:
            path = word.split("::")[0].removeprefix("./").removeprefix("/testbed/")
            if ("/" in path or "." in path) and not path.startswith(("/", "-", ".")):
                named.add(path)
    return frozenset(named), uses_make


def _why_dropped(section: Section, rules: _Rules) -> str:
    # A hunk that takes no lines creates the file if there is none, whatever the header says.
    may_be_new = {section.is_new, bool(re.search(r"^@@ -\d+,0+ ", section.text, re.MULTILINE))}
    for full_path in sorted({*section.paths} - rules.exempt, key=section.paths.index):
        # `patch` ends a name at a space and `git apply` does not, so check both readings.
        starts = [match.start() for match in re.finditer(r"\s", full_path)]
        for path in (full_path, *(full_path[:start] for start in starts)):
            reasons = [_why_protected(path, is_new, rules) for is_new in may_be_new if path]
            if reason := next(filter(None, reasons), ""):
                return "" if _only_names_files(section) and path not in rules.test_patch else reason
    return ""


def _only_names_files(section: Section) -> bool:
    """Tells whether a section changes nothing in a build file but the names of files and
    packages."""
    if section.is_new or len(section.paths) != 1:
        return False
    form = _NAMING_LINE.get(PurePosixPath(section.paths[0]).name)
    body = section.text.partition("\n@@ ")[2].split("\n")[1:]
    changed = [line[1:] for line in body if line.startswith(("+", "-"))]
    return form is not None and bool(changed) and all(form.fullmatch(line) for line in changed)


def _why_protected(path: str, is_new: bool, rules: _Rules) -> str:
    parts = PurePosixPath(path).parts
    name = parts[-1]
    if path in rules.test_patch:
        return "file of the hidden tests"
    if path in rules.named:
        return "named by the evaluation script"
    if _TEST_DIRECTORIES & set(parts) or parts[0] in _ROOT_TEST_DIRECTORIES:
        return "in a test directory"
    if is_new and len(parts) > 1 and _NEW_HELPER_FILE.fullmatch(name):
        return ""
    if _SHIPPED_HELPER.fullmatch(path) and (not is_new or name == "__init__.py"):
        return "assertion helper"
    if _TEST_FILE.fullmatch(name):
        return "test file"
    if _RUNNER_FILE.fullmatch(name):
        return "configuration of a test runner"
    if _PACKAGING_FILE.fullmatch(name):
        return "packaging"
    if _COMPILED_FILE.fullmatch(name) or "__pycache__" in parts:
        return "compiled Python"
    if _TOOL_DIRECTORIES & set(parts[:-1]):
        return "configuration of a build tool"
    if any(_START_FILE.fullmatch(part) for part in parts):
        return "runs when Python starts"
    if any(_METADATA_DIRECTORY.fullmatch(part) for part in parts):
        return "metadata of an installed package"
    if rules.uses_make and _MAKE_FILE.fullmatch(name):
        return "builds what is tested"
    if is_new and _shadows(parts) and _top_module(parts) not in rules.modules:
        return "shadows a standard or testing module"
    return ""


def _top_module(parts: tuple[str, ...]) -> str:
    """Returns the top-level module that a path belongs to; "" if it belongs to none."""
    inner = list(parts[1:] if len(parts) > 1 and parts[0] in _SOURCE_ROOTS else parts)
    # A module takes precedence over a folder of the same name without modules.
    return inner[0].split(".")[0] if re.search(r"\.(?:py|pyc|so|pyd)$", inner[-1]) else ""


def _shadows(parts: tuple[str, ...]) -> bool:
    module = _top_module(parts)
    return (
        module in _TESTING_MODULES
        or module in sys.stdlib_module_names
        or module.startswith(("pytest_", "nose2", "unittest2"))
    )
