"""Plays on from a token of a recorded trajectory: `agentrl view --play`.

A checkpoint of the run, its starting model, or servers sample; the driver and the scheduler of
training play and reward the branches. Advantages are those of the run's own objective, as if the
branches were further members of their group. Nothing is written to the run's directory.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.algo import compute_advantages
from agentrl.config import InferenceSection, RunConfig, load_config
from agentrl.env.client import connect
from agentrl.errors import AgentRLError, DataError
from agentrl.rollout.fork import Fork, ForkPolicy, OneTask, find_task
from agentrl.rollout.log import read_records, step_file
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.recorded import recorded_batch, recorded_step
from agentrl.rollout.scheduler import TaskSource
from agentrl.rollout.setup import make_scheduler, scorer_of, split_size
from agentrl.train.batch import make_batch, trainable_samples, turn_states
from agentrl.train.checkpoint import STEP_NAME
from agentrl.train.evaluate import policy_of
from agentrl.train.sampling import training_sampling
from agentrl.train.taught import moved, played_again
from agentrl.types import Group, TokenRow, Trajectory, environment_of
from agentrl.view.forking import ForkRequest
from agentrl.view.trajectory import token_texts

EVALUATION = "eval-"
"""Begins the ids of groups that an evaluation played."""
SERVERS, START = "servers", "start"
"""Names of players that are no checkpoint: the servers of --server, and the model at the start."""


class Forks:
    """Plays forks, one at a time, and keeps the model that played last."""

    def __init__(self, servers: list[str], backend: str) -> None:
        """
        Args:
            servers: URLs of servers that may play.
            backend: `vllm` or `sglang`: what they run.
        """
        self._servers, self._backend = servers, backend
        self._lock = asyncio.Lock()
        self._held: tuple[Path, str] | None = None
        self._policy: TokenPolicy | None = None
        self._stack = AsyncExitStack()

    def players(self, run_dir: Path, version: int) -> list[dict[str, Any]]:
        """Returns who can play on, the one nearest to policy version `version` first."""
        found: list[tuple[str, int | None]] = [(SERVERS, None)] if self._servers else []
        trained = _is_training_run(run_dir)
        for path in (run_dir / "checkpoints").glob("step_*") if trained else ():
            if match := STEP_NAME.fullmatch(path.name):
                found.append((path.name, int(match[1])))
        found.append((START, 0 if trained else None))
        found.sort(key=lambda each: 0 if each[1] is None else abs(each[1] - version))
        return [{"name": name, "version": its} for name, its in found]

    async def play(
        self, run_dir: Path, step: int, offset: int, request: ForkRequest
    ) -> dict[str, Any]:
        """Plays the branches of a fork.

        Raises:
            AgentRLError: the trajectory cannot be forked there, or the player cannot be loaded.
        """
        path = step_file(run_dir / "trajectories", step)
        _, _, recorded = next(read_records(path, offset))
        config = load_config(run_dir / "config.toml", [])
        name = environment_of(recorded.group_id.removeprefix(EVALUATION))
        alone = config.environments[name]
        if alone.plays_by_agent or alone.inference.backend == "openai":
            raise DataError(
                "an agent or a chat server played this episode: its calls cannot be repeated by "
                "their ids, so it cannot be forked"
            )
        async with self._lock:
            policy = await self._load(run_dir, alone, request.player)
            fork = _fork_of(recorded, request, policy)
            played = await _branches(alone, ForkPolicy.of(policy, fork), name, request)
            advantages, note = _advantages(config, run_dir, step, recorded, played, policy)
        return {
            "branches": [_described(each, policy, fork, request, advantages) for each in played],
            "members": advantages,
            "note": note,
        }

    async def taught(self, run_dir: Path, step: int, before: str, after: str) -> dict[str, Any]:
        """Plays the tasks of a step with two players; returns what differs, as JSON.

        Raises:
            AgentRLError: the tasks cannot be played again, or a player cannot be loaded.
        """
        config = load_config(run_dir / "config.toml", [])
        if config.plays_by_agent:
            raise DataError("an agent played these episodes; agentrl eval plays it again")
        plays: list[list[Trajectory]] = []
        async with self._lock:
            for player in (before, after):
                plays.append([])
                for name, alone in config.environments.items():
                    policy = await self._load(run_dir, alone, player)
                    batch = recorded_batch(recorded_step(run_dir, step, policy.renderer.processor))
                    groups = [g for g in batch.groups if environment_of(g.group_id) == name]
                    size = config.rollout.group_size
                    plays[-1] += await played_again(alone, policy, name, groups, size)
        return moved(*plays)

    async def aclose(self) -> None:
        """Frees the model that played last."""
        await self._stack.aclose()

    async def _load(self, run_dir: Path, config: RunConfig, player: str) -> TokenPolicy:
        """Loads a player, unless it is held, and returns it with this environment's sampling."""
        if self._held != (run_dir, player) or self._policy is None:
            await self._stack.aclose()
            self._held, self._stack = None, AsyncExitStack()
            checkpoint = None
            if player not in (SERVERS, START):
                if not STEP_NAME.fullmatch(player):
                    raise DataError(f"no checkpoint {player!r}")
                checkpoint = str(run_dir / "checkpoints" / player)
            model = config.inference.model
            served = {"backend": self._backend, "urls": self._servers, "model": model}
            inference = InferenceSection.model_validate(served if player == SERVERS else {})
            loaded = await policy_of(
                config.model_copy(update={"inference": inference}),
                checkpoint,
                self._stack,
                for_agents=False,
            )
            assert isinstance(loaded, TokenPolicy)
            self._held, self._policy = (run_dir, player), loaded
        if not _is_training_run(run_dir):
            return self._policy
        sampling = replace(training_sampling(config), report_kept=False, report_routes=False)
        return replace(self._policy, sampling=sampling, max_turn_tokens=sampling.max_tokens)


def _is_training_run(run_dir: Path) -> bool:
    """Tells whether this is a training run, not an evaluation."""
    return (run_dir / "checkpoints").is_dir()


def _fork_of(recorded: Trajectory, request: ForkRequest, policy: TokenPolicy) -> Fork:
    if request.message is not None:
        return Fork.at_message(recorded, request.row, request.message, request.text or "")
    ids = request.ids
    if ids is None and request.text is not None:
        # The tokens are edited, so a text that spells a token of the template is that token.
        ids = policy.renderer.tokenizer.encode(request.text, add_special_tokens=False)
    return Fork.at_token(recorded, request.row, request.position, ids)


async def _branches(
    config: RunConfig, policy: ForkPolicy, name: str, request: ForkRequest
) -> list[Trajectory]:
    """Plays and rewards `request.count` branches."""
    recorded = policy.fork.recorded
    evaluated = recorded.group_id.startswith(EVALUATION)
    found = re.search(r"g(\d+)$", recorded.group_id)
    if found is None:
        raise DataError(f"group {recorded.group_id} is of a run that cannot be played again")
    split, position = config.eval.split if evaluated else config.env.split, int(found[1])
    async with aclosing(connect(config.env.url or None, token=config.env.token)) as env:
        size = await split_size(env, config, split)
        source = TaskSource(split, size, config.run.seed, position, shuffle=not evaluated)
        index = await find_task(env, config.env.id, config.env.config, source, recorded)
        scheduler = make_scheduler(
            config,
            policy,
            env,
            OneTask(split, size, config.run.seed, position, index=index),
            group_size=request.count,
            score=scorer_of(config),
            id_prefix=f"fork{request.seed}-",
            name=name,
        )
        if (seed := scheduler.group_at(position, size=1)[0].seed) != recorded.seed:
            raise DataError(
                f"the episode began with seed {recorded.seed}, and run.seed now gives {seed}: "
                "config.toml is not the one that it was played with"
            )
        return (await scheduler.collect(1)).trajectories


def _advantages(
    config: RunConfig,
    run_dir: Path,
    step: int,
    recorded: Trajectory,
    played: list[Trajectory],
    policy: TokenPolicy,
) -> tuple[dict[str, float], str]:
    """Returns trajectory id -> mean advantage over its sampled tokens, of the group's members and
    of the branches as further ones; and why there are none."""
    batch = recorded_batch(recorded_step(run_dir, step, policy.renderer.processor))
    groups = [group for group in batch.groups if group.group_id != recorded.group_id]
    members = [t for t in batch.trajectories if t.group_id == recorded.group_id]
    branches = [replace(each, group_id=recorded.group_id) for each in played]
    groups.append(Group(recorded.group_id, recorded.task_id, [*members, *branches]))
    samples = trainable_samples(groups)
    states = {t.trajectory_id: turn_states(t) for group in groups for t in group.trajectories}
    newest = max((int(each.policy_versions.max()) for each in samples), default=0)
    try:
        tensors = make_batch(
            samples,
            current_version=newest,
            states=states if "state_ids" in config.objective.needs() else None,
        )
        values = compute_advantages(config.objective, tensors)
    except (ValueError, AgentRLError) as error:
        return {}, f"no advantages: they need more than the branches have ({error})"
    wanted = {each.trajectory_id for each in (*members, *branches)}
    sums: dict[str, list[float]] = {}
    for row, sample in enumerate(samples):
        if sample.trajectory_id in wanted:
            of_row = values[row][tensors.loss_mask[row]].tolist()
            sums.setdefault(sample.trajectory_id, []).extend(of_row)
    return {key: sum(all_) / len(all_) for key, all_ in sums.items()}, ""


def _described(
    branch: Trajectory,
    policy: TokenPolicy,
    fork: Fork,
    request: ForkRequest,
    advantages: Mapping[str, float],
) -> dict[str, Any]:
    """Returns a branch as JSON, with the tokens of its last row from the fork on."""
    start, row = request.position, TokenRow()
    if len(branch.turns) > fork.turn:
        row = branch.branches[branch.turns[-1].branch]
        start = branch.turns[fork.turn].start if fork.edited else start
    ids, decode = row.token_ids[start:], policy.renderer.tokenizer.decode
    return {
        "trajectory_id": branch.trajectory_id,
        "reward": branch.reward if branch.scored else None,
        "advantage": advantages.get(branch.trajectory_id),
        "stop_reason": str(branch.stop_reason),
        "error": branch.error and branch.error.message,
        "ids": ids,
        "texts": token_texts(ids, functools.partial(decode, skip_special_tokens=False)),
        "sampled": [bool(each) for each in row.loss_mask[start:]],
        "logprobs": row.rollout_logprobs[start:],
    }
