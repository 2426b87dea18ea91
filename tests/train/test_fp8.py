"""Servers that keep in 8 bits what is trained in 16: what can be shown without such a GPU."""

import asyncio
import copy
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from families import save_tiny_model
from transformers import AutoModelForCausalLM

from agentrl.cli import main
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, TrainingError
from agentrl.sync.probe import trainer_logprobs
from agentrl.train import memory
from agentrl.train.guards import disagreement
from agentrl.train.model import load_model
from agentrl.train.preflight import correction_of_rounding
from agentrl.train.serving import PROBE_TOKENS, start_serving

EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 0.2


def config(**sections) -> RunConfig:
    model = {"path": "m", "dtype": "bfloat16"} | sections.pop("model", {})
    inference = {"backend": "vllm", "quantization": "fp8"} | sections.pop("inference", {})
    return RunConfig.model_validate({"model": model, "inference": inference, **sections})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"dtype": "float32"}}, "set model.dtype = 'bfloat16'"),
        ({"model": {"lora": {"rank": 4}}}, "beneath an adapter none do"),
        ({"model": {"lora": {"rank": 4}, "quantization": "nf4"}}, "beneath an adapter none do"),
        ({"inference": {"backend": "embedded"}}, "set inference.backend = 'vllm'"),
        ({"inference": {"backend": "sglang"}}, "set inference.backend = 'vllm'"),
        ({"inference": {"quantization": "fp4"}}, "fp8"),
    ],
)
def test_what_it_cannot_be_is_refused(sections, words):
    with pytest.raises(ValueError, match=words):
        config(**sections)


def test_experts_are_refused(tmp_path):
    model = load_model(save_tiny_model(tmp_path, "qwen3_moe"), dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ConfigError, match="dense models"):
        asyncio.run(start_serving(config(), model, tmp_path, quiet=True))


def test_servers_are_started_with_it(tmp_path, capsys):
    words = ["inference", "command", str(EXAMPLES / "vllm_cpu" / "run.toml"), "--platform", "cuda"]
    words += ["--plugin-dir", str(tmp_path / "plugin"), "--inference.python", "vllm-env/bin/python"]
    words += ["--model.dtype", "bfloat16"]
    assert main([*words, "--inference.quantization", "fp8"]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[command.index("--quantization") + 1] == "fp8_per_channel"
    assert main(words) == 0
    assert "--quantization" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("objective", "level", "anchor", "says"),
    [
        ({}, "token", "old", "objective.off_policy.level = 'token' weighs"),
        ({"off_policy": {"level": "none"}}, "none", "old", "nothing corrects for it"),
        ({"ratio": {"anchor": "rollout"}}, "none", "rollout", "ratio.anchor = 'rollout' takes"),
    ],
)
def test_rounding_is_corrected_unless_the_run_file_chooses(objective, level, anchor, says):
    run = config(objective=objective)
    assert (run.objective.off_policy.level, run.objective.ratio.anchor) == (level, anchor)
    assert says in correction_of_rounding(run)


def test_the_mismatch_has_a_limit_of_its_own():
    def told(gap, run):
        return disagreement({"policy/rollout_train_logprob_diff_mean": gap}, run)

    plain = RunConfig.model_validate({"model": {"path": "m", "dtype": "bfloat16"}})
    assert told(0.07, plain) is not None and told(0.07, config()) is None
    assert "fp8 explains 0.1" in (told(0.12, config()) or "")
    with pytest.raises(TrainingError, match="no rounding does that"):
        told(1.1, config())


def test_a_server_needs_a_byte_for_each_weight_of_a_layer(tmp_path):
    shape = {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    run = config(model={"path": str(tmp_path)})
    saved = memory.bytes_of_weights(run, None) - memory.bytes_of_weights(run, "fp8")
    assert saved == pytest.approx(6.945e9, rel=0.02)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """To 8 bits and back, with a scale for each row."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def _served(model: torch.nn.Module) -> torch.nn.Module:
    """A model that computes as a server does: weights by output, inputs by token, in 8 bits."""
    model = copy.deepcopy(model)
    for layer in model.get_decoder().modules():  # pyright: ignore
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = _rounded(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, inputs: (_rounded(inputs[0]),))
    return model


def test_the_probe_tells_rounding_from_other_weights():
    """What its tolerance catches on the quickstart's model, as docs/precision.md says."""
    path = EXAMPLES / "quickstart" / "model"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=PROBE_TOKENS).tolist()
    expected = trainer_logprobs(model, ids, version=0, temperature=1.0).prompt

    def error(changed) -> float:
        seen = trainer_logprobs(_served(changed), ids, version=0, temperature=1.0).prompt
        return max(abs(a - b) / max(1, abs(a)) for a, b in zip(expected, seen, strict=True))

    def moved(share: float):
        generator = torch.Generator().manual_seed(0)
        other = copy.deepcopy(model)
        for weights in other.parameters():
            if weights.ndim > 1:
                noise = torch.randn(weights.shape, generator=generator)
                weights.data += (share * weights.data.float().std() * noise).to(weights.dtype)
        return other

    errors = [error(model), *(error(moved(share)) for share in (0.1, 0.3, 1.0))]
    print([round(each, 3) for each in errors])
    assert errors[0] < TOLERANCE / 2
    assert errors[1] < TOLERANCE < min(errors[2:])
