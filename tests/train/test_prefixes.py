import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples_for_tests import sample_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.train.attention import ATTENTION_NAME, SHARED_ATTENTION_NAME
from agentrl.train.logprobs import sample_logprobs
from agentrl.train.model import set_gradient_checkpointing
from agentrl.train.plan import MicroBatch, bundles, pack
from agentrl.train.prefixes import SortedRows, num_tokens
from agentrl.train.update import own_share
from agentrl.types import Sample

VOCAB_SIZE = 61


@st.composite
def forked_samples(draw) -> list[Sample]:
    """Groups whose rows begin with a prompt, or with a part of a row before them: forks, rows that
    end where another goes on, the same row twice. Trained tokens may lie in what is shared."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples = []
    for group in range(draw(st.integers(1, 3))):
        rows = [rng.integers(0, VOCAB_SIZE, draw(st.integers(1, 60)))]
        for _ in range(draw(st.integers(0, 5))):
            parent = rows[draw(st.integers(0, len(rows) - 1))]
            kept = parent[: draw(st.integers(0, len(parent)))]
            own = rng.integers(0, VOCAB_SIZE, draw(st.integers(not len(kept), 50)))
            rows.append(np.concatenate([kept, own]))
        for row in rows:
            mask = rng.random(len(row)) < 0.4
            mask[0] = False
            samples.append(sample_of(row, mask, group_id=str(group)))
    return [samples[index] for index in rng.permutation(len(samples))]


def seen_from(micro: MicroBatch, position: int) -> np.ndarray:
    """The packed positions that attention sees from one of them, by `branch_ends` alone."""
    ends = np.repeat(micro.branch_ends, np.diff(micro.cu_seqlens))
    before = np.arange(position + 1)
    return before[ends[: position + 1] > position]


@settings(deadline=None, max_examples=60)
@given(forked_samples(), st.integers(1, 300))
def test_every_trained_token_sees_its_own_history(samples, token_budget):
    plan = [rows for rows, _ in own_share(samples, range(len(samples)), token_budget, share=True)]
    assert sorted(row for rows in plan for row in rows) == list(range(len(samples)))
    for rows in plan:
        micro = pack(samples, rows, share=True)
        assert len(rows) == 1 or micro.num_tokens <= token_budget
        assert micro.num_tokens <= sum(len(samples[row]) for row in rows)
        assert micro.num_trained == sum(samples[row].num_trained for row in rows)
        for index in range(micro.num_trained):
            sample = samples[micro.rows[micro.row_of[index]]]
            at = np.flatnonzero(sample.loss_mask)[micro.column_of[index]]
            seen = seen_from(micro, micro.trained_index[index])
            assert np.array_equal(micro.input_ids[seen], sample.token_ids[:at])
            assert np.array_equal(micro.position_ids[seen], np.arange(at))
            assert micro.targets[index] == sample.token_ids[at]


def test_a_tree_by_hand():
    system, prompt = list(range(20)), list(range(20, 40))
    rows = [
        [*system, *prompt, 1, 2, 3],
        [*system, 7, 8],
        [*system, *prompt, 4],
        [*system, *prompt],
    ]
    samples = [sample_of(row, [0] * (len(row) - 1) + [1]) for row in rows]
    tree = SortedRows([0, 1, 2, 3], [np.array(row) for row in rows]).tree()
    assert [(s.start, s.stop, sorted(s.rows), s.parent) for s in tree] == [
        (0, 20, [0, 1, 2, 3], -1),
        (20, 22, [1], 0),
        (20, 40, [0, 2, 3], 0),
        (40, 43, [0], 2),
        (40, 41, [2], 2),
    ]
    micro = pack(samples, [0, 1, 2, 3], share=True)
    assert micro.input_ids.tolist() == [*system, 7, 8, *prompt, 1, 2, 3, 4]
    assert micro.cu_seqlens.tolist() == [0, 20, 22, 42, 45, 46]
    assert micro.branch_ends.tolist() == [46, 22, 46, 45, 46]
    # The last token of each row is read where the one before it stands, for the third and fourth
    # row within what they share.
    assert micro.trained_index.tolist() == [43, 20, 41, 40]
    assert micro.targets.tolist() == [3, 8, 4, 39]


@pytest.mark.parametrize(("shared", "own", "pays"), [(15, 4, 0), (16, 4, 1), (16, 300, 0)])
def test_short_prefixes_stay_with_their_rows(shared, own, pays):
    rows = [np.r_[np.arange(shared), np.full(own, 90 + row)] for row in range(3)]
    tokens = num_tokens(SortedRows(range(3), rows).tree())
    assert tokens == 3 * (shared + own) - 2 * shared * pays


def test_a_group_above_the_budget_has_its_prompt_in_every_bundle():
    prompt = np.arange(50)
    samples = [sample_of([*prompt, *[row] * 20], [0] * 50 + [1] * 20) for row in range(5)]
    found = bundles(samples, range(5), 100, share=True)
    assert found == [([0, 1], 90), ([2, 3], 90), ([4], 70)]
    assert bundles(samples, range(5), 100, share=False) == [([row], 70) for row in range(5)]


def test_groups_share_nothing_with_each_other():
    samples = [sample_of(range(40), [0] * 39 + [1], group_id=group) for group in "ab"]
    assert pack(samples, [0, 1], share=True).num_tokens == 80


def make_model(dtype: torch.dtype, device: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        # Larger than the default, so that attention and softmax are far from uniform.
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).to(device, dtype)


def step(model, samples, token_budget, *, share):
    """Loss, gradient and tokens of one pass over the samples, every token with a weight of its
    own."""
    model.set_attn_implementation(SHARED_ATTENTION_NAME if share else ATTENTION_NAME)
    model.zero_grad()
    total = num_tokens = 0.0
    for rows, _ in own_share(samples, range(len(samples)), token_budget, share=share):
        micro = pack(samples, rows, share=share)
        num_tokens += micro.num_tokens
        logprobs, entropy = sample_logprobs(model, micro, temperature=0.9, with_entropy=True)
        weights = np.sin(7.0 * micro.rows[micro.row_of] + 3.0 * micro.column_of)
        weights = torch.from_numpy(weights).to(logprobs)
        loss = (weights * logprobs).sum() + 0.1 * entropy.sum()
        loss.backward()
        total += float(loss.detach())
    gradient = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return total, gradient, num_tokens


def assert_same(one, other, tolerance):
    assert one[0] == pytest.approx(other[0], rel=tolerance, abs=tolerance)
    for a, b in zip(one[1], other[1], strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@settings(deadline=None, max_examples=25)
@given(forked_samples(), st.integers(20, 400), st.integers(20, 400))
def test_the_gradient_is_that_of_rows_by_themselves(samples, budget, other):
    # Its norms round to float32 even so.
    model = make_model(torch.float64, "cpu")
    if not any(sample.num_trained for sample in samples):
        return
    alone = step(model, samples, budget, share=False)
    assert_same(step(model, samples, other, share=True), alone, 1e-6)


def large_groups() -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for group in range(4):
        prompt = rng.integers(0, VOCAB_SIZE, 80)
        history = np.concatenate([prompt, rng.integers(0, VOCAB_SIZE, 60)])
        for member in range(6):
            own = rng.integers(0, VOCAB_SIZE, int(rng.integers(10, 120)))
            row = np.concatenate([prompt if member < 4 else history, own])
            mask = np.arange(len(row)) >= len(row) - len(own)
            samples.append(sample_of(row, mask, group_id=str(group)))
    return samples


ON_CUDA = pytest.mark.gpu


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 2e-6),
        ("cpu", torch.bfloat16, 2e-2),
        pytest.param("cuda", torch.float32, 1e-4, marks=ON_CUDA),  # TF32 is off by default
        pytest.param("cuda", torch.bfloat16, 5e-2, marks=ON_CUDA),
    ],
)
def test_a_batch_of_groups_on_each_device(device, dtype, tolerance, checkpointing):
    model, samples = make_model(dtype, device), large_groups()
    alone = step(model, samples, 1000, share=False)
    set_gradient_checkpointing(model, checkpointing)
    shared = step(model, samples, 1000, share=True)
    assert shared[2] < 0.7 * alone[2]
    assert_same(shared, alone, tolerance)
