"""Starts an image in a hardened container to check its environment, and checks the image itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from agentrl.env.check.subject import CheckFailed, CheckSkipped, Subject
from agentrl.env.container.engine import connect, engine_errors
from agentrl.env.container.serve import (
    Server,
    find_image,
    start_server,
    stop_servers,
    wait_until_healthy,
)

Requirement = tuple[str, bool, str, str]
"""One requirement on an image: name, True if it is met, what was seen, and the remedy."""

STOP_S = 10.0
"""Seconds that engines wait between SIGTERM and SIGKILL."""
_HEALTH_TIMEOUT_S = 45.0

# Runs in the container, with the server's user and rights, and prints one JSON object. It sleeps
# first, because `exec_run` loses output written before it has read the head of the engine's answer.
_LOOK = r"""
import glob, json, os, sys, time
time.sleep(1)
status = dict(
    line.split(':\t', 1) for line in open('/proc/self/status').read().splitlines() if ':\t' in line
)
writable = []
for folder in ('/', '/etc', '/home', '/opt', '/root', '/tmp', '/usr', '/var/tmp', sys.prefix):
    path = os.path.join(folder, 'agentrl-check')
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        os.unlink(path)
        writable.append(folder)
    except OSError:
        pass
names = ('.env', '.git', '.netrc', '.pypirc', '.git-credentials', 'id_rsa', 'id_ed25519',
         '.docker', '.aws', '.ssh', 'pip.conf', 'docker.sock')
secret = []
for top in ('/app', '/home', '/opt', '/root', '/run', '/src', '/srv', '/deps', '/tmp'):
    for parent, folders, files in os.walk(top):
        folders[:] = [each for each in folders if each != 'proc']
        secret += [os.path.join(parent, each) for each in folders + files if each in names]
for path in glob.glob('/opt/*/lib/python3*/site-packages/*.dist-info/direct_url.json'):
    url = json.load(open(path)).get('url', '')
    if url.startswith('file:///') and not url.startswith(('file:///deps/', 'file:///src')):
        secret.append(path + ': ' + url)
print(json.dumps({
    'groups': [os.getuid(), os.getgid(), *os.getgroups()], 'writable': writable, 'secret': secret,
    'rights': [status[each].strip() for each in ('CapEff', 'CapBnd', 'NoNewPrivs')],
}))
"""
_SECRET_NAME = re.compile(r"token|secret|password|passwd|api_?key|credential", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    r"://[^\s/@:]+:[^\s/@]+@|\b(?:hf|ghp|gho|sk)[_-][A-Za-z0-9]{16,}|AKIA[A-Z0-9]{12,}"
)


@contextlib.contextmanager
def served_image(name: str) -> Iterator[tuple[str, str]]:
    """Runs an image in a hardened container while in the context, and yields its URL and token.

    Args:
        name: an environment's id, a project's folder, or an image, as for `agentrl env run`.

    Raises:
        ConfigError: there is no such image, or its server does not start.
        EnvUnavailable: there is no Docker engine.
    """
    token = secrets.token_urlsafe(24)
    server = start_server(find_image(name), token=token)
    try:
        wait_until_healthy(server)
        yield server.url, token
    finally:
        stop_servers([server])


async def check_container(subject: Subject) -> str:
    """The image runs without root, without capabilities and on a read-only file system, contains no
    secrets, has a health check that succeeds, and ends within 10 s of SIGTERM."""
    if subject.image is None:
        raise CheckSkipped("not an image")
    requirements = await asyncio.to_thread(try_image, subject.image)
    broken = [(f"{name}: {seen}", remedy) for name, met, seen, remedy in requirements if not met]
    if broken:
        raise CheckFailed(*map("; ".join, zip(*broken, strict=True)))
    return "; ".join(f"{name}: {seen}" for name, _, seen, _ in requirements)


def try_image(image: str) -> list[Requirement]:
    """Runs an image in a hardened container and checks each requirement.

    Args:
        image: an environment's id, a project's folder, or an image, as for `agentrl env run`.

    Raises:
        ConfigError: there is no such image, or its server does not start.
        EnvUnavailable: there is no Docker engine.
    """
    name = find_image(image)
    server = start_server(name, token=secrets.token_urlsafe(24), role="check")
    try:
        seconds = wait_until_healthy(server)
        with engine_errors():
            made = connect().images.get(name)
            history = [str(layer["CreatedBy"]) for layer in made.history()]
            output = server.container.exec_run(["python3", "-c", _LOOK]).output
        assert isinstance(output, bytes)
        return [
            ("starts", True, f"answers after {seconds:.1f} s", ""),
            *_inside(json.loads(output), made.attrs["Config"], history),
            _token(server),
            _health(server, made.attrs["Config"]),
            _stop(server),
        ]
    finally:
        stop_servers([server], drain_s=1)


def _inside(
    inside: dict[str, Any], config: dict[str, Any], history: list[str]
) -> list[Requirement]:
    user, group, *_ = inside["groups"]
    effective, bounding, no_new = inside["rights"]
    secret = []
    for each in config.get("Env") or []:
        name, _, value = each.partition("=")
        if _SECRET_TEXT.search(each) or (_SECRET_NAME.search(name) and value):
            secret.append(f"variable {name}")
    if any(_SECRET_TEXT.search(command) for command in history):
        secret.append("a credential in the image's history")
    secret += inside["secret"]
    return [
        (
            "user",
            0 not in inside["groups"],
            f"user {user}, group {group}",
            "end the Dockerfile with USER 10001:10001",
        ),
        (
            "read-only file system",
            inside["writable"] == ["/tmp"],
            f"writable: {', '.join(inside['writable']) or 'nothing'}",
            "run it with --read-only and --tmpfs /tmp",
        ),
        (
            "capabilities",
            (int(effective, 16), int(bounding, 16), no_new) == (0, 0, "1"),
            f"effective {effective}, bounding {bounding}, no new privileges {no_new}",
            "run it with --cap-drop ALL --security-opt no-new-privileges",
        ),
        (
            "no secrets",
            not secret,
            ", ".join(secret[:5]) or "no credentials, keys or paths of the building machine",
            "name them in .dockerignore, pass credentials when the container runs, and use build "
            "arguments only in the first stage",
        ),
    ]


def _token(server: Server) -> Requirement:
    status = 200
    try:
        urllib.request.urlopen(f"{server.url}/v1/envs", timeout=5).close()
    except urllib.error.HTTPError as error:
        status = error.code
    remedy = "serve with `agentrl env serve`, which requires AGENTRL_ENV_TOKEN"
    return "token", status in (401, 403), f"a call without the token gets {status}", remedy


def _health(server: Server, config: dict[str, Any]) -> Requirement:
    remedy = "add a HEALTHCHECK to the Dockerfile that asks the server's own port with python3"
    if (config.get("Healthcheck") or {}).get("Test") in (None, [], ["NONE"]):
        return "health check", False, "the image has none", remedy
    deadline = time.monotonic() + _HEALTH_TIMEOUT_S
    while True:
        server.running()  # refreshes the container's state
        health = server.container.attrs["State"]["Health"]
        if health["Status"] == "healthy":
            return "health check", True, "healthy", ""
        if health["Status"] == "unhealthy" or time.monotonic() > deadline:
            log = health.get("Log") or [{"Output": "it has not run"}]
            return "health check", False, log[-1]["Output"].strip()[-200:], remedy
        time.sleep(0.3)


def _stop(server: Server) -> Requirement:
    started = time.monotonic()
    with engine_errors():
        server.container.kill("TERM")
    while (running := server.running()) and time.monotonic() - started < STOP_S:
        time.sleep(0.1)
    seen = f"{'still running' if running else 'ended'} after {time.monotonic() - started:.1f} s"
    remedy = "start the server with `exec`, so that it gets the signal instead of the shell"
    return "SIGTERM", not running, seen, remedy
