"""Loads questions with answers from SQuAD files and from rows like those of NQ, HotpotQA, TriviaQA.

A task's reference is the list of right answers. For an unanswerable question it is empty, and the
metadata has `unanswerable`. Otherwise the metadata may name the passages that contain an answer:
`gold_ids` (SQuAD: the question's paragraph) or `gold_titles` (HotpotQA: the supporting facts).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.env.data_sets import how_to_get
from agentrl.env.rows import ROW_SUFFIXES, metadata_of, public_of, read_rows
from agentrl.errors import ConfigError, DataError
from agentrl.types import JSON, Message, Task
from agentrl_search.corpus import squad_paragraphs

SAMPLE_DIR = Path(__file__).with_name("sample")
ANSWER_COLUMNS = ("answers", "golden_answers", "answer", "reward_model")
NO_ANSWER = "unanswerable"
"""The right answer to a question that the corpus does not answer."""


@dataclass(slots=True, frozen=True)
class QuestionSet:
    """The tasks of each split, in file order."""

    tasks: dict[str, list[Task]]

    def splits(self) -> dict[str, int | None]:
        return {split: len(tasks) for split, tasks in self.tasks.items()}

    def get(self, split: str, index: int) -> Task:
        return self.tasks[split][index]


def load_questions(
    source: str | dict[str, str],
    *,
    input_key: str | None = None,
    label_key: str | None = None,
    metadata_key: str | None = None,
    public_keys: Sequence[str] = (),
    unanswerable: bool = False,
) -> QuestionSet:
    """Loads all tasks of a source.

    Args:
        source: `sample`; a `.jsonl` or `.parquet` file of rows or a SQuAD `.json` file (split
            `train`); a folder of such files, one split per file name; or a table from split to
            file.
        input_key: column with the question; None uses `prompt` if it contains chat messages, as
            in Search-R1's data, else `question`.
        label_key: column with the answers; None uses the first of `answers`, `golden_answers`,
            `answer` and `reward_model` that a row has. The value is a string, a list of strings, or
            an object as in TriviaQA (`value`, `aliases`) or Search-R1 (`ground_truth.target`).
        metadata_key: column with an object, or its JSON text, to merge into the task's metadata.
        public_keys: columns that whoever plays may see; none with an answer.
        unanswerable: keep SQuAD 2.0's unanswerable questions.

    Raises:
        ConfigError: `source` is none of these.
        DataError: a file cannot be read or contains no tasks, or a row lacks a column.
    """
    if source == "sample":
        files = {"train": SAMPLE_DIR / "questions.jsonl"}
    elif isinstance(source, dict):
        files = {split: Path(name).expanduser() for split, name in source.items()}
    else:
        path = Path(source).expanduser()
        if path.is_dir():
            suffixes = (*ROW_SUFFIXES, ".json")
            found = [file for file in sorted(path.iterdir()) if file.suffix in suffixes]
            files = {file.stem: file for file in found}
            if len(files) < len(found):
                raise DataError(
                    f"folder {path} has two files of the same name but different suffix; each file "
                    "name is a split, so remove one of them"
                )
        else:
            if how := how_to_get(path):
                raise DataError(f"folder {path} does not exist{how}")
            files = {"train": path}
    if not files or any(file.suffix not in (*ROW_SUFFIXES, ".json") for file in files.values()):
        raise ConfigError(
            f"source '{source}' is neither 'sample' nor a .jsonl, .parquet or SQuAD .json file, "
            "nor a folder of such files, nor a table from split to file"
        )
    tasks: dict[str, list[Task]] = {}
    for split, file in files.items():
        if file.suffix == ".json":
            tasks[split] = list(_squad_tasks(file, split, unanswerable))
        else:
            tasks[split] = list(
                _row_tasks(file, split, input_key, label_key, metadata_key, public_keys)
            )
        if not tasks[split]:
            raise DataError(f"{file} contains no questions with an answer")
    return QuestionSet(tasks)


def _squad_tasks(path: Path, split: str, unanswerable: bool) -> Iterator[Task]:
    number = 0
    for passage, questions in squad_paragraphs(path):
        for entry in questions:
            impossible = bool(entry.get("is_impossible"))
            if impossible and not unanswerable:
                continue
            metadata: dict[str, JSON]
            try:
                golds: list[JSON] = [*dict.fromkeys(gold["text"] for gold in entry["answers"])]
                question = entry["question"]
            except (KeyError, TypeError) as error:
                raise DataError(f"{path}, paragraph {passage.id}: {error!r} is missing") from error
            if impossible:
                golds, metadata = [], {"unanswerable": True}
            else:
                metadata = {"gold_ids": [passage.id]}
            yield Task(f"{split}/{number}", question, golds, metadata)
            number += 1


def _row_tasks(
    path: Path,
    split: str,
    input_key: str | None,
    label_key: str | None,
    metadata_key: str | None,
    public_keys: Sequence[str],
) -> Iterator[Task]:
    for index, (place, row) in enumerate(read_rows(path)):
        label = label_key or next((key for key in ANSWER_COLUMNS if row.get(key) is not None), "")
        if row.get(label) is None:
            raise DataError(
                f"{place}: there is no column '{label or 'answers'}'; set label_key to one of: "
                f"{', '.join(row) or 'none'}"
            )
        golds = _texts(row[label])
        if not golds or any(not gold.strip() for gold in golds):
            raise DataError(
                f"{place}: column '{label}' has to be an answer or a list of answers, not "
                f"{str(row[label])[:80]!r}"
            )
        if label in public_keys:
            raise DataError(f"{place}: public_keys names {label!r}, the column with the answers")
        yield Task(
            f"{split}/{index}",
            _prompt(row, input_key, place),
            list(dict.fromkeys(golds)),
            metadata_of(row, metadata_key, place) | _gold_passages(row),
            public_of(row, public_keys, place),
        )


def _texts(value: Any) -> list[str]:
    """Returns the answers in a column's value, however they are nested."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [str(value)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    if isinstance(value, dict):
        for key in ("ground_truth", "target", "text"):
            if key in value:
                return _texts(value[key])
        return _texts([value[key] for key in ("value", "aliases") if value.get(key)])
    return []


def _prompt(row: dict[str, Any], input_key: str | None, place: str) -> str | list[Message]:
    key = input_key or ("prompt" if isinstance(row.get("prompt"), list) else "question")
    prompt = row.get(key)
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    is_chat = isinstance(prompt, list) and all(
        isinstance(message, dict)
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
        for message in prompt
    )
    if isinstance(prompt, list) and is_chat and prompt and prompt[-1]["role"] == "user":
        return [{"role": message["role"], "content": message["content"]} for message in prompt]
    raise DataError(
        f"{place}: column '{key}' has to be a string, or chat messages that end with the user's; "
        f"set input_key to one of: {', '.join(row) or 'none'}"
    )


def _gold_passages(row: dict[str, Any]) -> dict[str, JSON]:
    if row.get("gold_ids"):
        return {"gold_ids": [str(each) for each in row["gold_ids"]]}
    facts = row.get("supporting_facts")
    if isinstance(facts, dict):
        titles = facts.get("title") or []
    else:
        titles = [fact[0] for fact in facts or [] if isinstance(fact, list | tuple) and fact]
    names: list[JSON] = [*dict.fromkeys(title for title in titles if isinstance(title, str))]
    return {"gold_titles": names} if names else {}
