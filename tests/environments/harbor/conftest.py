"""A Docker engine, the image that the tasks stand on, and the tasks."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import harbor_tasks
import pytest

_ENV = Path(__file__).parents[2] / "env"
sys.path += [str(_ENV), str(Path(__file__).parents[3] / "benchmarks")]
_spec = importlib.util.spec_from_file_location("env_containers", _ENV / "conftest.py")
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
engine_is_there, base_image = _module.engine_is_there, _module.base_image


@pytest.fixture(scope="session")
def task_folder(base_image, tmp_path_factory):
    """A folder with the twelve tasks."""
    if base_image != harbor_tasks.BASE:
        subprocess.run(["docker", "tag", base_image, harbor_tasks.BASE], check=True)
    return harbor_tasks.write(tmp_path_factory.mktemp("harbor"))


@pytest.fixture
def harbor_python(tmp_path, monkeypatch):
    """A Python that has Harbor (AGENTRL_HARBOR_PYTHON, else `make test-harbor`'s) and, in the
    variables, all that Harbor's Docker environment needs."""
    default = "~/.cache/agentrl/harbor/venv/bin/python"
    python = Path(os.environ.get("AGENTRL_HARBOR_PYTHON", default)).expanduser()
    if not (python.parent / "harbor").exists():
        pytest.skip(f"no Harbor beside {python} (AGENTRL_HARBOR_PYTHON)")
    monkeypatch.setenv("HARBOR_TELEMETRY", "off")
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0:
        plugins = tmp_path / "docker" / "cli-plugins"
        plugins.mkdir(parents=True)
        text = (Path(__file__).parent / "docker-compose").read_text()
        (plugins / "docker-compose").write_text(f"#!{python}\n" + text.partition("\n")[2])
        (plugins / "docker-compose").chmod(0o755)
        monkeypatch.setenv("DOCKER_CONFIG", str(plugins.parent))
    return python
