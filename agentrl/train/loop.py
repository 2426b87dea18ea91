"""SPINE 2: a run, from the first rollout to the last checkpoint.

    rollout -> batch -> update -> sync -> metrics -> checkpoint        once per step

With `rollout.max_staleness` = 0 these happen in turn. Above 0 rollouts never stop: a stream plays
ahead, within the bound, while the trainer works; the order of everything else is the same.

How this differs from the textbook loop:

1. The trainer learns on the ids the engine sampled; a batch holds arrays, never text.
2. The loss of an update is one weighted sum over all its tokens. The weights are computed before
   it is cut into micro-batches, so the cut changes memory and speed and nothing else.
3. Every token carries the version of the policy that sampled it, so "how stale" is measured and
   bounded, not assumed. Version k is the policy after training step k.
4. Sampler and trainer must agree on the log-probs of what was sampled; every step measures it.
   The embedded engine reads the trainer's own weights. A server's are compared after every sync.
5. Everything random derives from the seed and from names (task, member, turn), not from what
   happened before, so a killed run continues bit for bit.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

from agentrl import event_loop
from agentrl.config import RunConfig
from agentrl.rollout.metrics import rollout_metrics, staleness_metrics
from agentrl.rollout.mixture import Part, environment_metrics, merged
from agentrl.rollout.scheduler import RolloutBatch, mark_dropped
from agentrl.rollout.setup import connected, running_agents
from agentrl.train import ranks
from agentrl.train.batch import trainable_samples, turn_states
from agentrl.train.callbacks import Callback, StepEnd
from agentrl.train.checkpoint import latest_checkpoint
from agentrl.train.follow import follow, packed
from agentrl.train.guards import disagreement, look_at, require_no_gap
from agentrl.train.logprobs import packing_of
from agentrl.train.profile import span
from agentrl.train.run import (
    Outputs,
    Run,
    assemble,
    open_outputs,
    require_saved,
    restore,
    save,
    save_first,
    unless_interrupted,
    warn_of_rate,
    without_players,
)
from agentrl.train.sampling import training_sampling
from agentrl.train.setup import interruptible, newest_run, resolve_device
from agentrl.train.signals import StepSignals
from agentrl.train.turns import on_device
from agentrl.types import Group, Sample, environment_of
from agentrl.view.display import Display, loading
from agentrl.view.report import first_sentence, report_run


def train(config: RunConfig, *, callbacks: Sequence[Callback] = (), quiet: bool = False) -> Path:
    """Do a whole run; returns its directory.

    Args:
        callbacks: called after every step, see `agentrl.train.callbacks`.
        quiet: no display and no lines per step.

    Raises:
        AgentRLError: with the reason and the remedy. Whatever was saved before stays valid.
    """
    ranks.join(resolve_device(config.model.device), config.train.parallel)
    with ranks.losses_named():
        if ranks.rank() > 0:
            follow(config)
            ranks.leave()
            return Path()
        run_dir = event_loop.run(_train(_after_restart(config), callbacks, quiet=quiet))
        ranks.tell("stop")
    ranks.leave()
    return run_dir


def _after_restart(config: RunConfig) -> RunConfig:
    """Has ranks that torchrun restarts after one of them died continue the run that they began.

    Its store says which run that was. Where agents start a store of their own each time, it is the
    newest run of this name, as with --resume.
    """
    if not ranks.attempt():
        return config
    run_dir = ranks.remembered("run_dir") if ranks.agents_share_store() else newest_run(config)
    if run_dir is None or latest_checkpoint(run_dir) is None:
        return config
    again = config.run.model_copy(update={"resume": True, "dir": Path(run_dir)})
    return config.model_copy(update={"run": again})


async def _train(config: RunConfig, callbacks: Sequence[Callback], *, quiet: bool) -> Path:
    if config.run.replay is not None:
        config = without_players(config)
    async with (
        connected(config) as envs,
        running_agents(config) as agents,
    ):
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
                    warn_of_rate(run, outputs.display)
                    save_first(run, outputs.display)
                run.mixture.start(config, last_step)
                try:
                    await _steps(run, last_step, callbacks, outputs, interrupted, thread)
                finally:
                    run.profiler.stop()
                    await run.mixture.aclose()
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
    display = outputs.display
    in_thread = functools.partial(asyncio.get_running_loop().run_in_executor, trainer_thread)
    finished_step = last_step
    disagreed = False  # sampler and trainer, which is told once
    for step in range(last_step + 1, run.config.run.num_steps + 1):
        if run.held_out.why_enough():
            break

        # Rollout: groups of episodes, played now or, by the stream, while the last step trained.
        step_started = time.perf_counter()
        run.profiler.start(step)
        with span("rollout"):
            collected = await unless_interrupted(interrupted, _collect(run, step, display), run)
        if collected is None:
            break
        batches, greedy_rewards = collected
        rollouts = merged(batches)
        if run.config.track.log_trajectories:
            outputs.trajectories.append(step, rollouts.trajectories)
        rollout_s = time.perf_counter() - step_started
        metrics = rollout_metrics(rollouts) | environment_metrics(batches)
        metrics |= run.mixture.take_in(batches)
        metrics["time/rollout_s"] = rollout_s
        look_at(run, rollouts, step, display)

        # Learn: one batch, one or more optimizer updates.
        train_started = time.perf_counter()
        groups = rollouts.groups
        if run.replay is not None:
            again, of_replay = run.replay.take(step)
            groups = groups + again
            metrics |= of_replay
        samples = trainable_samples(groups)
        if samples:
            metrics |= await run.serving.sleep(run.trainer.model)
            metrics |= await in_thread(_learn, run, step, samples, groups, greedy_rewards, outputs)
        warning = disagreement(metrics, run.config)
        if warning and not disagreed:
            display.note(f"step {step}: {warning}")
            disagreed = True
        if run.replay is not None:
            run.replay.add(step, rollouts.groups)
        train_s = time.perf_counter() - train_started
        metrics |= staleness_metrics(samples, current_version=step - 1)
        metrics |= _training_metrics(run, samples, train_s, metrics.pop("computed_tokens", 0.0))
        for name in batches:
            metrics |= _metrics_of_environment(name, samples, step) if name else {}
        metrics.setdefault("loss/policy", 0.0)
        metrics.setdefault("loss/kl", 0.0)

        # Sync: whoever samples has the new weights before the stream may play further ahead.
        display.phase("sync", 0, 1)
        with span("push"):
            metrics |= await run.serving.push(run.trainer.model, step)
        run.mixture.advance(step)
        if trace := run.profiler.stop():
            display.note(f"trace of step {step}: {trace}")

        # Metrics, an evaluation among them where one is due, and what callbacks add and decide.
        is_best = False
        if run.held_out.is_due(step, run.config):
            metrics |= await run.held_out.play(
                step,
                run.mixture,
                run.policy,
                run.agents,
                lambda done, total: display.phase("eval", done, total),
            )
            is_best = run.held_out.see(step, metrics)
        metrics["time/step_s"] = time.perf_counter() - step_started
        end = StepEnd(step, metrics, rollouts.trajectories, run, interrupted, display)
        for callback in callbacks:
            callback(end)
        outputs.metrics.write(step, metrics)
        display.step(step, metrics)
        finished_step = outputs.status.step = step

        # Checkpoint: where one is due, or where the disk refused the last.
        due = step % run.config.run.save_every == 0 or step == run.config.run.num_steps
        if due or is_best or run.saver.refused:
            await in_thread(save, run, step, run.data_position(), display, is_best)
        if interrupted.is_set():
            break
    run.saver.wait()
    if (interrupted.is_set() or run.held_out.why_enough()) and finished_step > run.saver.step:
        save(run, finished_step, run.data_position(), display)
        run.saver.wait()
    require_saved(run, finished_step)
    if interrupted.is_set():
        display.note(f"stopped after step {finished_step}; continue with --resume")
    elif enough := run.held_out.why_enough():
        display.note(f"ended after step {finished_step}: {enough}")


async def _collect(
    run: Run, step: int, display: Display
) -> tuple[dict[str, RolloutBatch], dict[str, float] | None]:
    """A step's rollouts by environment and, where the objective compares with them, greedy rewards
    by group."""
    before = run.mixture.data_position()
    try:
        batches = await run.mixture.collect(
            step, lambda done, total: display.phase("rollout", done, total)
        )
        if "baselines" not in run.config.objective.needs():
            return batches, None
        rewards: dict[str, float] = {}
        for part in run.mixture.parts:
            rewards |= await _greedy_rewards(run, part, batches[part.name])
    except asyncio.CancelledError:
        if not run.mixture.plays_ahead:
            run.mixture.restore(before)  # a resumed run plays these tasks again
        raise
    return batches, rewards


async def _greedy_rewards(run: Run, part: Part, batch: RolloutBatch) -> dict[str, float]:
    """ReMax: the same tasks once more, one answer each, always the most probable token."""
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
    """Train on a step's samples; returns its metrics. Blocks, so it has a thread of its own."""
    states = None
    if "state_ids" in run.config.objective.needs():
        played = [t for group in groups for t in group.trajectories]
        states = {t.trajectory_id: turn_states(t) for t in played}
    if ranks.size() > 1:
        plain, arrays = packed(samples)
        ranks.tell("learn", [step, states, greedy_rewards, plain], arrays)

    def write_signals(signals: StepSignals) -> None:
        objective = run.config.objective
        outputs.signals.write(step, signals.rows(samples, objective, outputs.signals.keeps))

    with ranks.working("learn"), on_device(run.trainer, run.serving.sleeps), span("update"):
        return run.trainer.learn(
            step,
            samples,
            states,
            greedy_rewards,
            on_progress=lambda done, total: outputs.display.phase("train", done, total),
            on_signals=write_signals,
        )


def _metrics_of_environment(name: str, samples: list[Sample], step: int) -> dict[str, float]:
    """Counts the samples of one environment among several."""
    own = [sample for sample in samples if environment_of(sample.group_id) == name]
    if not own:
        return {}
    metrics = staleness_metrics(own, current_version=step - 1)
    metrics |= {"train/samples": len(own), "train/tokens": sum(len(sample) for sample in own)}
    return {f"env/{name}/{key}": value for key, value in metrics.items()}


def _training_metrics(
    run: Run, samples: list[Sample], seconds: float, computed: float
) -> dict[str, float]:
    return {
        "train/samples": len(samples),
        "train/tokens": sum(len(sample) for sample in samples),
        "train/packing": packing_of(run.trainer.learner.model),
        "train/updates": run.trainer.learner.num_updates,
        "time/train_s": seconds,
        "train/tokens_per_s": computed / seconds,
    }
