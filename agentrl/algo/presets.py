"""The presets, as data: each algorithm that has a name is a few choices among the stages.

`agentrl.algo.PRESETS` has them as `Objective`s; docs/algorithms.md says where each comes from.
"""

from __future__ import annotations

from typing import Any

_GRPO: dict[str, Any] = {
    "credit": {"kind": "outcome"},
    "baseline": {"kind": "mean"},
    "scale": {"kind": "std", "level": "group"},
    "surrogate": {"kind": "clip", "low": 0.2, "high": 0.2},
    "aggregate": {"kind": "sequence_token_mean"},
}
_NO_SCALE = {"kind": "none"}
_WHITEN_BATCH = {"mean": "batch", "std": "batch"}

PRESET_DATA: dict[str, dict[str, Any]] = {
    "grpo": _GRPO,
    "dr_grpo": {
        **_GRPO,
        "scale": _NO_SCALE,
        "aggregate": {"kind": "constant", "max_tokens": 4096},
    },
    "ssr_grpo": {
        **_GRPO,
        "scale": _NO_SCALE,
        "surrogate": {"kind": "clip", "low": 0.2, "high": 0.28},
        "trust": [{"kind": "staleness", "max_gap": 100}],
        "aggregate": {"kind": "constant", "max_tokens": 131072},
    },
    "dapo": {
        **_GRPO,
        "surrogate": {"kind": "clip", "low": 0.2, "high": 0.28},
        "aggregate": {"kind": "token"},
    },
    "gspo": {
        **_GRPO,
        "ratio": {"level": "sequence"},
        "surrogate": {"kind": "clip", "low": 3e-4, "high": 4e-4},
    },
    "rloo": {
        "credit": {"kind": "outcome"},
        "baseline": {"kind": "leave_one_out"},
        "scale": _NO_SCALE,
        "surrogate": {"kind": "logprob"},
        "aggregate": {"kind": "sequence_token_sum"},
    },
    "ppo": {
        "credit": {"kind": "gae", "gamma": 1.0, "lam": 1.0},
        "baseline": {"kind": "none"},
        "scale": _NO_SCALE,
        "whiten": _WHITEN_BATCH,
        "surrogate": {"kind": "clip", "low": 0.2, "high": 0.2},
        "aggregate": {"kind": "token"},
        "critic": {"value_clip": 0.2, "factor": 0.5},
    },
    "vapo": {
        "credit": {"kind": "gae", "gamma": 1.0, "lam_value": 1.0, "length_alpha": 0.05},
        "baseline": {"kind": "none"},
        "scale": _NO_SCALE,
        "whiten": _WHITEN_BATCH,
        "surrogate": {"kind": "clip", "low": 0.2, "high": 0.28},
        "aggregate": {"kind": "token"},
        "critic": {"value_clip": 0.2, "factor": 0.5},
    },
    "reinforce_pp": {
        "credit": {"kind": "token", "gamma": 1.0},
        "baseline": {"kind": "none"},
        "scale": _NO_SCALE,
        "whiten": _WHITEN_BATCH,
        "surrogate": {"kind": "clip", "low": 0.2, "high": 0.2},
        "kl": {"where": "reward", "kind": "k1", "coef": 0.01},
        "aggregate": {"kind": "token"},
    },
    "reinforce_pp_baseline": {
        "credit": {"kind": "outcome"},
        "baseline": {"kind": "mean"},
        "scale": _NO_SCALE,
        "whiten": _WHITEN_BATCH,
        "surrogate": {"kind": "clip", "low": 0.2, "high": 0.2},
        "kl": {"where": "loss", "kind": "k2", "coef": 0.01},
        "aggregate": {"kind": "token"},
    },
    "lite_ppo": {
        **_GRPO,
        "scale": {"kind": "std", "level": "batch", "of": "raw"},
        "aggregate": {"kind": "token"},
    },
    "sapo": {
        **_GRPO,
        "surrogate": {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
    },
    "cispo": {
        **_GRPO,
        "surrogate": {"kind": "cispo", "low": 0.0, "high": 5.0},
        "aggregate": {"kind": "token"},
    },
    "m2po": {
        **_GRPO,
        "ratio": {"anchor": "rollout"},
        "surrogate": {"kind": "ratio"},
        "trust": [{"kind": "m2", "max_second_moment": 0.04}],
        "aggregate": {"kind": "token"},
    },
    "opd": {
        "credit": {"kind": "outcome"},
        "baseline": {"kind": "mean"},
        "scale": _NO_SCALE,
        "surrogate": {"kind": "cispo", "low": 0.0, "high": 5.0},
        "distill": {"where": "advantage", "coef": 1.0},
        "aggregate": {"kind": "token"},
    },
    "search_r1": {
        **_GRPO,
        "kl": {"where": "loss", "kind": "low_var_kl", "coef": 0.001},
        "aggregate": {"kind": "token"},
    },
    "areal": {
        **_GRPO,
        "scale": {"kind": "std", "level": "group", "eps": 1e-5},
        "whiten": {**_WHITEN_BATCH, "eps": 1e-5, "eps_mode": "add"},
        "off_policy": {"level": "token", "high": 5.0, "outside": "zero"},
        "aggregate": {"kind": "token"},
    },
    "slime": {
        **_GRPO,
        "aggregate": {"kind": "sequence_token_mean", "count_empty": True},
    },
    "trl": {
        **_GRPO,
        "scale": {"kind": "std", "level": "group", "eps": 1e-4},
        "off_policy": {"level": "token", "high": 3.0},
        "aggregate": {"kind": "token"},
    },
}
"""Each preset as the overrides of `Objective`'s defaults that a TOML file would contain."""
