"""CPU time of a call through the agents' endpoint beside a turn of the driver.

    python benchmarks/agent_endpoint.py [--tokens 1000 16000] [--turns 24] [--repeats 5]

One dialogue whose first message has about so many tokens goes on for `--turns` turns with a tool's
answer between each two. The engine answers at once, in this process. The agent is another process
that sends its whole history with each call, as agents do; its own CPU time does not count. The
endpoint's share: HTTP, JSON, finding the row, rendering what is new, the record, the reply. The
driver's: rendering what is new and the record. CPU time of this process on one thread, best of
`--repeats`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from agentrl import runtime
from agentrl.inference.base import Generation
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.recorder import Recorder
from agentrl.rollout.agent.server import AgentServer
from agentrl.rollout.policy import TokenPolicy
from agentrl.types import Message, Trajectory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tokenizers_for_tests import make_tokenizer

CALL = '<tool_call>{"name": "look", "arguments": {"word": "fox"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ANSWER = "found a fox and what it did: " + "it ran " * 10
GOAL_MS = 2.0
AGENT = """
import http.client, json, sys
num_turns, answer = int(sys.argv[1]), sys.argv[2]
url, key, asked = json.load(sys.stdin)
host, path = url.split("/", 3)[2:]
connection = http.client.HTTPConnection(host)
for _ in range(num_turns):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    connection.request("POST", f"/{path}/chat/completions", json.dumps(asked), headers)
    message = json.load(connection.getresponse())["choices"][0]["message"]
    told = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]}
    asked["messages"] += [message, {**told, "content": answer}]
"""


class AtOnce:
    """An engine that always says the same."""

    policy_version = 0

    def __init__(self, renderer: Renderer) -> None:
        self.ids = renderer.tokenizer.encode(CALL, add_special_tokens=False)
        self.ids.append(renderer.close_token_id)

    async def generate(self, request_id, prompt_ids, sampling) -> Generation:
        return Generation(list(self.ids), [-0.5] * len(self.ids), [0] * len(self.ids), "stop")

    def reserve(self, num_episodes: int) -> None: ...
    def release(self, num_episodes: int = 1) -> None: ...
    async def aclose(self) -> None: ...


async def by_driver(policy: TokenPolicy, first: Message, num_turns: int) -> tuple[float, list[int]]:
    """CPU seconds, and the episode's row."""
    started = time.process_time()
    trajectory, observation = Trajectory("t", "g", "e", "k", 0), [first]
    for _ in range(num_turns):
        policy.read(trajectory, observation, TOOLS, tools_changed=False)
        action = await policy.act(trajectory, TOOLS)
        (call,) = action.tool_calls
        answer: Message = {"role": "tool", "tool_call_id": call.id, "content": ANSWER}
        observation = [answer | {"name": call.name}]
    return time.process_time() - started, trajectory.branches[0].token_ids


async def by_endpoint(
    policy: TokenPolicy, first: Message, num_turns: int
) -> tuple[float, list[int]]:
    server = AgentServer()
    await server.start()
    trajectory = Trajectory("t", "g", "e", "k", 0)
    recorder = Recorder(trajectory, policy)
    with server.episode(recorder, max_turns=num_turns, turn_timeout_s=60) as live:
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", AGENT, str(num_turns), ANSWER), stdin=asyncio.subprocess.PIPE
        )
        started = time.process_time()
        asked = (live.url, live.key, {"messages": [first], "tools": TOOLS})
        await agent.communicate(json.dumps(asked).encode())
        seconds = time.process_time() - started
    await server.aclose()
    assert agent.returncode == 0 and len(trajectory.branches) == 1
    return seconds, trajectory.branches[0].token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 16000])
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for tokens in arguments.tokens:
        best = {by_driver: float("inf"), by_endpoint: float("inf")}
        rows = {}
        for repeat in range(arguments.repeats):
            text = f"{repeat} 0 " + "x y z " * (tokens // 6)
            first: Message = {"role": "user", "content": text}
            for play in best:
                renderer = Renderer(make_tokenizer())  # it keeps prompts, so each has its own
                policy = TokenPolicy(AtOnce(renderer), renderer, 64, 1_000_000)
                seconds, rows[play] = runtime.run(play(policy, first, arguments.turns))
                best[play] = min(best[play], seconds)
        assert rows[by_driver] == rows[by_endpoint], "the same row, bit for bit"
        driver, endpoint = (1e3 * best[play] / arguments.turns for play in best)
        print(
            f"{tokens:6} tokens at first, {len(rows[by_driver])} at the end: driver {driver:.2f} "
            f"ms per turn, endpoint {endpoint:.2f} ms per call, {endpoint - driver:+.2f} ms "
            f"(goal: at most +{GOAL_MS:g}), ratio {endpoint / driver:.1f}"
        )


if __name__ == "__main__":
    main()
