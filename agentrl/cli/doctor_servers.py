"""Checks whether vLLM and SGLang servers can be used for training."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import httpx

from agentrl.errors import AgentRLError, InferenceError

if TYPE_CHECKING:
    from agentrl.config import RunConfig
    from agentrl.inference.remote import ServerEngine

Status = Literal["ok", "note", "fix"]
"""`fix`: a run would fail, or train on wrong data."""
Result = tuple[Status, str]
"""(status, details or remedy)."""

CHECK_TIMEOUT_S = 60.0
"""Timeout of one call to a server; a paused server does not answer."""
CONTROL_ROUTES = (
    "/init_weight_transfer_engine",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/resume",
)
SGLANG_ROUTES = (
    "/pause_generation",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/continue_generation",
    "/abort_request",
)
OPEN_ROUTES = ("/pause", "/update_weights", "/collective_rpc")
"""Routes that an attacker could use; vLLM's --api-key does not protect them."""
OPEN_SGLANG_ROUTES = ("/pause_generation", "/update_weights_from_disk")
PARITY = {"float32": 1e-4, "bfloat16": 0.05}
"""dtype -> largest difference in nats between a server's log-probs and the trainer's. Rounding
mostly stays below it; with another model or temperature, the mean exceeds it."""
PARITY_TEXT = "What is 17 times 3? Think step by step, then give the answer."
PARITY_TOKENS = 32


async def check_server(url: str, config: RunConfig) -> AsyncIterator[Result]:
    """Runs all checks of one server, the most important ones first."""
    from agentrl.inference.vllm import VLLMEngine

    token = config.inference.token
    async with _client(url, token) as http:
        is_sglang = any([_json(await _ask(http, "GET", p)) for p in ("/model_info", "/workers")])
    if is_sglang:
        async for finding in _check_sglang(url, config):
            yield finding
        return
    engine = VLLMEngine([url], model=config.inference.model, token=token, seed=1)
    async with contextlib.aclosing(engine), _client(url, token) as http:
        version = await _ask(http, "GET", "/version")
        if version is None:
            yield "fix", "no server answers there; start it, or correct inference.urls"
            return
        if config.inference.backend == "sglang":
            yield "fix", "it is not an SGLang server; if it is vLLM, set --inference.backend vllm"
            return
        shown = _json(version).get("version", f"unknown ({version.status_code} from /version)")
        yield "ok" if version.status_code == 200 else "note", f"vLLM {shown}"
        yield await _served_model(http, config)
        if _json(await _ask(http, "GET", "/is_paused")).get("is_paused"):
            yield "fix", f"it is paused and answers no requests; run curl -X POST {url}/resume"
            return
        found = await _tokens(engine, url)
        yield found
        if found[0] == "fix":
            return
        yield _raw(engine, url, config, "with --logprobs-mode processed_logprobs")
        yield await _update_routes(http, config)
        for finding in _rounding(await _server_info(http)):
            yield finding
        yield await _open_routes(url)
        if config.model.path:
            yield await _parity(url, engine, http, config)


async def _check_sglang(url: str, config: RunConfig) -> AsyncIterator[Result]:
    """Does the same as `check_server` for SGLang, or for a router in front of it."""
    from agentrl.inference.sglang import SGLangEngine

    token = config.inference.token
    engine = SGLangEngine([url], model=config.inference.model, token=token)
    async with contextlib.aclosing(engine), _client(url, token) as http:
        info = _json(await _ask(http, "GET", "/server_info"))
        workers = _json(await _ask(http, "GET", "/workers")).get("workers")
        if workers is not None:
            told = ", ".join(str(worker.get("url")) for worker in workers) or "no servers"
            yield ("ok" if workers else "fix"), f"a router for SGLang servers, in front of {told}"
        else:
            yield "ok", f"SGLang {info.get('version', 'of an unknown version')}"
        if config.inference.backend != "sglang":
            yield "fix", "set --inference.backend sglang to train against it"
        ready = await _ask(http, "GET", "/ready")
        if workers is None and ready is not None and ready.status_code == 503:
            yield (
                "fix",
                f"it is starting, or paused and answers no requests; run curl -X POST -d '{{}}' -H "
                f"'Content-Type: application/json' {url}/continue_generation",
            )
            return
        context, needed = info.get("context_length"), config.rollout.max_context_tokens
        if isinstance(context, int) and context < needed:
            yield (
                "note",
                f"its context is {context} tokens, but rollout.max_context_tokens is {needed}: "
                f"turns that reach its end are cut; start it with --context-length {needed}, or "
                "lower rollout.max_context_tokens",
            )
        found = await _tokens(engine, url)
        yield found
        if found[0] == "fix":
            return
        yield _raw(engine, url, config, "without SGLANG_RETURN_ORIGINAL_LOGPROB")
        if workers is None:
            missing = [route for route in SGLANG_ROUTES if not await _has_route(http, route)]
            label = _json(await _ask(http, "GET", "/model_info")).get("weight_version")
            if missing:
                yield "fix", f"weight updates: no {', '.join(missing)}; update SGLang"
            else:
                yield "ok", f"weight updates: all routes are there; its weights are {label!r}"
            yield await _open_routes(url, OPEN_SGLANG_ROUTES)
            if config.model.path:
                yield await _parity(url, engine, http, config)


async def _tokens(engine: ServerEngine, url: str) -> Result:
    """Asks for a few tokens, as a run does when it starts."""
    from agentrl.inference.token_api import COMPLETIONS

    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await engine.start()
    except (InferenceError, TimeoutError) as error:
        return "fix", f"tokens: {error or 'no answer to the probe'}"
    endpoint, _ = engine.probe_result(url)
    if endpoint != COMPLETIONS:
        return "ok", f"token ids in and out at {endpoint}, with weight versions"
    return (
        "note",
        f"token ids in and out at {COMPLETIONS}, which does not report which weights sampled them, "
        "so a restart or update in between goes unnoticed; start it with --enable-scale-out",
    )


def _raw(engine: ServerEngine, url: str, config: RunConfig, start_with: str) -> Result:
    """Says whether log-probabilities are those of the sampled distribution.

    Args:
        start_with: how to start the server so that they are.
    """
    if not engine.probe_result(url)[1]:
        return "ok", "log-probs are those of the sampled distribution (before top_p and top_k)"
    return (
        "note" if config.rollout.temperature == 1 else "fix",
        "log-probs are those of the raw logits, which match the sampled distribution only at "
        f"temperature 1; start it {start_with}",
    )


async def _served_model(http: httpx.AsyncClient, config: RunConfig) -> Result:
    answer = await _ask(http, "GET", "/v1/models")
    if answer is None or answer.status_code != 200:
        status = "no answer" if answer is None else f"status {answer.status_code}"
        return "fix", f"{status} from /v1/models; check the address and the token"
    models = _json(answer).get("data", [])
    served = {model.get("id"): model.get("max_model_len") for model in models}
    name = config.inference.model
    if name not in served:
        known = ", ".join(map(str, served)) or "nothing"
        return "fix", f"it serves {known}, not {name!r}; set --inference.model"
    context, needed = served[name], config.rollout.max_context_tokens
    if context is not None and context < needed:
        return (
            "note",
            f"its context is {context} tokens, but rollout.max_context_tokens is {needed}: "
            f"turns that reach its end are cut; start it with --max-model-len {needed}, or lower "
            "rollout.max_context_tokens",
        )
    return "ok", f"serves {name!r}, context {context} >= rollout.max_context_tokens {needed}"


async def _update_routes(http: httpx.AsyncClient, config: RunConfig) -> Result:
    wanted = "nccl" if config.inference.transfer == "nccl" else "agentrl"
    remedy = (
        "start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config "
        f'\'{{"backend": "{wanted}"}}\''
    )
    missing = [route for route in CONTROL_ROUTES if not await _has_route(http, route)]
    if missing:
        return "fix", f"weight updates: no {', '.join(missing)}; {remedy} to train against it"
    info = await _server_info(http)
    backend = (info.get("weight_transfer_config") or {}).get("backend")
    if info and backend != wanted:
        return (
            "fix",
            f"weight updates: its backend is {backend!r}, but inference.transfer = "
            f"{config.inference.transfer!r} needs {wanted!r}; {remedy}",
        )
    label = _json(await _ask(http, "GET", "/weight_info")).get("weight_version")
    return "ok", f"weight updates: all routes are there; its weights are {label!r}"


def _rounding(info: dict) -> Iterator[Result]:
    """Checks how closely a 16-bit server's rounding matches the trainer's, if it reports it."""
    model = info.get("model_config") or {}
    dtype = str(model.get("dtype")).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16"):
        return
    head = str((model.get("hf_overrides") or {}).get("head_dtype")).removeprefix("torch.")
    if head != "float32":
        yield (
            "note",
            f"rounding: its logits are rounded to {dtype}, but the trainer's are float32; start it "
            'with --hf-overrides \'{"head_dtype": "float32"}\'',
        )
    else:
        yield "ok", f"rounding: {dtype} layers, float32 logits"


async def _open_routes(url: str, wanted: tuple[str, ...] = OPEN_ROUTES) -> Result:
    """Checks whether others can replace the weights.

    Calls the routes without the token, or, for a server on loopback, at this host's other
    addresses.
    """
    parts = urlsplit(url)
    if not _is_loopback(parts.hostname or ""):
        routes = await _routes_open_at(url, wanted)
        if not routes:
            return "ok", "control routes: closed to callers without the token"
        return (
            "fix",
            f"control routes: {', '.join(routes)} answer without a token, and --api-key does not "
            "protect them; bind the server to loopback or a private network, or put a proxy in "
            "front that allows them only from the trainer",
        )
    for address in own_addresses():
        host = f"[{address}]" if ":" in address else address
        routes = await _routes_open_at(f"{parts.scheme}://{host}:{parts.port or 80}", wanted)
        if routes:
            return (
                "fix",
                f"control routes: {', '.join(routes)} also answer at {address}, so anyone who can "
                "reach this host can replace the weights; start the server with --host 127.0.0.1",
            )
    return "ok", "control routes: not reachable from outside this host"


async def _routes_open_at(url: str, wanted: tuple[str, ...]) -> list[str]:
    async with _client(url) as anyone:
        return [route for route in wanted if await _has_route(anyone, route)]


async def _parity(
    url: str, engine: ServerEngine, http: httpx.AsyncClient, config: RunConfig
) -> Result:
    """Samples on the server and compares its log-probs with those of the trainer's model."""
    from agentrl.inference.base import SamplingParams
    from agentrl.model.load import load_model, load_tokenizer, resolve_dtype
    from agentrl.model.logprobs import recomputed_logprobs

    label = _json(await _ask(http, "GET", engine.label_path)).get("weight_version")
    if label is not None and str(label).isdecimal() and int(label) > 0:
        return "note", f"parity: not checked, because its weights are version {label} of a run"
    path, dtype = config.model.path, config.model.dtype
    try:
        tokenizer = load_tokenizer(path)
        model = load_model(
            path,
            dtype=resolve_dtype(dtype),
            device="cpu",
            max_tokens=config.rollout.max_context_tokens,
        )
        prompt_ids = tokenizer.encode(PARITY_TEXT, add_special_tokens=False)
        temperature = 1.0 if engine.probe_result(url)[1] else config.rollout.temperature
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            generation = await engine.generate(
                "parity-m0", prompt_ids, SamplingParams(PARITY_TOKENS, temperature)
            )
    except (AgentRLError, TimeoutError) as error:
        return "fix", f"parity: {error or 'no answer in time'}"
    expected = recomputed_logprobs(model, prompt_ids, generation.token_ids, temperature)
    pairs = zip(generation.logprobs, expected, strict=True)
    differences = [abs(got - wanted) for got, wanted in pairs]
    largest, mean, limit = max(differences), sum(differences) / len(differences), PARITY[dtype]
    what = (
        f"parity: log-probs of {len(expected)} sampled tokens differ from {path} in {dtype} by at "
        f"most {largest:.2g}, {mean:.2g} on average; the limit is {limit:g}"
    )
    if largest < limit:
        return "ok", what
    if dtype == "bfloat16" and mean < limit:
        return (
            "note",
            f"{what}: server and trainer round differently; make sure that the ratio is clipped or "
            "masked, or train in float32",
        )
    return "fix", f"{what}; serve the same model with --dtype {dtype}"


# requests -----------------------------------------------------------------------------------------


def _client(url: str, token: str | None = None) -> httpx.AsyncClient:
    """Makes a client that ignores proxy settings, as the engine of a run does."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=CHECK_TIMEOUT_S, trust_env=False
    )


async def _ask(
    http: httpx.AsyncClient, method: str, path: str, body: dict | None = None
) -> httpx.Response | None:
    """Makes a request; returns None if there is no answer."""
    try:
        return await http.request(method, path, json=body)
    except httpx.RequestError:
        return None


async def _has_route(http: httpx.AsyncClient, route: str) -> bool:
    """Returns whether a POST route exists: a GET then returns 405, without side effects."""
    answer = await _ask(http, "GET", route)
    return answer is not None and answer.status_code == 405


async def _server_info(http: httpx.AsyncClient) -> dict:
    """Returns the configuration that a server in development mode reports, else {}."""
    answer = await _ask(http, "GET", "/server_info?config_format=json")
    return _json(answer).get("vllm_config") or {}


def _json(answer: httpx.Response | None) -> dict:
    """Returns the JSON object in an answer, or {} if there is none."""
    if answer is None or answer.status_code != 200:
        return {}
    try:
        parsed = answer.json()
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_addresses() -> list[str]:
    """Returns this host's non-loopback addresses, from its routes and its host name."""
    found = []
    # Connecting a datagram socket sends nothing; it only chooses the address to send from.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
            except OSError:
                continue
            found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)]
    addresses = {str(address) for address in found}
    return sorted(a for a in addresses if not _is_loopback(a) and "%" not in a)
