"""`agentrl export FOLDER --out FILE.eval`: inspect_ai reads what its own writer wrote.

tests/train/test_lora.py and tests/train/test_ranks_runs.py export checkpoints.
"""

import sys
from pathlib import Path

import pytest

from agentrl.cli.export import export_model
from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.evaluate.episodes import EpisodeLog, read_evaluation
from agentrl.images import image_part, read_image
from agentrl.types import StopReason, TokenRow, Trajectory, TrajectoryError, Turn


def picture() -> dict:
    image = pytest.importorskip("PIL.Image")
    from io import BytesIO

    buffer = BytesIO()
    image.new("RGB", (8, 6), "red").save(buffer, "PNG")
    return image_part(read_image(buffer.getvalue()))


def episode(task: str, number: int, reward: float) -> Trajectory:
    function = {"name": "add", "arguments": {"a": 1}}
    call = {"id": "c1", "type": "function", "function": function}
    said = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": [{"type": "text", "text": f"Add {task}."}, picture()]},
        {"role": "assistant", "content": "", "reasoning": "Let me call it.", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "#### 7"},
    ]
    turns = [
        Turn(0, 5, 3, "stop", "tool_calls", message=2),
        Turn(0, 12, 4, "stop", "text", message=4, parent=0),
    ]
    return Trajectory(
        f"{task}-{number}",
        group_id=task,
        env_id="math",
        task_id=task,
        seed=number,
        branches=[TokenRow(messages=said)],
        turns=turns,
        reward=reward,
        info={"reference": "7"},
        stop_reason=StopReason.TERMINATED,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes an evaluation of two tasks with three samples each, of which the last failed."""
    played = [episode(f"t/{task}", n, float(n == task)) for task in range(2) for n in range(3)]
    played[-1].error = TrajectoryError("step", "env_error", "it broke")
    config = load_config({"env": {"id": "math"}, "model": {"path": "a/model"}})
    EpisodeLog(tmp_path / "kept", config).finish(played)
    return tmp_path / "kept"


def test_inspect_reads_every_sample_with_its_dialogue_and_reward(folder, capsys):
    reader = pytest.importorskip("inspect_ai.log")
    log = folder.with_name("log.eval")
    assert main(["export", str(folder), "--out", str(log)]) == 0
    read = reader.read_eval_log(str(log), resolve_attachments=True)
    _, played = read_evaluation(folder)
    assert read.results.scores[0].metrics["mean"].value == pytest.approx(5 / 12)
    assert (read.results.total_samples, read.results.completed_samples) == (6, 5)
    assert (read.eval.task, read.eval.model) == ("math", "a/model")
    found = {
        (s.id, s.epoch - 1): s.scores["reward"].value if s.scores else s.error.message
        for s in read.samples
    }
    assert found == {
        (t.task_id, t.seed): t.reward if t.error is None else "step: env_error: it broke"
        for t in played
    }
    first = read.samples[0]
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [m.role for m in first.messages] == roles and len(first.input) == 2
    assert first.messages[1].content[1].image == picture()["image_url"]["url"]
    assert first.messages[2].content[0].reasoning == "Let me call it."
    assert first.messages[2].tool_calls[0].arguments == {"a": 1}
    assert (first.messages[3].tool_call_id, first.messages[3].text) == ("c1", "7")
    assert first.output.completion == "#### 7" and first.target == "7"
    assert main(["export", str(folder), "--out", str(log)]) == 2, "nothing is overwritten"
    assert "exists already" in capsys.readouterr().err


def test_without_inspect_the_error_names_the_extra(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "inspect_ai.log", None)
    assert main(["export", str(folder), "--out", str(tmp_path / "log.eval")]) == 2
    assert "agentrl-gym[inspect]" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(tmp_path):
    (tmp_path / "checkpoints" / "step_000060").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no checkpoint .*step_60; there are step_000060"):
        export_model(tmp_path / "checkpoints" / "step_60", tmp_path / "out", dtype="float32")
