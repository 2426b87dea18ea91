import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples_for_tests import sample_of

from agentrl.train.plan import MicroBatch, pack, plan_micro_batches

lengths_lists = st.lists(st.integers(1, 60), max_size=40)


@st.composite
def sample_lists(draw):
    """Samples whose token ids are unique over the whole list, so that each can be traced."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=9))
    samples, next_id = [], 0
    for mask in masks:
        token_ids = np.arange(next_id, next_id + 1 + len(mask))
        next_id += len(token_ids)
        samples.append(sample_of(token_ids, [0, *mask]))
    return samples


@given(lengths_lists, st.integers(1, 80))
def test_a_plan_is_a_partition_within_the_budget(lengths, token_budget):
    plan = plan_micro_batches(lengths, token_budget)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        assert rows == sorted(rows)
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= token_budget


@given(lengths_lists, st.integers(1, 80))
def test_a_plan_wastes_less_than_half_of_its_budget(lengths, token_budget):
    plan = plan_micro_batches(lengths, token_budget)
    fills = sorted(sum(lengths[row] for row in rows) for rows in plan)
    # Two micro-batches that fit into one would have been one.
    assert len(fills) < 2 or fills[0] + fills[1] > token_budget


@given(lengths_lists, st.integers(1, 80), st.randoms())
def test_the_number_of_micro_batches_does_not_depend_on_the_order(lengths, token_budget, random):
    shuffled = lengths.copy()
    random.shuffle(shuffled)
    fills = [
        sorted(sorted(values[row] for row in rows) for rows in plan_micro_batches(values, 80))
        for values in (lengths, shuffled)
    ]
    assert fills[0] == fills[1]


def test_plan_by_hand():
    # Descending: 7 | 6 | 5 | 4 joins 6 | 3 joins 7; 12 is over the budget and stays alone.
    assert plan_micro_batches([3, 7, 4, 12, 6, 5], 10) == [[3], [0, 1], [2, 4], [5]]


def test_nothing_to_plan():
    assert plan_micro_batches([], 10) == []


@pytest.mark.parametrize(
    ("lengths", "token_budget", "message"),
    [([3], 0, "token_budget"), ([3, 0], 10, "sample 1 has 0 tokens")],
)
def test_a_plan_refuses_nonsense(lengths, token_budget, message):
    with pytest.raises(ValueError, match=message):
        plan_micro_batches(lengths, token_budget)


def test_pack_by_hand():
    samples = [
        sample_of([10, 11, 12], [0, 0, 1]),
        sample_of([20, 21, 22, 23, 24], [0, 0, 1, 1, 0]),
        sample_of([30, 31, 32], [0, 1, 1]),
    ]
    micro = pack(samples, [1, 2])
    assert micro.rows.tolist() == [1, 2]
    assert micro.input_ids.tolist() == [20, 21, 22, 23, 24, 30, 31, 32]
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert micro.cu_seqlens.tolist() == [0, 5, 8]
    assert micro.trained_index.tolist() == [1, 2, 5, 6]
    assert micro.targets.tolist() == [22, 23, 31, 32]
    assert micro.row_of.tolist() == [0, 0, 1, 1]
    assert micro.column_of.tolist() == [0, 1, 0, 1]
    assert (micro.num_tokens, micro.num_rows, micro.num_trained, micro.max_trained) == (8, 2, 4, 2)
    assert micro.segment_lengths == [5, 3]
    assert micro.cu_seqlens.dtype == np.int32
    for name in ("rows", "input_ids", "position_ids", "trained_index", "targets", "row_of"):
        assert getattr(micro, name).dtype == np.int64
    assert micro.column_of.dtype == np.int64


@settings(deadline=None)
@given(sample_lists(), st.integers(1, 40), st.randoms())
def test_every_trained_token_stands_in_the_plan_exactly_once(samples, token_budget, random):
    random.shuffle(samples)
    expected = [token for s in samples for token in s.token_ids[s.loss_mask > 0].tolist()]
    matrix: dict[tuple[int, int], int] = {}
    plan = plan_micro_batches([len(sample) for sample in samples], token_budget)
    for rows in plan:
        random.shuffle(rows)
        micro = pack(samples, rows)
        check_consistency(micro)
        for row, column, target in zip(
            micro.rows[micro.row_of], micro.column_of, micro.targets, strict=True
        ):
            assert (int(row), int(column)) not in matrix
            matrix[int(row), int(column)] = int(target)
    assert [matrix[key] for key in sorted(matrix)] == expected


def check_consistency(micro: MicroBatch) -> None:
    # Ids count up inside a sample, so the predicting position holds the target minus one.
    assert np.array_equal(micro.input_ids[micro.trained_index], micro.targets - 1)
    segment = np.repeat(np.arange(micro.num_rows), micro.segment_lengths)
    assert np.array_equal(segment[micro.trained_index], micro.row_of)
    assert np.array_equal(segment[micro.trained_index + 1], micro.row_of)
    assert np.array_equal(
        micro.position_ids, np.arange(micro.num_tokens) - micro.cu_seqlens[:-1][segment]
    )
    counts = np.bincount(micro.row_of, minlength=micro.num_rows)
    assert micro.max_trained == counts.max()


def test_rows_without_trained_tokens_are_allowed():
    micro = pack([sample_of([1, 2], [0, 0])], [0])
    assert (micro.num_trained, micro.max_trained) == (0, 0)


@pytest.mark.parametrize(
    ("samples", "rows", "message"),
    [
        ([], [], "at least one row"),
        ([sample_of([], [])], [0], "without tokens"),
        ([sample_of([1, 2], [1, 1], trajectory_id="walk-3")], [0], "walk-3 .* first token"),
        (
            [sample_of([1, 2], [0, 1, 1], trajectory_id="walk-4")],
            [0],
            "walk-4 .* 2 tokens with 3 mask",
        ),
    ],
)
def test_pack_refuses_nonsense(samples, rows, message):
    with pytest.raises(ValueError, match=message):
        pack(samples, rows)
