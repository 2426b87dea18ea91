"""Reads SWE-bench rows and predictions in the official formats.

An `Instance` has the columns of SWE-bench 5, where a row carries all that grading needs: the image,
the evaluation script, the name of its log parser and its kind of evaluation. Rows of SWE-bench 4
lack these and are refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.env.data_sets import DATA_SETS, load_hub
from agentrl.env.rows import ROW_SUFFIXES, read_rows
from agentrl.errors import DataError
from agentrl_swebench.adapters import ADAPTERS, REFUSED, kind_of, unpacked

logger = logging.getLogger("agentrl.env")

_KNOWN = {
    name.removeprefix("swe-bench-"): each
    for name, each in DATA_SETS.items()
    if each.environment == "swebench"
}
ALIASES = {name: each.hub for name, each in _KNOWN.items()}
_TRAIN_ONLY = tuple(name for name, each in _KNOWN.items() if "test" not in each.splits.values())
"""Datasets whose only split is `train`."""

NEW_COLUMNS = ("image", "eval_script", "log_parser", "eval_type")
"""Columns that SWE-bench 5 added to a row."""

_TEXT_COLUMNS = (
    "instance_id",
    "repo",
    "version",
    "base_commit",
    "problem_statement",
    "patch",
    "test_patch",
    *NEW_COLUMNS,
)
_TEST_COLUMNS = ("FAIL_TO_PASS", "PASS_TO_PASS")


@dataclass(slots=True, frozen=True)
class Instance:
    """One row. Only `problem_statement` (and `hints_text`) may reach an agent."""

    instance_id: str
    repo: str
    version: str
    base_commit: str
    problem_statement: str
    patch: str
    """The reference solution ("gold")."""
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    image: str
    eval_script: str
    log_parser: str
    eval_type: str
    hints_text: str = ""
    image_assets: str = ""
    """JSON as in the official rows; names binary files, which a text patch cannot carry."""

    def row(self) -> dict[str, Any]:
        """Returns the official row, which the harness reads."""
        row = {name: getattr(self, name) for name in _TEXT_COLUMNS}
        row |= {"hints_text": self.hints_text}
        row |= {"FAIL_TO_PASS": list(self.fail_to_pass), "PASS_TO_PASS": list(self.pass_to_pass)}
        if self.image_assets:
            row["image_assets"] = self.image_assets
        return row


@dataclass(slots=True, frozen=True)
class Prediction:
    instance_id: str
    model_name_or_path: str
    model_patch: str
    """Empty if the model gave none."""

    def row(self) -> dict[str, str]:
        return asdict(self)


def load_instances(
    source: str | Path,
    *,
    split: str = "test",
    instance_ids: Collection[str] | None = None,
    wanted: re.Pattern[str] | None = None,
    convert: Callable[[dict[str, Any], str], dict[str, Any]] | None = None,
) -> list[Instance]:
    """Returns the instances of a dataset, in its order.

    Args:
        source: a `.jsonl`, `.json` or `.parquet` file, a folder with `{split}.parquet`, an alias
            (`full`, `lite`, `verified`, `multilingual`, `multimodal`) or a Hugging Face name.
        instance_ids: only these; None for all.
        wanted: only those with this in their id; rows that are left out may be of any form.
        convert: applied to each row, with its place for errors, before it is read.

    Raises:
        ConfigError: the package that reads this kind of source is missing.
        DataError: the dataset does not exist or is empty, a column is missing or has the wrong
            type, or an id occurs twice or is not in the dataset.
    """
    rows = list(load_rows(str(source), split))
    if instance_ids is not None:
        named = set(instance_ids)
        known = {row.get("instance_id") for _, row in rows}
        if missing := sorted(named - known):
            raise DataError(f"{source} has no instance {', '.join(missing[:5])}")
        rows = [(place, row) for place, row in rows if row.get("instance_id") in named]
    if not rows:
        raise DataError(f"{source} holds no rows")
    if wanted is not None:
        rows = [(p, row) for p, row in rows if wanted.search(str(row.get("instance_id", "")))]
    if convert is not None:
        rows = [(place, convert(row, place)) for place, row in rows]
    instances = [parse_row(to_official(row, place), place) for place, row in rows]
    seen: set[str] = set()
    for instance in instances:
        if instance.instance_id in seen:
            raise DataError(f"{source} has instance {instance.instance_id} twice")
        seen.add(instance.instance_id)
    return instances


def to_official(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns a row with the columns of SWE-bench 5; rows of other datasets are converted by their
    adapter (`adapters`). `place` names the row in errors.

    Raises:
        DataError: the row cannot be converted.
    """
    if "image" in row or "eval_script" in row:  # other datasets too have `log_parser`
        return row
    kind = kind_of(row)
    if kind in REFUSED:
        raise DataError(f"{place}: {REFUSED[kind].format(instance=row.get('instance_id'))}")
    if not kind:
        raise DataError(
            f"{place}: the row has no image and no eval_script, as in SWE-bench 4. Use the "
            "dataset's current revision (SWE-bench/SWE-bench_Verified and its siblings on Hugging "
            "Face). If the row is your own, add image, eval_script, log_parser and eval_type "
            "(docs/swebench.md, An instance of your own)"
        )
    try:
        return ADAPTERS[kind](row, place)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{place}: a row of the kind {kind} lacks a column, or a column has the wrong type: "
            f"{error}"
        ) from error


def parse_row(row: dict[str, Any], place: str) -> Instance:
    """Returns the instance of an official row; `place` names the row in errors.

    Raises:
        DataError: a column is missing or has the wrong type, or the id cannot name a folder.
    """
    if isinstance(row.get("instance_id"), str):
        check_name(row["instance_id"], "instance_id", place)
    for name in _TEXT_COLUMNS:
        if not isinstance(row.get(name), str):
            raise DataError(
                f"{place}: column {name} is {'missing' if name not in row else 'not text'}; rows "
                f"need the columns of SWE-bench 5: {', '.join((*_TEXT_COLUMNS, *_TEST_COLUMNS))}"
            )
    assets = row.get("image_assets") or ""
    return Instance(
        **{name: row[name] for name in _TEXT_COLUMNS},
        fail_to_pass=test_names(row, "FAIL_TO_PASS", place),
        pass_to_pass=test_names(row, "PASS_TO_PASS", place),
        hints_text=row.get("hints_text") or "",
        image_assets=assets if isinstance(assets, str) else json.dumps(assets),
    )


def check_name(name: str, what: str, place: str) -> None:
    """Checks a name from a dataset that becomes part of paths and of a container's name.

    Raises:
        DataError: the name is too long or has characters by which it might lead out of a folder.
    """
    if len(name) > 200 or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise DataError(
            f"{place}: {what} {name[:100]!r} must be at most 200 letters, digits, '.', '_' and "
            "'-', and must not start with '.' or '-': it becomes the name of a folder"
        )


def test_names(row: dict[str, Any], column: str, place: str) -> tuple[str, ...]:
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{place}: column {column} is not JSON ({error})") from error
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise DataError(f"{place}: column {column} must be a list of test names, or one as JSON")
    return tuple(value)


def load_rows(source: str, split: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields rows, each with its place for error messages. A row that another trainer wrapped is
    taken out of the trainer's row. Without a split, `train` of datasets that have only that and
    `test` of all others are read."""
    for place, row in _rows(source, split):
        yield place, unpacked(row, place)


def _rows(source: str, split: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    if split is None or (split == "test" and source.lower() in _TRAIN_ONLY):
        split = "train" if source.lower() in _TRAIN_ONLY else "test"
    path = Path(source)
    if path.is_dir() and (path / f"{split}.parquet").is_file():
        yield from read_rows(path / f"{split}.parquet")
    elif path.suffix in ROW_SUFFIXES:
        yield from read_rows(path)
    elif path.suffix == ".json":
        for number, row in enumerate(_json_list(path, "rows"), start=1):
            yield f"{path}, row {number}", row
    else:
        name = ALIASES.get(source.lower(), source)
        for number, row in enumerate(_hugging_face(name, split), start=1):
            yield f"{name} [{split}], row {number}", dict(row)


def _json_list(path: Path, what: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise DataError(f"file {path} does not exist") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read as JSON: {error}") from error
    if isinstance(content, dict):
        content = [
            {"instance_id": key, **row} if isinstance(row, dict) else row
            for key, row in content.items()
        ]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise DataError(f"{path} must be a JSON list of {what}")
    return content


def _hugging_face(name: str, split: str) -> Any:
    try:
        splits = load_hub(name)
    except DataError as error:
        raise DataError(
            f"{error}. A source is a .jsonl or .parquet file, one of {', '.join(ALIASES)}, or a "
            "Hugging Face name"
        ) from error
    if split not in splits:
        raise DataError(f"dataset {name} has no split {split}; it has: {', '.join(splits)}")
    return splits[split]


def load_predictions(
    path: str | Path, instances: Sequence[Instance], *, is_selection: bool = False
) -> list[Prediction]:
    """Returns predictions in an official format, in their file's order.

    Args:
        path: a `.jsonl` file, a `.json` file (a list, or an object by instance id), a folder of
            `agentrl eval --out`, whose name becomes the model's, or the word `gold` for the
            reference solutions of `instances`.
        is_selection: the instances are some of a dataset. Predictions for others are left out, and
            a warning counts them; otherwise they are an error.

    Raises:
        DataError: the file cannot be read or is empty, names an unknown instance or one twice, or
            holds predictions of several models (the official report has one name).
    """
    if str(path) == "gold":
        return [Prediction(each.instance_id, "gold", each.patch) for each in instances]
    path = Path(path)
    if path.is_dir():
        rows = list(_played(path))
    elif path.suffix == ".json":
        rows = [
            (f"{path}, entry {number}", row)
            for number, row in enumerate(_json_list(path, "predictions"), start=1)
        ]
    elif path.suffix == ".jsonl":
        rows = list(_prediction_lines(path))
    else:
        raise DataError(
            f"predictions {path} must be a .jsonl or .json file, a folder, or the word gold"
        )
    known = {instance.instance_id for instance in instances}
    predictions: dict[str, Prediction] = {}
    num_others = 0
    for place, row in rows:
        prediction = _parse_prediction(row, place)
        if prediction.instance_id not in known and is_selection:
            num_others += 1
            continue
        if prediction.instance_id not in known:
            raise DataError(f"{place}: instance {prediction.instance_id} is not in the dataset")
        if predictions.get(prediction.instance_id, prediction) != prediction:
            raise DataError(f"{place}: a second, other prediction for {prediction.instance_id}")
        predictions[prediction.instance_id] = prediction
    if num_others:
        logger.warning("%s: %d predictions for other instances are left out", path, num_others)
    if not predictions:
        raise DataError(f"{path} holds no predictions{' for these instances' * is_selection}")
    names = sorted({prediction.model_name_or_path for prediction in predictions.values()})
    if len(names) > 1:
        raise DataError(
            f"{path} holds predictions of several models ({', '.join(names[:3])}); the report has "
            "one name, so put each model's predictions in a separate file"
        )
    return list(predictions.values())


def _prediction_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a JSONL file, also such as hold a half of a surrogate pair."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        place = f"{path}, line {number}"
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise DataError(f"{place}: not JSON ({error})") from error
        if row is None and not line.strip():
            continue
        if not isinstance(row, dict):
            raise DataError(f"{place}: every line has to be a JSON object")
        yield place, row


def _played(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a prediction for each episode of an evaluation that ended with a submission."""
    from agentrl.evaluate.episodes import read_evaluation

    for episode in read_evaluation(folder)[1]:
        if "model_patch" in episode.info:
            prediction = Prediction(
                episode.task_id, folder.resolve().name, str(episode.info["model_patch"])
            )
            yield f"{folder}, episode {episode.trajectory_id}", prediction.row()


def _parse_prediction(row: dict[str, Any], place: str) -> Prediction:
    for name in ("instance_id", "model_name_or_path"):
        if not isinstance(row.get(name), str) or not row[name]:
            raise DataError(f"{place}: a prediction needs {name} as text")
    # The harness names a folder in this way.
    model = row["model_name_or_path"].replace("/", "__")
    if model in (".", "..") or "\0" in model or len(model.encode(errors="replace")) > 120:
        raise DataError(
            f"{place}: model_name_or_path {model[:100]!r} must be at most 120 characters that may "
            "stand in the name of a folder"
        )
    patch = row.get("model_patch")
    if patch is not None and not isinstance(patch, str):
        raise DataError(f"{place}: model_patch must be text, or null for none")
    patch = patch or ""
    whole = patch.encode(errors="replace").decode()
    if whole != patch:  # the harness writes it to a file in UTF-8
        logger.warning("%s: the patch holds halves of surrogate pairs; each becomes '?'", place)
    return Prediction(row["instance_id"], row["model_name_or_path"], whole)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes JSON lines; a kill leaves the old file or the new one."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    """Writes a file; a kill leaves the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
