"""Environments for a server of several processes."""

from __future__ import annotations

import os
import time

from agentrl.env import EnvConfig, Environment, Task, register, tool


@register("pid", max_sessions=512)
class Pid(Environment):
    """Says which process plays it."""

    class Config(EnvConfig):
        fail: bool = False

    @classmethod
    def load_shared(cls, config):
        if config.fail:
            raise RuntimeError("it cannot be loaded")

    def splits(self):
        return {"train": None}

    def get(self, split, index):
        return Task(f"{split}/{index}", f"task {index}")

    async def reset(self, task, *, seed):
        self.count = 0
        return task.prompt

    @tool
    async def pid(self) -> dict[str, int]:
        self.count += 1
        return {"pid": os.getpid(), "count": self.count}

    @tool
    async def burn(self, seconds: float) -> str:
        """Use the processor, and the event loop with it, for so long."""
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return "done"

    @tool
    async def hang_the_loop(self) -> str:
        time.sleep(60)
        return "never"
