"""A stand-in for vLLM's control routes that keeps vLLM's rules and computes real log-probs.

It loads the pushed file into a model of its own, so a wrong file, label or order of calls shows in
what it answers. Failures are scripted per route.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from web_servers import listening

from agentrl.inference.weights.push import ServerWeightSync
from agentrl.inference.weights.transfer import FileTransfer, Transfer


def tiny_model(seed: int = 0, *, tied: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


def perturb(model: torch.nn.Module, seed: int, scale: float = 0.05) -> None:
    """The next version of a policy, as an optimizer step would make it: in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(scale * noise.to(parameter.dtype))


class OneFile(FileTransfer):
    """Sends this file, whatever it is."""

    def __init__(self, path: Path, directory: Path | None = None) -> None:
        self._path = path
        self._directory = directory or path.parent


class ControlServer:
    random_model = staticmethod(tiny_model)
    """What it has until it is sent weights, by a seed."""

    def __init__(self) -> None:
        self.model = self.random_model(seed=99)
        self.calls: list[str] = []
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.initialised: str | None = None
        self.paused = False
        self.open_update = False
        self.version = "default"
        self.num_updates = 0
        self.answer: dict[str, Callable] = {}
        """Route -> coroutine function called instead of the route; None goes on to the route."""
        self.after_load: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict
        """Spoils what was read from the file."""
        self.offers_generate = True
        self.url = ""

    def restart(self) -> None:
        """Forgets everything, as a new process of the server has."""
        self.model = self.random_model(seed=99)
        self.initialised, self.paused, self.open_update = None, False, False
        self.version = "default"

    async def handle(self, request: web.Request) -> web.Response:
        route = request.path
        self.calls.append(route + (f"?{request.query_string}" if request.query_string else ""))
        self.headers.append(dict(request.headers))
        text = await request.text()
        body = json.loads(text) if text else {}
        self.bodies.append(body)
        if route in self.answer:
            scripted = await self.answer[route]()
            if scripted is not None:
                return scripted
        method = getattr(self, "do_" + route.strip("/").replace("/", "_"), None)
        if method is None:
            return web.Response(status=404)
        return method(body)

    def do_init_weight_transfer_engine(self, body) -> web.Response:
        self.initialised = body["init_info"]["directory"]
        return web.json_response({})

    def do_weight_info(self, body) -> web.Response:
        return web.json_response({"weight_version": self.version})

    def do_health(self, body) -> web.Response:
        return web.Response()

    def do_pause(self, body) -> web.Response:
        self.paused = True
        return web.json_response({"status": "paused"})

    def do_resume(self, body) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    def do_start_weight_update(self, body) -> web.Response:
        if self.initialised is None:
            return error(500, "no weight directory")
        if self.open_update:
            return error(500, "start_weight_update called while a weight update is already active.")
        self.open_update = True
        return web.json_response({})

    def do_update_weights(self, body) -> web.Response:
        if not (self.paused and self.open_update):
            return error(500, "the worker died: update without pause or start")
        path = Path(body["update_info"]["path"])
        if not path.is_relative_to(self.initialised or "/nowhere"):
            return error(500, f"{path} is not in the weight directory")
        tensors = self.after_load(load_file(path))
        self.model.load_state_dict(tensors, strict=False)
        self.num_updates += 1
        return web.json_response({})

    def do_finish_weight_update(self, body) -> web.Response:
        if not self.open_update:
            return error(500, "finish_weight_update called without a matching start_weight_update.")
        self.open_update = False
        self.version = body.get("weight_version", self.version)
        return web.json_response({})

    def do_inference_v1_generate(self, body) -> web.Response:
        if not self.offers_generate:
            return web.Response(status=403)
        prompt, token_id, logprob = self.sample(body["token_ids"], body["sampling_params"])
        choice = {
            "token_ids": [token_id],
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": token_id, "logprob": logprob}]},
            "weight_versions": [{"version": self.version, "start": 0, "end": 1}],
        }
        return web.json_response({"choices": [choice], "prompt_logprobs": prompt})

    def do_v1_completions(self, body) -> web.Response:
        prompt, token_id, logprob = self.sample(body["prompt"], body)
        choice = {
            "token_ids": [token_id],
            "finish_reason": "length",
            "logprobs": {"token_logprobs": [logprob]},
            "prompt_logprobs": prompt,
        }
        return web.json_response({"choices": [choice]})

    @torch.no_grad()
    def sample(self, ids: list[int], parameters: dict) -> tuple[list, int, float]:
        logits = self.model(torch.tensor([ids])).logits[0]
        of_prompt = logits[:-1].log_softmax(-1)
        entries = [None] + [
            {str(token): {"logprob": of_prompt[position, token].item(), "rank": 1}}
            for position, token in enumerate(ids[1:])
        ]
        last = (logits[-1] / parameters["temperature"]).log_softmax(-1)
        token_id = int(last.argmax())
        return entries, token_id, last[token_id].item()

    def routes(self) -> list[str]:
        return [call.partition("?")[0] for call in self.calls]


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


@contextlib.asynccontextmanager
async def serving(server: ControlServer, port: int = 0) -> AsyncIterator[ControlServer]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with listening(app, port) as server.url:
        yield server


PROBE_IDS = [3, 17, 42, 5, 5, 60, 1, 33, 20, 9, 2, 50]


@contextlib.asynccontextmanager
async def syncing(transfer: Transfer, *servers: ControlServer | str, **settings):
    """Yields the weight sync that pushes to these servers while they serve, and to addresses."""
    settings = {"temperature": 0.7, "tolerance": 1e-4, "timeout_s": 5.0} | settings
    async with contextlib.AsyncExitStack() as stack:
        urls = [
            each if isinstance(each, str) else (await stack.enter_async_context(serving(each))).url
            for each in servers
        ]
        sync = ServerWeightSync(urls, transfer=transfer, probe_ids=PROBE_IDS, **settings)
        try:
            yield sync
        finally:
            await sync.aclose()


def failing(status: int, message: str = "scripted") -> Callable:
    async def answer() -> web.Response:
        return error(status, message)

    return answer


def hanging(reached: asyncio.Event | None = None) -> Callable:
    async def answer() -> web.Response:
        if reached is not None:
            reached.set()
        await asyncio.sleep(60)
        raise AssertionError("nobody waits that long")

    return answer
