"""`agentrl proxy` as a process: agents that it did not start, ended by requests or interrupted."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.rollout import read_trajectories
from agentrl.types import StopReason

ROOT = Path(__file__).parents[2]
RUN = ROOT / "examples" / "quickstart" / "run.toml"


def post(url, body, key="") -> dict:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=200) as reply:
        return json.load(reply)


def ask(episode) -> str:
    body = {"messages": [{"role": "user", "content": episode["task"]["prompt"]}]}
    reply = post(episode["base_url"] + "/chat/completions", body, episode["api_key"])
    return reply["choices"][0]["message"]["content"] or ""  # it may call what it was not offered


@pytest.fixture
def proxy(tmp_path):
    """`proxy(...)` starts one; `(process, directory of its results)`."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "agentrl", "proxy", RUN, "--out", tmp_path / "out", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, tmp_path / "out"

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_episodes_are_announced_ended_by_requests_and_written(proxy):
    process, out = proxy("--eval.num_tasks", "2", "--eval.samples_per_task", "2")
    episodes = [json.loads(process.stdout.readline()) for _ in range(4)]
    assert len({episode["api_key"] for episode in episodes}) == 4
    assert Counter(episode["task"]["id"] for episode in episodes) == {"test/0": 2, "test/1": 2}
    answers = [ask(episode) for episode in episodes]
    for body in ({"reward": "much"}, {"answer": "1", "reward": 1}, [1]):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(episodes[0]["end_url"], body)
        assert refused.value.code == 400
    post(episodes[0]["end_url"], {"reward": 0.25})
    post(episodes[1]["end_url"], {"answer": "no number"})
    post(episodes[2]["end_url"], {})
    post(episodes[3]["end_url"], {"answer": answers[3]})
    told, said = process.communicate(timeout=200)
    assert (process.returncode, told) == (0, ""), said
    assert "4 episodes of 2 tasks" in said
    trajectories = [trajectory for _, trajectory in read_trajectories(out)]
    assert all(t.error is None and t.num_sampled_tokens > 0 for t in trajectories)
    by_prompt = sorted(t.reward for t in trajectories)
    assert by_prompt.count(0.25) == 1 and 0.0 in by_prompt
    assert [t.messages[-1]["content"] for t in trajectories].count(answers[3]) >= 1
    assert (out / "report.html").exists() and (out / "metrics.jsonl").exists()


@pytest.mark.slow
def test_interrupted_it_keeps_what_was_played(proxy):
    process, out = proxy("--eval.num_tasks", "3", "--rollout.max_concurrent", "2")
    first, second = (json.loads(process.stdout.readline()) for _ in range(2))
    ask(first)
    post(first["end_url"], {"reward": 1})
    json.loads(process.stdout.readline())  # the third, in the place of the first
    ask(second)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 130, said
    ended = {trajectory.stop_reason: trajectory for _, trajectory in read_trajectories(out)}
    assert ended[StopReason.TERMINATED].reward == 1.0
    assert ended[StopReason.CANCELLED].error is not None


def test_a_chat_server_is_refused(tmp_path, capsys):
    given = ["--inference.backend", "openai", "--inference.urls", "http://localhost:1"]
    assert main(["proxy", str(RUN), "--out", str(tmp_path / "out"), *given]) == 2
    assert "token by token" in capsys.readouterr().err
