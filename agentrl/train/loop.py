"""SPINE 2: a run, from the first rollout to the last checkpoint.

    rollout -> batch -> update -> sync -> metrics -> checkpoint        once per step

With `rollout.max_staleness` = 0 these happen one after another. Above 0 a stream keeps playing
episodes while the trainer works, at most that many policy versions ahead. Nothing else changes.

How this differs from the textbook loop:

1. The trainer learns from the token ids that the engine sampled; a batch holds arrays, never text.
2. The loss of an update is one weighted sum over all its tokens. The weights are computed before
   the sum is split into micro-batches, so the split changes memory and speed but not the gradient.
3. Every token carries the version of the policy that sampled it, so staleness is measured and
   bounded, not assumed. Version k is the policy after training step k.
4. Sampler and trainer must agree on the log-probs of the sampled tokens; every step measures it.
   The embedded engine reads the trainer's own weights; servers are compared after every sync.
5. All randomness derives from the seed and from names (task, member, turn), never from what
   happened before, so a killed run resumes bit for bit.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

from agentrl import runtime
from agentrl.config import RunConfig
from agentrl.model import ranks
from agentrl.model.load import resolve_device
from agentrl.model.logprobs import packing_of
from agentrl.rollout.metrics import rollout_metrics, staleness_metrics
from agentrl.rollout.mixture import Part, environment_metrics, merged
from agentrl.rollout.scheduler import RolloutBatch, mark_dropped
from agentrl.rollout.setup import connected, running_agents
from agentrl.train.batch import trainable_samples, turn_states
from agentrl.train.callbacks import Callback, StepEnd
from agentrl.train.checkpoint import latest_checkpoint
from agentrl.train.follow import follow, packed
from agentrl.train.guards import check_rollouts, mismatch_warning, require_no_gap
from agentrl.train.profile import span
from agentrl.train.run import (
    Outputs,
    Run,
    assemble,
    open_outputs,
    replay_config,
    require_saved,
    restore,
    save,
    save_first,
    unless_interrupted,
    warn_about_learning_rate,
    warn_if_nothing_was_learned,
)
from agentrl.train.sampling import training_sampling
from agentrl.train.setup import interruptible, newest_run
from agentrl.train.signals import StepSignals
from agentrl.train.turns import on_device
from agentrl.types import Group, Sample, environment_of
from agentrl.view.display import Display, loading
from agentrl.view.report import first_sentence, report_run


def train(config: RunConfig, *, callbacks: Sequence[Callback] = (), quiet: bool = False) -> Path:
    """Trains from beginning to end and returns the run directory.

    Where torchrun started several ranks, each calls this: rank 0 drives the run, and the others
    follow it until it tells them to stop.

    Args:
        callbacks: called after every step, see `agentrl.train.callbacks`.
        quiet: show no display and print no line per step.

    Raises:
        AgentRLError: with the reason and the fix. Checkpoints saved before remain valid.
    """
    ranks.join(resolve_device(config.model.device), config.train.parallel)
    with ranks.losses_named():
        if ranks.rank() > 0:
            follow(config)
            ranks.leave()
            return Path()
        run_dir = runtime.run(_train(_after_restart(config), callbacks, quiet=quiet))
        ranks.tell("stop")
    ranks.leave()
    return run_dir


def _after_restart(config: RunConfig) -> RunConfig:
    """Resumes the run that the ranks had begun when torchrun restarted them; else returns `config`.

    The launcher's store remembers the run directory. If torchrun made a new store for this attempt,
    the newest run of this name is resumed, as with --resume.
    """
    if not ranks.attempt():
        return config
    run_dir = ranks.remembered("run_dir") if ranks.agents_share_store() else newest_run(config)
    if run_dir is None or latest_checkpoint(run_dir) is None:
        return config
    again = config.run.model_copy(
        update={"resume": config.run.resume or True, "dir": Path(run_dir)}
    )
    return config.model_copy(update={"run": again})


async def _train(config: RunConfig, callbacks: Sequence[Callback], *, quiet: bool) -> Path:
    if config.run.replay is not None:
        config = replay_config(config)
    async with connected(config) as envs, running_agents(config) as agents:
        with loading(f"loading {config.model.path}", quiet=quiet):
            run = await assemble(config, envs, agents, quiet=quiet)
        async with aclosing(run.serving):
            last_step = 0
            if config.run.resume:
                last_step = restore(run)
                require_no_gap(run.run_dir, last_step, run.mixture)
            await run.serving.push(run.trainer.model, last_step)
            with (
                open_outputs(run, last_step, quiet=quiet) as outputs,
                interruptible() as interrupted,
                ThreadPoolExecutor(1, thread_name_prefix="agentrl-trainer") as thread,
                run.saver,
            ):
                if not config.run.resume:
                    warn_about_learning_rate(run, outputs.display)
                    save_first(run, outputs.display)
                run.mixture.start(config, last_step)
                try:
                    await _steps(run, last_step, callbacks, outputs, interrupted, thread)
                finally:
                    run.profiler.stop()
                    await run.mixture.aclose()
                warn_if_nothing_was_learned(run, last_step, outputs.display)
    report = report_run(run.run_dir)
    print(first_sentence(run.run_dir))
    print(f"run directory {run.run_dir}, report {report}")
    return run.run_dir


async def _steps(
    run: Run,
    last_step: int,
    callbacks: Sequence[Callback],
    outputs: Outputs,
    interrupted: asyncio.Event,
    trainer_thread: ThreadPoolExecutor,
) -> None:
    """Trains the steps after `last_step`: all of them, or until the run is interrupted or its
    evaluations stop improving (`run.patience`)."""
    display = outputs.display
    in_thread = functools.partial(asyncio.get_running_loop().run_in_executor, trainer_thread)
    finished_step = last_step
    warned = False  # of a mismatch between sampler and trainer; once is enough
    for step in range(last_step + 1, run.config.run.num_steps + 1):
        if run.held_out.reason_to_stop():
            outputs.status.ended_early = True
            break

        # Rollout: the step's groups of episodes, played now, or by a stream during earlier steps.
        step_started = time.perf_counter()
        run.profiler.start(step)
        with span("rollout"):
            played = await unless_interrupted(interrupted, _play(run, step, display), run)
        if played is None:
            break
        batches, greedy_rewards = played
        rollouts = merged(batches)
        if run.config.track.log_trajectories:
            outputs.trajectories.append(step, rollouts.trajectories)
        rollout_s = time.perf_counter() - step_started
        metrics = rollout_metrics(rollouts) | environment_metrics(batches)
        metrics |= run.mixture.take_in(batches)
        metrics["time/rollout_s"] = rollout_s
        check_rollouts(run, rollouts, step, display)

        # Batch and update: the samples of all groups, in one optimizer update or several.
        train_started = time.perf_counter()
        groups = rollouts.groups
        if run.replay is not None:
            replayed, metrics_of_replay = run.replay.take(step)
            groups = groups + replayed
            metrics |= metrics_of_replay
        samples = trainable_samples(groups)
        if samples:
            metrics |= await run.serving.sleep(run.trainer.model)
            metrics |= await in_thread(_learn, run, step, samples, groups, greedy_rewards, outputs)
        if (warning := mismatch_warning(metrics, run.config)) and not warned:
            display.note(f"step {step}: {warning}")
            warned = True
        if run.replay is not None:
            run.replay.add(step, rollouts.groups)
        train_s = time.perf_counter() - train_started
        num_computed = metrics.pop("computed_tokens", 0.0)
        metrics |= _training_metrics(run, step, samples, batches, train_s, num_computed)
        metrics.setdefault("loss/policy", 0.0)  # its curve has no hole where nothing was trained
        metrics.setdefault("loss/kl", 0.0)

        # Sync: the engine gets the new weights before a stream may play further ahead.
        display.phase("sync", 0, 1)
        with span("push"):
            metrics |= await run.serving.push(run.trainer.model, step)
        run.mixture.advance(step)
        if trace := run.profiler.stop():
            display.note(f"trace of step {step}: {trace}")

        # Metrics: with those of an evaluation, if one is due. Callbacks may add some, or stop here.
        is_best = False
        if run.held_out.is_due(step, run.config):
            metrics |= await run.held_out.play(
                step, run.mixture, run.policy, run.agents, functools.partial(display.phase, "eval")
            )
            is_best = run.held_out.record(step, metrics)
        metrics["time/step_s"] = time.perf_counter() - step_started
        end = StepEnd(step, metrics, rollouts.trajectories, run, interrupted, display)
        for callback in callbacks:
            callback(end)
        outputs.metrics.write(step, metrics)
        display.step(step, metrics)
        finished_step = outputs.status.step = step

        # Checkpoint: if one is due, or if the last one did not fit on the disk.
        due = step % run.config.run.save_every == 0 or step == run.config.run.num_steps
        if due or is_best or run.saver.refused:
            await in_thread(save, run, step, run.data_position(), display, is_best)
        if interrupted.is_set():
            break
    _finish(run, finished_step, display, interrupted=interrupted.is_set())


async def _play(
    run: Run, step: int, display: Display
) -> tuple[dict[str, RolloutBatch], dict[str, float] | None]:
    """Plays a step's episodes.

    Returns:
        Its groups by environment, and the reward of a greedy answer to each group's task by group
        id; None instead unless the objective uses such rewards as baselines (ReMax).
    """
    before = run.mixture.data_position()
    try:
        batches = await run.mixture.collect(step, functools.partial(display.phase, "rollout"))
        if "baselines" not in run.config.objective.needs():
            return batches, None
        rewards: dict[str, float] = {}
        for part in run.mixture.parts:
            rewards |= await _greedy_rewards(run, part, batches[part.name])
    except asyncio.CancelledError:
        if not run.mixture.plays_ahead:
            run.mixture.restore(before)  # so that a resumed run plays these tasks
        raise
    return batches, rewards


async def _greedy_rewards(run: Run, part: Part, batch: RolloutBatch) -> dict[str, float]:
    """Plays each group's task once more, always taking the most probable token; returns the rewards
    by group id. Groups whose greedy answer failed are dropped from `batch`."""
    answers = await part.scheduler.replay(
        batch.groups,
        run.policy(training_sampling(part.config, temperature=0.0)),
        id_prefix=f"greedy-{part.scheduler.id_prefix}",
    )
    rewards = {
        group.group_id: answer.reward
        for group, answer in zip(batch.groups, answers, strict=True)
        if answer.trainable
    }
    compared = [group for group in batch.groups if group.group_id in rewards]
    for group in batch.groups:
        if group.group_id not in rewards:
            mark_dropped(group, "no_greedy_answer")
    batch.dropped["no_greedy_answer"] += len(batch.groups) - len(compared)
    batch.groups = compared
    return rewards


def _learn(
    run: Run,
    step: int,
    samples: list[Sample],
    groups: list[Group],
    greedy_rewards: dict[str, float] | None,
    outputs: Outputs,
) -> dict[str, float]:
    """Trains on a step's samples and returns the metrics.

    It blocks, so it runs in a thread of its own while the event loop goes on playing episodes.
    """
    states = None
    if "state_ids" in run.config.objective.needs():
        played = [t for group in groups for t in group.trajectories]
        states = {t.trajectory_id: turn_states(t) for t in played}
    if ranks.size() > 1:
        ranks.tell("learn", [step, states, greedy_rewards, packed(samples)])

    def write_signals(signals: StepSignals) -> None:
        objective = run.config.objective
        outputs.signals.write(step, signals.rows(samples, objective, outputs.signals.keeps))

    with ranks.working("learn"), on_device(run.trainer, run.serving.sleeps), span("update"):
        return run.trainer.learn(
            step,
            samples,
            states,
            greedy_rewards,
            on_progress=functools.partial(outputs.display.phase, "train"),
            on_signals=write_signals,
        )


def _training_metrics(
    run: Run,
    step: int,
    samples: list[Sample],
    batches: Mapping[str, RolloutBatch],
    seconds: float,
    num_computed: float,
) -> dict[str, float]:
    """Returns staleness, sizes and speed of a step's training, over all samples and for each named
    environment.

    Args:
        seconds: time that training took.
        num_computed: tokens that went through the model in updates; a prefix that several samples
            share may count once.
    """
    metrics = _sample_metrics(samples, step) | {
        "train/packing": packing_of(run.trainer.learner.model),
        "train/updates": run.trainer.learner.num_updates,
        "time/train_s": seconds,
        "train/tokens_per_s": num_computed / seconds,
    }
    for name in filter(None, batches):
        if own := [each for each in samples if environment_of(each.group_id) == name]:
            of_environment = _sample_metrics(own, step)
            metrics |= {f"env/{name}/{key}": value for key, value in of_environment.items()}
    return metrics


def _sample_metrics(samples: list[Sample], step: int) -> dict[str, float]:
    sizes = {"train/samples": len(samples), "train/tokens": sum(map(len, samples))}
    return staleness_metrics(samples, current_version=step - 1) | sizes


def _finish(run: Run, finished_step: int, display: Display, *, interrupted: bool) -> None:
    """Saves the last step of a run that ended early, and shows why it ended."""
    run.saver.wait()
    reason = run.held_out.reason_to_stop()
    if (interrupted or reason) and finished_step > run.saver.step:
        save(run, finished_step, run.data_position(), display)
        run.saver.wait()
    require_saved(run, finished_step)
    if interrupted:
        display.note(f"stopped after step {finished_step}; continue with --resume")
    elif reason:
        display.note(f"ended after step {finished_step}: {reason}")
