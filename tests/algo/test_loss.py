"""Surrogates, KL, masks, weights, the critic and the controller, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.algo import (
    PRESETS,
    Batch,
    KLController,
    Metric,
    Objective,
    StepTotals,
    filter_zero_variance,
    loss_weights,
    merge_metrics,
    policy_loss,
    prepare,
    reduce_metrics,
    step_totals,
    value_loss,
)
from agentrl.algo.aggregate import trained_mask
from agentrl.algo.kl import kl_estimate
from agentrl.algo.loss_stages import Kl

PLAIN = {"baseline": {"kind": "none"}, "scale": {"kind": "none"}}


def one_token(ratio: float, advantage: float, mu_gap: float = 0.0) -> tuple[Batch, torch.Tensor]:
    old = torch.tensor([[-3.0]], dtype=torch.float64)
    batch = Batch(
        loss_mask=torch.ones(1, 1),
        rewards=torch.tensor([advantage], dtype=torch.float64),
        group_ids=torch.zeros(1, dtype=torch.long),
        rollout_logprobs=old - mu_gap,
        old_logprobs=old,
    )
    return batch, (old + math.log(ratio)).requires_grad_()


def value_and_gradient(stages: dict, batch: Batch, logprobs: torch.Tensor) -> tuple[float, float]:
    objective = Objective.model_validate({**PLAIN, "aggregate": {"kind": "sum"}, **stages})
    output = policy_loss(objective, prepare(objective, batch), logprobs)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return float(output.loss.detach()), float(gradient.sum())


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (1.5, -1.0, 1.5, 1.5),
        (5.0, -1.0, 3.0, 0.0),
    ],
)
def test_clip_with_a_higher_upper_bound_and_a_cap(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    clip = {"kind": "clip", "low": 0.2, "high": 0.28, "cap": 3.0}
    got = value_and_gradient({"surrogate": clip}, *one_token(ratio, advantage))
    assert got == pytest.approx((loss, gradient))


def test_the_gradient_at_ratio_one_is_the_policy_gradient_for_every_surrogate() -> None:
    for kind in ("clip", "cispo", "sapo", "logprob", "ratio", "gmpo", "vespo", "dro"):
        for advantage in (1.5, -0.5):
            batch, logprobs = one_token(1.0, advantage)
            _, gradient = value_and_gradient({"surrogate": {"kind": kind}}, batch, logprobs)
            assert gradient == pytest.approx(-advantage), kind


def test_off_policy_weights_are_detached_and_bounded() -> None:
    for mu_gap, stages, weight in (
        (math.log(1.5), {"level": "token"}, 1.5),
        (math.log(8.0), {"level": "token", "high": 2.0}, 2.0),
        (math.log(0.1), {"level": "token", "low": 0.5}, 0.5),
        (math.log(8.0), {"level": "token", "high": 2.0, "outside": "zero"}, 0.0),
    ):
        batch, logprobs = one_token(1.0, 1.0, mu_gap)
        got = value_and_gradient(
            {"off_policy": stages, "surrogate": {"kind": "ratio"}}, batch, logprobs
        )
        assert got == pytest.approx((-weight, -weight))


def test_the_bypass_has_the_sampler_in_the_denominator() -> None:
    batch, logprobs = one_token(1.0, 1.0, math.log(1.5))
    stages = {"ratio": {"anchor": "rollout"}, "surrogate": {"kind": "ratio"}}
    assert value_and_gradient(stages, batch, logprobs) == pytest.approx((-1.5, -1.5))


def kl_gradient(gradient: str, kind: str = "k3") -> torch.Tensor:
    """Expected gradient of the KL term under samples from the live policy, over all tokens."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    base = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    importance = torch.exp(logprobs - logprobs.detach())
    spec = Kl.model_validate({"kind": kind, "gradient": gradient})
    expectation = (logprobs.detach().exp() * kl_estimate(spec, logprobs, base, importance)).sum()
    return torch.autograd.grad(expectation, logits)[0]


def test_which_gradients_are_those_of_the_reverse_kl() -> None:
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    base = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    reverse = torch.autograd.grad((logprobs.exp() * (logprobs - base)).sum(), logits)[0]
    logprobs = torch.log_softmax(logits, 0)
    forward = torch.autograd.grad((base.exp() * (base - logprobs)).sum(), logits)[0]
    for gradient in ("straight_through", "unbiased", "score"):
        torch.testing.assert_close(kl_gradient(gradient), reverse)
    torch.testing.assert_close(kl_gradient("naive", "k2"), reverse)
    torch.testing.assert_close(kl_gradient("naive", "k3"), forward)
    torch.testing.assert_close(kl_gradient("naive", "k1"), torch.zeros(4, dtype=torch.float64))


def test_half_chi2_is_not_k3() -> None:
    x, zero = torch.tensor([[2.0, -2.0]], dtype=torch.float64), torch.zeros(1, 2)
    half_chi2 = kl_estimate(Kl(kind="half_chi2"), x, zero.double())[0].tolist()
    k3 = kl_estimate(Kl(kind="k3"), x, zero.double())[0].tolist()
    assert half_chi2 == pytest.approx([20.41, 0.374], abs=5e-3)
    assert k3 == pytest.approx([1.135, 4.389], abs=5e-3)


def test_controller_moves_towards_the_target_and_survives_a_checkpoint() -> None:
    controller = KLController.of(Kl(where="loss", coef=0.1, target=0.5, horizon=100))
    higher = controller.updated(mean_kl=5.0, num_trajectories=10)
    lower = controller.updated(mean_kl=0.45, num_trajectories=10)
    assert higher.coef == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert lower.coef == pytest.approx(0.1 * (1 - 0.1 * 0.1))
    assert controller.loaded(higher.state_dict()) == higher
    fixed = KLController(0.1)
    assert fixed.updated(9.0, 10) is fixed


def test_kl_coefficient_can_be_replaced_in_loss_and_in_reward() -> None:
    batch, logprobs = one_token(1.0, 0.0)
    batch.ref_logprobs = torch.tensor([[-4.0]], dtype=torch.float64)
    stages = {**PLAIN, "aggregate": {"kind": "sum"}}
    kl = {"kind": "k2", "coef": 1.0}
    in_loss = Objective.model_validate({**stages, "kl": {**kl, "where": "loss"}})
    prepare(in_loss, batch)
    assert float(policy_loss(in_loss, batch, logprobs).loss.detach()) == pytest.approx(0.5)
    output = policy_loss(in_loss, batch, logprobs, kl_coef=0.1)
    assert float(output.loss.detach()) == pytest.approx(0.05)
    assert reduce_metrics([output.metrics])["policy/kl_ref"] == pytest.approx(0.5)
    in_reward = Objective.model_validate({**stages, "kl": {**kl, "where": "reward"}})
    batch.advantages = None
    assert prepare(in_reward, batch, kl_coef=0.1).advantages is not None
    assert float(batch.advantages) == pytest.approx(-0.05)  # type: ignore[arg-type]


def test_entropy_bonus() -> None:
    batch, logprobs = one_token(1.0, 0.0)
    objective = Objective.model_validate(
        {**PLAIN, "entropy": {"coef": 0.1}, "aggregate": {"kind": "sum"}}
    )
    prepare(objective, batch)
    with pytest.raises(ValueError, match="live entropy"):
        policy_loss(objective, batch, logprobs)
    entropy = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    output = policy_loss(objective, batch, logprobs, entropy)
    assert float(output.loss.detach()) == pytest.approx(-0.2)
    (gradient,) = torch.autograd.grad(output.loss, entropy)
    assert float(gradient) == pytest.approx(-0.1)


def step(rows: int = 6, columns: int = 5) -> Batch:
    torch.manual_seed(1)
    mask = torch.rand(rows, columns) < 0.6
    mask[2:3] = False
    return Batch(
        loss_mask=mask,
        rewards=torch.tensor([0.7, 0.1, 0.4, 0.9, 0.9, 0.2])[:rows],
        group_ids=torch.tensor([0, 0, 0, 1, 1, 2])[:rows],
        rollout_logprobs=-torch.rand(rows, columns),
        trajectory_ids=torch.tensor([0, 1, 2, 3, 3, 4])[:rows],
        turn_ids=torch.zeros(rows, columns, dtype=torch.long),
        policy_versions=torch.arange(rows)[:, None].expand(rows, columns),
        current_version=6,
        truncated=torch.tensor([True, False, False, False, False, False])[:rows],
    )


def weights(batch: Batch, aggregate: dict, **stages: object) -> torch.Tensor:
    objective = Objective.model_validate({**PLAIN, "aggregate": aggregate, **stages})
    return loss_weights(objective, batch)


def test_weights_sum_to_what_they_average_over() -> None:
    batch = step()
    counts = (batch.loss_mask != 0).sum(1)
    occupied = int((counts > 0).sum())
    for kind in ("token", "sequence_token_mean", "prompt", "trajectory"):
        assert float(weights(batch, {"kind": kind}).sum()) == pytest.approx(1), kind
    local = weights(batch, {"kind": "local", "local_rows": 2})
    assert float(local.sum()) == pytest.approx(1)
    total = float(counts.sum())
    assert float(weights(batch, {"kind": "sum"}).sum()) == total
    by_sequence = weights(batch, {"kind": "sequence_token_sum"})
    assert float(by_sequence.sum()) == pytest.approx(total / occupied)
    constant = weights(batch, {"kind": "constant", "max_tokens": 10})
    assert float(constant.sum()) == pytest.approx(total / (occupied * 10))
    empty = weights(batch, {"kind": "sequence_token_mean", "count_empty": True})
    assert float(empty.sum()) == pytest.approx(occupied / 6)
    # Rows 3 and 4 are one trajectory: together they weigh as much as any other.
    fanned = weights(batch, {"kind": "trajectory"}).sum(1)
    assert float(fanned[3] + fanned[4]) == pytest.approx(float(fanned[0])) == pytest.approx(1 / 4)


def test_truncated_rows_leave_numerator_and_denominator_but_not_the_baseline() -> None:
    batch = step()
    objective = Objective.model_validate(
        {"reward": {"truncated": "mask"}, "scale": {"kind": "none"}, "aggregate": {"kind": "token"}}
    )
    prepare(objective, batch)
    assert (batch.weights[0] == 0).all()
    assert float(batch.weights.sum()) == pytest.approx(1)
    mean = float(batch.rewards[:3].double().mean())
    kept = batch.advantages[1][batch.loss_mask[1]]
    assert kept.tolist() == pytest.approx([float(batch.rewards[1]) - mean] * len(kept))


def test_denominators_count_rejected_tokens_or_not() -> None:
    batch = step()
    stale = [{"kind": "staleness", "max_gap": 3}]  # rows 0, 1 and 2 are older
    original = weights(batch, {"kind": "token"}, trust=stale)
    kept = weights(batch, {"kind": "token", "denominator": "kept"}, trust=stale)
    assert float(original.sum()) == pytest.approx(1)
    assert (kept[:3] == 0).all() and float(kept.sum()) == pytest.approx(1)
    assert float(original[3:].sum()) < 1


def test_totals_of_shares_replace_the_whole_step() -> None:
    batch = step()
    objective = Objective.model_validate({"aggregate": {"kind": "sequence_token_mean"}})
    shares = [batch.select([0, 1, 2]), batch.select([3, 4, 5])]
    totals = [
        step_totals(objective.aggregate, share, trained_mask(objective, share)) for share in shares
    ]
    together = totals[0] + totals[1]
    assert isinstance(together, StepTotals)
    pieces = torch.cat([loss_weights(objective, share, together) for share in shares])
    torch.testing.assert_close(pieces, loss_weights(objective, batch))


def test_m2_keeps_the_largest_set_below_the_bound() -> None:
    gaps = torch.tensor([[0.1, -0.5, 0.2, 3.0, 0.0]], dtype=torch.float64)
    batch = Batch(
        loss_mask=torch.ones(1, 5),
        rewards=torch.ones(1),
        group_ids=torch.zeros(1, dtype=torch.long),
        rollout_logprobs=-1 + gaps,
        old_logprobs=-torch.ones(1, 5, dtype=torch.float64),
    )
    for bound, kept in ((0.04, [1, 0, 1, 0, 1]), (0.1, [1, 1, 1, 0, 1]), (1e-9, [0, 0, 0, 0, 1])):
        objective = Objective.model_validate(
            {**PLAIN, "trust": [{"kind": "m2", "max_second_moment": bound}]}
        )
        prepare(objective, batch)
        assert batch.step_mask[0].int().tolist() == kept


def test_top_entropy_keeps_the_highest_share() -> None:
    batch = step(2, 5)
    batch.loss_mask = torch.ones(2, 5, dtype=torch.bool)
    batch.old_entropy = torch.arange(10.0).view(2, 5)
    objective = Objective.model_validate({"trust": [{"kind": "top_entropy", "quantile": 0.8}]})
    prepare(objective, batch)
    assert batch.step_mask.flatten().nonzero().flatten().tolist() == [8, 9]


def test_gibberish_rejects_the_row_and_only_where_it_was_sampled() -> None:
    batch = step(4, 3)
    batch.loss_mask = torch.tensor([[1, 1, 0]] * 4)
    batch.token_ids = torch.tensor([[5, 120_000, 0], [5, 120_000, 0], [5, 7, 0], [5, 7, 120_000]])
    batch.rollout_logprobs = torch.tensor([[-1.0, -20.0, 0.0], [-1, -2, 0], [-1, -20, 0], [-1] * 3])
    batch.rollout_logprobs[3, 2] = -20.0
    objective = Objective.model_validate(
        {
            **PLAIN,
            "trust": [{"kind": "gibberish"}],
            "aggregate": {"kind": "token", "denominator": "kept"},
        }
    )
    assert objective.needs() == {"token_ids"}
    kept = loss_weights(objective, batch) > 0
    assert kept.any(1).tolist() == [False, True, True, True]
    prepare(objective, batch)
    output = policy_loss(objective, batch, batch.rollout_logprobs)
    assert reduce_metrics([output.metrics])["policy/masked_gibberish"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "mask", [{"kind": "ratio", "level": "sequence", "high": 1.5}, {"kind": "veto", "high": 1.5}]
)
def test_a_mask_that_judges_whole_rows_says_so_at_every_token(mask: dict) -> None:
    batch = step()
    batch.loss_mask = torch.ones(6, 5, dtype=torch.bool)
    batch.old_logprobs = batch.rollout_logprobs.clone()
    batch.old_logprobs[1] += 1.0
    objective = Objective.model_validate({**PLAIN, "trust": [mask]})
    output = policy_loss(objective, prepare(objective, batch), batch.rollout_logprobs)
    kept = output.kept[mask["kind"]]
    assert kept.tolist() == [[row != 1] * 5 for row in range(6)]


def test_step_wide_masks_need_prepare() -> None:
    batch = step()
    batch.old_logprobs = batch.rollout_logprobs
    objective = PRESETS["m2po"]
    batch.advantages = torch.zeros_like(batch.rollout_logprobs)
    with pytest.raises(ValueError, match="weights"):
        policy_loss(objective, batch, batch.rollout_logprobs)
    batch.weights = loss_weights(objective, batch)
    with pytest.raises(ValueError, match="prepare sets it"):
        policy_loss(objective, batch, batch.rollout_logprobs)


def test_value_loss_clips_and_scales() -> None:
    batch, _ = one_token(1.0, 1.0)
    batch.values = torch.tensor([[0.5]], dtype=torch.float64)
    stages = {**PLAIN, "credit": {"kind": "gae"}, "aggregate": {"kind": "sum"}}
    for critic, live, loss, gradient in (
        ({"value_clip": 0.2}, 0.6, 0.5 * 0.16, -0.4),
        ({"value_clip": 0.2}, 0.9, 0.5 * 0.09, 0.0),  # clipped to 0.7
        ({"value_clip": 0.2}, 0.1, 0.5 * 0.81, -0.9),
        ({"value_clip": "none"}, 0.9, 0.5 * 0.01, -0.1),
        ({"loss": "huber", "huber_delta": 0.1, "factor": 1.0}, 0.0, 0.19, -0.2),
    ):
        objective = Objective.model_validate({**stages, "critic": critic})
        values = torch.tensor([[live]], dtype=torch.float64, requires_grad=True)
        output = value_loss(objective, prepare(objective, batch), values)
        (slope,) = torch.autograd.grad(output.loss, values)
        assert (float(output.loss.detach()), float(slope)) == pytest.approx((loss, gradient))


def test_half_precision_is_widened() -> None:
    batch = step()
    objective = PRESETS["grpo"]
    prepare(objective, batch)
    live = batch.rollout_logprobs.to(torch.bfloat16).requires_grad_()
    output = policy_loss(objective, batch, live)
    assert output.loss.dtype == torch.float32
    output.loss.backward()
    assert live.grad is not None and live.grad.dtype == torch.bfloat16


def test_extreme_log_ratios_stay_finite() -> None:
    for ratio_gap in (80.0, -120.0):
        for name in PRESETS:
            objective = PRESETS[name]
            batch = step()
            batch.old_logprobs = batch.rollout_logprobs.clone()
            batch.ref_logprobs = batch.teacher_logprobs = batch.values = batch.rollout_logprobs
            batch.baselines = torch.zeros_like(batch.rewards)
            batch.state_ids = torch.zeros(batch.num_rows, 1, dtype=torch.long)
            prepare(objective, batch)
            live = (batch.rollout_logprobs + ratio_gap).requires_grad_()
            output = policy_loss(objective, batch, live)
            output.loss.backward()
            assert output.loss.isfinite(), name
            assert live.grad is not None and live.grad.isfinite().all(), name


def test_metrics_reduce_exactly() -> None:
    first = {"a": Metric("mean", (3.0, 2)), "b": Metric("max", (1.0,)), "c": Metric("sum", (1.0,))}
    second = {"a": Metric("mean", (1.0, 8)), "b": Metric("max", (4.0,)), "c": Metric("sum", (2.0,))}
    assert reduce_metrics([first, second]) == {"a": 0.4, "b": 4.0, "c": 3.0}
    assert reduce_metrics([merge_metrics([first]), second])["a"] == 0.4
    assert reduce_metrics([{"a": Metric("mean", (0.0, 0)), "b": Metric("max", (-math.inf,))}]) == {}
    even = Metric("ess", (4.0, 4.0, 4.0))
    assert even.value() == 1.0
    assert Metric("ess", (1.0, 1.0, 4.0)).value() == 0.25
    with pytest.raises(ValueError, match="cannot merge"):
        Metric("sum", (1.0,)).merged(Metric("max", (1.0,)))


def test_batch_checks_shapes() -> None:
    with pytest.raises(ValueError, match=r"rewards must be \(B\)"):
        Batch(torch.ones(2, 3), torch.ones(3), torch.zeros(2), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"rollout_logprobs must be \(B, T\)"):
        Batch(torch.ones(2, 3), torch.ones(2), torch.zeros(2), torch.zeros(2, 4))


def test_select_takes_rows_and_first_columns() -> None:
    batch = step()
    part = batch.select([4, 1], num_columns=3)
    assert part.loss_mask.shape == (2, 3)
    assert part.rewards.tolist() == batch.rewards[[4, 1]].tolist()
    assert part.current_version == 6
    assert torch.equal(part.rollout_logprobs, batch.rollout_logprobs[[4, 1], :3])


def test_filters_say_why() -> None:
    assert filter_zero_variance([1.0, 0.0]).keep
    assert filter_zero_variance([0.3, 0.1 + 0.2]).reason == "zero_variance"
    assert filter_zero_variance([1.0, math.nan]).reason == "single"
    assert filter_zero_variance([math.nan]).reason == "unscored"
