"""A session manager without a server around it, for the tests of its rules."""

import asyncio
import contextlib
import functools
import inspect
import time

import pytest
from sample_envs import Workshop

from agentrl.env import resolve
from agentrl.env.protocol import StepReply, StepRequest, decode
from agentrl.env.sessions.manager import SessionManager
from agentrl.errors import EnvError
from agentrl.types import Action, ToolCall


@contextlib.asynccontextmanager
async def managed(resolve=resolve, **options):
    """A session manager of which nothing may be left at the end."""
    manager = SessionManager(resolve, **{"max_wait_s": 0.02, **options})
    try:
        yield manager
    finally:
        Workshop.release.set()
        await manager.aclose()
        Workshop.release.clear()
    assert manager.num_live == 0 and manager._capacity.num_waiting == 0
    assert not manager._background.tasks
    assert all(each.num_users == 0 for each in manager.environments._loaded.values())


def with_manager(*args, **options):
    """Calls an async test with what `managed` makes as its first argument."""

    def decorate(test):
        @functools.wraps(test)
        async def wrapped(**fixtures):
            async with managed(*args, **options) as manager:
                await test(manager, **fixtures)

        signature = inspect.signature(test)
        _, *fixtures = signature.parameters.values()
        wrapped.__signature__ = signature.replace(parameters=fixtures)
        return wrapped

    return decorate


async def open_group(manager, request, count):
    """Sessions that are opened at the same time, on one task and seed."""
    replies = await asyncio.gather(*(manager.create(request) for _ in range(count)))
    return [reply.sessions[0] for reply in replies]


def call(name, **arguments):
    return Action(tool_calls=(ToolCall("c", name, arguments),))


async def step(manager, session, index, action, timeout_s=None, last=False) -> StepReply:
    body = await manager.step(session.id, StepRequest(index, action, timeout_s, last))
    return decode(body, StepReply)


async def error_of(awaitable) -> EnvError:
    with pytest.raises(EnvError) as caught:
        await awaitable
    return caught.value


async def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.005)


def wait_until(condition, seconds=60.0):
    """Does the same without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)
