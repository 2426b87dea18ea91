"""Starts an agent on a task and makes sure that it ends.

    run = "file.py:solve"       a callable (task, base_url, api_key) -> answer, async or not
    command = ["mini", ...]     a process per episode, in a folder of its own
    container = "image"         the same in a container of its own (`container.py`)

Callables run in a thread with an event loop of its own: one that blocks holds up other agents, and
neither the endpoint that it calls nor the trainer. A callable that takes no notice of being
cancelled cannot be stopped; its calls are refused from then on. A process is killed with its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Protocol

from agentrl import runtime, user_modules
from agentrl.config import AgentSection
from agentrl.env.client import EnvSession
from agentrl.env.container.process import GRACE_S
from agentrl.errors import AgentError, ConfigError
from agentrl.images import content_text
from agentrl.rollout.agent.command import AgentTask, CommandRunner
from agentrl.rollout.agent.recorder import Recorder
from agentrl.rollout.agent.roles import leave_untrained, served_turns
from agentrl.rollout.agent.server import AgentServer, Live, is_rewards
from agentrl.rollout.agent.tools import EnvTools
from agentrl.rollout.driver import AgentOutcome, Limits, Progress
from agentrl.rollout.policy import TokenPolicy
from agentrl.types import Action, StepResult, Trajectory

Result = str | float | dict[str, float] | None


class Runner(Protocol):
    async def run(self, task: AgentTask, base_url: str, api_key: str) -> Result:
        """Runs the agent and returns its answer, a number as its reward, or rewards by response id.

        Raises:
            Exception: any error of the agent.
        """
        ...

    async def aclose(self) -> None: ...


class Agents:
    """Plays episodes by an agent: endpoint, recorder and runner together."""

    def __init__(self, server: AgentServer, runner: Runner) -> None:
        self.server, self.runner = server, runner

    async def start(self) -> None:
        await self.server.start()

    async def aclose(self) -> None:
        await self.runner.aclose()
        await self.server.aclose()

    async def play(
        self,
        trajectory: Trajectory,
        policy: TokenPolicy,
        session: EnvSession,
        step: Callable[[Action], Awaitable[StepResult]],
        limits: Limits,
        now: Progress,
    ) -> AgentOutcome:
        """Runs the agent on the session's task until it ends, and appends its turns to the
        trajectory.

        Raises:
            Exception: what the engine or the environment raised, with `now` in stage `generate` or
                `step`; or what the agent raised, unless it had run into a limit or the environment
                had ended the episode.
        """
        tools = EnvTools(session, step, trajectory)
        with (
            contextlib.closing(tools),
            self.server.episode(
                Recorder(trajectory, policy),
                max_turns=limits.max_turns,
                turn_timeout_s=limits.turn_timeout_s,
                on_turn=now.took_turn,
                tools=tools,
            ) as live,
        ):
            root = live.url.removesuffix("/v1")
            task = AgentTask(
                session.task_id,
                "\n\n".join(content_text(each["content"], "[image]") for each in session.messages),
                session.messages,
                session.tools,
                mcp_url=f"{root}/mcp",
                tools_url=f"{root}/tools",
                metadata=session.public
                | {
                    "env_id": trajectory.env_id,
                    "seed": trajectory.seed,
                    "trajectory_id": trajectory.trajectory_id,
                    "group_id": trajectory.group_id,
                },
            )
            agent = asyncio.ensure_future(self._run(task, live, tools))
            try:
                await asyncio.wait(
                    (agent, live.ended, live.failure, tools.failure),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                if not agent.done():
                    agent.cancel()
                    await asyncio.wait((agent,), timeout=2 * GRACE_S)
                if agent.done() and not agent.cancelled():
                    agent.exception()  # seen, whatever else ended the episode
            await tools.settle()
            served = served_turns(live.asked_by_turn)
            leave_untrained(trajectory, served)
            last = max(set(range(len(trajectory.turns))) - set(served), default=None)
            if live.failure.done():
                now.enter("generate")
                live.failure.result()
            if tools.failure.done():
                now.enter("step")
                tools.failure.result()
            if live.ended.done():
                answer = live.ended.result()
            elif agent.cancelled():
                raise AgentError("the agent cancelled itself")
            elif not trajectory.turns and live.refused:
                raise AgentError(
                    "every call of the agent was refused, with " + "; ".join(live.refused)
                ) from agent.exception()
            elif (error := agent.exception()) is None:
                answer = agent.result()
            elif live.cut is not None or tools.is_over:
                answer = ""  # it could not go on
            elif last is not None and trajectory.turns[last].finish_reason == "length":
                answer = None  # some give up over a turn that was cut, which is the run's limit
            else:
                raise AgentError(str(error)) if isinstance(error, TimeoutError) else error
        if last is None and (trajectory.turns or "served_elsewhere" in trajectory.info):
            raise AgentError("agent.roles leaves no call of the episode to train; change its rules")
        if isinstance(answer, str | None):
            return AgentOutcome(answer, None, live.cut, last)
        if isinstance(answer, dict):
            return AgentOutcome(None, _by_turn(answer, live), live.cut, last)
        return AgentOutcome(None, {last: float(answer)}, live.cut, last)

    async def _run(self, task: AgentTask, live: Live, tools: EnvTools) -> Result:
        return await self.runner.run(task, live.url, live.key)


def _by_turn(rewards: dict[str, float], live: Live) -> dict[int | None, float]:
    """Returns the rewards by turn instead of by response id."""
    result: dict[int | None, float] = {}
    for name, reward in rewards.items():
        turn = live.turn_of.get(re.sub("^(chatcmpl-|resp_|msg_)", "", name))
        if turn is None:
            raise AgentError(f"the agent rewards {name!r}, which is not a response of its episode")
        result[turn] = result.get(turn, 0.0) + float(reward)
    return result


def make_agents(config: AgentSection, *, max_concurrent: int) -> Agents:
    """Makes the endpoint and the runner that `[agent]` configures.

    Raises:
        ConfigError: the function, the program, the image or the network cannot be found.
        EnvUnavailable: there is no Docker engine for the agents' containers.
    """
    host = "127.0.0.1"
    if config.run is not None:
        solve = user_modules.load(config.run)
        if not callable(solve):
            raise ConfigError(f"agent.run = {config.run!r} is not a function")
        runner = CallableRunner(solve)
    elif config.container is not None:
        from agentrl.rollout.agent.container import ContainerRunner

        runner = ContainerRunner(config, max_concurrent=max_concurrent)
        host = runner.host
    else:
        runner = CommandRunner(config.command, answer=config.answer, home=config.home)
    server = AgentServer(
        config.host or host,
        config.port,
        leaves_out_tools=config.leave_out_provider_tools,
        roles=config.roles,
    )
    return Agents(server, runner)


class CallableRunner:
    def __init__(self, solve: Callable[[AgentTask, str, str], Any]) -> None:
        self._solve = solve
        self._is_async = inspect.iscoroutinefunction(solve)
        self._loop = runtime.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="agentrl-agents", daemon=True
        )
        self._thread.start()

    async def run(self, task: AgentTask, base_url: str, api_key: str) -> Result:
        call = self._call(task, base_url, api_key)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    async def aclose(self) -> None:
        ending = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        await asyncio.wait((asyncio.wrap_future(ending),), timeout=2 * GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, GRACE_S)

    async def _call(self, *arguments: Any) -> Result:
        try:
            if self._is_async:
                result: Any = await self._solve(*arguments)
            else:
                result = await _in_thread(self._solve, *arguments)
                if isinstance(result, Awaitable):
                    result = await result
        except SystemExit as error:  # would end the thread of all agents
            raise AgentError(f"the agent exited with {error.code}") from None
        return checked_result(result)


def checked_result(result: Any) -> Result:
    """Returns the result of an agent, if it has a valid type and value.

    Raises:
        AgentError: an agent cannot return such a value.
    """
    if not (result is None or isinstance(result, str | int | float) or is_rewards(result)):
        raise AgentError(
            f"the agent returned {type(result).__name__}; return its answer as a text, a reward as "
            "a number, rewards as a dict by the ids of responses, or None for what the policy said "
            "last"
        )
    return result


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a daemon thread, so that a function which ignores its cancellation does
    not keep the process from exiting."""
    called: Future[Any] = Future()
    called.set_running_or_notify_cancel()  # from now on it is not cancelled, whoever waits is

    def call() -> None:
        try:
            called.set_result(function(*arguments))
        except BaseException as error:  # of whoever waits
            called.set_exception(error)

    threading.Thread(target=call, name="agentrl-agent", daemon=True).start()
    return await asyncio.wrap_future(called)


async def _cancel_others() -> None:
    """Cancels the other tasks on this event loop and gives them time to clean up."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=GRACE_S)
    await asyncio.get_running_loop().shutdown_asyncgens()
