"""Checks what a run reports when it cannot learn, or did not, as its file says."""

from pathlib import Path

import pytest
import torch

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.model.load import require_context
from agentrl.train.loop import train
from agentrl.train.optimizer import Learner
from agentrl.view.display import Display

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
SMALL = [
    *("--rollout.groups_per_step", "2", "--rollout.group_size", "4", "--run.num_steps", "2"),
    *("--run.preflight", "false"),
]


@pytest.fixture
def notes(monkeypatch):
    said = []
    monkeypatch.setattr(Display, "note", lambda _, line: said.append(line))
    return said


def run(run_dir, *overrides):
    return train(
        load_config(QUICKSTART, [*SMALL, "--run.dir", str(run_dir), *overrides]), quiet=True
    )


def test_a_run_past_its_last_step_and_a_warm_up_that_never_ends_are_named(tmp_path, notes):
    run(tmp_path / "run", "--train.warmup_steps", "9")
    assert [line for line in notes if "train.warmup_steps = 9" in line and "2 updates" in line]
    notes.clear()
    run(tmp_path / "run", "--run.num_steps", "1", "--run.resume", "--train.warmup_steps", "9")
    assert [line for line in notes if "step 2" in line and "run.num_steps = 1" in line]
    notes.clear()
    run(tmp_path / "well", "--train.warmup_steps", "0")
    assert not [line for line in notes if "nothing" in line or "warmup" in line]


def test_a_run_all_of_whose_updates_were_skipped_has_learned_nothing(tmp_path, notes, monkeypatch):
    step = Learner.step

    def without_gradient(self):
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.nan)
        return step(self)

    monkeypatch.setattr(Learner, "step", without_gradient)
    run(tmp_path / "run")
    assert [line for line in notes if "all 2 updates were skipped" in line]


def test_rows_longer_than_the_models_context_are_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.max_context_tokens = 5000"):
        run(tmp_path / "run", "--rollout.max_context_tokens", "5000")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 64),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, 256),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 16,
                }
            },
            64,
        ),
    ],
)
def test_a_models_context_is_that_of_its_stretched_angles(tmp_path, changes, limit):
    from transformers import Qwen3Config

    shape = {"hidden_size": 8, "num_attention_heads": 2, "head_dim": 4, "num_hidden_layers": 1}
    Qwen3Config(max_position_embeddings=64, **shape, **changes).save_pretrained(tmp_path)
    require_context(str(tmp_path), limit)
    with pytest.raises(ConfigError, match=f"{limit} tokens"):
        require_context(str(tmp_path), limit + 1)
