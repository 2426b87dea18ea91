"""Lists the presets as data: each named algorithm is a few choices among the stages.

`agentrl.algo.PRESETS` holds them as `Objective`s, and docs/algorithms.md lists them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    title: str
    when: str
    """The situation in which to choose it."""
    sources: tuple[str, ...]
    stages: Mapping[str, Any] = field(default_factory=dict)
    """The keys of `[objective]` that differ from the objective's defaults, as nested tables."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys outside `[objective]`, used unless the run file sets those keys."""


PRESET_DATA: dict[str, Preset] = {
    "grpo": Preset(
        "GRPO: group-relative advantages",
        "The default for verifiable rewards. Dividing by the group's std gives more weight to very "
        "easy and very hard tasks, and averaging per sequence to the tokens of short answers.",
        ("DeepSeekMath, arXiv:2402.03300",),
    ),
    "dr_grpo": Preset(
        "Dr.GRPO: GRPO without its two biases",
        "When answers grow longer without getting better. Set aggregate.max_tokens to the largest "
        "number of tokens that a trajectory may sample: it scales the gradient.",
        ("Understanding R1-Zero-like training, arXiv:2503.20783",),
        {"scale": {"kind": "none"}, "aggregate": {"kind": "constant", "max_tokens": 4096}},
    ),
    "ssr_grpo": Preset(
        "SSR-GRPO: Dr.GRPO for long agent trajectories",
        "Agents with turn rewards and long contexts, sampled asynchronously. baseline.weighting = "
        "'token' gives the paper's length-weighted mean.",
        ("Self-play SWE-RL, arXiv:2512.18552",),
        {
            "scale": {"kind": "none"},
            "surrogate": {"high": 0.28},
            "trust": [{"kind": "staleness", "max_gap": 100}],
            "aggregate": {"kind": "constant", "max_tokens": 131072},
        },
    ),
    "dapo": Preset(
        "DAPO: clip higher and one mean over all tokens",
        "Long answers with large batches. DAPO's other two parts are rollout.keep = "
        "['zero_variance'] with rollout.max_waves, and reward.overlong.",
        ("DAPO, arXiv:2503.14476",),
        {"surrogate": {"high": 0.28}, "aggregate": {"kind": "token"}},
    ),
    "gspo": Preset(
        "GSPO: one ratio per sequence",
        "Mixture-of-experts models and several updates per batch. The clip bounds are much "
        "narrower than PPO's because the ratio is a geometric mean.",
        ("Group Sequence Policy Optimization, arXiv:2507.18071",),
        {"ratio": {"level": "sequence"}, "surrogate": {"low": 3e-4, "high": 4e-4}},
    ),
    "rloo": Preset(
        "RLOO: REINFORCE with a leave-one-out baseline",
        "One update per batch: it has no ratio and nothing to tune.",
        ("Back to Basics, arXiv:2402.14740",),
        {
            "baseline": {"kind": "leave_one_out"},
            "scale": {"kind": "none"},
            "surrogate": {"kind": "logprob"},
            "aggregate": {"kind": "sequence_token_sum"},
        },
    ),
    "ppo": Preset(
        "PPO with a critic",
        "When there is only one trajectory per task, or rewards come during the episode.",
        ("arXiv:1707.06347", "arXiv:1506.02438 (GAE)"),
        {
            "credit": {"kind": "gae"},
            "baseline": {"kind": "none"},
            "scale": {"kind": "none"},
            "whiten": {"mean": "batch", "std": "batch"},
            "aggregate": {"kind": "token"},
        },
    ),
    "vapo": Preset(
        "VAPO: PPO for long chains of thought",
        "PPO with answers of very different lengths: lambda grows with the length, and the critic "
        "learns undiscounted returns.",
        ("VAPO, arXiv:2504.05118",),
        {
            "credit": {"kind": "gae", "lam_value": 1.0, "length_alpha": 0.05},
            "baseline": {"kind": "none"},
            "scale": {"kind": "none"},
            "whiten": {"mean": "batch", "std": "batch"},
            "surrogate": {"high": 0.28},
            "aggregate": {"kind": "token"},
        },
    ),
    "reinforce_pp": Preset(
        "REINFORCE++: rewards-to-go, whitened over the batch",
        "One trajectory per task, without a critic.",
        ("REINFORCE++, arXiv:2501.03262",),
        {
            "credit": {"kind": "token"},
            "baseline": {"kind": "none"},
            "scale": {"kind": "none"},
            "whiten": {"mean": "batch", "std": "batch"},
            "kl": {"where": "reward", "kind": "k1", "coef": 0.01},
            "aggregate": {"kind": "token"},
        },
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++-baseline: group mean, whitened over the batch",
        "Like GRPO, with the std of the batch instead of each group's: easy and hard tasks keep "
        "their relative weight.",
        ("REINFORCE++, arXiv:2501.03262, section on multiple responses",),
        {
            "scale": {"kind": "none"},
            "whiten": {"mean": "batch", "std": "batch"},
            "kl": {"where": "loss", "kind": "k2", "coef": 0.01},
            "aggregate": {"kind": "token"},
        },
    ),
    "lite_ppo": Preset(
        "LitePPO: group mean, batch std, token mean",
        "Groups whose rewards barely differ, in which a group's own std would amplify noise.",
        ("Tricks or Traps, arXiv:2508.08221",),
        {"scale": {"level": "batch"}, "aggregate": {"kind": "token"}},
    ),
    "sapo": Preset(
        "SAPO: a soft gate instead of a clip",
        "When hard clipping discards much of the batch. At ratio 1 its gradient is PPO's.",
        ("Soft Adaptive Policy Optimization, arXiv:2511.20347",),
        {"surrogate": {"kind": "sapo"}},
    ),
    "cispo": Preset(
        "CISPO: truncated weights, every token keeps a gradient",
        "Tasks that depend on rare tokens, whose gradient PPO's clip would remove; asynchronous "
        "sampling.",
        ("MiniMax-M1, arXiv:2506.13585",),
        {"surrogate": {"kind": "cispo"}, "aggregate": {"kind": "token"}},
    ),
    "m2po": Preset(
        "M2PO: a bound on the second moment of the mismatch",
        "Very stale samples. Needs the trainer's log-probs before the update.",
        ("Prosperity before Collapse, arXiv:2510.01161",),
        {
            "ratio": {"anchor": "rollout"},
            "surrogate": {"kind": "ratio"},
            "trust": [{"kind": "m2", "max_second_moment": 0.04}],
            "aggregate": {"kind": "token"},
        },
    ),
    "opd": Preset(
        "On-policy distillation as an advantage",
        "When a stronger model with the same tokenizer exists. Rewards, if any, add to the "
        "teacher's signal.",
        ("On-policy distillation of language models, arXiv:2306.13649",),
        {
            "scale": {"kind": "none"},
            "distill": {"where": "advantage"},
            "surrogate": {"kind": "cispo"},
            "aggregate": {"kind": "token"},
        },
    ),
    "search_r1": Preset(
        "Search-R1's GRPO",
        "Tool use, staying close to a reference policy.",
        (
            "Search-R1, arXiv:2503.09516",
            "comparison of Search-R1, SSR-GRPO and a GRPO of its own (upper clip 0.28; verl's "
            "default, with which the paper ran, is 0.2)",
        ),
        {
            "surrogate": {"high": 0.28},
            "kl": {"where": "loss", "kind": "low_var_kl", "coef": 0.001},
            "aggregate": {"kind": "token"},
        },
    ),
    "maxrl": Preset(
        "MaxRL: the group's mean reward instead of its std",
        "Tasks that are rarely solved: with rewards of 0 and 1, the rarer a success is in its "
        "group, the more it weighs.",
        ("MaxRL, arXiv:2602.02710",),
        {"scale": {"kind": "mean"}},
    ),
    "gigpo": Preset(
        "GiGPO: groups within groups",
        "Agents with many turns whose episodes pass through the same states: turns that began in "
        "the same state are also compared with each other.",
        ("GiGPO, arXiv:2505.10978",),
        {"credit": {"kind": "gigpo"}},
    ),
    "gmpo": Preset(
        "GMPO: the geometric mean of the clipped ratios",
        "Several updates per batch, when single tokens with extreme ratios dominate the mean.",
        ("Geometric-Mean Policy Optimization, arXiv:2507.20673",),
        {"surrogate": {"kind": "gmpo"}},
    ),
    "remax": Preset(
        "ReMax: a greedy answer as the baseline",
        "One trajectory per task, without a critic. Each task is played once more, greedily.",
        ("ReMax, arXiv:2310.10505",),
        {
            "baseline": {"kind": "given"},
            "scale": {"kind": "none"},
            "surrogate": {"kind": "logprob"},
            "aggregate": {"kind": "sequence_token_sum"},
        },
    ),
    "dppo": Preset(
        "DPPO: a bound on the change of probability instead of a clipped ratio",
        "Tasks with rare tokens, whose ratio leaves PPO's clip range while their probability "
        "hardly changes.",
        ("Rethinking the trust region, arXiv:2602.04879",),
        {"surrogate": {"kind": "ratio"}, "trust": [{"kind": "dppo_tv"}]},
    ),
    "swe_grpo": Preset(
        "GRPO as in a published comparison for software engineering",
        "To repeat that comparison: a higher upper clip, the group's population std with a floor, "
        "and half the squared distance of pi / ref from 1 as a penalty. Unless the run file sets "
        "them, train.learning_rate is 1e-6, train.betas [0.9, 0.98], train.weight_decay 0.1, "
        "train.max_grad_norm 1 and rollout.temperature 1. The comparison's groups have 4 or 5 "
        "members (rollout.group_size).",
        ("comparison of Search-R1, SSR-GRPO and a GRPO of its own",),
        {
            "scale": {"ddof": 0, "eps": 1e-8, "eps_mode": "max"},
            "surrogate": {"high": 0.28},
            "kl": {"where": "loss", "kind": "half_chi2", "coef": 0.001},
        },
        {
            "train": {
                "learning_rate": 1e-6,
                "betas": [0.9, 0.98],
                "weight_decay": 0.1,
                "max_grad_norm": 1.0,
            },
            "rollout": {"temperature": 1.0},
        },
    ),
    "bnpo": Preset(
        "BNPO's loss as in TRL: a mean over the tokens of each batch of 8 rows",
        "To repeat a TRL run with loss_type = 'bnpo'. The gradient depends on how rows are divided "
        "into batches: aggregate.local_rows is TRL's per_device_train_batch_size. Unlike in TRL, "
        "it does not depend on memory settings.",
        ("github.com/huggingface/trl",),
        {
            "scale": {"eps": 1e-4},
            "off_policy": {"level": "token", "high": 3.0},
            "aggregate": {"kind": "local", "local_rows": 8},
        },
    ),
    "areal": Preset(
        "AReaL's asynchronous recipe",
        "Asynchronous sampling: the ratio is taken to the trainer's policy before the update, and "
        "a detached weight corrects for the sampler. Group statistics are over trajectories, "
        "whitening is over tokens.",
        ("AReaL, arXiv:2505.24298",),
        {
            "scale": {"eps": 1e-5},
            "whiten": {"mean": "batch", "std": "batch", "eps": 1e-5, "eps_mode": "add"},
            "off_policy": {"level": "token", "high": 5.0, "outside": "zero"},
            "aggregate": {"kind": "token"},
        },
    ),
    "slime": Preset(
        "slime's GRPO defaults",
        "To continue a run started in slime: rows without a trained token count in the mean.",
        ("github.com/THUDM/slime",),
        {"aggregate": {"count_empty": True}},
    ),
    "trl": Preset(
        "TRL's GRPOTrainer defaults",
        "To continue a run started in TRL. TRL's correction for the sampler drops sequences by the "
        "product of their ratios, mostly long ones; here each token's ratio is truncated at the "
        "same cap instead.",
        ("github.com/huggingface/trl",),
        {
            "scale": {"eps": 1e-4},
            "off_policy": {"level": "token", "high": 3.0},
            "aggregate": {"kind": "token"},
        },
    ),
}


_ELSEWHERE = {
    "reinforce_plus_plus": "it is preset 'reinforce_pp' here",
    "reinforce_plus_plus_baseline": "it is preset 'reinforce_pp_baseline' here",
    "on_policy_distillation": "it is preset 'opd' here",
    "gdpo": "set objective.reward.combine = 'normalize_then_sum' and give reward.weights, which a "
    "preset cannot know",
}
"""Other trainers' names -> what to write instead."""


def require_known(name: object) -> None:
    """Checks the name of a preset.

    Raises:
        ValueError: there is no such preset. The message suggests the closest one.
    """
    if name in PRESET_DATA:
        return
    close = difflib.get_close_matches(str(name), PRESET_DATA, n=1)
    hint = _ELSEWHERE.get(str(name)) or (f"did you mean {close[0]!r}?" if close else None)
    known = f"presets are {', '.join(PRESET_DATA)}"
    raise ValueError(f"unknown preset {name!r}; " + (f"{hint}; {known}" if hint else known))


def stages_of(name: str) -> Mapping[str, Any]:
    """Returns the stages that a preset sets; empty for an unknown name."""
    return PRESET_DATA[name].stages if name in PRESET_DATA else {}
