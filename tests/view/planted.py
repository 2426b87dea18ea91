"""Run directories with a fault planted in each, written by the writers of real runs.

Rewards, turns, calls, errors and lengths are planted in trajectories, and the metrics about them
are computed as a run computes them. What only a trainer measures (entropy, clipping, mismatch,
gradient, staleness) is planted in the numbers.
"""

import random
from pathlib import Path

import numpy as np

from agentrl.rollout import TrajectoryLog
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.rollout.signals import RowSignals, SignalLog
from agentrl.types import Group, StopReason, TokenRow, Trajectory, TrajectoryError, Turn
from agentrl.view.tracking import MetricsWriter, RunStatus

STEPS = 24
GROUPS, MEMBERS = 4, 4
CONFIG = """[run]
name = "planted"
num_steps = {steps}

[model]
path = "nowhere"

[env]
id = "math"

[objective]
preset = "grpo"
"""

FAULTS = {
    "equal_rewards": {"reward": lambda step, rng: 1.0},
    "never_rewarded": {"reward": lambda step, rng: 0.0},
    "truncation": {"truncated": 0.5},
    "malformed_calls": {"malformed": 0.4},
    "errors": {"envs": ["math", "search"], "fails": "search", "failed": 0.5},
    "servers": {"failed": 0.3, "code": "inference_error"},
    "mismatch": {"metrics": {"policy/rollout_train_logprob_diff_mean": 0.3}},
    "staleness": {"metrics": {"rollout/staleness_mean": 5.5, "policy/ess": 0.3}},
    "uniform": {"entropy": lambda step: 0.5 + 0.2 * step, "malformed": 0.3},
    "entropy_collapse": {"entropy": lambda step: 1.5 * 0.7**step, "best": 0.2},
    "clipping": {"metrics": {"policy/clip_fraction_high": 0.31, "policy/clip_fraction_low": 0.12}},
    "dead_gradients": {"metrics": {"train/grad_norm": 0.0}},
    "length_explosion": {"length": lambda step: 6 + step * 4},
    "cheaters": {"metrics": {"red_team/paid": 1.0, "red_team/every_answer": 1.0}},
    "unseen_tools": {"metrics": {"env/unseen_tools": 2.0}},
    "refused_calls": {"metrics": {"rollout/refused_calls": 9}},
    "too_far": {
        "reward": lambda step, rng: float(step == 1 and rng.random() < 0.45),
        "moved": lambda step: 0.6 if step == 1 else 0.4,
        "truncated": lambda step: 0.9 * (step > 1),
        "malformed": lambda step: 0.9 * (step > 1),
    },
    "not_moving": {"moved": lambda step: 5e-11},
    "parted": {
        "reward": lambda step, rng: float(rng.random() < 0.2 + step / 32),
        "metrics": {"eval/avg@1": 0.25},
    },
    "reward_fell": {"reward": lambda step, rng: float(rng.random() < (0.7 if step < 14 else 0.1))},
    "one_component": {"components": lambda reward: {"correct": 0.0, "format": reward}},
}
"""Rule -> what is planted for it."""

HEALTHY = {
    "steady": {},
    "rising": {"reward": lambda step, rng: float(rng.random() < 0.1 + step / 30)},
    "noisy": {"reward": lambda step, rng: rng.gauss(0.3, 0.5)},
    "solved": {"reward": lambda step, rng: float(rng.random() < 0.6 + step / 80)},
    "evaluated": {
        "reward": lambda step, rng: float(rng.random() < 0.2 + step / 32),
        "metrics_of": lambda step: {"eval/avg@1": 0.2 + step / 40},
    },
}
"""Runs that differ and have nothing wrong with them."""


def at(step: int, share) -> float:
    return share(step) if callable(share) else share


def trajectory(step: int, group: int, member: int, rng: random.Random, fault: dict) -> Trajectory:
    reward = fault.get("reward", lambda step, rng: float(rng.random() < fault.get("best", 0.6)))(
        step, rng
    )
    length = fault.get("length", lambda step: 8)(step)
    row = TokenRow(
        messages=[
            {"role": "user", "content": f"What is {step} * {group}?"},
            {"role": "assistant", "content": f"<b>answer</b> {member} of step {step}"},
        ]
    )
    row.append_context([1, 2, 3], 0)
    logprobs = [-rng.expovariate(2) for _ in range(length)]
    row.append_sampled([10 + rng.randrange(80) for _ in logprobs], logprobs, [step - 1] * length, 0)
    cut = rng.random() < at(step, fault.get("truncated", 0))
    bad = rng.random() < at(step, fault.get("malformed", 0))
    env_id = rng.choice(fault.get("envs", ["math"]))
    status = "malformed" if bad else "text"
    made = Trajectory(
        trajectory_id=f"s{step}-g{group}-m{member}",
        group_id=f"s{step}-g{group}",
        env_id=env_id,
        task_id=f"train/{(step * GROUPS + group) % 50}",
        seed=step,
        branches=[row],
        turns=[Turn(0, 3, length, "length" if cut else "stop", status, reward, message=1)],
        reward=reward,
        reward_components=fault.get("components", lambda reward: {"correct": reward})(reward),
        stop_reason=StopReason.CONTEXT_LENGTH if cut else StopReason.TERMINATED,
        total_s=0.5,
    )
    if rng.random() < fault.get("failed", 0) and env_id == fault.get("fails", env_id):
        made.stop_reason = StopReason.ERROR
        made.error = TrajectoryError(
            "grade", fault.get("code", "grader_timeout"), "no answer in 60 s"
        )
    return made


def signals_of(groups: list[Group]) -> list[RowSignals]:
    rows = []
    for group in groups:
        rewards = [t.reward for t in group.trajectories if t.trainable]
        for t in group.trajectories:
            if not t.trainable:
                continue
            arrays = t.branches[0].arrays()
            trained = arrays["loss_mask"].astype(bool)
            advantage = (t.reward - np.mean(rewards)) / (np.std(rewards) + 1e-4)
            old = np.where(trained, arrays["rollout_logprobs"] + 0.001, np.nan).astype(np.float32)

            def fill(value, trained=trained):
                return np.where(trained, value, np.nan).astype(np.float32)

            rows.append(
                RowSignals(
                    *(t.trajectory_id, 0, trained, fill(advantage), old, old, fill(0.01)),
                    kept={"ratio": trained & (np.arange(len(trained)) % 7 != 0)},
                )
            )
    return rows


def plant(run_dir: Path, rule: str | None = None, *, steps: int = STEPS) -> Path:
    """A run with the fault that `rule` should find; without one, a healthy run."""
    fault = (FAULTS | HEALTHY)[rule] if rule else {}
    rng = random.Random(rule or "healthy")
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text(CONFIG.format(steps=steps))
    with (
        RunStatus(run_dir, num_steps=steps) as status,
        MetricsWriter(run_dir) as writer,
        SignalLog(run_dir) as signals,
    ):
        log = TrajectoryLog(run_dir)
        for step in range(1, steps + 1):
            groups = [
                Group(f"s{step}-g{group}", "t", [
                    trajectory(step, group, member, rng, fault) for member in range(MEMBERS)
                ])
                for group in range(GROUPS)
            ]  # fmt: skip
            played = [t for group in groups for t in group.trajectories]
            log.append(step, played)
            rows = signals_of(groups)
            signals.write(step, lambda rows=rows: rows)
            while not all(future.done() for future in signals._waiting):
                pass  # a run's steps take longer than its files
            advantages = np.concatenate([row.advantages[row.trained] for row in rows])
            entropy = fault.get("entropy", lambda step: 1.5 - step / 60)(step)
            writer.write(
                step,
                rollout_metrics(RolloutBatch(groups, played))
                | {
                    "loss/policy": rng.gauss(0, 0.01),
                    "policy/entropy": entropy,
                    "policy/rollout_train_logprob_diff_mean": 1e-3,
                    "policy/ess": 0.99,
                    "policy/clip_fraction_high": 0.01,
                    "policy/clip_fraction_low": 0.01,
                    "rollout/staleness_mean": 0.0,
                    "train/grad_norm": abs(rng.gauss(0.5, 0.1)),
                    "train/skipped_updates": 0,
                    "train/relative_update": at(step, fault.get("moved", rng.gauss(1e-3, 1e-4))),
                    "advantage/mean": float(advantages.mean(dtype=np.float64)),
                    "time/step_s": abs(rng.gauss(2, 0.3)),
                }
                | fault.get("metrics", {})
                | fault.get("metrics_of", lambda step: {})(step),
            )
            status.step = step
    return run_dir
