"""An objective in words: its stages as formulas, and where each preset comes from. No torch.

Notation: R_i reward of trajectory i, g its group, n_i its trained tokens, N = sum_i n_i over the
step, B rows with a trained token; log-probs mu (engine, at sampling), old (trainer, before the
update), pi (live), ref, T (teacher); sg[.] stops the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.algo.objective import Aggregate, Objective, TrustMask


@dataclass(frozen=True, slots=True)
class PresetNote:
    title: str
    sources: tuple[str, ...]
    when: str


@dataclass(frozen=True, slots=True)
class Description:
    name: str | None
    """The preset, or none for an objective without one."""
    title: str
    stages: tuple[tuple[str, str], ...]
    """(stage, formula) in the order of computation; stages that do nothing are left out."""
    sources: tuple[str, ...]
    when: str
    needs: tuple[str, ...]
    """Optional batch fields the objective cannot do without."""


PRESET_NOTES = {
    "grpo": PresetNote(
        "GRPO: group-relative advantages",
        ("DeepSeekMath, arXiv:2402.03300",),
        "The default for verifiable rewards. Dividing by the group's std weighs very easy and "
        "very hard tasks up, and averaging per sequence weighs tokens of short answers up.",
    ),
    "dr_grpo": PresetNote(
        "Dr.GRPO: GRPO without its two biases",
        ("Understanding R1-Zero-like training, arXiv:2503.20783",),
        "When answers grow longer without getting better. Set aggregate.max_tokens to the most "
        "tokens a trajectory may sample: it scales the gradient.",
    ),
    "ssr_grpo": PresetNote(
        "SSR-GRPO: Dr.GRPO for long agent trajectories",
        ("Self-play SWE-RL, arXiv:2512.18552",),
        "Agents with turn rewards and long contexts, asynchronously sampled. baseline.weighting = "
        "'token' gives its length-weighted mean.",
    ),
    "dapo": PresetNote(
        "DAPO: clip higher and one mean over all tokens",
        ("DAPO, arXiv:2503.14476",),
        "Long answers with large batches. Its other two parts are rollout.drop_zero_variance with "
        "rollout.max_waves, and reward.overlong.",
    ),
    "gspo": PresetNote(
        "GSPO: one ratio per sequence",
        ("Group Sequence Policy Optimization, arXiv:2507.18071",),
        "Mixture-of-experts models and several updates per batch. The clip bounds are of another "
        "order of magnitude than PPO's because the ratio is a geometric mean.",
    ),
    "rloo": PresetNote(
        "RLOO: REINFORCE with a leave-one-out baseline",
        ("Back to Basics, arXiv:2402.14740",),
        "One update per batch: it has no ratio and nothing to tune.",
    ),
    "ppo": PresetNote(
        "PPO with a critic",
        ("arXiv:1707.06347", "arXiv:1506.02438 (GAE)"),
        "When single trajectories per task are all there is, or rewards come during the episode.",
    ),
    "vapo": PresetNote(
        "VAPO: PPO for long chains of thought",
        ("VAPO, arXiv:2504.05118",),
        "PPO with answers of very different lengths: lambda follows the length, the critic learns "
        "undiscounted returns.",
    ),
    "reinforce_pp": PresetNote(
        "REINFORCE++: rewards-to-go, whitened over the batch",
        ("REINFORCE++, arXiv:2501.03262",),
        "One trajectory per task, without a critic.",
    ),
    "reinforce_pp_baseline": PresetNote(
        "REINFORCE++-baseline: group mean, whitened over the batch",
        ("REINFORCE++, arXiv:2501.03262, section on multiple responses",),
        "Like GRPO, with the batch's spread instead of each group's: easy and hard tasks keep "
        "their relative weight.",
    ),
    "lite_ppo": PresetNote(
        "LitePPO: group mean, batch std, token mean",
        ("Tricks or Traps, arXiv:2508.08221",),
        "Groups whose rewards barely differ, where a group's own std would blow noise up.",
    ),
    "sapo": PresetNote(
        "SAPO: a soft gate instead of a clip",
        ("Soft Adaptive Policy Optimization, arXiv:2511.20347",),
        "When hard clipping discards much of the batch. At ratio 1 its gradient is PPO's.",
    ),
    "cispo": PresetNote(
        "CISPO: truncated weights, every token keeps a gradient",
        ("MiniMax-M1, arXiv:2506.13585",),
        "Rare tokens that PPO's clip would silence; asynchronous sampling.",
    ),
    "m2po": PresetNote(
        "M2PO: a bound on the second moment of the mismatch",
        ("Prosperity before Collapse, arXiv:2510.01161",),
        "Very stale samples. Needs the trainer's log-probs before the update.",
    ),
    "opd": PresetNote(
        "On-policy distillation as an advantage",
        ("On-policy distillation of language models, arXiv:2306.13649",),
        "A stronger model exists for the same tokenizer. Rewards, if any, add to the teacher's "
        "signal.",
    ),
    "search_r1": PresetNote(
        "Search-R1's GRPO",
        ("Search-R1, arXiv:2503.09516",),
        "Tool use with a reference policy to stay close to.",
    ),
    "areal": PresetNote(
        "AReaL's asynchronous recipe",
        ("AReaL, arXiv:2505.24298",),
        "Asynchronous sampling: the ratio runs to the trainer's policy before the update, a "
        "detached weight corrects for the sampler. Group statistics are over trajectories, the "
        "whitening over tokens.",
    ),
    "slime": PresetNote(
        "slime's GRPO defaults",
        ("github.com/THUDM/slime",),
        "To continue a run that was started there: rows without a trained token count in the mean.",
    ),
    "trl": PresetNote(
        "TRL's GRPOTrainer defaults",
        ("github.com/huggingface/trl",),
        "To continue a run that was started there. Its correction for the sampler zeroes whole "
        "sequences by the product of their ratios, which drops long ones; here each token's ratio "
        "is truncated at the same cap instead.",
    ),
}


def describe(objective: Objective) -> Description:
    """The stages of an objective as formulas, with its preset's sources."""
    note = PRESET_NOTES.get(objective.preset or "")
    stages = [
        ("reward", _reward(objective)),
        ("credit", _credit(objective)),
        ("baseline", _baseline(objective)),
        ("scale", _scale(objective)),
        ("distill", _distill(objective)),
        ("whiten", _whiten(objective)),
        ("ratio", _ratio(objective)),
        ("surrogate", _surrogate(objective)),
        *((f"trust.{mask.kind}", _trust(mask)) for mask in objective.trust),
        ("off_policy", _off_policy(objective)),
        ("kl", _kl(objective)),
        ("entropy", _entropy(objective)),
        ("aggregate", _aggregate(objective.aggregate)),
        ("critic", _critic(objective)),
    ]
    return Description(
        name=objective.preset,
        title=note.title if note else "an objective without a preset",
        stages=tuple((stage, formula) for stage, formula in stages if formula),
        sources=note.sources if note else (),
        when=note.when if note else "",
        needs=tuple(sorted(objective.needs())),
    )


def _reward(o: Objective) -> str:
    spec = o.reward
    text = "R_i = the trajectory's reward"
    if spec.weights is not None:
        parts = " + ".join(f"{weight:g} {name}" for name, weight in spec.weights.items())
        text = f"R_i = {parts}"
        if spec.combine == "normalize_then_sum":
            text += ", each normalised within its group first"
    if spec.scale != 1 or spec.bias != 0:
        text += f"; times {spec.scale:g} plus {spec.bias:g}"
    if spec.clip is not None:
        text += f"; clipped to +-{spec.clip:g}"
    if spec.overlong is not None:
        over = spec.overlong
        start = over.max_tokens - over.buffer_tokens
        text += f"; - {over.factor:g} clip((n_i - {start}) / {over.buffer_tokens}, 0, 1)"
    if spec.truncated == "zero":
        text += "; 0 if truncated"
    if spec.truncated == "mask":
        text += "; truncated trajectories leave the loss, not the baseline"
    return text


def _credit(o: Objective) -> str:
    spec = o.credit
    if spec.kind == "outcome":
        return "G_it = R_i at every trained token"
    if spec.kind == "turn":
        return f"G_ik = sum_(j>=k) {spec.gamma:g}^(j-k) r_ij, the same at every token of turn k"
    if spec.kind == "token":
        return f"G_it = sum_(u>=t) {spec.gamma:g}^(u-t) r_iu over trained tokens"
    if spec.kind == "gae":
        lam = f"1 - 1/({spec.length_alpha:g} n_i)" if spec.length_alpha > 0 else f"{spec.lam:g}"
        value = (
            "" if spec.lam_value is None else f"; critic's targets with lambda {spec.lam_value:g}"
        )
        return (
            f"A_t = d_t + {spec.gamma:g} lambda A_t', d_t = r_t + {spec.gamma:g} V_t' - V_t, "
            f"t' the next trained token, lambda = {lam}{value}"
        )
    return (
        f"{spec.episode_weight:g} episode advantage within the group + {spec.step_weight:g} step "
        f"advantage (gamma {spec.gamma:g} per turn) within the same state"
    )


def _baseline(o: Objective) -> str:
    spec = o.baseline
    among = {"group": "g", "group_turn": "the same turn of g", "batch": "the batch"}[spec.key]
    if spec.kind == "mean":
        if spec.weighting == "token":
            return f"b = sum n_j G_j / sum n_j over {among}; 0 in groups of one or without variance"
        return f"b = mean of G over {among}; A = 0 in groups of one or without variance"
    if spec.kind == "leave_one_out":
        return f"b_i = mean of G over {among} without i; A = 0 in groups of one"
    if spec.kind == "second_best":
        return "A of the best of g = its lead over the second; 0 for the others"
    if spec.kind == "optimal_token":
        return "b_t = sum G_t W_t / sum W_t over g, W_t = sum_(u<=t) (1 - 2 pi + sum pi^2)"
    if spec.kind == "given":
        return "b = the batch's own baseline (a greedy answer's reward)"
    return ""


def _scale(o: Objective) -> str:
    spec = o.scale
    if spec.kind == "std":
        of = "of G - b " if spec.of == "centred" else ""
        over = "g" if spec.level == "group" else "the batch"
        kind = "unbiased" if spec.ddof else "biased"
        forms = {
            "add": f"(std + {spec.eps:g})",
            "sqrt": f"sqrt(var + {spec.eps:g})",
            "max": f"max(std, {spec.eps:g})",
        }
        return f"A = (G - b) / {forms[spec.eps_mode]}, {kind} std {of}over {over}"
    if spec.kind == "mean":
        return "A = (G - b) / mean of G over g, 0 where that is not positive"
    if spec.kind == "success_rate":
        return "A = (G - b) / share of non-zero G in the batch"
    return "A = G - b" if o.baseline.kind != "none" else ""


def _distill(o: Objective) -> str:
    spec = o.distill
    if spec.where == "advantage":
        later = f" + {spec.discount:g} of the next tokens' and so on" if spec.discount else ""
        return f"A_t -= {spec.coef:g} (log pi - log T)_t{later}"
    if spec.where == "loss":
        drop = "" if spec.max_drop is None else f" where pi - anchor >= -{spec.max_drop:g}"
        weights = _aggregate(spec.aggregate)
        return f"+ {spec.coef:g} x -sg[log T - log pi] pi / anchor{drop}, {weights}"
    return ""


def _whiten(o: Objective) -> str:
    spec = o.whiten
    if spec.mean == "none" and spec.std == "none":
        return ""
    unit = "tokens" if spec.unit == "token" else "trajectories"
    parts = [] if spec.mean == "none" else [f"minus the mean over the {spec.mean}"]
    if spec.std != "none":
        parts.append(f"divided by the std over the {spec.std}")
    return f"A {' and '.join(parts)}, counting {unit}"


def _ratio(o: Objective) -> str:
    spec = o.ratio
    anchor = {"old": "old", "rollout": "mu", "loglinear": "old ~ mu^(1-a) pi^a"}[spec.anchor]
    if o.surrogate.kind in ("logprob", "none"):
        return ""
    if spec.level == "token":
        text = f"r_t = pi / {anchor} at each token"
    else:
        text = f"r = exp(mean over the {spec.level} of log pi - log {anchor})"
    if spec.level != "token" and spec.gradient == "token":
        text += ", with each token's own gradient"
    return f"{text}; |log r| <= {spec.log_clamp:g}"


def _surrogate(o: Objective) -> str:
    spec = o.surrogate
    if spec.kind == "clip":
        text = f"l = max(-r A, -clip(r, {1 - spec.low:g}, {1 + spec.high:g}) A)"
        return text + (f"; at most -{spec.cap:g} A where A < 0" if spec.cap is not None else "")
    if spec.kind == "cispo":
        if spec.outside == "clamp":
            return f"l = -sg[clip(r, {spec.low:g}, {spec.high:g})] A log pi"
        return f"l = -sg[r] A log pi where {spec.low:g} < r < {spec.high:g}, else 0"
    if spec.kind == "sapo":
        return (
            "l = -(4 / tau) sigmoid(tau (r - 1)) A, "
            f"tau = {spec.tau_positive:g} where A > 0 else {spec.tau_negative:g}"
        )
    if spec.kind == "logprob":
        return "l = -A log pi"
    if spec.kind == "ratio":
        return "l = -r A"
    if spec.kind == "gmpo":
        return (
            "l = -A exp(mean_t of log r clipped at "
            f"{spec.high:g} where A > 0 and at -{spec.low:g} where A < 0)"
        )
    if spec.kind == "vespo":
        return (
            "l = -sg[exp(lam + k log w - lam w)] A log pi, w = prod_t r_t, (k, lam) = "
            f"({spec.k_positive:g}, {spec.lam_positive:g}) where A >= 0 else "
            f"({spec.k_negative:g}, {spec.lam_negative:g})"
        )
    if spec.kind == "dro":
        return f"l = -(A log pi - {spec.beta:g}/2 (log r)^2)"
    if spec.kind == "kl_cov":
        return (
            f"l = -r A + {spec.coef:g} |log r| at the {spec.fraction:g} of the tokens with the "
            "largest cov(A, log pi)"
        )
    return ""


def _trust(spec: TrustMask) -> str:
    if spec.kind == "opsm":
        return f"drop where A < 0 and mean_t(log {spec.anchor} - log pi) > {spec.max_kl:g}"
    if spec.kind == "dppo_tv":
        low = "-inf" if spec.low is None else f"-{spec.low:g}"
        high = "inf" if spec.high is None else f"{spec.high:g}"
        if spec.side == "both":
            return f"keep where {low} <= pi - {spec.anchor} <= {high}"
        return f"keep where pi - {spec.anchor} <= {high} (A > 0) or >= {low} (A <= 0)"
    if spec.kind == "dppo_kl":
        return f"drop where pi moves away and binary KL({spec.anchor}, pi) > {spec.max_kl:g}"
    if spec.kind == "m2":
        bound = spec.max_second_moment
        return (
            f"drop the largest (log mu - log old)^2 until the mean of the rest is below {bound:g}"
        )
    if spec.kind == "ratio":
        low = 0 if spec.low is None else spec.low
        high = "inf" if spec.high is None else f"{spec.high:g}"
        what = {"ratio": "old / mu", "abs": "|log old/mu|", "k2": "k2", "k3": "k3(mu, old)"}
        over = "" if spec.level == "token" else f", {spec.over} over the {spec.level}"
        return f"keep where {low:g} <= {what[spec.statistic]} <= {high}{over}"
    if spec.kind == "veto":
        high = "" if spec.high is None else f" or > {spec.high:g}"
        return f"drop rows with any old / mu < {spec.low:g}{high}"
    if spec.kind == "gibberish":
        rare = f"ids >= {spec.min_token_id} and log mu < {spec.max_logprob:g}"
        return f"drop rows with any token of {rare}"
    if spec.kind == "top_entropy":
        return f"keep tokens whose entropy reaches the step's {spec.quantile:g} quantile"
    if spec.kind == "staleness":
        return f"drop tokens sampled more than {spec.max_gap} policy versions ago"
    return (
        f"drop at most {spec.fraction:g} of the tokens, the largest cov(A, log pi) in "
        f"[{spec.low:g}, {spec.high:g}]"
    )


def _off_policy(o: Objective) -> str:
    spec = o.off_policy
    if spec.level == "none":
        return ""
    what = {
        "token": "old / mu",
        "turn": "exp(mean over the turn of log old/mu)",
        "sequence_product": "prod_t old / mu",
        "sequence_geometric": "exp(mean_t log old/mu)",
    }[spec.level]
    low = "0" if spec.low is None else f"{spec.low:g}"
    high = "inf" if spec.high is None else f"{spec.high:g}"
    if spec.low is None and spec.high is None:
        text = f"l times sg[{what}]"
    elif spec.outside == "clamp":
        text = f"l times sg[clip({what}, {low}, {high})]"
    else:
        text = f"l times sg[{what}], 0 outside [{low}, {high}]"
    return text + ("" if spec.normalize == "none" else f", over its mean per {spec.normalize}")


def _kl(o: Objective) -> str:
    spec = o.kl
    if spec.where == "none":
        return ""
    base = {"ref": "ref", "rollout": "mu", "old": "old"}[spec.base]
    value = {
        "k1": "x",
        "abs": "|x|",
        "k2": "x^2/2",
        "k3": "exp(-x) - 1 + x",
        "low_var_kl": "clip(exp(-x) - 1 + x, -10, 10)",
        "half_chi2": "(exp(x) - 1)^2 / 2",
    }[spec.kind]
    adaptive = "" if spec.target is None else f", coefficient adapting to a KL of {spec.target:g}"
    if spec.where == "reward":
        return f"r_t -= {spec.coef:g} ({value}), x = log pi - log {base}{adaptive}"
    gradient = {
        "naive": "",
        "straight_through": ", with the gradient of x^2/2",
        "unbiased": ", times the live pi / old",
        "score": ", times exp(log pi - sg[log pi])",
    }[spec.gradient]
    return f"l + {spec.coef:g} ({value}), x = log pi - log {base}{gradient}{adaptive}"


def _entropy(o: Objective) -> str:
    return f"l - {o.entropy.coef:g} H(pi)" if o.entropy.coef else ""


def _aggregate(spec: Aggregate) -> str:
    formula = {
        "token": "L = sum l / N",
        "sequence_token_mean": "L = 1/B sum_i 1/n_i sum_t l",
        "sequence_token_sum": "L = 1/B sum l",
        "constant": f"L = sum l / (B x {spec.max_tokens})",
        "prompt": "L = mean over groups of sum l / N_g",
        "trajectory": "L = mean over trajectories of sum l / n, over all rows of each",
        "local": f"L = mean over each {spec.local_rows} consecutive rows of sum l / N_local",
        "sum": "L = sum l",
    }[spec.kind]
    if spec.count_empty:
        formula += "; empty rows count"
    if spec.denominator == "kept":
        formula += "; rejected tokens do not count"
    return formula


def _critic(o: Objective) -> str:
    if not o.needs_critic:
        return ""
    spec = o.critic
    error = "(V - G)^2" if spec.loss == "mse" else f"huber_{spec.huber_delta:g}(V - G)"
    if spec.value_clip is None:
        return f"L_V = {spec.factor:g} {error}"
    return f"L_V = {spec.factor:g} max({error}, the same with V kept within {spec.value_clip:g})"
