"""The figures of docs/memory_tables.md and docs/recipes.md are those of `agentrl doctor`."""

import re
from pathlib import Path

import pytest
from model_shapes import SHAPES, config_of, save_config
from test_recipes import RECIPES, header

from agentrl.config import load_config
from agentrl.train.memory import Memory, estimate

DOCS = Path(__file__).parents[1] / "docs"
BASE = ["--model.dtype=bfloat16", "--model.gradient_checkpointing=true"]
BASE += ["--rollout.max_context_tokens=8192", "--train.token_budget=8192"]


def tables(page: str) -> list[list[list[str]]]:
    """The rows of each table below its head, by cell."""
    blocks = re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(), flags=re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()[2:]]
        for block in blocks
    ]


def estimated(model: str, folder: Path, *overrides: str, num_ranks: int = 1) -> Memory:
    run_file = folder / "run.toml"
    run_file.write_text(f'[model]\npath = "{save_config(model, folder / "model")}"\n')
    config = load_config(run_file, [*BASE, *overrides])
    return estimate(config, device_type="cuda", num_ranks=num_ranks)


def gib(number: int) -> str:
    return f"{number / 2**30:.1f}"


def parts_of(setting: str, folder: Path) -> list[str]:
    """Computes the expected row of the table of keys."""
    given = re.match(r"`([a-z_.]+) = \"?([^\"`]+)\"?`", setting)
    ranks = re.match(r"`torchrun --nproc-per-node (\d+)`", setting)
    assert given or ranks or setting == "nothing else", setting
    overrides = [f"--{given[1]}={given[2]}"] if given else []
    num_ranks = int(ranks[1]) if ranks else 1
    found = estimated("Qwen/Qwen3-8B", folder, *overrides, num_ranks=num_ranks)
    return [gib(part) for part in (*found.parts.values(), found.total)]


def totals_of(model: str, folder: Path) -> list[str]:
    """Computes the expected row of the table of models."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        parameters = sum(
            p.numel() for p in AutoModelForCausalLM.from_config(config_of(model)).parameters()
        )
    by_ranks = [gib(estimated(model, folder, num_ranks=number).total) for number in (1, 4, 8)]
    adapter = gib(estimated(model, folder, "--model.lora.rank=32").total)
    return [f"{parameters / 1e9:.2f} billion", *by_ranks, adapter]


@pytest.mark.slow
def test_the_tables_of_the_memory_page_are_doctor_s(tmp_path):
    keys, models = tables("memory_tables.md")
    for setting, *figures in keys:
        assert figures == parts_of(setting, tmp_path), setting
    assert {model.strip("`") for model, *_ in models} == set(SHAPES)
    for model, *figures in models:
        assert figures == totals_of(model.strip("`"), tmp_path), model


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_table_of_recipes_says_what_their_files_say(file):
    rows = {re.search(r"([a-z0-9_]+\.toml)", row[0])[1]: row for row in tables("recipes.md")[0]}
    row, said = rows[file.name], header(file)
    assert re.match(r"[\d.]+ GiB", said["Memory"])[0] in row[2]
    assert re.match(r"\d+ GPUs? of \d+ GB", said["Hardware"])[0] in row[1]
    assert len(rows) == len(RECIPES)
