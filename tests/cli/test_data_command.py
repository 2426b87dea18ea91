"""`agentrl data get` from copies of data sets with the columns and file names of the real ones."""

import json
import os
import shlex
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

import agentrl.env  # noqa: E402
from agentrl.cli.data import get  # noqa: E402
from agentrl.cli.main import main  # noqa: E402
from agentrl.env.data_sets import DATA_SETS, load_hub  # noqa: E402
from agentrl.errors import AgentRLError, ConfigError, DataError  # noqa: E402
from agentrl_rewards.ifbench import ifbench  # noqa: E402
from agentrl_rewards.instructions import ifeval  # noqa: E402
from agentrl_search.tasks import SAMPLE_DIR  # noqa: E402

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="needs agentrl-gym[data]")
CONTEXT = {"title": ["Ada", "Oslo"], "sentences": [["She was."], ["It is.", "It was."]]}
CHAT = [{"role": "user", "content": "Answer the given question. Who built it?"}]
# One row of each: the columns of its card, and the files of its repository.
ROWS = {
    "gsm8k": (
        {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
        {"train": "main/train-00000-of-00001.parquet", "test": "main/test-00000-of-00001.parquet"},
    ),
    "math-500": (
        {
            "problem": "What is $1+1$?",
            "solution": "$\\boxed{2}$",
            "answer": "2",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/1.json",
        },
        {"test": "test.jsonl"},
    ),
    "aime-2024": (
        {"id": 60, "problem": "Find $p$.", "solution": "...", "answer": "204", "year": "2024"},
        {"test": "data/train-00000-of-00001.parquet"},
    ),
    "aime-2025": ({"problem": "Find $q$.", "answer": "70", "id": "0"}, {"test": "test.jsonl"}),
    "ifeval": (
        {
            "key": 1000,
            "prompt": "Write without commas, in 3 words or more.",
            "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
            "kwargs": [{"num_words": None}, {"num_words": 3, "relation": "at least"}],
        },
        {"test": "data/train-00000-of-00001.parquet"},
    ),
    "ifbench": (
        {
            "key": "1",
            "prompt": "Use the word fog 3 times.",
            "instruction_id_list": ["count:keywords_multiple"],
            "kwargs": [{f"keyword{i}": f"fog{i}" for i in range(1, 6)}],
        },
        {"test": "data/train-00000-of-00001.parquet"},
    ),
    "dapo-math": (
        {"prompt": "What is 17 times 2?", "solution": "34", "data_source": "math_dapo"},
        {"train": "en/train-00000-of-00001.parquet"},
    ),
    "nq": (
        {"question": "who wrote hamlet", "answer": ["William Shakespeare", "Shakespeare"]},
        {
            "train": "nq_open/train-00000-of-00001.parquet",
            "test": "nq_open/validation-00000-of-00001.parquet",
        },
    ),
    "hotpotqa": (
        {
            "id": "5a7a",
            "question": "Where was Ada born?",
            "answer": "Oslo",
            "type": "bridge",
            "level": "hard",
            "supporting_facts": {"title": ["Ada", "Oslo", "Ada"], "sent_id": [0, 1, 0]},
            "context": CONTEXT,
        },
        {
            "train": "distractor/train-00000-of-00002.parquet",
            "test": "distractor/validation-00000-of-00001.parquet",
        },
    ),
    "triviaqa": (
        {
            "question": "Capital of Norway?",
            "question_id": "tc_1",
            "question_source": "quiz",
            "answer": {
                "aliases": ["Oslo", "Christiania"],
                "normalized_aliases": ["oslo", "christiania"],
                "matched_wiki_entity_name": "",
                "normalized_value": "oslo",
                "type": "WikipediaEntity",
                "value": "Oslo",
            },
        },
        {
            "train": "rc.nocontext/train-00000-of-00001.parquet",
            "test": "rc.nocontext/validation-00000-of-00001.parquet",
        },
    ),
    "search-r1": (
        {
            "id": "train_0",
            "question": "who built it?",
            "golden_answers": ["Ada"],
            "data_source": "nq",
            "prompt": CHAT,
            "ability": "fact-reasoning",
            "reward_model": {"ground_truth": {"target": ["Ada"]}, "style": "rule"},
            "extra_info": {"index": 0, "split": "train"},
        },
        {"train": "train.parquet", "test": "test.parquet"},
    ),
    "musique": (
        {"id": "2hop__1", "question": "Who?", "golden_answers": ["Ada"], "metadata": {"hops": 2}},
        {"train": "musique/train.jsonl", "test": "musique/dev.jsonl"},
    ),
    "bamboogle": (
        {"id": "test_0", "question": "Who?", "golden_answers": ["Ada"], "metadata": {}},
        {"test": "bamboogle/test.jsonl"},
    ),
}


def copy_of(name, folder, number=3):
    row, files = ROWS[name]
    for place in files.values():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            parquet.write_table(pa.Table.from_pylist([row] * number), path)
        else:
            path.write_text(f"{json.dumps(row)}\n" * number)
    return folder


def with_card(copy):
    (copy / "main").rename(copy / "elsewhere")
    (copy / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
        "    path: elsewhere/train-*\n  - split: test\n    path: elsewhere/test-*\n"
        "- config_name: socratic\n  data_files:\n  - split: train\n    path: none/train-*\n---\n"
    )
    return copy


@pytest.mark.parametrize("name", ROWS)
async def test_the_environment_plays_what_is_written(name, tmp_path):
    copy = copy_of(name, tmp_path / "copy")
    out = tmp_path / "out"
    paths = get(name, out, mirror=copy)
    assert [path.name for path in paths] == [f"{split}.jsonl" for split in DATA_SETS[name].splits]
    for path in paths:
        assert len(path.read_text().splitlines()) == 3

    environment = DATA_SETS[name].environment
    passages = {"corpus": str(SAMPLE_DIR / "passages.jsonl")} if environment == "search" else {}
    row, _ = ROWS[name]
    asked = CHAT[0]["content"] if name == "search-r1" else row.get("question") or row.get("problem")
    for split in DATA_SETS[name].splits:
        env = agentrl.env.make(environment, source=str(out), **passages)
        messages = await env.reset(split, 2)
        await env.close()
        assert (asked or row["prompt"]) in messages[-1]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ifeval", "ifbench"])
def test_the_official_rule_reads_what_is_written(name, tmp_path, capsys):
    """The command that `data get` prints plays the rows, and the rule judges every answer."""
    copy, out = copy_of(name, tmp_path / "copy"), tmp_path / "out"
    assert main(["data", "get", name, "--from", str(copy), "--out", str(out)]) == 0
    told = capsys.readouterr().out.split("next: ")[1]
    run = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
    command = ["eval", str(run), *shlex.split(told), "--eval.num_tasks", "2", "--env.config.tools"]
    assert main([*command, "false", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_samples"], result["num_failed"]) == (2, 0)
    answer = json.loads((out / "test.jsonl").read_text().splitlines()[0])["answer"]
    function = {"ifeval": ifeval, "ifbench": ifbench}[name]
    kept = {"ifeval": "no commas here", "ifbench": KEYWORDS}[name]
    assert function(kept, answer)["score"] == 1.0
    assert function("Yes, no.", answer)["score"] == 0.0


# The n-th keyword is wanted once, twice, three, five and seven times.
KEYWORDS = " ".join(f"fog{i}" for i, number in enumerate((1, 2, 3, 5, 7), 1) for _ in range(number))


def test_references_survive(tmp_path):
    from agentrl_math.tasks import Keys
    from agentrl_math.tasks import load_rows as load_math
    from agentrl_search.tasks import load_questions

    def task(name):
        out = tmp_path / name
        get(name, out, mirror=copy_of(name, tmp_path / f"{name}-copy"))
        if DATA_SETS[name].environment == "math":
            return load_math(str(out), None, Keys("question", "answer", None)).get("train", 0)
        return load_questions(str(out)).get("train", 0)

    assert task("gsm8k").reference == "5"
    assert task("dapo-math").reference == "34"
    assert task("nq").reference == ["William Shakespeare", "Shakespeare"]
    assert task("triviaqa").reference == ["Oslo", "Christiania"]
    assert task("search-r1").reference == ["Ada"]
    hotpot = task("hotpotqa")
    assert (hotpot.reference, hotpot.metadata) == (["Oslo"], {"gold_titles": ["Ada", "Oslo"]})
    assert "context" not in (tmp_path / "hotpotqa" / "train.jsonl").read_text()


def test_rows_of_swe_data_sets_keep_their_columns(tmp_path):
    row = {"instance_id": "own__spans-1", "repo": "own/spans", "FAIL_TO_PASS": ["a"], "patch": "x"}
    copy = tmp_path / "copy" / "data"
    copy.mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist([row]), copy / "train-00000-of-00001.parquet")
    (path,) = get("swe-gym", tmp_path / "out", mirror=copy.parent)
    assert json.loads(path.read_text()) == row


def test_a_card_says_which_files_are_which_subset(tmp_path):
    copy = with_card(copy_of("gsm8k", tmp_path / "copy"))
    assert set(load_hub("openai/gsm8k", "main", mirror=copy)) == {"train", "test"}


def test_called_again_it_writes_what_is_missing(tmp_path, capsys):
    copy, out = copy_of("gsm8k", tmp_path / "copy"), tmp_path / "out"
    command = ["data", "get", "gsm8k", "--out", str(out), "--from", str(copy)]
    assert main([*command, "--split", "train", "--limit", "2"]) == 0
    assert "train.jsonl: 2 rows" in capsys.readouterr().out
    assert [path.name for path in out.iterdir()] == ["train.jsonl"]
    assert main(command) == 0  # the other split, too
    assert "train.jsonl is there already and is kept" in capsys.readouterr().out
    assert [len((out / f"{s}.jsonl").read_text().splitlines()) for s in ("train", "test")] == [2, 3]
    before = (out / "train.jsonl").stat()
    (out / "test.jsonl").unlink()
    (out / "test.jsonl.part").write_text("half of a li")  # as an interrupted call leaves it
    assert main(command) == 0
    assert (out / "train.jsonl").stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(path.name for path in out.iterdir()) == ["test.jsonl", "train.jsonl"]
    # Everything is there: no source is asked.
    assert main(["data", "get", "gsm8k", "--out", str(out), "--from", "/nowhere"]) == 0


def test_what_is_wrong_is_named(tmp_path):
    copy = copy_of("gsm8k", tmp_path / "copy")
    with pytest.raises(ConfigError, match="no data set 'gsm9k'; use one of: gsm8k"):
        get("gsm9k", tmp_path / "out")
    with pytest.raises(ConfigError, match="nq has no split dev; it has: train, test"):
        get("nq", tmp_path / "out", splits=["dev"])
    with pytest.raises(
        DataError, match=r"no column prompt, solution, only question, answer; is it from open"
    ):
        get("dapo-math", tmp_path / "out", mirror=copy / "main")
    with pytest.raises(DataError, match=r"folder .*none does not exist"):
        get("gsm8k", tmp_path / "out", mirror=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty cannot be read"):
        get("gsm8k", tmp_path / "out", mirror=tmp_path / "empty")
    assert not list((tmp_path / "out").glob("*.jsonl"))
    assert main(["data", "get", "gsm8k", "--out", str(tmp_path), "--from", "/nowhere"]) == 2


@pytest.mark.slow
def test_without_a_network_it_says_so_at_once(tmp_path):
    # Nobody listens at this port of this machine.
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "data", "get", "gsm8k", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 2
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
    assert "hf download openai/gsm8k --repo-type dataset" in done.stderr
    assert "Retrying" not in done.stderr, f"after {time.monotonic() - began:.0f} s"


@pytest.mark.slow
def test_without_a_network_what_was_downloaded_before_is_used(tmp_path):
    copy = with_card(copy_of("gsm8k", tmp_path / "gsm8k"))
    # The cache as `datasets` leaves it, under the name that the hub's data set has there.
    code = (
        "import datasets, sys, pathlib\n"
        "datasets.load_dataset(sys.argv[1], 'main')\n"
        "cache = pathlib.Path(datasets.config.HF_DATASETS_CACHE)\n"
        "made, = [path for path in cache.iterdir() if path.is_dir()]\n"
        "config, = made.iterdir()\n"
        "config.rename(made / 'main')\n"
        "made.rename(cache / 'openai___gsm8k')\n"
        "from agentrl.env.data_sets import load_hub\n"
        "print(len(load_hub('openai/gsm8k', 'main')['train']))\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1:] == ["3"], done.stderr[-2000:]


@pytest.mark.parametrize(
    ("environment", "source", "said"),
    [
        ("math", "data/gsm8k", r"folder data/gsm8k does not .*`agentrl data get gsm8k` writes it"),
        ("math", {"train": "data/dapo-math/train.jsonl"}, "`agentrl data get dapo-math` writes it"),
        ("search", "/big/search-r1", "`agentrl data get search-r1 --out /big/search-r1` writes it"),
    ],
)
async def test_data_that_was_not_fetched_yet_names_the_command(environment, source, said):
    env = agentrl.env.make(environment, source=source)
    with pytest.raises(AgentRLError, match=said):
        await env.reset("train", 0)
    await env.close()
