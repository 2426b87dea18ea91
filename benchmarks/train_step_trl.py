"""The step of `train_step.py` as TRL 1.16's AsyncGRPOTrainer computes it.

Its own planner (`TreeRow`, a prefix tree per micro-batch, groups kept together up to the token
budget), its own collation, its own chunked head and its formula of the loss. Two things stand in
for what needs a GPU, both in its favour: attention is agentrl's on the same tree, in place of
FlashAttention 3, and the head scores trained positions alone, as it does with Triton only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import trl.trainer.utils
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from trl.experimental.async_grpo.packing import TreeRow

from agentrl.model.attention import SegmentMask, packed_attention
from agentrl.types import Sample

trl.trainer.utils._use_triton = lambda device: True


def prepare(model: PreTrainedModel) -> None:
    AttentionInterface.register("trl_tree", _attention)
    AttentionMaskInterface.register("trl_tree", lambda **kwargs: None)
    model.set_attn_implementation("trl_tree")
    trl.trainer.utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))


def losses(
    model: PreTrainedModel, samples: list[Sample], token_budget: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """The loss of each micro-batch, and how many tokens it forwards."""
    num_trained = sum(sample.num_trained for sample in samples)
    for row in _plan(samples, token_budget):
        packed = row.pack()
        tree = _mask_of(packed["tree_cu_seqlens_q"].tolist(), packed["position_ids"].tolist())
        output = model(
            input_ids=packed["input_ids"][None],
            position_ids=packed["position_ids"][None],
            shift_labels=packed["shift_labels"][None],
            fused_lm_head=True,
            tree=tree,
        )
        logprobs = output.log_probs.flatten()[packed["token_index"]]
        ratio = torch.exp(logprobs - packed["old_log_probs"])
        advantages = packed["advantages"]
        surrogate = torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
        yield -surrogate.sum() / num_trained, len(packed["input_ids"])


def _plan(samples: list[Sample], token_budget: int) -> Iterator[TreeRow]:
    """As `TokenBudgetBatcher` on one rank: samples in their order, each into the open row."""
    row = TreeRow()
    for sample in samples:
        given = {
            "input_ids": torch.from_numpy(sample.token_ids),
            "completion_mask": torch.from_numpy(sample.loss_mask),
            "old_log_probs": torch.from_numpy(sample.rollout_logprobs),
            "advantage": sample.reward,
            "group_id": sample.group_id,
        }
        if row.samples and not row.fits(given, token_budget):
            yield row
            row = TreeRow()
        row.add(given)
    yield row


def _mask_of(borders: list[int], positions: list[int]) -> SegmentMask:
    """Their depth-first segments: one continues the last before it that ends where it begins."""
    ends = borders[1:]
    open_segments: list[int] = []
    for segment, (start, stop) in enumerate(pairwise(borders)):
        while open_segments:
            last = positions[borders[open_segments[-1] + 1] - 1] + 1
            if last == positions[start]:
                break
            open_segments.pop()
        for ancestor in open_segments:
            ends[ancestor] = stop
        open_segments.append(segment)
    lengths = [stop - start for start, stop in pairwise(borders)]
    return SegmentMask(lengths, None, torch.device("cpu"), ends)


def _attention(module, query, key, value, attention_mask, *, tree, scaling=None, **kwargs):
    return packed_attention(module, query, key, value, tree, scaling)
