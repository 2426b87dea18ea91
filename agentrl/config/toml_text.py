"""Writes a configuration as TOML, which the standard library can only read."""

from __future__ import annotations

import json

from pydantic import JsonValue


def toml_text(data: dict[str, JsonValue], prefix: str = "") -> str:
    """Returns a nested dictionary as TOML; scalars and lists are written as in JSON."""
    scalars = {k: v for k, v in data.items() if not isinstance(v, dict)}
    tables = {k: v for k, v in data.items() if isinstance(v, dict)}
    text = "".join(f"{_toml_key(k)} = {_toml_value(v)}\n" for k, v in scalars.items())
    for name, table in tables.items():
        full = f"{prefix}{_toml_key(name)}"
        text += f"\n[{full}]\n{toml_text(table, full + '.')}"
    return text


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


def _toml_value(value: JsonValue) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        inner = ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items())
        return "{ " + inner + " }"
    return json.dumps(value, ensure_ascii=False)
