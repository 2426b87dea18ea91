"""Golden numbers of nine peers against the functions that training uses.

A vector's `kind` and `knobs` decide which objective or stage function is called, nothing else does
(`golden_advantages.py`, `golden_losses.py`). Every vector either matches or is named in `REFUSED`;
`test_advantages.py`, `test_loss.py` and `test_objective.py` assert what agentrl does there instead.
"""

from __future__ import annotations

import os
from fnmatch import fnmatch

import golden_advantages
import golden_losses
import pytest
import torch
from golden import Outputs, Vector, load_vectors, numbers
from torch import Tensor

KINDS = golden_advantages.KINDS | golden_losses.KINDS
UNCOMPARED_OUTPUTS = {
    ("prox", "linear"): "interpolation of probabilities is not offered, only of log-probabilities",
    ("opsm", "clipfrac"): "counts masked tokens as well; a metric, not the mask",
    ("pg_token", "clipfrac"): "per token; compared by its sum in the conversion",
}

ROUNDED_BY_PEER = {
    ("skyrl", "pg", "sapo"): "exponentiates in float32 although the vector is float64",
}


REFUSED = {
    "skyrl_adv_[gm]*_uneven": "a group of one gets its raw reward as advantage, not 0",
    "verl_adv_[dgo]*_uneven": "a group of one gets its raw reward as advantage, not 0",
    "verl_adv_rloo_uneven": "a group of one gets its raw reward as advantage, not 0",
    "verl_adv_rppbase_uneven": "a group of one gets its raw reward as advantage, not 0",
    "slime_reward_grpo_uneven_BUG": "groups of unequal size are normalised as one group",
    "openrlhf_gae_*": "tool tokens take part in the recursion",
    "skyrl_gae_*": "tool tokens take part in the recursion",
    "slime_gae_*": "tool tokens take part in the recursion",
    "areal_gae_*": "the reward lies on the last position and is lost if that is a tool token",
    "skyrl_rpp_*_BUG": "the running return restarts at every tool token",
    "openrlhf_returns_0.9": "every tool token costs one discount",
    "slime_rpp_returns_0.9": "every tool token costs one discount",
    "nemorl_adv_grpo_loo1": "the std is leave-one-out too; a lone success is not divided at all",
    "primerl_adv_grpo_lenpen": "a length penalty in units of the group's mean reward",
    "roll_agg_token-mean": "the numerator sums masked tokens too",
    "slime_whiten_shift0": "divided by the std around a mean that is added back",
    "trl_pg_delta_low": "a cap below the upper clip bound also cuts positive advantages",
    "trl_pg_luspo": "a sequence ratio summed over tokens weighs each sequence by its length",
    "verl_rs_seq_mean_k1_0.9_1.1": "bounds act on mu / pi_old, the inverse of what they name",
    "verl_rs_token_k1_0.1_1.2": "bounds act on mu / pi_old, the inverse of what they name",
    "areal_decoupled_seq_k3_max": "k3 of the inverse ratio does not estimate KL(mu, pi_old)",
}


def is_refused(v: Vector) -> bool:
    return any(fnmatch(v.name, pattern) for pattern in REFUSED)


def assert_close(got: Outputs, want: Outputs, dtype: str, mask: Tensor | None) -> None:
    for name, expected in want.items():
        answer = got[name].double()
        assert answer.shape == expected.shape, name
        if mask is not None and expected.shape == mask.shape:
            # What a peer leaves at masked positions has no meaning.
            answer, expected = (torch.where(mask, x, 0) for x in (answer, expected))
        if name == "grad_logp":
            bound = 2e-5 * expected.abs().clamp(min=1e-3)
        else:
            bound = (1e-7 if dtype == "float64" else 3e-5) * expected.abs().clamp(min=1)
        worst = ((answer - expected).abs() / bound).max()
        assert worst <= 1, f"{name} is off by {float(worst):.3g} times the tolerance"


VECTORS = load_vectors()


@pytest.mark.parametrize("v", [v for v in VECTORS if not is_refused(v)], ids=lambda v: v.name)
def test_vector(v: Vector) -> None:
    mask = v.mask() if "mask" in v.inputs else None
    want = {
        name: torch.tensor(numbers(value), dtype=torch.float64)
        for name, value in v.outputs.items()
        if (v.kind, name) not in UNCOMPARED_OUTPUTS
    }
    key = (v.peer, v.kind, v.knobs.get("surrogate"))
    assert_close(KINDS[v.kind](v), want, "float32" if key in ROUNDED_BY_PEER else v.dtype, mask)


def test_most_vectors_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert {v.kind for v in VECTORS} <= set(KINDS)
    refused = sum(map(is_refused, VECTORS))
    with capsys.disabled():
        print(f"\ngolden vectors: matched {len(VECTORS) - refused}, refused {refused}")
    if "AGENTRL_VECTORS" not in os.environ:  # a directory may hold any selection
        assert (len(VECTORS), refused) == (241, 29)
