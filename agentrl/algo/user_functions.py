"""Loads and calls a user's own loss and advantage, plain functions that the run file names.

Imports no torch. `objective.loss` replaces the surrogate, `objective.advantage` replaces credit,
baseline and scale. A function gets the inputs that its parameters name, from `LOSS_INPUTS` or
`ADVANTAGE_INPUTS`. Inputs that cost a forward pass or a second model are computed only if a
parameter names them. A parameter with any other name needs a default value and keeps it.
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
    "rewards": "(B,) reward of each row's trajectory; for an advantage, after [objective.reward]",
    "group_ids": "(B,) int64, equal for the trajectories of one task, of any number and order",
    "trajectory_ids": "(B,) int64, equal for the rows of one trajectory",
    "truncated": "(B,) bool, true if a limit cut the trajectory",
    "rollout_logprobs": "(B, T) log-probs of the inference engine, at sampling",
    "old_logprobs": "(B, T) log-probs of the trainer before the update",
    "ref_logprobs": "(B, T) log-probs of the reference model",
    "teacher_logprobs": "(B, T) log-probs of the model that [teacher] names",
    "old_entropy": "(B, T) entropy of the policy before the update, in nats",
    "token_ids": "(B, T) int64",
    "turn_ids": "(B, T) int64, counted from 0 in each trajectory",
    "policy_versions": "(B, T) int64, the version of the policy that sampled the token",
}
LOSS_INPUTS = {
    "logprobs": "(B, T) log-probs of the live policy, with gradient",
    "ratio": "(B, T) pi / anchor as set in [objective.ratio], with gradient",
    "entropy": "(B, T) entropy of the live policy, in nats, with gradient",
    "advantages": "(B, T)",
    **_SHARED,
}
"""Inputs that a loss may name as parameters. B rows of one micro-batch, T columns."""
ADVANTAGE_INPUTS = {
    **_SHARED,
    "turn_rewards": "(B, M) reward of each turn of the trajectory, 0 beyond its last turn",
    "baselines": "(B,) reward of a greedy answer to the same task",
}
"""Inputs that an advantage may name as parameters. B rows of the step, all that have a reward, T
columns."""
_INPUTS_OF = {"objective.loss": LOSS_INPUTS, "objective.advantage": ADVANTAGE_INPUTS}
_COMPUTED = {"old_logprobs", "ref_logprobs", "teacher_logprobs", "old_entropy", "baselines"}


@functools.cache
def inputs_of(key: str, reference: str) -> tuple[str, ...]:
    """Returns the inputs that a function's parameters name.

    Args:
        key: "objective.loss" or "objective.advantage".
        reference: "package.module:function" or "path/to/file.py:function".

    Raises:
        ConfigError: the function cannot be loaded, or a parameter without a default value is not an
            input.
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
    """Returns the fields of `Batch` that have to be computed because the function names them.

    Raises:
        ConfigError: as for `inputs_of`.
    """
    asked = set(inputs_of(key, reference)) & _COMPUTED
    # A loss gets the live log-probs, detached, as old ones on the first use of a batch.
    return asked - {"old_logprobs"} if key == "objective.loss" else asked


def call(
    key: str, reference: str, batch: Batch, mask: Tensor, given: Mapping[str, Tensor | None]
) -> Tensor:
    """Calls the function on a batch and returns its result: floats (B, T); an advantage may also
    return (B,).

    Args:
        mask: (B, T) bool, the trained tokens; elsewhere the function's (B, T) inputs are 0.
        given: inputs that are not fields of the batch, or that replace its fields.

    Raises:
        ConfigError: the batch lacks an input, or the result has another shape or type.
    """
    inputs, offered = {}, _INPUTS_OF[key]
    for name in inputs_of(key, reference):
        value = mask if name == "mask" else given.get(name, getattr(batch, name, None))
        if value is None:
            raise ConfigError(f"{key} = {reference!r} needs {name}, which this batch does not have")
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
            wanted = "one float per token, (B, T), which [objective.aggregate] weights and sums"
        raise ConfigError(
            f"{key} = {reference!r} returned {shape} for B, T = {rows}, {columns}; return {wanted}"
        )
    return result


@functools.cache
def load_function(key: str, reference: str) -> Callable[..., Any]:
    """Loads the function that the run file names.

    Raises:
        ConfigError: the reference is malformed, or there is no such file, module or function.
    """
    try:
        function = user_modules.load(reference)
    except (ConfigError, ImportError, SyntaxError) as error:
        raise ConfigError(f"{key} = {reference!r}: {error}") from error
    if not callable(function):
        raise ConfigError(f"{key} = {reference!r} is not a function")
    return function
