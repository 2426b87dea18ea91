"""`agentrl swebench doctor|pull|reap|run`: the engine, its images and containers, and models."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from agentrl.types import Trajectory
    from agentrl_swebench.dataset import Instance, Prediction

Status = Literal["ok", "note", "fix"]
HARNESS_VERSION = "5.0.2"


def add_commands(subcommands: argparse._SubParsersAction) -> None:
    """Add the four commands. Each sets `handler`, which returns an exit status."""
    doctor = subcommands.add_parser(
        "doctor",
        help="check the engine, its disk, images and leftovers",
        description="Check what SWE-bench needs here. Exit status 1 when something must be fixed.",
    )
    _add_dataset(doctor, required=False)
    doctor.set_defaults(handler=_doctor)

    pull = subcommands.add_parser(
        "pull",
        help="make the images of a dataset local",
        description="Pull the images of a dataset's instances, several at once. When the engine's "
        "disk is short, images that agentrl pulled or made are evicted, the longest unused first; "
        "never one that has a container or is among those asked for.",
    )
    _add_dataset(pull)
    pull.add_argument("--concurrency", type=int, default=4, help="(default: %(default)s)")
    pull.add_argument(
        "--min-free-gb", type=float, default=10.0, help="to leave free (default: %(default)g)"
    )
    pull.add_argument(
        "--scrub", action="store_true", help="also make the images that agents get, without history"
    )
    pull.set_defaults(handler=_pull)

    reap = subcommands.add_parser(
        "reap",
        help="remove containers whose process is gone",
        description="Remove containers of agentrl's whose process is gone. A start does so too.",
    )
    reap.add_argument(
        "--all", action="store_true", help="also those in use, by whatever process of agentrl's"
    )
    reap.set_defaults(handler=_reap)

    run = subcommands.add_parser(
        "run",
        help="let a model solve instances, then grade",
        description="Let a model behind an OpenAI-compatible server solve instances in containers, "
        "write predictions.jsonl in the official format, and grade it with the official harness. "
        "Repeat an interrupted call with the same --out to go on.",
    )
    _add_dataset(run)
    run.add_argument("--model", required=True, metavar="URL", help="of an OpenAI-compatible server")
    run.add_argument(
        "--model-name", default="policy", metavar="NAME", help="on it (default: %(default)s)"
    )
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="for all results")
    run.add_argument("--run-id", default="run", metavar="ID", help="(default: %(default)s)")
    run.add_argument("--max-turns", type=int, default=50, help="(default: %(default)s)")
    run.add_argument(
        "--max-turn-tokens", type=int, default=4096, help="of one turn (default: %(default)s)"
    )
    run.add_argument("--temperature", type=float, default=1.0, help="(default: %(default)g)")
    run.add_argument("--concurrency", type=int, default=4, help="instances at once (default: 4)")
    run.add_argument("--edit-tool", action="store_true", help="offer str_replace too")
    run.add_argument(
        "--policy",
        choices=["official", "strict"],
        default="official",
        help="what of a change is a submission (default: %(default)s)",
    )
    run.add_argument("--audit", action="store_true", help="control runs, as with `eval --audit`")
    run.add_argument("--no-grade", action="store_true", help="stop after the predictions")
    run.add_argument(
        "--memory-mb", type=int, default=4096, help="of a container (default: %(default)s)"
    )
    run.add_argument(
        "--turn-timeout", type=float, default=600.0, help="seconds (default: %(default)g)"
    )
    run.add_argument(
        "--timeout", type=float, default=1800.0, help="seconds, of tests (default: %(default)g)"
    )
    run.set_defaults(handler=_run)


def _add_dataset(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    command.add_argument(
        "--dataset",
        required=required,
        metavar="FILE|NAME",
        help="a .jsonl, .json or .parquet file, full, lite, verified, multilingual, multimodal, or "
        "a Hugging Face name",
    )
    command.add_argument("--split", default="test", help="(default: %(default)s)")
    command.add_argument("--instance-ids", nargs="+", metavar="ID", help="only these instances")


def _load(arguments: argparse.Namespace) -> list[Instance]:
    from agentrl_swebench.dataset import load_instances

    return load_instances(
        arguments.dataset, split=arguments.split, instance_ids=arguments.instance_ids
    )


def _doctor(arguments: argparse.Namespace) -> int:
    worst = 0
    for status, what, detail in _findings(arguments):
        print(f"{status:4} {what}: {detail}")
        worst |= status == "fix"
    return worst


def _findings(arguments: argparse.Namespace) -> Iterator[tuple[Status, str, str]]:
    import importlib.metadata
    import shutil
    import time

    from agentrl.env.container.engine import OWNER_LABEL, abandoned
    from agentrl.errors import AgentRLError
    from agentrl_swebench import images
    from agentrl_swebench.engine import connect

    try:
        version = importlib.metadata.version("swebench")
    except importlib.metadata.PackageNotFoundError:
        yield "fix", "harness", "not installed: pip install 'agentrl[swebench]'"
    else:
        right = version == HARNESS_VERSION
        wanted = "" if right else f"; {HARNESS_VERSION} is wanted: pip install 'agentrl[swebench]'"
        yield "ok" if right else "fix", "harness", f"swebench {version}{wanted}"
    command = shutil.which("docker")
    if command is None:
        yield "fix", "docker command", "not on PATH; the harness removes its containers with it"
    else:
        yield "ok", "docker command", command
    try:
        client = connect()
    except AgentRLError as error:
        yield "fix", "engine", str(error)
        return
    info = client.info()
    yield (
        "ok",
        "engine",
        f"{info.get('ServerVersion')}, storage {info.get('Driver')}, cgroup version "
        f"{info.get('CgroupVersion', '1')}, {info.get('NCPU')} processors, "
        f"{info.get('MemTotal', 0) / 2**30:.0f} GiB of memory",
    )
    for feature, key in (("memory limit", "MemoryLimit"), ("process limit", "PidsLimit")):
        if not info.get(key):
            yield "fix", "engine", f"has no {feature}: an agent could take the whole machine"
    free = images.free_bytes(client)
    if free is None:
        yield "note", "disk", f"{info.get('DockerRootDir')} is not on this machine"
    else:
        short = free < images.MIN_FREE_BYTES
        yield "fix" if short else "ok", "disk", f"{free / 2**30:.0f} GiB free for images"
    summaries = client.api.containers(all=True, filters={"label": OWNER_LABEL})
    now = time.time()
    left = sum(abandoned(summary["Labels"], now) is not None for summary in summaries)
    if left:
        yield "fix", "containers", f"{left} have lost their process: `agentrl swebench reap`"
    else:
        yield "ok", "containers", f"{len(summaries)} in use, none left over"
    if arguments.dataset:
        instances = _load(arguments)
        local = {tag for image in client.images.list() for tag in image.tags}
        missing = {each.image for each in instances if _tagged(each.image) not in local}
        if missing:
            yield (
                "note",
                "images",
                f"{len(missing)} of {len(instances)} are not local: `agentrl swebench pull`",
            )
        else:
            yield "ok", "images", f"all {len(instances)} are local"


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _pull(arguments: argparse.Namespace) -> int:
    from agentrl.errors import ConfigError
    from agentrl_swebench import images
    from agentrl_swebench.engine import connect

    if arguments.concurrency < 1:
        raise ConfigError(f"--concurrency {arguments.concurrency} must be positive")
    names = list(dict.fromkeys(instance.image for instance in _load(arguments)))
    client = connect(timeout_s=3600)
    ids = images.pull(
        client,
        names,
        concurrency=arguments.concurrency,
        min_free_bytes=int(arguments.min_free_gb * 2**30),
        progress=lambda name, state: print(f"{name}: {state}", flush=True),
    )
    if arguments.scrub:
        asyncio.run(_scrub(ids, arguments.concurrency))
    return 0


async def _scrub(ids: dict[str, str], concurrency: int) -> None:
    from contextlib import aclosing

    from agentrl.env.container.engine import EngineAPI
    from agentrl_swebench import images

    room = asyncio.Semaphore(concurrency)
    async with aclosing(EngineAPI()) as api, asyncio.TaskGroup() as tasks:

        async def one(name: str, image_id: str) -> None:
            async with room:
                made = await images.scrubbed(api, image_id)
            print(f"{name}: scrubbed at {made.base.commit[:12]}", flush=True)

        for name, image_id in ids.items():
            tasks.create_task(one(name, image_id))


def _reap(arguments: argparse.Namespace) -> int:
    from agentrl_swebench.leases import reap

    removed = reap(everything=arguments.all)
    for line in removed:
        print(line)
    print(f"{len(removed)} containers removed")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from agentrl.errors import ConfigError
    from agentrl_swebench.dataset import load_predictions

    for name in ("concurrency", "max_turns", "max_turn_tokens"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be positive")
    instances = _load(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "predictions.jsonl"
    _drop_cut_line(path)
    done = {each.instance_id for each in load_predictions(path, instances)} if _has(path) else set()
    pending = [each for each in instances if each.instance_id not in done]
    if done:
        print(f"{len(done)} predictions are of an earlier call")
    failed = asyncio.run(_solve(arguments, pending, path)) if pending else 0
    if failed:
        print(
            f"{failed} of {len(pending)} instances have no prediction, through no fault of the "
            "model; repeat the call to try them again",
            file=sys.stderr,
        )
    if not arguments.no_grade and _has(path):
        _grade(arguments, instances, load_predictions(path, instances))
    return 1 if failed else 0


def _drop_cut_line(path: Path) -> None:
    """A kill may have cut the last line; its instance is solved again."""
    if _has(path):
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with open(path, "r+b") as file:
                file.truncate(whole)


def _has(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


async def _solve(arguments: argparse.Namespace, pending: list[Instance], path: Path) -> int:
    """Play the pending instances and append their predictions; how many failed."""
    from contextlib import aclosing

    from agentrl.env.client import connect
    from agentrl.errors import ConfigError
    from agentrl.rollout.driver import Episode, Limits, play
    from agentrl.rollout.log import TrajectoryLog
    from agentrl_swebench.dataset import Prediction
    from agentrl_swebench.env import SWEBenchEnvironment

    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise ConfigError(
            "`run` needs the openai package: pip install 'agentrl[eval,swebench]'"
        ) from None
    import os

    from agentrl.rollout.chat import ChatPolicy

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
        "max_turns": arguments.max_turns,
        "edit_tool": arguments.edit_tool,
        "memory_mb": arguments.memory_mb,
        "grade": False,
    }
    limits = Limits(
        max_turns=arguments.max_turns,
        turn_timeout_s=arguments.turn_timeout,
        step_timeout_s=3600.0,
        episode_timeout_s=24 * 3600.0,
    )
    log = TrajectoryLog(arguments.out)
    room = asyncio.Semaphore(arguments.concurrency)
    failed = 0

    def record(trajectory: Trajectory) -> None:
        nonlocal failed
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
            client, arguments.model_name, arguments.max_turn_tokens, arguments.temperature
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
                async with room:
                    await play(episode, policy, env, limits, record)

            for index in range(len(pending)):
                tasks.create_task(one(index))
    return failed


def _append(path: Path, prediction: Prediction) -> None:
    import json

    with open(path, "ab") as file:
        file.write((json.dumps(prediction.row()) + "\n").encode())


def _grade(
    arguments: argparse.Namespace, instances: list[Instance], predictions: list[Prediction]
) -> None:
    from agentrl_swebench.evaluate import evaluate

    result = asyncio.run(
        evaluate(
            instances,
            predictions,
            run_id=arguments.run_id,
            out=arguments.out,
            dataset=arguments.dataset,
            split=arguments.split,
            policy=arguments.policy,
            audit=arguments.audit,
            timeout_s=arguments.timeout,
            progress=lambda verdict: print(
                f"{verdict.instance_id}: {verdict.outcome}, {verdict.reason}", flush=True
            ),
        )
    )
    num_resolved = sum(bool(each.resolved) for each in result.verdicts)
    print(f"resolved {num_resolved} of {len(instances)} instances, policy {arguments.policy}")
    print(f"predictions      {arguments.out / 'predictions.jsonl'}")
    print(f"official report  {result.report}")
    print(f"our report       {result.audit_report}")
