"""Adapters that convert rows of training datasets to rows of SWE-bench 5: one function per dataset.

`kind_of` recognises a dataset by its columns. Its adapter takes a row as the dataset's authors
publish it and returns one with the image, the evaluation script and the log parser that the
official harness needs. The scripts have the form of the official ones. Nothing is downloaded or run
here.

The adapters were not tried with the real images, which our tests cannot pull. `agentrl swebench
validate` tells for each instance whether it can be graded.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

from agentrl.errors import DataError
from agentrl_swebench.diff import PatchFormatError, parse_patch

_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
{activate}
cd /testbed
git config --global --add safe.directory /testbed
git status
git show --no-patch
git -c core.fileMode=false diff {base_commit}
{install}
{reset}
git apply -v - <<'EOF_114329324912'
{test_patch}
EOF_114329324912
: '>>>>> Start Test Output'
{test}
: '>>>>> End Test Output'
{reset}
"""

_CONDA = """\
if [ -f /opt/miniconda3/bin/activate ]; then
source /opt/miniconda3/bin/activate
conda activate testbed
fi"""

Row = dict[str, Any]

MOVED_REPOSITORY = "agentrl/swebench-moved"
"""Name of the images whose repository was moved to /testbed."""


def swe_gym(row: Row, place: str) -> Row:
    """SWE-Gym/SWE-Gym and SWE-Gym-Lite: the columns of SWE-bench 4, with images of their own.

    Raises:
        DataError: the instance is of python/mypy, whose tests are cases in data files.
    """
    if row["repo"] == "python/mypy":
        raise DataError(
            f"{place}: {row['instance_id']} is of python/mypy, whose tests are run by the names of "
            "cases, which no adapter supports: leave them out of the file "
            "(`agentrl swebench validate --filter '^(?!python__mypy)' --out FILE.jsonl`)"
        )
    name = row["instance_id"].replace("__", "_s_").lower()
    test = "pytest -rA --color=no -p no:cacheprovider " + _files(row, place)
    return _converted(row, place, image=f"xingyaoww/sweb.eval.x86_64.{name}:latest", test=test)


def swe_rebench(row: Row, place: str) -> Row:
    """nebius/SWE-rebench and its leaderboard: `install_config` says how to install and test. The
    image is that of the column `docker_image` or `image_name`, or follows the authors' naming."""
    config = _config(row, place)
    name = row["instance_id"].replace("__", "_1776_").lower()
    image = row.get("docker_image") or row.get("image_name")
    test = " ".join(_commands(config.get("test_cmd"), place)) + " " + _files(row, place)
    return _converted(
        row,
        place,
        image=tagged(image or f"swerebench/sweb.eval.x86_64.{name}"),
        test=test,
        log_parser=config.get("log_parser"),
        exports=config.get("env_vars"),
    )


def swe_rebench_v2(row: Row, place: str) -> Row:
    """nebius/SWE-rebench-V2: many languages. `install_config.test_cmd` has the complete test
    commands, without test files, for an image (`image_name`) in which the project is installed.
    Rows whose log parser the official harness lacks get no verdict, and `validate` says so.

    Raises:
        DataError: the repository in the image was not moved to /testbed yet (`derived.py`).
    """
    config = _config(row, place)
    if not row["image_name"].startswith(MOVED_REPOSITORY):
        raise DataError(
            f"{place}: {row['instance_id']} is of SWE-rebench-V2, whose images have the repository "
            "at /NAME and not at /testbed. Make rows and images with it there first: "
            "`agentrl swebench pull --dataset swe-rebench-v2 --out FILE.jsonl`"
        )
    return _converted(
        row,
        place,
        image=tagged(row["image_name"]),
        test="\n".join(_commands(config.get("test_cmd"), place)),
        log_parser=config.get("log_parser"),
        exports=config.get("env_vars"),
    )


def swe_synth(row: Row, place: str) -> Row:
    """Synthetic rows (SWE-Synth, Nemotron's) with the image in the column `image_name` or
    `docker_image` and the test command in `test_cmd`."""
    return _converted(
        row,
        place,
        image=tagged(row.get("image_name") or row["docker_image"]),
        install="\n".join(_commands(row.get("install") or [], place)),
        test="\n".join(_commands(row["test_cmd"], place)),
        log_parser=row.get("log_parser"),
    )


def swe_bench_live(row: Row, place: str) -> Row:
    """SWE-bench-Live: `test_cmds` has the complete test commands and `log_parser` a parser's short
    name; images are named as the official harness names them, under `starryzhang`."""
    name = row["instance_id"].replace("__", "_1776_").lower()
    parser = row.get("log_parser") or "pytest"
    return _converted(
        row,
        place,
        image=f"starryzhang/sweb.eval.x86_64.{name}:latest",
        test="\n".join(_commands(row["test_cmds"], place)),
        log_parser=parser if parser.startswith("parse_log_") else f"parse_log_{parser}",
    )


def unpacked(row: Row, place: str) -> Row:
    """Returns the instance's row that a row of another trainer holds: SkyRL's in `instance`,
    NeMo-Gym's as JSON in `responses_create_params.metadata.instance_dict`. Returns any other row as
    it is.

    Raises:
        DataError: such a row holds no instance.
    """
    inner: Any = None
    if "env_class" in row and "prompt" in row:
        what, inner = "SkyRL", row.get("instance")
    elif isinstance(row.get("responses_create_params"), dict) and "instance_id" not in row:
        what = "NeMo-Gym"
        inner = (row["responses_create_params"].get("metadata") or {}).get("instance_dict")
    else:
        return row
    if isinstance(inner, str):
        try:
            inner = json.loads(inner)
        except ValueError as error:
            raise DataError(f"{place}: the instance in a row of {what} is not JSON") from error
    if not isinstance(inner, dict) or "instance_id" not in inner:
        raise DataError(f"{place}: a row of {what} has no instance of SWE-bench in it")
    return inner


ADAPTERS: dict[str, Callable[[Row, str], Row]] = {
    "swe-gym": swe_gym,
    "swe-rebench": swe_rebench,
    "swe-rebench-v2": swe_rebench_v2,
    "swe-bench-live": swe_bench_live,
    "swe-synth": swe_synth,
}
REFUSED = {
    "swe-smith": "{instance} is of SWE-smith, where `patch` adds the bug to the repository in the "
    "image. Make rows and images that contain the bug first: `agentrl swebench pull --dataset "
    "swe-smith --out FILE.jsonl`",
    "r2e-gym": "rows of R2E-Gym name tests without their files (`expected_output_json`), unlike "
    "every log parser of the official harness, so it can't grade them. Use the same repositories' "
    "instances of SWE-Gym or SWE-rebench, or write instances of your own",
    "multi-swe-bench": "rows of Multi-SWE-bench (`org`, `number`, `fix_patch`) need a harness of "
    "their own and build files that a row does not hold. For other languages use SWE-rebench-V2 "
    "(`agentrl swebench pull --dataset swe-rebench-v2 --out FILE.jsonl`) or `multilingual`",
    "swe-bench-pro": "rows of SWE-bench Pro (`dockerhub_tag`, `selected_test_files_to_run`) are "
    "graded by scripts and parsers that a row does not hold, in images with the repository at "
    "/app. Use `verified`, `multilingual` or SWE-rebench-V2",
    "pull-request": "{instance} names no test in FAIL_TO_PASS (SWE-Gym-Raw has such rows), so a "
    "fix could not be told from no fix. Use SWE-Gym (`swe-gym`)",
}
"""Messages for kinds of rows that cannot be converted."""
SWE_GYM_REPOS = frozenset(
    (
        "pandas-dev/pandas",
        "getmoto/moto",
        "python/mypy",
        "iterative/dvc",
        "dask/dask",
        "Project-MONAI/MONAI",
        "pydantic/pydantic",
        "conan-io/conan",
        "modin-project/modin",
        "facebookresearch/hydra",
        "bokeh/bokeh",
    )
)


def kind_of(row: Row) -> str:
    """Returns the kind of a row by its columns, a key of `ADAPTERS` or `REFUSED`; "" for rows of
    SWE-bench and unknown rows."""
    if "expected_output_json" in row:
        return "r2e-gym"
    if "fix_patch" in row and "org" in row:
        return "multi-swe-bench"
    if "dockerhub_tag" in row or "selected_test_files_to_run" in row:
        return "swe-bench-pro"
    if "instance_id" in row and row.get("FAIL_TO_PASS") in (None, "", "[]", []):
        return "pull-request"
    if row.get("test_cmds"):
        return "swe-bench-live"
    if str(row.get("repo", "")).startswith("swesmith/"):
        return "swe-smith"
    if row.get("install_config"):
        is_second = row.get("image_name") and row.get("language")
        return "swe-rebench-v2" if is_second else "swe-rebench"
    if row.get("test_cmd") and (row.get("image_name") or row.get("docker_image")):
        return "swe-synth"
    return "swe-gym" if row.get("repo") in SWE_GYM_REPOS else ""


def _converted(
    row: Row,
    place: str,
    *,
    image: str,
    test: str,
    log_parser: str | None = None,
    install: str = "",
    exports: dict[str, Any] | None = None,
) -> Row:
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in (exports or {}).items()]
    version = row.get("version")
    return row | {
        "version": version if isinstance(version, str) and version else "0",
        "image": image,
        "log_parser": log_parser or "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": eval_script(
            base_commit=row["base_commit"],
            install="\n".join([*lines, install]).strip("\n"),
            test=test.strip(),
            test_patch=row["test_patch"],
            place=place,
        ),
    }


def eval_script(*, base_commit: str, install: str, test: str, test_patch: str, place: str) -> str:
    """Returns an evaluation script for the harness: it installs, applies the hidden tests, runs
    them between the marks, and removes them.

    Args:
        install: commands, one per line; "" for none.
        test: one test command per line; the last one's exit status counts.
        place: names the row in errors.

    Raises:
        DataError: the test patch cannot be parsed.
    """
    sections = _sections(test_patch, place)
    old = [each.paths[0] for each in sections if not each.is_new]
    new = [each.paths[-1] for each in sections if each.is_new]
    reset = [f"git checkout {base_commit} {shlex.join(old)}"] if old else []
    reset += [f"rm -f {shlex.join(new)}"] if new else []
    return _SCRIPT.format(
        activate=_CONDA,
        base_commit=base_commit,
        install=install or ":",
        reset="\n".join(reset) or ":",
        test_patch=test_patch.strip("\n"),
        test=test,
    )


def _sections(test_patch: str, place: str) -> list:
    try:
        return parse_patch(test_patch)
    except PatchFormatError as error:
        raise DataError(f"{place}: column test_patch can't be read: {error}") from error


def _files(row: Row, place: str) -> str:
    """Returns the Python files that the test patch touches, as arguments for a shell."""
    paths = [each.paths[-1] for each in _sections(row["test_patch"], place)]
    files = [path for path in paths if path.endswith(".py") and not path.endswith("conftest.py")]
    return shlex.join(files)


def _config(row: Row, place: str) -> dict[str, Any]:
    config = row["install_config"]
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise DataError(f"{place}: column install_config is not JSON ({error})") from error
    if not isinstance(config, dict) or not config.get("test_cmd"):
        raise DataError(f"{place}: column install_config names no test_cmd")
    return config


def _commands(value: Any, place: str) -> list[str]:
    commands = [value] if isinstance(value, str) else list(value or [])
    if not all(isinstance(each, str) for each in commands):
        raise DataError(f"{place}: commands must be text, not {commands!r:.80}")
    return commands


def tagged(image: str) -> str:
    """Returns the name of an image with the tag `latest` if it has neither a tag nor a digest."""
    return image if ":" in image.rpartition("/")[2] else f"{image}:latest"
