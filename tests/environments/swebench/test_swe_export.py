"""Exported tasks: Harbor and agentrl read them, and their tests pay the fix alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from swe_fixtures.build import FIXTURES, make_row

from agentrl.cli.main import main
from agentrl_harbor.task import load_tasks

pytestmark = pytest.mark.slow  # importing the harness takes seconds
VENV = Path(os.environ.get("AGENTRL_HARBOR_VENV", "~/.cache/agentrl/harbor/venv")).expanduser()
HARBOR_READS = """
import sys
from harbor.models.task.task import Task

task = Task(sys.argv[1])
assert Task.is_valid_dir(sys.argv[1])
print(task.config.environment.docker_image, task.instruction.split()[0], end="")
"""


@pytest.fixture
def exported(tmp_path):
    """The task of an instance, its repository, and the command that installs it."""
    repository = tmp_path / "testbed"
    row, setup = make_row(FIXTURES / "ledger", repository)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    out = tmp_path / "tasks"
    assert main(["swebench", "export", "--dataset", str(rows), "--out", str(out)]) == 0
    assert main(["swebench", "export", "--dataset", str(rows), "--out", str(out)]) == 2
    return out / row["instance_id"], repository, setup


def test_agentrl_reads_the_task(exported):
    folder, _, _ = exported
    (task,) = load_tasks(folder.parent)
    assert task.id == "agentrl__ledger-1"
    assert task.table.environment.docker_image == "agentrl/swebench-fixture:agentrl-ledger-1"
    assert task.steps[0].instruction.startswith("Expenses count as income")
    assert task.steps[0].solution is not None and task.steps[0].verifier.timeout_sec == 1800.0
    for path in (folder / "tests").rglob("*"):
        assert path.is_dir() or "Expenses count" not in path.read_text()


def test_the_fix_is_paid_and_nothing_else(exported, tmp_path):
    """On this machine: the container's paths in the scripts are others."""
    folder, repository, setup = exported
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("tests/test.sh", "tests/eval.sh", "solution/solve.sh"):
        text = (folder / name).read_text().replace(setup, "true")
        text = text.replace("/testbed", str(repository)).replace("/logs/verifier", str(logs))
        (folder / name).write_text(text)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(repository),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }

    def reward() -> str:
        subprocess.run([folder / "tests/test.sh"], env=environment, check=True)
        return (logs / "reward.txt").read_text()

    assert reward() == "0"
    subprocess.run([folder / "solution/solve.sh"], env=environment, check=True)
    assert reward() == "1"
    assert "6 failed" not in (logs / "eval.log").read_text()
    (repository / "ledger/amounts.py").write_text("raise SystemExit\n")
    assert reward() == "0"


@pytest.mark.parametrize(
    "column, said",
    [
        ({"image_assets": '{"test_patch": []}'}, "such as agentrl__ledger-1"),
        ({"log_parser": "parse_log_other"}, "agentrl__ledger-1: the harness has no log parser"),
    ],
)
def test_what_could_not_be_graded_is_refused(exported, tmp_path, capsys, column, said):
    row = json.loads((tmp_path / "rows.jsonl").read_text()) | column
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    out = tmp_path / "other"
    command = ["swebench", "export", "--dataset", str(tmp_path / "rows.jsonl"), "--out", str(out)]
    assert main(command) != 0
    assert said in capsys.readouterr().err and not out.exists()


@pytest.mark.skipif(not (VENV / "bin" / "harbor").exists(), reason=f"no harbor in {VENV}")
def test_harbor_reads_the_task(exported):
    folder, _, _ = exported
    environment = os.environ | {"HARBOR_TELEMETRY": "off", "DO_NOT_TRACK": "1"}
    command = [VENV / "bin" / "python", "-c", HARBOR_READS, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "agentrl/swebench-fixture:agentrl-ledger-1 Expenses"
