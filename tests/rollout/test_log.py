import math
import struct
import zlib

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from samples_for_tests import trajectory_of

from agentrl.errors import DataError
from agentrl.rollout import TrajectoryLog, read_trajectories
from agentrl.rollout.log import _to_record
from agentrl.types import StopReason, TokenRow, Trajectory, TrajectoryError, Turn

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FLOAT32 = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32)


@st.composite
def trajectories(draw):
    branches = []
    for branch in range(draw(st.integers(1, 3))):
        row = TokenRow(branch_of=branch - 1 if branch else None, fork_at=2 if branch else None)
        row.append_context(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)), 0)
        logprobs = draw(st.lists(FLOAT32, max_size=20))
        row.append_sampled([7] * len(logprobs), logprobs, [3] * len(logprobs), 0)
        row.messages = [{"role": "user", "content": draw(st.text(max_size=50))}]
        branches.append(row)
    return Trajectory(
        trajectory_id=draw(st.text(max_size=10)),
        group_id="g0",
        env_id="math",
        task_id="train/0",
        seed=1,
        branches=branches,
        turns=[Turn(0, 1, 2, "stop", "text", reward=0.5, reward_components={"correct": 0.5})],
        reward=draw(st.floats(allow_nan=False)),
        stop_reason=draw(st.sampled_from(list(StopReason))),
        error=draw(st.none() | st.just(TrajectoryError("step", "env_error", "it broke"))),
        info={"nested": draw(JSON), "wide": draw(st.integers(-(2**20000), 2**20000))},
    )


@given(st.lists(trajectories(), max_size=5))
def test_round_trip_is_bitwise(tmp_path_factory, written):
    run_dir = tmp_path_factory.mktemp("run")
    log = TrajectoryLog(run_dir)
    log.append(1, written[:2])
    log.append(1, written[2:])
    read = [trajectory for _, trajectory in read_trajectories(run_dir)]
    assert read == written
    for before, after in zip(written, read, strict=True):
        for mine, its in zip(before.branches, after.branches, strict=True):
            for name, array in mine.arrays().items():
                assert array.dtype == its.arrays()[name].dtype
                assert array.tobytes() == its.arrays()[name].tobytes()


def test_a_cut_last_record_is_skipped_and_a_damaged_one_is_an_error(tmp_path):
    TrajectoryLog(tmp_path).append(1, [trajectory_of(name="a"), trajectory_of(name="b")])
    file = tmp_path / "trajectories" / "step_000001.msgpack.zst"
    whole = file.read_bytes()
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        names = [t.trajectory_id for _, t in read_trajectories(tmp_path)]
        assert names in ([], ["a"])
    file.write_bytes(bytes([*whole[:20], whole[20] ^ 1, *whole[21:]]))
    with pytest.raises(DataError, match="damaged record at byte 0"):
        list(read_trajectories(tmp_path))


def test_resuming_drops_the_files_of_later_steps(tmp_path):
    log = TrajectoryLog(tmp_path)
    for step in (1, 2, 3):
        log.append(step, [trajectory_of(name=f"s{step}")])
    TrajectoryLog(tmp_path, resume_step=2)
    assert [(s, t.trajectory_id) for s, t in read_trajectories(tmp_path)] == [(1, "s1"), (2, "s2")]
    assert [s for s, _ in read_trajectories(tmp_path, steps=range(2, 3))] == [2]


def test_not_a_run_directory(tmp_path):
    with pytest.raises(DataError, match="a run directory"):
        list(read_trajectories(tmp_path / "nothing"))


def test_float32_rounding_of_logprobs_happens_once(tmp_path):
    row = TokenRow()
    row.append_context([1], 0)
    row.append_sampled([2], [-0.1], [0], 0)
    TrajectoryLog(tmp_path).append(1, [trajectory_of(branches=[row])])
    (_, read), *_ = read_trajectories(tmp_path)
    assert read.branches[0].rollout_logprobs == [0.0, float(np.float32(-0.1))]


@given(st.lists(st.floats(-20, 1e-5), max_size=20), st.integers(0, 20))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.01])
def test_a_row_refuses_what_is_no_log_probability(bad, logprobs, position):
    row = TokenRow()
    row.append_sampled([1] * len(logprobs), logprobs, [0] * len(logprobs), 0)
    assert all(value <= 0 for value in row.rollout_logprobs)
    position = min(position, len(logprobs))
    spoilt = [*logprobs[:position], bad, *logprobs[position:]]
    with pytest.raises(ValueError, match=f"at sampled token {position}$"):
        row.append_sampled([1] * len(spoilt), spoilt, [0] * len(spoilt), 1)
    assert len(row) == len(logprobs)


def test_a_log_of_the_first_version_is_read(tmp_path):
    """Its trajectories had one dialogue each, and a turn did not say where it stands in it."""
    prompt = [{"role": "assistant", "content": "an example"}, {"role": "user", "content": "17*3?"}]
    said = [{"role": "assistant", "content": "4"}, {"role": "tool", "content": "?"}]
    messages = [*prompt, *said, {"role": "assistant", "content": "51"}]
    turns = [Turn(0, 2, 1, "stop", "text"), Turn(0, 3, 1, "stop", "text")]
    row = TokenRow()
    row.append_context([1, 2], 0)
    row.append_sampled([3], [-0.5], [0], 0)
    row.append_sampled([4], [-1.0], [0], 1)
    record = _to_record(trajectory_of(branches=[row], turns=turns))
    for branch in record["branches"]:
        del branch["messages"]
    for turn in record["turns"]:
        del turn["message"], turn["parent"]
    payload = zstandard.ZstdCompressor().compress(
        msgspec.msgpack.encode(record | {"messages": messages})
    )
    (tmp_path / "trajectories").mkdir()
    file = tmp_path / "trajectories" / "step_000001.msgpack.zst"
    file.write_bytes(struct.pack("<II", len(payload), zlib.crc32(payload)) + payload)
    ((_, read),) = read_trajectories(tmp_path)
    assert read.messages == messages and read.branches[0].token_ids == row.token_ids
    assert [(turn.message, turn.parent) for turn in read.turns] == [(2, None), (4, 0)]
