"""Reads the files of an instance's hidden tests from its image, before any patch is applied."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agentrl.env.container.box import MAX_STREAM_BYTES
from agentrl.env.container.container import packed
from agentrl.errors import EnvError
from agentrl_swebench.containers import InstanceContainer
from agentrl_swebench.dataset import Instance
from agentrl_swebench.diff import parse_patch

_WAIT_S = 120
_START_MARK = ">>>>> Start Test Output"

_APPLY = r"""
cd /testbed && git config --global --add safe.directory /testbed
git apply --whitespace=nowarn /tmp/test.patch || patch -p1 -f -s < /tmp/test.patch
"""


@dataclass(slots=True, frozen=True)
class TestFiles:
    """Text files by path, relative to the repository. Files that are not UTF-8 are missing."""

    __test__ = False  # keeps pytest from collecting this class

    before: dict[str, str]
    """Files at the base commit."""
    after: dict[str, str]
    """Files with the hidden tests applied."""


def named_file(test: str) -> str:
    """Returns the file with which a required test's name starts; "" if it names none in the
    repository."""
    path = test.split("::")[0].split("[")[0]
    is_inside = not path.startswith(("/", "-")) and not {"..", ".git"} & set(path.split("/"))
    return path if "::" in test and is_inside and re.fullmatch(r"[\w./+-]+\.\w+", path) else ""


async def read_test_files(instance: Instance, run_id: str) -> TestFiles:
    """Reads the tests' files from an instance's image, applies the hidden tests there and reads
    them again.

    Raises:
        EnvError: the engine failed, or the test patch does not apply.
        PatchFormatError: the test patch cannot be parsed.
    """
    sections = parse_patch(instance.test_patch)
    paths = {path for each in sections for path in each.paths}
    paths |= {named_file(test) for test in instance.fail_to_pass} - {""}
    container = await InstanceContainer.start(instance.image, run_id=run_id, role="build")
    try:
        before = await _read(container, paths)
        if patch := "".join(each.text for each in sections):
            await container.put(packed({"test.patch": patch.encode()}), "/tmp")
            home = {"HOME": "/tmp"}
            ran = await container.script(_APPLY, timeout_s=_WAIT_S, environment=home)
            if ran.exit_code != 0:
                said = ran.errors[-300:]
                raise EnvError(f"the hidden tests of {instance.instance_id} do not apply: {said}")
        return TestFiles(before, await _read(container, paths))
    finally:
        await container.end()


async def _read(container: InstanceContainer, paths: set[str]) -> dict[str, str]:
    texts = {}
    for path in sorted(paths):
        content = await container.get(path, MAX_STREAM_BYTES)
        with contextlib.suppress(UnicodeDecodeError):
            if content is not None:
                texts[path] = content.decode()
    return texts


def script_with(instance: Instance, files: TestFiles, texts: dict[str, str]) -> str | None:
    """Returns the evaluation script with other texts of the hidden tests' files, so that the
    original texts are nowhere in it; None if the script brings the tests in a way that is not
    known."""
    patch = instance.test_patch.strip("\n")
    sections = parse_patch(instance.test_patch) if patch else []
    others = [each.text for each in sections if not {*each.paths} & texts.keys()]
    names = texts.keys() | {
        path for each in sections if {*each.paths} & texts.keys() for path in each.paths
    }
    before, after = (
        {path: text for path, text in each.items() if path in names}
        for each in (files.before, files.after | texts)
    )
    new_patch = ("".join(others) + git_diff(before, after)).strip("\n")
    if patch:
        whole = patch in instance.eval_script
        return instance.eval_script.replace(patch, new_patch) if whole else None
    lines = instance.eval_script.split("\n")
    at = next((k for k, line in enumerate(lines) if _START_MARK in line), None)
    if at is None:
        return None
    apply = ["git apply -v - <<'EOF_114329324912'", new_patch, "EOF_114329324912"]
    return "\n".join([*lines[:at], *apply, *lines[at:]])


def git_diff(before: dict[str, str], after: dict[str, str]) -> str:
    """Returns the patch that git writes for a change of files.

    Raises:
        EnvError: git is missing or failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def git(*arguments: str) -> str:
            environment = {"PATH": os.environ.get("PATH", ""), "HOME": name, "LC_ALL": "C"}
            try:
                done = subprocess.run(
                    ["git", *arguments],
                    cwd=folder,
                    env=environment | {"GIT_CONFIG_NOSYSTEM": "1"},
                    capture_output=True,
                    check=True,
                )
            except (OSError, subprocess.CalledProcessError) as error:
                raise EnvError(f"git could not write the tests: {error}") from error
            return done.stdout.decode()

        git("init", "-q")
        trees = []
        for state in (before, after):
            for path in {*before, *after}:
                file = folder / path
                if path in state:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(state[path].encode())
                else:
                    file.unlink(missing_ok=True)
            git("add", "-A", "-f")
            trees.append(git("write-tree").strip())
        options = ["--no-ext-diff", "--no-textconv", "--no-color", "--no-renames"]
        return git("diff", *options, *trees)
