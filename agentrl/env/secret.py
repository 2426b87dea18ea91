"""`Secret`: a configuration value that names the environment variable which holds a secret.

    class Config(EnvConfig):
        api_key: Secret = Secret("SEARCH_API_KEY")
        \"\"\"Key of the search service.\"\"\"

    key = self.config.api_key.value()

A configuration is written to run folders and reports and sent to environment servers. A secret
appears there only as the name of an environment variable. Its value is read where the environment
runs, and is blanked out of exception messages that are shown to the agent.
"""

from __future__ import annotations

import os
import re
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from agentrl.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MIN_LENGTH = 4
"""Shorter values are not blanked out, because they also occur in ordinary text."""
_values: set[str] = set()
"""The values that were read in this process."""


class Secret:
    """A secret that the environment variable `name` holds."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        """Refers to the environment variable `name`, which need not be set yet.

        Raises:
            ConfigError: `name` cannot be the name of a variable. The message does not repeat it,
                because it may be the secret itself.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(_NOT_A_NAME)
        self.name = name

    def value(self) -> str:
        """Returns the value of the variable.

        Raises:
            ConfigError: the variable is not set or is empty.
        """
        value = os.environ.get(self.name)
        if not value:
            raise ConfigError(
                f"the environment variable {self.name} is not set; set it to the secret"
            )
        if len(value) >= _MIN_LENGTH:
            _values.add(value)
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.name == self.name

    def __hash__(self) -> int:
        return hash((Secret, self.name))

    def __repr__(self) -> str:
        return f"Secret({self.name!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: object) -> Secret:
            if isinstance(value, Secret):
                return value
            if not isinstance(value, str) or not _NAME.fullmatch(value):
                raise ValueError(_NOT_A_NAME)
            if not os.environ.get(value):
                raise ValueError(
                    "is not the name of an environment variable that is set where the environment "
                    "runs"
                )
            return cls(value)

        return core_schema.no_info_plain_validator_function(
            read,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda secret: secret.name, return_schema=core_schema.str_schema()
            ),
            json_schema_input_schema=core_schema.str_schema(pattern=_NAME.pattern),
        )


_NOT_A_NAME = (
    "give the name of the environment variable that holds the secret, not the secret itself: it "
    "would be written into the run's files"
)


def hide_secrets(text: str) -> str:
    """Replaces the values of secrets that were read in this process with `[secret]`."""
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, "[secret]")
    return text
