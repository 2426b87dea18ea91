"""A real, tiny inference server with vLLM's two token endpoints, for tests.

It samples from a real model with plain forward passes, one token after the other without a cache,
so its log-probabilities are a reference for the engines' cached ones. Defaults it fills in when a
parameter is missing are vLLM's, so a client that relies on them is caught, and so are its limits.
Faults are switched on per request: each entry of `faults` is consumed by one request, after the
probe. `restart` and `update` change the weights the way vLLM shows it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import torch
from aiohttp import web
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from web_servers import listening

CONTROL_ROUTES = (
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
    "/reset_prefix_cache",
)
VOCAB_SIZE = 48
CONTEXT = 96


def make_model(seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A two-layer Qwen3 with random weights, large enough to make its distribution uneven."""
    torch.manual_seed(seed)
    settings: dict = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    return Qwen3ForCausalLM(Qwen3Config(**settings | overrides)).eval()


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt_ids: list[int], token_ids: list[int], temperature: float = 1.0
) -> list[float]:
    """log softmax(logits / temperature) of `token_ids` after `prompt_ids`, in one forward pass."""
    model.eval()
    logits = model(input_ids=torch.tensor([prompt_ids + token_ids])).logits[0].float()
    logprobs = torch.log_softmax(logits[len(prompt_ids) - 1 : -1] / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


@dataclass
class ContractServer:
    model: PreTrainedModel
    scale_out: bool = True
    """Offer the generate endpoint (`--enable-scale-out`)."""
    processed_logprobs: bool = True
    api_key: str | None = None
    weight_version: str | None = None
    """Label in the version spans; None omits them."""
    version_spans: list[dict] | None = None
    faults: list[str] = field(default_factory=list)
    retry_after: str | None = "0.05"

    dev_mode: bool = True
    """Offer the control routes (`VLLM_SERVER_DEV_MODE=1`)."""
    transfer_backend: str | None = "agentrl"
    engine_hangs: bool = False
    num_label_questions: int = field(default=0, init=False)
    vllm_config: dict = field(default_factory=dict)
    """More of what /server_info says."""
    keeps_beside: list[int] | None = None
    """The ids that `sampling_mask` names beside each token; None: the server sends no masks."""
    experts: np.ndarray | None = None
    """(tokens, layers, experts per token): where the tokens of any sequence go, which the server
    then reports as with --enable-return-routed-experts."""
    paused: bool = False
    generation_config: dict = field(default_factory=lambda: {"top_k": 20})
    """The model's own sampling defaults, which the completions endpoint applies."""

    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    """Every body a request sent, with its path under `path`; the probe's too."""
    disconnects: int = 0
    """Requests whose client went away before the answer."""

    def restart(self, model: PreTrainedModel | None = None) -> None:
        """Go back to the weights on disk: vLLM labels those with a word."""
        self.model = model or self.model
        self.weight_version = "default"

    def update(self, version: int, model: PreTrainedModel | None = None) -> None:
        self.model = model or self.model
        self.weight_version = str(version)

    async def serve_weight_info(self, request: web.Request) -> web.Response:
        self.num_label_questions += 1
        if self.engine_hangs:
            await asyncio.sleep(60)
        return web.json_response({"weight_version": self.weight_version or "default"})

    async def serve_generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return _problem(403, "scale-out endpoints are disabled")
        body = await self._read(request)
        parameters = body["sampling_params"]
        return await self._answer(request, body["request_id"], body["token_ids"], parameters)

    async def serve_completion(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        body.setdefault("max_tokens", 16)
        body = self.generation_config | body
        return await self._answer(request, "", body["prompt"], body)

    async def _read(self, request: web.Request) -> dict:
        body = json.loads(await request.read())
        self.bodies.append({"path": request.path} | body)
        return body

    async def _answer(
        self, request: web.Request, request_id: str, prompt_ids: list[int], parameters: dict
    ) -> web.StreamResponse:
        key = request.headers.get("Authorization")
        if self.api_key is not None and key != f"Bearer {self.api_key}":
            return _problem(401, "Unauthorized")
        if not 0 <= parameters.get("temperature", 1.0) <= 2:
            return _problem(400, f"temperature must be in [0, 2], got {parameters['temperature']}")
        if len(prompt_ids) >= CONTEXT:
            return _problem(400, f"maximum context length is {CONTEXT} tokens")
        is_probe = request_id.startswith("probe-") or parameters.get("ignore_eos", False)
        fault = self.faults.pop(0) if self.faults and not is_probe else None
        if fault in ("429", "503"):
            headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            return _problem(int(fault), "too many requests", headers)
        if fault == "500":
            return _problem(500, "EngineCore died")
        if fault == "reset":
            request.transport.abort()
            return web.Response()
        if fault == "hang":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.disconnects += 1
                raise
        if fault == "trickle":
            response = web.StreamResponse(headers={"Content-Length": "100000"})
            await response.prepare(request)
            while True:
                await response.write(b"{")
                await asyncio.sleep(0.05)
        payload = await self._payload(request.path, prompt_ids, parameters, fault)
        text = json.dumps(payload)  # writes a NaN as vLLM's JSON never should: NaN
        if fault == "cut":  # announces more than it sends
            response = web.StreamResponse(headers={"Content-Length": str(len(text))})
            await response.prepare(request)
            await response.write(text[: len(text) // 2].encode())
            request.transport.close()
            return response
        if fault == "malformed":
            text = text[: len(text) // 2]
        return web.Response(text=text, content_type="application/json")

    async def _payload(
        self, path: str, prompt_ids: list[int], parameters: dict, fault: str | None
    ) -> dict:
        tokens, logprobs, reason = await self._sample(prompt_ids, parameters)
        if fault is not None and fault.startswith("abort"):  # abort4: after four tokens
            num_kept = int(fault.removeprefix("abort"))
            if num_kept <= len(tokens):
                tokens, logprobs, reason = tokens[:num_kept], logprobs[:num_kept], "abort"
        shown: list[float | None] = list(logprobs)
        if fault == "nan":
            shown[0] = float("nan")
        if fault == "sentinel":
            shown[0] = -9999.0
        if fault == "null":
            shown[-1] = None
        if fault == "positive":
            shown[0] = 0.5
        if fault == "short":
            shown = shown[:-1]
        if fault == "reason":
            reason = "error"
        if fault is not None and fault.startswith("id"):  # id7: the first token is this one
            tokens = [int(fault.removeprefix("id")), *tokens[1:]]
        choice: dict = {"index": 0, "token_ids": tokens, "finish_reason": reason}
        if path == "/v1/completions":
            choice["logprobs"] = {
                "token_logprobs": shown,
                "tokens": [""] * len(tokens),
                "top_logprobs": self._likeliest(prompt_ids, parameters),
            }
            choice["prompt_token_ids"] = prompt_ids
            if fault == "prompt":
                choice["prompt_token_ids"] = [1, *prompt_ids]
            choice["text"] = ""
        else:
            choice["logprobs"] = {
                "content": [
                    {"token_id": t, "logprob": x, "rank": 1}
                    for t, x in zip(tokens, shown, strict=False)
                ]
            }
            if self.keeps_beside is not None:
                choice["sampling_mask"] = [sorted({t, *self.keeps_beside}) for t in tokens]
            if fault == "mask":
                choice["sampling_mask"] = [[] for _ in tokens]
            if self.version_spans is not None:
                choice["weight_versions"] = self.version_spans
            elif self.weight_version is not None:
                span = {"version": self.weight_version, "start": 0, "end": len(tokens)}
                choice["weight_versions"] = [span]
        if self.experts is not None and tokens:
            file = io.BytesIO()
            np.save(file, self.experts[: len(prompt_ids) + len(tokens) - (fault != "routes")])
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        if fault == "missing":
            del choice["logprobs"]
        if fault == "empty":
            return {"choices": []}
        return {"id": "answer", "choices": [choice]}

    @torch.no_grad()
    def _likeliest(self, prompt_ids: list[int], parameters: dict) -> list[dict[str, float]] | None:
        """Returns the likeliest first tokens, which is all that the tests ask for."""
        if not parameters.get("logprobs"):
            return None
        logits = self.model(input_ids=torch.tensor([prompt_ids])).logits[0, -1]
        logits = logits / (parameters.get("temperature") or 1.0)
        if (top_k := parameters.get("top_k", -1)) > 0:
            logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
        values = torch.log_softmax(logits, dim=-1).topk(parameters["logprobs"])
        pairs = zip(values.indices.tolist(), values.values.tolist(), strict=True)
        return [{f"<{token}>": value for token, value in pairs}]

    def add_control_routes(self, router: web.UrlDispatcher) -> None:
        async def done(request: web.Request) -> web.Response:
            return web.json_response({})

        async def server_info(request: web.Request) -> web.Response:
            backend = self.transfer_backend and {"backend": self.transfer_backend}
            return web.json_response(
                {"vllm_config": {"weight_transfer_config": backend} | self.vllm_config}
            )

        async def is_paused(request: web.Request) -> web.Response:
            return web.json_response({"is_paused": self.paused})

        for route in CONTROL_ROUTES:
            router.add_post(route, done)
        router.add_get("/weight_info", self.serve_weight_info)
        router.add_get("/server_info", server_info)
        router.add_get("/is_paused", is_paused)

    async def serve_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def serve_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": CONTEXT}]})

    async def _sample(
        self, prompt_ids: list[int], parameters: dict
    ) -> tuple[list[int], list[float], str]:
        generator = torch.Generator().manual_seed(parameters.get("seed") or 0)
        temperature = parameters.get("temperature", 1.0)
        divisor = temperature or 1.0
        tokens: list[int] = []
        logprobs: list[float] = []
        for _ in range(min(parameters["max_tokens"], CONTEXT - len(prompt_ids))):
            await asyncio.sleep(0)  # requests take turns, as in a batch
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([prompt_ids + tokens])).logits[0, -1]
            scaled = logits / divisor
            if allowed := parameters.get("allowed_token_ids"):
                mask = torch.full_like(scaled, -torch.inf)
                mask[allowed] = 0.0
                scaled = scaled + mask
            processed = torch.log_softmax(scaled, dim=-1)
            if temperature == 0:
                token = int(processed.argmax())
            else:
                token = int(torch.multinomial(processed.exp(), 1, generator=generator))
            reported = processed if self.processed_logprobs else torch.log_softmax(logits, dim=-1)
            tokens.append(token)
            logprobs.append(float(reported[token]))
            if token in parameters.get("stop_token_ids", ()):
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length"


def _problem(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "code": status}}, status=status, headers=headers
    )


@contextlib.asynccontextmanager
async def running(
    server: ContractServer, port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[ContractServer]:
    """Serve on a port, of loopback unless told otherwise, as `server.url` until the block ends."""
    app = web.Application()
    app.router.add_post("/inference/v1/generate", server.serve_generate)
    app.router.add_post("/v1/completions", server.serve_completion)
    app.router.add_get("/version", server.serve_version)
    app.router.add_get("/v1/models", server.serve_models)
    if server.dev_mode:
        server.add_control_routes(app.router)
    async with listening(app, port, host, handler_cancellation=True) as server.url:
        yield server
