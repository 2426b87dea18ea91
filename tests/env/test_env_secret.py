"""Secrets: what a configuration, a report and an observation show of them."""

import json

import pytest

from agentrl.env import EnvConfig, Environment, Secret, Task, make, tool
from agentrl.env.base import load_config
from agentrl.errors import ConfigError

VALUE = "s3cr3t-value-91"


class Paid(Environment):
    class Config(EnvConfig):
        key: Secret = Secret("PAID_KEY")
        """Key of the service."""

    def splits(self):
        return {"train": 1}

    def get(self, split, index):
        return Task("0", "Ask the service.")

    @tool
    def ask(self) -> str:
        raise ConnectionError(f"401 for key {self.config.key.value()}")

    async def step(self, action):
        if action.text == "crash":
            raise RuntimeError(f"bad key {self.config.key.value()}")
        return await self.run_tools(action)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("PAID_KEY", VALUE)
    monkeypatch.setenv("OTHER_KEY", VALUE + "-2")


def test_a_configuration_holds_the_name_and_never_the_value():
    for values, name in (({}, "PAID_KEY"), ({"key": "OTHER_KEY"}, "OTHER_KEY")):
        config = load_config(Paid, values)
        assert config.model_dump(mode="json") == {"key": name}
        assert json.loads(config.model_dump_json()) == {"key": name}
        assert config.key.value().startswith(VALUE)
        assert VALUE not in f"{config} {config!r} {config.key} {config.model_dump()}"
        assert load_config(Paid, config) == config
    schema = Paid.Config.model_json_schema()["properties"]["key"]
    assert schema["type"] == "string" and schema["default"] == "PAID_KEY"


@pytest.mark.parametrize("given", [VALUE, "sk-123 456", "NotSetAnywhere7391", 7])
def test_a_secret_itself_is_refused_and_not_repeated(given):
    with pytest.raises(ConfigError, match=r"key: .*environment variable") as raised:
        load_config(Paid, {"key": given})
    assert str(given) not in str(raised.value)
    with pytest.raises(ConfigError, match="not the secret itself"):
        Secret(VALUE)


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("PAID_KEY")
    with pytest.raises(ConfigError, match="PAID_KEY"):
        load_config(Paid, {}).key.value()


async def test_an_exception_does_not_show_the_agent_or_the_caller_a_secret():
    env = make(Paid)
    await env.reset("train", 0)
    result = await env.call("ask")
    assert result.observation[0]["content"].endswith("401 for key [secret]")
    with pytest.raises(Exception, match=r"bad key \[secret\]"):
        await env.step("crash")
    await env.close()
