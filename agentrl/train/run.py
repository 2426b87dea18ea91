"""The parts of a training run: builds, saves, restores and watches them.

`agentrl.train.loop` shows what a run does with these parts.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import shutil
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from transformers import PreTrainedModel

from agentrl.config import AgentSection, InferenceSection, RunConfig
from agentrl.env.client import EnvClient
from agentrl.errors import ConfigError, DataError, EnvError, StallError, TrainingError
from agentrl.inference.base import SamplingParams
from agentrl.model import ranks
from agentrl.model.load import identity_of
from agentrl.model.logprobs import computing_device
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.runner import Agents
from agentrl.rollout.log import TrajectoryLog
from agentrl.rollout.metrics import error_codes
from agentrl.rollout.mixture import Capacity, Mixture, Part, Quotas
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.recorded import RecordedMixture
from agentrl.rollout.replay_buffer import ReplayBuffer
from agentrl.rollout.sampler import Sampler, make_sampler
from agentrl.rollout.scheduler import RolloutBatch, TaskSource, stable_seed
from agentrl.rollout.setup import (
    load_renderer,
    make_scheduler,
    require_shown_images,
    require_shown_tools,
    scorer_of,
    split_size,
    token_policy,
)
from agentrl.rollout.signals import SignalLog
from agentrl.train import checkpoint
from agentrl.train.checkpoint import Saver
from agentrl.train.filters import filters_of
from agentrl.train.held_out import HeldOut, default_interval
from agentrl.train.optimizer import require_optimizer
from agentrl.train.preflight import FirstRewards, correction_of_rounding, rate_is_unusual
from agentrl.train.profile import Profiler
from agentrl.train.sampling import training_sampling
from agentrl.train.serving import Serving, start_serving
from agentrl.train.setup import run_directory
from agentrl.train.trainer import Trainer, make_trainer
from agentrl.train.turns import leave_device
from agentrl.types import JSON
from agentrl.view.display import Display
from agentrl.view.tracking import MetricsWriter, RunStatus, read_metrics, write_software

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPLAY = "replay/groups"
"""Key of a checkpoint's data position, beside the names of environments, which hold no slash."""
STALL_REPORT_ROWS = 40
MOST_FAILED = 0.75
"""Share of a step's trajectories; if more fail for one cause, something is broken."""
FAILING_STEPS = 3
"""This many such steps in a row end the run. Fewer do not, because an outage may pass."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of a run. Everything that changes from step to step is in a checkpoint."""

    run_dir: Path
    lock: IO[bytes]
    """Reserves the directory for this process until it is closed."""
    fingerprint: dict[str, JSON]
    """Everything that a resumed run must have in common with the one that was saved."""
    trainer: Trainer
    serving: Serving
    renderer: Renderer
    mixture: Mixture
    """Plays the groups of a step, of one environment or of several."""
    agents: Agents | None
    held_out: HeldOut
    saver: Saver
    first_rewards: FirstRewards
    profiler: Profiler
    replay: ReplayBuffer | None = None
    """Groups to train on again; None if `rollout.replay_share` is 0."""
    failing_steps: int = 0
    """Steps in a row in which most trajectories failed for one cause."""

    @property
    def config(self) -> RunConfig:
        """Returns the current configuration; callbacks may have changed a few keys."""
        return self.trainer.config

    def change(self, key: str, value: JSON) -> None:
        """Changes a key from the next step on; every later checkpoint holds the change.

        Raises:
            ConfigError: the key cannot change during this run, or not to this value.
        """
        if key == "rollout.temperature" and self.mixture.plays_ahead:
            raise ConfigError(
                "rollout.temperature cannot change between steps with inference.backend = "
                f"{self.config.inference.backend!r}: episodes of the next step are already played"
            )
        self.trainer.change(key, value)
        ranks.tell("change", [key, value])
        self.set_policies()

    def set_policies(self) -> None:
        """Gives every environment a policy that samples as the current configuration says."""
        for part in self.mixture.parts:
            part.config = self.config.environments[part.name]
            part.scheduler.policy = self.policy(training_sampling(part.config))

    def data_position(self) -> dict[str, JSON]:
        """Returns the positions of the task sources, and the groups held for replay."""
        position = self.mixture.data_position()
        if self.replay is not None:
            position[REPLAY] = self.replay.state()
        return position

    def policy(self, sampling: SamplingParams) -> TokenPolicy:
        """Returns the policy in training, with these sampling parameters."""
        return token_policy(self.config, self.serving.engine, self.renderer, sampling)


def replay_config(config: RunConfig) -> RunConfig:
    """Returns `config` without servers, agent and evaluations: a replay (`run.replay`) trains on
    recorded episodes."""
    return config.model_copy(
        update={
            "inference": InferenceSection.model_validate({}),
            "rollout": config.rollout.model_copy(update={"generate": None}),
            "agent": AgentSection(),
            "run": config.run.model_copy(update={"eval_every": 0}),
        }
    )


async def assemble(
    config: RunConfig, envs: Mapping[str, EnvClient], agents: Agents | None, *, quiet: bool
) -> Run:
    """Builds all parts of a run. The cheapest checks come first.

    Args:
        envs: a client of each environment, by name.
        agents: play the episodes; if None, the policy plays them itself.

    Raises:
        AgentRLError: a part is misconfigured or cannot be reached; names it and the fix.
    """
    rollout = config.rollout
    require_optimizer(config.train)
    keep = filters_of(rollout)
    recorded = None
    if config.run.replay is not None:
        names = [env.name for env in config.envs]
        recorded = RecordedMixture(config.run.replay, config.run.num_steps, names)
    sizes: dict[str, int | None] = dict.fromkeys(config.environments)
    samplers: dict[str, Sampler | None] = {}
    for name, alone in config.environments.items() if recorded is None else ():
        with named_in_errors(name):
            size = sizes[name] = await split_size(envs[name], alone, alone.env.split)
            seed = stable_seed(config.run.seed, name)
            samplers[name] = make_sampler(alone.rollout, size, seed)
            scorer_of(alone)
    renderer = load_renderer(config, config.model.path)
    if recorded is not None:
        recorded.processor = renderer.processor
    for name, alone in config.environments.items() if recorded is None else ():
        with named_in_errors(name):
            await require_shown_tools(envs[name], alone, renderer)
            await require_shown_images(envs[name], alone, renderer)
    held_out = HeldOut(config, await default_interval(config, envs, quiet=quiet))
    for note in held_out.notes if not quiet else ():
        print(note)
    run_dir, lock, where = run_directory(config)
    if not quiet:
        print(where)
    checkpoint.clean_leftovers(run_dir)

    ranks.remember("run_dir", str(run_dir))
    ranks.tell("start", str(run_dir))
    if config.model.compile and not quiet:
        print("compiling the model's layers; this takes about a minute")
    tokenizer: Any = renderer.tokenizer
    with ranks.working("start"):
        trainer = await make_trainer(config, tokenizer, run_dir)
    if trainer.chose_token_budget and not config.run.resume and not quiet:
        budget = trainer.config.train.token_budget
        print(f"train.token_budget = {budget}, chosen for the device's free memory")

    if config.inference.quantization and not quiet:
        print(correction_of_rounding(config))
    if config.inference.share == "sleep":
        leave_device(trainer)
    serving = await start_serving(config, trainer.model, run_dir, quiet=quiet)
    shared = asyncio.Semaphore(rollout.max_concurrent)
    parts = []
    for name, alone in config.environments.items() if recorded is None else ():
        capacity = None
        if config.inference.backend != "embedded":
            sessions = (await envs[name].info(alone.env.id, alone.env.config)).max_sessions
            capacity = Capacity(asyncio.Semaphore(sessions), shared)
        scheduler = make_scheduler(
            alone,
            token_policy(alone, serving.engine, renderer, training_sampling(alone)),
            envs[name],
            TaskSource(alone.env.split, sizes[name], config.run.seed, sampler=samplers[name]),
            group_size=rollout.group_size,
            score=scorer_of(alone),
            capacity=capacity,
            agents=agents,
            name=name,
        )
        parts.append(Part(name, alone, scheduler))
    weights = [env.weight for env in config.envs] or [1.0]
    return Run(
        run_dir=run_dir,
        lock=lock,
        fingerprint=_fingerprint(config, num_tasks=sizes, model=trainer.model),
        trainer=trainer,
        serving=serving,
        renderer=renderer,
        mixture=recorded or Mixture(parts, Quotas(weights, rollout.groups_per_step), keep),
        agents=agents,
        held_out=held_out,
        saver=Saver(run_dir, in_background=config.run.async_save),
        first_rewards=FirstRewards(config.run.preflight and recorded is None),
        profiler=Profiler(run_dir, config.run.profile),
        replay=ReplayBuffer(rollout) if rollout.replay_share else None,
    )


@contextmanager
def named_in_errors(name: str) -> Iterator[None]:
    """Adds the environment's name to an error raised during setup, if the run has several."""
    try:
        yield
    except (EnvError, ConfigError, DataError) as error:
        if not name:
            raise
        raise ConfigError(f"[[env]] {name}: {error}") from error


def _fingerprint(
    config: RunConfig, *, num_tasks: Mapping[str, int | None], model: PreTrainedModel
) -> dict[str, JSON]:
    """Returns everything that two runs must share for one to continue the other: the keys marked as
    decisive, with models by their contents and environments with their numbers of tasks."""
    found: Any = config.decisive()
    model_table = found["model"]
    for table, key in (
        (model_table, "path"),
        (model_table, "reference"),
        (found["teacher"], "path"),
        (found["critic"], "path"),
    ):
        table[key] = table[key] and identity_of(table[key])
    model_table["parameters"] = sum(p.numel() for p in model.parameters())
    for name, number in num_tasks.items():
        (found["env"][name] if name else found["env"])["tasks"] = number
    return found


# outputs and checkpoints --------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Outputs:
    """Writes and shows everything that a run produces besides checkpoints."""

    metrics: MetricsWriter
    trajectories: TrajectoryLog
    signals: SignalLog
    status: RunStatus
    display: Display


@contextmanager
def open_outputs(run: Run, last_step: int, *, quiet: bool) -> Iterator[Outputs]:
    """Opens the run's files, new or to be continued after `last_step`, and its display."""
    config = run.config
    with (
        run.lock,
        RunStatus(run.run_dir, num_steps=config.run.num_steps, step=last_step) as status,
        SignalLog(run.run_dir, share=config.track.signals, resume_step=last_step) as signals,
        MetricsWriter(
            run.run_dir,
            config.track.sinks,
            resume_step=last_step if config.run.resume else None,
            name=config.run.name,
            project=config.track.project,
            config=config.to_json(),
        ) as metrics,
        Display(
            config.run.num_steps,
            title=config.run.name,
            quiet=quiet,
            earlier=read_metrics(run.run_dir) if config.run.resume else (),
        ) as display,
    ):
        write_software(run.run_dir, last_step, _device_of(run.trainer.model))
        trajectories = TrajectoryLog(run.run_dir, resume_step=last_step)
        if steps := run.profiler.unreached(last_step, config.run.num_steps):
            listed = ", ".join(map(str, steps))
            display.note(
                f"run.profile: no trace will be written of step {listed}, because this run trains "
                f"steps {last_step + 1} to {config.run.num_steps}"
            )
        yield Outputs(metrics, trajectories, signals, status, display)


def _device_of(model: PreTrainedModel) -> dict[str, JSON]:
    """Returns what of the machine can change a result."""
    device = computing_device(model)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} {name}",
        "ranks": ranks.size(),
        "threads": torch.get_num_threads(),
    }


def restore(run: Run) -> int:
    """Loads the newest valid checkpoint and returns its step."""
    force = run.config.run.resume == "force"
    ranks.tell("restore", [run.fingerprint, force])
    with ranks.working("restore"):
        state = checkpoint.resume(
            run.run_dir,
            fingerprint=run.fingerprint,
            policy=run.trainer.learner,
            critic=run.trainer.critic,
            reference=run.trainer.changing_reference,
            force=force,
        )
    run.mixture.restore(state.data_position)
    if run.replay is not None:
        held: Any = state.data_position.get(REPLAY, [])
        run.replay.restore(held, run.run_dir, run.renderer.processor)
    run.trainer.restore_counters(state)
    if run.serving.sleeps:  # the moments were restored onto the device of the weights
        leave_device(run.trainer)
    run.saver.step = state.step
    if run.trainer.changes:
        listed = ", ".join(f"{key} = {value}" for key, value in run.trainer.changes.items())
        logger.warning("the resumed run keeps the changes of its callbacks: %s", listed)
        run.set_policies()
    if run.config.run.keep_best:
        run.held_out.restore(read_metrics(run.run_dir), state.step, run.run_dir)
    return state.step


def save(
    run: Run, step: int, position: dict[str, JSON], display: Display, is_best: bool = False
) -> None:
    """Writes a checkpoint, in the background with `run.async_save`.

    If the disk is full, `run.saver.refused` is set and the loop tries again after the next step. A
    run that ends without its last checkpoint has failed (`require_saved`).

    Args:
        is_best: make this checkpoint `checkpoints/best`.
    """
    display.phase("checkpoint", 0, 1)
    run.saver.wait()
    keep = run.config.run.keep_checkpoints
    ranks.tell("save", [step, keep])
    state = run.trainer.state(step, run.fingerprint, position)
    run.saver.save(state, keep=keep, is_best=is_best)


def save_first(run: Run, display: Display) -> None:
    """Writes the checkpoint of step 0, so that a run killed at any moment can be resumed, and warns
    if the disk has no room for the checkpoints to come.

    Raises:
        TrainingError: the disk has no room even for this one.
    """
    save(run, 0, run.data_position(), display)
    run.saver.wait()
    if run.saver.refused:
        raise TrainingError(f"no checkpoint can be written under {run.run_dir} (see above)")
    size = sum(path.stat().st_size for path in (run.run_dir / "checkpoints").rglob("*"))
    free, needed = shutil.disk_usage(run.run_dir).free, run.config.run.keep_checkpoints * size
    if free < needed:
        logger.warning(
            "%s has %.1f GB free, but run.keep_checkpoints = %d checkpoints and the one being "
            "written need %.1f GB more; free some space or lower run.keep_checkpoints",
            run.run_dir,
            free / 1e9,
            run.config.run.keep_checkpoints,
            needed / 1e9,
        )


def require_saved(run: Run, finished_step: int) -> None:
    """Checks that the weights after the last step are saved.

    Raises:
        TrainingError: no checkpoint holds them.
    """
    if finished_step > run.saver.step:
        raise TrainingError(
            f"the weights of step {finished_step} are NOT saved, because the disk is full (see "
            f"above): the newest checkpoint is that of step {run.saver.step}; free space under "
            f"{run.run_dir}, then train the missing steps again with --resume"
        )


# reasons to stop early ----------------------------------------------------------------------------


async def unless_interrupted(
    interrupted: asyncio.Event, work: Coroutine[None, None, T], run: Run
) -> T | None:
    """Returns the result of `work`; if `interrupted` is set first, cancels it and returns None.

    Raises:
        StallError: no episode made progress for `run.stall_timeout_s` seconds.
    """
    task = asyncio.ensure_future(work)
    signal = asyncio.ensure_future(interrupted.wait())
    limit = run.config.run.stall_timeout_s
    try:
        while not task.done() and not signal.done():
            await asyncio.wait(
                {task, signal}, timeout=min(limit / 4, 10), return_when=asyncio.FIRST_COMPLETED
            )
            if not task.done() and run.mixture.stalled_for_s() > limit:
                raise StallError(_stall_report(run.mixture))
    finally:
        signal.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return None if task.cancelled() else task.result()


def _stall_report(mixture: Mixture) -> str:
    """Lists the stage of every episode in flight, one per line, the longest wait first."""
    now = time.monotonic()
    live = sorted(mixture.live.values(), key=lambda episode: episode.since)
    lines = [
        f"no episode progressed for {mixture.stalled_for_s():.0f} s (run.stall_timeout_s); "
        f"{len(live)} in flight. Remove the cause, then continue with --resume",
        f"{'trajectory':24} {'stage':10} {'turn':>4} {'waits':>8}",
    ]
    lines += [
        f"{e.trajectory_id:24} {e.stage:10} {e.num_turns:4d} {now - e.since:6.0f} s"
        for e in live[:STALL_REPORT_ROWS]
    ]
    if len(live) > STALL_REPORT_ROWS:
        lines.append(f"and {len(live) - STALL_REPORT_ROWS} more")
    return "\n".join(lines)


def require_some_success(run: Run, rollouts: RolloutBatch, step: int, display: Display) -> None:
    """Stops a run whose episodes fail: its setup is broken, not its policy bad.

    Raises:
        TrainingError: every trajectory of the step failed, or `FAILING_STEPS` steps in a row lost
            `MOST_FAILED` of their trajectories, each step to one cause; names the cause.
    """
    total = len(rollouts.trajectories)
    failed = [t for t in rollouts.trajectories if t.error is not None]
    codes = error_codes(failed).most_common(1)
    code, count = codes[0] if codes else ("", 0)
    if not total or (count < MOST_FAILED * total and len(failed) < total):
        run.failing_steps = 0
        return
    run.failing_steps += 1
    example = next(t.error for t in failed if t.error and t.error.code == code)
    how_many = "all" if len(failed) == total else f"{len(failed)} of the"
    summary = (
        f"{how_many} {total} trajectories of step {step} failed, {count} of them during "
        f"{example.stage} with {code}: {example.message}"
    )
    if len(failed) == total or run.failing_steps >= min(FAILING_STEPS, run.config.run.num_steps):
        more = "" if run.failing_steps == 1 else f", and in {run.failing_steps} steps in a row"
        raise TrainingError(f"{summary}{more}; fix it, then continue with --resume")
    display.note(f"{summary}; the run stops after {FAILING_STEPS} such steps in a row")


def warn_about_learning_rate(run: Run, display: Display) -> None:
    """Warns if the learning rate is far from the usual one for this number of weights, or is never
    reached."""
    learning = (p.numel() for p in run.trainer.model.parameters() if p.requires_grad)
    if warning := rate_is_unusual(run.config, sum(learning)):
        display.note(warning)
    warmup, total = run.config.train.warmup_steps, run.trainer.learner.total_updates
    if warmup >= total:
        display.note(
            f"train.warmup_steps = {warmup}, and the run makes {total} updates: it never reaches "
            "train.learning_rate; lower train.warmup_steps"
        )


def warn_if_nothing_was_learned(run: Run, last_step: int, display: Display) -> None:
    """Warns if a run that ends has made no update.

    Args:
        last_step: the step after which it began or was resumed.
    """
    learner, num_steps = run.trainer.learner, run.config.run.num_steps
    if last_step >= num_steps:
        display.note(
            f"nothing was trained: the run is at step {last_step}, and run.num_steps = "
            f"{num_steps}; raise it"
        )
    elif learner.num_skipped and not learner.num_updates:
        display.note(
            f"nothing was learned: all {learner.num_skipped} updates were skipped, because their "
            "gradients were not finite; lower train.learning_rate, or look for infinite rewards or "
            "log-probabilities"
        )
