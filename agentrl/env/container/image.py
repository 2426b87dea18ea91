"""`agentrl env build`: an environment in an image.

A build context holds what the image needs and nothing else: the project, if it is one of your own,
and wheels of what is installed from a checkout, agentrl's among them. All else comes from the
package index. `Dockerfile` beside this file builds both.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Plan:
    """What to build, and from what."""

    tag: str
    arguments: dict[str, str] = field(default_factory=dict)
    """Of the Dockerfile."""
    on_top: Path | None = None
    """A folder with a Dockerfile that adds to the image."""


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
    goes to the standard error. An environment whose package has a `Dockerfile` of its own gets what
    that adds to the image (`ARG SERVER_IMAGE`).

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
        plan = _prepare(target, context, wheels or [])
        arguments = plan.arguments
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
        tag = tag or plan.tag
        server_tag = f"{tag.partition(':')[0]}-server" if plan.on_top else tag
        docker_build(server_tag, context, arguments | (build_args or {}), cache=cache)
    if plan.on_top is not None:
        added = {"SERVER_IMAGE": server_tag, **(build_args or {})}
        docker_build(tag, plan.on_top, added, cache=cache)
    return tag


def _prepare(target: str, context: Path, wheels: list[Path]) -> _Plan:
    """Fill the context's folder."""
    added = context / _ADDED
    folder = Path(target)
    if (folder / "pyproject.toml").is_file():
        name, environments = read_project(folder)
        shutil.copytree(folder, context, ignore=_LEFT_OUT, symlinks=True)
        added.mkdir()
        ignored = context / ".dockerignore"
        if ignored.is_file():
            ignored.write_text(f"{ignored.read_text()}\n!{_ADDED}\n!{_ADDED}/**\n")
        plan = _Plan(name, {"AGENTRL": _requirement("agentrl", added, wheels)})
        if (folder / "Dockerfile").is_file():
            return plan
        if not environments:
            raise ConfigError(
                f"{folder / 'pyproject.toml'} offers no environments under '{ENTRY_POINT_GROUP}': "
                "offer one, or write a Dockerfile"
            )
        shutil.copyfile(DOCKERFILE, context / "Dockerfile")
        return plan
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
    arguments = {"PROJECT": "", "ENVIRONMENT": target}
    if entry.dist.name == "agentrl":
        arguments["AGENTRL"] = _requirement("agentrl", added, wheels, extra)
    else:
        arguments["AGENTRL"] = _requirement("agentrl", added, wheels)
        arguments["PROJECT"] = _requirement(entry.dist.name, added, wheels, extra)
    spec = importlib.util.find_spec(entry.value.partition(":")[0].partition(".")[0])
    package = Path(spec.origin).parent if spec and spec.origin else context
    own = package if (package / "Dockerfile").is_file() and package != context else None
    return _Plan(f"agentrl-{target}", arguments, own)


def _requirement(name: str, added: Path, wheels: list[Path], extra: str = "") -> str:
    """What pip is to be told in the image, to get a distribution that is installed here."""
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
    if "dir_info" not in origin:
        return f"{name}{extras}=={distribution.version}"
    source = urllib.request.url2pathname(origin["url"].removeprefix("file://"))
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


_REMEDIES = (
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLCertVerificationError",
        "the package index shows a certificate that the base image does not trust: pass "
        "--pip-cert FILE with your certificate authorities",
    ),
    (
        r"pull access denied|manifest (for .* not found|unknown)|lookup registry|registry-1\.docker"
        r"|Client\.Timeout exceeded while awaiting headers",
        "the base image can't be pulled: name one that is here or can be with --base-image",
    ),
    (
        r"ensurepip is not\s+available|No module named venv|python3: (not found|command not found)",
        "the base image lacks python3 or python3-venv: name another with --base-image",
    ),
    (
        r"No matching distribution found|Temporary failure in name resolution|NewConnectionError",
        "pip found no package or no index: see --pip-index-url, and --wheel for what no index has",
    ),
    (r"no space left on device", "the engine's disk is full: `docker system prune` frees some"),
)


def docker_build(tag: str, context: Path, arguments: dict[str, str], *, cache: bool = True) -> None:
    """Build the image of a folder with a Dockerfile; the builder's output goes to the standard
    error.

    Raises:
        ConfigError: the build failed; says why.
        EnvUnavailable: there is no engine.
    """
    print(f"building {tag}", file=sys.stderr)
    client = connect(timeout_s=3600)
    said = failed = ""
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
            text = line.get("stream") or line.get("error", "")
            print(text, end="", file=sys.stderr, flush=True)
            said = (said + text)[-20_000:]
    if failed:
        remedy = next((text for pattern, text in _REMEDIES if re.search(pattern, said)), None)
        print(file=sys.stderr)
        raise ConfigError(f"{tag} can't be built: {remedy or ' '.join(failed.split())[:300]}")
