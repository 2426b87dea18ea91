"""The promise of the trainer: how a batch is cut changes neither loss nor gradient."""

import numpy as np
import pytest
import torch
from samples_for_tests import sample_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.model.attention import ATTENTION_NAME
from agentrl.model.load import set_gradient_checkpointing
from agentrl.model.logprobs import sample_logprobs, trained_matrix
from agentrl.model.rows import MicroBatch, pack, plan_micro_batches
from agentrl.types import Sample

VOCAB_SIZE = 97


def make_model(attention: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        tie_word_embeddings=True,
        attn_implementation=attention,
        # Larger than the default, so that attention and softmax are far from uniform.
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).train()


def make_samples() -> list[Sample]:
    """24 multi-turn samples, most of them short, one of several hundred tokens."""
    rng = np.random.default_rng(3)
    samples = []
    for number in range(24):
        num_turns = int(rng.integers(1, 5))
        mask = [np.zeros(int(rng.integers(4, 12)))]
        for _ in range(num_turns):
            policy_tokens = int(min(400, 3 + 5 * rng.pareto(0.7)))
            mask += [np.ones(policy_tokens), np.zeros(int(rng.integers(2, 24)))]
        loss_mask = np.concatenate(mask).astype(np.uint8)
        length = len(loss_mask)
        samples.append(
            sample_of(
                rng.integers(0, VOCAB_SIZE, length),
                loss_mask,
                rollout_logprobs=rng.normal(-4.5, 0.5, length).astype(np.float32) * loss_mask,
                policy_versions=np.where(loss_mask, 0, -1).astype(np.int32),
                trajectory_id=str(number),
                group_id=str(number // 4),
                reward=float(rng.normal()),
                turn_rewards=np.zeros(num_turns, np.float32),
            )
        )
    return samples


SAMPLES = make_samples()
NUM_TRAINED = sum(sample.num_trained for sample in SAMPLES)


def weighted(logprobs, entropy, rollout, rewards, weights):
    return -(weights * logprobs).sum() / NUM_TRAINED


def clipped(logprobs, entropy, rollout, rewards, weights):
    """PPO's clipped surrogate with an entropy bonus, mean over the tokens of the step."""
    ratio = (logprobs - rollout).exp()
    surrogate = torch.minimum(ratio * rewards, ratio.clamp(0.8, 1.2) * rewards)
    return -(surrogate + 0.01 * entropy).sum() / NUM_TRAINED


LOSSES = {"weighted": weighted, "clipped": clipped}


def token_weights(sample: Sample) -> np.ndarray:
    """(T,) random, a function of the sample alone."""
    return np.random.default_rng(int(sample.trajectory_id)).normal(size=len(sample))


def at_trained(micro: MicroBatch, arrays: list[np.ndarray]) -> torch.Tensor:
    """(Q,) float32 of per-token arrays, one for each segment."""
    return torch.from_numpy(np.concatenate(arrays)[micro.trained_index + 1].astype(np.float32))


def gradients_of(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def packed_step(loss_name, token_budget, checkpointing=False, order=None):
    model = make_model(ATTENTION_NAME)
    set_gradient_checkpointing(model, checkpointing)
    samples = SAMPLES if order is None else [SAMPLES[index] for index in order]
    plan = plan_micro_batches([len(sample) for sample in samples], token_budget)
    total = 0.0
    for rows in plan:
        micro = pack(samples, rows)
        logprobs, entropy = sample_logprobs(model, micro, temperature=0.9, with_entropy=True)
        chosen = [samples[row] for row in micro.rows]
        values = (
            logprobs,
            entropy,
            at_trained(micro, [sample.rollout_logprobs for sample in chosen]),
            at_trained(micro, [np.full(len(sample), sample.reward) for sample in chosen]),
            at_trained(micro, [token_weights(sample) for sample in chosen]),
        )
        # The objective sees matrices of trained tokens; padding has reward and weight 0.
        matrices = [trained_matrix(micro, value) for value in values]
        loss = LOSSES[loss_name](*matrices)
        loss.backward()
        total += float(loss.detach())
    return total, gradients_of(model), len(plan)


def plain_step(loss_name):
    """One sample at a time by transformers alone, each padded on the right."""
    model = make_model("sdpa")
    longest = max(len(sample) for sample in SAMPLES)
    total = 0.0
    for sample in SAMPLES:
        length = len(sample)
        ids = torch.zeros(1, longest, dtype=torch.int64)
        ids[0, :length] = torch.from_numpy(sample.token_ids)
        attention_mask = (torch.arange(longest) < length).long()[None]
        logits = model(input_ids=ids, attention_mask=attention_mask).logits[0, : length - 1]
        table = (logits / 0.9).log_softmax(-1)
        trained = torch.from_numpy(sample.loss_mask[1:] > 0)
        loss = LOSSES[loss_name](
            table.gather(1, ids[0, 1:length, None]).squeeze(1)[trained],
            -(table.exp() * table).sum(-1)[trained],
            torch.from_numpy(sample.rollout_logprobs[1:])[trained],
            sample.reward,
            torch.from_numpy(token_weights(sample)[1:].astype(np.float32))[trained],
        )
        loss.backward()
        total += float(loss.detach())
    return total, gradients_of(model)


def assert_same_step(step, reference):
    assert step[0] == pytest.approx(reference[0], rel=1e-5)
    assert step[1].keys() == reference[1].keys()
    for name, gradient in step[1].items():
        error = (gradient - reference[1][name]).norm() / reference[1][name].norm()
        assert error < 1e-5, f"{name} differs by {error:.1e}"


@pytest.fixture(scope="module", params=LOSSES)
def plain(request):
    return request.param, *plain_step(request.param)


@pytest.mark.parametrize("token_budget", [256, 1024, 8192])
def test_any_token_budget_gives_the_loss_and_gradient_of_plain_transformers(plain, token_budget):
    loss_name, *reference = plain
    step = packed_step(loss_name, token_budget)
    assert_same_step(step, reference)


def test_the_batch_is_heavy_tailed_and_the_budgets_cut_it_differently():
    lengths = [len(sample) for sample in SAMPLES]
    assert max(lengths) > 4 * np.median(lengths)
    counts = [len(plan_micro_batches(lengths, token_budget)) for token_budget in (256, 1024, 8192)]
    assert counts[0] > counts[1] > counts[2] == 1


def test_any_order_and_recomputed_activations_give_the_same_gradient():
    order = np.random.default_rng(0).permutation(len(SAMPLES)).tolist()
    reference = packed_step("weighted", 8192)
    assert_same_step(packed_step("weighted", 1024, order=order), reference)
    assert_same_step(packed_step("weighted", 1024, checkpointing=True), reference)
