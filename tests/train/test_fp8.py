"""Servers that keep in 8 bits what is trained in 16: what can be shown without such a GPU."""

import shlex
from pathlib import Path

import pytest
import torch
from families import save_tiny_model
from model_shapes import save_config

from agentrl.cli.main import main
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, TrainingError
from agentrl.model.load import load_model
from agentrl.train import memory
from agentrl.train.guards import mismatch_warning
from agentrl.train.preflight import correction_of_rounding
from agentrl.train.serving import start_serving

EXAMPLES = Path(__file__).parents[2] / "examples"


def config(**sections) -> RunConfig:
    model = {"path": "m", "dtype": "bfloat16"} | sections.pop("model", {})
    inference = {"backend": "vllm", "quantization": "fp8"} | sections.pop("inference", {})
    return RunConfig.model_validate({"model": model, "inference": inference, **sections})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"dtype": "float32"}}, "set model.dtype = 'bfloat16'"),
        ({"model": {"lora": {"rank": 4}}}, "they are frozen"),
        ({"model": {"lora": {"rank": 4}, "quantization": "nf4"}}, "they are frozen"),
        ({"inference": {"backend": "embedded"}}, "set inference.backend = 'vllm'"),
        ({"inference": {"backend": "sglang"}}, "set inference.backend = 'vllm'"),
        ({"inference": {"quantization": "fp4"}}, "fp8"),
    ],
)
def test_what_it_cannot_be_is_refused(sections, words):
    with pytest.raises(ValueError, match=words):
        config(**sections)


async def test_experts_are_refused(tmp_path):
    model = load_model(save_tiny_model(tmp_path, "qwen3_moe"), dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ConfigError, match="dense models"):
        await start_serving(config(), model, tmp_path, quiet=True)


def test_servers_are_started_with_it(tmp_path, capsys):
    words = [
        "launch",
        str(EXAMPLES / "vllm_cpu" / "run.toml"),
        "--print-servers",
        "--platform",
        "cuda",
    ]
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
        ({}, "token", "old", "objective.off_policy.level = 'token' weights"),
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
        return mismatch_warning({"policy/fresh_diff_mean": gap}, run)

    plain = RunConfig.model_validate({"model": {"path": "m", "dtype": "bfloat16"}})
    assert told(0.07, plain) is not None and told(0.07, config()) is None
    assert "in fp8, above 0.1" in (told(0.12, config()) or "")
    with pytest.raises(TrainingError, match="rounding cannot explain this"):
        told(1.1, config())


def test_a_server_needs_a_byte_for_each_weight_of_a_layer(tmp_path):
    run = config(model={"path": save_config("Qwen/Qwen3-8B", tmp_path)})
    saved = memory.bytes_of_weights(run, None) - memory.bytes_of_weights(run, "fp8")
    assert saved == pytest.approx(6.945e9, rel=0.02)
