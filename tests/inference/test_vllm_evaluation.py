"""An evaluation against a real vLLM that is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from vllm_fixture import ROOT, running_vllm, vllm_python

from agentrl.rollout import read_trajectories

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
NUM_KILLS = 5


def test_each_episode_is_there_once_after_kills_and_shards_make_the_same(tmp_path, capsys):
    vllm_python()
    run = str(ROOT / "examples" / "quickstart" / "run.toml")
    size = ["--eval.num_tasks", "48", "--eval.samples_per_task", "4"]

    def start(folder, *more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "agentrl", "eval", run, *size, *served, *more]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        out = ["--out", str(tmp_path / folder)]
        return subprocess.Popen([*command, *out], env=environment, stdout=subprocess.DEVNULL)

    def written(folder) -> int:
        return sum(path.stat().st_size for path in (tmp_path / folder).glob("trajectories/step_*"))

    with running_vllm(tmp_path / "log") as launcher:
        served = ["--inference.backend", "vllm", "--inference.urls", launcher.urls[0]]
        served += ["--rollout.max_concurrent", "4"]
        assert start("whole").wait() == 0
        for number in range(NUM_KILLS):
            more = ["--resume"] if number else []
            before, process = written("killed"), start("killed", *more)
            while written("killed") <= before:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert start("killed", "--resume").wait() == 0
        for shard in ("1/3", "2/3", "3/3"):
            assert start("shards", "--shard", shard).wait() == 0
        assert start("shards", "--resume").wait() == 0
    results = {}
    for folder in ("whole", "killed", "shards"):
        ids = Counter(t.trajectory_id for _, t in read_trajectories(tmp_path / folder))
        assert set(ids.values()) == {1} and len(ids) == 192, folder
        results[folder] = json.loads((tmp_path / folder / "eval.json").read_text())
        assert results[folder]["num_failed"] == 0
    averages = {folder: result["avg@4"] for folder, result in results.items()}
    with capsys.disabled():
        print({folder: average["value"] for folder, average in averages.items()})
    for other in ("killed", "shards"):
        apart = abs(averages[other]["value"] - averages["whole"]["value"])
        assert apart < 4 * averages["whole"]["standard_error"]
