"""Describes an objective, from the docstrings of its stages and the notes of its preset."""

from __future__ import annotations

import inspect

from agentrl.algo.objective import Objective
from agentrl.algo.presets import PRESET_DATA
from agentrl.algo.user_functions import inputs_of, load_function

NOTATION = """\
R is a trajectory's reward, r_t the part of it placed on a token, G the return, A the advantage, r
the ratio, l a token's loss, L the loss; sg[x] is x without gradient. n counts the trained tokens of
a row, N those of the step, B the rows that have any. Policies: mu (the engine, at sampling), old
(the trainer, before the update), pi (live), ref (the reference), T (a teacher)."""


def describe(objective: Objective) -> str:
    """Returns the objective as `agentrl algo show` prints it.

    Raises:
        ConfigError: `objective.loss` or `objective.advantage` cannot be loaded.
    """
    note = PRESET_DATA.get(objective.preset or "")
    lines = formulas(objective)
    width = max(len(name) for name, _ in lines)
    parts = [f"{name:<{width}}  {formula}" for name, formula in lines]
    if note is not None:
        parts = [f"{objective.preset}: {note.title}", "", *parts, "", f"When: {note.when}"]
        parts += [f"Source: {source}" for source in note.sources]
    if needs := objective.needs():
        parts.append(f"Needs: {', '.join(sorted(needs))}")
    return "\n".join(parts)


def formulas(objective: Objective) -> list[tuple[str, str]]:
    """Returns (stage, formula) in the order of computation, without the stages that are off.

    Raises:
        ConfigError: `objective.loss` or `objective.advantage` cannot be loaded.
    """
    unused = set()
    if objective.advantage is not None:
        unused |= {"credit", "baseline", "scale"}
    if objective.loss is not None:
        unused.add("surrogate")
    if not objective.uses_ratio:
        unused.add("ratio")
    if not objective.needs_critic:
        unused.add("critic")
    lines = []
    for name, stage in objective.stages():
        if stage.is_on and name not in unused:
            lines.append((name, stage.formula()))
        for place, key in (("reward", "objective.advantage"), ("ratio", "objective.loss")):
            if name == place and key in objective.user_functions:
                lines.append((key.removeprefix("objective."), _function(objective, key)))
    return lines


def _function(objective: Objective, key: str) -> str:
    reference = objective.user_functions[key]
    summary = (inspect.getdoc(load_function(key, reference)) or "").partition("\n")[0]
    call = f"{reference}({', '.join(inputs_of(key, reference))})"
    return f"{call}: {summary.rstrip('.')}" if summary else call
