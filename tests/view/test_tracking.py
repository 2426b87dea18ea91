import builtins
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError, DataError
from agentrl.view.tracking import MetricsWriter, read_metrics


def write_steps(run_dir: Path, steps, resume_step=None) -> None:
    with MetricsWriter(run_dir, resume_step=resume_step) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": step / 7, "rollout/num_errors": step})


def steps_of(run_dir: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run_dir)]


@settings(max_examples=50)
@given(values=st.lists(st.floats() | st.integers(-(2**70), 2**70), max_size=5))
def test_numbers_round_trip_exactly_and_non_finite_ones_are_null(tmp_path_factory, values):
    run_dir = tmp_path_factory.mktemp("run")
    with MetricsWriter(run_dir) as writer:
        writer.write(1, {f"a/{i}": value for i, value in enumerate(values)})
    (row,) = read_metrics(run_dir)
    num_non_finite = 0
    for index, value in enumerate(values):
        found = row[f"a/{index}"]
        if math.isfinite(value):
            assert found == value and type(found) is type(value)
            assert math.copysign(1, found) == math.copysign(1, value)
        else:
            assert found is None
            num_non_finite += 1
    assert row.get("log/num_non_finite", 0) == num_non_finite
    assert "NaN" not in (run_dir / "metrics.jsonl").read_text()


def test_array_scalars_become_plain_numbers(tmp_path):
    torch = pytest.importorskip("torch")
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": np.float32(0.1), "b": np.int64(3), "c": torch.tensor(0.5)})
    assert read_metrics(tmp_path) == [{"step": 1, "a": float(np.float32(0.1)), "b": 3.0, "c": 0.5}]


def test_lines_are_readable_while_the_run_goes_on(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        assert read_metrics(tmp_path) == []
        writer.write(1, {"a": 1})
        assert read_metrics(tmp_path) == [{"step": 1, "a": 1}]


def test_resume_drops_later_lines_and_the_cut_one_and_keeps_the_rest_byte_for_byte(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    write_steps(whole, range(1, 11))
    write_steps(resumed, range(1, 8))
    with (resumed / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "reward/me')
    assert steps_of(resumed) == list(range(1, 8))
    write_steps(resumed, range(6, 11), resume_step=5)
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert [path.name for path in resumed.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", range(0, 120, 7))
def test_a_file_cut_anywhere_resumes(tmp_path, cut):
    write_steps(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:cut])
    whole_lines = content[:cut].count(b"\n")
    write_steps(tmp_path, [], resume_step=2)
    assert steps_of(tmp_path) == [1, 2][:whole_lines]


def test_resume_without_a_file_warns_and_starts_one(tmp_path, caplog):
    write_steps(tmp_path, [4], resume_step=3)
    assert "metrics up to step 3 are lost" in caplog.text
    assert steps_of(tmp_path) == [4]


def test_a_new_run_refuses_an_old_file(tmp_path):
    write_steps(tmp_path, [1])
    with pytest.raises(ConfigError, match=r"--resume.*--run.dir"):
        MetricsWriter(tmp_path)
    assert steps_of(tmp_path) == [1]


def test_a_damaged_line_is_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_metrics(tmp_path)
    for bad in (b"not json", b"[1]", b'{"a": 1}', b'{"step": "1"}'):
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
        with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
            read_metrics(tmp_path)


def test_a_kill_loses_no_written_step(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from agentrl.view.tracking import MetricsWriter\n"
        "writer = MetricsWriter(sys.argv[1])\n"
        "for step in range(1, 51):\n"
        "    writer.write(step, {'a': step / 3})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [row["a"] for row in read_metrics(tmp_path)] == [step / 3 for step in range(1, 51)]


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_receives_the_finite_values_and_resumes(tmp_path):
    pytest.importorskip("tensorboard")
    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": step / 4, "a": float("inf") if step == 2 else 1})
    with MetricsWriter(tmp_path, ["tensorboard"], resume_step=3) as writer:
        writer.write(4, {"reward/mean": 9.0, "a": 2})
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 9.0)]
    assert [step for step, _ in scalars(tmp_path, "a")] == [1, 3, 4]


@pytest.mark.parametrize("sink", ["tensorboard", "wandb", "trackio"])
def test_a_missing_tracker_says_what_to_install(tmp_path, monkeypatch, sink):
    real_import = builtins.__import__

    def without(name, *arguments, **keywords):
        if sink in name:
            raise ModuleNotFoundError(f"No module named {sink!r}", name=sink)
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl-gym\[track\]'") as caught:
        MetricsWriter(tmp_path, [sink])
    assert sink in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="unknown sink 'mlflow'"):
        MetricsWriter(tmp_path, ["mlflow"])  # type: ignore[list-item]


def test_wandb_runs_offline_when_nobody_is_logged_in(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no ~/.netrc
    for resume_step in (None, 1):
        with MetricsWriter(tmp_path, ["wandb"], resume_step=resume_step) as writer:
            writer.write((resume_step or 0) + 1, {"reward/mean": 0.5})
    run_id = (tmp_path / "wandb_id").read_text()
    files = list((tmp_path / "wandb").rglob("*.wandb"))
    assert len(files) == 2 and all(file.name == f"run-{run_id}.wandb" for file in files)


def test_trackio_receives_the_steps(tmp_path):
    pytest.importorskip("trackio")
    # trackio reads its directory when it is imported.
    script = (
        "import sys\n"
        "from agentrl.view.tracking import MetricsWriter\n"
        "with MetricsWriter(sys.argv[1], ['trackio'], project='p', name='r') as writer:\n"
        "    writer.write(1, {'reward/mean': 0.5})\n"
    )
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=environment)
    assert (tmp_path / "trackio" / "p.db").exists()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward/mean"] == 0.5
