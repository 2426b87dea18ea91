"""OpenEnv's half of `env_server.py`; run by the Python that has `openenv-core`, without agentrl.

python benchmarks/env_server_openenv.py serve sync|async     prints its URL
python benchmarks/env_server_openenv.py play URL SESSIONS STEPS
"""

import asyncio
import socket
import sys
import time

from env_server_client import report, steps_of

ANSWER = "found {}, and then some words that a search would find as well"


def serve(style: str) -> None:
    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Look(Action):
        word: str

    class Found(Observation):
        text: str = ""

    class Bench(Environment):
        """Answers at once, as the other side's environment does."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self._state = State(step_count=0)

        @property
        def state(self):
            return self._state

        def reset(self, seed=None, episode_id=None, **_):
            self._state = State(step_count=0)
            return Found(text="Question 0: what is it?", reward=0.0)

        def step(self, action, timeout_s=None, **_):
            self._state.step_count += 1
            return Found(text=ANSWER.format(action.word), reward=0.0)

    class AsyncBench(Bench):
        async def reset_async(self, seed=None, episode_id=None, **_):
            return self.reset()

        async def step_async(self, action, timeout_s=None, **_):
            return self.step(action)

    environment = AsyncBench if style == "async" else Bench
    app = create_app(environment, Look, Found, max_concurrent_envs=4096)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="error", access_log=False)
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


async def play(url: str, num_sessions: int, num_steps: int) -> None:
    from openenv.core.generic_client import GenericEnvClient

    clients = [GenericEnvClient(base_url=url) for _ in range(num_sessions)]
    for start in range(0, num_sessions, 16):
        await asyncio.gather(*(client.reset() for client in clients[start : start + 16]))

    async def one(client, count: int, latencies: list[float]) -> None:
        for _ in range(count):
            started = time.perf_counter()
            await client.step({"word": "w"})
            latencies.append(time.perf_counter() - started)

    async def steps(count: int) -> list[float]:
        latencies: list[float] = []
        await asyncio.gather(*(one(client, count, latencies) for client in clients))
        return latencies

    await report(steps, steps_of(num_sessions, num_steps))
    await asyncio.gather(*(client.close() for client in clients))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        asyncio.run(play(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
