"""First half of `agentrl swebench run`: has a model solve instances in containers."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from contextlib import aclosing
from pathlib import Path

from agentrl.env.client import connect
from agentrl.errors import ConfigError
from agentrl.rollout.chat import ChatPolicy
from agentrl.rollout.dialects.choose import named_dialect
from agentrl.rollout.driver import Episode, Limits, play
from agentrl.rollout.log import TrajectoryLog, cut_torn_record, step_files
from agentrl.types import Trajectory
from agentrl_swebench.dataset import Instance, Prediction
from agentrl_swebench.env import SWEBenchEnvironment


def drop_cut_line(path: Path) -> None:
    """Removes a last line that a kill cut off; `run` then solves its instance again."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with open(path, "r+b") as file:
            file.truncate(whole)


async def solve(arguments: argparse.Namespace, pending: list[Instance], path: Path) -> int:
    """Plays the pending instances and appends their predictions to `path`.

    Returns:
        The number of instances without a prediction.

    Raises:
        ConfigError: the openai package is missing.
    """
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise ConfigError(
            "`run` needs the openai package: pip install 'agentrl-gym[eval,swebench]'"
        ) from None
    base = arguments.model.rstrip("/")
    client = AsyncOpenAI(
        base_url=base if base.endswith("/v1") else f"{base}/v1",
        api_key=os.environ.get("OPENAI_API_KEY") or "none",
        timeout=arguments.turn_timeout,
    )
    config = {
        "source": arguments.dataset,
        "dataset_split": arguments.split,
        "instance_ids": [each.instance_id for each in pending],
        "policy": arguments.policy,
        "edit_tool": arguments.edit_tool,
        "memory_mb": arguments.memory_mb,
        "cpus": arguments.cpus,
        "disk_mb": arguments.disk_mb,
        "command_timeout_s": arguments.command_timeout,
        "grade": False,
    }
    limits = Limits(
        max_turns=arguments.max_turns,
        turn_timeout_s=arguments.turn_timeout,
        step_timeout_s=3600.0,
        episode_timeout_s=24 * 3600.0,
    )
    log = TrajectoryLog(arguments.out)
    for cut, _ in step_files(log.directory):
        cut_torn_record(cut)  # a record appended after a torn one could not be read
    capacity = asyncio.Semaphore(arguments.concurrency)
    failed = left_out = spent = 0

    def record(trajectory: Trajectory) -> None:
        nonlocal failed, spent
        spent += sum(turn.num_tokens for turn in trajectory.turns)
        log.append(0, [trajectory])
        if trajectory.error is not None or "model_patch" not in trajectory.info:
            failed += 1
            why = trajectory.error.message if trajectory.error else "it ended before a submission"
            print(f"{trajectory.group_id}: no prediction: {why}", file=sys.stderr, flush=True)
            return
        prediction = Prediction(
            trajectory.group_id, arguments.model_name, str(trajectory.info["model_patch"])
        )
        _append(path, prediction)
        flags = trajectory.info.get("flags") or []
        shown = f", flags {flags}" if flags else ""
        print(f"{trajectory.group_id}: {len(trajectory.turns)} turns{shown}", flush=True)

    async with aclosing(connect()) as env:
        policy = ChatPolicy(
            client,
            arguments.model_name,
            arguments.max_turn_tokens,
            arguments.temperature,
            named_dialect("auto"),
        )
        async with aclosing(policy), asyncio.TaskGroup() as tasks:

            async def one(index: int) -> None:
                episode = Episode(
                    trajectory_id=pending[index].instance_id,
                    group_id=pending[index].instance_id,
                    env_id=SWEBenchEnvironment.id,
                    split="test",
                    index=index,
                    seed=0,
                    env_config=config,
                )
                async with capacity:
                    if arguments.max_total_tokens is not None and (
                        spent >= arguments.max_total_tokens
                    ):
                        nonlocal left_out
                        left_out += 1
                        return
                    await play(episode, policy, env, limits, record)

            for index in range(len(pending)):
                tasks.create_task(one(index))
    if left_out:
        print(
            f"--max-total-tokens {arguments.max_total_tokens} is reached ({spent} tokens); "
            f"{left_out} instances were not started",
            file=sys.stderr,
        )
    return failed + left_out


def _append(path: Path, prediction: Prediction) -> None:
    with open(path, "ab") as file:
        file.write((json.dumps(prediction.row()) + "\n").encode())
