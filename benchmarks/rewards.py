"""Graded answers per second of the reward runner, for math, f1 and code.

    python benchmarks/rewards.py [--seconds 3]

Every answer goes through `RewardRunner.score_group`, 64 at a time. `math` is measured twice: with
plain numbers, which are compared in this process, and with expressions, which go to math-verify in
the killable pool. `code` starts one sandbox per answer. The worker processes are started before
the clock. One line per case: answers per second, best of three; nothing may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

from agentrl.errors import GraderError
from agentrl.types import JSON
from agentrl_rewards.runner import RewardInput, RewardRunner

GROUP = 64
PROGRAM = "```python\ndef f(x):\n    return x * x\n```"


def make_answers(case: str) -> list[RewardInput]:
    reasoning = "First we look at what is asked, then we compute it step by step. " * 10
    if case == "math, numbers":
        return [RewardInput(f"{reasoning}\n#### {n}", str(n)) for n in range(GROUP)]
    if case == "math, expressions":
        return [RewardInput(f"{reasoning}\\boxed{{x^2 + {n}x}}", f"x(x+{n})") for n in range(1, 65)]
    if case == "f1":
        golds: list[JSON] = ["10th and 11th centuries", "in the 10th and 11th centuries"]
        return [RewardInput(f"the {n}th and 11th centuries", golds) for n in range(GROUP)]
    return [RewardInput(PROGRAM, f"assert f({n}) == {n * n}") for n in range(GROUP)]


async def measure(case: str, seconds: float) -> float:
    runner = RewardRunner([case.split(",")[0]])
    answers = make_answers(case)
    await runner.score_group(answers)
    best = 0.0
    for _ in range(3):
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            results = await runner.score_group(answers)
            count += len(results)
            for result in results:
                if isinstance(result, GraderError):
                    raise result
        best = max(best, count / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    for case in ("math, numbers", "math, expressions", "f1", "code"):
        rate = asyncio.run(measure(case, arguments.seconds))
        print(f"{case:20s} {rate:10,.0f} answers/s")


if __name__ == "__main__":
    main()
