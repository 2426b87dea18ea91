"""A lossy network: what an environment does happens exactly once, whatever happens on the way."""

import asyncio
import os
import secrets
import time
from collections import Counter
from pathlib import Path

import pytest
from lossy_proxy import FAULTS, LossyProxy

from agentrl.env import Action, EnvConfig, Environment, Task, connect, transport

NUM_STEPS = 3


class Ledger(Environment):
    """Every reset and step appends a line: which task, which instance, which step."""

    id = "ledger"
    max_sessions = 512

    class Config(EnvConfig):
        path: str

    def splits(self):
        return {"train": None}

    def get(self, split, index):
        return Task(str(index), f"task {index}")

    async def reset(self, task, *, seed):
        self.instance, self.count = secrets.token_hex(8), 0
        self.write("reset")
        return self.instance

    async def on_text(self, text: str):
        await asyncio.sleep(0)
        self.write(text)
        self.count += 1
        if self.count == NUM_STEPS:
            self.finish(reward=1.0)
        return f"{self.instance} {text}"

    def write(self, what: str) -> None:
        line = f"{self.task.id} {self.instance} {what}\n"
        file = os.open(self.config.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)


async def play_all(proxy, path: Path, num_episodes: int, num_at_once: int) -> Counter[str]:
    """Play the episodes; how many ended in what way."""
    outcomes: Counter[str] = Counter()
    indices = iter(range(num_episodes))

    async def play(client):
        for index in indices:
            config = {"path": str(path)}
            session = await client.session(
                "ledger", split="train", index=index, config=config, timeout_s=60
            )
            instance = session.messages[0]["content"]
            for step in range(NUM_STEPS):
                result = await session.step(Action(text=f"step-{step}"), timeout_s=60)
                if step < NUM_STEPS - 1:
                    answer = result.observation[0]["content"]
                    assert answer == f"{instance} step-{step}", "another session answered"
            outcomes["finished" if result.terminated and result.reward == 1.0 else "odd"] += 1
            await session.close()

    async with connect(proxy.url) as client:
        await client.info("ledger", {"path": str(path)}, timeout_s=60)
        await asyncio.gather(*(play(client) for _ in range(num_at_once)))
    return outcomes


@pytest.mark.parametrize(
    ("num_episodes", "num_at_once", "pages"),
    [
        (200, 16, False),
        (300, 64, True),
        pytest.param(
            1700, 64, True, marks=[pytest.mark.slow, pytest.mark.promise, pytest.mark.timeout(900)]
        ),
    ],
)
def test_every_step_happens_exactly_once(
    serve_environments, tmp_path, monkeypatch, num_episodes, num_at_once, pages
):
    monkeypatch.setattr(transport, "PATIENCE_S", 1.0 if num_episodes < 1000 else 2.0)
    monkeypatch.setattr(transport, "CONNECT_S", 2.0)
    path = tmp_path / "ledger"

    async def main(url):
        async with LossyProxy(url, share=0.1, seed=num_episodes, pages=pages) as proxy:
            return await play_all(proxy, path, num_episodes, num_at_once), proxy

    with serve_environments([Ledger]) as (url, _):
        started = time.monotonic()
        outcomes, proxy = asyncio.run(main(url))
        seconds = time.monotonic() - started
    assert outcomes == {"finished": num_episodes}
    kinds = {*FAULTS, "refuse connection"} | ({"page"} if pages else set())
    assert set(proxy.faults) == kinds

    effects = Counter(path.read_text().splitlines())
    steps = Counter({line: count for line, count in effects.items() if " reset" not in line})
    assert set(steps.values()) == {1}, "a step happened twice"
    assert len(steps) == NUM_STEPS * num_episodes
    instances = {tuple(line.split()[:2]) for line in steps}
    assert len(instances) == num_episodes, "a fresh session took the steps of another"
    num_resets = sum(effects.values()) - sum(steps.values())
    print(
        f"\n{num_episodes} episodes, {sum(steps.values())} steps, each once; "
        f"{num_resets - num_episodes} sessions opened beyond them, which took no step; "
        f"{proxy.num_messages} messages on {proxy.num_connections} connections, faults "
        f"{dict(sorted(proxy.faults.items()))}; {seconds:.0f} s"
    )
