"""`agentrl train --profile`: what a trace holds, and that it changes nothing."""

import gzip
import json

import pytest
from test_loop import QUICKSTART, untimed

from agentrl.cli.main import main
from agentrl.train.profile import Profiler
from agentrl.view.tracking import read_metrics

SMALL = [
    *("--rollout.groups_per_step", "1", "--rollout.group_size", "2"),
    *("--run.num_steps", "2", "--run.save_every", "9"),
]


def ranges(events: list[dict], name: str) -> list[tuple[float, float, int]]:
    """(start, end, thread) of everything of a name."""
    found = [e for e in events if e.get("name") == name and e.get("ph") == "X"]
    return sorted((e["ts"], e["ts"] + e["dur"], e["tid"]) for e in found)


@pytest.mark.slow
def test_a_trace_holds_rollout_update_and_push_of_its_step_and_changes_nothing(tmp_path, capsys):
    words = ["train", str(QUICKSTART), *SMALL]
    assert main([*words, "--run.dir", str(tmp_path / "plain"), "--quiet"]) == 0
    traced = tmp_path / "traced"
    assert main([*words, "--run.dir", str(traced), "--profile", "2"]) == 0
    assert "traces/step_000002.json.gz" in capsys.readouterr().out

    assert [file.name for file in (traced / "traces").iterdir()] == ["step_000002.json.gz"]
    text = gzip.decompress((traced / "traces" / "step_000002.json.gz").read_bytes())
    events = json.loads(text)["traceEvents"]
    (rollout,), (update,), (push,) = (
        ranges(events, name) for name in ("rollout", "update", "push")
    )
    assert rollout[1] <= update[0] < update[1] <= push[0], "in the order of the loop"
    assert update[2] != rollout[2], "the update has a thread of its own"
    products = ranges(events, "aten::mm")
    assert any(rollout[0] < start < rollout[1] for start, _, _ in products), "the engine's"
    assert any(update[0] < start < end < update[1] for start, end, _ in products), "the trainer's"

    assert untimed(read_metrics(traced)) == untimed(read_metrics(tmp_path / "plain"))


def test_steps_that_a_run_does_not_reach_are_known(tmp_path):
    assert Profiler(tmp_path, [3, 4, 40, 50]).unreached(3, 40) == [3, 50]


@pytest.mark.parametrize(("steps", "said"), [("0", "greater than or equal to 1"), ("x", "integer")])
def test_steps_are_numbers_from_one(tmp_path, capsys, steps, said):
    words = ["train", str(QUICKSTART), "--run.dir", str(tmp_path / "run"), "--profile", steps]
    assert main(words) == 2
    assert said in capsys.readouterr().err
