"""Low-rank adapters: what is trained, saved, left out and merged."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from families import tiny_model
from safetensors.torch import load_file, save_file
from samples_for_tests import sample_of
from transformers import AutoModelForCausalLM

from agentrl.cli.main import main
from agentrl.config import LoraSection, TrainSection
from agentrl.errors import CheckpointError, ConfigError
from agentrl.model.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapter_tensors, write_adapter
from agentrl.model.load import freeze_all_but_text, load_model, merge_adapter
from agentrl.model.logprobs import probe_rows, require_exact, sample_logprobs
from agentrl.model.lora import add_adapter, without_adapter
from agentrl.model.rows import pack
from agentrl.train import checkpoint
from agentrl.train.optimizer import Learner
from agentrl.train.serving import servable
from agentrl.train.state import capture_state

QUICKSTART = "examples/quickstart/model"
pytestmark = [
    # Not importorskip: each worker imports every test file, and peft takes over a second.
    pytest.mark.skipif(find_spec("peft") is None, reason="adapters need agentrl-gym[lora]"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
]


@pytest.fixture
def model(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    return load_model(QUICKSTART, dtype=torch.float32, device="cpu")


def adapted(model, **section):
    torch.manual_seed(3)
    add_adapter(model, LoraSection(**{"rank": 4, **section}), path=QUICKSTART)
    return model


def perturb(model):
    """Fills the matrices that start at zero, as training would."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return model


def logprobs(model):
    ids = np.arange(5, 45, dtype=np.int32)
    sample = sample_of(ids, np.arange(40) > 0)
    return sample_logprobs(model, pack([sample], [0]), temperature=1.0)[0]


def test_a_fresh_adapter_changes_nothing_and_is_all_that_learns(model):
    before = logprobs(model).detach()
    adapted(model)
    after = logprobs(model)
    assert torch.equal(before, after.detach())
    after.sum().backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learned and all("lora_" in name for name in learned)
    assert len(learned) == len(adapter_tensors(model))
    assert sum(t.numel() for t in adapter_tensors(model).values()) < 0.25 * sum(
        p.numel() for p in model.parameters()
    )


def test_the_reference_is_the_model_without_its_adapter(model):
    before = logprobs(model).detach()
    perturb(adapted(model))
    assert (logprobs(model) - before).abs().max() > 0.01
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    with without_adapter(model):
        assert torch.equal(logprobs(model), before)
        assert [name for name, p in model.named_parameters() if p.requires_grad] == learning
    assert (logprobs(model) - before).abs().max() > 0.01


def test_an_update_moves_the_adapter_alone(model):
    frozen = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = Learner(adapted(model), TrainSection(learning_rate=0.1), total_updates=2)
    for _ in range(2):  # the first moves the zero matrices, the second both
        (-logprobs(model).mean()).backward()
        learner.step()
    names = dict(model.named_parameters())
    for name, before in frozen.items():
        now = names.get(name, names.get(name.replace(".weight", ".base_layer.weight")))
        assert now is not None and torch.equal(now, before)


def test_in_bfloat16_the_adapter_learns_in_float32(monkeypatch, request, tmp_path):
    monkeypatch.chdir(request.config.rootpath)
    model = adapted(load_model(QUICKSTART, dtype=torch.bfloat16, device="cpu"))
    config = TrainSection(learning_rate=1e-6)
    learner = Learner(model, config, total_updates=10)
    live = adapter_tensors(model)
    assert learner.masters.keys() == set(live.values()), "the frozen weights need none"
    before = {name: learner.masters[tensor].detach().clone() for name, tensor in live.items()}
    for _ in range(10):
        (-logprobs(model).mean()).backward()
        learner.step()
    after = {name: learner.masters[tensor].detach() for name, tensor in live.items()}
    for name, tensor in live.items():
        assert after[name].dtype == torch.float32
        assert torch.equal(tensor, after[name].bfloat16()), "what a server gets"
        # Every step moves a weight by about the learning rate, and B moves before A does.
        assert 3e-6 < (after[name] - before[name]).abs().mean() < 1.2e-5
    checkpoint.save_checkpoint(tmp_path, capture_state(step=1, fingerprint={}, policy=learner))
    other = Learner(
        adapted(load_model(QUICKSTART, dtype=torch.bfloat16, device="cpu")), config, total_updates=1
    )
    checkpoint.resume(tmp_path, fingerprint={}, policy=other)
    for name, tensor in adapter_tensors(other.model).items():
        assert torch.equal(other.masters[tensor], after[name]) and torch.equal(tensor, live[name])


@pytest.mark.parametrize("how", ["write_adapter", "checkpoint"])
def test_what_is_saved_is_what_peft_loads(model, tmp_path, how):
    perturb(adapted(model))
    if how == "write_adapter":
        folder = tmp_path / "policy-3"
        write_adapter(model, folder)
        assert {path.name for path in folder.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
    else:
        folder = save(model, tmp_path)
        assert not (folder / "model.safetensors").exists()
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, folder)
    ids = torch.arange(5, 45)[None]
    expected = logprobs(model).detach()
    got = loaded(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    assert (got - expected).abs().max() < 1e-4


def save(model, tmp_path):
    from agentrl.model.load import load_tokenizer

    learner = Learner(model, TrainSection(), total_updates=1)
    state = capture_state(
        step=3, fingerprint={}, policy=learner, tokenizer=load_tokenizer(QUICKSTART)
    )
    return checkpoint.save_checkpoint(tmp_path, state)


def test_a_checkpoint_comes_back_bit_for_bit(model, tmp_path):
    perturb(adapted(model))
    save(model, tmp_path)
    other = adapted(load_model(QUICKSTART, dtype=torch.float32, device="cpu"))
    learner = Learner(other, TrainSection(), total_updates=1)
    checkpoint.resume(tmp_path, fingerprint={}, policy=learner)
    for name, tensor in adapter_tensors(model).items():
        assert torch.equal(tensor, adapter_tensors(other)[name])
    assert torch.equal(logprobs(model), logprobs(other))


def test_a_checkpoint_of_all_weights_does_not_fit_an_adapter(model, tmp_path):
    save(model, tmp_path)
    other = adapted(load_model(QUICKSTART, dtype=torch.float32, device="cpu"))
    learner = Learner(other, TrainSection(), total_updates=1)
    with pytest.raises(CheckpointError, match="adapter_model"):
        checkpoint.resume(tmp_path, fingerprint={}, policy=learner)


def test_merged_it_is_a_model_like_any_other(model, tmp_path, capsys):
    expected = logprobs(perturb(adapted(model))).detach()
    folder = save(model, tmp_path)
    assert main(["export", str(folder), "--out", str(tmp_path / "whole")]) == 0
    for path in (folder, tmp_path / "whole"):
        whole = load_model(str(path), dtype=torch.float32, device="cpu")
        assert all(p.requires_grad for p in whole.parameters())
        assert (logprobs(whole) - expected).abs().max() < 1e-4
    assert main(["export", str(folder), "--out", str(tmp_path / "whole")]) == 2
    assert main(["export", str(tmp_path / "whole"), "--out", str(tmp_path / "again")]) == 2
    assert "it has no manifest.json" in capsys.readouterr().err


def test_an_adapter_whose_base_is_gone_says_so(model, tmp_path):
    folder = save(adapted(model), tmp_path)
    values = json.loads((folder / CONFIG_FILE).read_text())
    for base, message in ((str(tmp_path / "gone"), "does not exist"), (None, "no base model")):
        (folder / CONFIG_FILE).write_text(json.dumps(values | {"base_model_name_or_path": base}))
        with pytest.raises(ConfigError, match=message):
            load_model(str(folder), dtype=torch.float32, device="cpu")


def test_an_adapter_is_not_put_on_another_one(model, tmp_path):
    folder = save(adapted(model), tmp_path)
    whole = load_model(str(folder), dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match="agentrl export"):
        add_adapter(whole, LoraSection(rank=4), path=str(folder))


@pytest.mark.parametrize("kind", ["adapter", "checkpoint", "model"])
def test_a_server_is_started_with_what_it_can_load(model, tmp_path, kind):
    folder = (
        Path(QUICKSTART)
        if kind == "model"
        else save(adapted(model) if kind == "adapter" else model, tmp_path)
    )
    start, adapter = servable(str(folder), tmp_path / "served")
    assert adapter == (folder if kind == "adapter" else None)
    files = {path.name for path in Path(start).glob("*.safetensors")}
    assert files == {"model.safetensors"}
    assert (Path(start) / "tokenizer.json").exists()
    assert (
        Path(start).resolve()
        == {
            "adapter": Path(QUICKSTART).resolve(),
            "checkpoint": (tmp_path / "served").resolve(),
            "model": Path(QUICKSTART).resolve(),
        }[kind]
    )


def test_targets_are_checked(model):
    with pytest.raises(ConfigError, match=r"model\.lora\.targets"):
        adapted(model, targets=["no_such_layer"])
    with pytest.raises(ConfigError, match="head"):
        adapted(
            load_model(QUICKSTART, dtype=torch.float32, device="cpu"), targets=["lm_head", "q_proj"]
        )


@pytest.mark.parametrize("targets", [["embed_tokens"], ["embed_tokens", "q_proj"]])
@pytest.mark.parametrize("model_type", ["qwen3", "jamba"])
def test_what_servers_take_no_adapter_of_is_refused(model_type, targets):
    """PEFT would train it, under a name that a checkpoint of the adapter leaves out."""
    with pytest.raises(ConfigError, match=r"model\.lora\.targets names .*embed_tokens"):
        add_adapter(tiny_model(model_type), LoraSection(rank=2, targets=targets), path="x")


@pytest.mark.parametrize("damage", ["lacks", "more", "other"])
def test_an_adapter_whose_tensors_are_not_its_configurations_is_an_error(model, tmp_path, damage):
    folder = save(perturb(adapted(model)), tmp_path)
    tensors = load_file(folder / WEIGHTS_FILE)
    first = next(iter(tensors))
    if damage != "more":
        value = tensors.pop(first)
    if damage != "lacks":
        tensors[first.replace("layers.0", "layers.77")] = (
            value if damage == "other" else torch.ones(2, 2)
        )
    save_file(tensors, folder / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match=re.escape(WEIGHTS_FILE)):
        load_model(str(folder), dtype=torch.float32, device="cpu")
    learner = Learner(adapted(fresh()), TrainSection(), total_updates=1)
    with pytest.raises(CheckpointError):
        checkpoint.resume(tmp_path, fingerprint={}, policy=learner)


def fresh():
    return load_model(QUICKSTART, dtype=torch.float32, device="cpu")


def test_an_adapter_finds_its_base_from_any_folder_and_is_not_taken_for_a_model(
    model, tmp_path, monkeypatch
):
    """Its base was given by a relative path."""
    expected = logprobs(perturb(adapted(model))).detach()
    folder = save(model, tmp_path / "saved")
    assert not (folder / "config.json").exists()
    monkeypatch.chdir(tmp_path)
    merge_adapter(folder, tmp_path / "whole", dtype="float32")
    for loaded in (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
        load_model(str(folder), dtype=torch.float32, device="cpu"),
    ):
        ids = torch.arange(5, 45)[None]
        got = loaded(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize("model_type", ["llama4_text", "nemotron_h", "qwen3_vl", "jamba"])
def test_all_linear_is_all_that_can_learn(model_type, caplog):
    """A router that answers with a pair, fused kernels, a frozen tower, a weight that is read."""
    model = tiny_model(model_type)
    freeze_all_but_text(model)
    require_exact(model)
    micro = probe_rows(model)
    before = sample_logprobs(model, micro, temperature=1.0)[0].detach()
    add_adapter(model, LoraSection(rank=2), path="x")
    assert "linear layers get no adapter" in caplog.text
    after, _ = sample_logprobs(model, micro, temperature=1.0)
    assert (after - before).abs().max() < 1e-5
    after.sum().backward()
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert learning and all("lora" in name for name in learning)
    assert all(parameter.grad is not None for parameter in learning.values())
