"""Converts what an author's code returned to messages, content and finite numbers."""

from __future__ import annotations

import inspect
import math
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from agentrl.env.protocol import encode
from agentrl.env.secret import hide_secrets
from agentrl.errors import EnvError
from agentrl.images import Image, check_images, image_part
from agentrl.types import Content, Message, Task

_MESSAGES = TypeAdapter(list[Message])


def to_observation(value: Any, source: str) -> list[Message]:
    """Converts a text, messages or None to messages.

    Args:
        source: names what returned the value, such as `reset()`, in error messages.

    Raises:
        EnvError: the value is something else, or a message lacks a role or content.
        ImageError: an image is invalid, or there are too many.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    try:
        messages = _MESSAGES.validate_python(value, strict=True)
    except ValidationError:
        hint = ""
        if isinstance(value, int | float | tuple):  # a reward, or the tuple of a Gym's step
            hint = "; give a reward with self.finish(reward), or return a StepResult from step()"
        raise EnvError(
            f"{source} must return a str, a list of messages with 'role' and 'content', or None; "
            f"it returned {short(repr(value), 300)}{hint}"
        ) from None
    shown = [each["content"] for each in messages if not isinstance(each["content"], str)]
    if shown:
        check_images(shown, source)
    return messages


def to_content(value: Any) -> Content:
    """Converts what a tool returned to the content of its message.

    A string, or a list of parts with an image, stays as it is; an `Image` becomes such a list, None
    an empty string, and anything else JSON text.

    Raises:
        EnvError: the value cannot become JSON.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Image):
        return [image_part(value)]
    if isinstance(value, list) and any(
        isinstance(part, dict) and part.get("type") == "image_url" for part in value
    ):
        return value
    if value is None:
        return ""
    if inspect.iscoroutine(value):
        value.close()
        raise EnvError(
            "a tool returned a coroutine that nobody awaited: make the tool `async def`, and write "
            "`return await ...`"
        )
    try:
        return encode(to_jsonable_python(_ordered(value))).decode()
    except (TypeError, PydanticSerializationError) as error:
        raise EnvError(
            f"a tool returned a value of type {type(value).__name__}, which cannot become JSON; "
            "return a str, a number, a list or a dict"
        ) from error


def _ordered(value: Any) -> Any:
    """Sorts sets: their own order differs between processes."""
    if isinstance(value, set | frozenset):
        return sorted(map(_ordered, value), key=repr)
    if isinstance(value, dict):
        return {key: _ordered(each) for key, each in value.items()}
    return [*map(_ordered, value)] if type(value) in (list, tuple) else value


def to_finite(value: Any, source: str) -> float:
    """Converts a number to a float.

    Args:
        source: names the number in error messages.

    Raises:
        EnvError: it is not a number, or it is NaN or infinite.
    """
    try:
        if isinstance(value, str | bytes):  # float() would accept them
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvError(f"{source} must be a number, not {short(repr(value), 300)}") from error
    if not math.isfinite(number):
        raise EnvError(f"{source} is {number}: rewards and metrics must be finite")
    return number


def describe(error: BaseException, task: Task | None) -> str:
    """Returns the class and message of an exception in one line.

    Replaces the task's reference, if it is a string of more than three characters, and secrets.
    """
    try:
        text = str(error)
    except BaseException:  # an author's own __str__
        text = ""
    message = short(hide_secrets(" ".join(text.split())), 300)
    if task is not None and isinstance(task.reference, str) and len(task.reference) > 3:
        message = message.replace(task.reference, "[reference]")
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def short(value: object, limit: int = 160) -> str:
    """Returns a value as text of at most `limit` characters, plus an ellipsis if it was cut."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
