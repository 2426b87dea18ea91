"""Checks whether vLLM and SGLang servers can be used for training."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import httpx

from agentrl.errors import InferenceError

if TYPE_CHECKING:
    from agentrl.config import RunConfig
    from agentrl.inference.remote import ServerEngine

Status = Literal["ok", "note", "fix"]
"""`fix`: a run would fail, or train on wrong data."""
Result = tuple[Status, str]
"""(status, details or remedy)."""
Finding = tuple[Status, str, str]
"""(status, what was checked, details or remedy)."""

CHECK_TIMEOUT_S = 60.0
"""Timeout of one call to a server; a paused server does not answer."""
UPDATE_ROUTES = {
    "vllm": (
        "/init_weight_transfer_engine",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ),
    "sglang": (
        "/pause_generation",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/continue_generation",
        "/abort_request",
    ),
}
OPEN_ROUTES = {
    "vllm": ("/pause", "/update_weights", "/collective_rpc"),
    "sglang": ("/pause_generation", "/update_weights_from_disk"),
}
"""Routes that an attacker could use; vLLM's --api-key does not protect them."""


async def check_server(url: str, config: RunConfig) -> AsyncIterator[Result]:
    """Runs all checks of one server, the most important ones first."""
    from agentrl.inference.backends import BACKENDS

    token = config.inference.token
    async with _client(url, token) as http:
        workers = _json(await _get(http, "/workers")).get("workers")
        is_sglang = workers is not None or bool(_json(await _get(http, "/model_info")))
        backend = "sglang" if is_sglang else "vllm"
        begin = _sglang if is_sglang else _vllm
        begun = [finding async for finding in begin(http, config, workers)]
        for finding in begun:
            yield finding
        if begun[-1][0] == "fix":
            return
        if not is_sglang:
            yield await _served_model(http, config)
        model = config.inference.model
        engine = BACKENDS[backend].engine([url], model=model, token=token, seed=1)
        async with contextlib.aclosing(engine):
            found = await _tokens(engine, url)
            yield found
            if found[0] == "fix":
                return
            yield _raw(engine, url, config)
            if workers is not None:
                return  # what follows is of each worker
            yield await _updates(http, config, backend, engine.label_path)
            for finding in _rounding(await _server_info(http)):
                yield finding
            yield await _open_routes(url, OPEN_ROUTES[backend])


async def _vllm(
    http: httpx.AsyncClient, config: RunConfig, workers: list | None
) -> AsyncIterator[Result]:
    """Yields what the server is; last a finding to fix, if it cannot be asked more."""
    version = await _get(http, "/version")
    if version is None:
        yield "fix", "no server answers there; start it, or correct inference.urls"
        return
    if config.inference.backend == "sglang":
        yield "fix", "it is not an SGLang server; if it is vLLM, set --inference.backend vllm"
        return
    shown = _json(version).get("version", f"unknown ({version.status_code} from /version)")
    yield "ok" if version.status_code == 200 else "note", f"vLLM {shown}"
    if _json(await _get(http, "/is_paused")).get("is_paused"):
        url = str(http.base_url).rstrip("/")
        yield "fix", f"it is paused and answers no requests; run curl -X POST {url}/resume"


async def _sglang(
    http: httpx.AsyncClient, config: RunConfig, workers: list | None
) -> AsyncIterator[Result]:
    """Does the same as `_vllm` for SGLang, or for a router in front of it."""
    info = _json(await _get(http, "/server_info"))
    if workers is not None:
        told = ", ".join(str(worker.get("url")) for worker in workers) or "no servers"
        yield ("ok" if workers else "fix"), f"a router for SGLang servers, in front of {told}"
    else:
        yield "ok", f"SGLang {info.get('version', 'of an unknown version')}"
    context = info.get("context_length")
    if isinstance(context, int) and context < config.rollout.max_context_tokens:
        yield _short_context(context, config, "--context-length")
    ready = await _get(http, "/ready")
    if workers is None and ready is not None and ready.status_code == 503:
        yield (
            "fix",
            "it is starting, or paused and answers no requests; run curl -X POST -d '{}' -H "
            f"'Content-Type: application/json' {str(http.base_url).rstrip('/')}"
            "/continue_generation",
        )
    elif config.inference.backend != "sglang":
        yield "fix", "set --inference.backend sglang to train against it"


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


def _raw(engine: ServerEngine, url: str, config: RunConfig) -> Result:
    """Returns whether log-probabilities are those of the sampled distribution."""
    if not engine.probe_result(url)[1]:
        return "ok", "log-probs are those of the sampled distribution (before top_p and top_k)"
    return (
        "note" if config.rollout.temperature == 1 else "fix",
        "log-probs are those of the raw logits, which match the sampled distribution only at "
        f"temperature 1; start it {engine.sampled_logprobs}",
    )


async def _served_model(http: httpx.AsyncClient, config: RunConfig) -> Result:
    answer = await _get(http, "/v1/models")
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
        return _short_context(context, config, "--max-model-len")
    return "ok", f"serves {name!r}, context {context} >= rollout.max_context_tokens {needed}"


def _short_context(context: int, config: RunConfig, flag: str) -> Result:
    needed = config.rollout.max_context_tokens
    return (
        "note",
        f"its context is {context} tokens, but rollout.max_context_tokens is {needed}: turns that "
        f"reach its end are cut; start it with {flag} {needed}, or lower "
        "rollout.max_context_tokens",
    )


async def _updates(
    http: httpx.AsyncClient, config: RunConfig, backend: str, label_path: str
) -> Result:
    """Checks the routes by which a run sends its weights."""
    wanted = "nccl" if config.inference.transfer == "nccl" else "agentrl"
    remedy = "update SGLang"
    if backend == "vllm":
        remedy = (
            "start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config "
            f'\'{{"backend": "{wanted}"}}\''
        )
    missing = [route for route in UPDATE_ROUTES[backend] if not await _has_route(http, route)]
    if missing:
        return "fix", f"weight updates: no {', '.join(missing)}; {remedy} to train against it"
    info = await _server_info(http)
    transfer = (info.get("weight_transfer_config") or {}).get("backend")
    if info and transfer != wanted:
        return (
            "fix",
            f"weight updates: its backend is {transfer!r}, but inference.transfer = "
            f"{config.inference.transfer!r} needs {wanted!r}; {remedy}",
        )
    label = _json(await _get(http, label_path)).get("weight_version")
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


async def _open_routes(url: str, wanted: Sequence[str]) -> Result:
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


async def _routes_open_at(url: str, wanted: Sequence[str]) -> list[str]:
    async with _client(url) as anyone:
        return [route for route in wanted if await _has_route(anyone, route)]


# requests -----------------------------------------------------------------------------------------


def _client(url: str, token: str | None = None) -> httpx.AsyncClient:
    """Makes a client that ignores proxy settings, as the engine of a run does."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=CHECK_TIMEOUT_S, trust_env=False
    )


async def _get(http: httpx.AsyncClient, path: str) -> httpx.Response | None:
    try:
        return await http.get(path)
    except httpx.RequestError:
        return None


async def _has_route(http: httpx.AsyncClient, route: str) -> bool:
    """Returns whether a POST route exists: a GET then returns 405, without side effects."""
    answer = await _get(http, route)
    return answer is not None and answer.status_code == 405


async def _server_info(http: httpx.AsyncClient) -> dict:
    """Returns the configuration that a server in development mode reports, else {}."""
    answer = await _get(http, "/server_info?config_format=json")
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
