"""Builds the image of an environment, for `agentrl env build`.

The build context holds only the project, if it is one of your own, and wheels of the distributions
that are installed from a checkout here, such as agentrl. Everything else comes from the package
index. The `Dockerfile` beside this file builds images of projects and of installed environments.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from agentrl.env.container.engine import connect, engine_errors
from agentrl.env.container.serve import read_project
from agentrl.env.registry import ENTRY_POINT_GROUP
from agentrl.env.scaffold import DOCKERFILE
from agentrl.errors import ConfigError

_ADDED = ".agentrl"
"""Folder that this command adds to a build context; the Dockerfile copies it to /deps."""
_LEFT_OUT = shutil.ignore_patterns(
    ".agentrl",
    ".cache",
    ".env",
    ".git",
    ".hypothesis",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".tox",
    ".venv",
    "__pycache__",
    "node_modules",
    "runs",
    "venv",
    "*.egg-info",
    "*.pyc",
    "*.pyo",
)
"""Files of a project that are left out of the context, whatever its .dockerignore says."""


def build_image(
    target: str,
    *,
    tag: str | None = None,
    base_image: str | None = None,
    wheels: list[Path] | None = None,
    index_url: str | None = None,
    extra_index_url: str | None = None,
    cert: Path | None = None,
    build_args: dict[str, str] | None = None,
    cache: bool = True,
) -> str:
    """Builds the image of an installed environment or of a project, and returns its tag.

    A distribution that is installed from a checkout here is installed in the image from a wheel
    that `pip wheel` makes of it; one that is installed from an index is installed from the index
    again, in the same version. The builder's output goes to standard error.

    Args:
        target: an environment's id, or a project's folder.
        tag: name of the image; None: the project's name, or `agentrl-ID`.
        base_image: image to build on; None: the Dockerfile's default.
        wheels: wheel files to install instead of those from an index or a checkout.
        index_url: package index to use instead of PyPI.
        extra_index_url: package index to use in addition.
        cert: file of certificates to trust while packages are installed; it is not in the finished
            image.
        build_args: further arguments of the Dockerfile.
        cache: reuse layers of earlier builds.

    Raises:
        ConfigError: there is no such environment or file, or the build failed.
        EnvUnavailable: there is no engine.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-build-") as scratch:
        context = Path(scratch, "context")
        name, arguments = _prepare(target, context, wheels or [])
        if base_image:
            arguments["BASE_IMAGE"] = base_image
        if index_url:
            arguments["PIP_INDEX_URL"] = index_url
        if extra_index_url:
            arguments["PIP_EXTRA_INDEX_URL"] = extra_index_url
        if cert is not None:
            try:
                shutil.copyfile(cert, context / _ADDED / "ca.pem")
            except OSError as error:
                raise ConfigError(f"--pip-cert {cert} can't be read: {error.strerror}") from error
            arguments["PIP_CERT"] = "/deps/ca.pem"
        docker_build(tag or name, context, arguments | (build_args or {}), cache=cache)
    return tag or name


def _prepare(target: str, context: Path, wheels: list[Path]) -> tuple[str, dict[str, str]]:
    """Fills the folder `context`, and returns the image's name and the Dockerfile's arguments."""
    added = context / _ADDED
    folder = Path(target)
    if (folder / "pyproject.toml").is_file():
        name, environments = read_project(folder)
        shutil.copytree(folder, context, ignore=_LEFT_OUT, symlinks=True)
        added.mkdir()
        ignored = context / ".dockerignore"
        if ignored.is_file():
            ignored.write_text(f"{ignored.read_text()}\n!{_ADDED}\n!{_ADDED}/**\n")
        if not (folder / "Dockerfile").is_file():
            if not environments:
                raise ConfigError(
                    f"{folder / 'pyproject.toml'} has no entry points in '{ENTRY_POINT_GROUP}': "
                    "add your environment there, or write a Dockerfile"
                )
            shutil.copyfile(DOCKERFILE, context / "Dockerfile")
        return name, {"AGENTRL": _requirement("agentrl-gym", added, wheels)}
    if folder.is_dir() or "/" in target:
        raise ConfigError(
            f"{folder} has no pyproject.toml: give an environment's id, or the folder of a project "
            "(`agentrl env init` makes one)"
        )
    entries = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    entry = next((each for each in entries if each.name == target), None)
    if entry is None or entry.dist is None:
        known = ", ".join(sorted(each.name for each in entries)) or "none"
        raise ConfigError(
            f"no installed environment '{target}'; installed are {known}. For a class in a file, "
            "make a project first (`agentrl env init`)"
        )
    added.mkdir(parents=True)
    shutil.copyfile(DOCKERFILE, context / "Dockerfile")
    extra = target if target in (entry.dist.metadata.get_all("Provides-Extra") or []) else ""
    own = entry.dist.name == "agentrl-gym"
    return f"agentrl-{target}", {
        "ENVIRONMENT": target,
        "AGENTRL": _requirement("agentrl-gym", added, wheels, extra if own else ""),
        "PROJECT": "" if own else _requirement(entry.dist.name, added, wheels, extra),
    }


def _requirement(name: str, added: Path, wheels: list[Path], extra: str = "") -> str:
    """Returns the argument for pip in the image that installs a distribution installed here; a
    wheel of it, if it needs one, is put into the folder `added`."""
    extras = f"[{extra}]" if extra else ""
    distribution = importlib.metadata.distribution(name)
    prefix = f"{re.sub(r'[-_.]+', '_', name).lower()}-"
    given = [each for each in wheels if each.name.lower().startswith(prefix)]
    if given:
        try:
            wheel = Path(shutil.copy(given[0], added))
        except OSError as error:
            raise ConfigError(f"--wheel {given[0]} can't be read: {error.strerror}") from error
        return f"/deps/{wheel.name}{extras}"
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    source = urllib.request.url2pathname(origin.get("url", "").removeprefix("file://"))
    if source.endswith(".whl") and Path(source).is_file():
        return f"/deps/{Path(shutil.copy(source, added)).name}{extras}"
    if "dir_info" not in origin:
        return f"{name}{extras}=={distribution.version}"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(added), source]
    done = subprocess.run(command, capture_output=True, text=True)
    made = next(iter(added.glob(f"{prefix}*.whl")), None)
    if done.returncode or made is None:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise ConfigError(
            f"pip can't make a wheel of {source} ({' '.join(last)[:300]}): make one and pass it "
            "with --wheel"
        )
    return f"/deps/{made.name}{extras}"


def docker_build(tag: str, context: Path, arguments: dict[str, str], *, cache: bool = True) -> None:
    """Builds the image of a folder that has a Dockerfile; the output goes to standard error.

    Raises:
        ConfigError: the build failed.
        EnvUnavailable: there is no engine.
    """
    print(f"building {tag}", file=sys.stderr)
    client = connect(timeout_s=3600)
    failed = ""
    with engine_errors():
        for line in client.api.build(
            path=str(context),
            tag=tag,
            buildargs=arguments,
            nocache=not cache,
            rm=True,
            forcerm=True,
            decode=True,
        ):
            failed = line.get("error", failed)
            print(line.get("stream", ""), end="", file=sys.stderr, flush=True)
    if failed:
        raise ConfigError(
            f"{tag} can't be built: {' '.join(failed.split())[:300]} (the output is above). "
            "--base-image sets another base, which needs python3 and python3-venv; "
            "--pip-index-url, --pip-cert and --wheel set where packages are installed from"
        )
