"""Opens, steps and closes sessions; the same code serves callers in the process and over HTTP.

A session is one episode, played on its own instance of an environment. The guarantees:

* **Exactly once.** A step request carries the index that the session is at. Repeating an index with
  the same action repeats the same reply (`replayed`), after waiting for it if the step still runs.
  The same index with another action, or any other index, is a `step_conflict`.
* **Deadlines are enforced.** The caller has its answer at the deadline, even if the author's code
  ignores its cancellation. After a `step_timeout` the session accepts no further steps.
* **Leases.** Every call renews the lease, and it cannot expire while a step runs. An expired
  session is closed, and later calls on it get `session_expired`.
* **One episode per session.** A step after the end gets `episode_done`; it never starts another
  episode.
* **Bounded.** `capacity` limits how many sessions may be open.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from pydantic_core import from_json

from agentrl.caller import caller
from agentrl.env.base import Environment
from agentrl.env.protocol import (
    CreateReply,
    CreateRequest,
    EnvInfo,
    SessionReply,
    SessionStatus,
    StepReply,
    StepRequest,
    decode,
    encode,
    make_error,
)
from agentrl.env.sessions.boundary import CLOSE_TIMEOUT_S, Background, cancelled_itself, guard
from agentrl.env.sessions.capacity import MAX_WAIT_S, Capacity, draining
from agentrl.env.sessions.loaded import LoadedEnvironments
from agentrl.env.sessions.metrics import Metrics
from agentrl.env.sessions.session import Session, Step, episode_record, start, take_turn
from agentrl.env.threads import MAX_THREADS, WorkerPool
from agentrl.errors import EnvError
from agentrl.types import JSON

logger = logging.getLogger("agentrl.env")

DEFAULT_LEASE_S = 300.0
"""Lease of a session whose creation names none."""
REAP_S = 0.1
"""Seconds between two searches for sessions whose lease has ended."""
MAX_TIMEOUT_S = 6 * 3600.0
"""Longest time limit of a creation or step; a larger one in a request is lowered to this."""
MAX_CLOSED_IDS = 16_384
"""How many ids, and how many idempotency keys, of closed sessions are remembered. They make a late
call on one get `session_expired`, and keep a late creation from opening a second session."""


class SessionManager:
    """Manages all sessions of a process. Used from one event loop."""

    def __init__(
        self,
        resolve: Callable[[str], type[Environment]],
        *,
        max_sessions: int | None = None,
        worker_threads: int = MAX_THREADS,
        config: Mapping[str, Mapping[str, JSON]] | None = None,
        max_wait_s: float = MAX_WAIT_S,
        name: str = "",
    ) -> None:
        """
        Args:
            resolve: returns the class of an environment's id, or raises ConfigError.
            max_sessions: limit of open sessions over all environments; None: only each
                environment's own limit.
            worker_threads: most threads for plain `def` methods, over all sessions.
            config: environment id -> values that every session's configuration starts from.
            max_wait_s: seconds that a creation waits for capacity before it is `at_capacity`.
            name: prefix of the session ids, so that a proxy in front of several servers can tell
                which server a session is on.
        """
        self.metrics = Metrics()
        self.workers = WorkerPool(worker_threads)
        self.draining = False
        self._id_prefix = f"{name}-" if name else ""
        self._background = Background()
        self.environments = LoadedEnvironments(
            resolve, config or {}, self.workers, self._background
        )
        self._capacity = Capacity(max_sessions, max_wait_s)
        watch = self.metrics.watch
        capacity, workers = self._capacity, self.workers
        watch("creations_waiting", "Creations waiting for capacity.", lambda: capacity.num_waiting)
        watch("threads", "Worker threads, hung ones included.", lambda: workers.num_threads)
        watch("hung_calls", "Calls past their deadline that still run.", lambda: self.num_hung)
        watch("calls_waiting", "Calls that wait for a thread.", lambda: workers.num_waiting)
        self._sessions: dict[str, Session] = {}
        self._closed_ids: OrderedDict[str, str] = OrderedDict()
        self._creations: dict[str | None, tuple[CreateRequest, asyncio.Task[CreateReply]]] = {}
        """Idempotency-Key -> the request for a session, and the task that opens it."""
        self._closed_keys: OrderedDict[str, str] = OrderedDict()
        self._reaper: asyncio.Task[None] | None = None

    @property
    def num_live(self) -> int:
        """Sessions that count against the capacity, those being opened or closed included."""
        return self._capacity.num_live

    @property
    def num_hung(self) -> int:
        """Calls past their deadline that still run: threads, and coroutines that ignore it."""
        return self.workers.num_hung + len(self._background.stopped)

    def metrics_text(self) -> bytes:
        """Returns the current metrics in Prometheus' text format."""
        return self.metrics.text(self._capacity.live)

    def readiness(self) -> str | None:
        """Returns why this process should not get new sessions; None if it may."""
        if self.draining:
            return "the server is shutting down"
        if 2 * self.num_hung >= self.workers.max_hung:
            return f"{self.num_hung} calls hang past their deadline: restart the process"
        return None

    async def info(
        self, env_id: str, config: Mapping[str, JSON], timeout_s: float | None = None
    ) -> EnvInfo:
        """Loads a configuration of an environment and describes it.

        Args:
            timeout_s: time limit of the loading; None: the environment's `reset_timeout_s`.

        Raises:
            EnvError: as `LoadedEnvironments.find` and `load` do.
        """
        environment = self.environments.find(env_id)
        timeout_s = timeout_s or environment.reset_timeout_s
        loaded = await self.environments.load(environment, config, timeout_s)
        return EnvInfo(
            id=environment.id,
            description=inspect.cleandoc(environment.__doc__ or ""),
            tools=loaded.tools,
            splits=loaded.splits,
            config_schema=environment.Config.model_json_schema(),
            max_sessions=self._capacity.limit(environment),
        )

    # Opening

    async def create(self, request: CreateRequest, key: str | None = None) -> CreateReply:
        """Opens a session, waiting for capacity if need be.

        A repeated call with the same idempotency key gets the same session, or `session_expired`
        once that is closed, so that a late duplicate opens nothing. A creation runs to its end even
        if its caller is cancelled; a session that nobody uses expires.

        Raises:
            EnvError: `session_expired` or `idempotency_conflict`: the key was used before;
                `draining` or `at_capacity`; `invalid_request`; or the environment failed or took
                too long.
        """
        if key is not None and key in self._closed_keys:
            raise make_error(
                "session_expired",
                f"this Idempotency-Key's session has {self._closed_keys[key]}; use a fresh key",
            )
        earlier, opening = self._creations.get(key, (request, None))  # of None there is none
        if opening is None:
            opening = self._background.spawn(self._create(request, key))
            if key is not None:
                self._creations[key] = request, opening
                opening.add_done_callback(lambda task: self._forget_failed(key, task))
        elif earlier != request:
            raise make_error(
                "idempotency_conflict",
                "this Idempotency-Key was already used for a different request; use a fresh key",
            )
        else:
            self.metrics.replayed.inc()
        return await asyncio.shield(opening)

    def _forget_failed(self, key: str, task: asyncio.Task[CreateReply]) -> None:
        if task.cancelled() or task.exception() is not None:  # it opened nothing
            self._creations.pop(key, None)

    async def _create(self, request: CreateRequest, key: str | None) -> CreateReply:
        try:
            if self.draining:
                raise draining()
            session = await self._open(request, key)
        except EnvError as error:
            self.metrics.refused.labels(error.code).inc()
            raise
        session.expires = asyncio.get_running_loop().time() + session.lease_s
        self._sessions[session.id] = session
        self.metrics.opened.labels(session.environment.id).inc()
        if self._reaper is None:
            self._reaper = self._background.spawn(self._reap())
        return CreateReply([self._session_reply(session)])

    def _session_reply(self, session: Session) -> SessionReply:
        return SessionReply(
            id=session.id,
            task_id=session.task.id,
            lease_expires_at=self._lease_end(session),
            lease_s=session.lease_s,
            step=session.step,
            observation=session.observation,
            tools=from_json(session.told),
            public=session.task.public,
            fingerprint=session.loaded.fingerprint,
        )

    async def _open(self, request: CreateRequest, key: str | None) -> Session:
        """Makes a session and resets it."""
        environment = self.environments.find(request.env)
        timeout_s = min(request.timeout_s or environment.reset_timeout_s, MAX_TIMEOUT_S)
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        await self._capacity.acquire(environment, timeout_s)
        loaded = session = None
        try:
            loaded = await self.environments.load(environment, request.config, deadline - clock())
            loaded.num_users += 1  # so that it is not dropped
            async with asyncio.timeout(deadline - clock()):
                task = await self.environments.task(loaded, request.task)
                session_id = self._id_prefix + secrets.token_urlsafe(16)
                lease_s = request.lease_s or DEFAULT_LEASE_S
                session = Session(
                    session_id, loaded, task, request.seed, lease_s, key, request.max_turns
                )
                async with self._capacity.resetting(environment, (deadline - clock()) / 2):
                    reset = guard(start(session), environment.id, task)
                    session.calling = self._background.spawn(reset)
                    await self._background.wait(session.calling, environment.id)
        except BaseException as raised:
            error = raised
            if isinstance(raised, TimeoutError):
                message = f"reset of '{environment.id}' ran out of time"
                error = make_error("reset_timeout", message)
            if session is not None:
                code = error.code if isinstance(error, EnvError) else "reset_timeout"
                self._retire(session, code, error)  # also releases its capacity
            else:
                if loaded is not None:
                    loaded.num_users -= 1
                self._capacity.release(environment)
            if error is not raised:
                raise error from None
            raise
        return session

    # Stepping

    async def step(self, session_id: str, request: StepRequest) -> bytes:
        """Takes one step, or repeats the reply of the last one, waiting for it if it still runs.

        Returns:
            A `StepReply` as JSON.

        Raises:
            EnvError: `step_conflict`, `episode_done`, `session_expired` or `not_found`; or why the
                step failed.
        """
        session = self._session(session_id)
        # Encoded, because the author's code may change the objects of the request in place.
        body = encode(request.action) + (b"last" if request.last else b"")
        step = session.current
        if step is not None and step.index == request.step:
            if step.body != body:
                raise make_error(
                    "step_conflict",
                    f"step {request.step} of this session was already taken with another action",
                )
            self.metrics.replayed.inc()
            reply = decode(await step.wait(), StepReply)
            reply.replayed = True
            return encode(reply)
        if request.step != session.step:
            message = f"this session is at step {session.step}, not {request.step}"
            raise make_error("step_conflict", message)
        if session.status != "live":
            raise make_error("episode_done", "the episode is over; open a new session for another")
        loop = asyncio.get_running_loop()
        step = session.current = Step(session.step, body, loop.time())
        step.task = session.calling = loop.create_task(self._run_step(session, step, request))
        return await step.wait()

    async def _run_step(self, session: Session, step: Step, request: StepRequest) -> None:
        environment = session.environment
        env_id = environment.id
        caller.set((session.key or "").partition("/")[0])  # the client's name
        timeout_s = min(request.timeout_s or environment.step_timeout_s, MAX_TIMEOUT_S)
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(timeout_s, self._expire, session, step, timeout_s)
        try:
            turn = take_turn(session, request)
            reply, body = await guard(turn, env_id, session.task)
        except EnvError as error:
            error.retryable = False  # the step was taken; another call only repeats this error
            self._fail(session, step, error)
            return
        except asyncio.CancelledError:
            self._fail(session, step, cancelled_itself(env_id))
            raise
        finally:
            deadline.cancel()
        if step.outcome is not None:  # the deadline had passed, or the session was closed
            return
        session.step += 1
        session.reward += reply.reward
        session.reply = body
        if reply.terminated or reply.truncated:
            session.status = "ended"
            self._retire(session, "terminated" if reply.terminated else "truncated")
        self._settle(session, step, body)

    def _expire(self, session: Session, step: Step, timeout_s: float) -> None:
        """Answers a step at its deadline and stops its code."""
        env_id = session.environment.id
        message = f"the step of '{env_id}' took more than {timeout_s:g} s"
        self._background.stop(step.task)  # before the caller wakes, who may look for it
        self._fail(session, step, make_error("step_timeout", message))

    def _fail(self, session: Session, step: Step, error: EnvError) -> None:
        if step.outcome is not None:
            return
        session.status = "failed"
        self._retire(session, error.code, error)
        self._settle(session, step, error)

    def _settle(self, session: Session, step: Step, outcome: bytes | EnvError) -> None:
        step.settle(outcome)
        now = asyncio.get_running_loop().time()
        session.expires = now + session.lease_s
        self.metrics.steps.labels(session.environment.id).inc()
        self.metrics.step_seconds.observe(now - step.started)

    # Leases and the end of sessions

    def status(self, session_id: str) -> SessionStatus:
        """Returns the state of a session, and renews its lease."""
        session = self._session(session_id)
        return SessionStatus(
            id=session.id,
            env=session.environment.id,
            task_id=session.task.id,
            step=session.step,
            status=session.status,
            lease_expires_at=self._lease_end(session),
            reward=session.reward,
            last=None if session.reply is None else decode(session.reply, StepReply),
        )

    def renew(self, session_id: str, lease_s: float | None) -> SessionStatus:
        """Renews the lease of a session; with `lease_s`, changes its length in seconds first."""
        if lease_s is not None:
            self._session(session_id).lease_s = lease_s
        return self.status(session_id)

    def delete(self, session_id: str) -> None:
        """Closes a session; one that was closed already is left alone.

        Raises:
            EnvError: `not_found`.
        """
        session = self._sessions.get(session_id)
        if session is not None:
            self._forget(session, "closed")
        elif session_id not in self._closed_ids:
            raise make_error("not_found", "there is no such session")

    def _session(self, session_id: str) -> Session:
        """Returns a session and renews its lease."""
        session = self._sessions.get(session_id)
        now = asyncio.get_running_loop().time()
        if session is not None and (session.expires > now or session.busy):
            session.expires = now + session.lease_s
            return session
        if session is not None:
            self._forget(session, "expired")
        if session_id in self._closed_ids:
            how = self._closed_ids[session_id]
            raise make_error("session_expired", f"this session has {how}; open a new one")
        raise make_error("not_found", "there is no such session")

    def _lease_end(self, session: Session) -> float:
        return time.time() + session.expires - asyncio.get_running_loop().time()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            self._close_expired()  # a function, because a coroutine would keep its last session

    def _close_expired(self) -> None:
        now = asyncio.get_running_loop().time()
        for session in list(self._sessions.values()):
            if session.expires <= now and not session.busy:
                self._forget(session, "expired")

    def _forget(self, session: Session, how: str) -> None:
        """Closes a session and remembers only its id and idempotency key."""
        del self._sessions[session.id]
        ended = "expired" if how == "expired" else "been closed"
        if session.key is not None:
            self._creations.pop(session.key, None)
            _remember(self._closed_keys, session.key, ended)
        _remember(self._closed_ids, session.id, ended)
        step = session.current
        if step is not None and step.outcome is None:
            error = make_error("session_expired", "the session was closed while its step ran")
            self._background.stop(step.task)
            self._settle(session, step, error)
        self._retire(session, "abandoned" if how == "closed" else how)

    def _retire(self, session: Session, outcome: str, error: BaseException | None = None) -> None:
        """Logs the episode and starts closing its instance, once per session."""
        if session.retired:
            return
        session.retired = True
        self.metrics.closed.labels(session.environment.id, outcome).inc()
        if logger.isEnabledFor(logging.INFO):
            logger.info(json.dumps(episode_record(session, outcome, error)))
        self._background.spawn(self._close(session))

    async def _close(self, session: Session) -> None:
        try:
            if session.calling is not None:
                await asyncio.wait((session.calling,), timeout=CLOSE_TIMEOUT_S)
            if (instance := session.instance) is not None:
                closing = instance.call(instance.close)
                await self._background.close(closing, "close()", session.environment.id)
        finally:
            session.loaded.num_users -= 1
            self._capacity.release(session.environment)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new sessions, and waits at most `timeout_s` for the open ones to end."""
        self.draining = True
        self._capacity.closed = True
        deadline = time.monotonic() + timeout_s
        while self.num_live and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def aclose(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Closes all sessions and loaded environments, waiting for them at most `timeout_s`.

        Each loaded environment's `close_shared` gets at least 1 s.
        """
        self.draining = True
        self._capacity.closed = True
        if self._reaper is not None:
            self._reaper.cancel()
        for session in list(self._sessions.values()):
            self._forget(session, "closed")
        deadline = time.monotonic() + timeout_s
        while pending := {task for task in self._background.tasks if not task.done()}:
            await asyncio.wait(pending, timeout=max(deadline - time.monotonic(), 0.0))
            if time.monotonic() >= deadline:
                logger.warning("%d calls of environments still run at shutdown", len(pending))
                break
        await self.environments.aclose(max(deadline - time.monotonic(), 1.0))
        self.workers.close()


def _remember(closed: OrderedDict[str, str], name: str, how: str) -> None:
    closed[name] = how
    while len(closed) > MAX_CLOSED_IDS:
        closed.popitem(last=False)
