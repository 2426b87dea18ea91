"""Vectors that record a peer's bug, or a choice agentrl does not offer, and what is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from golden import Outputs, Vector, solve
from golden_advantages import gae, group_adv, primerl_adv, returns_to_go, whiten_tokens
from golden_losses import agg, decoupled, pg, rejections, rs_mask
from torch import Tensor


@dataclass(frozen=True)
class Refusal:
    """A peer's bug, or a choice agentrl does not offer.

    `applies` looks at a vector's knobs (and, where only some inputs provoke the choice, whether
    these do). `ours` is agentrl's answer, `reference` the same from scratch in float64. Where the
    objective itself forbids the combination, `forbidden` is part of the message.
    """

    peers: tuple[str, ...]
    kinds: tuple[str, ...]
    reason: str
    applies: Callable[[Vector], bool]
    ours: Callable[[Vector], Outputs]
    reference: Callable[[Vector], Outputs]
    forbidden: str | None = None


def reference_group(v: Vector) -> Outputs:
    """Group advantages trajectory by trajectory; a group of one has advantage 0."""
    knobs = v.knobs
    rewards, groups = v.tensor("rewards").tolist(), v.groups().tolist()
    mask = v.mask()
    lengths = mask.sum(1).tolist()
    advantages = []
    for i, reward in enumerate(rewards):
        members = [j for j in range(len(rewards)) if groups[j] == groups[i]]
        others = [j for j in members if j != i]
        values = [rewards[j] for j in members]
        if not others or max(values) == min(values):
            advantages.append(0.0)
            continue
        mean = sum(values) / len(values)
        if knobs["center"] == "loo":
            baseline = sum(rewards[j] for j in others) / len(others)
        elif knobs["center"] == "lenmean":
            weights = [lengths[j] for j in members]
            baseline = sum(w * r for w, r in zip(weights, values, strict=True)) / sum(weights)
        else:
            baseline = mean
        divisor = 1.0
        if knobs["scale"] == "group":
            squares = sum((r - mean) ** 2 for r in values)
            divisor = math.sqrt(squares / (len(values) - knobs["ddof"])) + knobs["eps"]
        elif knobs["scale"] == "mean":
            divisor = mean
        if knobs.get("gpg"):
            divisor = sum(r != 0 for r in rewards) / len(rewards)
        advantages.append((reward - baseline) / divisor)
    per_token = [[a if m else 0.0 for m in row] for a, row in zip(advantages, mask, strict=True)]
    result = torch.tensor(per_token, dtype=torch.float64)
    if "whiten" in knobs:
        result = reference_whiten(result, mask, knobs["whiten"]["eps"])
    return {"adv": result if ("mask" in v.inputs) else result[:, 0]}


def reference_whiten(x: Tensor, mask: Tensor, eps: float) -> Tensor:
    values = x[mask].tolist()
    mean = sum(values) / len(values)
    var = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return torch.where(mask, (x - mean) / math.sqrt(var + eps), 0)


def reference_token_rewards(v: Vector) -> list[list[float]]:
    """Reward on the last trained token (or as given), minus coef * k1 on every trained token."""
    steps = v.trained()
    if "token_rewards" in v.inputs:
        rewards = v.rows("token_rewards")
    else:
        rewards = [[0.0] * len(row) for row in v.rows("mask")]
        for row, (last, reward) in enumerate(zip(steps, v.tensor("rewards").tolist(), strict=True)):
            if last:
                rewards[row][last[-1]] = reward
    coef = v.knobs.get("kl_coef") or 0
    if coef:
        old, ref = v.rows("old_logp"), v.rows("ref_logp")
        bound = v.knobs.get("kl_clamp") or v.knobs.get("clamp_out") or math.inf
        for row, at in enumerate(steps):
            for t in at:
                x = old[row][t] - ref[row][t]
                rewards[row][t] -= coef * min(max(x, -bound), bound)
    return rewards


def reference_gae(v: Vector) -> Outputs:
    """The recursion over trained tokens: tool tokens carry no value and cost no discount."""
    gamma, lam = v.knobs["gamma"], v.knobs["lam"]
    values, rewards = v.rows("values"), reference_token_rewards(v)
    advantages = torch.zeros(v.mask().shape, dtype=torch.float64)
    returns = torch.zeros_like(advantages)
    for row, at in enumerate(v.trained()):
        following, carried = 0.0, 0.0
        for t in reversed(at):
            delta = rewards[row][t] + gamma * following - values[row][t]
            carried = delta + gamma * lam * carried
            following = values[row][t]
            advantages[row, t] = carried
            returns[row, t] = carried + following
    if v.knobs.get("whiten"):
        advantages = reference_whiten(advantages, v.mask(), v.knobs["whiten"]["eps"])
    return {"adv": advantages, "returns": returns}


def reference_returns(v: Vector) -> Outputs:
    rewards = reference_token_rewards(v)
    returns = torch.zeros(v.mask().shape, dtype=torch.float64)
    for row, at in enumerate(v.trained()):
        carried = 0.0
        for t in reversed(at):
            carried = rewards[row][t] + v.knobs["gamma"] * carried
            returns[row, t] = carried
    outputs = {"returns": returns}
    if v.knobs.get("whiten"):
        outputs["adv"] = reference_whiten(returns, v.mask(), v.knobs["whiten"]["eps"])
    return outputs


def sequence_means(v: Vector) -> list[float]:
    """Each sequence's mean value: one number per trajectory, however long it is."""
    x = v.tensor("x")
    if "mask" not in v.inputs:
        return x.tolist()
    mask = v.mask()
    return (torch.where(mask, x, 0).sum(1) / mask.sum(1).clamp(min=1)).tolist()


def ours_rloo(v: Vector) -> Outputs:
    return {"adv": solve(v, {"baseline": {"kind": "leave_one_out"}, "scale": {"kind": "none"}})}


def reference_rloo(v: Vector) -> Outputs:
    return reference_group(v.with_knobs(center="loo", scale="none"))


def reference_centred(v: Vector) -> Outputs:
    return reference_group(v.with_knobs(center="mean", scale="none"))


def reference_masked_mean(v: Vector) -> Outputs:
    pairs = zip(v.rows("x"), v.rows("mask"), strict=True)
    kept = [value for row, mask in pairs for value, m in zip(row, mask, strict=True) if m]
    return {"loss": torch.tensor(sum(kept) / len(kept), dtype=torch.float64)}


def reference_whitened(v: Vector) -> Outputs:
    return {"y": reference_whiten(v.tensor("x"), v.mask(), v.knobs["eps"])}


def ours_uncapped(v: Vector) -> Outputs:
    return pg(v.with_knobs(delta=None))


def ours_sequence_mean(v: Vector) -> Outputs:
    return pg(v.with_knobs(agg="seq-mean-token-mean"))


def reference_clip(v: Vector) -> Outputs:
    """PPO's clip token by token, at token or sequence level, with autograd through plain sums."""
    knobs = v.knobs
    logprobs = v.tensor("logp").requires_grad_()
    old, advantages = v.tensor("old_logp"), v.tensor("advantages")
    sequence = knobs.get("level") is not None
    terms: list[Tensor] = []
    rows = [at for at in v.trained()]
    num_tokens, num_rows = sum(map(len, rows)), sum(bool(at) for at in rows)
    for row, at in enumerate(rows):
        gaps = [logprobs[row, t] - old[row, t] for t in at]
        for t, gap in zip(at, gaps, strict=True):
            log_ratio = sum(gaps) / len(gaps) if sequence else gap
            ratio = torch.exp(log_ratio)
            clipped = ratio.clamp(1 - knobs["eps_low"], 1 + knobs["eps_high"])
            gain = torch.minimum(ratio * advantages[row, t], clipped * advantages[row, t])
            terms.append(-gain / (len(at) * num_rows if sequence else knobs["tokens"]))
    assert num_tokens == len(terms)
    loss = torch.stack(terms).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"loss": loss.detach(), "grad_logp": gradient}


def asymmetric(v: Vector) -> bool:
    """A k1 bound that is not its own reciprocal, so that ratio and inverse ratio differ."""
    bounds = [bounds for _, _, statistic, bounds in rejections(v) if statistic == "k1"]
    return any(abs(low * high - 1) > 1e-9 for low, high in bounds)


def reference_ratio_mask(v: Vector) -> Outputs:
    """Keep where low <= pi_old / mu <= high (k1), or where k2, k3 stay below a bound."""
    statistic = {
        "k1": lambda x: x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }
    reduce = {"mean": lambda values: sum(values) / len(values), "sum": sum, "max": max}
    gaps, kept = v.gap().tolist(), torch.zeros(v.mask().shape, dtype=torch.float64)
    for row, at in enumerate(v.trained()):
        for t in at:
            good = True
            for level, over, kind, bounds in rejections(v):
                judged = [t] if level == "token" else at
                result = reduce[over]([statistic[kind](gaps[row][u]) for u in judged])
                if kind == "k1":
                    good &= math.log(bounds[0]) <= result <= math.log(bounds[1])
                else:
                    good &= result <= bounds[0]
            kept[row, t] = float(good)
    return {"mask": kept}


def reference_decoupled_k3(v: Vector) -> Outputs:
    """PPO's clip times pi_old / mu over rows whose k3(mu, pi_old) stays below the bound."""
    knobs, spec = v.knobs, v.knobs["rs"]
    logprobs = v.tensor("logp").requires_grad_()
    old, sampled, advantages = (v.tensor(n) for n in ("old_logp", "rollout_logp", "advantages"))
    kept = torch.zeros(v.mask().shape, dtype=torch.float64)
    weights = torch.zeros_like(kept)
    terms = []
    steps = v.trained()
    for row, at in enumerate(steps):
        gaps = {t: float(old[row, t] - sampled[row, t]) for t in at}
        values = {t: math.exp(x) - 1 - x for t, x in gaps.items()}
        for t in at:
            if spec["level"] == "token":
                statistic = values[t]
            elif spec["agg"] == "max":
                statistic = max(values.values())
            else:
                total = sum(values.values())
                statistic = total if spec["agg"] == "sum" else total / len(at)
            if statistic > spec["upper"]:
                continue
            kept[row, t], weights[row, t] = 1.0, math.exp(gaps[t])
            ratio = torch.exp(logprobs[row, t] - old[row, t])
            clipped = ratio.clamp(1 - knobs["eps_low"], 1 + knobs["eps_high"])
            gain = torch.minimum(ratio * advantages[row, t], clipped * advantages[row, t])
            terms.append(-gain * math.exp(gaps[t]))
    loss = torch.stack(terms).sum() / sum(map(len, steps))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"loss": loss.detach(), "grad_logp": gradient, "rs_mask": kept, "w": weights}


def has_singleton(v: Vector) -> bool:
    return bool((torch.bincount(v.groups()) == 1).any())


def over_tokens(v: Vector) -> bool:
    return "mask" in v.inputs


REFUSALS = [
    Refusal(
        ("verl", "skyrl"),
        ("group_adv_tok",),
        "a group of one gets its raw reward as advantage; there is nothing to compare with: 0",
        lambda v: v.knobs.get("singleton") == "raw" and has_singleton(v),
        group_adv,
        reference_group,
    ),
    Refusal(
        ("slime",),
        ("group_adv",),
        "groups of unequal size are normalised as one group; groups go by their ids",
        lambda v: v.knobs.get("whole_batch", False),
        group_adv,
        reference_group,
    ),
    Refusal(
        ("slime", "skyrl", "openrlhf"),
        ("gae",),
        "tool tokens take part in the recursion (their values, a discount each, the reward)",
        lambda v: v.knobs["mask_mode"] != "skip",
        gae,
        reference_gae,
    ),
    Refusal(
        ("areal",),
        ("areal_gae",),
        "the reward lies on the last position and is lost where that is a tool token",
        lambda v: True,
        gae,
        reference_gae,
    ),
    Refusal(
        ("skyrl",),
        ("rpp",),
        "the running return restarts at every tool token, so earlier turns get no credit",
        lambda v: v.knobs["mask_mode"] == "reset",
        returns_to_go,
        reference_returns,
    ),
    Refusal(
        ("slime", "openrlhf"),
        ("returns",),
        "every tool token costs one discount",
        lambda v: v.knobs["mask_mode"] == "decay_through" and v.knobs["gamma"] < 1,
        returns_to_go,
        reference_returns,
    ),
    Refusal(
        ("nemorl",),
        ("nemo_adv",),
        "the std is leave-one-out too, so that a lone success is not divided at all",
        lambda v: v.knobs["loo"],
        ours_rloo,
        reference_rloo,
    ),
    Refusal(
        ("primerl",),
        ("primerl_adv",),
        "a length penalty in units of the group's mean reward; lengths are priced by the "
        "environment's reward or reward.overlong",
        lambda v: v.knobs["lenpen"] is not None,
        primerl_adv,
        reference_centred,
    ),
    Refusal(
        ("roll",),
        ("agg",),
        "the numerator sums masked tokens too",
        lambda v: v.knobs["mode"] == "roll_token-mean",
        agg,
        reference_masked_mean,
    ),
    Refusal(
        ("slime",),
        ("whiten",),
        "advantages are divided by their std around a mean that is added back",
        lambda v: not v.knobs["shift"],
        whiten_tokens,
        reference_whitened,
    ),
    Refusal(
        ("trl",),
        ("pg",),
        "a cap below the upper clip bound also cuts tokens with a positive advantage",
        lambda v: (v.knobs.get("delta") or math.inf) <= 1 + v.knobs.get("eps_high", 0),
        ours_uncapped,
        reference_clip,
        "is not above 1 + high",
    ),
    Refusal(
        ("trl",),
        ("pg",),
        "a sequence ratio summed over tokens weighs each sequence by its length",
        lambda v: v.knobs["agg"] == "luspo",
        ours_sequence_mean,
        reference_clip,
        "a sequence ratio summed over tokens",
    ),
    Refusal(
        ("verl",),
        ("rs_mask",),
        "bounds act on mu / pi_old, the inverse of the ratio they name",
        asymmetric,
        rs_mask,
        reference_ratio_mask,
    ),
    Refusal(
        ("areal",),
        ("decoupled",),
        "k3 of the inverse ratio is no estimate of KL(mu, pi_old) under samples from mu",
        lambda v: v.knobs["rs"]["metric"] == "kl_k3",
        decoupled,
        reference_decoupled_k3,
    ),
]
