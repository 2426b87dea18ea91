"""What is checked: an environment class in this process, or an environment behind a URL.

Checks of the platform's promises need the wire as it is (step indices, replays), which the public
client hides on purpose, so they speak it through the small `Wire` below. In process, every check
has a session manager of its own on a copy of the class that shares what `load_shared` returned,
which therefore runs once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import msgspec

from agentrl.env import protocol, registry
from agentrl.env.base import Environment, load_config
from agentrl.env.check.sampling import sample_calls
from agentrl.env.protocol import (
    CreateReply,
    CreateRequest,
    EnvInfo,
    ResetRequest,
    SessionReply,
    StepReply,
    StepRequest,
    TaskList,
    TaskPreview,
    TaskSpec,
)
from agentrl.env.session.episode import start_episode, take_turn
from agentrl.env.session.manager import SessionManager
from agentrl.env.tools import tools_of
from agentrl.errors import ConfigError, EnvError
from agentrl.types import JSON, Action, Message, StepResult, Task

LEASE_S = 120.0
STEP_TIMEOUT_S = 60.0
OPEN_TIMEOUT_S = 120.0
MAX_TURNS = 5
"""Turns of an episode that no oracle ends."""


class CheckFailed(Exception):
    """A check saw something else than it asserts. `str()` is what it saw."""

    def __init__(self, observed: str, remedy: str) -> None:
        super().__init__(observed)
        self.remedy = remedy


class CheckSkipped(Exception):
    """A check does not apply. `str()` is the reason."""


class Wire(Protocol):
    """The calls of the protocol that checks make. Errors are `EnvError`s with the wire's code."""

    async def info(self) -> EnvInfo: ...
    async def preview(self, split: str, start: int, stop: int) -> list[TaskPreview]: ...
    async def create(
        self, request: CreateRequest, key: str | None = None
    ) -> list[SessionReply]: ...
    async def step(self, session_id: str, request: StepRequest) -> StepReply: ...
    async def reset(self, session_id: str, request: ResetRequest) -> SessionReply: ...
    async def snapshot(self, session_id: str, step: int) -> str: ...
    async def delete(self, session_id: str) -> None: ...
    async def num_live(self) -> int: ...


class ManagerWire:
    """A session manager of this process; messages pass through JSON, as they would over HTTP."""

    def __init__(self, manager: SessionManager, env_id: str, config: Mapping[str, JSON]) -> None:
        self._manager = manager
        self._env_id = env_id
        self._config = config

    async def info(self) -> EnvInfo:
        reply = await self._manager.info(self._env_id, self._config)
        return protocol.decode_reply(protocol.encode(reply), EnvInfo)

    async def preview(self, split: str, start: int, stop: int) -> list[TaskPreview]:
        return await self._manager.preview(self._env_id, split, start, stop, self._config)

    async def create(self, request: CreateRequest, key: str | None = None) -> list[SessionReply]:
        request = protocol.decode_request(protocol.encode(request), CreateRequest)
        reply = protocol.encode(await self._manager.create(request, key))
        return protocol.decode_reply(reply, CreateReply).sessions

    async def step(self, session_id: str, request: StepRequest) -> StepReply:
        request = protocol.decode_request(protocol.encode(request), StepRequest)
        return protocol.decode_reply(await self._manager.step(session_id, request), StepReply)

    async def reset(self, session_id: str, request: ResetRequest) -> SessionReply:
        request = protocol.decode_request(protocol.encode(request), ResetRequest)
        reply = protocol.encode(await self._manager.reset(session_id, request))
        return protocol.decode_reply(reply, SessionReply)

    async def snapshot(self, session_id: str, step: int) -> str:
        request = protocol.SnapshotRequest(step, LEASE_S)
        return (await self._manager.snapshot(session_id, request)).snapshot

    async def delete(self, session_id: str) -> None:
        self._manager.delete(session_id)

    async def num_live(self) -> int:
        return self._manager.num_live


class HttpWire:
    """A server, one request per call."""

    def __init__(
        self, url: str, token: str | None, env_id: str, config: Mapping[str, JSON]
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._env_id = env_id
        self._config = config
        self._http: Any = None

    async def __aenter__(self) -> HttpWire:
        import aiohttp

        headers = {protocol.PROTOCOL_HEADER: protocol.PROTOCOL_VERSION}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._http = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=OPEN_TIMEOUT_S)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def environments(self) -> list[str]:
        return (await self._call("GET", "/v1/envs", protocol.EnvList)).environments

    async def info(self) -> EnvInfo:
        query = urlencode({"config": json.dumps(self._config)})
        return await self._call("GET", f"/v1/envs/{quote(self._env_id)}?{query}", EnvInfo)

    async def preview(self, split: str, start: int, stop: int) -> list[TaskPreview]:
        query = urlencode(
            {"split": split, "start": start, "stop": stop, "config": json.dumps(self._config)}
        )
        path = f"/v1/envs/{quote(self._env_id)}/tasks?{query}"
        return (await self._call("GET", path, TaskList)).tasks

    async def create(self, request: CreateRequest, key: str | None = None) -> list[SessionReply]:
        headers = {"Idempotency-Key": key} if key else None
        reply = await self._call("POST", "/v1/sessions", CreateReply, request, headers)
        return reply.sessions

    async def step(self, session_id: str, request: StepRequest) -> StepReply:
        return await self._call("POST", f"/v1/sessions/{session_id}/step", StepReply, request)

    async def reset(self, session_id: str, request: ResetRequest) -> SessionReply:
        return await self._call("POST", f"/v1/sessions/{session_id}/reset", SessionReply, request)

    async def snapshot(self, session_id: str, step: int) -> str:
        request = protocol.SnapshotRequest(step, LEASE_S)
        path = f"/v1/sessions/{session_id}/snapshot"
        return (await self._call("POST", path, protocol.SnapshotReply, request)).snapshot

    async def delete(self, session_id: str) -> None:
        await self._call("DELETE", f"/v1/sessions/{session_id}", None)

    async def num_live(self) -> int:
        return (await self._call("GET", "/healthz", protocol.Health)).sessions

    async def _call(
        self,
        method: str,
        path: str,
        reply: Any,
        request: msgspec.Struct | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        import aiohttp

        data = None if request is None else protocol.encode(request)
        try:
            async with self._http.request(
                method, self._url + path, data=data, headers=headers
            ) as response:
                body, status = await response.read(), response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise protocol.make_error(
                "unavailable", f"{self._url} cannot be reached ({error or type(error).__name__})"
            ) from error
        try:
            if 200 <= status < 300:
                return None if reply is None else protocol.decode_reply(body, reply)
            raise protocol.from_problem(protocol.decode_reply(body, protocol.Problem))
        except msgspec.DecodeError as error:
            raise CheckFailed(
                f"{method} {path.partition('?')[0]} answered {status} with {body[:200]!r}, which "
                f"is not what the protocol says ({error})",
                "the server is no agentrl environment server of this protocol version",
            ) from error


Event = dict[str, Any]
"""One reply of an episode as JSON, or `{"error": code, "detail": ...}`."""


@dataclass(slots=True)
class Subject:
    """The environment under check. Use `load_subject`."""

    env_id: str
    config: dict[str, JSON]
    info: EnvInfo
    environment: type[Environment] | None = None
    """None: it is behind `url`."""
    shared: object = None
    url: str | None = None
    token: str | None = None
    image: str | None = None
    """The image that the server behind the URL was started from, where the check started it."""
    thorough: bool = False
    make_manager: Callable[..., Any] = SessionManager
    """Called with the function that finds a class by its id."""
    _tasks: dict[tuple[str, int], Task] = field(default_factory=dict)

    async def aclose(self) -> None:
        """Free what `load_shared` returned."""
        if self.environment is not None:
            await asyncio.to_thread(self.environment.close_shared, self.shared)

    @asynccontextmanager
    async def wire(self, environment: type[Environment] | None = None) -> AsyncIterator[Wire]:
        """A way to the environment, or in process to a variant of it; closed afterwards."""
        if self.environment is None:
            assert self.url is not None and environment is None
            async with HttpWire(self.url, self.token, self.env_id, self.config) as http:
                yield http
            return
        found = environment or self._shared_class()
        manager = self.make_manager(lambda _: found)
        try:
            yield ManagerWire(manager, self.env_id, self.config)
        finally:
            await manager.aclose(5.0)

    def _shared_class(self) -> type[Environment]:
        assert self.environment is not None
        if getattr(self.environment, "isolation", "thread") == "process":
            return self.environment  # its processes import it by name and load it themselves
        return self.variant()

    def variant(self, **members: object) -> type[Environment]:
        """The class with other members, on what was loaded already, in this process.

        Raises:
            CheckSkipped: the environment is behind a URL.
        """
        environment = self.local()
        shared = self.shared
        return type(
            environment.__name__,
            (environment,),
            {
                "__module__": environment.__module__,
                "__doc__": environment.__doc__,
                "id": environment.id,
                "isolation": "thread",
                "load_shared": classmethod(lambda cls, config: shared),
                "close_shared": classmethod(lambda cls, shared: None),
                **members,
            },
        )

    def local(self) -> type[Environment]:
        """The class.

        Raises:
            CheckSkipped: the environment is behind a URL.
        """
        if self.environment is None:
            raise CheckSkipped("needs the class; behind a URL it cannot be looked into")
        return self.environment

    def specs(self, count: int) -> list[TaskSpec]:
        """`count` tasks, from all splits in turn, repeating where there are fewer.

        Raises:
            CheckSkipped: the environment has no tasks of its own.
        """
        sizes = {split: size for split, size in self.info.splits.items() if size != 0}
        if not sizes:
            raise CheckSkipped("the environment has no splits: sessions bring their own tasks")
        names = list(sizes)
        specs = []
        for number in range(count):
            split = names[number % len(names)]
            specs.append(TaskSpec(split, (number // len(names)) % (sizes[split] or count)))
        return specs

    def request(self, spec: TaskSpec, seed: int = 0, **fields: Any) -> CreateRequest:
        fields = {"lease_s": LEASE_S, "timeout_s": OPEN_TIMEOUT_S, **fields}
        return CreateRequest(self.env_id, spec, seed, self.config, **fields)

    async def task(self, spec: TaskSpec) -> Task:
        """The whole task, reference included; in process only."""
        assert spec.split is not None and spec.index is not None
        key = (spec.split, spec.index)
        if key not in self._tasks:
            source = self.instance()
            self._tasks[key] = await source.call(source.get, *key)
        return self._tasks[key]

    def instance(self, environment: type[Environment] | None = None) -> Environment:
        """An instance without a session."""
        return (environment or self.local())(self.config, shared=self.shared)

    async def moves(self, spec: TaskSpec, seed: int = 0) -> list[Action]:
        """The actions that checks play on a task: a call or two of tools that do not end the
        episode, then the oracle's, or else more sampled ones. The same every time."""
        rng = random.Random(f"{spec.split}/{spec.index}/{seed}")
        if self.environment is None:
            return sample_calls(self.info.tools, rng, MAX_TURNS)
        terminal = {name for name, tool in tools_of(self.environment).items() if tool.terminal}
        going_on = [spec for spec in self.info.tools if _name(spec) not in terminal]
        ending = [spec for spec in self.info.tools if _name(spec) in terminal]
        first = sample_calls(going_on, rng, 2) if going_on else []
        gold = await self.gold(await self.task(spec), seed)
        if gold is not None:
            return [*first, *gold]
        return [*first, *sample_calls(ending or going_on, rng, 1 if ending else MAX_TURNS - 2)]

    async def gold(self, task: Task, seed: int) -> list[Action] | None:
        """The actions of the environment's oracle, played while it gives them; None without."""
        instance = self.instance()
        try:
            await start_episode(instance, task, seed)
            actions = []
            async for action in oracle_actions(instance):
                actions.append(action)
                result = await take_turn(instance, action)
                if result.terminated or result.truncated:
                    break
            return actions or None
        finally:
            await instance.call(instance.close)

    async def play(
        self, wire: Wire, spec: TaskSpec, seed: int = 0, actions: list[Action] | None = None
    ) -> list[Event]:
        """One episode in a session of its own, which is closed afterwards."""
        actions = await self.moves(spec, seed) if actions is None else actions
        try:
            opened = (await wire.create(self.request(spec, seed)))[0]
        except EnvError as error:
            return [to_event(error)]
        events: list[Event] = [{"observation": opened.observation}]
        try:
            for number, action in enumerate(actions):
                event = await step_event(
                    wire, opened.id, number, action, number + 1 == len(actions)
                )
                events.append(event)
                if is_over(event):
                    break
        finally:
            await wire.delete(opened.id)
        return events


def _name(spec: Mapping[str, Any]) -> str:
    return spec["function"]["name"]


async def oracle_actions(instance: Environment) -> AsyncIterator[Action]:
    """The oracle's actions one by one, so that it can look at the episode between them."""
    offered = await instance.call(instance.oracle)
    iterator = iter(offered or ())
    while (action := await instance.call(next, iterator, None)) is not None:
        yield action


async def step_event(
    wire: Wire,
    session_id: str,
    step: int,
    action: Action,
    last: bool = False,
    timeout_s: float = STEP_TIMEOUT_S,
) -> Event:
    request = StepRequest(step, protocol.to_wire_action(action), timeout_s, last)
    try:
        return to_event(await wire.step(session_id, request))
    except EnvError as error:
        return to_event(error)


def to_event(reply: StepReply | EnvError) -> Event:
    if isinstance(reply, EnvError):
        return {"error": reply.code, "status": reply.status, "detail": str(reply)}
    return msgspec.to_builtins(reply)


def is_over(event: Event) -> bool:
    return "error" in event or event.get("terminated", False) or event.get("truncated", False)


async def play_direct(
    instance: Environment, task: Task, actions: list[Action], seed: int = 0
) -> tuple[list[Message], list[StepResult]]:
    """An episode on an instance, without a session: what the author's methods return."""
    try:
        first = await start_episode(instance, task, seed)
        results = []
        for number, action in enumerate(actions):
            results.append(await take_turn(instance, action, last=number + 1 == len(actions)))
            if results[-1].terminated or results[-1].truncated:
                break
        return first, results
    finally:
        await instance.call(instance.close)


def with_reference(task: Task, reference: JSON) -> Task:
    return replace(task, reference=reference)


async def load_subject(
    target: str | type[Environment],
    *,
    config: Mapping[str, JSON] | None = None,
    env_id: str | None = None,
    token: str | None = None,
    image: str | None = None,
    thorough: bool = False,
    make_manager: Callable[..., Any] = SessionManager,
) -> Subject:
    """Load what is to be checked. It is used on one event loop, and closed in the end.

    Args:
        target: a class, a name for `agentrl.env.registry.resolve`, or the URL of a server.
        env_id: which environment of the server; needed where it serves several.
        token: the server's; by default from the variable AGENTRL_ENV_TOKEN.
        image: which the server was started from; `check_container` starts it again.

    Raises:
        ConfigError: it cannot be found, or its configuration is wrong.
    """
    values = dict(config or {})
    token = token or os.environ.get(protocol.TOKEN_VARIABLE)
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        async with HttpWire(target, token, "", {}) as http:
            served = await http.environments()
        if env_id is None and len(served) != 1:
            raise ConfigError(f"{target} serves {', '.join(served)}: say which one with --env ID")
        if env_id is not None and env_id not in served:
            raise ConfigError(f"{target} serves {', '.join(served)}, and no '{env_id}'")
        found_id = env_id or served[0]
        async with HttpWire(target, token, found_id, values) as http:
            info = await http.info()
        return Subject(
            found_id,
            values,
            info,
            url=target,
            token=token,
            image=image,
            thorough=thorough,
        )
    found = registry.resolve(target) if isinstance(target, str) else registry.with_id(target)
    loaded = load_config(found, values)
    shared = await asyncio.to_thread(found.load_shared, loaded)
    subject = Subject(
        found.id,
        values,
        info=None,  # type: ignore[arg-type]  # asked for in the next lines
        environment=found,
        shared=shared,
        thorough=thorough,
        make_manager=make_manager,
    )
    async with subject.wire() as wire:
        subject.info = await wire.info()
    return subject
