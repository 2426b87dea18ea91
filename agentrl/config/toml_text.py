"""Writes a configuration as TOML, which the standard library can only read."""

from __future__ import annotations

import json

from pydantic import JsonValue


def toml_text(data: dict[str, JsonValue], prefix: str = "") -> str:
    """Returns a nested dictionary as TOML; scalars and lists are written as in JSON."""
    scalars = {k: v for k, v in data.items() if not isinstance(v, dict)}
    tables = {k: v for k, v in data.items() if isinstance(v, dict)}
    text = "".join(f"{toml_key(k)} = {toml_value(v)}\n" for k, v in scalars.items())
    for name, table in tables.items():
        full = f"{prefix}{toml_key(name)}"
        text += f"\n[{full}]\n{toml_text(table, full + '.')}"
    return text


def toml_key(key: str) -> str:
    """Returns a key, quoted where TOML asks for it."""
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


def toml_value(value: JsonValue) -> str:
    """Returns a value on one line."""
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        inner = ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items())
        return "{ " + inner + " }"
    return json.dumps(value, ensure_ascii=False)
