import inspect
from itertools import pairwise

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.model import attention
from agentrl.model.attention import (
    ATTENTION_NAME,
    BLOCK_SIZE,
    SegmentMask,
    packed_attention,
    packed_mask,
    packed_segments,
)

SHAPE = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=8,
    max_position_embeddings=64,
)
LENGTHS = [7, 1, 12, 3]


def make_model(family: str, num_key_value_heads: int = 2):
    torch.manual_seed(0)
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    config = config_class(**SHAPE, num_key_value_heads=num_key_value_heads)
    return model_class(config)


def packed_row(lengths=LENGTHS):
    ids = torch.arange(sum(lengths))[None] * 31 % 50
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return ids, positions


def gradients_of(model, hidden):
    torch.manual_seed(1)
    (hidden * torch.randn_like(hidden)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("plain", ["sdpa", "eager"])
def test_equal_to_one_sequence_at_a_time(family, num_key_value_heads, plain):
    model = make_model(family, num_key_value_heads)
    ids, positions = packed_row()
    model.set_attn_implementation(plain)
    alone = torch.cat(
        [model.model(input_ids=part).last_hidden_state for part in ids.split(LENGTHS, dim=1)], dim=1
    )
    expected = gradients_of(model, alone)

    model.set_attn_implementation(ATTENTION_NAME)
    with packed_segments(LENGTHS):
        output = model.model(input_ids=ids, position_ids=positions, use_cache=False)
    packed = output.last_hidden_state
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    ours = gradients_of(model, packed)
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        scale = expected[name].abs().max()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * float(scale))


class Largest(TorchDispatchMode):
    """Looks at what is made within it."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [each.numel() for each in tree_iter(result) if isinstance(each, torch.Tensor)]
        self.numel = max([self.numel, *made])
        return result


def test_no_tensor_grows_with_the_square_of_the_row():
    lengths = [40] * 20
    model = make_model("qwen3")
    model.set_attn_implementation(ATTENTION_NAME)
    ids, positions = packed_row(lengths)
    with Largest() as largest, packed_segments(lengths):
        output = model.model(input_ids=ids, position_ids=positions, use_cache=False)
        output.last_hidden_state.sum().backward()
    assert 0 < largest.numel <= sum(lengths) * SHAPE["intermediate_size"]
    assert largest.numel < sum(lengths) ** 2


def test_generation_still_works_under_the_same_name():
    model = make_model("qwen3").eval()
    ids = torch.tensor([[0, 0, 5, 9], [3, 8, 1, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    texts = []
    for name in ("sdpa", ATTENTION_NAME):
        model.set_attn_implementation(name)
        texts.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
            )
        )
    assert torch.equal(*texts)


def test_a_decoder_that_makes_no_mask_fails_instead_of_mixing_the_segments():
    model = make_model("qwen3")
    model.set_attn_implementation(ATTENTION_NAME)
    ids, positions = packed_row()
    finished = torch.zeros(1, 1, sum(LENGTHS), sum(LENGTHS))
    with packed_segments(LENGTHS), pytest.raises(ValueError, match="attends without a mask"):
        model.model(input_ids=ids, position_ids=positions, attention_mask=finished)


@pytest.mark.parametrize(
    "condition", [{"use_vmap": True}, {"allow_is_bidirectional_skip": True}, {"kv_length": 24}]
)
def test_masks_that_are_more_than_causal_are_refused(condition):
    asked = {"batch_size": 1, "q_length": 23, "kv_length": 23, **condition}
    with packed_segments(LENGTHS), pytest.raises(ValueError, match="more than causal"):
        packed_mask(**asked)


@pytest.mark.parametrize(
    ("length", "dropout", "says"), [(10, 0.0, "9 tokens, but the row has 10"), (9, 0.1, "dropout")]
)
def test_segments_that_do_not_cover_the_row_and_dropout_are_refused(length, dropout, says):
    query = torch.randn(1, 2, length, 8)
    mask = SegmentMask([4, 5], None, query.device)
    with pytest.raises(ValueError, match=says):
        packed_attention(torch.nn.Module(), query, query, query, mask, dropout=dropout)


def chunked(size):
    return type("Config", (), {"attention_chunk_size": size})()


@pytest.mark.parametrize(
    ("kind", "sees"),
    [
        ({}, lambda query, key: key <= query),
        ({"local_size": 3}, lambda query, key: query - 3 < key <= query),
        ({"local_size": 1}, lambda query, key: key == query),
        ({"local_size": 4, "config": chunked(4)}, lambda q, k: k <= q and k // 4 == q // 4),
        ({"local_size": 50}, lambda query, key: key <= query),
    ],
    ids=["full", "window", "itself", "chunks", "longer than the row"],
)
def test_windows_and_chunks_count_within_a_segment(kind, sees):
    """The mask as the CPU path and as flex attention reads it, and the attention of both."""
    total = sum(LENGTHS)
    with packed_segments(LENGTHS):
        mask = packed_mask(1, total, total, **kind)
    expected = torch.zeros(total, total, dtype=torch.bool)
    start = 0
    for length in LENGTHS:
        for query in range(length):
            for key in range(length):
                expected[start + query, start + key] = sees(query, key)
        start += length
    ours = [mask.dense(length, torch.device("cpu")) for length in mask.lengths]
    causal = [torch.ones(n, n, dtype=torch.bool).tril() for n in mask.lengths]
    parts = [part if part is not None else full for part, full in zip(ours, causal, strict=True)]
    assert torch.equal(torch.block_diag(*(part.int() for part in parts)).bool(), expected)

    index = torch.arange(total)
    blocks = mask.blocks.mask_mod(0, 0, index[:, None], index[None, :])
    assert torch.equal(blocks, expected)
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, total, 16), *torch.randn(2, 1, 2, total, 16)
    output, _ = packed_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    flex = flex_attention(query, key, value, block_mask=mask.blocks, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(output, flex.transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert mask.borders.tolist() == [0, *torch.tensor(mask.lengths).cumsum(0).tolist()]


@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_gpu_gets_one_call_per_layer(monkeypatch, window):
    """Against what torch documents of `varlen_attn`, since its kernels run on no CPU: a query sees
    `window_size[0]` keys before itself (-1: all) and `window_size[1]` after."""
    signature, calls = inspect.signature(attention.varlen_attn), []

    def documented(*args, **kwargs):
        called = signature.bind(*args, **kwargs)
        called.apply_defaults()
        q, k, v, borders, same, longest, _, *_ = called.args
        assert torch.equal(borders, same) and borders.dtype == torch.int32
        assert longest == borders.diff().max()
        before, after = called.kwargs["window_size"]
        assert after == 0 and called.kwargs["enable_gqa"]
        segment = torch.bucketize(torch.arange(len(q)), borders, right=True)
        back = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (segment[:, None] == segment) & (back >= 0)
        seen &= (back <= before) | torch.tensor(before == -1)
        calls.append(before)
        q, k, v = (tensor.transpose(0, 1).float() for tensor in (q, k, v))
        scale = called.kwargs["scale"]
        output = scaled_dot_product_attention(
            q, k, v, seen.expand(len(q), -1, -1), scale=scale, enable_gqa=True
        )
        return output.transpose(0, 1).half()

    monkeypatch.setattr(attention, "varlen_attn", documented)
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 23, 16).half(), torch.randn(1, 2, 23, 16).half()
    mask = SegmentMask(LENGTHS, window, query.device)
    arguments = torch.nn.Module(), query, key, key, mask, 0.3, {}
    output = attention._in_one_call(*arguments)
    expected = attention._by_segment(*arguments)
    torch.testing.assert_close(output, expected, rtol=2e-3, atol=2e-3)
    assert len(calls) == 1


def test_a_gpu_takes_flex_attention_for_sinks_caps_and_wide_heads(monkeypatch):
    calls = []
    monkeypatch.setattr(
        attention,
        "flex_attention_forward",
        lambda module, query, key, value, mask, **kwargs: calls.append(kwargs) or (query, None),
    )
    query, wide = torch.randn(1, 4, 23, 16).half(), torch.randn(1, 4, 23, 32).half()
    mask = SegmentMask(LENGTHS, None, query.device)
    for value, wanted in ((query, {"s_aux": 1}), (query, {"softcap": 2.0}), (wide, {})):
        attention._in_one_call(torch.nn.Module(), query, query, value, mask, 0.5, wanted)
    assert [call.pop("kernel_options") for call in calls] == [{"BACKEND": "TRITON"}] * 3
    assert calls == [
        {"scaling": 0.5, "s_aux": 1},
        {"scaling": 0.5, "softcap": 2.0},
        {"scaling": 0.5},
    ]


def test_a_gpu_computes_shared_segments_level_by_level(monkeypatch):
    """The calls that a GPU gets, with pieces computed by the CPU's kernels in the shapes that torch
    registers for `_varlen_attn` and its backward pass."""
    forward, backward = attention._cpu_forward, attention._cpu_backward
    calls = []

    def pieces(borders, of_keys):
        return zip(*(pairwise(b.tolist()) for b in (borders, of_keys)), strict=True)

    def batched(tensor, span):
        return tensor[slice(*span)].transpose(0, 1)[None]

    def varlen_attn(q, k, v, borders, of_keys, longest, longest_key, *, return_aux, scale, **more):
        assert (longest, longest_key) == (borders.diff().max(), of_keys.diff().max())
        assert return_aux.lse and more["enable_gqa"]
        causal = more.get("window_size") == (-1, 0)
        calls.append(len(borders) - 1)
        found = [
            forward(batched(q, a), batched(k, b), batched(v, b), is_causal=causal, scale=scale)
            for a, b in pieces(borders, of_keys)
        ]
        output = torch.cat([out[0].transpose(0, 1) for out, _ in found])
        return output, torch.cat([lse[0] for _, lse in found], dim=1)

    def varlen_backward(grad, q, k, v, out, lse, borders, of_keys, *rest):
        causal, scale = rest[2], rest[4]
        assert rest[5] == ([-1, 0] if causal else [-1, -1]) and lse.is_contiguous()
        found = [
            backward(
                batched(grad, a),
                batched(q, a),
                batched(k, b),
                batched(v, b),
                batched(out, a),
                lse[None, :, slice(*a)],
                0.0,
                causal,
                scale=scale,
            )
            for a, b in pieces(borders, of_keys)
        ]
        return [
            torch.cat([part[0].transpose(0, 1) for part in kind])
            for kind in zip(*found, strict=True)
        ]

    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_cuda_backward", varlen_backward)
    # A prefix of two branches, the second with three of its own; one alone; a prefix of two.
    lengths = [5, 3, 4, 1, 2, 2, 6, 4, 3, 2]
    ends = [17, 8, 17, 13, 15, 17, 23, 32, 30, 32]
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 32, 8), *torch.randn(2, 1, 2, 32, 8)
    mask = SegmentMask(lengths, None, query.device, ends)
    assert mask.shared == [(0, 5, 17), (8, 12, 17), (23, 27, 32)]
    seen = mask.blocks.mask_mod(0, 0, torch.arange(32)[:, None], torch.arange(32)[None])
    weights = torch.randn(1, 32, 4, 8)

    def run(attend):
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = attend(*inputs)
        return [output, *torch.autograd.grad((output * weights).sum(), inputs)]

    dense = run(
        lambda q, k, v: scaled_dot_product_attention(
            q, k, v, seen[None, None], scale=0.3, enable_gqa=True
        ).transpose(1, 2)
    )
    on_cpu = run(lambda *qkv: packed_attention(torch.nn.Module(), *qkv, mask, scaling=0.3)[0])
    on_cuda = run(
        lambda *qkv: attention._FlashOnCUDA.apply(
            *(tensor[0].transpose(0, 1) for tensor in qkv), mask, 0.3
        )[None]
    )
    assert calls == [10, 2, 1]
    for ours, theirs, expected in zip(on_cpu, on_cuda, dense, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(theirs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [{"local_size": 50}, {"local_size": 4, "config": chunked(4)}])
def test_layers_that_see_a_part_of_a_prefix_are_refused(kind):
    with packed_segments([3, 2, 2], [7, 5, 7]), pytest.raises(ValueError, match="shared prefix"):
        packed_mask(1, 7, 7, **kind)


def test_caps_and_value_heads_of_their_own_size_share_no_prefixes():
    query = torch.randn(1, 2, 7, 8)
    mask = SegmentMask([3, 2, 2], None, query.device, [7, 5, 7])
    for value, wanted in ((query, {"softcap": 2.0}), (query[..., :4], {})):
        with pytest.raises(ValueError, match="cannot share prefixes"):
            packed_attention(torch.nn.Module(), query, query, value, mask, **wanted)


# the block mask of flex attention, against the one that torch makes of all pairs ------------------


CPU = torch.device("cpu")


def listed(numbers: torch.Tensor | None, indices: torch.Tensor | None) -> list[set[int]]:
    """Row by row the blocks of a list of `BlockMask`."""
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
