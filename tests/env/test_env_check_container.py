"""The check of images, on real containers: small servers that are broken in one way each."""

import asyncio
import subprocess

import pytest

from agentrl.env.check import run_check
from agentrl.env.check.subject import Subject
from agentrl.env.image import docker, hardened_flags
from agentrl.env.protocol import EnvInfo

pytestmark = pytest.mark.docker

SERVE = "python3 -m http.server 8700 --directory /tmp"
CHECK = (
    "HEALTHCHECK --interval=1s --timeout=10s --start-period=1s --retries=3 CMD python3 -c "
    "\"import urllib.request; urllib.request.urlopen('http://127.0.0.1:8700')\""
)
GOOD = f'USER 10001:10001\n{CHECK}\nCMD ["/bin/sh", "-c", "exec {SERVE}"]'
BROKEN = {
    "root": (GOOD.replace("USER 10001:10001", "USER 0"), "runs as root"),
    "no health check": (GOOD.replace(CHECK, ""), "no health check"),
    "health check of another port": (GOOD.replace("1:8700')", "1:8701')"), "unhealthy"),
    "deaf to SIGTERM": (GOOD.replace("exec ", "trap '' TERM; "), "still running 10 s after"),
}


def check(base_image, dockerfile, *flags):
    """Build, run and check an image; nothing of it stays."""
    tag = "agentrl-check-test"
    subprocess.run(
        ["docker", "build", "--quiet", "--tag", tag, "-"],
        input=f"FROM {base_image}\n{dockerfile}\n".encode(),
        capture_output=True,
        check=True,
    )
    container = docker("run", "--detach", *flags, tag)
    try:
        info = EnvInfo("none", "", [], {}, {}, 1, False)
        subject = Subject("none", {}, info, url="http://127.0.0.1:1", container_id=container)
        return asyncio.run(run_check("container", subject))
    finally:
        docker("rm", "--force", container)
        docker("image", "rm", "--force", tag)


def test_a_good_image_passes(base_image):
    result = check(base_image, GOOD, *hardened_flags())
    assert result.status == "pass", result
    assert "user 10001" in result.detail


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_image_fails(base_image, what):
    dockerfile, says = BROKEN[what]
    result = check(base_image, dockerfile, *hardened_flags())
    assert result.status == "fail" and says in result.detail, result
    assert result.remedy


def test_a_file_system_that_can_be_changed_fails(base_image):
    result = check(base_image, f"RUN mkdir -p /opt && chmod 777 /opt\n{GOOD}")
    assert result.status == "fail" and "/opt" in result.detail
