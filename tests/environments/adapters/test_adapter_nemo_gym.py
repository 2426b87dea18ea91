"""NeMo Gym's own resources servers, played over HTTP.

`AGENTRL_NEMO_PYTHON` names the Python of an environment that has nemo-gym, which needs 3.12.
"""

import json
import os
import socket
import subprocess
import time
import urllib.request

import pytest

from agentrl.env.registry import resolve
from agentrl.errors import ConfigError
from agentrl.types import Action, ToolCall

PYTHON = os.environ.get("AGENTRL_NEMO_PYTHON")
needs_nemo = pytest.mark.skipif(
    not PYTHON, reason="needs nemo-gym in an environment of its own: see `make test-adapters`"
)
SERVE = """
import importlib, sys
import uvicorn
from nemo_gym.server_utils import ServerClient
module, name, config, port = sys.argv[1:]
module = importlib.import_module(f"resources_servers.{module}.app")
made = getattr(module, name)
client = ServerClient.model_construct()
settings = getattr(module, config)(host="", port=0, entrypoint="", name="", domain="other")
server = made.model_construct(config=settings, server_client=client)
for key, field in made.model_fields.items():
    if not hasattr(server, key):
        setattr(server, key, field.get_default(call_default_factory=True))
uvicorn.run(server.setup_webserver(), port=int(port), log_level="warning")
"""


@pytest.fixture
def serve():
    started = []

    def start(*what):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started.append(subprocess.Popen([PYTHON, "-c", SERVE, *what, str(port)]))
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{url}/openapi.json"):
                    return url
            except OSError:
                assert started[-1].poll() is None
                time.sleep(0.2)
        raise AssertionError("the server does not start")

    yield start
    for process in started:
        process.kill()
        process.wait()


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    shown = {"name": name, "description": "", "parameters": parameters}
    return {"type": "function", "strict": True} | shown


def rows(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def call(name, **arguments):
    return Action(tool_calls=(ToolCall("call-1", name, arguments),))


@needs_nemo
@pytest.mark.slow
@pytest.mark.parametrize("added, reward", [(3, 1.0), (4, 0.0)])
def test_a_session_keeps_its_state_and_is_verified(opened, serve, tmp_path, added, reward):
    url = serve(
        "example_session_state_mgmt", "StatefulCounterResourcesServer",
        "StatefulCounterResourcesServerConfig",
    )  # fmt: skip
    asked = {
        "input": [{"role": "developer", "content": "Count."}, {"role": "user", "content": "To 5."}],
        "tools": [tool("increment_counter", count={"type": "integer"}), tool("get_counter_value")],
    }
    row = {"responses_create_params": asked, "initial_count": 2, "expected_count": 5}
    env = opened(f"nemo-gym:{url}", tasks=rows(tmp_path, row))
    assert [m["role"] for m in env.reset("train", 0)] == ["system", "user"]
    env.step(call("increment_counter", count=added))
    told = env.step(call("get_counter_value"))
    assert json.loads(told.observation[0]["content"]) == {"count": 2 + added}
    result = env.step("done")
    assert result.terminated and result.reward == reward


@needs_nemo
@pytest.mark.slow
def test_an_answer_is_graded_by_the_row(opened, serve, tmp_path):
    url = serve(
        "equivalence_rule", "EquivalenceRuleResourcesServer", "EquivalenceRuleResourcesServerConfig"
    )
    row = {"responses_create_params": {"input": "Say yes."}, "expected_answer": "yes"}
    for answer, reward in (("yes", 1.0), ("no", 0.0)):
        env = opened(f"nemo-gym:{url}", tasks=rows(tmp_path, row))
        assert env.reset("train", 0)[0]["content"] == "Say yes."
        assert env.step(answer).reward == reward


def test_a_target_that_is_no_address_is_refused():
    environment = resolve("nemo-gym:somewhere")
    with pytest.raises(ConfigError, match="URL"):
        import asyncio

        asyncio.run(environment.load_shared(environment.Config()))
