"""Reads the files of an instance's hidden tests from its image, before any patch is applied."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import EnvError
from agentrl_swebench.containers import (
    WORKDIR,
    packed,
    read_text,
    run_script,
    script_container,
)
from agentrl_swebench.dataset import Instance
from agentrl_swebench.diff import PatchFormatError, parse_patch

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


def read_test_files(instance: Instance, run_id: str) -> TestFiles:
    """Reads the tests' files from an instance's image, applies the hidden tests there and reads
    them again.

    Raises:
        EnvError: the engine failed, or the test patch does not apply.
        PatchFormatError: the test patch cannot be parsed.
    """
    sections = parse_patch(instance.test_patch)
    paths = {path for each in sections for path in each.paths}
    paths |= {named_file(test) for test in instance.fail_to_pass} - {""}
    with script_container(
        instance.image,
        _APPLY,
        run_id=run_id,
        role="grade",
        timeout_s=_WAIT_S,
        mem_limit="2g",
        pids_limit=256,
    ) as container:
        before = _read(container, sorted(paths))
        patch = "".join(each.text for each in sections)
        container.put_archive("/tmp", packed({"test.patch": patch.encode()}))
        if patch and (said := run_script(container)) is not None:
            raise EnvError(f"the hidden tests of {instance.instance_id} do not apply: {said}")
        return TestFiles(before, _read(container, sorted(paths)))


def _read(container: Any, paths: list[str]) -> dict[str, str]:
    from docker.errors import NotFound

    texts = {}
    for path in paths:
        with contextlib.suppress(NotFound, UnicodeDecodeError):
            texts[path] = read_text(container, f"{WORKDIR}/{path}")
    return texts


def script_with(instance: Instance, files: TestFiles, altered: dict[str, str]) -> str | None:
    """Returns the evaluation script with other texts of test files. If the script holds the hidden
    tests as a patch, that patch is rewritten as git would write it, so that the script keeps its
    form. Returns None if the script has no start mark before which to put the texts."""
    patch = instance.test_patch.strip("\n")
    if patch and patch in instance.eval_script:
        try:
            sections = parse_patch(instance.test_patch)
        except PatchFormatError:
            sections = []
        if sections:
            new = {
                each.paths[-1]: each
                for each in parse_patch(git_diff(files.before, files.after | altered, patch))
            }
            parts = [
                new.pop(each.paths[-1], each).text
                if set(each.paths) & altered.keys()
                else each.text
                for each in sections
            ]
            parts += [new[path].text for path in altered if path in new]
            return instance.eval_script.replace(patch, "".join(parts).strip("\n"), 1)
    lines = instance.eval_script.split("\n")
    at = next((k for k, line in enumerate(lines) if _START_MARK in line), None)
    if at is None:
        return None
    new_patch = git_diff(files.after, files.after | altered)
    apply = ["git apply -v - <<'EOF_114329324912'", new_patch.rstrip("\n"), "EOF_114329324912"]
    return "\n".join([*lines[:at], *apply, *lines[at:]])


def git_diff(before: dict[str, str], after: dict[str, str], like: str = "") -> str:
    """Returns the patch that git writes for a change of files. Object names are as long, and files
    have the same modes, as in the patch `like`.

    Raises:
        EnvError: git is missing or failed.
    """
    index = re.search(r"^index [0-9a-f]+\.\.([0-9a-f]+)", like, re.MULTILINE)
    programs = {
        each.paths[-1] for each in parse_patch(like) if "100755" in each.text.partition("@@")[0]
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def git(*arguments: str) -> str:
            settings = ["-c", f"core.abbrev={len(index.group(1)) if index else 7}"]
            environment = {"PATH": os.environ.get("PATH", ""), "HOME": name, "LC_ALL": "C"}
            try:
                done = subprocess.run(
                    ["git", *settings, *arguments],
                    cwd=folder,
                    env=environment | {"GIT_CONFIG_NOSYSTEM": "1"},
                    capture_output=True,
                    check=True,
                )
            except (OSError, subprocess.CalledProcessError) as error:
                raise EnvError(f"git could not write the altered tests: {error}") from error
            return done.stdout.decode()

        git("init", "-q")
        for state in (before, after):
            for path in {*before, *after}:
                file = folder / path
                if path in state:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(state[path].encode())
                    file.chmod(0o755 if path in programs else 0o644)
                else:
                    file.unlink(missing_ok=True)
            if state is before:
                git("add", "-A", "-f")
        git("add", "-A", "-f", "-N")
        return git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "-M")
