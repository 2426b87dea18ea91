"""`agentrl launch`: what it would start. tests/train/test_launchers.py starts it for real."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.examples import example_file
from agentrl.cli.main import main

RUN = str(Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml")


def shown(capsys, *words: str) -> str:
    assert main(["launch", RUN, *words, "--dry-run"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("place", ["local", "slurm", "ray"])
def test_the_run_file_and_its_options_reach_every_place(capsys, place):
    text = shown(capsys, "--on", place, "--run.seed", "7", "--run.name", "mine")
    assert "--run.seed 7" in text and "run.toml" in text


def test_sizes_reach_the_files_of_the_cluster(capsys):
    assert shown(capsys, "--gpus", "3").startswith("NPROC=3 bash ")
    slurm = shlex.split(
        shown(capsys, "--on", "slurm", "--nodes", "2", "--gpus", "4", "--server-nodes", "1")
    )
    assert slurm[:5] == ["TRAINERS=2", "NPROC=4", "sbatch", "--nodes=3", "--gpus-per-node=4"]
    ray = shlex.split(shown(capsys, "--on", "ray", "--nodes", "2", "--gpus", "4"))
    assert ray[2:4] == [RUN, "8"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2"], "this machine alone"),
        (["--on", "ray", "--server-nodes", "1"], "inference.urls"),
        (["--on", "slurm", "--nodes", "0"], "at least 1"),
        (["--gpus", "0"], "at least 1"),
        (["--on", "slurm", "--server-nodes", "1", "--model.lora.rank", "8"], "has model.lora.rank"),
        (["--on", "k8s"], "Choose from"),
        (
            ["--on", "slurm", "--server-nodes", "1", "--inference.backend", "sglang"],
            "has inference.backend = 'sglang'",
        ),
        (["--on", "slurm", "--rollout.group_sise", "4"], "did you mean rollout.group_size"),
    ],
)
def test_what_cannot_start_is_said_before(capsys, words, said):
    assert main(["launch", RUN, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_place_that_this_machine_does_not_have(tmp_path):
    command = [sys.executable, "-m", "agentrl", "launch", RUN, "--on", "slurm"]
    done = subprocess.run(
        command, env={"PATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "needs 'sbatch', which is not on this machine's PATH" in done.stderr


def test_a_run_that_is_launched_here_is_a_run(tmp_path):
    """Runs the script in a shell: it calls torchrun with the ranks and the file."""
    stand_in = tmp_path / "bash"
    stand_in.write_text(
        f'#!{sys.executable}\nimport os, sys\nprint(os.environ["NPROC"], *sys.argv[1:])'
    )
    stand_in.chmod(0o755)
    command = [sys.executable, "-m", "agentrl", "launch", RUN, "--gpus", "2", "--run.seed=3"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout.split() == [
        "2",
        str(example_file("cluster/torchrun.sh")),
        RUN,
        "--run.seed=3",
    ]
