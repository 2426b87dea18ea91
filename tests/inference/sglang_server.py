"""A stand-in for SGLang's server that keeps its contract and computes real log-probs.

It samples from a model of its own by plain forward passes. What is strange here is strange there: a
pause of any kind holds new requests, an update with names that no parameter has answers 200 and
takes the label, requests are aborted by the beginning of their id, ids beside the model answer 200,
log-probs are after the temperature and before top-p and top-k.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo
from torch.distributed.rendezvous import TCPStore
from transformers import PreTrainedModel
from web_servers import in_thread, listening

POST_ONLY = (
    *("/pause_generation", "/continue_generation", "/abort_request"),
    *("/update_weights_from_disk", "/update_weights_from_tensor"),
    "/update_weights_from_distributed",
)


@dataclass
class Running:
    rid: str
    aborted: bool = False


@dataclass
class SGLangServer:
    model: PreTrainedModel
    raw_logprobs: bool = False
    """SGLANG_RETURN_ORIGINAL_LOGPROB."""
    workers: list[str] | None = None
    """Of a router; None: it is a server."""
    experts: np.ndarray | None = None
    """(tokens, layers, experts per token) int32: where the tokens of any sequence go, which is
    reported to who asks, as with --enable-return-routed-experts."""
    faults: list[str] = field(default_factory=list)
    """Each is met by one request for tokens."""
    url: str = ""
    version: str = "default"
    mode: str | None = None
    """Of the pause."""
    open_update: bool = False
    running: list[Running] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    dies_of_updates: bool = False
    released: set[str] = field(default_factory=set)
    group: Any = None
    """Of torch.distributed, with the trainer."""

    def restart(self, model: PreTrainedModel) -> None:
        self.model, self.version, self.mode, self.open_update = model, "default", None, False
        self.group, self.released = None, set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        body = json.loads(text) if text else {}
        self.calls.append(request.path)
        if request.method == "GET" and request.path in POST_ONLY:
            return web.Response(status=405)
        route = getattr(self, "do" + request.path.replace("/", "_"), None)
        if route is None or (self.workers is not None and request.path not in ("/workers",)):
            return web.Response(status=503 if request.path == "/generate" else 404)
        return await route(body, request)

    async def do_workers(self, body, request) -> web.Response:
        if self.workers is None:
            return web.Response(status=404)
        return web.json_response({"workers": [{"url": url} for url in self.workers]})

    async def do_model_info(self, body, request) -> web.Response:
        return web.json_response({"weight_version": self.version, "model_path": "toy"})

    async def do_server_info(self, body, request) -> web.Response:
        return web.json_response({"version": "0.5.23", "context_length": 4096})

    async def do_health(self, body, request) -> web.Response:
        return web.Response()

    async def do_ready(self, body, request) -> web.Response:
        return web.Response(status=503 if self.mode else 200)

    async def do_flush_cache(self, body, request) -> web.Response:
        busy = bool(self.running) and self.mode != "retract"
        return web.Response(status=400 if busy else 200, text="Flush cache failed." if busy else "")

    async def do_abort_request(self, body, request) -> web.Response:
        for each in self.running:
            if body.get("abort_all") or each.rid.startswith(body["rid"]):
                each.aborted = True
        return web.Response()

    async def do_pause_generation(self, body, request) -> web.Response:
        self.mode = body.get("mode", "abort")
        if self.mode == "abort":
            for each in self.running:
                each.aborted = True
            while self.running:
                await asyncio.sleep(0.001)
        return web.json_response({"status": "ok"})

    async def do_continue_generation(self, body, request) -> web.Response:
        self.mode = None
        return web.json_response({"status": "ok"})

    async def do_update_weights_from_disk(self, body, request) -> web.Response:
        if self.dies_of_updates:
            request.transport.abort()
        if self.mode is None:
            while self.running:
                await asyncio.sleep(0.001)
        files = [f for f in Path(body["model_path"]).glob("*.safetensors") if f.exists()]
        if not files:
            return _refused("no weights there")
        tensors = load_file(files[0])
        own = self.model.state_dict()
        for name in own.keys() & tensors.keys():
            if own[name].shape != tensors[name].shape:
                return _refused("Failed to update weights: shapes differ. Rolling back")
        self._load(tensors, body)
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def do_release_memory_occupation(self, body, request) -> web.Response:
        if self.running:
            request.transport.abort()  # dies of an assertion
        self.released |= set(body["tags"])
        return web.json_response(None)

    async def do_resume_memory_occupation(self, body, request) -> web.Response:
        if not self.released >= set(body["tags"]):
            request.transport.abort()  # dies of a KeyError
        self.released -= set(body["tags"])
        return web.json_response(None)

    async def do_begin_weight_update(self, body, request) -> web.Response:
        if self.open_update:
            return _refused("a weight update is already open")
        self.open_update = True
        return web.json_response({"success": True, "message": ""})

    async def do_end_weight_update(self, body, request) -> web.Response:
        if not self.open_update:
            return _refused("none is open")
        self.open_update = False
        return web.json_response({"success": True, "message": ""})

    async def do_update_weights_from_tensor(self, body, request) -> web.Response:
        if not self.open_update:
            return _refused("no weight update is open")
        (text,) = body["serialized_named_tensors"]
        self._load(dict(pickle.loads(base64.b64decode(text))), body)
        return web.json_response({"success": True, "message": ""})

    async def do_init_weights_update_group(self, body, request) -> web.Response:
        if self.group is not None:
            return _refused("The specified group name has already been created")
        name = body["group_name"]
        self.group = await asyncio.to_thread(_joined, body, f"{name}", f"{name}/", "cpu/")
        return web.json_response({"success": True, "message": ""})

    async def do_destroy_weights_update_group(self, body, request) -> web.Response:
        if self.group is None:
            return _refused("The group to be destroyed does not exist.")
        self.group = None
        return web.json_response({"success": True, "message": ""})

    async def do_update_weights_from_distributed(self, body, request) -> web.Response:
        if not self.open_update or self.group is None:
            return _refused("no weight update is open, or no group")
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in zip(
                body["names"], body["dtypes"], body["shapes"], strict=True
            )
        }

        def receive(group) -> None:
            for tensor in tensors.values():
                group.broadcast([tensor], BroadcastOptions()).wait()

        try:
            await asyncio.to_thread(receive, self.group)
            self._load(tensors, body)
        except RuntimeError as error:
            return _refused(f"Failed to update parameter online: {error}")
        return web.json_response({"success": True, "message": ""})

    def _load(self, tensors: dict[str, torch.Tensor], body: dict) -> None:
        assert "weights" not in self.released
        self.model.load_state_dict(tensors, strict=False)
        self.version = body.get("weight_version") or self.version

    async def do_tokenize(self, body, request) -> web.Response:
        return web.json_response({"tokens": [1]})

    async def do_generate(self, body, request: web.Request) -> web.StreamResponse:
        fault = self.faults.pop(0) if self.faults and "rid" in body else None
        if fault == "reset":
            request.transport.abort()
        if fault in ("500", "503"):
            return web.json_response({"error": "out of memory"}, status=int(fault))
        if fault == "hang":
            await asyncio.sleep(3600)
        ids, parameters = body["input_ids"], body["sampling_params"]
        unknown = parameters.keys() - PARAMETERS
        if unknown:
            return web.json_response({"error": f"unknown field {unknown}"}, status=400)
        if len(ids) + parameters["max_new_tokens"] > 4096:
            message = f"{len(ids)} prompt tokens are longer than the context of 4096"
            return web.json_response({"error": {"message": message}}, status=400)
        while self.mode:
            await asyncio.sleep(0.001)
        assert not self.released
        me = Running(body.get("rid", ""))
        self.running.append(me)
        try:
            return web.json_response(await self._sample(me, body))
        finally:
            self.running.remove(me)

    async def _sample(self, me: Running, body: dict) -> dict:
        prompt, parameters = body["input_ids"], body["sampling_params"]
        temperature = parameters["temperature"] or 1.0
        tokens: list[int] = []
        entries, tops, versions = [], [], []
        finish: dict = {"type": "length", "length": parameters["max_new_tokens"]}
        while len(tokens) < parameters["max_new_tokens"]:
            await asyncio.sleep(0.001)
            if me.aborted:
                finish = {"type": "abort", "message": "Aborted"}
                break
            if self.mode == "retract":
                continue
            logits = self._logits(prompt + tokens)[-1]
            logprobs = (logits / temperature).log_softmax(-1)
            token = int(logprobs.argmax())
            if parameters["temperature"]:
                token = int(torch.multinomial(logprobs.exp(), 1))
            shown = logits.log_softmax(-1) if self.raw_logprobs else logprobs
            tokens.append(token)
            entries.append([shown[token].item(), token, None])
            tops.append([[shown.max().item(), int(shown.argmax()), None]])
            versions.append(self.version)
            if token in parameters["stop_token_ids"] and not parameters["ignore_eos"]:
                finish = {"type": "stop", "matched": token}
                break
        meta = {
            "id": me.rid,
            "finish_reason": finish,
            "weight_version": self.version,
            "weight_versions": _spans(versions),
            "output_token_logprobs": entries,
        }
        if body["top_logprobs_num"]:
            meta["output_top_logprobs"] = tops
        if body["logprob_start_len"] == 0:
            of_prompt = self._logits(prompt).log_softmax(-1)
            meta["input_token_logprobs"] = [[None, prompt[0], None]] + [
                [of_prompt[position, token].item(), token, None]
                for position, token in enumerate(prompt[1:])
            ]
        if self.experts is not None and body["return_routed_experts"]:
            routes = self.experts[: len(prompt) + len(tokens) - 1]
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    @torch.no_grad()
    def _logits(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0].float()


PARAMETERS = {
    *("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("stop_token_ids", "ignore_eos", "sampling_seed"),
}


def _joined(body: dict, *prefixes: str) -> ProcessGroupGloo:
    """The one worker of this server in the trainer's group."""
    size, limit = body["world_size"], timedelta(seconds=30)
    store: Any = TCPStore(body["master_address"], body["master_port"], size, False, limit)
    for prefix in prefixes:
        store = PrefixStore(prefix, store)
    return ProcessGroupGloo(store, body["rank_offset"], size, limit)


def _spans(versions: list[str]) -> list[dict]:
    spans: list[dict] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": version, "start": position, "end": position + 1})
    return spans


def _refused(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)


@contextlib.contextmanager
def serving(*servers: SGLangServer, port: int = 0) -> Iterator[None]:
    """In threads of their own, until the block ends."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            app = web.Application(client_max_size=2**30)
            app.router.add_route("*", "/{path:.*}", server.handle)
            server.url = stack.enter_context(in_thread(listening(app, port)))
        yield
