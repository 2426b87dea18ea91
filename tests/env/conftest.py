"""Real servers on loopback ports; a Docker engine and a base image for tests marked `docker`.

Without an engine such a test is skipped with the reason; with AGENTRL_REQUIRE_DOCKER=1 it fails.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import sample_envs  # noqa: F401  (registers what the tests serve)
from env_servers import running

BASE_IMAGE = "python:3.12-slim"
OWN_BASE_IMAGE = "agentrl/test-base:1"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"


@pytest.fixture(scope="module")
def served():
    """URL of a server with the sample environments, shared by a module's tests."""
    with running(["hello", "workshop", "free-form"]) as (url, _):
        yield url


@pytest.fixture
def serve_environments():
    """`with serve_environments([...], token=...) as (url, manager)`."""
    return running


def _without(reason):
    if os.environ.get("AGENTRL_REQUIRE_DOCKER") == "1":
        pytest.fail(f"AGENTRL_REQUIRE_DOCKER=1, but {reason}")
    pytest.skip(reason)


def _succeeds(*command, timeout_s=600):
    try:
        return (
            subprocess.run(command, capture_output=True, timeout=timeout_s, check=False).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


@pytest.fixture(scope="session")
def engine_is_there():
    if shutil.which("docker") is None:
        _without("the `docker` command is not on PATH")
    if not _succeeds("docker", "info", timeout_s=60):
        _without("no Docker engine answers")


@pytest.fixture(scope="session")
def base_image(engine_is_there):
    """A local image with python3, python3-venv and ca-certificates: AGENTRL_TEST_BASE_IMAGE, one
    from a registry, or one that debootstrap makes, which is kept."""
    given = os.environ.get("AGENTRL_TEST_BASE_IMAGE")
    if given:
        return given
    for name in (OWN_BASE_IMAGE, BASE_IMAGE):
        if _succeeds("docker", "image", "inspect", name):
            return name
    if _succeeds("docker", "pull", BASE_IMAGE, timeout_s=300):
        return BASE_IMAGE
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        _without("no registry can be reached, and debootstrap, as root, is not to be had either")
    with tempfile.TemporaryDirectory(prefix="agentrl-base-") as scratch:
        root = Path(scratch, "root")
        made = _succeeds(
            "debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root, MIRROR
        )
        if not made:
            _succeeds("umount", root / "proc")  # a killed debootstrap leaves it mounted
            _without(f"debootstrap from {MIRROR} failed")
        with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
            subprocess.run(["docker", "import", "-", OWN_BASE_IMAGE], stdin=tar.stdout, check=True)
    return OWN_BASE_IMAGE
