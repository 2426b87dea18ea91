"""Computes what a vector's `kind` and `knobs` ask for: advantages, returns and whitening."""

from __future__ import annotations

import torch
from golden import PLAIN, Knobs, Outputs, Vector, batch_of, solve
from torch import Tensor

from agentrl.algo import Objective
from agentrl.algo.advantage_stages import Overlong, Whiten
from agentrl.algo.advantages import distill_penalty, overlong_penalty, value_targets
from agentrl.algo.normalise import whiten
from agentrl.algo.segments import index_tokens, turn_reduce


def whiten_knobs(knobs: Knobs) -> Knobs:
    return {"mean": "batch", "std": "batch", "ddof": knobs["ddof"], "eps": knobs["eps"]}


def group_adv(v: Vector) -> Outputs:
    knobs, how = v.knobs, v.knobs["scale"]
    baseline = {
        "mean": {"kind": "mean"},
        "batchmean": {"kind": "mean", "key": "batch"},
        "loo": {"kind": "leave_one_out"},
        "lenmean": {"kind": "mean", "weighting": "token"},
        "passk": {"kind": "second_best"},
    }[knobs["center"]]
    scale: Knobs = {"kind": "mean" if how == "mean" else "none"}
    if how in ("group", "batch", "batch_raw"):
        level = "group" if how == "group" else "batch"
        scale = {"kind": "std", "level": level, "ddof": knobs["ddof"], "eps": knobs["eps"]}
    if knobs.get("gpg"):
        scale = {"kind": "success_rate"}
    stages: Knobs = {"baseline": baseline, "scale": scale}
    if "whiten" in knobs:
        stages["whiten"] = whiten_knobs(knobs["whiten"])
    return {"adv": solve(v, stages)}


def gdpo(v: Vector) -> Outputs:
    eps = v.knobs["eps"]
    whole = {"mean": "batch", "std": "batch", "unit": "sequence", "eps": eps, "eps_mode": "add"}
    stages = {"reward": {"combine": "normalize_then_sum"}, "scale": {"kind": "std", "eps": eps}}
    return {"adv": solve(v, {**stages, "whiten": whole})}


def norm(v: Vector) -> Outputs:
    """AReaL's NormConfig: over rewards (one number per row) or over token advantages."""
    knobs, x = v.knobs, v.tensor("x")
    groups = torch.arange(x.shape[0]) // knobs["group_size"]
    mean, std = knobs["mean"] or "none", knobs["std"] or "none"
    kind, ddof = "leave_one_out" if knobs["loo"] else "mean", int(knobs["unbiased"])
    if "mask" in v.inputs:
        stage = {"mean": mean, "std": std, "leave_one_out": knobs["loo"]}
        stage |= {"ddof": ddof, "eps": knobs["eps"], "eps_mode": "add"}
        spec = Objective.model_validate({"whiten": stage}).whiten
        tokens = index_tokens(batch_of(v), v.mask())
        return {"y": tokens.scatter(whiten(spec, tokens.compress(x), tokens, groups))}
    scale: Knobs = {"kind": "none"}
    if std != "none":
        scale = {"kind": "std", "level": std, "of": "centred", "ddof": ddof, "eps": knobs["eps"]}
    baseline = {"kind": kind, "key": mean} if mean != "none" else {"kind": "none"}
    return {"y": solve(v, {"baseline": baseline, "scale": scale}, rewards=x, group_ids=groups)}


def nemo_adv(v: Vector) -> Outputs:
    return {"adv": solve(v, {"scale": {"kind": "std", "eps": v.knobs["eps"]}})}


def primerl_adv(v: Vector) -> Outputs:
    kind = {"grpo": "none", "maxrl": "mean"}[v.knobs["algo"]]
    return {"adv": solve(v, {"scale": {"kind": kind}})}


def nemo_rpp(v: Vector) -> Outputs:
    knobs = v.knobs
    kl = {"where": "reward", "coef": knobs["kl_coef"], "kind": knobs["kl"]}
    kl |= {"clamp_in": knobs["clamp_in"], "clamp_out": knobs["clamp_out"]}
    whole = {**whiten_knobs({**knobs, "eps": 1e-8}), "eps_mode": "max"}
    return {"adv": solve(v, {"scale": {"kind": "none"}, "kl": kl, "whiten": whole})}


def credit_stages(v: Vector, credit: Knobs) -> Knobs:
    knobs = v.knobs
    stages: Knobs = {**PLAIN, "credit": credit}
    if knobs.get("kl_coef"):
        kind = {"k1c": "k1"}.get(knobs.get("kl", "k1"), knobs.get("kl", "k1"))
        stages["kl"] = {"where": "reward", "coef": knobs["kl_coef"], "kind": kind}
        stages["kl"]["clamp_in"] = knobs.get("clamp_in")
        stages["kl"]["clamp_out"] = knobs.get("clamp_out") or knobs.get("kl_clamp")
    if knobs.get("whiten"):
        stages["whiten"] = whiten_knobs(knobs["whiten"])
    return stages


def gae(v: Vector) -> Outputs:
    knobs = v.knobs
    credit = {"kind": "gae", "gamma": knobs["gamma"], "lam": knobs["lam"]}
    if "alpha" in knobs:
        credit |= {"length_alpha": knobs["alpha"], "lam_value": knobs["lam_value"]}
    stages = credit_stages(v, credit)
    returns = value_targets(Objective.model_validate(stages), batch_of(v))
    return {"adv": solve(v, stages), "returns": returns}


def returns_to_go(v: Vector) -> Outputs:
    """Rewards-to-go, plain (`returns`) and whitened (`adv`)."""
    stages = credit_stages(v, {"kind": "token", "gamma": v.knobs["gamma"]})
    return {"returns": solve(v, {**stages, "whiten": {}}), "adv": solve(v, stages)}


def token_credit(v: Vector, baseline: str) -> Outputs:
    stages = {**PLAIN, "credit": {"kind": "token"}}
    adv = solve(v, {**stages, "baseline": {"kind": baseline}})
    return {"adv": adv, "returns": solve(v, stages)}


def turn_returns(v: Vector) -> Outputs:
    mask, rewards = v.mask(), v.tensor("token_rewards")
    turns = torch.zeros(mask.shape, dtype=torch.float64)
    for row, at in enumerate(v.trained()):
        number = -1
        for t in at:
            number += t - 1 not in at
            if t + 1 not in at:
                turns[row, number] = rewards[row, t]
    stages = {**PLAIN, "credit": {"kind": "turn", "gamma": v.knobs["gamma"]}}
    fields = {"rewards": turns.sum(1), "turn_rewards": turns, "turn_ids": None}
    return {"returns": solve(v, stages, **fields)}


def rppbase(v: Vector) -> Outputs:
    kl = {"where": "reward", "kind": "k1", "coef": v.knobs["kl_coef"], "clamp_in": None}
    return {"adv": solve(v, {**PLAIN, "kl": kl}, rewards=v.tensor("centered"))}


def opd(v: Vector) -> Outputs:
    distill = {"where": "advantage", "coef": v.knobs["coef"]}
    objective = Objective.model_validate({**PLAIN, "distill": distill})
    student, teacher = v.tensor("student_logp"), v.tensor("teacher_logp")
    batch = batch_of(v, old_logprobs=student, teacher_logprobs=teacher)
    tokens = index_tokens(batch, batch.loss_mask)
    penalty = tokens.scatter(distill_penalty(objective, batch, tokens))
    return {"adv": v.tensor("advantages") - penalty}


def whiten_tokens(v: Vector) -> Outputs:
    tokens = index_tokens(batch_of(v), v.mask())
    groups = torch.zeros(len(tokens.lengths), dtype=torch.long)
    x: Tensor = tokens.compress(v.tensor("x"))
    spec = Whiten.model_validate(whiten_knobs(v.knobs))
    return {"y": tokens.scatter(whiten(spec, x, tokens, groups))}


def overlong(v: Vector) -> Outputs:
    knobs = {"max_tokens": v.knobs["max_len"], "buffer_tokens": v.knobs["buffer"]}
    spec = Overlong.model_validate({**knobs, "factor": v.knobs["factor"], "cap": v.knobs["cap"]})
    return {"rewards": v.tensor("rewards") + overlong_penalty(spec, v.mask().sum(1))}


KINDS = {
    "gae": gae,
    "gdpo": gdpo,
    "group_adv": group_adv,
    "group_adv_tok": group_adv,
    "nemo_adv": nemo_adv,
    "nemo_gae": gae,
    "nemo_rpp": nemo_rpp,
    "norm": norm,
    "opd": opd,
    "otb": lambda v: token_credit(v, "optimal_token"),
    "overlong": overlong,
    "primerl_adv": primerl_adv,
    "remax": lambda v: token_credit(v, "given"),
    "returns": returns_to_go,
    "rpp": returns_to_go,
    "rppbase": rppbase,
    "segment_mean": lambda v: {"y": turn_reduce(v.tensor("x"), v.mask(), None, "mean")},
    "turn_returns": turn_returns,
    "whiten": whiten_tokens,
}
