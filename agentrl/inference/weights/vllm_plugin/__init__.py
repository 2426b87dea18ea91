"""agentrl's plugin for vLLM: a weight-transfer backend for files, and two fixes of the CPU build.

This package runs inside vLLM's processes. It imports only vLLM, torch, safetensors and the standard
library, because agentrl need not be installed there:
`weights.plugin.write_plugin` puts a copy of it on a server's PYTHONPATH. If agentrl is installed
next to vLLM, it registers the plugin, too.

    files      the weight-transfer backend "agentrl"
    rounding   makes layers on a CPU round where transformers' layers do
    idle       makes idle processes on a CPU sleep instead of spin
"""

from __future__ import annotations

import contextlib
import os

BACKEND = "agentrl"

ALIGN_ROUNDING = "AGENTRL_ALIGN_ROUNDING"
"""Environment variable: `1` makes a server on a CPU round 16-bit values where transformers does."""


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
    if os.environ.get(ALIGN_ROUNDING) == "1":
        from .rounding import align_rounding

        align_rounding()
