"""`agentrl env build`: an environment in an image.

A build context holds what the image needs and nothing else: the project, if it is one of your own,
and wheels of what is installed from a checkout, agentrl's among them. All else comes from the
package index. `Dockerfile` beside this file builds both.
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
"""Folder of a build context with what this command adds; the Dockerfile copies it to /deps."""
_LEFT_OUT = shutil.ignore_patterns(
    *(".agentrl", ".cache", ".env", ".git", ".hypothesis", ".mypy_cache", ".pytest_cache"),
    *(".ruff_cache", ".tox", ".venv", "__pycache__", "node_modules", "runs", "venv"),
    *("*.egg-info", "*.pyc", "*.pyo"),
)
"""Of a project, whatever its .dockerignore says."""


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
    """Build the image of an installed environment (by id) or of the project in a folder; its tag.

    What is installed from a checkout goes in as a wheel that `pip wheel` makes of it; what is
    installed from an index is installed from it again, in the same version. The builder's output
    goes to the standard error.

    Args:
        base_image: None: the Dockerfile's own.
        wheels: files that are installed in place of what stands on an index or in a checkout.
        cert: trusted while packages are installed; it is not in the finished image.

    Raises:
        ConfigError: there is no such environment, or the build failed; says why.
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
    """Fill the context's folder; the image's name, and the arguments of its Dockerfile."""
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
                    f"{folder / 'pyproject.toml'} offers no environments under "
                    f"'{ENTRY_POINT_GROUP}': offer one, or write a Dockerfile"
                )
            shutil.copyfile(DOCKERFILE, context / "Dockerfile")
        return name, {"AGENTRL": _requirement("agentrl-gym", added, wheels)}
    if folder.is_dir() or "/" in target:
        raise ConfigError(
            f"{folder} has no pyproject.toml: name an environment's id, or a project such as "
            "`agentrl env init` writes"
        )
    entries = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    entry = next((each for each in entries if each.name == target), None)
    if entry is None or entry.dist is None:
        known = ", ".join(sorted(each.name for each in entries)) or "none"
        raise ConfigError(
            f"no installed environment '{target}'; there are {known}. A class in a file has no "
            "image of its own: make it a project (`agentrl env init`)"
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
    """Returns pip's argument that installs, in the image, a distribution that is installed here."""
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
            f"pip can't make a wheel of {source} ({' '.join(last)[:300]}): make one and name it "
            "with --wheel"
        )
    return f"/deps/{made.name}{extras}"


def docker_build(tag: str, context: Path, arguments: dict[str, str], *, cache: bool = True) -> None:
    """Build the image of a folder with a Dockerfile; the builder's output goes to the standard
    error.

    Raises:
        ConfigError: the build failed; says why.
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
            f"{tag} can't be built: {' '.join(failed.split())[:300]} (what led to it is above). "
            "--base-image names another base, with python3 and python3-venv; --pip-index-url, "
            "--pip-cert and --wheel say where packages come from and whom to trust for them"
        )
