"""The server that the fuzzers attack, in a process of its own: prints its URL.

Its environment has no error of its own and gives up on nothing, so that any 5xx is the server's.
"""

from __future__ import annotations

import sys

from agentrl.env import Environment, Task, register, tool
from agentrl.env.server.app import make_app, serve


@register("steady", max_sessions=64)
class Steady(Environment):
    def splits(self):
        return {"train": None, "test": 3}

    def get(self, split, index):
        return Task(f"{split}/{index}", "Go.", reference="never shown")

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

    async def snapshot(self):
        return self.count

    async def restore(self, blob):
        self.count = blob


if __name__ == "__main__":
    app = make_app(["steady"], token=sys.argv[1] if len(sys.argv) > 1 else None, max_wait_s=0.01)
    serve(app, port=0, ready=lambda url: print(url, flush=True))
