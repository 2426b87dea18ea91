"""The critic: where it reads values, what it starts from, and that it learns."""

import math
from pathlib import Path

import pytest
import torch
from samples_for_tests import sample_of
from transformers import AutoTokenizer

from agentrl.algo import Batch, Objective
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.model.build import build
from agentrl.model.critic import Critic
from agentrl.model.load import load_model
from agentrl.model.rows import pack
from agentrl.train.optimizer import Learner
from agentrl.train.update import explained_variance
from agentrl.types import Sample

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
PPO = Objective.from_preset("ppo")


@pytest.fixture(scope="module")
def critic() -> Critic:
    model = load_model(str(MODEL), dtype=torch.float32, device="cpu")
    critic = Critic(model.get_decoder())
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.value_head.weight)
    return critic


def values_of(critic: Critic, *samples: Sample) -> torch.Tensor:
    with torch.no_grad():
        return critic(pack(samples, range(len(samples))))


def test_it_starts_at_zero_and_owns_its_weights():
    model = load_model(str(MODEL), dtype=torch.float32, device="cpu")
    config = RunConfig.model_validate(
        {"model": {"path": str(MODEL), "device": "cpu"}, "objective": {}}
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    critic = build(str(MODEL), "critic", config, tokenizer).module
    assert values_of(critic, sample_of([5, 6, 7], [0, 1, 1])).tolist() == [0, 0]
    ours, its = critic.backbone.state_dict(), model.get_decoder().state_dict()
    assert ours.keys() == its.keys()
    for name, tensor in its.items():
        assert torch.equal(ours[name], tensor)
    # Everything the optimizer moves is the critic's, head included.
    optimizer = Learner(critic, config.train, total_updates=1).optimizer
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert moved == {id(p) for p in critic.parameters()}


def test_a_value_is_that_of_the_state_before_the_token(critic):
    base = values_of(critic, sample_of([5, 6, 7, 8, 9], [0, 0, 1, 1, 1]))
    changed = values_of(critic, sample_of([5, 6, 7, 11, 9], [0, 0, 1, 1, 1]))
    # Token 3 is sampled in the state of tokens 0..2, and is part of the state of token 4.
    assert torch.equal(base[:2], changed[:2])
    assert abs(base[2] - changed[2]) > 1e-3


def test_samples_that_share_a_row_do_not_see_each_other(critic):
    one, other = sample_of([5, 6, 7, 8], [0, 1, 1, 1]), sample_of([9, 4, 8], [0, 0, 1])
    alone = torch.cat([values_of(critic, one), values_of(critic, other)])
    torch.testing.assert_close(values_of(critic, one, other), alone, rtol=0, atol=1e-5)


def test_it_learns_returns_that_the_state_foretells():
    """Four prompts whose return is their number: the critic must tell them apart."""
    model = load_model(str(MODEL), dtype=torch.float32, device="cpu")
    critic = Critic(model.get_decoder())
    samples = [sample_of([5 + number, 6, 7, 8], [0, 0, 1, 1]) for number in range(4)]
    micro = pack(samples, range(4))
    returns = torch.arange(4.0).repeat_interleave(2)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        (critic(micro) - returns).square().mean().backward()
        optimizer.step()
    batch = Batch(
        loss_mask=torch.ones(4, 2),
        rewards=torch.arange(4.0),
        group_ids=torch.arange(4),
        rollout_logprobs=torch.zeros(4, 2),
        values=values_of(critic, *samples).view(4, 2),
        returns=returns.view(4, 2),
    )
    explained = explained_variance(PPO, batch)
    assert explained is not None and explained > 0.9


def test_explained_variance_by_hand():
    def of(values, returns, rewards=(0.0, 0.0)):
        batch = Batch(
            loss_mask=torch.tensor([[1, 1], [1, 0]]),
            rewards=torch.tensor(rewards),
            group_ids=torch.arange(2),
            rollout_logprobs=torch.zeros(2, 2),
            values=torch.tensor(values),
            returns=torch.tensor(returns),
        )
        return explained_variance(PPO, batch)

    junk = 99.0  # where nothing is trained
    assert of([[1.0, 2.0], [3.0, junk]], [[1.0, 2.0], [3.0, 0.0]]) == 1
    # A constant shift is no unexplained variance; a constant critic explains none.
    assert of([[2.0, 3.0], [4.0, junk]], [[1.0, 2.0], [3.0, 0.0]]) == 1
    assert of([[7.0, 7.0], [7.0, junk]], [[1.0, 2.0], [3.0, 0.0]]) == 0
    # Var(G) = 2/3; G - V = (1, 0, -1) has the same variance where V is reversed: 1 - 4 = -3.
    assert of([[3.0, 2.0], [1.0, junk]], [[1.0, 2.0], [3.0, 0.0]]) == pytest.approx(-3)
    assert of([[1.0, 2.0], [3.0, junk]], [[5.0, 5.0], [5.0, 0.0]]) is None
    # Unscored trajectories count nowhere.
    assert of([[1.0, 2.0], [9.0, junk]], [[1.0, 2.0], [3.0, 0.0]], (0.0, math.nan)) == 1


def test_a_critic_with_another_tokenizer_is_refused(tmp_path):
    other = tmp_path / "other"
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = load_model(str(MODEL), dtype=torch.float32, device="cpu")
    model.save_pretrained(other)
    changed = AutoTokenizer.from_pretrained(MODEL)
    changed.add_tokens(["<another>"])
    changed.save_pretrained(other)
    config = RunConfig.model_validate(
        {"model": {"path": str(MODEL)}, "critic": {"path": str(other)}}
    )
    with pytest.raises(ConfigError, match=r"critic.path = .* another tokenizer .* 1 entries"):
        build(str(other), "critic", config, tokenizer)


def test_a_warm_up_without_end_is_refused():
    config = {
        "model": {"path": "m"},
        "objective": {"preset": "ppo"},
        "critic": {"warmup_steps": 5},
        "run": {"num_steps": 5},
    }
    with pytest.raises(ValueError, match=r"leaves none of the run\.num_steps = 5 steps"):
        RunConfig.model_validate(config)
    RunConfig.model_validate(config | {"objective": {"preset": "grpo"}})
