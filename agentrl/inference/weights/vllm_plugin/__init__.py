"""agentrl's plugin for vLLM: a weight-transfer backend for files, and a fix of the CPU build.

This package runs inside vLLM's processes. It imports only vLLM, torch, safetensors and the standard
library, because agentrl need not be installed there:
`weights.plugin.write_plugin` puts a copy of it on a server's PYTHONPATH. If agentrl is installed
next to vLLM, it registers the plugin, too.

    files   the weight-transfer backend "agentrl"
    idle    makes idle processes on a CPU sleep instead of spin
"""

from __future__ import annotations

import contextlib

BACKEND = "agentrl"


def register() -> None:
    """Registers the plugin; vLLM calls it once per process (group `vllm.general_plugins`)."""
    from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    # A ValueError means that it is already registered: agentrl is both installed and on PYTHONPATH.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            BACKEND, f"{__name__}.files", "FileWeightTransferEngine"
        )
    from .idle import sleep_when_idle

    sleep_when_idle()
