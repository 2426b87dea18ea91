import asyncio
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from planted import FAULTS, GROUPS, MEMBERS, STEPS, plant

from agentrl.rollout import TrajectoryLog, read_signals, read_trajectories
from agentrl.types import StopReason, TokenRow, Trajectory, Turn
from agentrl.view.curves import text_plot
from agentrl.view.runs import RunFiles
from agentrl.view.server import make_app
from agentrl.view.tracking import MetricsWriter, read_metrics


class Client:
    """Asks the application, without a network."""

    def __init__(self, *paths: Path, token: str | None = None, base="http://127.0.0.1:8600"):
        self.app, self.base = make_app(list(paths), token=token), base

    def response(self, path: str, method="GET", **kwargs) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=self.base) as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(ask())

    def get(self, path: str, **parameters):
        response = self.response(path, params=parameters)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    return plant(tmp_path_factory.mktemp("runs") / "healthy")


@pytest.fixture(scope="module")
def client(planted) -> Client:
    return Client(planted.parent)


@pytest.fixture(scope="module")
def base(client) -> str:
    (run,) = client.get("/api/runs")
    return f"/api/runs/{run['id']}"


def test_the_table_of_runs(client, planted):
    (run,) = client.get("/api/runs")
    metrics = read_metrics(planted)
    assert (run["name"], run["state"], run["step"], run["num_steps"]) == (
        *("healthy", "finished", STEPS, STEPS),
    )
    assert run["reward"] == metrics[-1]["reward/mean"] and len(run["rewards"]) == STEPS


def test_curves_are_the_metrics_and_only_new_lines_are_sent(client, base, planted):
    curves = client.get(f"{base}/metrics")
    for row, step in enumerate(curves["steps"]):
        for key, value in read_metrics(planted)[row].items():
            if key != "step":
                assert curves["series"][key][row] == pytest.approx(value, rel=1e-5)
        assert step == row + 1
    later = client.get(f"{base}/metrics", after=STEPS - 2)
    assert later["steps"] == [STEPS - 1, STEPS] and later["num_rows"] == STEPS
    assert later["series"].keys() == curves["series"].keys()


def test_gaps_are_gaps_and_counts_that_are_absent_are_zero(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward/mean": 0.5, "loss/policy": 0.1, "error/timeout": 2})
        writer.write(2, {"reward/mean": 0.5, "env/tool_errors": 1.0, "loss/policy": math.nan})
        writer.write(3, {"reward/mean": math.nan})
    series = RunFiles(tmp_path).curves()["series"]
    assert series["error/timeout"] == [2, 0, 0]
    assert series["env/tool_errors"] == [0, 1, None], "no trajectory, so no count"
    assert series["loss/policy"] == [0.1, None, None]


def test_the_advantages_of_a_step_average_to_its_metric(client, base, planted):
    """As the page has them: through the table of groups, and token by token."""
    for metrics in read_metrics(planted)[:3]:
        found = client.get(f"{base}/groups", step=metrics["step"])
        of_tokens = []
        for member in [m for group in found["groups"] for m in group["members"]]:
            path = f"{base}/trajectories/{member['step']}/{member['offset']}"
            tokens = client.get(f"{path}/tokens", row=0)
            mine = [a for a, t in zip(tokens["advantages"], tokens["trained"], strict=True) if t]
            assert np.mean(mine) == pytest.approx(member["advantage"], abs=1e-5)
            of_tokens += mine
        assert np.mean(of_tokens) == pytest.approx(metrics["advantage/mean"], abs=1e-5)


def test_a_window_of_tokens_lines_up_with_the_trajectory(client, base, planted):
    (_, trajectory), *_ = read_trajectories(planted, steps=range(2, 3))
    (row,) = trajectory.branches
    (signals,) = read_signals(planted, 2)[trajectory.trajectory_id]
    found = client.get(f"{base}/groups", step=2, sort="oldest")
    member = found["groups"][0]["members"][0]
    path = f"{base}/trajectories/2/{member['offset']}"
    tokens = client.get(f"{path}/tokens", row=0, start=2, count=5)
    assert tokens["ids"] == row.token_ids[2:7] and tokens["num_tokens"] == len(row)
    assert tokens["versions"] == row.policy_versions[2:7] and tokens["texts"] is None
    assert tokens["logprobs"][0] is None and tokens["advantages"][0] is None
    assert tokens["logprobs"][1:] == pytest.approx(row.rollout_logprobs[3:7], rel=1e-5)
    assert tokens["old_logprobs"][1:] == pytest.approx(signals.old_logprobs[3:7], rel=1e-5)
    assert tokens["ratios"][1:] == [1.0] * 4
    assert tokens["differences"][1:] == pytest.approx([0.001] * 4, abs=1e-5)
    assert tokens["kept"]["ratio"] == signals.kept["ratio"][2:7].tolist()
    described = client.get(path)
    assert len(described["siblings"]) == MEMBERS and described["turns"][0]["message"] == 1
    (question, _) = client.get(f"{path}/messages", row=0)["messages"]
    assert question["content"] == trajectory.messages[0]["content"]
    for wrong in (f"{path}/tokens?row=7", f"{base}/trajectories/2/7", f"{base}x/metrics"):
        assert client.response(wrong).status_code == 404


def test_the_first_groups_are_those_with_the_largest_advantage(client, base):
    groups = client.get(f"{base}/groups", limit=100)["groups"]

    def largest(group) -> float:
        rewards = [member["reward"] for member in group["members"]]
        deviation = statistics.pstdev(rewards)
        mean = statistics.fmean(rewards)
        return max(abs(r - mean) / deviation for r in rewards) if deviation else 0.0

    ranks = [(-round(largest(group), 6), -group["step"]) for group in groups]
    assert ranks == sorted(ranks) and ranks[0] < ranks[-1]
    for group in groups:
        rewards = [member["reward"] for member in group["members"]]
        mean = statistics.fmean(rewards)
        apart = [-round(abs(reward - mean), 9) for reward in rewards]
        assert apart == sorted(apart)


@pytest.mark.parametrize("sort", ["worst", "best", "longest", "surprising", "oldest", "newest"])
def test_groups_are_sorted(client, base, sort):
    groups = client.get(f"{base}/groups", sort=sort, limit=100)["groups"]
    assert len(groups) == STEPS * GROUPS
    keys = {
        "worst": lambda g: g["mean"],
        "best": lambda g: -g["mean"],
        "longest": lambda g: -max(m["tokens"] for m in g["members"]),
        "surprising": lambda g: min(m["lowest_logprob"] for m in g["members"]),
        "oldest": lambda g: g["step"],
        "newest": lambda g: -g["step"],
    }
    ranks = [keys[sort](group) for group in groups]
    assert (ranks == sorted(ranks) and ranks[0] != ranks[-1]) or sort == "longest"


def test_groups_are_filtered_and_paged(tmp_path):
    run_dir = plant(tmp_path / "run", "errors")
    client = Client(run_dir)
    base = f"/api/runs/{client.get('/api/runs')[0]['id']}"
    everything = client.get(f"{base}/groups", limit=100)
    assert everything["errors"] == ["grader_timeout"]
    failed = client.get(f"{base}/groups", show="failed", error="grader_timeout", limit=100)
    with_failures = [
        g["group_id"] for g in everything["groups"] if any(m["error"] for m in g["members"])
    ]
    assert [g["group_id"] for g in failed["groups"]] == with_failures
    assert 0 < failed["num_found"] < everything["num_found"]
    assert all(m["matches"] == bool(m["error"]) for g in failed["groups"] for m in g["members"])
    first = client.get(f"{base}/groups", limit=3)
    second = client.get(f"{base}/groups", limit=3, offset=3)
    assert [g["group_id"] for g in first["groups"] + second["groups"]] == [
        g["group_id"] for g in everything["groups"][:6]
    ]
    assert {g["task_id"] for g in client.get(f"{base}/groups", task="train/7")["groups"]} == {
        "train/7"
    }
    zero = client.get(f"{base}/groups", show="zero_variance", limit=100)["num_found"]
    mixed = client.get(f"{base}/groups", show="mixed", limit=100)["num_found"]
    assert zero and mixed and zero + mixed == everything["num_found"]


def test_a_search_for_text_goes_on_where_it_stopped(client, base, monkeypatch):
    monkeypatch.setattr("agentrl.view.groups.TEXT_SEARCH_S", 0.0)
    found, searched = [], 0
    for _ in range(STEPS * GROUPS):
        answer = client.get(f"{base}/groups", text="what is 5 * 2?", searched=searched)
        found += answer["groups"]
        searched = answer["searched"]
        if searched == answer["num_found"]:
            break
    assert [(group["step"], group["group_id"]) for group in found] == [(5, "s5-g2")]


def test_a_forest_of_rows_is_shown_row_by_row(tmp_path):
    first = TokenRow(messages=[{"role": "user", "content": "plan"}])
    first.append_context([1, 2], 0)
    first.append_sampled([3], [-1.0], [0], 0)
    fork = TokenRow(branch_of=0, fork_at=2, messages=[{"role": "user", "content": "help"}])
    fork.append_context([1, 2], 1)
    fork.append_sampled([4, 5], [-1.0, -2.0], [0, 0], 1)
    turns = [Turn(0, 2, 1, "stop", "text"), Turn(1, 2, 2, "stop", "text")]
    made = Trajectory(
        *("a", "g", "e", "t", 0, [first, fork], turns), stop_reason=StopReason.TERMINATED
    )
    TrajectoryLog(tmp_path).append(1, [made])
    client = Client(tmp_path)
    path = f"/api/runs/{client.get('/api/runs')[0]['id']}/trajectories/1/0"
    rows = client.get(path)["rows"]
    assert [(row["num_tokens"], row["branch_of"], row["fork_at"]) for row in rows] == [
        *((3, None, None), (4, 0, 2))
    ]
    said = [client.get(f"{path}/messages", row=row)["messages"][0]["content"] for row in (0, 1)]
    assert said == ["plan", "help"]
    assert client.get(f"{path}/tokens", row=1)["ids"] == [1, 2, 4, 5]


def test_the_configuration_begins_with_what_is_not_a_default(tmp_path, planted):
    project = tmp_path / "project"
    shutil.copytree(planted, project / "runs" / "one")
    (project / "runs" / "one" / "config.toml").write_text(
        '[run]\nseed = 5\nnum_steps = 100\n[model]\npath = "m"\n[objective]\npreset = "grpo"\n'
        'loss = "mine.py:loss"\nadvantage = "none"\n'
    )
    client = Client(project)  # a project's runs are found in runs/
    (run,) = client.get("/api/runs")
    assert run["preset"] == "grpo, own loss"
    changed = client.get(f"/api/runs/{run['id']}")["changed"]
    assert changed["run.seed"] == "5" and changed["model.path"] == '"m"'
    assert "run.num_steps" not in changed, "100 is the default"


def test_an_old_run_opens_and_says_what_it_lacks(tmp_path):
    run_dir = plant(tmp_path / "old")
    (run_dir / "status.json").unlink()
    (run_dir / "trajectories" / "index.jsonl").unlink()
    for file in (run_dir / "signals").iterdir():
        file.unlink()
    (run_dir / "signals").rmdir()
    client = Client(run_dir)
    run = client.get("/api/runs")[0]
    assert run["state"] == "finished"
    lacks = " ".join(client.get(f"/api/runs/{run['id']}")["lacks"])
    for missing in ("no signals", "no index", "no status", "no tokenizer"):
        assert missing in lacks
    groups = client.get(f"/api/runs/{run['id']}/groups")["groups"]
    member = groups[0]["members"][0]
    assert member["advantage"] is None
    path = f"/api/runs/{run['id']}/trajectories/{member['step']}/{member['offset']}"
    assert "advantages" not in client.get(f"{path}/tokens")


def test_a_damaged_run_is_a_line_of_the_table(tmp_path, planted):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "metrics.jsonl").write_text("not JSON\n")
    runs = Client(damaged, planted).get("/api/runs")
    states = {run["name"]: run["state"] for run in runs}
    assert states == {"damaged": "damaged", "healthy": "finished"}
    assert "metrics.jsonl:1" in next(r["message"] for r in runs if r["name"] == "damaged")


def test_a_damaged_line_of_the_metrics_is_left_out_and_named(tmp_path):
    run_dir = plant(tmp_path / "torn")
    client = Client(tmp_path)
    path = f"/api/runs/{client.get('/api/runs')[0]['id']}"
    assert client.get(f"{path}/metrics")["num_rows"] == STEPS
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "rew\n{"step": 26, "reward/mean": 0.5}\n')
    assert client.get(f"{path}/metrics")["num_rows"] == STEPS + 1
    assert client.get(f"{path}/groups")["num_found"] and client.get(f"{path}/diagnosis")["rules"]
    assert any("metrics.jsonl:25 is not JSON" in line for line in client.get(path)["lacks"])


def test_a_resumed_run_that_outgrew_its_old_file_is_read_anew(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": 0.1})
    run = RunFiles(tmp_path)
    assert run.curves()["num_rows"] == 5
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        for step in range(3, 30):
            writer.write(step, {"reward/mean": 0.2, "policy/entropy": 1.0})
    curves = run.curves()
    assert curves["steps"] == list(range(1, 30)) and curves["generation"] == 1
    assert curves["series"]["reward/mean"] == [0.1] * 2 + [0.2] * 27


def test_a_deleted_run_is_said_to_be_gone(tmp_path):
    run_dir = plant(tmp_path / "short-lived", steps=2)
    client = Client(tmp_path)
    run = client.get("/api/runs")[0]["id"]
    shutil.rmtree(run_dir)
    for page in ("", "/metrics", "/groups", "/diagnosis"):
        answer = client.response(f"/api/runs/{run}{page}")
        assert answer.status_code == 404 and "deleted or moved" in answer.json()["error"]
    assert client.get("/api/runs") == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_as_large_as_floats_are_shown_and_have_a_mean(tmp_path, monkeypatch):
    huge = {"reward": lambda step, rng: rng.choice([1e308, -1e308])}
    monkeypatch.setitem(FAULTS, "huge", huge)
    client = Client(plant(tmp_path / "huge", "huge", steps=3))
    path = f"/api/runs/{client.get('/api/runs')[0]['id']}"
    assert all(abs(group["mean"]) <= 1e300 for group in client.get(f"{path}/groups")["groups"])
    client.get(f"{path}/diagnosis")
    values = client.get(f"{path}/metrics")["series"]["reward/mean"]
    assert all(value is None or abs(value) <= 1e300 for value in values)
    assert len(text_plot([(1, 1e300), (2, -1e300)], width=40, height=6)) == 8


def exported(client: Client, base: str, **asked) -> list[dict]:
    response = client.response(f"{base}/export", params=asked)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_what_a_filter_finds_or_a_reader_picks_is_exported_as_it_was_logged(client, base, planted):
    logged = {t.trajectory_id: t for _, t in read_trajectories(planted)}
    lines = exported(client, base)
    assert {line["trajectory_id"] for line in lines} == set(logged)
    for line in lines:
        trajectory = logged[line["trajectory_id"]]
        assert (line["reward"], line["messages"]) == (trajectory.reward, trajectory.messages)
    assert len(exported(client, base, step=3)) == GROUPS * MEMBERS
    said = exported(client, base, text="what is 5 * 2?")
    assert {line["task_id"] for line in said} == {"train/22"} and len(said) == MEMBERS
    members = client.get(f"{base}/groups", step=2)["groups"][0]["members"][:2]
    pick = ",".join(f"{member['step']}.{member['offset']}" for member in members)
    picked = [line["trajectory_id"] for line in exported(client, base, pick=pick)]
    assert picked == sorted(member["trajectory_id"] for member in members)
    for wrong in ({"pick": "1"}, {"pick": "a.b"}, {"sort": "nonsense"}):
        assert client.response(f"{base}/export", params=wrong).status_code == 404


def test_tasks_of_two_runs_are_compared_by_their_mean_rewards(tmp_path, monkeypatch):
    for name, step in (("one", 3), ("two", 6)):

        def paid(now, rng, step=step):
            return float(now == step)

        monkeypatch.setitem(FAULTS, name, {"reward": paid})
        plant(tmp_path / name, name, steps=6)
    client = Client(tmp_path)
    ids = {run["name"]: run["id"] for run in client.get("/api/runs")}
    answer = client.get("/api/tasks", first=ids["one"], second=ids["two"])
    assert answer["num_tasks"] == 6 * GROUPS
    by_task = {task["task_id"]: (task["first"], task["second"]) for task in answer["tasks"]}
    assert by_task["train/12"] == (1, 0) and by_task["train/24"] == (0, 1)
    assert [abs(t["first"] - t["second"]) for t in answer["tasks"]] == [1] * 8 + [0] * 16
    groups = client.get(f"/api/runs/{ids['one']}/groups", task_id="train/1")
    assert groups["groups"] == [], "the whole name, which begins with another's"
    assert client.get(f"/api/runs/{ids['one']}/groups", task_id="train/12")["num_found"] == 1


def test_metrics_are_explained_and_the_question_stands_above_the_dialogue(client, base):
    meanings = client.get(f"{base}/meanings")
    assert meanings["reward/mean"].startswith("Mean reward")
    assert meanings["policy/clip_fraction_low"]
    member = client.get(f"{base}/groups", step=2)["groups"][0]["members"][0]
    one = client.get(f"{base}/trajectories/2/{member['offset']}")
    assert one["question"].startswith("What is 2 *") and "of step 2" in one["answer"]


def test_every_answer_forbids_scripts_frames_and_other_origins(client, base):
    for path in ("/", "/pages/main.js", "/api/runs", f"{base}/groups", "/nothing", "/api/runs/x"):
        headers = client.response(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and headers["x-content-type-options"] == "nosniff"
    for path in ("/pages/../server.py", "/pages/%2e%2e/server.py", "/pages//etc/passwd"):
        assert client.response(path).status_code in (404, 405)
    assert client.response("/api/runs", method="POST").status_code == 405


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1.example.com", "localhost@evil", ""])
def test_another_hosts_name_is_refused(planted, host):
    response = Client(planted).response("/api/runs", headers={"host": host})
    assert response.status_code == 403 and "healthy" not in response.text


@pytest.mark.parametrize("token", ["sesame", "сезам & 開け"])
def test_a_token_is_asked_for_once_and_stays_out_of_the_address(planted, token):
    client = Client(planted, token=token, base="http://runs.example:8600")
    for path, given in (("/", ""), ("/api/runs", ""), ("/", "wrong"), ("/api/runs", token)):
        assert client.response(path, params={"token": given}).status_code == 401
    answer = client.response("/", params={"token": token})
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    headers = {"cookie": cookie.partition(";")[0]}
    assert client.response("/api/runs", headers=headers).status_code == 200


def test_an_empty_token_is_none(planted):
    elsewhere = Client(planted, token="", base="http://runs.example:8600")
    assert elsewhere.response("/api/runs").status_code == 403
    assert Client(planted, token="").response("/api/runs").status_code == 200


TRAINER = """
import sys, time
from pathlib import Path
from agentrl.view.tracking import MetricsWriter, RunStatus
run_dir = Path(sys.argv[1])
with RunStatus(run_dir, num_steps=100), MetricsWriter(run_dir) as writer:
    writer.write(1, {"reward/mean": 0.5})
    print("trains", flush=True)
    time.sleep(60)
"""


def test_a_trainer_that_was_killed_is_named(tmp_path):
    client = Client(tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text("[run]\nnum_steps = 100\n")
    assert client.get("/api/runs")[0]["state"] == "unknown"
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(run_dir)], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "trains\n"
        for _ in range(3):
            assert client.get("/api/runs")[0]["state"] == "training"
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
    run = client.get("/api/runs")[0]
    assert run["state"] == "dead" and abs(run["time"] - time.time()) < 60


def test_a_command_serves_and_stops(tmp_path, planted):
    command = [sys.executable, "-m", "agentrl", "view", str(planted), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().split()[0]
        assert [run["name"] for run in httpx.get(f"{url}api/runs").json()] == ["healthy"]
        assert "<script" in httpx.get(url).text
        assert httpx.get(f"{url}{quote('api/runs/../../etc')}").status_code == 404
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0


def test_what_json_cannot_hold_is_escaped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "lone \ud800": 1.0}) + "\n")
    client = Client(tmp_path)
    run = client.get("/api/runs")[0]
    assert "lone \ud800" in client.get(f"/api/runs/{run['id']}/metrics")["series"]
