"""Golden numbers of nine peers against the functions that training uses.

A vector's `kind` and `knobs` decide which objective or stage function is called, nothing else does
(`golden_advantages.py`, `golden_losses.py`).
"""

from __future__ import annotations

import os

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
    ("skyrl", "pg", "sapo"): "exponentiates in float32 although the vector is float64"
}


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


@pytest.mark.parametrize("v", VECTORS, ids=lambda v: v.name)
def test_vector(v: Vector) -> None:
    mask = v.mask() if "mask" in v.inputs else None
    want = {
        name: torch.tensor(numbers(value), dtype=torch.float64)
        for name, value in v.outputs.items()
        if (v.kind, name) not in UNCOMPARED_OUTPUTS
    }
    key = (v.peer, v.kind, v.knobs.get("surrogate"))
    assert_close(KINDS[v.kind](v), want, "float32" if key in ROUNDED_BY_PEER else v.dtype, mask)


@pytest.mark.skipif("AGENTRL_VECTORS" in os.environ, reason="a directory may hold any selection")
def test_no_vector_is_missing() -> None:
    assert len(VECTORS) == 212
