"""The trainer leaves the GPU while servers sample on it, as the run file allows."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from agentrl.config import RunConfig, load_config
from agentrl.model.load import load_tokenizer
from agentrl.train import run, turns
from agentrl.train.trainer import Trainer, make_trainer

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"


def trainer_of(tmp_path: Path, *overrides: str) -> Trainer:
    config = load_config(QUICKSTART, ["--model.device", "cpu", *overrides])
    trainer = asyncio.run(make_trainer(config, load_tokenizer(config.model.path), tmp_path))
    for learner in filter(None, (trainer.learner, trainer.critic)):
        for parameter in learner._trained:
            parameter.grad = torch.zeros_like(parameter)
        learner.step()
    return trainer


def addresses(tensors) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors if tensor.numel()}


@pytest.mark.parametrize(
    "overrides",
    [
        ["--model.dtype", "bfloat16", "--objective.preset", "ppo"],
        ["--model.dtype", "bfloat16", "--objective.preset", "search_r1"],
        ["--model.dtype", "float32"],
        ["--model.dtype", "bfloat16", "--model.lora.rank", "2", "--objective.preset", "search_r1"],
    ],
    ids=["critic", "reference", "its own masters", "adapter"],
)
def test_all_but_the_weights_that_a_push_reads_leaves(tmp_path, overrides):
    trainer = trainer_of(tmp_path, *overrides)
    leaving = addresses(turns._resting(trainer))
    assert not leaving & addresses(trainer.model.parameters())
    for learner in filter(None, (trainer.learner, trainer.critic)):
        assert addresses(learner.masters.values()) <= leaving
        for values in learner.optimizer.state.values():
            assert addresses(values.values()) <= leaving
    if trainer.critic is not None:
        assert addresses(trainer.critic.model.parameters()) <= leaving
    if trainer.reference is not None and trainer.reference is not trainer.model:
        assert addresses(trainer.reference.parameters()) <= leaving


def test_what_the_host_updates_is_there_already(tmp_path):
    trainer = trainer_of(tmp_path, "--train.optimizer", "adamw_cpu", "--model.dtype", "bfloat16")
    assert list(turns._resting(trainer)) == []


@pytest.mark.parametrize("sleeps", [True, False])
def test_what_a_resumed_run_restores_leaves_the_device_as_well(monkeypatch, sleeps):
    done = []
    state = SimpleNamespace(data_position={}, step=3)
    monkeypatch.setattr(run.checkpoint, "resume", lambda *_, **__: done.append("resume") or state)
    monkeypatch.setattr(run, "leave_device", lambda trainer: done.append("leave"))
    restored = MagicMock(serving=SimpleNamespace(sleeps=sleeps), replay=None)
    restored.config.run.keep_best = False
    restored.trainer.changes = {}
    assert run.restore(restored) == 3
    assert done == ["resume", *["leave"] * sleeps]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"inference": {"share": "sleep"}}, "servers that this run starts"),
        (
            {"inference": {"share": "sleep", "backend": "vllm", "urls": "http://a"}},
            "servers that this run starts",
        ),
        (
            {
                "inference": {"share": "sleep", "backend": "vllm"},
                "rollout": {"max_staleness": 1, "max_turn_tokens": 8},
            },
            "max_staleness above 0 samples meanwhile",
        ),
    ],
)
def test_servers_that_cannot_sleep_are_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate({"model": {"path": "m"}, "env": {"id": "e"}} | changed)
