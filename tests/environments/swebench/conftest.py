"""A Docker engine with the fixture instances, for the tests that need one (marker `docker`).

Without an engine such a test is skipped with the reason. With AGENTRL_REQUIRE_DOCKER=1, which a
machine that has an engine should set, it fails instead, so that no skip passes unseen.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from agentrl.errors import AgentRLError

# The fixture instances, the attack tables and the benchmarks are not in the package.
_BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path[:0] = [str(_BENCHMARKS), str(_BENCHMARKS / "swe_attacks")]


def _without_engine(reason):
    if os.environ.get("AGENTRL_REQUIRE_DOCKER") == "1":
        pytest.fail(f"AGENTRL_REQUIRE_DOCKER=1, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def engine():
    """A client of the engine."""
    from agentrl.env.container.engine import connect

    if shutil.which("docker") is None:
        _without_engine("the `docker` command is not on PATH")
    try:
        client = connect(timeout_s=30)
    except AgentRLError as error:
        _without_engine(str(error))
    yield client
    client.close()


@pytest.fixture(scope="session")
def fixture_dir(engine, tmp_path_factory):
    """Folder with dataset.jsonl, gold.jsonl and empty.jsonl; the images are built."""
    from swe_fixtures.build import build

    out = tmp_path_factory.mktemp("fixtures")
    try:
        build(out)
    except AgentRLError as error:
        _without_engine(
            f"the fixture images can't be built ({error}); `python "
            "benchmarks/swe_fixtures/build.py --out DIR --debootstrap` needs no registry"
        )
    return out


@pytest.fixture(scope="session")
def fixture_instances(fixture_dir):
    """The instances by id."""
    from agentrl_swebench.dataset import load_instances

    return {each.instance_id: each for each in load_instances(fixture_dir / "dataset.jsonl")}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    """The infrastructure is tried again once, and soon."""
    from agentrl_swebench import grade

    monkeypatch.setattr(grade, "BACK_OFF_S", (3.0,))
