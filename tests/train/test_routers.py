import numpy as np
import pytest
import torch
from families import save_tiny_model, tiny_model
from samples_for_tests import sample_of

from agentrl.algo import PRESETS
from agentrl.config import TrainSection
from agentrl.errors import ConfigError
from agentrl.model.load import load_model
from agentrl.model.logprobs import require_exact, sample_logprobs
from agentrl.model.routers import aux_loss, freeze_routers, require_aux_loss
from agentrl.model.rows import pack
from agentrl.train.batch import make_batch
from agentrl.train.optimizer import Learner
from agentrl.train.update import UpdateOptions, update_policy
from agentrl.types import Sample


def make_samples(lengths=(9, 6)) -> list[Sample]:
    """Makes samples of one group with equal rewards, so that every advantage is 0."""
    return [
        sample_of(
            np.arange(length) * 37 % 120 + 3,
            np.arange(length) > 0,
            rollout_logprobs=np.full(length, -4.0, np.float32),
            trajectory_id=str(number),
            reward=1.0,
            turn_rewards=np.ones(1, np.float32),
        )
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "granitemoehybrid"])
def test_the_auxiliary_loss_is_the_familys_own(model_type):
    model = tiny_model(model_type)
    require_exact(model)
    samples = make_samples([9])
    logits: list[torch.Tensor] = []
    sample_logprobs(model, pack(samples, [0]), temperature=1.0, router_logits=logits)
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(samples[0].token_ids.astype(np.int64))[None]
    own = model(ids, output_router_logits=True, use_cache=False)
    torch.testing.assert_close(aux_loss(model, logits), own.aux_loss)


def test_every_segment_of_a_row_counts():
    model = tiny_model("qwen3_moe")
    require_exact(model)
    logits: list[torch.Tensor] = []
    sample_logprobs(model, pack(make_samples(), [0, 1]), temperature=1.0, router_logits=logits)
    assert [tuple(layer.shape) for layer in logits] == [(15, 4), (15, 4)]


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_it_moves_the_routers_where_nothing_else_would(tmp_path, weight):
    path = save_tiny_model(tmp_path, "qwen3_moe")
    model = load_model(path, dtype=torch.float32, device="cpu")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = TrainSection(learning_rate=1e-3, router_aux_loss=weight, token_budget=9)
    learner = Learner(model, config, total_updates=1)
    samples = make_samples()
    batch = make_batch(samples, current_version=1)
    options = UpdateOptions(objective=PRESETS["grpo"], config=config, temperature=1.0, seed=0)
    update_policy(learner, samples, batch, options)
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert any(name.endswith("mlp.gate.weight") for name in moved) == (weight > 0)
    assert "lm_head.weight" not in moved


def test_frozen_routers_stay_and_experts_learn():
    model = tiny_model("qwen3_moe")
    require_exact(model)
    freeze_routers(model)
    logprobs, _ = sample_logprobs(model, pack(make_samples(), [0, 1]), temperature=1.0)
    logprobs.sum().backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)}
    assert any("experts" in name for name in learned) and not learned & frozen


def test_models_without_experts_are_refused_by_key():
    model = tiny_model("qwen3")
    with pytest.raises(ConfigError, match=r"model\.freeze_router = true, but Qwen3ForCausalLM"):
        freeze_routers(model)
    with pytest.raises(ConfigError, match=r"train\.router_aux_loss .* Qwen3ForCausalLM has no"):
        require_aux_loss(model)
