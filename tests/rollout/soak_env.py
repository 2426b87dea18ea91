"""The quickstart's tasks in an environment that sometimes fails; run as a server of its own."""

import asyncio
import random

from agentrl_math.env import MathConfig, MathEnvironment


class SoakConfig(MathConfig):
    fault_share: float = 0.0


class SoakEnvironment(MathEnvironment):
    Config = SoakConfig
    max_sessions = 512

    async def step(self, action):
        if random.random() < self.config.fault_share:
            fault = random.choice(["raise", "hang"])
            if fault == "raise":
                raise RuntimeError("an injected fault")
            await asyncio.sleep(3600)
        return await super().step(action)
