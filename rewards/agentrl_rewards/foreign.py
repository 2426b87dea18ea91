"""Reward functions in the signatures of other trainers, called with what those trainers pass.

    form = recognise(function, "my_rewards.py:accuracy", options={})
    form.is_group                          # True for TRL: one call per group
    args, kwargs = form.arguments(answers)
    function(*args, **kwargs)

A function is recognised by the names of its parameters (`SHAPES`). The text that such a function
gets is the whole one, with the reasoning, as its own trainer passes it. A name that belongs to
another trainer but to no known shape is refused, because such a function would otherwise get its
arguments in the wrong places.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any

from agentrl.errors import ConfigError, GraderError
from agentrl.images import content_text
from agentrl.types import Message
from agentrl_rewards.inputs import RewardInput

SHAPES = {
    "TRL": ("completions",),
    "NeMo": ("responses",),
    "verl": ("solution_str",),
    "verl (batched)": ("solution_strs",),
    "slime": ("args", "sample"),
    "slime (group)": ("args", "samples"),
    "verifiers": ("completion",),
}
"""Trainer -> parameters by which its reward functions are recognised."""
PER_ANSWER = ("verl", "slime", "verifiers")
"""Shapes whose functions are called once per answer; the others are called once per group."""
FOREIGN_NAMES = {name for names in SHAPES.values() for name in names} - {"samples"} | {
    "prompts", "data_source", "data_sources", "extra_info", "extra_infos", "queries",
}  # fmt: skip
"""Parameter names that only other trainers use."""
REFERENCE_NAMES = (
    "answer", "solution", "ground_truth", "reference", "label", "target", "gold", "answers",
    "solutions", "ground_truths", "references", "labels", "targets",
)  # fmt: skip
"""Columns that hold the reference in the rows of other trainers. A function that takes any keyword
gets the reference under each of them."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


@dataclass(slots=True, frozen=True)
class Form:
    """The way in which a function is called."""

    trainer: str
    """The trainer whose form it is; "" for agentrl's own. Of another trainer's function these
    results are allowed: None for an answer that it does not judge, entries of a dictionary that are
    no numbers, arrays."""
    is_group: bool
    """Called once per group, with the inputs of all answers; else once per answer."""
    needs_reference: bool
    """Whether it has a parameter for the reference without a default."""
    arguments: Callable[[Sequence[RewardInput]], Arguments]
    """Returns the arguments for the answers of one call."""


def recognise(function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Form | None:
    """Returns the form of another trainer that a function has; None if it is in agentrl's own.

    Args:
        name: the function's name in `reward.functions`, for messages.
        options: its `reward.options`, passed as keyword arguments; slime's functions get them as
            attributes of `args`.

    Raises:
        ConfigError: the parameters mix several forms, or are of a form that is not known.
    """
    every = inspect.signature(function).parameters
    parameters = {key: each for key, each in every.items() if key not in options}
    named = {key for key, each in parameters.items() if each.kind not in _VARIADIC}
    found = [trainer for trainer, needed in SHAPES.items() if named.issuperset(needed)]
    odd = sorted(named & FOREIGN_NAMES)
    if not found and not odd:
        return None
    if len(found) != 1:
        trainers = f"those of {' and '.join(found)}" if found else f"another trainer's: {odd}"
        raise ConfigError(
            f"reward function {name!r} has parameters like {trainers}, in no form that is known. "
            "Wrap it:\n\n    def my_reward(text, reference, *, prompt, metadata, whole_text):\n"
            "        return the_function(...)  # the score of one answer\n\n"
            "docs/rewards.md lists the forms that need no wrapper"
        )
    trainer = found[0]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not takes_any and "args" not in named and (unknown := sorted(set(options) - set(every))):
        raise ConfigError(f"reward function {name!r} has no option {', '.join(unknown)}")
    required = [key for key in named if parameters[key].default is inspect.Parameter.empty]
    as_messages = "content" in _constants(function)
    is_group = trainer not in PER_ANSWER

    def arguments(answers: Sequence[RewardInput]) -> Arguments:
        columns = [_columns(each, trainer, as_messages) for each in answers]
        offered = {key for key in columns[0] if all(key in each for each in columns)}
        if missing := sorted(set(required) - offered):
            raise GraderError(
                f"reward function {name!r} needs {', '.join(missing)}, but the task's metadata has "
                f"only {', '.join(sorted(answers[0].metadata)) or 'nothing'}; add the column to "
                "the metadata, give the parameter a default, or set it in reward.options"
            )
        given: dict[str, Any] = {
            key: [each[key] for each in columns] if is_group else columns[0][key]
            for key in (offered if takes_any else offered & named)
        }
        if "args" in SHAPES[trainer]:
            return (), given | {"args": SimpleNamespace(**options)}
        return (), given | dict(options)

    return Form(trainer, is_group, bool(set(required) & set(REFERENCE_NAMES)), arguments)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _columns(answer: RewardInput, trainer: str, as_messages: bool) -> dict[str, Any]:
    """Returns everything that a trainer could pass for one answer, by parameter name."""
    prompt, text, reference = answer.prompt, answer.whole_text, answer.reference
    said: Any = text
    if as_messages:
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = [{"role": "assistant", "content": text}]
    elif not isinstance(prompt, str):
        prompt = _joined(prompt)
    columns = dict.fromkeys(REFERENCE_NAMES, reference) if reference is not None else {}
    columns |= answer.metadata
    match trainer:
        case "TRL":
            return columns | {"prompts": prompt, "completions": said}
        case "NeMo":
            return columns | {"prompts": prompt, "responses": said}
        case "verl" | "verl (batched)":
            extra = answer.metadata.get("extra_info", answer.metadata)
            source = answer.metadata.get("data_source", "")
            values = (source, text, columns.get("ground_truth"), extra)
            names = ("data_source", "solution_str", "ground_truth", "extra_info")
            plural = "s" if trainer == "verl (batched)" else ""
            return {name + plural: value for name, value in zip(names, values, strict=True)}
        case "verifiers":
            state = {"prompt": prompt, "completion": said, "answer": reference}
            state |= {"info": answer.metadata, "task": answer.metadata.get("task", "default")}
            return columns | state | {"state": state}
        case _:
            sample = SimpleNamespace(
                prompt=prompt,
                response=text,
                label=reference,
                metadata=answer.metadata,
                response_length=answer.num_tokens,
            )
            return {"args": None, "sample": sample, "samples": sample}


def _joined(messages: Sequence[Message]) -> str:
    return "\n\n".join(content_text(each["content"]) for each in messages)


def _constants(function: Any) -> set[Any]:
    """Returns the texts in a function's code. A function that reads messages has "content"."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    found, codes = set[Any](), [code]
    while codes:
        if isinstance(code := codes.pop(), CodeType):
            found.update(each for each in code.co_consts if isinstance(each, str))
            codes.extend(each for each in code.co_consts if isinstance(each, CodeType))
    return found
