"""The estimate against a process that trains: its resident memory, part by part."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from agentrl.api import train
from agentrl.cli import doctor
from agentrl.config import load_config
from agentrl.model.load import auto_class
from agentrl.train import memory, trainer
from agentrl.train.memory import (
    BUDGET_STEP,
    MAX_TOKEN_BUDGET,
    USABLE,
    Memory,
    chooses_token_budget,
    estimate,
    fitting_token_budget,
    moments_of_a_step,
    remedies,
    with_token_budget,
)

NUM_TOKENS = 2048
SHAPE = dict(
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
)

# Each part is the growth of the resident size while it comes into being; of the head, which gives
# most of its memory back, the growth of the peak.
MEASURE = f"""
import gc, json, sys
import numpy as np, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from agentrl.model.attention import ATTENTION_NAME
from agentrl.model.head import trained_logprobs
from agentrl.model.logprobs import (backbone_hidden)
from agentrl.model.load import (set_gradient_checkpointing)
from agentrl.model.rows import pack
from agentrl.types import Sample

torch.set_num_threads(1)
NUM_TOKENS = {NUM_TOKENS}

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def grown(run, name="VmRSS"):
    gc.collect()
    before = status("VmRSS")
    if name == "VmHWM":
        open("/proc/self/clear_refs", "w").write("5")
    result = run()
    gc.collect()
    return result, status(name) - before

def make(**changed):
    shape = {SHAPE!r} | changed
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    return model

def sample(length):
    ids = np.arange(length) % 61
    zeros = np.zeros(length, np.float32)
    return Sample(ids, (ids > -1).astype(np.uint8) * (np.arange(length) > 0), zeros,
                  ids, ids, "t", "g", 0.0, zeros[:1])

def step(model, length):
    micro = pack([sample(length)], [0])
    model.requires_grad_(True)
    hidden = backbone_hidden(model, micro)
    hidden.sum().backward()
    return torch.optim.AdamW(model.parameters(), fused=True)

warm = make(hidden_size=32, num_hidden_layers=1)
step(warm, 8).step()
model, weights = grown(make)
set_gradient_checkpointing(model, json.loads(sys.argv[1]))
micro = pack([sample(NUM_TOKENS)], [0])
hidden, activations = grown(lambda: backbone_hidden(model, micro))
states = hidden[torch.from_numpy(micro.trained_index)].detach().requires_grad_()
targets = torch.from_numpy(micro.targets)

def head():
    logprobs, entropy = trained_logprobs(
        states.clone(), model.lm_head.weight, targets, with_entropy=True
    )
    logprobs.sum().backward()

_, logits = grown(head, "VmHWM")
model.zero_grad()
del states
_, gradients = grown(lambda: None)
before = status("VmRSS") - activations
hidden.sum().backward()
del hidden
gc.collect()
gradients = status("VmRSS") - before
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
_, moments = grown(optimizer.step)
print(json.dumps(dict(weights=weights, gradients=gradients, moments=moments,
                      activations=activations, logits=logits)))
"""


def config_of(tmp_path: Path, *overrides: str):
    Qwen3Config(**SHAPE).save_pretrained(tmp_path / "model")
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{tmp_path / "model"}"\n'
        f"[train]\ntoken_budget = {NUM_TOKENS}\n[rollout]\nmax_context_tokens = {NUM_TOKENS}\n"
    )
    return load_config(tmp_path / "run.toml", list(overrides))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("checkpointing", ["false", "0.5"])
def test_every_part_is_within_15_percent_of_what_a_process_uses(tmp_path, checkpointing):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, checkpointing],
        # Freed blocks go back to the system at once, so that the resident size is what is in use.
        env={"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PATH": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    used = json.loads(done.stdout.splitlines()[-1])
    config = config_of(tmp_path, "--model.gradient_checkpointing", checkpointing)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()
    moments = moments_of_a_step(model, config, 4, "cpu", 1)
    expected = next(each for each in moments if each.when == "the head's backward pass")
    for part in ("weights", "gradients", "moments"):
        assert getattr(expected, part) == pytest.approx(used[part], rel=0.15), (part, used)
    rest = used["activations"] + used["logits"]
    assert expected.activations + expected.logits == pytest.approx(rest, rel=0.15), (used, expected)


def test_parts_by_hand(tmp_path):
    parameters = sum(p.numel() for p in Qwen3ForCausalLM(Qwen3Config(**SHAPE)).parameters())
    plain = estimate(config_of(tmp_path), device_type="cpu")
    assert (plain.weights, plain.gradients) == (4 * parameters, 4 * parameters)
    assert plain.moments == 8 * parameters
    narrow = estimate(config_of(tmp_path, "--model.dtype", "bfloat16"), device_type="cuda")
    assert narrow.weights == 6 * parameters  # beside the float32 that learns
    assert narrow.activations < 0.6 * plain.activations
    over = estimate(config_of(tmp_path), device_type="cpu", num_ranks=4)
    assert over.weights == plain.weights // 4 and over.activations == plain.activations
    sliced = estimate(config_of(tmp_path, "--train.parallel.context", "4"), device_type="cpu")
    assert sliced.weights == over.weights and sliced.activations == plain.activations // 4
    kl = ("--objective.kl.where", "loss", "--objective.kl.coef", "0.1")
    reference = estimate(config_of(tmp_path, *kl), device_type="cpu")
    assert reference.weights == 8 * parameters


# What autograd keeps of a tower that learns, of one image of 48 x 48 patches, after a small one.
MEASURE_TOWER = """
import gc, sys
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from agentrl.model.attention import ATTENTION_NAME

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

torch.set_num_threads(1)
config = AutoConfig.from_pretrained(sys.argv[1])
model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
model.set_attn_implementation(ATTENTION_NAME)
for side in (4, 48):
    gc.collect()
    before = resident()
    made = model.base_model.get_image_features(
        pixel_values=torch.randn(side * side, 1176), image_grid_thw=torch.tensor([[1, side, side]])
    )
    gc.collect()
    used = resident() - before
print(used)
"""


def vision_config(folder: Path) -> Path:
    """Saves the configuration of a small model with a tower, and a run file; returns the latter."""
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[8, 12, 12])
    text = dict(vocab_size=128, hidden_size=256, intermediate_size=64, num_hidden_layers=1)
    text |= dict(num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope)
    text |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    tower = dict(depth=4, hidden_size=256, intermediate_size=684, num_heads=4, patch_size=14)
    tower |= dict(out_hidden_size=256, fullatt_block_indexes=[3], window_size=112)
    AutoConfig.for_model(
        "qwen2_5_vl", text_config=text, vision_config=tower, image_token_id=7
    ).save_pretrained(folder / "vision")
    (folder / "vision.toml").write_text(
        f'[model]\npath = "{folder / "vision"}"\n'
        "[train]\ntoken_budget = 576\n[rollout]\nmax_context_tokens = 576\n"
    )
    return folder / "vision.toml"


def test_a_tower_is_among_the_weights_and_learns_where_it_is_not_frozen(tmp_path):
    run_file = vision_config(tmp_path)
    with torch.device("meta"):
        model = auto_class(AutoConfig.from_pretrained(tmp_path / "vision")).from_config(
            AutoConfig.from_pretrained(tmp_path / "vision")
        )
    everything = sum(p.numel() for p in model.parameters())
    tower = sum(p.numel() for p in model.base_model.visual.parameters())
    frozen = estimate(load_config(run_file, []), device_type="cpu")
    assert (frozen.weights, frozen.gradients) == (4 * everything, 4 * (everything - tower))
    trained = estimate(load_config(run_file, ["--model.freeze_tower=false"]), device_type="cpu")
    assert (trained.weights, trained.moments) == (4 * everything, 8 * everything)
    assert trained.activations > frozen.activations


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_what_a_tower_keeps_is_within_15_percent_of_what_a_process_uses(tmp_path):
    run_file = vision_config(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_TOWER, str(tmp_path / "vision")],
        env={"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PATH": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    frozen, trained = (
        estimate(load_config(run_file, [f"--model.freeze_tower={said}"]), device_type="cpu")
        for said in ("true", "false")
    )
    # 576 placeholders are one image of 48 x 48 patches.
    kept = trained.activations - frozen.activations
    assert kept == pytest.approx(int(done.stdout.split()[-1]), rel=0.15)


def test_remedies_make_it_smaller_one_after_another(tmp_path):
    config = config_of(tmp_path, "--train.token_budget", "8192")
    totals = [estimate(config, device_type="cuda").total]
    said = []
    for setting, smaller in remedies(config, device_type="cuda", num_ranks=1):
        said.append(setting.split(" = ")[0])
        totals.append(smaller.total)
    assert [each for each in said if each != "model.dtype"] == [
        "model.gradient_checkpointing",
        "train.token_budget",
        "train.optimizer",
        "train.parallel.context",  # beside which an adapter saves nothing of so small a model
    ]
    assert all(smaller < larger for larger, smaller in pairwise(totals))
    assert totals[-1] < totals[0] / 2


def test_bfloat16_is_no_remedy_where_it_takes_more(tmp_path):
    short = ("--train.token_budget", "64", "--rollout.max_context_tokens", "64")
    short += ("--rollout.max_turn_tokens", "64")
    config = config_of(tmp_path, "--model.gradient_checkpointing", "true", *short)
    lower = config.model_copy(
        update={"model": config.model.model_copy(update={"dtype": "bfloat16"})}
    )
    assert estimate(lower, device_type="cuda").total > estimate(config, device_type="cuda").total
    said = [each for each, _ in remedies(config, device_type="cuda", num_ranks=1)]
    assert "model.dtype = 'bfloat16'" not in said


@pytest.mark.parametrize(
    ("there", "status", "said"),
    [
        (2**40, "ok", "pass (weights "),
        (700 * 2**20, "fix", "with model.dtype = 'bfloat16', model.gradient_checkpointing = true"),
        (2**20, "fix", "no setting makes it fit"),
    ],
)
def test_doctor_says_what_to_set(tmp_path, monkeypatch, there, status, said):
    monkeypatch.setattr(memory, "device_memory", lambda device: there)
    found, what, detail = doctor._memory(config_of(tmp_path))
    assert (found, what) == (status, "memory of training") and said in detail


def test_doctor_estimates_compiled_layers_and_a_rank_of_several(tmp_path, monkeypatch):
    _, _, plain = doctor._memory(config_of(tmp_path))
    _, _, compiled = doctor._memory(config_of(tmp_path, "--model.compile", "true"))
    assert compiled == f"{plain}; activations are counted without model.compile, which needs less"
    monkeypatch.setattr(memory, "device_memory", lambda device: 2**40)
    alone, several = config_of(tmp_path), config_of(tmp_path, "--train.parallel.data", "4")
    _, what, detail = doctor._memory(several)
    assert what == "memory of each of 4 ranks"
    assert str(estimate(alone, device_type="cpu", num_ranks=4)) in detail
    assert "256.0 GiB" in detail, "of a host's memory each has a part"


def test_the_total_is_the_sum_and_is_said_with_its_parts():
    found = Memory(*(2**30 * n for n in (1, 2, 3, 4, 5, 0)), when="a test")
    assert found.total == 15 * 2**30
    assert str(found).startswith("15.00 GiB in a test (weights 1.00, gradients 2.00")
    assert "gathered" not in str(found), "one rank gathers nothing"


def test_the_token_budget_that_fits_is_the_largest(tmp_path):
    config = config_of(tmp_path)

    def total(budget):
        return estimate(with_token_budget(config, budget), device_type="cuda").total

    chosen = []
    for free in (2**20, 2**30, 3 * 2**30, 8 * 2**30, 2**45):
        budget = fitting_token_budget(config, free, device_type="cuda", num_ranks=1)
        assert budget % BUDGET_STEP == 0 and NUM_TOKENS <= budget <= MAX_TOKEN_BUDGET
        assert budget == NUM_TOKENS or total(budget) <= USABLE * free
        assert budget == MAX_TOKEN_BUDGET or total(budget + BUDGET_STEP) > USABLE * free
        chosen.append(budget)
    assert chosen == sorted(chosen)
    assert chosen[0] == NUM_TOKENS < chosen[2] < chosen[-1] == MAX_TOKEN_BUDGET
    sliced = config_of(tmp_path, "--train.parallel.context", "2")
    assert (
        fitting_token_budget(sliced, 2**45, device_type="cuda", num_ranks=2) == 2 * MAX_TOKEN_BUDGET
    )


def test_a_token_budget_is_chosen_where_nobody_set_it_and_the_device_is_for_training(tmp_path):
    attached = ["--inference.backend", "vllm", "--inference.urls", "http://10.0.0.1:8000"]
    given = config_of(tmp_path, *attached)
    text = (tmp_path / "run.toml").read_text().replace(f"token_budget = {NUM_TOKENS}", "")
    (tmp_path / "run.toml").write_text(text)
    vllm = load_config(tmp_path / "run.toml", attached)
    started = load_config(tmp_path / "run.toml", attached[:2])
    taught = load_config(
        tmp_path / "run.toml", [*attached, "--teacher.path", "t", "--objective.preset", "opd"]
    )
    embedded = load_config(tmp_path / "run.toml", ["--inference.backend", "embedded"])
    assert chooses_token_budget(vllm, "cuda")
    assert not chooses_token_budget(vllm, "cpu")
    assert not chooses_token_budget(embedded, "cuda")
    assert not chooses_token_budget(started, "cuda")
    sglang = ["--inference.backend", "sglang", "--inference.transfer"]
    for transfer, alone in {"nccl": True, "file": False, "tensor": False}.items():
        config = load_config(tmp_path / "run.toml", [*sglang, transfer])
        assert chooses_token_budget(config, "cuda") is alone, transfer
    assert not chooses_token_budget(taught, "cuda")
    assert not chooses_token_budget(given, "cuda")


def test_doctor_says_which_token_budget_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda device: 2**45)
    monkeypatch.setattr(memory, "chooses_token_budget", lambda config, device: True)
    found, _, detail = doctor._memory(config_of(tmp_path))
    assert found == "ok" and f"train.token_budget = {MAX_TOKEN_BUDGET}, chosen to fit" in detail


def test_a_resumed_run_keeps_the_token_budget_that_was_chosen(tmp_path, monkeypatch):
    """The budget depends on the device's free memory, which is replaced here."""
    monkeypatch.setattr(trainer, "chooses_token_budget", lambda config, device: True)
    monkeypatch.setattr(trainer, "_fitting_token_budget", lambda config, device: 512)
    used = []

    def note(end):
        used.append(end.config.train.token_budget)

    model = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
    overrides = [
        *("--env.id", "math", "--env.config.source", "arithmetic", "--run.dir", f"{tmp_path}/run"),
        *("--rollout.groups_per_step", "2", "--rollout.group_size", "2"),
        *("--rollout.max_turn_tokens", "16", "--rollout.max_context_tokens", "256"),
    ]
    (tmp_path / "run.toml").write_text(f'[model]\npath = "{model}"\n')
    for more in (["--run.num_steps", "1"], ["--run.num_steps", "2", "--run.resume", "true"]):
        train(load_config(tmp_path / "run.toml", overrides + more), callbacks=[note], quiet=True)
        monkeypatch.setattr(trainer, "_fitting_token_budget", lambda config, device: 1024)
    assert used == [512, 512]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_chosen_token_budget_is_within_what_the_gpu_has_free(tmp_path):
    config = config_of(tmp_path)
    free = torch.cuda.mem_get_info()[0]
    budget = trainer._fitting_token_budget(config, "cuda")
    needed = estimate(with_token_budget(config, budget), device_type="cuda").total
    assert budget == NUM_TOKENS or needed <= USABLE * free
