"""Known public data sets, and loaders for the Hugging Face Hub and for local copies.

A data set on the hub is a repository, `owner/name`, with files of rows, in one folder per subset if
there are several. `agentrl data get` writes the rows that an environment reads as JSONL; an
environment that is given a data set's name loads it with `load_hub`, too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError

_ANSWERS_WITHIN_S = 5.0


@dataclass(slots=True, frozen=True, kw_only=True)
class DataSet:
    """The location of a data set and the columns that an environment reads."""

    environment: str
    """Id of the environment that uses the rows."""
    hub: str
    """Repository on the hub, `owner/name`."""
    subset: str | None = None
    """Configuration on the hub; None if there is only one."""
    splits: dict[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    """File to write (`train` becomes train.jsonl) -> split on the hub. Splits without public
    answers are omitted; `test` is then the split on which results are usually reported."""
    columns: dict[str, str] = field(default_factory=dict)
    """Column to write -> column on the hub. Empty writes all columns unchanged."""
    answer: tuple[str, ...] = ()
    """Columns on the hub that together are the reference. They are written to the column `answer`
    as one JSON object, in text form."""
    function: str | None = None
    """Reward function with the official rule, if the environment's own reward differs from it."""

    def keys(self, source: Path) -> list[str]:
        """Returns command-line arguments that select the written rows in a run."""
        words = ["--env.id", self.environment, "--env.config.source", str(source)]
        if self.function is not None:
            words += ["--env.config.instruction", '""', "--env.config.equivalence", "literal"]
            words += ["--env.config.report_reference", "true", "--reward.functions", self.function]
        return words


def _flash_rag(subset: str, **splits: str) -> DataSet:
    return DataSet(
        environment="search",
        hub="RUC-NLPIR/FlashRAG_datasets",
        subset=subset,
        splits=splits,
        columns={"id": "id", "question": "question", "answers": "golden_answers"},
    )


def _constraints(hub: str, function: str) -> DataSet:
    return DataSet(
        environment="math",
        hub=hub,
        splits={"test": "train"},
        columns={"question": "prompt", "key": "key"},
        answer=("instruction_id_list", "kwargs"),
        function=function,
    )


def _swe(hub: str, **splits: str) -> DataSet:
    return DataSet(environment="swebench", hub=hub, splits=splits)


DATA_SETS: dict[str, DataSet] = {
    "gsm8k": DataSet(environment="math", hub="openai/gsm8k", subset="main"),
    "math-500": DataSet(
        environment="math",
        hub="HuggingFaceH4/MATH-500",
        splits={"test": "test"},
        columns={"question": "problem", "answer": "answer", "level": "level"},
    ),
    "aime-2024": DataSet(
        environment="math",
        hub="HuggingFaceH4/aime_2024",
        splits={"test": "train"},
        columns={"question": "problem", "answer": "answer"},
    ),
    "aime-2025": DataSet(
        environment="math",
        hub="math-ai/aime25",
        splits={"test": "test"},
        columns={"question": "problem", "answer": "answer"},
    ),
    "ifeval": _constraints("google/IFEval", "ifeval"),
    "ifbench": _constraints("allenai/IFBench_test", "ifbench"),
    "dapo-math": DataSet(
        environment="math",
        hub="open-r1/DAPO-Math-17k-Processed",
        subset="en",
        splits={"train": "train"},
        columns={"question": "prompt", "answer": "solution"},
    ),
    "nq": DataSet(
        environment="search",
        hub="google-research-datasets/nq_open",
        splits={"train": "train", "test": "validation"},
        columns={"question": "question", "answers": "answer"},
    ),
    "hotpotqa": DataSet(
        environment="search",
        hub="hotpotqa/hotpot_qa",
        subset="distractor",
        splits={"train": "train", "test": "validation"},
        columns={
            "id": "id",
            "question": "question",
            "answer": "answer",
            "type": "type",
            "level": "level",
            "supporting_facts": "supporting_facts",
        },
    ),
    "triviaqa": DataSet(
        environment="search",
        hub="mandarjoshi/trivia_qa",
        subset="rc.nocontext",
        splits={"train": "train", "test": "validation"},
        columns={"id": "question_id", "question": "question", "answer": "answer"},
    ),
    "search-r1": DataSet(environment="search", hub="PeterJinGo/nq_hotpotqa_train"),
    "popqa": _flash_rag("popqa", test="test"),
    "2wikimultihopqa": _flash_rag("2wikimultihopqa", train="train", test="dev"),
    "musique": _flash_rag("musique", train="train", test="dev"),
    "bamboogle": _flash_rag("bamboogle", test="test"),
    "swe-bench-full": _swe("SWE-bench/SWE-bench", test="test"),
    "swe-bench-lite": _swe("SWE-bench/SWE-bench_Lite", test="test"),
    "swe-bench-verified": _swe("SWE-bench/SWE-bench_Verified", test="test"),
    "swe-bench-multilingual": _swe("SWE-bench/SWE-bench_Multilingual", test="test"),
    "swe-bench-multimodal": _swe("SWE-bench/SWE-bench_Multimodal", test="test"),
    "swe-gym": _swe("SWE-Gym/SWE-Gym", train="train"),
    "swe-gym-lite": _swe("SWE-Gym/SWE-Gym-Lite", train="train"),
    "swe-rebench": _swe("nebius/SWE-rebench", train="test"),
    "swe-rebench-v2": _swe("nebius/SWE-rebench-V2", train="train"),
    "swe-smith": _swe("SWE-bench/SWE-smith", train="train"),
    "r2e-gym": _swe("R2E-Gym/R2E-Gym-Subset", train="train"),
}
"""Name for `agentrl data get` -> data set. Columns and splits are taken from the data sets' cards
and from code that loads them; a missing column is an error that names it."""


def how_to_get(path: Path) -> str:
    """Returns the end of a "does not exist" message: the command that writes the file or folder.

    Returns "" if the path is not named after a known data set.
    """
    name = next((each.name for each in (path, path.parent) if each.name in DATA_SETS), None)
    in_data = path.parts[:1] == ("data",)
    if name is None or not (in_data or path.is_absolute()):
        return ""  # `owner/gsm8k` is a repository on the hub
    out = "" if in_data else f" --out {path if path.name == name else path.parent}"
    return f"; `agentrl data get {name}{out}` writes it"


def load_hub(
    name: str, subset: str | None = None, *, mirror: Path | None = None
) -> Mapping[str, Any]:
    """Loads a data set; returns split -> iterable of rows.

    Downloaded files are kept in the hub's local cache, so that an interrupted download is resumed,
    and the cache is used without a network.

    Args:
        name: repository on the hub.
        subset: configuration on the hub.
        mirror: a folder with the repository's files, or with one file per split (`train.parquet`,
            `test.jsonl`), to use instead of the hub.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: the hub cannot be reached, has no such data set, or the files cannot be read.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(f"data set {name} needs: pip install 'agentrl-gym[data]'") from error
    if mirror is not None:
        return _load_mirror(datasets, mirror, subset)
    offline = not _hub_answers()
    try:
        with _offline() if offline else contextlib.nullcontext():
            return datasets.load_dataset(name, subset)
    # Missing, gated, and "pick a configuration" all raise one of these two.
    except (OSError, ValueError) as error:
        if offline:
            known = next((key for key, each in DATA_SETS.items() if each.hub == name), None)
            use = (
                f"run `agentrl data get {known} --from DIR`" if known else "give its files instead"
            )
            raise DataError(
                f"data set {name} is not on this machine, and {_endpoint()} cannot be reached. "
                f"Download it elsewhere (hf download {name} --repo-type dataset --local-dir DIR), "
                f"then {use}; HF_ENDPOINT sets another hub"
            ) from error
        raise DataError(
            f"data set {name} cannot be loaded: {_in_a_line(error)}. If it is gated, set HF_TOKEN; "
            "if it has several configurations, set the subset"
        ) from error


def _load_mirror(datasets: Any, mirror: Path, subset: str | None) -> Mapping[str, Any]:
    mirror = mirror.expanduser()
    if not mirror.is_dir():
        raise DataError(f"folder {mirror} does not exist; the path is relative to {Path.cwd()}")
    # The dataset card lists the files of each subset; without one, a subset is a folder.
    card = mirror / "README.md"
    if subset is not None and not (card.is_file() and "config_name" in card.read_text("utf-8")):
        mirror, subset = (mirror / subset if (mirror / subset).is_dir() else mirror), None
    try:
        return datasets.load_dataset(str(mirror), subset, streaming=True)
    except (OSError, ValueError) as error:
        raise DataError(f"folder {mirror} cannot be read: {_in_a_line(error)}") from error


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _hub_answers() -> bool:
    """Returns whether the hub is reachable, with a single request: its own library retries long."""
    import httpx  # imported here, because the command line imports this module for DATA_SETS

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        httpx.head(_endpoint(), timeout=_ANSWERS_WITHIN_S)
    except httpx.HTTPError:
        return False
    return True


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Makes `datasets` use only its cache; it reads HF_HUB_OFFLINE only when it is imported."""
    config = importlib.import_module("datasets").config
    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
