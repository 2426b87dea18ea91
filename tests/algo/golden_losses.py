"""Computes what a vector's `kind` and `knobs` ask for: losses, aggregation, masks, weights."""

from __future__ import annotations

import math

import pytest
import torch
from golden import PLAIN, Knobs, Outputs, Vector, batch_of, totals_of
from torch import Tensor

from agentrl.algo import Objective, StepTotals, loss_weights, policy_loss, prepare, value_loss
from agentrl.algo.aggregate import trained_mask
from agentrl.algo.kl import kl_estimate
from agentrl.algo.loss_stages import Kl, OffPolicy, Ratio
from agentrl.algo.ratio import loglinear_logprobs, policy_log_ratio
from agentrl.algo.trust import (
    keep_mask,
    kl_cov_tokens,
    m2_mask,
    off_policy_scale,
    off_policy_weights,
    ratio_mask,
    veto_mask,
)
from agentrl.algo.trust_stages import RatioMask, VetoMask


def surrogate_stages(knobs: Knobs) -> Knobs:
    """`ratio`, `surrogate` and `trust` of a loss vector."""
    name = knobs["surrogate"]
    ratio: Knobs = {"anchor": knobs.get("anchor", "old"), "log_clamp": knobs.get("log_clamp") or 60}
    if (level := knobs.get("level", "token")) != "token":
        ratio["level"] = "sequence"
        ratio["gradient"] = {"sequence_plain": "live", "sequence_token": "token"}[level]
        ratio["mean_advantage"] = knobs.get("adv") == "seq_mean"
    trust: list[Knobs] = []
    if name.startswith("dppo_"):
        anchor = {"anchor": ratio["anchor"]}
        if name.startswith("dppo_tv"):
            trust.append({"kind": "dppo_tv", "low": knobs["lo"], "high": knobs["hi"], **anchor})
        else:
            assert knobs["lo"] == knobs["hi"]
            trust.append({"kind": "dppo_kl", "max_kl": knobs["hi"], **anchor})
        surrogate: Knobs = {"kind": "ratio"}
        if name.endswith("_logp"):
            surrogate = {"kind": "cispo", "low": 0, "high": knobs["c"]}
    else:
        kind, names = {
            "clip": ("clip", {"low": "eps_low", "high": "eps_high"}),
            "cispo": ("cispo", {"low": "lo", "high": "hi"}),
            "cispo_zero": ("cispo", {"low": "lo", "high": "hi"}),
            "sapo": ("sapo", {"tau_positive": "tau_pos", "tau_negative": "tau_neg"}),
            "gmpo": ("gmpo", {"low": "eps_low", "high": "eps_high"}),
            "dro": ("dro", {"beta": "beta"}),
            "klcov": ("kl_cov", {"fraction": "ratio", "coef": "coef"}),
            "logp": ("logprob", {}),
            "vespo": ("vespo", {}),
            "onpolicy": ("ratio", {}),
        }[name]
        surrogate = {"kind": kind, **{ours: knobs[theirs] or 0 for ours, theirs in names.items()}}
        if name == "clip":
            surrogate["cap"] = knobs.get("c") or knobs.get("delta")
        if name == "cispo_zero":
            surrogate["outside"] = "zero"
    if "opsm" in knobs:
        opsm = knobs["opsm"]
        trust.append({"kind": "opsm", "max_kl": opsm["delta"], "anchor": opsm["ref"]})
    stages: Knobs = {**PLAIN, "ratio": ratio, "surrogate": surrogate, "trust": trust}
    if "isw" in knobs:
        weight = knobs["isw"]
        if weight["level"] == "geo_mask_raw_token":
            bounds = {"low": weight["lo"], "high": weight["hi"]}
            trust.append({"kind": "ratio", "level": "sequence", **bounds})
            stages["off_policy"] = {"level": "token"}
        else:
            stages["off_policy"] = off_policy_knobs(weight)
    if "kl" in knobs:
        stages["kl"] = {"where": "loss", "coef": knobs["kl"]["coef"], **kl_knobs(knobs["kl"])}
    return stages


def aggregate_stage(v: Vector) -> tuple[Knobs, StepTotals | None]:
    """The aggregation of a loss vector, and the step's counts where it is a share of a step."""
    knobs, name = v.knobs, v.knobs["agg"]
    rows = len(next(iter(v.inputs.values())))
    sequences = totals_of(sequences=rows * knobs.get("ga", 1))
    mean = {"kind": "sequence_token_mean"}
    return {
        "token-mean": ({"kind": "token"}, None),
        "token-mean-eps": ({"kind": "token"}, None),
        "seq-mean-token-mean": (mean, None),
        "token-sum": ({"kind": "sum"}, None),
        "mean_all": ({**mean, "count_empty": True}, None),
        "mean_of_seq_mean_all": ({**mean, "count_empty": True}, None),
        "sum_of_seq_mean": (mean, totals_of(sequences=1)),
        "trl_grpo": (mean, sequences),
        "trl_bnpo": (
            {"kind": "local", "local_rows": rows},
            totals_of(local_batches=knobs.get("ga", 1)),
        ),
        "trl_dr_grpo": ({"kind": "constant", "max_tokens": knobs.get("maxlen")}, sequences),
        "trl_dapo": ({"kind": "token"}, totals_of(tokens=knobs.get("tokens", 0))),
        "nemo_tok": ({"kind": "token"}, totals_of(tokens=knobs.get("tokens", 0))),
        "nemo_seq": (mean, totals_of(sequences=knobs.get("seqs", 0))),
    }[name]


def run_loss(v: Vector, stages: Knobs, totals: StepTotals | None, **fields: object) -> Outputs:
    objective = Objective.model_validate(stages)
    batch = batch_of(v, **fields)
    batch.weights = loss_weights(objective, batch, totals)
    logprobs = v.tensor("logp").requires_grad_()
    if objective.surrogate.kind == "kl_cov":
        mask, fraction = trained_mask(objective, batch), objective.surrogate.fraction
        batch.kl_cov_mask = kl_cov_tokens(fraction, batch, mask, logprobs.detach())
    output = policy_loss(objective, batch, logprobs)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return {"loss": output.loss.detach(), "grad_logp": gradient}


def pg(v: Vector) -> Outputs:
    aggregate, totals = aggregate_stage(v)
    stages = {**surrogate_stages(v.knobs), "aggregate": aggregate}
    fields = {"old_logprobs": None} if v.knobs["surrogate"] == "onpolicy" else {}
    return run_loss(v, stages, totals, **fields)


def pg_token(v: Vector) -> Outputs:
    """Per-token losses, as the gradient of the loss with respect to a weight of 1 per token."""
    stages = {**surrogate_stages(v.knobs), "aggregate": {"kind": "sum"}}
    objective, batch = Objective.model_validate(stages), batch_of(v)
    weights = batch.weights = loss_weights(objective, batch).requires_grad_()
    output = policy_loss(objective, batch, v.tensor("logp"))
    (per_token,) = torch.autograd.grad(output.loss, weights)
    if "clipfrac" in v.outputs:
        names = ("policy/clip_fraction_high", "policy/clip_fraction_low")
        clipped = sum(float(output.metrics[name].parts[0]) for name in names)
        theirs = torch.tensor(v.outputs["clipfrac"], dtype=torch.float64)
        assert clipped == pytest.approx(float(theirs[v.mask()].sum()))
    return {"pg": per_token}


def decoupled(v: Vector) -> Outputs:
    knobs, spec = v.knobs, v.knobs["rs"]
    stages: Knobs = {
        **PLAIN,
        "ratio": {"log_clamp": 60},
        "surrogate": {"kind": "clip", "low": knobs["eps_low"], "high": knobs["eps_high"]},
        "aggregate": {"kind": "token"},
    }
    if spec["action"] == "clamp":
        level = {"token": "token", "sequence": "sequence_geometric"}[spec["level"]]
        stages["off_policy"] = {"level": level, "low": spec.get("lower"), "high": spec["upper"]}
    else:
        metric = spec["metric"]
        statistic = {"ratio": "ratio", "kl_k1": "ratio", "kl_k2": "k2", "kl_k3": "k3"}[metric]
        high = math.exp(spec["upper"]) if metric == "kl_k1" else spec["upper"]
        trust = {"kind": "ratio", "level": spec["level"], "statistic": statistic}
        trust |= {"over": spec.get("agg", "mean"), "low": spec.get("lower"), "high": high}
        stages["trust"] = [trust]
        by_sequence = (spec["level"], metric) == ("sequence", "ratio")
        stages["off_policy"] = {"level": "sequence_geometric" if by_sequence else "token"}
    objective, batch = Objective.model_validate(stages), batch_of(v)
    mask, old = v.mask(), v.tensor("old_logp")
    weights, _ = off_policy_weights(objective.off_policy, batch, old, mask)
    kept = mask
    for each in objective.trust:
        kept = kept & keep_mask(each, batch, mask, old)
    return {
        **run_loss(v, stages, None),
        "rs_mask": kept.double(),
        "w": torch.where(kept, weights, 0),
    }


def slime_full(v: Vector) -> Outputs:
    knobs = v.knobs
    clip = {"kind": "clip", "low": knobs["eps_low"], "high": knobs["eps_high"]}
    stages: Knobs = {**PLAIN, "ratio": {"log_clamp": 60}, "surrogate": clip}
    if knobs["advantage_estimator"] == "gspo":
        stages["ratio"]["level"] = "sequence"
    if knobs["use_opsm"]:
        stages["trust"] = [{"kind": "opsm", "max_kl": knobs["opsm_delta"], "anchor": "old"}]
    if knobs["use_tis"]:
        low, high = knobs["tis"]
        stages["off_policy"] = {"level": "token", "low": low, "high": high}
    if knobs["use_kl_loss"]:
        gradient = "unbiased" if knobs["use_unbiased_kl"] else "naive"
        stages["kl"] = {"where": "loss", "kind": knobs["kl_loss_type"], "gradient": gradient}
        stages["kl"] |= {"coef": knobs["kl_coef"], "clamp_in": None}
    return run_loss(v, stages, totals_of(sequences=1))


def primerl(v: Vector) -> Outputs:
    """The ratio runs to the sampler; the KL is (log r)^2, twice k2, over all trained tokens."""
    knobs = v.knobs
    low, high = knobs.get("lo"), knobs.get("hi")
    kl = {"where": "loss", "kind": "k2", "coef": 2 * knobs["kl"], "base": "rollout"}
    stages: Knobs = {**PLAIN, "kl": {**kl, "clamp_in": None}, "aggregate": {"kind": "token"}}
    stages["ratio"] = {"anchor": "rollout", "log_clamp": 60}
    totals = totals_of(tokens=knobs["scale"])
    if knobs.get("adv") != "ref_kl":
        stages["surrogate"] = {"kind": "ratio"}
        bounds = {"low": low} if knobs["mask"] != "tv_abs" else {"low": high, "side": "both"}
        stages["trust"] = [{"kind": "dppo_tv", "high": high, "anchor": "rollout", **bounds}]
        return run_loss(v, stages, totals)
    stages["surrogate"] = {"kind": "none"}
    stages["ratio"]["anchor"] = "old"
    stages["distill"] = {"where": "loss", "max_drop": low, "aggregate": {"kind": "token"}}
    fields = {"teacher_logprobs": v.tensor("ref_logp"), "old_logprobs": v.tensor("rollout_logp")}
    prepared = prepare(Objective.model_validate(stages), batch_of(v, **fields), totals=totals)
    return run_loss(v, stages, totals, **fields, distill_weights=prepared.distill_weights)


def value(v: Vector) -> Outputs:
    knobs = v.knobs
    aggregate, totals = aggregate_stage(v)
    critic = {"value_clip": knobs["clip"], "factor": knobs["factor"]}
    if knobs.get("loss") == "huber":
        critic |= {"loss": "huber", "huber_delta": knobs["huber_delta"]}
    stages = {**PLAIN, "credit": {"kind": "gae"}, "aggregate": aggregate, "critic": critic}
    objective, batch = Objective.model_validate(stages), batch_of(v)
    batch.weights = loss_weights(objective, batch, totals)
    return {"loss": value_loss(objective, batch, v.tensor("new_values")).loss}


def agg(v: Vector) -> Outputs:
    """Aggregation of given per-token losses: the sum of loss times weight."""
    knobs, mask, mode = v.knobs, v.mask(), v.knobs["mode"]
    rows, columns = mask.shape
    counted = {"count_empty": mode.startswith("roll_")}
    one_row = totals_of(sequences=1)
    # ROLL's -norm divides by the width alone: a constant for a batch of one sequence.
    constant = {"kind": "constant", "max_tokens": knobs.get("scale", columns), **counted}
    spec, totals = {
        "token-mean": ({"kind": "token"}, None),
        "token-sum": ({"kind": "sum"}, None),
        "token_sum": ({"kind": "sum"}, None),
        "sum_of_seq_mean": ({"kind": "sequence_token_mean"}, one_row),
        "sum_of_rollout_mean": ({"kind": "trajectory"}, totals_of(trajectories=1)),
        "seq-mean-token-mean": ({"kind": "sequence_token_mean", **counted}, None),
        "seq-mean-token-sum": ({"kind": "sequence_token_sum", **counted}, None),
        "seq-mean-token-sum-norm": (constant, one_row if mode.startswith("roll_") else None),
    }[mode.removeprefix("roll_")]
    if mode == "token-mean" and "tokens" in knobs:
        totals = totals_of(tokens=knobs["tokens"])
    if "gbs" in knobs and "seq-" in mode:
        totals = totals_of(sequences=knobs["gbs"])
    ids = torch.arange(rows) // 2 if mode == "sum_of_rollout_mean" else None
    objective = Objective.model_validate({**PLAIN, "aggregate": spec})
    weights = loss_weights(objective, batch_of(v, trajectory_ids=ids), totals)
    return {"loss": knobs.get("dp", 1) * torch.where(mask, v.tensor("x") * weights, 0).sum()}


def skyrl_reduce(v: Vector) -> Outputs:
    """SkyRL multiplies the advantage by the weight, times the micro-batches it divides by later."""
    knobs = v.knobs
    groups = torch.zeros(len(v.mask()), dtype=torch.long)
    for number, (start, stop) in enumerate(knobs["prompts"]):
        groups[start:stop] = number
    spec: Knobs = {
        "token_mean": {"kind": "token"},
        "token_mean_legacy": {"kind": "local", "local_rows": knobs["micro"], "count_empty": True},
        "sequence_mean": {"kind": "sequence_token_mean", "count_empty": True},
        "seq_mean_token_sum_norm": {
            "kind": "constant",
            "max_tokens": knobs["max_len"],
            "count_empty": True,
        },
        "prompt_mean": {"kind": "prompt"},
    }[knobs["mode"]]
    objective = Objective.model_validate({**PLAIN, "aggregate": spec})
    return {"adv": v.tensor("advantages") * loss_weights(objective, batch_of(v, group_ids=groups))}


# KL and ratio -------------------------------------------------------------------------------------


def kl_knobs(knobs: Knobs) -> Knobs:
    kind, gradient = knobs["type"], "naive"
    if kind.endswith("+"):
        kind, gradient = kind[:-1], "straight_through"
    if knobs.get("is_weight"):
        gradient = "score" if knobs["is_weight"] == "score" else "unbiased"
    clamps = {"clamp_in": knobs.get("clamp_in"), "clamp_out": knobs.get("clamp_out")}
    return {"kind": kind, "gradient": gradient, **clamps}


def kl(v: Vector) -> Outputs:
    logprobs, base = v.tensor("logp").requires_grad_(), v.tensor("ref_logp")
    importance = None
    if "old_logp" in v.inputs:
        importance = torch.exp(logprobs - v.tensor("old_logp"))
    estimate = kl_estimate(Kl.model_validate(kl_knobs(v.knobs)), logprobs, base, importance)
    (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
    return {"kl": estimate.detach(), "grad_logp": gradient}


def gspo_kl(v: Vector) -> Outputs:
    logprobs, spec = v.tensor("logp"), Ratio(level="sequence", log_clamp=60)
    gap = logprobs - v.tensor("old_logp")
    return {"ppo_kl": -policy_log_ratio(spec, gap, logprobs, v.mask(), None)}


def prox(v: Vector) -> Outputs:
    versions = v.tensor("versions").long()
    fields = {"policy_versions": versions, "current_version": v.knobs["current"]}
    batch = batch_of(v, rollout_logprobs=v.tensor("old_logp"), **fields)
    return {"loglinear": loglinear_logprobs(batch, v.tensor("logp"))}


# masks and weights --------------------------------------------------------------------------------


def off_policy_knobs(knobs: Knobs) -> Knobs:
    level = {"token": "token", "sequence_prod": "sequence_product"}[knobs["level"]]
    return {"level": level, "outside": knobs["mode"], "low": knobs.get("lo"), "high": knobs["hi"]}


def weights_of(v: Vector, knobs: Knobs) -> Tensor:
    spec, mask, batch = OffPolicy.model_validate(knobs), v.mask(), batch_of(v)
    if spec.normalize != "none":
        batch.off_policy_scale = off_policy_scale(spec, batch, mask)
    return off_policy_weights(spec, batch, v.tensor("old_logp"), mask)[0]


def is_weight(v: Vector) -> Outputs:
    normalize = v.knobs.get("bn") or "none"
    return {"w": weights_of(v, {**off_policy_knobs(v.knobs), "normalize": normalize})}


def bounded(v: Vector, level: str, low: float, high: float) -> Tensor:
    over = "sum" if level == "sequence" else "mean"
    where = "token" if level == "token" else "sequence"
    spec = RatioMask(level=where, over=over, low=low, high=high)
    return ratio_mask(spec, v.gap(), v.mask())


def mis(v: Vector) -> Outputs:
    knobs, kept = v.knobs, v.mask()
    levels = {"token": "token", "sequence": "sequence_product", "geometric": "sequence_geometric"}
    spec: Knobs = {"level": levels[knobs["level"]]}
    if knobs["mode"] == "mask":
        kept = kept & bounded(v, knobs["level"], knobs["lo"], knobs["hi"])
    else:
        spec["high"] = knobs["hi"]
        spec["low"] = knobs["lo"] if knobs["mode"] == "clip" else None
    if knobs["bn"]:
        spec["normalize"] = "token" if knobs["level"] == "token" else "sequence"
    if knobs["rs"]:
        kept = kept & bounded(v, knobs["rs_level"], knobs["rs_lo"], knobs["rs_hi"])
    if knobs["veto"] is not None:
        kept = kept & veto_mask(VetoMask(low=knobs["veto"]), v.gap(), v.mask())
    return {"w": weights_of(v, spec), "mask": kept.double()}


def skyrl_off(v: Vector) -> Outputs:
    knobs, kept = v.knobs, v.mask()
    weights = torch.ones_like(v.gap())
    if "level" in knobs:
        weights = weights_of(v, off_policy_knobs(knobs))
    if "seq" in knobs:
        level = {"geo": "geometric", "prod": "sequence"}[knobs["seq"]]
        kept = kept & bounded(v, level, knobs["lo"], knobs["hi"])
    if "outlier" in knobs:
        low, high = knobs["outlier"]
        kept = kept & veto_mask(VetoMask(low=low, high=high), v.gap(), v.mask())
    if "tokmask" in knobs:
        kept = kept & bounded(v, "token", *knobs["tokmask"])
    return {"w": weights, "mask": kept.double()}


def rejections(v: Vector) -> list[tuple[str, str, str, list[float]]]:
    """(level, reduction, statistic, bounds) of each of verl's rejection options."""
    result = []
    for option, bounds in zip(v.knobs["opts"].split(","), v.knobs["th"].split(","), strict=True):
        level, *middle, statistic = option.split("_")
        over = middle[0] if middle else "mean"
        result.append((level, over, statistic, [float(each) for each in bounds.split("_")]))
    return result


def rs_mask(v: Vector) -> Outputs:
    kept = v.mask()
    for level, over, statistic, bounds in rejections(v):
        spec: Knobs = {"level": {"token": "token", "seq": "sequence"}[level], "over": over}
        if statistic == "k1":
            spec |= {"low": bounds[0], "high": bounds[1]}
        else:
            spec |= {"statistic": statistic, "high": bounds[0]}
        kept = kept & ratio_mask(RatioMask.model_validate(spec), v.gap(), v.mask())
    return {"mask": kept.double()}


def opsm(v: Vector) -> Outputs:
    trust = [{"kind": "opsm", "max_kl": v.knobs["delta"], "anchor": "old"}]
    spec, old = Objective.model_validate({"trust": trust}).trust[0], v.tensor("old_logp")
    kept = keep_mask(spec, batch_of(v), v.mask(), old, v.tensor("logp"), v.tensor("advantages"))
    return {"mask": kept.double()}


def m2po(v: Vector) -> Outputs:
    trust = [{"kind": "m2", "max_second_moment": v.knobs["tau"]}]
    (spec,) = Objective.model_validate({"trust": trust}).trust
    assert spec.kind == "m2"
    return {"mask": m2_mask(spec, batch_of(v), v.mask()).double()}


KINDS = {
    "agg": agg,
    "decoupled": decoupled,
    "gspo_kl": gspo_kl,
    "is_weight": is_weight,
    "kl": kl,
    "m2po": m2po,
    "mis": mis,
    "opsm": opsm,
    "pg": pg,
    "pg_token": pg_token,
    "primerl": primerl,
    "prox": prox,
    "rs_mask": rs_mask,
    "skyrl_off": skyrl_off,
    "skyrl_reduce": skyrl_reduce,
    "slime_full": slime_full,
    "value": value,
}
