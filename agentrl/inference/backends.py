"""Maps each `inference.backend` that is a server to its client and its program."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.inference.program import Program
from agentrl.inference.remote import ServerEngine
from agentrl.inference.sglang import SGLangEngine
from agentrl.inference.sglang_command import SGLANG
from agentrl.inference.vllm import VLLMEngine
from agentrl.inference.vllm_command import VLLM


@dataclass(slots=True, frozen=True)
class Backend:
    engine: type[ServerEngine]
    program: Program


BACKENDS = {"vllm": Backend(VLLMEngine, VLLM), "sglang": Backend(SGLangEngine, SGLANG)}
