"""Loss, gradient and metrics do not depend on how a step is cut into micro-batches or ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.algo import (
    PRESETS,
    Batch,
    Objective,
    merge_metrics,
    policy_loss,
    prepare,
    reduce_metrics,
    value_loss,
)

VARIANTS: dict[str, dict] = {
    "gspo_token": {"ratio": {"level": "sequence", "gradient": "token"}},
    "turn_ratio": {"ratio": {"level": "turn"}},
    "loglinear": {"ratio": {"anchor": "loglinear"}},
    "gmpo": {"surrogate": {"kind": "gmpo"}},
    "vespo": {"surrogate": {"kind": "vespo"}},
    "dro": {"surrogate": {"kind": "dro"}},
    "kl_cov": {"surrogate": {"kind": "kl_cov", "fraction": 0.2}},
    "opsm": {"trust": [{"kind": "opsm", "max_kl": 0.01}]},
    "dppo": {"surrogate": {"kind": "ratio"}, "trust": [{"kind": "dppo_tv"}, {"kind": "dppo_kl"}]},
    "masks": {
        "trust": [
            {"kind": "ratio", "level": "sequence", "low": 0.8, "high": 1.2},
            {"kind": "ratio", "level": "turn", "statistic": "k3", "over": "max", "high": 0.5},
            {"kind": "veto", "low": 0.2},
            {"kind": "m2", "max_second_moment": 0.1},
        ],
        "aggregate": {"kind": "token", "denominator": "kept"},
    },
    "quantiles": {
        "trust": [
            {"kind": "top_entropy", "quantile": 0.5},
            {"kind": "clip_cov", "fraction": 0.1, "low": -5, "high": 5},
        ]
    },
    "off_policy": {
        "off_policy": {"level": "sequence_product", "high": 2.0, "normalize": "sequence"}
    },
    "unbiased_kl": {
        "kl": {"where": "loss", "coef": 0.1, "gradient": "unbiased"},
        "entropy": {"coef": 0.01},
    },
    "local": {"aggregate": {"kind": "local", "local_rows": 2}},
    "prompt": {"aggregate": {"kind": "prompt", "count_empty": True}},
    "trajectory": {"aggregate": {"kind": "trajectory"}},
    "distill": {"distill": {"where": "loss", "max_drop": 0.3}},
    "truncated": {"reward": {"truncated": "mask"}},
    "gigpo": {"credit": {"kind": "gigpo"}},
    "turn_credit": {"credit": {"kind": "turn", "gamma": 0.9}, "baseline": {"key": "group_turn"}},
}
OBJECTIVES = PRESETS | {name: Objective.model_validate(data) for name, data in VARIANTS.items()}


@st.composite
def steps(draw: st.DrawFn) -> tuple[Batch, torch.Tensor, torch.Tensor, list[list[int]]]:
    """A step with any masks, groups and fan-out, and any split of its rows."""
    rows = draw(st.integers(1, 7))
    columns = draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def logprobs() -> torch.Tensor:
        return -torch.rand(rows, columns, generator=generator, dtype=torch.float64) * 2

    bits = draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    mask = torch.tensor(bits).view(rows, columns)
    mask[draw(st.integers(0, rows - 1))] = False
    trajectories = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)))
    group_of = torch.tensor(draw(st.lists(st.integers(0, 2), min_size=5, max_size=5)))
    reward_of = torch.tensor(
        draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, float("nan")]), min_size=5, max_size=5)),
        dtype=torch.float64,
    )
    cut_of = torch.tensor(draw(st.lists(st.booleans(), min_size=5, max_size=5)))
    turns = torch.randint(0, 2, (rows, columns), generator=generator).cumsum(1)
    old = logprobs()
    batch = Batch(
        loss_mask=mask,
        rewards=reward_of[trajectories],
        group_ids=group_of[trajectories],
        trajectory_ids=trajectories,
        turn_ids=turns,
        rollout_logprobs=old + 0.3 * logprobs(),
        old_logprobs=old,
        ref_logprobs=logprobs(),
        teacher_logprobs=logprobs(),
        values=logprobs(),
        policy_versions=torch.randint(0, 3, (rows, columns), generator=generator),
        current_version=3,
        turn_rewards=torch.rand(rows, columns + 1, generator=generator),
        state_ids=torch.randint(0, 3, (rows, columns + 1), generator=generator),
        truncated=cut_of[trajectories],
        baselines=torch.full((rows,), 0.25, dtype=torch.float64),
        old_entropy=-logprobs(),
    )
    parts = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    split = [[row for row in range(rows) if parts[row] == part] for part in range(4)]
    return batch, old + 0.2 * logprobs(), -logprobs(), split


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(
    max_examples=12,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(steps())
def test_any_split_gives_the_same_loss_and_gradient(
    name: str, step: tuple[Batch, torch.Tensor, torch.Tensor, list[list[int]]]
) -> None:
    objective = OBJECTIVES[name]
    batch, logprobs, entropy, split = step
    prepare(objective, batch)
    whole = logprobs.clone().requires_grad_()
    output = policy_loss(objective, batch, whole, entropy)
    output.loss.backward()
    assert whole.grad is not None and whole.grad.isfinite().all()
    assert (whole.grad[~batch.loss_mask] == 0).all()

    pieces = logprobs.clone().requires_grad_()
    total, metrics = 0.0, []
    for rows in split:
        part = policy_loss(objective, batch.select(rows), pieces[rows], entropy[rows])
        part.loss.backward()
        total += float(part.loss.detach())
        metrics.append(part.metrics)
    assert total == pytest.approx(float(output.loss.detach()), abs=1e-6)
    assert pieces.grad is not None
    torch.testing.assert_close(pieces.grad, whole.grad, rtol=1e-6, atol=1e-9)

    reduced = reduce_metrics(metrics)
    assert reduced == pytest.approx(reduce_metrics([output.metrics]), abs=1e-9)
    assert reduced == pytest.approx(reduce_metrics([merge_metrics(metrics[:2]), *metrics[2:]]))

    if objective.needs_critic:
        values = torch.zeros_like(logprobs).requires_grad_()
        value_loss(objective, batch, values).loss.backward()
        parts = torch.zeros_like(logprobs).requires_grad_()
        for rows in split:
            value_loss(objective, batch.select(rows), parts[rows]).loss.backward()
        torch.testing.assert_close(parts.grad, values.grad)


@settings(max_examples=20, derandomize=True)
@given(steps())
def test_masked_positions_and_padding_change_nothing(
    step: tuple[Batch, torch.Tensor, torch.Tensor, list[list[int]]],
) -> None:
    """Infinities where nothing is trained, and trained columns moved to the left."""
    batch, logprobs, entropy, _ = step
    objective = Objective.model_validate(
        {
            "kl": {"where": "loss", "coef": 0.1, "clamp_in": "none"},
            "off_policy": {"level": "token", "high": 2.0},
            "trust": [{"kind": "veto"}, {"kind": "m2"}, {"kind": "opsm", "max_kl": 0.01}],
        }
    )
    mask = batch.loss_mask
    prepare(objective, batch)
    expected = policy_loss(objective, batch, logprobs, entropy)

    order = torch.argsort(~mask, dim=1, stable=True)
    width = int(mask.sum(1).max())

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.gather(1, order)[:, :width]

    dirty = {
        field: moved(torch.where(mask, getattr(batch, field), torch.inf))
        for field in ("rollout_logprobs", "old_logprobs", "ref_logprobs")
    }
    compact = Batch(
        loss_mask=moved(mask),
        rewards=batch.rewards,
        group_ids=batch.group_ids,
        trajectory_ids=batch.trajectory_ids,
        turn_ids=moved(batch.turn_ids) if batch.turn_ids is not None else None,
        **dirty,
    )
    prepare(objective, compact)
    live = moved(torch.where(mask, logprobs, torch.nan)).requires_grad_()
    output = policy_loss(objective, compact, live, moved(entropy))
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(float(expected.loss), abs=1e-12)
    assert live.grad is not None and live.grad.isfinite().all()
    assert reduce_metrics([output.metrics]) == pytest.approx(reduce_metrics([expected.metrics]))


def test_first_use_of_a_batch_has_ratio_exactly_one() -> None:
    torch.manual_seed(0)
    objective = PRESETS["grpo"]
    logprobs = -torch.rand(4, 5)
    batch = Batch(
        loss_mask=torch.ones(4, 5),
        rewards=torch.tensor([0.0, 1.0, 1.0, 0.0]),
        group_ids=torch.zeros(4, dtype=torch.long),
        rollout_logprobs=-torch.rand(4, 5),
    )
    prepare(objective, batch)
    live = logprobs.requires_grad_()
    output = policy_loss(objective, batch, live)
    output.loss.backward()
    assert reduce_metrics([output.metrics])["policy/ratio_max"] == 1.0
    torch.testing.assert_close(live.grad, -batch.advantages * batch.weights)


TWO_RANKS = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from agentrl.algo import PRESETS, Batch, merge_metrics, policy_loss, prepare, reduce_metrics

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=60), world_size=2, rank=rank
)
generator = torch.Generator().manual_seed(3)
def random():
    return -torch.rand(6, 9, generator=generator, dtype=torch.float64)
mask = torch.rand(6, 9, generator=generator) < 0.7
mask[4] = False
batch = Batch(loss_mask=mask, rewards=torch.tensor([1.0, 0, 0.5, 1, 1, 0]).double(),
              group_ids=torch.tensor([0, 1, 0, 1, 0, 2]), rollout_logprobs=random(),
              old_logprobs=random(), ref_logprobs=random())
logprobs = random()
for name in ("grpo", "dr_grpo", "dapo", "gspo", "search_r1", "areal"):
    objective = PRESETS[name]
    prepare(objective, batch)
    # One shared parameter; each rank sees its own rows only, in two micro-batches.
    def loss_of(rows, parameter):
        return policy_loss(objective, batch.select(rows), logprobs[rows] + parameter)
    whole = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    expected = loss_of(list(range(6)), whole)
    expected.loss.backward()
    mine = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    outputs = [loss_of(rows, mine) for rows in ([[0, 4], [1]], [[5], [2, 3]])[rank]]
    for output in outputs:
        (output.loss * dist.get_world_size()).backward()  # ranks' gradients are averaged
    dist.all_reduce(mine.grad, op=dist.ReduceOp.SUM)
    torch.testing.assert_close(mine.grad / dist.get_world_size(), whole.grad, rtol=1e-6, atol=1e-9)
    gathered = [None, None]
    merged = merge_metrics(output.metrics for output in outputs)
    dist.all_gather_object(gathered, {k: v.to_floats() for k, v in merged.items()})
    reduced, wanted = reduce_metrics(gathered), reduce_metrics([expected.metrics])
    assert reduced.keys() == wanted.keys()
    assert all(abs(reduced[key] - wanted[key]) < 1e-9 for key in wanted), name
    batch.advantages = batch.weights = None
dist.destroy_process_group()
print("same on both ranks")
"""


@pytest.mark.promise
@pytest.mark.slow
def test_two_ranks_give_the_same_gradient_and_metrics(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(TWO_RANKS)
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("same on both ranks" in output for output in outputs), "\n".join(outputs)
