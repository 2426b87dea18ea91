"""Names other trainers' settings as they are called here; `peers.toml` holds the table."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of another trainer.

    `agentrl import` takes it if there is `to` or `values`. A `note` says how it differs, and
    without either what to do instead, or why nothing has to be done.
    """

    theirs: str
    to: str | None = None
    """The key here that takes the value as it is."""
    note: str = ""
    also: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keys that are set beside it, unless the value is false, zero or missing."""
    values: Mapping[str, Mapping[str, JsonValue]] = field(default_factory=dict)
    """The keys that each value sets; the value is compared as text, in lower case."""
    needs: str = ""
    """Another setting without which this one has no effect there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another trainer and its settings."""

    name: str
    version: str
    preset: str
    """The preset from which an imported run file starts."""
    about: str
    """What differs in the whole, as a paragraph of the page."""
    rows: Mapping[str, Row]
    """By what the settings are called there, in the order of the page."""
    defaults: Mapping[str, JsonValue]
    """Its defaults that are neither those of the preset nor of a run file, by the key here."""
    asked: tuple[str, ...] = ()
    """Settings that decide a run and whose defaults are not known here."""
    betas: tuple[str, ...] = ()
    """Its settings of Adam's two decays."""
    placement: tuple[str, ...] = ()
    """Patterns of settings that say on which machines, in which pieces and with which memory the
    other trainer computes, which changes no result. A setting with a row is none of them."""


@cache
def peers() -> dict[str, Peer]:
    """Returns the other trainers by the names that `agentrl import --from` takes."""
    tables = tomllib.loads(Path(__file__).with_name("peers.toml").read_text("utf-8"))
    shared = tables.pop("shared")
    found = {}
    for name, table in tables.items():
        settings = table.pop("settings")
        rows = {theirs: _row(theirs, given, shared) for theirs, given in settings.items()}
        found[name] = Peer(**table, rows=rows)
    return found


def _row(theirs: str, given: str | dict[str, Any], shared: Mapping[str, dict[str, Any]]) -> Row:
    """Returns a row, written out where the table has it short."""
    if isinstance(given, str):
        return Row(theirs, given)
    fields = dict(given)
    if isinstance(name := fields.get("values"), str):
        fields |= shared[name]
    if "of" in fields:
        key = fields.pop("of")
        fields["values"] = {value: {key: mine} for value, mine in fields["values"].items()}
    if "is_on" in fields:
        fields["values"] = {"true": fields.pop("is_on"), "false": {}}
    return Row(theirs, **fields)


def hint_for(name: str) -> str | None:
    """Returns what another trainer's setting is called here, as a hint; None if nobody has it.

    Args:
        name: the last part counts: `rollout.num_generations` asks for `num_generations`.
    """
    leaf = name.rpartition(".")[2].replace("-", "_")
    for peer in peers().values():
        for row in peer.rows.values():
            if row.theirs.rpartition(".")[2].lstrip("-").replace("-", "_") == leaf:
                keys = [row.to] if row.to else list(next(iter(row.values.values()), {}))
                if keys or row.note:
                    here = f"is {keys[0]} here" if keys else f"here: {row.note.replace('`', '')}"
                    return f"{peer.name}'s {row.theirs} {here}"
    return None
