"""The same run by every place of `agentrl launch` that runs here: the same metrics.

`make test-cluster` runs it where Ray is. Slurm is a real one, of two nodes that are this machine:
its daemons need root (Debian: apt install slurm-wlm munge).
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from test_loop import QUICKSTART, contents, untimed

from agentrl.view.tracking import read_metrics

START = [sys.executable, "-m", "agentrl", "launch"]
SMALL = [
    *("--run.num_steps", "3", "--run.save_every", "2"),
    *("--rollout.groups_per_step", "4", "--rollout.group_size", "4"),
    *("--train.token_budget", "256", "--train.num_minibatches", "2"),
]
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def environment(**variables: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}


def launch(command: list, **variables: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        env=environment(**variables),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("torchrun") / "run"
    launch([*START, QUICKSTART, "--on", "local", "--gpus", "2", "--run.dir", run_dir, *SMALL])
    return run_dir


def require_same(run_dir: Path, other: Path) -> None:
    assert len(read_metrics(other)) == 3
    for mine, its in zip(untimed(read_metrics(run_dir)), untimed(read_metrics(other)), strict=True):
        assert mine == its
    assert contents(run_dir) == contents(other), "other tokens"


# Slurm --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of this machine alone: two nodes with two "GPUs" each. Yields its SLURM_CONF."""
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"no Slurm: {', '.join(missing) or 'its daemons need root'}")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # munge trusts no folder that is closed to others
    state = folder / "state"
    state.mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    ports = []
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    nodes = "\n".join(
        # By these names they reach each other.
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} "
        "CPUs=2 Gres=gpu:2"
        for name, port in zip((socket.gethostname(), "localhost"), ports[1:], strict=True)
    )
    conf = folder / "slurm.conf"
    conf.write_text(
        f"""ClusterName=test
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
StateSaveLocation={state}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""
    )
    files = ("--key-file=munge.key", "--socket=munge.socket", "--pid-file=munged.pid")
    logs = ("--log-file=munged.log", "--seed-file=munge.seed")
    absolute = [option.replace("=", f"={folder}/", 1) for option in (*files, *logs)]
    commands = [
        ["munged", "--foreground", "--force", *absolute],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", socket.gethostname()],
        ["slurmd", "-D", "-N", "localhost"],
    ]
    daemons = []
    try:
        for command in commands:
            with (folder / "daemons.log").open("a") as log:
                daemons.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=log, env=environment(SLURM_CONF=str(conf))
                    )
                )
            time.sleep(1)
        deadline = time.monotonic() + 60
        while launch(["sinfo", "-h", "-o", "%T %D"], SLURM_CONF=str(conf)).strip() != "idle 2":
            assert time.monotonic() < deadline, (folder / "daemons.log").read_text()[-4000:]
            time.sleep(0.5)
        yield str(conf)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


@pytest.mark.parametrize("shape", ["one node", "two nodes"])
def test_a_slurm_job_does_what_torchrun_does(slurm, by_torchrun, tmp_path, shape):
    nodes, gpus = ("1", "2") if shape == "one node" else ("2", "1")
    log = tmp_path / "job.log"
    job = [*START, QUICKSTART, "--on", "slurm", "--nodes", nodes, "--gpus", gpus]
    variables = {"SBATCH_WAIT": "1", "SBATCH_OUTPUT": str(log), "SLURM_CONF": slurm}
    try:
        launch([*job, "--run.dir", tmp_path / "run", *SMALL], **variables)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from None
    require_same(tmp_path / "run", by_torchrun)


# Ray Train ----------------------------------------------------------------------------------------


def test_workers_of_ray_train_do_what_torchrun_does(by_torchrun, tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip('no Ray: pip install "ray[train]", or make test-cluster')
    command = [*START, QUICKSTART, "--on", "ray", "--gpus", "2"]
    # pytest's folders have names too long for Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
        launch([*command, "--run.dir", tmp_path / "run", *SMALL], **variables)
    require_same(tmp_path / "run", by_torchrun)
