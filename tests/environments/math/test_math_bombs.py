"""Answers that are slow to compare, beside honest ones, over HTTP: no honest episode is lost."""

import asyncio
import os

import pytest
from env_servers import running

from agentrl.env import client as env_client
from agentrl.errors import EnvError
from agentrl.types import Action, Task

NUM = int(os.environ.get("AGENTRL_BOMBS", "32"))
"""Of each kind; 128 for the figure in the documentation."""
BOMBS = [
    "(1+i)^{9999}",
    "(x+1)^{9999}",
    "9^{9^{9^{9}}}",
    "((10^{999})^{999})^{999}",
    r"\sum_{i=1}^{1000000000} i",
    "99999999!",
    r"(\sin x+\cos x)^{150}",
    r"\tan(\tan(\tan(\tan(\tan(\tan(3+x))))))",
]
"""The last two pass every bound and take minutes."""


SLOW_TASK = Task("slow", "equal?", reference=r"(1+\sin(2x))^{6}")
SLOW_HONEST = r"(\sin x+\cos x)^{12}"
"""Needs a second try, for which the slow bombs wait too."""


@pytest.mark.promise
@pytest.mark.slow
@pytest.mark.parametrize("num_clients", [1, 2])
async def test_bombs_cost_no_honest_episode(num_clients):
    task = Task("t", "(x+1)^2=?", reference="x^2+2x+1")
    honest = ["(x+1)^2", "1+2x+x^2", "(x+1)(x+1)", "x(x+2)+1"]

    async def play(client, text: str, task: Task = task) -> float | str:
        session = await client.session("math", task=task, config={"equivalence": "symbolic"})
        try:
            return (await session.step(Action(text=f"\\boxed{{{text}}}"), timeout_s=60.0)).reward
        except EnvError as error:
            return str(error)
        finally:
            await session.close()

    with running(["math"]) as (url, _):
        async with env_client.connect(url) as attacker, env_client.connect(url) as other:
            client = attacker if num_clients == 1 else other
            calls = []
            for number in range(NUM):  # a bomb before each honest one
                calls.append(play(attacker, BOMBS[number % len(BOMBS)]))
                calls.append(play(client, f"{honest[number % len(honest)]}+{number}-{number}"))
            if num_clients == 2:  # one client's own slow answers wait for each other
                calls += [play(attacker, BOMBS[-1]), play(client, SLOW_HONEST, SLOW_TASK)]
            results = await asyncio.gather(*calls)
        bombs, answers = results[::2], results[1::2]
    print({str(each)[-60:]: bombs.count(each) for each in bombs})
    assert answers == [1.0] * len(answers)
    assert all(isinstance(each, str) or each == 0.0 for each in bombs)
