"""The estimate of `agentrl doctor` against a step at Qwen3-8B's shape, in fake tensors."""

import functools
from pathlib import Path

import pytest
from launch import ends_well
from measured import measured
from model_shapes import config_of
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from agentrl.config import RunConfig
from agentrl.model.attention import SegmentMask
from agentrl.train.memory import estimate

KEPT = {"gradient_checkpointing": False}
CASES = {
    "plain": (1, KEPT, {}),
    "checkpointing": (1, {}, {}),
    "long rows": (1, {}, {"train": {"token_budget": 32768}}),
    "flex attention": (1, {"dtype": "float32"}, {"train": {"token_budget": 131072}}),
    "adapter": (1, {**KEPT, "lora": {"rank": 32}}, {}),
    "critic": (1, {}, {"objective": {"preset": "ppo"}}),
    "moments in host memory": (1, {}, {"train": {"optimizer": "adamw_cpu", "token_budget": 8192}}),
    "two ranks": (2, {}, {}),
    "two ranks, a reference": (2, {}, {"objective": {"preset": "search_r1"}}),
    "two ranks, an adapter": (2, {"lora": {"rank": 32}}, {}),
    "eight ranks": (8, {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_part_is_within_a_tenth_of_what_a_step_takes(case, tmp_path: Path):
    num_ranks, model, more = CASES[case]
    shape = config_of("Qwen/Qwen3-8B")
    shape.num_hidden_layers = 8  # of 36, which take a minute
    shape.layer_types = shape.layer_types[:8]
    shape.save_pretrained(tmp_path)
    settings = {
        "model": {"dtype": "bfloat16", "gradient_checkpointing": True, "path": str(tmp_path)},
        "train": {"token_budget": 8192},
        "rollout": {"max_context_tokens": 2048},
    }
    settings["model"] |= model
    config = RunConfig.model_validate(settings | more)

    def compare() -> None:
        """In a process of its own: others are forked from this one, which may touch no GPU."""
        found = measured(config, num_ranks)
        said = estimate(config, device_type="cuda", num_ranks=num_ranks)
        peak = max(found.values(), key=lambda parts: sum(parts.values()))
        for part in ("weights", "gradients", "moments"):
            assert getattr(said, part) == pytest.approx(peak[part], rel=0.01), (part, said, found)
        rest = said.activations + said.logits + said.gathered
        assert rest == pytest.approx(peak["rest"], rel=0.1), (said, found)
        assert said.total == pytest.approx(sum(peak.values()), rel=0.1), (said, found)

    ends_well(compare, tmp_path / "log")


def test_a_mask_of_all_pairs_is_found(tmp_path, monkeypatch):
    """Torch's own function makes one on its way to the blocks: ten bytes for every pair."""
    listed = SegmentMask.__dict__["blocks"].func

    def made(mask: SegmentMask) -> BlockMask:
        total = sum(mask.lengths)
        return create_block_mask(listed(mask).mask_mod, None, None, total, total, "cuda")

    planted = functools.cached_property(made)
    planted.__set_name__(SegmentMask, "blocks")
    monkeypatch.setattr(SegmentMask, "blocks", planted)
    with pytest.raises(AssertionError, match="assert rest =="):
        test_every_part_is_within_a_tenth_of_what_a_step_takes("flex attention", tmp_path)
