import asyncio
import os
import signal
import time

import pytest
import torch

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.model.load import resolve_device
from agentrl.train.setup import interruptible, run_directory


def config(tmp_path, **run) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "run": {"name": "r", **run}})


def directory(tmp_path, **run):
    path, lock, _ = run_directory(config(tmp_path, **run))
    lock.close()
    return path


def use(path):
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text('{"step": 1}\n')


def test_a_new_run_never_touches_an_old_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = directory(tmp_path)
    assert first.as_posix() == "runs/r" and (first / "config.toml").exists()
    assert directory(tmp_path) == first, "nothing was in it yet"
    use(first)
    second = directory(tmp_path)
    assert second.as_posix() == "runs/r-2"
    use(second)
    assert directory(tmp_path).as_posix() == "runs/r-3"
    assert directory(tmp_path, resume=True) == second, "the newest that holds a run"


def test_the_line_says_where_and_how_the_old_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    use(directory(tmp_path))
    _, lock, line = run_directory(config(tmp_path))
    lock.close()
    assert "runs/r-2" in line and "--resume --run.dir runs/r" in line and "step 1" in line
    _, lock, line = run_directory(config(tmp_path, resume=True))
    lock.close()
    assert line == "continues runs/r (step 1)"


def test_an_explicit_directory_in_use_is_an_error_unless_resumed(tmp_path):
    with pytest.raises(ConfigError, match="no run under"):
        run_directory(config(tmp_path, dir=str(tmp_path / "d"), resume=True))
    use(tmp_path / "d")
    with pytest.raises(ConfigError, match="--resume"):
        run_directory(config(tmp_path, dir=str(tmp_path / "d")))
    assert directory(tmp_path, dir=str(tmp_path / "d"), resume=True).name == "d"


def test_a_directory_belongs_to_one_process_while_it_lives(tmp_path):
    """Kills the owner of a directory: its surviving children do not stop the run from resuming."""
    run_dir = tmp_path / "d"
    reads, writes = os.pipe()
    other = os.fork()
    if other == 0:
        try:
            kept = run_directory(config(tmp_path, dir=str(run_dir)))
            child = os.fork()
            if child:
                os.write(writes, f"{child}\n".encode())
            time.sleep(60)
            kept[1].close()
        finally:
            os._exit(0)  # whatever happened, this process must not go on with the other tests
    os.close(writes)
    with open(reads) as pipe:
        child = int(pipe.readline())
    try:
        use(run_dir)
        with pytest.raises(ConfigError, match=f"process {other} trains in {run_dir}"):
            directory(tmp_path, dir=str(run_dir), resume=True)
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.kill(child, 0)
        assert directory(tmp_path, dir=str(run_dir), resume=True) == run_dir
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--run\.dir"):
        run_directory(config(tmp_path, dir=str(tmp_path / "file" / "run")))


def test_a_gpu_that_is_not_there_is_one_line():
    if torch.cuda.is_available():
        assert resolve_device("auto").type == "cuda"
    else:
        assert resolve_device("auto").type == "cpu"
        with pytest.raises(ConfigError, match=r"model\.device = 'cpu'"):
            resolve_device("cuda")


def test_the_first_signal_asks_and_the_second_interrupts():
    async def scenario():
        with interruptible() as requested:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(requested.wait(), 5)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()

    previous = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(scenario())
        loop.close()
    finally:
        signal.signal(signal.SIGINT, previous)
