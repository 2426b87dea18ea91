import os

import pytest

from agentrl.errors import DataError
from agentrl.rollout import TrajectoryLog, read_trajectories
from agentrl.rollout.index import TrajectoryIndex
from agentrl.rollout.log import INDEX_FILE, read_trajectory
from agentrl.types import StopReason, TokenRow, Trajectory, TrajectoryError, Turn


def played(name: str, reward: float = 0.5) -> Trajectory:
    row = TokenRow()
    row.messages = [
        {"role": "assistant", "content": "said " * 100},
        {"role": "tool", "content": ""},
    ]
    row.append_context([1, 2], 0)
    row.append_sampled([3, 4], [-0.5, -2.0], [6, 7], 0)
    return Trajectory(
        *(name, "g", "e", "t", 0, [row], [Turn(0, 2, 2, "length", "malformed")]),
        reward=reward,
        metrics={"tool_errors": 2.0},
        stop_reason=StopReason.TERMINATED,
    )


def names(index: TrajectoryIndex) -> list[str]:
    return [entry.trajectory_id for entry in index.refresh()]


def test_an_entry_says_what_its_trajectory_is(tmp_path):
    failed = played("b", float("nan"))
    failed.error = TrajectoryError("step", "env_error", "it broke")
    TrajectoryLog(tmp_path).append(3, [played("a"), failed])
    first, second = TrajectoryIndex(tmp_path).refresh()
    assert (first.step, first.reward, first.malformed, first.tool_errors) == (3, 0.5, 1, 2.0)
    assert (first.tokens, first.oldest_version, first.newest_version) == (2, 6, 7)
    assert (first.lowest_logprob, first.truncated, first.turns) == (-2.0, True, 1)
    assert first.preview == ("said " * 100)[:160]
    assert (second.error, second.reward) == ("env_error", None)
    for entry, (_, trajectory) in zip((first, second), read_trajectories(tmp_path), strict=True):
        found, rows = read_trajectory(tmp_path, entry.step, entry.offset)
        assert found.trajectory_id == trajectory.trajectory_id == entry.trajectory_id
        for mine, its in zip(rows, trajectory.branches, strict=True):
            assert {k: v.tobytes() for k, v in mine.items()} == {
                k: v.tobytes() for k, v in its.arrays().items()
            }
    with pytest.raises(DataError, match="no trajectory at byte"):
        read_trajectory(tmp_path, 3, second.offset + second.length)
    with pytest.raises(DataError, match="no trajectory"):
        read_trajectory(tmp_path, 4, 0)


def test_it_follows_a_growing_run_and_one_that_took_steps_back(tmp_path):
    index = TrajectoryIndex(tmp_path)
    assert names(index) == []
    log = TrajectoryLog(tmp_path)
    log.append(1, [played("a")])
    assert names(index) == ["a"]
    log.append(1, [played("b")])
    log.append(2, [played("c")])
    assert names(index) == ["a", "b", "c"]
    generation = index.generation
    TrajectoryLog(tmp_path, resume_step=1).append(2, [played("d")])
    assert names(index) == ["a", "b", "d"] and index.generation > generation


def test_what_a_kill_left_without_a_line_is_found_and_stands_once(tmp_path):
    log = TrajectoryLog(tmp_path)
    log.append(1, [played("a"), played("b")])
    log.append(2, [played("c")])
    path = tmp_path / "trajectories" / INDEX_FILE
    lines = path.read_bytes()
    for cut in range(0, len(lines), 25):
        path.write_bytes(lines[:cut])
        index = TrajectoryIndex(tmp_path)
        assert sorted(names(index)) == ["a", "b", "c"]
        assert sorted(names(index)) == ["a", "b", "c"]
    path.write_bytes(lines[: len(lines) - 5])
    index = TrajectoryIndex(tmp_path)
    index.refresh()
    with path.open("ab") as file:
        file.write(lines[-5:])
    assert names(index) == ["a", "b", "c"], "the line came after its record was read"


def test_a_cut_index_is_whole_again_after_resuming(tmp_path):
    log = TrajectoryLog(tmp_path)
    log.append(1, [played("a"), played("b")])
    path = tmp_path / "trajectories" / INDEX_FILE
    path.write_bytes(path.read_bytes()[:-20])
    TrajectoryLog(tmp_path, resume_step=1).append(2, [played("c")])
    assert sorted(names(TrajectoryIndex(tmp_path))) == ["a", "b", "c"]


def test_a_run_that_is_older_than_the_index_opens(tmp_path):
    TrajectoryLog(tmp_path).append(1, [played("a"), played("b")])
    os.remove(tmp_path / "trajectories" / INDEX_FILE)
    index = TrajectoryIndex(tmp_path)
    assert names(index) == ["a", "b"] and not index.has_lines


@pytest.mark.parametrize("following", [False, True])
def test_what_a_damaged_line_stood_for_is_read_from_its_record(tmp_path, following):
    log, path = TrajectoryLog(tmp_path), tmp_path / "trajectories" / INDEX_FILE
    log.append(1, [played("a")])
    index = TrajectoryIndex(tmp_path)
    if following:
        assert names(index) == ["a"]
    log.append(1, [played("b"), played("c")])
    log.append(2, [played("d")])
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [lines[0], b"#" + lines[1][1:], *lines[2:]]
    path.write_bytes(b"".join(damaged))
    log.append(3, [played("e")])
    assert names(index) == ["a", "b", "c", "d", "e"] and index.num_damaged == 1
    TrajectoryLog(tmp_path, resume_step=2)
    assert names(index) == ["a", "b", "c", "d"], "a resumed run reads past the line as well"
