"""Installs the weight-transfer backend where a vLLM server finds it."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

MODULE = "agentrl_vllm_plugin"


def write_plugin(directory: Path) -> Path:
    """Writes the backend to `directory` as a package with the metadata of an installed one.

    vLLM finds plugins by the metadata of installed packages, which Python also reads from
    directories on PYTHONPATH. May be called repeatedly.

    Returns:
        `directory`, to be put on the PYTHONPATH of the server's process.
    """
    metadata = directory / f"{MODULE}-{version('agentrl-gym')}.dist-info"
    package = directory / MODULE
    for folder in (metadata, package):
        folder.mkdir(parents=True, exist_ok=True)
    for source in files("agentrl.inference.weights.vllm_plugin").iterdir():
        if source.name.endswith(".py"):
            (package / source.name).write_text(source.read_text("utf-8"), encoding="utf-8")
    name = MODULE.replace("_", "-")
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version('agentrl-gym')}\n",
        encoding="utf-8",
    )
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nagentrl = {MODULE}:register\n", encoding="utf-8"
    )
    return directory
