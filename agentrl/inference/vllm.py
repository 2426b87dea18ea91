"""Client of vLLM servers: `agentrl.inference.remote` over one of vLLM's two token endpoints."""

from __future__ import annotations

import uuid

from agentrl.errors import InferenceError
from agentrl.inference.remote import FIRST_TOKEN, ServerEngine
from agentrl.inference.servers import Server
from agentrl.inference.token_api import (
    COMPLETIONS,
    GENERATE,
    Endpoint,
    SamplingFields,
    read_sampled,
    request_body,
)
from agentrl.inference.vllm_images import FAMILIES


class VLLMEngine(ServerEngine):
    name = "vLLM"
    label_path = "/weight_info"
    sampled_logprobs = "with --logprobs-mode processed_logprobs"
    image_families = FAMILIES

    async def _ask_probe(self, server: Server) -> tuple[Endpoint, bool]:
        """Allows a single token, whose probability in the sampled distribution is then 1: its
        log-probability is 0 unless it is that of the raw logits. See `ServerEngine._ask_probe`."""
        sampling = SamplingFields(
            max_tokens=4, temperature=1.0, ignore_eos=True, allowed_token_ids=[FIRST_TOKEN]
        )
        for endpoint in (GENERATE, COMPLETIONS):
            body = request_body(
                endpoint,
                self._model,
                [FIRST_TOKEN],
                sampling,
                request_id=f"probe-{uuid.uuid4().hex}",
            )
            answer = await self._post(server, endpoint, body)
            if answer.status == 200:
                break
            if answer.status not in (403, 404, 405):
                raise self._refused_probe(server, endpoint, answer)
        else:
            raise InferenceError(
                f"{server.url} offers neither {GENERATE} nor {COMPLETIONS}; is it a vLLM server?"
            )
        sampled = read_sampled(
            endpoint, server.url, answer.body, [FIRST_TOKEN], sampling.max_tokens
        )
        return endpoint, min(sampled.logprobs) < -1e-3
