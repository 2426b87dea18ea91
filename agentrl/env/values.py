"""Reads what an author's code returned as messages, text and finite numbers."""

from __future__ import annotations

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
    """Messages from what an author returned.

    Raises:
        EnvError: it is neither a text, nor messages with a role and a content, nor None.
        ImageError: an image is wrong, or they are too many.
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
            f"it returned {_short(repr(value))}{hint}"
        ) from None
    check_images((each["content"] for each in messages), source)
    return messages


def to_content(value: Any) -> Content:
    """Returns the content of a tool's message: an `Image`, or parts with one, are shown as such."""
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
    try:
        return encode(to_jsonable_python(value)).decode()
    except (TypeError, PydanticSerializationError) as error:
        raise EnvError(
            f"a tool returned a value of type {type(value).__name__}, which cannot become JSON; "
            "return a str, a number, a list or a dict"
        ) from error


def to_finite(value: Any, source: str) -> float:
    """A finite float from a number an author gave.

    Raises:
        EnvError: it is no number, NaN or infinite.
    """
    try:
        if isinstance(value, str | bytes):  # which float() would read
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvError(f"{source} must be a number, not {_short(repr(value))}") from error
    if not math.isfinite(number):
        raise EnvError(f"{source} is {number}: rewards and metrics must be finite")
    return number


def describe(error: BaseException, task: Task | None) -> str:
    """One line about an exception: its class and message, without the task's reference answer and
    without secrets."""
    message = _short(hide_secrets(" ".join(str(error).split())))
    if task is not None and isinstance(task.reference, str) and len(task.reference) > 3:
        message = message.replace(task.reference, "[reference]")
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
