"""A user's own loss and advantage: plain functions that the configuration names. No torch.

`objective.loss` stands in for the surrogate, `objective.advantage` for credit, baseline and scale.
A function is called by the names of its parameters: whatever it names from `LOSS_INPUTS` or
`ADVANTAGE_INPUTS` it gets, and what costs a forward pass or a second model is computed only where a
parameter asks for it. Parameters with a default value that have other names keep their default.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agentrl import user_modules
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.algo.batch import Batch

_SHARED = {
    "mask": "(B, T) bool, the trained tokens",
    "rewards": "(B,) of each row's trajectory; of an advantage after [objective.reward]",
    "group_ids": "(B,) int64, equal for the trajectories of one task, of any number and order",
    "trajectory_ids": "(B,) int64, equal for the rows of one trajectory",
    "truncated": "(B,) bool, cut by a limit",
    "rollout_logprobs": "(B, T) of the inference engine, at sampling",
    "old_logprobs": "(B, T) of the trainer before the update",
    "ref_logprobs": "(B, T) of the model at the start of the run",
    "teacher_logprobs": "(B, T) of the model that [teacher] names",
    "old_entropy": "(B, T) of the policy before the update, in nats",
    "token_ids": "(B, T) int64",
    "turn_ids": "(B, T) int64, counted from 0 in each trajectory",
    "policy_versions": "(B, T) int64, the version of the policy that sampled the token",
}
LOSS_INPUTS = {
    "logprobs": "(B, T) of the live policy, with gradient",
    "ratio": "(B, T) pi / anchor as [objective.ratio] says, with gradient",
    "entropy": "(B, T) of the live policy, in nats, with gradient",
    "advantages": "(B, T)",
    **_SHARED,
}
"""What a loss may ask for: B rows of one micro-batch, T columns."""
ADVANTAGE_INPUTS = {
    **_SHARED,
    "turn_rewards": "(B, M) of each turn of the trajectory, 0 beyond its last",
    "baselines": "(B,) reward of a greedy answer to the same task",
}
"""What an advantage may ask for: all B rows of the step that have a reward, T columns."""
_INPUTS_OF = {"objective.loss": LOSS_INPUTS, "objective.advantage": ADVANTAGE_INPUTS}
_COMPUTED = {"old_logprobs", "ref_logprobs", "teacher_logprobs", "old_entropy", "baselines"}


@functools.cache
def inputs_of(key: str, reference: str) -> tuple[str, ...]:
    """The inputs that a function asks for.

    Args:
        key: "objective.loss" or "objective.advantage".
        reference: "package.module:function" or "path/to/file.py:function".

    Raises:
        ConfigError: there is no such function, or a parameter names something else.
    """
    offered, asked = _INPUTS_OF[key], []
    for parameter in inspect.signature(load_function(key, reference)).parameters.values():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.name in offered:
            asked.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"{key} = {reference!r}: parameter '{parameter}' is not offered; name parameters "
                f"among {', '.join(offered)}, or give it a default value"
            )
    return tuple(asked)


def batch_fields(key: str, reference: str) -> set[str]:
    """The fields of `Batch` that are computed because a function asks for them."""
    asked = set(inputs_of(key, reference)) & _COMPUTED
    # On the first use of a batch the live log-probs, detached, are the loss's old ones.
    return asked - {"old_logprobs"} if key == "objective.loss" else asked


def call(
    key: str, reference: str, batch: Batch, mask: Tensor, given: Mapping[str, Tensor | None]
) -> Tensor:
    """Returns what the function returns for a batch: (B, T), of an advantage also (B,).

    Args:
        mask: (B, T) bool; elsewhere the function sees 0.
        given: inputs that are not fields of the batch, or replace them.

    Raises:
        ConfigError: an input that it asks for is unknown, or it returns something else.
    """
    inputs, offered = {}, _INPUTS_OF[key]
    for name in inputs_of(key, reference):
        value = mask if name == "mask" else given.get(name, getattr(batch, name, None))
        if value is None:
            raise ConfigError(f"{key} = {reference!r} asks for {name}, which this batch has not")
        inputs[name] = value.masked_fill(~mask, 0) if "(B, T)" in offered[name] else value
    result = load_function(key, reference)(**inputs)
    floats = hasattr(result, "is_floating_point") and result.is_floating_point()
    shape = f"{tuple(result.shape)}" if floats else f"a {type(result).__name__}"
    rows, columns = mask.shape
    if key == "objective.advantage" and floats and result.shape == (rows,):
        return result
    if not floats or result.shape != mask.shape:
        wanted = "floats of shape (B, T) or (B,)"
        if key == "objective.loss":
            wanted = "one float per token, (B, T), which [objective.aggregate] weighs and sums"
        raise ConfigError(
            f"{key} = {reference!r} returned {shape} for B, T = {rows}, {columns}; return {wanted}"
        )
    return result


@functools.cache
def load_function(key: str, reference: str) -> Callable[..., Any]:
    """The function that a configuration names.

    Raises:
        ConfigError: the text has another form, or there is no such file, module or function.
    """
    try:
        function = user_modules.load(reference)
    except (ConfigError, ImportError, SyntaxError) as error:
        raise ConfigError(f"{key} = {reference!r}: {error}") from error
    if not callable(function):
        raise ConfigError(f"{key} = {reference!r} is no function")
    return function
