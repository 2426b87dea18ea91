"""The endpoint that agents call: OpenAI's and Anthropic's protocols in front of the policy.

Each episode has a random key, which its agent sends as API key or within the path
(`/e/<key>/v1/...`). The key alone
assigns a call to its episode.

The environment's tools are below `/e/<key>/` too: `tools` and `tools/<name>` as plain HTTP, `mcp`
for clients of that protocol.

    what happens                               what the agent sees
    unknown key, key of an episode that ended  401, 410
    the environment has ended the episode      410
    a marked retry of the same request         the answer under way, or the one given before
    the client disconnects before the answer      the turn is cancelled, and nothing is recorded
    turns or context are used up               400 with a code; the episode counts as truncated
    the engine fails or is too late            500, and the episode fails in stage `generate`

A call that is refused for another reason than a limit is logged once and counted in the
trajectory's info (`refused_calls`); the metric `rollout/refused_calls` is their sum.

An answer after which a retry is pointless says so (`x-should-retry: false`). No answer has status
409, which clients retry.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web

from agentrl.config import AgentRole
from agentrl.errors import ConfigError, HistoryError
from agentrl.images import content_text
from agentrl.rollout.agent import mcp_tools
from agentrl.rollout.agent.recorder import Place, Recorder
from agentrl.rollout.agent.roles import Asked, OtherServers, asked_by
from agentrl.rollout.agent.tools import EnvTools
from agentrl.rollout.agent.wire import Answer, Call, ChatCompletions, Wire
from agentrl.rollout.agent.wire_anthropic import AnthropicMessages
from agentrl.rollout.agent.wire_responses import Responses
from agentrl.rollout.messages import RequestRefused
from agentrl.types import StopReason

logger = logging.getLogger("agentrl.rollout")

WIRES: dict[str, type[Wire]] = {
    "chat/completions": ChatCompletions,
    "responses": Responses,
    "messages": AnthropicMessages,
}
"""By path below `/v1/`."""
_COUNT = "messages/count_tokens"
_OF_A_LIMIT = {"max_turns", "context_length_exceeded", "episode_over", "engine_failed"}
"""Refusals that the trajectory's end tells of."""
MAX_SAID = 1000
"""Distinct lines that an endpoint logs."""
MAX_NOTED = 20
"""Distinct refusals in a trajectory's info; further ones are counted together."""
KEEP_ALIVE_S = 10.0
"""A stream that waits longer for its first token says that it is alive."""
MAX_BODY_BYTES = 64 << 20
MAX_CHARACTERS_PER_TOKEN = 128
"""Length of the longest tokens of published vocabularies, which are spaces."""
_NO_RETRY = {"x-should-retry": "false"}


@dataclass(slots=True, eq=False)
class _Request:
    """One request, and the clients that wait for its answer: the first sender and its retries."""

    task: asyncio.Task[Answer]
    num_waiting: int = 0


@dataclass(slots=True, eq=False)
class Live:
    """An episode whose agent is running."""

    key: str
    url: str
    """Address of the endpoint as this episode's agent is given it, `/v1` included."""
    recorder: Recorder
    max_turns: int
    turn_timeout_s: float
    failure: asyncio.Future[None]
    """Raises what ends the episode from the engine's side."""
    ended: asyncio.Future[str | float | dict[str, float] | None]
    """What came of the episode, where it is ended by a request."""
    on_turn: Callable[[], None]
    """Called after each turn."""
    tools: EnvTools | None
    cut: StopReason | None = None
    """The limit that a call ran into."""
    num_asked: int = 0
    """Turns that were sampled or are under way."""
    under_way: set[asyncio.Task[Answer]] = field(default_factory=set)
    under_way_elsewhere: set[asyncio.Task[Answer]] = field(default_factory=set)
    asked_by_turn: list[Asked] = field(default_factory=list)
    turn_of: dict[str, int] = field(default_factory=dict)
    """By the id of the answer."""
    asked: dict[bytes, _Request] = field(default_factory=dict)
    """By the digest of the body, the newest request."""
    wires: dict[str, Wire] = field(
        default_factory=lambda: {path: make() for path, make in WIRES.items()}
    )
    """By path."""

    @property
    def refused(self) -> dict[str, int]:
        """The number of refused calls, by code and message."""
        counts: Any = self.recorder.trajectory.info.get("refused_calls", {})
        return counts

    def note(self, refused: RequestRefused) -> None:
        """Counts a refused call."""
        counts: Any = self.recorder.trajectory.info.setdefault("refused_calls", {})
        told = f"{refused.code}: {refused}"
        if told not in counts and len(counts) >= MAX_NOTED:
            told = "others"
        counts[told] = counts.get(told, 0) + 1

    def ask(self, call: Call, asked: Asked) -> asyncio.Task[Answer]:
        """Starts a turn. Its request id, its turn number and its place with the engine are reserved
        at once, before another call can be placed, and released if the turn fails.

        Raises:
            RequestRefused: see `place`.
        """
        place = self.place(call)
        self.recorder.take(place)
        self.num_asked += 1
        policy = self.recorder.policy
        # An engine that waits for every episode's request has to know of each that comes beside.
        beside = len(self.under_way) > 0
        if beside:
            policy.reserve(1)

        def ended(task: asyncio.Task[Answer]) -> None:
            self.under_way.discard(task)
            if beside:
                policy.release(1)
            if _failed(task):
                self.recorder.give_back(place)
                self.num_asked -= 1
                error = None if task.cancelled() else task.exception()
                if error is not None and not self.failure.done():  # it ends the episode
                    self.failure.set_exception(error)

        task = asyncio.create_task(self._answer(place, call, asked))
        self.under_way.add(task)
        task.add_done_callback(ended)
        return task

    def ask_elsewhere(self, answering: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        """Starts a call that another server answers; it does not count as a turn."""

        async def answer() -> Answer:
            async with asyncio.timeout(self.turn_timeout_s):
                return await answering

        def ended(task: asyncio.Task[Answer]) -> None:
            self.under_way_elsewhere.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not self.failure.done():
                self.failure.set_exception(error)

        task = asyncio.create_task(answer())
        self.under_way_elsewhere.add(task)
        task.add_done_callback(ended)
        return task

    async def _answer(self, place: Place, call: Call, asked: Asked) -> Answer:
        """Samples a turn and records it; a cancelled call records nothing."""
        recorder = self.recorder
        policy = recorder.policy
        if call.max_tokens is not None or call.stop:
            policy = replace(
                policy,
                max_turn_tokens=min(
                    policy.max_turn_tokens, call.max_tokens or policy.max_turn_tokens
                ),
                stop_strings=(*policy.stop_strings, *call.stop),
            )
        started = time.perf_counter()
        async with asyncio.timeout(self.turn_timeout_s):
            prompt = place.prompt
            generation = await policy.sample(place.request_id, prompt.token_ids, prompt.images)
        action = recorder.write(place, generation, call.stop)
        self.turn_of[place.request_id] = len(self.asked_by_turn)
        self.asked_by_turn.append(asked)
        turn = recorder.trajectory.turns[-1]
        turn.generate_s = time.perf_counter() - started
        self.on_turn()
        return Answer(
            id=place.request_id,
            action=action,
            cut=generation.finish_reason == "length",
            prompt_tokens=turn.start,
            sampled_tokens=turn.num_tokens,
        )

    def place(self, call: Call) -> Place:
        """Finds where the call continues, within the episode's limits.

        Raises:
            RequestRefused: a limit is reached, or the chat template refuses the messages.
        """
        recorder = self.recorder
        if self.tools is not None and self.tools.is_over:
            raise RequestRefused(
                "the environment has ended this episode", status=410, code="episode_over"
            )
        if self.num_asked >= self.max_turns:
            self.cut = StopReason.MAX_TURNS
            raise RequestRefused(
                f"the episode has had its {self.max_turns} turns (rollout.max_turns)",
                code="max_turns",
            )
        limit = recorder.policy.context_tokens
        if _is_beyond(limit, call):  # which `rendered` refuses
            self.cut = StopReason.CONTEXT_LENGTH
        place = self.rendered(call)
        if len(place.prompt) >= limit:
            self.cut = StopReason.CONTEXT_LENGTH
            raise _too_long(f"{len(place.prompt)} tokens", limit)
        return place

    def rendered(self, call: Call) -> Place:
        """Finds where the call continues, and checks that the prompt fits the context.

        Raises:
            RequestRefused: the chat template refuses the messages, or no context could hold them.
        """
        from jinja2.exceptions import TemplateError

        limit = self.recorder.policy.context_tokens
        if _is_beyond(limit, call):
            raise _too_long(f"{_characters(call)} characters", limit)
        try:
            return self.recorder.place(call.messages, call.tools)
        except (TemplateError, TypeError, ConfigError) as error:  # the last one of images
            raise RequestRefused(
                f"the model's chat template does not take these messages: {error}",
                code="invalid_messages",
            ) from error
        except HistoryError as error:
            if not self.failure.done():  # it ends the episode
                self.failure.set_exception(error)
            raise RequestRefused(str(error), status=500, code="engine_failed") from error


def _characters(call: Call) -> int:
    return sum(len(content_text(message["content"])) for message in call.messages)


def _is_beyond(limit: int, call: Call) -> bool:
    """Tells whether the text is too long for a context of `limit` tokens.

    Tokenising megabytes would take minutes, during which every episode waits.
    """
    return _characters(call) > MAX_CHARACTERS_PER_TOKEN * limit


def _too_long(length: str, limit: int) -> RequestRefused:
    return RequestRefused(
        f"the prompt has {length}, and the maximum context length is {limit} tokens "
        "(rollout.max_context_tokens, or the servers' context)",
        code="context_length_exceeded",
    )


class AgentServer:
    """The HTTP server of the endpoint. It runs on the event loop on which it was started."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        ended_by_request: bool = False,
        leaves_out_tools: bool = True,
        roles: Sequence[AgentRole] = (),
    ) -> None:
        """
        Args:
            host: address to bind. Every call needs an episode's key, but the traffic is not
                encrypted: bind other addresses than loopback in trusted networks only.
            port: 0 takes a free one.
            ended_by_request: `POST /e/<key>/end` ends an episode and may give its reward. Only for
                agents that nothing else starts or ends, because an agent with the key can reward
                itself.
            leaves_out_tools: serve calls that offer a provider's own tools without those tools;
                else refuse them.
            roles: the rules that decide which calls are trained.
        """
        self.host, self.port = host, port
        self._leaves_out_tools, self._roles = leaves_out_tools, roles
        self._secret = secrets.token_bytes(32)
        self._live: dict[str, Live] = {}
        self._others = OtherServers()
        self._warned: set[str] = set()
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._refusals])
        for prefix in ("", "/e/{key}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{name:.+}}", self._model)
            app.router.add_post(f"{prefix}/v1/{{wire:.+}}", self._call)
        app.router.add_get("/e/{key}/tools", self._list_tools)
        app.router.add_post("/e/{key}/tools/{name}", self._call_tool)
        app.router.add_post("/e/{key}/mcp", self._mcp)
        if ended_by_request:
            app.router.add_post("/e/{key}/end", self._end)
        # A client that goes away cancels the handler of its request.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )

    @property
    def url(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.port}"

    async def start(self) -> None:
        """Binds the address and starts to serve.

        Raises:
            ConfigError: the address cannot be bound.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, self.port, backlog=2048).start()
        except OSError as error:
            raise ConfigError(
                f"the agents' endpoint cannot listen on {self.host}:{self.port}: "
                f"{error.strerror or error}; choose another agent.host or agent.port"
            ) from error
        self.port = self._runner.addresses[0][1]

    async def aclose(self) -> None:
        await self._runner.cleanup()
        await self._others.aclose()

    @contextmanager
    def episode(
        self,
        recorder: Recorder,
        *,
        max_turns: int,
        turn_timeout_s: float,
        on_turn: Callable[[], None] = lambda: None,
        tools: EnvTools | None = None,
    ) -> Iterator[Live]:
        """Serves an episode's agent while in the context; afterwards its calls are refused."""
        nonce = secrets.token_hex(12)
        key = f"sk-agentrl-{nonce}{self._signature(nonce)}"
        loop = asyncio.get_running_loop()
        failure = loop.create_future()
        url = f"{self.url}/e/{key}/v1"
        live = Live(
            key,
            url,
            recorder,
            max_turns,
            turn_timeout_s,
            failure,
            loop.create_future(),
            on_turn,
            tools,
        )
        self._live[key] = live
        try:
            yield live
        finally:
            del self._live[key]
            for task in (*live.under_way, *live.under_way_elsewhere):
                task.cancel()
            if not failure.done():
                failure.cancel()
            elif not failure.cancelled():
                failure.exception()  # seen

    def _signature(self, nonce: str) -> str:
        """Returns the part of a key that proves that this server issued it, so that keys of ended
        episodes are recognised without being kept."""
        return hmac.new(self._secret, nonce.encode(), hashlib.sha256).hexdigest()[:24]

    def _attributed(self, request: web.Request) -> Live:
        """Returns the episode that a request belongs to."""
        given = _key_of(request)
        if live := self._live.get(given):
            return live
        nonce = given.removeprefix("sk-agentrl-")[:24]
        known = hmac.compare_digest(
            given.encode(), f"sk-agentrl-{nonce}{self._signature(nonce)}".encode()
        )
        if known:
            raise RequestRefused("this episode is over", status=410, code="episode_over")
        raise RequestRefused(
            "no episode has this API key: give the agent the key and base URL that agentrl gave "
            "you (OPENAI_API_KEY, OPENAI_BASE_URL)",
            status=401,
            code="invalid_api_key",
        )

    async def _models(self, request: web.Request) -> web.Response:
        self._attributed(request)
        return web.json_response({"object": "list", "data": [_described("policy")]})

    async def _model(self, request: web.Request) -> web.Response:
        """Describes the policy, under whatever name is asked for."""
        self._attributed(request)
        return web.json_response(_described(request.match_info["name"]))

    async def _list_tools(self, request: web.Request) -> web.Response:
        return web.json_response(body=msgspec.json.encode(self._tools(request).specs))

    async def _call_tool(self, request: web.Request) -> web.Response:
        """Calls a tool with the arguments in the body. With an `Idempotency-Key` the request can be
        repeated safely."""
        tools = self._tools(request)
        arguments = _object(await request.read() or b"{}")
        key = request.headers.get("Idempotency-Key", "")
        reply = await tools.call(request.match_info["name"], arguments, key)
        return web.json_response(body=msgspec.json.encode(reply))

    async def _mcp(self, request: web.Request) -> web.Response:
        return await mcp_tools.answer(request, self._tools(request))

    def _tools(self, request: web.Request) -> EnvTools:
        """Returns the tools of the request's episode."""
        tools = self._attributed(request).tools
        if tools is None:
            raise RequestRefused("this episode has no tools", status=404, code="not_found")
        return tools

    async def _end(self, request: web.Request) -> web.Response:
        """Ends the episode. The body may hold an `answer`, which the environment grades, or a
        `reward`."""
        live = self._attributed(request)
        answer: str | float | dict[str, float] | None
        match _object(await request.read() or b"{}"):
            case {"answer": str(answer), **rest} if not rest:
                pass
            case {"reward": bool() | int() | float() as answer, **rest} if not rest:
                answer = float(answer)
            case {"rewards": dict(answer), **rest} if not rest and is_rewards(answer):
                pass
            case {**rest} if not rest:
                answer = None
            case _:
                raise RequestRefused(
                    'the body is {"answer": TEXT} for the environment to grade, {"reward": NUMBER} '
                    'or {"rewards": {RESPONSE_ID: NUMBER}} instead of its grade, or empty for what '
                    "the policy said last",
                    code="invalid_end",
                )
        if not live.ended.done():
            live.ended.set_result(answer)
        return web.json_response({})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["wire"]
        if path not in WIRES and path != _COUNT:
            known = ", ".join(f"/v1/{each}" for each in WIRES)
            raise RequestRefused(f"no /v1/{path}: {known}", status=404, code="not_found")
        live = self._attributed(request)
        body = await request.read()
        wire = live.wires[path.removesuffix("/count_tokens")]
        call = wire.read(_object(body))
        self._warn_of(call, live.recorder.policy.max_turn_tokens)
        if path == _COUNT:
            return web.json_response({"input_tokens": len(live.rendered(call).prompt)})
        marked = request.headers.get("x-stainless-retry-count", "0") != "0"
        digest = hashlib.blake2b(path.encode() + body, digest_size=16).digest()
        asked = live.asked.get(digest) if marked else None
        if asked is None or (asked.task.done() and _failed(asked.task)):
            role = asked_by(call, request.headers, self._roles)
            if role.rule is not None and role.rule.url is not None:
                task = live.ask_elsewhere(self._others.answer(call, role.rule, live.recorder))
            else:
                task = live.ask(call, role)
            asked = live.asked[digest] = _Request(task)
        asked.num_waiting += 1
        try:
            return await self._reply(request, wire, call, asked.task)
        finally:
            asked.num_waiting -= 1
            if not asked.num_waiting and not asked.task.done():
                asked.task.cancel()
                if live.asked.get(digest) is asked:  # a retry must not join what is ending
                    del live.asked[digest]

    async def _reply(
        self, request: web.Request, wire: Wire, call: Call, task: asyncio.Task[Answer]
    ) -> web.StreamResponse:
        stream = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        while not task.done():
            await asyncio.wait((task,), timeout=KEEP_ALIVE_S if call.stream else None)
            if not task.done():
                if not stream.prepared:
                    await stream.prepare(request)
                await stream.write(b": still sampling\n\n")
        if _failed(task):
            over = task.cancelled()
            refused = RequestRefused(
                "this episode is over" if over else "the inference engine failed",
                status=410 if over else 500,
                code="episode_over" if over else "engine_failed",
            )
            if not stream.prepared:
                return web.json_response(
                    wire.error(refused), status=refused.status, headers=_NO_RETRY
                )
            await stream.write(b"data: " + msgspec.json.encode(wire.error(refused)) + b"\n\n")
            return stream
        answer = task.result()
        if not call.stream:
            return web.json_response(body=msgspec.json.encode(wire.reply(call, answer)))
        if not stream.prepared:
            await stream.prepare(request)
        await stream.write(b"".join(wire.events(call, answer)))
        return stream

    def _warn_of(self, call: Call, max_turn_tokens: int) -> None:
        """Warns about the parts of a call that are not served."""
        if call.left_out and not self._leaves_out_tools:
            raise RequestRefused(
                f"the tools {', '.join(call.left_out)} are not functions, and only functions are "
                "served: take them from the agent, or let them be left out "
                "(agent.leave_out_provider_tools = true)",
                code="invalid_tools",
            )
        for name in call.replaced:
            self._say(
                f"an agent sends {name}, which is not used: how the policy samples stands in "
                "[rollout], and only there (said once)"
            )
        for name in call.unenforced:
            self._say(
                f"an agent asks for a form of the answer by {name}, which is not enforced: the "
                "policy knows of it only what the messages say (said once)"
            )
        for name in call.unread:
            self._say(
                f"an agent sends {name}, which has no effect: the policy reads the texts, calls "
                "and images of the messages, all of them (said once)"
            )
        for name in call.left_out:
            self._say(
                f"an agent offers the tool {name}, which is left out: the policy calls functions, "
                "and no tools of a provider (said once)"
            )
        if call.max_tokens is not None and call.max_tokens > max_turn_tokens:
            self._say(
                f"an agent allows turns of {call.max_tokens} tokens; the run's limit of "
                f"{max_turn_tokens} holds (rollout.max_turn_tokens; said once)",
                key="max_tokens",
            )

    def _say(self, text: str, key: str | None = None) -> None:
        """Logs a text once, and a limited number of texts in all, since an agent may make up a new
        one with every call."""
        if (key or text) not in self._warned and len(self._warned) < MAX_SAID:
            self._warned.add(key or text)
            logger.warning("%s", text)

    @web.middleware
    async def _refusals(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answers every refused request in the protocol's own error format, logs it once and counts
        it."""
        try:
            return await handler(request)
        except RequestRefused as error:
            refused = error
        except web.HTTPRequestEntityTooLarge:
            refused = RequestRefused(
                f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413, code="too_large"
            )
        except web.HTTPException as error:
            refused = RequestRefused(
                f"{request.method} {request.path.rpartition('/e/')[2].partition('/')[2]}: "
                f"{error.reason}",
                status=error.status,
                code="not_found" if error.status == 404 else "not_served",
            )
        if refused.code not in _OF_A_LIMIT:
            self._say(f"a call of an agent was refused with {refused.status}: {refused}")
            if live := self._live.get(_key_of(request)):
                live.note(refused)
        path = request.match_info.get("wire", "")
        wire = WIRES.get(path.removesuffix("/count_tokens"), ChatCompletions)()
        return web.json_response(wire.error(refused), status=refused.status, headers=_NO_RETRY)


def is_rewards(value: Any) -> bool:
    """Tells whether a value is a table of rewards by response id."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(reward, int | float) for name, reward in value.items()
    )


def _key_of(request: web.Request) -> str:
    """Returns the episode's key from the path or a header."""
    headers = request.headers
    given = request.match_info.get("key") or headers.get("x-api-key") or headers.get("api-key")
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    return given or (bearer.strip() if scheme.lower() == "bearer" else "")


def _described(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}


def _failed(task: asyncio.Task[Answer]) -> bool:
    return task.cancelled() or task.exception() is not None


def _object(body: bytes) -> dict:
    """Parses a body that must be a JSON object."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestRefused("the body is not a JSON object", code="invalid_json")
    return value
