"""Routers' choices: what is taken down while sampling is what the trainer computes with."""

import numpy as np
import pytest
import torch
from families import tiny_model

from agentrl.errors import ConfigError
from agentrl.inference.base import SamplingParams
from agentrl.inference.embedded_sampling import SampleRequest, sample, share_weights
from agentrl.model.load import set_gradient_checkpointing
from agentrl.model.logprobs import packing_of, require_exact, sample_logprobs
from agentrl.model.routes import make_replayable, routers_of
from agentrl.model.rows import pack
from agentrl.types import TokenRow, Trajectory, samples_of

MIXTURES = ["qwen3_moe", "deepseek_v3", "gpt_oss"]


def loaded(model_type, dtype=torch.float32, **changes):
    model = tiny_model(model_type, **changes).to(dtype)
    require_exact(model)
    return model


def played(model, *, report_routes=True, num=16, seed=0):
    """Samples of two turns each, as the rollout's driver makes them."""
    twin = share_weights(model)
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(max_tokens=24, report_routes=report_routes)
    rows = [TokenRow() for _ in range(num)]
    prompts = [rng.integers(3, 128, 20).tolist() for _ in range(num // 4)]
    for turn in range(2):
        for index, row in enumerate(rows):
            row.append_context(prompts[index // 4] if turn == 0 else [5, 6, 7], turn)
        asked = [SampleRequest(f"{n}", row.token_ids, sampling) for n, row in enumerate(rows)]
        for row, said in zip(rows, sample(twin, asked, seed=turn), strict=True):
            versions = [0] * len(said.token_ids)
            row.append_sampled(said.token_ids, said.logprobs, versions, turn, routes=said.routes)
    return [
        sample
        for index, row in enumerate(rows)
        for sample in samples_of(
            Trajectory(str(index), str(index // 4), "e", "t", 0, branches=[row])
        )
    ]


def difference(model, samples):
    """Mean difference in nats between sampler and trainer."""
    micro = pack(samples, range(len(samples)), share=packing_of(model) == 2)
    with torch.no_grad():
        ours, _ = sample_logprobs(model, micro, temperature=1.0)
    theirs = np.concatenate([each.rollout_logprobs[each.loss_mask > 0] for each in samples])
    return (ours - torch.from_numpy(theirs)).abs()


SIX = dict(num_hidden_layers=6)
SHAPES = {
    "qwen3_moe": SIX,
    "deepseek_v3": SIX | dict(first_k_dense_replace=0),
    "gpt_oss": SIX | dict(layer_types=["sliding_attention", "full_attention"] * 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MIXTURES)
def test_in_bfloat16_sampler_and_trainer_agree_as_in_a_dense_model(model_type):
    dense = loaded("qwen3", torch.bfloat16, **SIX)
    level = difference(dense, played(dense, report_routes=False))
    experts = dict(num_experts=16, num_local_experts=16, n_routed_experts=16, num_experts_per_tok=4)
    model = loaded(model_type, torch.bfloat16, **experts, **SHAPES[model_type])
    make_replayable(model)
    samples = played(model)
    forced = difference(model, samples)
    for each in samples:
        each.routes = None
    chosen = difference(model, samples)
    print(
        f"{model_type}: replayed {forced.mean():.4f} / {forced.max():.2f}, chosen "
        f"{chosen.mean():.4f} / {chosen.max():.2f}, dense {level.mean():.4f} / {level.max():.2f}"
    )
    assert forced.mean() < 1.2 * level.mean() and forced.max() < 1.5 * level.max()
    assert chosen.mean() > 1.1 * forced.mean() and chosen.max() > 1.1 * forced.max()


def test_a_server_reports_layers_without_experts_too():
    model = loaded("deepseek_v3", num_hidden_layers=4, first_k_dense_replace=1)
    make_replayable(model)
    samples = played(model, num=4)
    for each in samples:  # other experts than the model would choose
        each.routes = np.roll(each.routes, 1, axis=0)
    expected = difference(model, samples)
    for each in samples:
        layers = np.zeros((len(each), 4, each.routes.shape[-1]), np.int16)
        layers[:, 1:] = each.routes
        each.routes = layers.reshape(len(each), -1)
    assert torch.equal(difference(model, samples), expected) and expected.max() > 1e-3
    for each in samples:
        each.routes = each.routes[:, :-2]
    with pytest.raises(ValueError, match=r"model\.path"):
        difference(model, samples)


def by_hand(model, model_type, routes):
    """Replaces the routers by the families' formulas for experts that are given."""
    for router, own in zip(routers_of(model), routes.long().unbind(1), strict=True):

        def forward(hidden, router=router, chosen=own):
            hidden = hidden.reshape(-1, hidden.shape[-1])
            logits = torch.nn.functional.linear(
                hidden, router.weight, getattr(router, "bias", None)
            )
            if model_type == "gpt_oss":
                return logits, logits.gather(1, chosen).softmax(1), chosen
            scores = logits.sigmoid() if model_type == "deepseek_v3" else logits.softmax(-1)
            weights = scores.gather(1, chosen)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * getattr(router, "routed_scaling_factor", 1.0), chosen

        router.forward = forward


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_the_gradient_is_that_of_fixed_routes(model_type, checkpointing):
    changes = {} if model_type != "deepseek_v3" else dict(first_k_dense_replace=0)
    plain, model = tiny_model(model_type, **changes), loaded(model_type, **changes)
    make_replayable(model)
    samples = played(model, num=8)
    rng = np.random.default_rng(0)
    same: dict[bytes, np.ndarray] = {}
    for each in samples:  # to other experts than the routers would choose, alike for alike prefixes
        shape = each.routes.shape
        for at in range(len(each)):
            key = each.token_ids[: at + 1].tobytes() + each.group_id.encode()
            other = [rng.permutation(4)[: shape[2]] for _ in range(shape[1])]
            each.routes[at] = same.setdefault(key, np.array(other, np.int16))
    set_gradient_checkpointing(model, checkpointing)
    micro = pack(samples, range(len(samples)), share=packing_of(model) == 2)
    logprobs, _ = sample_logprobs(model, micro, temperature=1.0)
    logprobs.sum().backward()
    expected = []
    for each in samples:
        by_hand(plain, model_type, torch.from_numpy(each.routes))
        ids = torch.from_numpy(each.token_ids).long()[None]
        table = plain(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        own = table.gather(1, ids[0, 1:, None])[:, 0][torch.from_numpy(each.loss_mask[1:] > 0)]
        own.sum().backward()
        expected.append(own.detach())
    torch.testing.assert_close(logprobs.detach(), torch.cat(expected), atol=2e-5, rtol=0)
    theirs = dict(plain.named_parameters())
    moved = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None or theirs[name].grad is None:
            assert parameter.grad is theirs[name].grad is None
            continue
        moved += "gate.weight" in name or "router.weight" in name
        difference = (parameter.grad - theirs[name].grad).norm()
        assert difference <= 1e-4 * theirs[name].grad.norm() + 1e-6, name
    assert moved == len(routers_of(model)), "gates learn"


def test_a_row_knows_the_experts_of_its_tokens_but_of_the_last():
    model = loaded("qwen3_moe")
    make_replayable(model)
    sample_ = played(model, num=4)[0]
    assert sample_.routes.shape == (len(sample_), 2, 2) and sample_.routes.dtype == np.int16
    assert (sample_.routes[:-1] >= 0).all() and (sample_.routes[-1] == -1).all()
    none = played(model, num=4, report_routes=False)
    assert none[0].routes is None
    mixed = pack([sample_, none[1]], [0, 1])
    assert (mixed.routes[len(sample_) :] == -1).all()
    assert (mixed.routes[: len(sample_)] == sample_.routes).all()


def test_it_is_made_so_once():
    model = loaded("qwen3_moe")
    make_replayable(model)
    make_replayable(model)
    assert all(len(router._forward_hooks) == 1 for router in routers_of(model))


def test_what_has_no_routers_is_refused():
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no routers"):
        make_replayable(tiny_model("qwen3"))


def test_routes_of_other_tokens_are_an_error():
    model = loaded("qwen3_moe")
    make_replayable(model)
    sample_ = played(model, num=4)[0]
    sample_.routes = sample_.routes[:-1]
    with pytest.raises(ValueError, match="tokens came with"):
        sample_logprobs(model, pack([sample_], [0]), temperature=1.0)
