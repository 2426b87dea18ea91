"""Rows of public data sets: which ones agentrl knows, and how the hub or a copy of it is read.

A data set of the Hugging Face hub is a repository, `owner/name`, with files of rows, in folders of
their own where it has several subsets. `agentrl data get` writes the rows that an environment reads
as JSONL; environments load a data set that is named to them by the same `load_hub`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError

_ANSWERS_WITHIN_S = 5.0


@dataclass(slots=True, frozen=True, kw_only=True)
class DataSet:
    """The place of a data set's rows, and the columns that an environment reads."""

    environment: str
    """Id of the environment that plays the rows."""
    hub: str
    """Repository on the hub, `owner/name`; of `bfcl`, a package of the Python package index."""
    subset: str | None = None
    """Configuration on the hub; None: it has one only."""
    splits: dict[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    """File to write (`train` becomes train.jsonl) -> split on the hub. A split whose answers are
    not public is left out, and `test` is then the split that people report."""
    columns: dict[str, str] = field(default_factory=dict)
    """Column to write -> column on the hub. Empty: all, as they are."""
    answer: tuple[str, ...] = ()
    """Columns on the hub that together are the reference: the column `answer` holds them as the
    text of one JSON object."""
    function: str | None = None
    """The reward function that is the official rule, where the environment's own is not."""
    left_out: str = ""
    """Which splits there are besides and why they are not here, as a sentence."""

    def keys(self, source: Path) -> list[str]:
        """Returns the keys of a run file, as words of a command, that play the written rows."""
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


_CALLS = ("simple", "multiple", "parallel", "parallel_multiple")
_BFCL = ("simple_python", *_CALLS[1:], "irrelevance", *(f"live_{each}" for each in _CALLS))
_BFCL += ("live_irrelevance", "live_relevance")
"""Categories of BFCL whose calls are judged as they stand."""


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
    "bfcl": DataSet(
        environment="bfcl",
        hub="bfcl-eval",
        splits={name: name for name in _BFCL},
        left_out="Rows of Java and JavaScript are judged by parsers of these languages, and those "
        "of several turns by running them, which is not done here",
    ),
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
"""By the name that `agentrl data get` takes. Columns and splits are those of the data sets' cards
and of the code that people load them with; what a row lacks is an error that names it."""


def how_to_get(path: Path) -> str:
    """The command that writes a file or folder named after a data set, as the end of a sentence
    that says it is not there; "" where the name is none of theirs."""
    name = next((each.name for each in (path, path.parent) if each.name in DATA_SETS), None)
    in_data = path.parts[:1] == ("data",)
    if name is None or not (in_data or path.is_absolute()):
        return ""  # `owner/gsm8k` is of the hub
    out = "" if in_data else f" --out {path if path.name == name else path.parent}"
    return f"; `agentrl data get {name}{out}` writes it"


def load_hub(
    name: str, subset: str | None = None, *, mirror: Path | None = None
) -> Mapping[str, Any]:
    """The splits of a data set, each an iterable of rows.

    Downloaded files stay in the hub's cache on this machine, so an interrupted download goes on
    where it was, and without a network what is there is used.

    Args:
        name: repository on the hub.
        mirror: a folder with the repository's files, or with a file per split (`train.parquet`,
            `test.jsonl`); the hub is not asked then.

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
    # Missing, gated, and "pick a configuration" all arrive as one of these two.
    except (OSError, ValueError) as error:
        if offline:
            known = next((key for key, each in DATA_SETS.items() if each.hub == name), None)
            use = f"`agentrl data get {known} --from DIR`" if known else "its files named instead"
            raise DataError(
                f"data set {name} is not on this machine, and {_endpoint()} cannot be reached. "
                f"Download it elsewhere (hf download {name} --repo-type dataset --local-dir DIR), "
                f"then {use}; HF_ENDPOINT names another hub"
            ) from error
        raise DataError(
            f"data set {name} can't be loaded: {_in_a_line(error)}. A gated one needs HF_TOKEN; "
            "of several configurations, name one as the subset"
        ) from error


def _load_mirror(datasets: Any, mirror: Path, subset: str | None) -> Mapping[str, Any]:
    mirror = mirror.expanduser()
    if not mirror.is_dir():
        raise DataError(f"folder {mirror} does not exist; the path is relative to {Path.cwd()}")
    # A card says which files are which subset's; without one, a folder of its name does.
    card = mirror / "README.md"
    if subset is not None and not (card.is_file() and "config_name" in card.read_text("utf-8")):
        mirror, subset = (mirror / subset if (mirror / subset).is_dir() else mirror), None
    try:
        return datasets.load_dataset(str(mirror), subset, streaming=True)
    except (OSError, ValueError) as error:
        raise DataError(f"folder {mirror} can't be read: {_in_a_line(error)}") from error


def load_bfcl(
    package: str, subset: str | None = None, *, mirror: Path | None = None
) -> Mapping[str, Iterable[dict[str, Any]]]:
    """The rows of each category of BFCL with their `ground_truth`: the acceptable calls, none
    where no function fits, and null where any call will do.

    Args:
        package: its name on the package index; the rows stand in its files, and none of its code
            is run.
        mirror: a folder with these files in place of the installed package.

    Raises:
        DataError: the files are not there.
    """
    if mirror is None:
        found = importlib.util.find_spec(package.replace("-", "_"))
        mirror = Path(*found.submodule_search_locations or ()) / "data" if found else None
    if mirror is None:
        raise DataError(
            f"the rows stand in the package {package}: pip install --no-deps {package}; or unpack "
            f"what pip download --no-deps {package} gives, and add --from DIR/bfcl_eval/data"
        )
    return {category: _bfcl_rows(mirror, category) for category in _BFCL}


def _bfcl_rows(folder: Path, category: str) -> Iterator[dict[str, Any]]:
    name = f"BFCL_v4_{category}.json"
    wanted: Any = [] if category.endswith("irrelevance") else None
    answers: dict[str, Any] = {}
    try:
        if not category.endswith("relevance"):
            lines = (folder / "possible_answer" / name).read_bytes().splitlines()
            answers = {each["id"]: each["ground_truth"] for each in map(json.loads, lines)}
        for row in map(json.loads, (folder / name).read_bytes().splitlines()):
            yield row | {"ground_truth": answers[row["id"]] if answers else wanted}
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"folder {folder} can't be read as rows of BFCL: {error!r}") from error


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _hub_answers() -> bool:
    """Asked once and briefly: the hub's own library goes on asking."""
    import httpx  # the command line imports this module for its list of names

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        httpx.head(_endpoint(), timeout=_ANSWERS_WITHIN_S)
    except httpx.HTTPError:
        return False
    return True


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """The hub's library uses its cache alone; it reads the environment when it is imported only."""
    config = importlib.import_module("datasets").config
    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
