"""The server that the fuzzer and the attackers meet, in a process of its own: prints its URL.

    python fuzz_server.py [TOKEN [HEAD_TIMEOUT_S]]

Its environment has no error of its own and gives up on nothing, so that any 5xx is the server's.
"""

from __future__ import annotations

import sys

from agentrl.env import Environment, Task, register, tool
from agentrl.env.server import gate, serve
from agentrl.env.server.app import make_app


@register("steady", max_sessions=64)
class Steady(Environment):
    def splits(self):
        return {"train": None, "test": 3, "long": 10}

    def get(self, split, index):
        return Task(f"{split}/{index}", "Go!" * (2**15 if split == "long" else 1), "never shown")

    async def reset(self, task, *, seed):
        self.count = 0
        return "Go."

    @tool
    async def add(self, number: int = 1) -> int:
        self.count = (self.count + number) % 1000
        return self.count

    @tool(terminal=True)
    async def stop(self) -> float:
        return 1.0

    def on_text(self, text):
        return text[:100]


if __name__ == "__main__":
    token = sys.argv[1] if len(sys.argv) > 1 else ""
    if len(sys.argv) > 2:
        serve.HEAD_TIMEOUT_S = gate.BODY_TIMEOUT_S = float(sys.argv[2])
    app = make_app(["steady"], token=token, max_wait_s=0.01)
    serve.serve(app, port=0, ready=lambda url: print(url, flush=True))
