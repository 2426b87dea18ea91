"""Sessions: the life of episodes in one process, whoever calls, in-process or over the wire.

* **Exactly once.** A step names the index the session is at. The same index with the same action
  gets the same reply again (`replayed`), waiting for it if it is still running; the same index with
  another action, or any other index, is a `step_conflict`. A reset in place takes an index too, so
  the index only ever grows.
* **Deadlines are enforced**, not advised: the caller has its answer at the deadline, whether or not
  the author's code reacts to being cancelled. A step that ran out of time is `step_timeout` and
  the session takes no other, unless the environment is `cancel_safe`: then it counts as not taken.
* **Leases.** Every call renews; a running step holds the lease; an expired session is closed and
  answers `session_expired`. A live session is never reaped.
* **Never a fresh environment by surprise.** A step after the end is `episode_done`.
* **Bounded.** See `admission` for new sessions, `snapshots` for what forks start from.

A session has one episode at a time, and an episode has an instance of its own: a reset in place and
a fork begin with a new one, so nothing of an earlier episode can be left in it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl.env import protocol
from agentrl.env.base import Environment, can_snapshot
from agentrl.env.protocol import (
    AgentCall,
    AgentReply,
    AgentTools,
    CreateReply,
    CreateRequest,
    EnvInfo,
    ResetRequest,
    SessionReply,
    SessionStatus,
    SnapshotReply,
    SnapshotRequest,
    StepReply,
    StepRequest,
    TaskPreview,
    make_error,
)
from agentrl.env.session.admission import MAX_WAIT_S, Admission, draining
from agentrl.env.session.boundary import Background, to_env_error
from agentrl.env.session.instances import Instance, Instances
from agentrl.env.session.snapshots import Snapshots
from agentrl.env.session.sources import CLOSE_TIMEOUT_S, Sources
from agentrl.env.session.stats import Stats, count
from agentrl.env.session.turn import Turn
from agentrl.env.threads import WorkerPool
from agentrl.errors import EnvError
from agentrl.types import JSON

logger = logging.getLogger("agentrl.env")

DEFAULT_LEASE_S = 300.0
MAX_TIMEOUT_S = 6 * 3600.0
_MAX_TOMBSTONES = 16_384


@dataclass(slots=True, eq=False)
class _Creation:
    request: CreateRequest
    task: asyncio.Task[CreateReply]


@dataclass(slots=True, eq=False)
class _Session:
    id: str
    instance: Instance
    lease_s: float
    expires: float
    """On the event loop's clock."""
    step: int = 0
    status: str = "live"
    turn: Turn | None = None
    """The turn that runs, or the last that ran."""
    key: str | None = None
    """The Idempotency-Key it was opened with."""
    alarm: asyncio.TimerHandle | None = None
    """Goes off at the deadline of a step, or before: see `_set_alarm`."""

    @property
    def busy(self) -> bool:
        return self.turn is not None and self.turn.outcome is None


class SessionManager:
    """All sessions of a process. Used from one event loop."""

    def __init__(
        self,
        resolve: Callable[[str], type[Environment]],
        *,
        max_sessions: int | None = None,
        worker_threads: int = 32,
        config: Mapping[str, Mapping[str, JSON]] | None = None,
        max_wait_s: float = MAX_WAIT_S,
        secret: bytes | None = None,
        worker: int | str = 0,
        num_workers: int = 1,
    ) -> None:
        """
        Args:
            resolve: finds the class of an environment id, or raises ConfigError.
            max_sessions: live sessions over all environments; None leaves it to each
                environment's own limit.
            worker_threads: threads for plain `def` methods of all sessions together.
            config: by environment id, what every session's configuration starts from.
            max_wait_s: how long a creation waits for a slot before it is `at_capacity`.
            secret: what session and agent tokens are made with; workers of one server share it.
            worker: number of this process among the `num_workers` of a server; where there are
                several, session ids begin with it.
        """
        self.workers = WorkerPool(worker_threads)
        self.draining = False
        self.secret = secret or secrets.token_bytes(32)
        prefix = f"{worker}-" if num_workers > 1 else ""
        self._background = Background()
        self._sources = Sources(resolve, config or {}, self.workers, self._background)
        self._admission = Admission(max_sessions, max_wait_s)
        self._snapshots = Snapshots()
        self._stats = Stats()
        self._instances = Instances(
            self._background, self._admission, self._sources, self._snapshots, self._stats, prefix
        )
        self._sessions: dict[str, _Session] = {}
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self._creations: dict[str, _Creation] = {}
        self._reaper: asyncio.Task[None] | None = None

    @property
    def num_live(self) -> int:
        return self._admission.num_live

    @property
    def stats(self) -> Stats:
        """The counters, as they are now."""
        stats = self._stats
        stats.live = dict(self._admission.live)
        stats.waiting = self._admission.num_waiting
        stats.breakers = self._admission.breaker_states()
        stats.snapshot_bytes = self._snapshots.num_bytes
        stats.abandoned_threads = self.workers.num_abandoned
        stats.stuck_calls = len(self._background.stuck)
        return stats

    def readiness(self) -> str | None:
        """Why this process should get no new sessions; None if it may."""
        if self.draining:
            return "the server is shutting down"
        hung, most = self.workers.num_abandoned, self.workers.max_abandoned
        if 2 * hung >= most:
            return (
                f"{hung} threads hang past their deadline, and at {most} calls are refused: "
                "restart the process, and use isolation = 'process'"
            )
        return None

    # Environments and tasks

    async def info(
        self,
        env_id: str,
        config: Mapping[str, JSON] | None = None,
        timeout_s: float | None = None,
    ) -> EnvInfo:
        """See `Sources.info`."""
        environment = self._sources.environment(env_id)
        info = await self._sources.info(environment, config or {}, timeout_s)
        info.max_sessions = self._admission.limit(environment)
        return info

    async def preview(
        self,
        env_id: str,
        split: str,
        start: int,
        stop: int,
        config: Mapping[str, JSON] | None = None,
    ) -> list[TaskPreview]:
        """Tasks `[start, stop)` of a split, without what would give their answers away."""
        environment = self._sources.environment(env_id)
        return await self._sources.preview(environment, config or {}, split, start, stop)

    # Opening

    async def create(self, request: CreateRequest, key: str | None = None) -> CreateReply:
        """Open `request.count` sessions, all or none, waiting a while for free slots.

        A repeated call with the same idempotency key gets the same sessions, until one of them is
        closed. It runs to its end even when its caller goes away; sessions nobody claims expire.
        """
        if key is None:
            return await asyncio.shield(self._background.spawn(self._create(request)))
        creation = self._creations.get(key)
        if creation is None:
            task = self._background.spawn(self._create(request, key))
            creation = self._creations[key] = _Creation(request, task)
            task.add_done_callback(lambda task: self._forget_failed(key, task))
        elif creation.request != request:
            raise make_error(
                "idempotency_conflict",
                "this Idempotency-Key came before with another request; use a fresh one",
            )
        else:
            self._stats.replayed += 1
        return await asyncio.shield(creation.task)

    def _forget_failed(self, key: str, task: asyncio.Task[CreateReply]) -> None:
        if task.cancelled() or task.exception() is not None:  # it opened nothing
            self._creations.pop(key, None)

    async def _create(self, request: CreateRequest, key: str | None = None) -> CreateReply:
        try:
            if self.draining:
                raise draining()
            environment = self._sources.environment(request.env)
            timeout_s = min(request.timeout_s or environment.reset_timeout_s, MAX_TIMEOUT_S)
            instances = await self._instances.open_group(environment, request, timeout_s)
        except EnvError as error:
            count(self._stats.refused, error.code)
            raise
        lease_s = request.lease_s or DEFAULT_LEASE_S
        expires = asyncio.get_running_loop().time() + lease_s
        sessions = [
            _Session(each.session_id, each, lease_s, expires, each.first_step, key=key)
            for each in instances
        ]
        self._sessions.update((session.id, session) for session in sessions)
        if self._reaper is None:
            self._reaper = self._background.spawn(self._reap())
        return CreateReply([self._session_reply(session) for session in sessions])

    def _session_reply(self, session: _Session) -> SessionReply:
        return SessionReply(
            id=session.id,
            task_id=session.instance.task.id,
            lease_expires_at=self._lease_end(session),
            lease_s=session.lease_s,
            step=session.step,
            observation=session.instance.first,
            tools=session.instance.runner.tools,
            token=protocol.session_token(self.secret, session.id),
            agent_token=protocol.agent_token(self.secret, session.id),
        )

    # Stepping

    async def step(self, session_id: str, request: StepRequest) -> bytes:
        """Take one step, or wait for and repeat the reply of one that was asked for before.

        Returns a `StepReply` as JSON.
        """
        return await self._step(session_id, request)

    def _step(self, session_id: str, request: StepRequest) -> asyncio.Future[bytes]:
        session = self._session(session_id)
        # Encoded, because the author's code may change the very objects of the request.
        body = protocol.encode(request.action) + (b"last" if request.last else b"")
        turn = session.turn
        if turn is not None and turn.index == request.step:
            if turn.body != body:
                raise make_error(
                    "step_conflict",
                    f"step {request.step} of this session was asked for with another body",
                )
            return self._background.spawn(self._replay(turn))
        self._check_index(session, request.step)
        if session.status != "live":
            raise make_error(
                "episode_done",
                "the episode is over; reset the session, or open a new one, for another episode",
            )
        loop, instance = asyncio.get_running_loop(), session.instance
        session.turn = turn = Turn(session.step, body, session.turn, loop.time())
        turn.task = instance.running = loop.create_task(self._run_step(session, turn, request))
        seconds = request.timeout_s or instance.environment.step_timeout_s
        turn.deadline = turn.started + min(seconds, MAX_TIMEOUT_S)
        if session.alarm is None or session.alarm.when() > turn.deadline:
            self._set_alarm(session, turn.deadline)
        return turn.waiter()

    def _set_alarm(self, session: _Session, when: float) -> None:
        """Watch the deadlines of a session's steps.

        An alarm is left standing when its step ends, and set again for the step that runs when it
        goes off. So there is one per session and minute, not one per step to make and cancel.
        """
        if session.alarm is not None:
            session.alarm.cancel()
        session.alarm = asyncio.get_running_loop().call_at(when, self._on_alarm, session)

    def _on_alarm(self, session: _Session) -> None:
        session.alarm = None
        turn = session.turn
        if turn is None or turn.outcome is not None or turn.deadline is None:
            return
        if turn.deadline <= asyncio.get_running_loop().time():
            self._expire_step(session, turn)
        else:
            self._set_alarm(session, turn.deadline)

    def _check_index(self, session: _Session, index: int) -> None:
        if index != session.step:
            message = f"this session is at step {session.step}, not {index}"
        elif session.busy:
            message = f"step {index} of this session is running"
        else:
            return
        raise make_error("step_conflict", message)

    async def _run_step(self, session: _Session, turn: Turn, request: StepRequest) -> None:
        instance = session.instance
        try:
            if instance.before is not None:
                await asyncio.wait({instance.before})
                instance.before = None
            action = protocol.from_wire_action(request.action)
            result = await instance.runner.turn(action, last=request.last)
            # Encoded here, where a value that is not JSON is still an error of the environment.
            body = protocol.encode(protocol.to_step_reply(result, turn.index + 1))
        except asyncio.CancelledError:
            error = make_error("env_error", f"'{instance.environment.id}' cancelled its own step")
            self._fail(session, turn, error)
            raise
        except (Exception, SystemExit) as raised:  # the boundary to an author's code
            error = to_env_error(raised, instance.environment.id, instance.task)
            error.retryable = False  # the step was taken; asking again repeats this answer
            self._fail(session, turn, error)
            return
        if turn.outcome is not None:  # the deadline had passed, or the session was closed
            return
        session.step += 1
        instance.turns += 1
        instance.reward += result.reward
        if result.terminated or result.truncated:
            session.status = "ended"
            self._instances.retire(instance, "terminated" if result.terminated else "truncated")
        self._settle(session, turn, body)

    def _expire_step(self, session: _Session, turn: Turn) -> None:
        assert turn.deadline is not None
        instance, seconds = session.instance, turn.deadline - turn.started
        error = make_error(
            "step_timeout", f"the step of '{instance.environment.id}' took more than {seconds:g} s"
        )
        if instance.environment.cancel_safe:
            error.retryable = True
            session.turn, instance.before = turn.previous, instance.before or turn.task
            self._settle(session, turn, error)
        else:
            self._fail(session, turn, error)
            instance.runner.kill()
        if turn.task is not None:
            self._background.stop(turn.task)

    def _fail(self, session: _Session, turn: Turn, error: EnvError) -> None:
        if turn.outcome is not None:
            return
        session.status = "failed"
        self._instances.retire(session.instance, error.code, error)
        self._settle(session, turn, error)

    def _settle(self, session: _Session, turn: Turn, outcome: bytes | EnvError) -> None:
        turn.settle(outcome)
        now = asyncio.get_running_loop().time()
        session.expires = now + session.lease_s
        self._stats.add_step(session.instance.environment.id, now - turn.started)

    async def _replay(self, turn: Turn) -> bytes:
        self._stats.replayed += 1
        reply = protocol.decode_reply(await turn.wait(), StepReply)
        reply.replayed = True
        return protocol.encode(reply)

    # Another episode in the same session

    async def reset(self, session_id: str, request: ResetRequest) -> SessionReply:
        """Start another episode in the session, whose index goes on growing.

        A repeated call gets the same reply. When the new episode cannot be started the old one is
        gone nevertheless, and the session is `failed` until a reset succeeds; only a reset that
        is refused as it stands (`invalid_request`, an open breaker) leaves everything as it was.
        """
        return protocol.decode_reply(await self._reset(session_id, request), SessionReply)

    async def _reset(self, session_id: str, request: ResetRequest) -> bytes:
        session = self._session(session_id)
        body = b"reset" + protocol.encode(ResetRequest(0, request.task, request.seed))
        turn = session.turn
        if turn is not None and turn.index == request.step and turn.body == body:
            self._stats.replayed += 1
            return await turn.wait()
        self._check_index(session, request.step)
        if self.draining:
            raise draining()
        started = asyncio.get_running_loop().time()
        session.turn = turn = Turn(session.step, body, session.turn, started)
        turn.task = self._background.spawn(self._run_reset(session, turn, request))
        return await turn.wait()

    async def _run_reset(self, session: _Session, turn: Turn, request: ResetRequest) -> None:
        environment = session.instance.environment
        timeout_s = min(request.timeout_s or environment.reset_timeout_s, MAX_TIMEOUT_S)
        try:
            instance = await self._instances.reopen(
                session.instance, request.task, request.seed, timeout_s
            )
        except EnvError as error:
            if error.retryable or not session.instance.retired:  # it counts as not asked for
                session.turn = turn.previous
            if session.instance.retired:
                session.status = "failed"
            if turn.outcome is None:
                self._settle(session, turn, error)
            return
        if turn.outcome is not None:  # the session was closed meanwhile
            self._instances.retire(instance, "abandoned")
            return
        session.instance = instance
        session.step += 1
        session.status = "live"
        self._settle(session, turn, protocol.encode(self._session_reply(session)))

    # Snapshots

    async def snapshot(self, session_id: str, request: SnapshotRequest) -> SnapshotReply:
        """Keep the state of an episode, from which `create` forks sessions.

        Raises:
            EnvError: `not_supported` if the environment has no `snapshot`; `at_capacity` if too
                much is kept already.
        """
        session = self._session(session_id)
        instance, environment = session.instance, session.instance.environment
        if not can_snapshot(environment):
            raise make_error(
                "not_supported",
                f"environment '{environment.id}' has no snapshot() and restore() methods",
            )
        late = make_error("step_timeout", f"snapshot() of '{environment.id}' ran out of time")
        if instance.before is not None:  # another snapshot, or a step that has not stopped yet
            await asyncio.wait({instance.before}, timeout=environment.step_timeout_s)
            if not instance.before.done():
                raise late
        self._check_index(session, request.step)
        if session.status != "live":
            raise make_error("episode_done", "the episode is over; there is nothing to go on from")
        taking = self._instances.begin_snapshot(instance)
        await asyncio.wait({taking}, timeout=environment.step_timeout_s)
        if not taking.done():
            self._background.stop(taking)
            if not environment.cancel_safe:
                session.status = "failed"
                instance.runner.kill()
                self._instances.retire(instance, late.code, late)
            raise late
        if taking.cancelled():
            raise make_error("session_expired", "the session was closed during the snapshot")
        lease_s = request.lease_s or DEFAULT_LEASE_S
        return self._instances.keep_snapshot(instance, request.step, taking.result(), lease_s)

    # The agent's own calls

    def agent_tools(self, session_id: str) -> AgentTools:
        session = self._session(session_id)
        return AgentTools(session.instance.runner.tools, session.step)

    async def agent_call(self, session_id: str, call: AgentCall) -> AgentReply:
        """Call one tool as a step of the session. The agent sees what the tool says and whether
        the episode is over; reward and info are for the trainer, in `status`."""
        session = self._session(session_id)
        if call.step is None:
            while session.turn is not None and session.busy:
                await asyncio.wait({session.turn.waiter()})
        step = session.step if call.step is None else call.step
        action = protocol.WireAction(
            tool_calls=[protocol.WireCall(f"agent-{step}", call.name, call.arguments)]
        )
        body = await self.step(session_id, StepRequest(step, action))
        reply = protocol.decode_reply(body, StepReply)
        content = "\n".join(message["content"] for message in reply.observation)
        return AgentReply(content, reply.terminated or reply.truncated, reply.step)

    # Frames

    def handle(self, frame: protocol.Frame) -> asyncio.Future[bytes]:
        """Begin what a frame asks for.

        Returns a future of the reply's body, so that a caller with many sessions needs no task for
        each: a step has one of its own already.

        Raises:
            EnvError: at once, or from the future.
        """
        if isinstance(frame, protocol.StepFrame):
            return self._step(frame.sid, frame)
        return self._background.spawn(self._handle(frame))

    async def _handle(self, frame: protocol.Frame) -> bytes:
        reply: object = {}
        match frame:
            case protocol.CreateFrame():
                reply = await self.create(protocol.to_create_request(frame), frame.key)
            case protocol.ResetFrame():
                return await self._reset(frame.sid, frame)
            case protocol.SnapshotFrame():
                reply = await self.snapshot(frame.sid, frame)
            case protocol.RenewFrame():
                reply = self.renew(frame.sid, frame.lease_s)
            case protocol.StatusFrame():
                reply = self.status(frame.sid)
            case protocol.DeleteFrame():
                self.delete(frame.sid)
            case protocol.InfoFrame():
                reply = await self.info(frame.env, frame.config, frame.timeout_s)
        return protocol.encode(reply)

    # Leases and the end of sessions

    def status(self, session_id: str) -> SessionStatus:
        session = self._session(session_id)
        turn = session.turn
        last = None
        if turn is not None and turn.outcome is None:
            turn = turn.previous
        if turn is not None and isinstance(turn.outcome, bytes) and turn.body[:5] != b"reset":
            last = protocol.decode_reply(turn.outcome, StepReply)
        return SessionStatus(
            session.id,
            session.instance.environment.id,
            session.instance.task.id,
            session.step,
            session.status,
            self._lease_end(session),
            session.instance.reward,
            last,
        )

    def renew(self, session_id: str, lease_s: float | None) -> SessionStatus:
        if lease_s is not None:
            self._session(session_id).lease_s = lease_s
        return self.status(session_id)

    def delete(self, session_id: str) -> None:
        """Close a session. Closing one that was closed before is no error."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._bury(session, "closed")
        elif session_id not in self._tombstones:
            raise make_error("not_found", "there is no such session")

    def _session(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is not None:
            now = asyncio.get_running_loop().time()
            if session.expires > now or not self._expired(session, now):
                session.expires = now + session.lease_s
                return session
            self._bury(session, "expired")
        if session_id in self._tombstones:
            how = self._tombstones[session_id]
            raise make_error("session_expired", f"this session has {how}; open a new one")
        raise make_error("not_found", "there is no such session")

    def _expired(self, session: _Session, now: float) -> bool:
        """Never while a call of the session runs."""
        if session.expires > now or session.busy:
            return False
        return session.instance.before is None or session.instance.before.done()

    def _lease_end(self, session: _Session) -> float:
        return time.time() + session.expires - asyncio.get_running_loop().time()

    async def _reap(self) -> None:
        while True:
            now = asyncio.get_running_loop().time()
            for session in [s for s in self._sessions.values() if self._expired(s, now)]:
                self._bury(session, "expired")
            self._snapshots.drop_expired()
            leases = [each.expires for each in self._sessions.values() if not each.busy]
            await asyncio.sleep(min(max(min(leases, default=now + 1.0) - now, 0.01), 1.0))

    def _bury(self, session: _Session, how: str) -> None:
        """Forget a session, remembering only that it was there."""
        del self._sessions[session.id]
        if session.alarm is not None:
            session.alarm.cancel()
        if session.key is not None:
            self._creations.pop(session.key, None)
        self._tombstones[session.id] = "expired" if how == "expired" else "been closed"
        while len(self._tombstones) > _MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        turn = session.turn
        if turn is not None and session.busy:
            error = make_error("session_expired", "the session was closed while its step ran")
            self._settle(session, turn, error)
            if turn.task is not None:
                self._background.stop(turn.task)
        self._instances.retire(session.instance, "abandoned" if how == "closed" else how)

    async def drain(self, timeout_s: float) -> None:
        """Open no more sessions, and wait until the open ones have ended, or the time is over."""
        self.draining = True
        self._admission.close()
        deadline = time.monotonic() + timeout_s
        while self.num_live and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def aclose(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close all sessions and what they shared, waiting for their `close` until the deadline."""
        self.draining = True
        self._admission.close()
        if self._reaper is not None:
            self._reaper.cancel()
        for session in list(self._sessions.values()):
            self._bury(session, "closed")
        self._snapshots.clear()
        deadline = time.monotonic() + timeout_s
        while pending := {task for task in self._background.tasks if not task.done()}:
            await asyncio.wait(pending, timeout=max(deadline - time.monotonic(), 0.0))
            if time.monotonic() >= deadline:
                logger.warning("%d environment calls hang at shutdown", len(pending))
                break
        await self._sources.aclose(max(deadline - time.monotonic(), 1.0))
        self.workers.close()
