"""Fixtures of the adapters' tests."""

import pytest

from agentrl.env import make


@pytest.fixture
def opened():
    """Returns a function that opens environments; closes them at the end."""
    made = []

    def open_one(kind, **config):
        env = make(kind, **config).sync
        made.append(env)
        return env

    yield open_one
    for env in made:
        env.close()
