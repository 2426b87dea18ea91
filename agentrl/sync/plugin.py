"""Puts the weight-transfer backend where a vLLM server finds it."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

MODULE = "agentrl_vllm_plugin"


def write_plugin(directory: Path) -> Path:
    """Write the backend as a module with the metadata of an installed package.

    vLLM finds plugins by the metadata of installed packages, which Python also reads from
    directories on PYTHONPATH. Writing twice is harmless.

    Returns:
        `directory`, for the PYTHONPATH of the server's process.
    """
    metadata = directory / f"{MODULE}-{version('agentrl')}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    source = files("agentrl.sync").joinpath("vllm_plugin.py").read_text(encoding="utf-8")
    (directory / f"{MODULE}.py").write_text(source, encoding="utf-8")
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {MODULE.replace('_', '-')}\nVersion: {version('agentrl')}\n",
        encoding="utf-8",
    )
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nagentrl = {MODULE}:register\n", encoding="utf-8"
    )
    return directory
