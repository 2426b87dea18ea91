"""The block mask of flex attention, against the one that torch makes of all pairs of tokens."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from agentrl.train.segments import BLOCK_SIZE, SegmentMask

CPU = torch.device("cpu")


def listed(numbers: torch.Tensor | None, indices: torch.Tensor | None) -> list[set[int]]:
    """Row by row the blocks of a list of `BlockMask`."""
    assert numbers is not None and indices is not None
    pairs = zip(numbers[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
    return [set(row[:number]) for number, row in pairs]


def blocks_of(mask: BlockMask) -> tuple[list[set[int]], list[set[int]], list[set[int]]]:
    """Blocks seen in part and seen whole, by query; and all, by key."""
    by_key = zip(
        listed(mask.q_num_blocks, mask.q_indices),
        listed(mask.full_q_num_blocks, mask.full_q_indices),
        strict=True,
    )
    return (
        listed(mask.kv_num_blocks, mask.kv_indices),
        listed(mask.full_kv_num_blocks, mask.full_kv_indices),
        [part | whole for part, whole in by_key],
    )


@pytest.mark.parametrize("window", [None, 1, 2, 127, 128, 129, 300, 1000])
@pytest.mark.parametrize(
    ("lengths", "branch_ends"),
    [
        ([1280], None),
        ([128, 256, 384], None),
        ([700, 3, 1, 260, 129, 127, 500], None),
        ([1] * 300, None),
        # A prefix of two branches, the second with two of its own; and one alone.
        ([400, 130, 300, 5, 256, 90], [1091, 530, 1091, 835, 1091, 1181]),
    ],
    ids=["one", "at borders", "mixed", "many", "shared"],
)
def test_blocks_are_those_of_the_dense_mask(lengths, branch_ends, window):
    mask = SegmentMask(lengths, window, CPU, branch_ends)
    total = sum(lengths)
    expected = create_block_mask(mask.blocks.mask_mod, None, None, total, total, device="cpu")
    assert mask.blocks.seq_lengths == expected.seq_lengths
    (part, whole, by_key), (its_part, its_whole, its_by_key) = (
        blocks_of(mask.blocks),
        blocks_of(expected),
    )
    assert whole == its_whole
    assert all(mine >= its for mine, its in zip(part, its_part, strict=True))
    assert all(mine >= its for mine, its in zip(by_key, its_by_key, strict=True))
    if mask.window is None:
        assert part == its_part, "nothing is looked at in vain"
    # A window looks in vain at one block at most, where a segment ends.
    assert sum(map(len, part)) - sum(map(len, its_part)) <= len(part)


class Largest(TorchDispatchMode):
    """Looks at what is made within it."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [each.numel() for each in tree_iter(result) if isinstance(each, torch.Tensor)]
        self.numel = max([self.numel, *made])
        return result


def test_nothing_of_the_size_of_all_pairs_is_built():
    lengths = [2048] * 16
    total = sum(lengths)
    with Largest() as largest:
        mask = SegmentMask(lengths, None, CPU).blocks
    assert 0 < largest.numel <= max(total, (total // BLOCK_SIZE) * (total // BLOCK_SIZE + 1))
    assert mask.sparsity() > 90, "the work is that of the segments"
    with Largest() as largest:
        create_block_mask(mask.mask_mod, None, None, 1024, 1024, device="cpu")
    assert largest.numel >= 1024 * 1024, "torch's own is of that size"
