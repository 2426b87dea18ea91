import json
from pathlib import Path

import pytest
from test_server import Client

from agentrl.api import Evaluation
from agentrl.config import load_config
from agentrl.evaluate.episodes import SUITE_FILE, EpisodeLog, groups_of
from agentrl.evaluate.measure import summarise
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.types import StopReason, TokenRow, Trajectory, TrajectoryError, Turn
from agentrl.view.evaluations import list_evaluations
from agentrl.view.runs import RunFiles

# Rewards of the samples of each task; None: it failed.
REWARDS = {
    "strong": {"both": [1, 1], "a": [1, 1], "b": [0, 1], "none": [0, 0], "own": [1, 1]},
    "weak": {"both": [1, 1], "a": [0, 0], "b": [1, 1], "none": [0, 0.5], "late": [None, None]},
}


def evaluation(folder: Path, rewards: dict[str, list[float | None]]) -> Path:
    played = []
    for task, of_task in rewards.items():
        for number, reward in enumerate(of_task):
            said = [
                {"role": "user", "content": f"question {task}"},
                {"role": "assistant", "content": f"answer {number}"},
            ]
            trajectory = Trajectory(
                f"{task}-{number}",
                group_id=task,
                env_id="math",
                task_id=task,
                seed=0,
                branches=[TokenRow(messages=said)],
                turns=[Turn(0, 3, 2, "stop", "text", message=1)],
                reward=reward or 0.0,
                stop_reason=StopReason.TERMINATED,
            )
            if reward is None:
                trajectory.error = TrajectoryError("step", "env_error", "it broke")
            played.append(trajectory)
    config = load_config({"env": {"id": "math"}, "model": {"path": "m"}, "eval": {"split": "test"}})
    EpisodeLog(folder, config).finish(played)
    groups = groups_of(played)
    statistics = summarise(RolloutBatch(groups, played), config)
    result = Evaluation(groups, played, statistics).to_json()
    (folder / "eval.json").write_text(json.dumps(result))
    return folder


@pytest.fixture
def results(tmp_path) -> Path:
    """A suite of two models and one benchmark, and an evaluation beside it."""
    for model, rewards in REWARDS.items():
        evaluation(tmp_path / "table" / model / "sums", rewards)
    (tmp_path / "table" / SUITE_FILE).write_text("")
    evaluation(tmp_path / "alone", {"both": [0]})
    return tmp_path


def test_a_suite_is_a_table_and_others_stand_beside_it(results):
    found = Client(results).get("/api/evaluations")
    assert {(each["suite"], each["model"], each["benchmark"]) for each in found} == {
        ("table", "strong", "sums"),
        ("table", "weak", "sums"),
        ("", "alone", "math, test"),
    }
    (strong,) = (each for each in found if each["model"] == "strong")
    assert strong["figure"] == "avg@2" and strong["value"] == 0.7
    assert strong["low"] < 0.7 < strong["high"] and strong["num_tasks"] == 5
    runs = Client(results / "table").get("/api/runs")
    assert {run["name"] for run in runs} == {"strong/sums", "weak/sums"}


def test_folders_of_one_name_stand_beside_each_other(tmp_path):
    folders = [evaluation(tmp_path / month / "start", {"both": [1]}) for month in ("may", "june")]
    found = list_evaluations([RunFiles(folder) for folder in folders])
    assert {each["model"] for each in found} == {str(folder) for folder in folders}


def test_the_samples_of_two_models_are_filtered_by_who_is_right(results):
    client = Client(results)
    ids = {each["model"]: each["id"] for each in client.get("/api/evaluations")}
    both = f"{ids['strong']},{ids['weak']}"

    def tasks(show: str) -> list[str]:
        found = client.get("/api/evaluations/tasks", runs=both, show=show)
        assert found["num_found"] == len(found["tasks"])
        assert (found["num_tasks"], found["num_shared"]) == (6, 4)
        return [task["task_id"] for task in found["tasks"]]

    assert tasks("all") == ["both", "a", "b", "none"]
    assert tasks("first") == ["a"]
    assert tasks("last") == ["b"], "half of the samples is not right"
    assert tasks("differ") == ["a", "b"]
    assert tasks("all_solve") == ["both"] and tasks("none_solves") == ["none"]
    weak = client.get("/api/evaluations/tasks", runs=ids["weak"], show="failed")
    (late,) = weak["tasks"]
    assert late["shares"] == [None] and late["samples"][0][0]["error"] == "env_error"
    found = client.get("/api/evaluations/tasks", runs=both)
    sample = found["tasks"][3]["samples"][1][1]
    assert (sample["reward"], sample["solved"]) == (0.5, False)
    place = f"/api/runs/{ids['weak']}/trajectories/{sample['step']}/{sample['offset']}"
    assert client.get(place)["task_id"] == "none", "what a click opens"


def test_what_is_wrong_is_said(results):
    client = Client(results)
    assert client.response("/api/evaluations/tasks?runs=").status_code == 404
    (found, *_) = client.get("/api/evaluations")
    wrong = client.response(f"/api/evaluations/tasks?runs={found['id']}&show=odd")
    assert "no such filter" in wrong.json()["error"]
    (results / "alone" / "eval.json").write_text("[")
    assert "alone/eval.json is damaged" in client.response("/api/evaluations").json()["error"]
