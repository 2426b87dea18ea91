"""Every run file of examples/recipes is one that runs, scaled down to a tiny model of its family,
and says what it takes in figures that agree with the code."""

import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from model_shapes import PARAMETERS, SHAPES, config_of, save_config
from tokenizers_for_tests import make_tokenizer

from agentrl.cli.main import main
from agentrl.config import RunConfig, load_config
from agentrl.env.data_sets import DATA_SETS
from agentrl.rollout import read_trajectories

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))
RECIPES.append(ROOT / "examples" / "search" / "search_r1.toml")
PAGE = ROOT / "docs" / "recipes.md"
HEADINGS = ["Model", "Data", "Run", "Hardware", "Memory", "Time", "Curve"]


def by_name(file: Path) -> str:
    return file.stem


def header(file: Path) -> dict[str, str]:
    """The comment on top of a recipe, by its headings."""
    said, heading = {}, ""
    for line in file.read_text().split("\n\n", 1)[0].splitlines():
        found = re.fullmatch(r"# ([A-Z][a-z]+): +(.*)", line)
        heading = found[1] if found else heading
        said[heading] = f"{said.get(heading, '')} {found[2] if found else line[2:].strip()}".strip()
    return said


@pytest.mark.parametrize("file", RECIPES, ids=by_name)
def test_a_recipe_is_valid_and_says_how_it_is_run(file, capsys):
    assert main(["train", str(file), "--dry-run"]) == 0
    assert "[objective]" in capsys.readouterr().out
    said = header(file)
    assert list(said)[1:] == HEADINGS
    assert str(file.relative_to(ROOT)) in said["Run"]
    assert "ot run by us" in said["Time"], "or the figures of the run"
    for name in re.findall(r"agentrl data get (\S+?)[;,]?(?: |$)", said["Data"]):
        assert name in DATA_SETS
        assert f"data/{name}" in file.read_text()


def training_memory(file: Path, folder: Path):
    """Returns `agentrl doctor`'s estimate for one GPU, from the model's published shape."""
    from agentrl.train.memory import estimate

    config = load_config(file, [])
    model = save_config(config.model.path, folder)
    shaped = load_config(file, [f"--model.path={model}"])
    return estimate(shaped, device_type="cuda", num_ranks=config.train.parallel.data or 1)


@pytest.mark.parametrize("file", RECIPES, ids=by_name)
def test_what_a_recipe_says_of_memory_is_what_doctor_says(file, tmp_path):
    said = header(file)
    needed = training_memory(file, tmp_path).total / 2**30
    assert re.match(r"[\d.]+ GiB", said["Memory"])[0] == f"{needed:.1f} GiB"
    gpus, gigabytes = map(int, re.match(r"(\d+) GPUs? of (\d+) GB", said["Hardware"]).groups())
    config = load_config(file, [])
    ranks = config.train.parallel.data or 1
    share = 0.0
    if gpus == ranks or "teacher" in tomllib.loads(file.read_text()):
        # The server that the run starts is on the GPU that trains.
        share = float(
            config.inference.args[config.inference.args.index("--gpu-memory-utilization") + 1]
        )
        assert f"{share:g} of it" in said["Hardware"] or f"takes {share:g}" in said["Hardware"]
    else:
        assert ranks + config.inference.num_servers == gpus
    # A twentieth for what an estimate leaves out: CUDA's context, kernels, fragmentation.
    assert needed + share * gigabytes < 0.95 * gigabytes


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_have_as_many_parameters_as_the_cards_say(name):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PARAMETERS[name], rel=0.02)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A folder with a model of a family, two layers of random weights, by `model_type`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made: dict[str, str] = {}

    def make(family: str) -> str:
        if family not in made:
            tokenizer = make_tokenizer()
            torch.manual_seed(0)
            config = AutoConfig.for_model(
                family,
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=8192,
                **({"head_dim": 16} if family == "qwen3" else {}),
            )
            folder = tmp_path_factory.mktemp(family)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[family] = str(folder)
        return made[family]

    return make


def scaled_down(file: Path, model: str) -> dict:
    """The recipe's own keys but for model, data, engine, ranks and size."""
    run = tomllib.loads(file.read_text())
    run["run"] |= {"num_steps": 2, "eval_every": 0}
    run["model"]["path"] = model
    run["inference"] = {"backend": "embedded"}
    rollout = run["rollout"]
    rollout |= {"groups_per_step": 2, "group_size": 2, "max_turn_tokens": 8, "max_staleness": 0}
    rollout["max_context_tokens"] = min(rollout["max_context_tokens"], 2048)
    rollout.pop("keep", None)  # a random model has no rewards
    train = run["train"]
    train.pop("parallel", None)
    train["num_minibatches"] = min(train.get("num_minibatches", 1), 2)
    env = run["env"]["config"]
    if run["env"]["id"] == "math":
        env["source"] = {"train": SAMPLES["math"], "test": SAMPLES["math"]}
    elif run["env"]["id"] == "search":
        env |= {"source": SAMPLES["search"], "corpus": SAMPLES["passages"]}
        del env["retriever_url"]
    if "agent" in run:
        run["agent"]["run"] = str(file.parent / run["agent"]["run"])
    if "teacher" in run:
        run["teacher"] = {"path": model}
    return run


SAMPLES = {
    "math": str(ROOT / "environments" / "math" / "agentrl_math" / "sample.jsonl"),
    "search": str(
        ROOT / "environments" / "search" / "agentrl_search" / "sample" / "questions.jsonl"
    ),
    "passages": str(
        ROOT / "environments" / "search" / "agentrl_search" / "sample" / "passages.jsonl"
    ),
}


def train_two_steps(run: dict, folder: Path) -> list[dict]:
    run["run"]["dir"] = str(folder / "run")
    small = folder / "run.toml"
    small.write_text(RunConfig.model_validate(run).to_toml())
    assert main(["train", str(small), "--quiet"]) == 0
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("file", [each for each in RECIPES if each.stem != "swe"], ids=by_name)
def test_a_recipe_trains_two_steps(file, tiny_model, tmp_path):
    if "reasoning" in file.stem:
        pytest.importorskip("reasoning_gym", reason="pip install 'agentrl-gym[reasoning-gym]'")
    if file.stem == "agent":
        pytest.importorskip("agents.run", reason="pip install openai-agents")
    family = SHAPES[load_config(file, []).model.path]["model_type"]
    run = scaled_down(file, tiny_model(family))
    steps = train_two_steps(run, tmp_path)
    assert len(steps) == 2 and all(step["rollout/error_fraction"] == 0 for step in steps)
    assert steps[-1]["train/updates"] == 2 * run["train"]["num_minibatches"]


@pytest.mark.slow
def test_tasks_are_chosen_by_pass_rate(tmp_path):
    """The program of docs/recipes.md, on a rollout of the quickstart's tasks."""
    code = re.search(r"```python\n(# rate\.py\n.*?)```", PAGE.read_text(), re.DOTALL)[1]
    quickstart = str(ROOT / "examples" / "quickstart" / "run.toml")
    size = ["--eval.num_tasks=3", "--eval.samples_per_task=4"]
    assert main(["rollout", quickstart, "--out", str(tmp_path / "rated"), *size]) == 0
    data = tmp_path / "data" / "swe-gym"
    data.mkdir(parents=True)
    rows = [{"instance_id": f"test/{number}", "patch": "x"} for number in range(5)]
    (data / "valid.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    rewards = defaultdict(set)
    for _, trajectory in read_trajectories(tmp_path / "rated"):
        rewards[trajectory.task_id].add(trajectory.reward)
    chosen = [json.loads(line) for line in (data / "train_on.jsonl").read_text().splitlines()]
    assert [row["instance_id"] for row in chosen] == [t for t in rewards if len(rewards[t]) > 1]
