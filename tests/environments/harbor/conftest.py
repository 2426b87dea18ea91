"""A Docker engine, the image that the tasks stand on, and the tasks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import harbor_tasks
import pytest

_ENV = Path(__file__).parents[2] / "env"
sys.path.append(str(_ENV))
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
