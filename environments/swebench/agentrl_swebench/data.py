"""`agentrl swebench data get`: writes a dataset's rows to a file to train on."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from agentrl.errors import ConfigError, DataError
from agentrl_swebench.adapters import kind_of
from agentrl_swebench.dataset import (
    ALIASES,
    Instance,
    load_rows,
    parse_row,
    to_official,
    write_rows,
)
from agentrl_swebench.diff import PatchFormatError, parse_patch

LANGUAGES = {
    **dict.fromkeys((".py", ".pyx", ".pyi"), "python"),
    **dict.fromkeys((".js", ".mjs", ".cjs", ".jsx"), "javascript"),
    **dict.fromkeys((".ts", ".tsx", ".vue"), "typescript"),
    **dict.fromkeys((".c", ".h"), "c"),
    **dict.fromkeys((".cc", ".cpp", ".hpp", ".cxx"), "c++"),
    ".go": "go",
    ".rs": "rust",
    ".rb": "ruby",
    ".java": "java",
    ".php": "php",
    ".pl": "perl",
    ".pm": "perl",
    ".kt": "kotlin",
    ".scala": "scala",
    ".cs": "c#",
    ".ex": "elixir",
}


def language_of(instance: Instance) -> str:
    """Returns the language of most files that the reference solution edits; "" if unknown."""
    try:
        paths = [each.paths[-1] for each in parse_patch(instance.patch)]
    except PatchFormatError:
        return ""
    counts = Counter(LANGUAGES.get(PurePosixPath(path).suffix, "") for path in paths)
    counts.pop("", None)
    return counts.most_common(1)[0][0] if counts else ""


def num_changed_lines(patch: str) -> int:
    lines = (line for line in patch.split("\n") if line.startswith(("+", "-")))
    return sum(not line.startswith(("+++ ", "--- ")) for line in lines)


def get(arguments: argparse.Namespace) -> int:
    """Loads, converts, filters, splits and writes rows; prints how many were left out and why.

    Raises:
        ConfigError: --holdout is not a share.
        DataError: a row cannot be converted, or none is left.
    """
    if not 0 <= arguments.holdout < 1:
        raise ConfigError(f"--holdout {arguments.holdout:g} must be at least 0 and below 1")
    rows = list(load_rows(arguments.name, arguments.split))
    left_out: Counter[str] = Counter()
    chosen: list[Instance] = []
    for place, row in rows:
        if arguments.limit is not None and len(chosen) >= arguments.limit:
            break
        if reason := _unwanted_row(row, arguments):
            left_out[reason] += 1
            continue
        try:
            if (kind := kind_of(row)) in ("swe-smith", "swe-rebench-v2"):
                from agentrl_swebench.derived import make_moved_row, make_smith_row

                row = (make_smith_row if kind == "swe-smith" else make_moved_row)(row, place)
            instance = parse_row(to_official(row, place), place)
        except DataError as error:
            if not arguments.skip_unusable:
                raise
            left_out[f"unusable: {str(error).partition(': ')[2][:100]}"] += 1
            continue
        if reason := _unwanted(instance, arguments):
            left_out[reason] += 1
            continue
        chosen.append(instance)
    if not chosen:
        raise DataError(f"no row of {arguments.name} is left; left out: {dict(left_out)}")
    random.Random(arguments.seed).shuffle(chosen)
    num_held = round(len(chosen) * arguments.holdout)
    if num_held:
        _write(arguments.out.with_name(f"{arguments.out.stem}.test.jsonl"), chosen[:num_held])
    _write(arguments.out, chosen[num_held:])
    for reason, number in left_out.most_common():
        print(f"left out {number}: {reason}")
    print(f"next: agentrl swebench doctor --dataset {arguments.out}; then pull, then validate")
    return 0


def _unwanted_row(row: dict, arguments: argparse.Namespace) -> str:
    if arguments.repo and row.get("repo") not in arguments.repo:
        return "another repository"
    if row.get("repo") in (arguments.exclude_repo or ()):
        return "an excluded repository"
    if arguments.pass_rate:
        rate = row.get("pass_rate")
        if not isinstance(rate, int | float):
            raise DataError("--pass-rate needs a column pass_rate, which the rows do not have")
        low, high = arguments.pass_rate
        if not low <= rate <= high:
            return f"pass rate outside {low:g} to {high:g}"
    return ""


def _unwanted(instance: Instance, arguments: argparse.Namespace) -> str:
    if arguments.language and language_of(instance) not in arguments.language:
        return "another language"
    if arguments.max_lines and num_changed_lines(instance.patch) > arguments.max_lines:
        return f"the solution changes more than {arguments.max_lines} lines"
    return ""


def _write(path: Path, instances: Iterable[Instance]) -> None:
    rows = [instance.row() for instance in instances]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, rows)
    images = len({row["image"] for row in rows})
    print(f"{path}: {len(rows)} instances, {images} images")


def add_data_commands(subcommands: argparse._SubParsersAction) -> None:
    data = subcommands.add_parser("data", help="get datasets to train on")
    commands = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = commands.add_parser(
        "get",
        help="write a dataset's rows to a file to train on",
        description="Load a dataset, convert its rows to the columns of SWE-bench 5, filter, "
        "shuffle and write them. For SWE-smith, also make images that contain the bugs; for "
        "SWE-rebench-V2, images with the repository at /testbed.",
    )
    names = ", ".join(ALIASES)
    command.add_argument("name", metavar="NAME|FILE", help=f"{names}, or a file or Hub name")
    command.add_argument(
        "--split", default=None, help="split of a Hub dataset (default: its usual one)"
    )
    command.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    command.add_argument("--repo", nargs="+", metavar="OWNER/NAME", help="only these repositories")
    command.add_argument("--exclude-repo", nargs="+", metavar="OWNER/NAME")
    command.add_argument(
        "--language", nargs="+", help="only these languages, judged by the solution's files"
    )
    command.add_argument(
        "--max-lines", type=int, metavar="N", help="changed lines of a solution, at most"
    )
    command.add_argument(
        "--pass-rate",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
        help="only rows whose column pass_rate is in this range",
    )
    command.add_argument("--limit", type=int, metavar="N", help="rows at most")
    command.add_argument(
        "--holdout",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the rows to write to FILE.test.jsonl instead (default: 0)",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the shuffle (default: 0)")
    command.add_argument(
        "--skip-unusable", action="store_true", help="leave out rows that cannot be converted"
    )
    command.set_defaults(handler=get)
