"""agentrl's plugin for vLLM: weights that come as a file, and two repairs of its CPU build.

This package runs inside vLLM's processes. It imports vLLM, torch, safetensors and the standard
library only, because agentrl need not be installed there: `agentrl.sync.plugin.write_plugin` puts
a copy of it on a server's PYTHONPATH, and agentrl installed next to vLLM registers it too.

    files      the weight-transfer backend "agentrl"
    rounding   layers on a CPU round where those of transformers do
    idle       processes on a CPU sleep while they have nothing to do
"""

from __future__ import annotations

import contextlib
import os

BACKEND = "agentrl"

ALIGN_ROUNDING = "AGENTRL_ALIGN_ROUNDING"
"""Environment variable: `1` makes a server on a CPU round 16-bit values where transformers does."""


def register() -> None:
    """The entry point of group `vllm.general_plugins`; called once in every process of vLLM."""
    from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    # A ValueError says it is there already: agentrl is installed here and also on PYTHONPATH.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            BACKEND, f"{__name__}.files", "FileWeightTransferEngine"
        )
    from .idle import sleep_when_idle

    sleep_when_idle()
    if os.environ.get(ALIGN_ROUNDING) == "1":
        from .rounding import align_rounding

        align_rounding()
