"""Metrics of a batch of rollouts, computed without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from agentrl.rollout.scheduler import RolloutBatch
from agentrl.types import Sample, Trajectory


def rollout_metrics(rollouts: RolloutBatch) -> dict[str, float]:
    """Computes the metrics of a step's rollouts over every dispatched trajectory."""
    trajectories = rollouts.trajectories
    scored = [t for t in trajectories if t.trainable]
    turns = [turn for t in trajectories for turn in t.turns]
    rewards = np.asarray([t.reward for t in scored], np.float64)
    metrics = {
        "reward/mean": float(rewards.mean()) if scored else float("nan"),
        "reward/std": float(rewards.std()) if scored else float("nan"),
        "rollout/trajectories": len(trajectories),
        "rollout/tokens": sum(t.num_sampled_tokens for t in trajectories),
        "rollout/turns": _mean([len(t.turns) for t in trajectories]),
        "rollout/tokens_per_trajectory": _mean([t.num_sampled_tokens for t in trajectories]),
        "rollout/truncated_fraction": _mean([t.truncated for t in trajectories]),
        "rollout/malformed_fraction": _mean([t.parse_status == "malformed" for t in turns]),
        "rollout/error_fraction": _mean([t.error is not None for t in trajectories]),
        "rollout/dropped_groups": sum(rollouts.dropped.values()),
        "rollout/restarted_episodes": rollouts.num_restarts,
    }
    for name in sorted({name for t in scored for name in t.reward_components}):
        values = [t.reward_components[name] for t in scored if name in t.reward_components]
        metrics[f"reward/{name}"] = _mean(values)
    for name in sorted({name for t in scored for name in t.metrics}):
        metrics[f"env/{name}"] = _mean([t.metrics.get(name, 0.0) for t in scored])
    if refused := sum(num_refused(t) for t in trajectories):
        metrics["rollout/refused_calls"] = refused
    for reason, count in sorted(rollouts.dropped.items()):
        metrics[f"group/dropped/{reason}"] = count
    for code, count in sorted(error_codes(trajectories).items()):
        metrics[f"error/{code}"] = count
    return metrics


def staleness_metrics(samples: Sequence[Sample], *, current_version: int) -> dict[str, float]:
    """Computes the mean, maximum and histogram of the tokens' staleness: how many steps older than
    the trained policy the policy was that sampled them."""
    versions = [sample.policy_versions[sample.loss_mask.astype(bool)] for sample in samples]
    if not versions:
        return {}
    staleness = current_version - np.concatenate(versions)
    metrics = {
        "rollout/staleness_mean": float(staleness.mean()),
        "rollout/staleness_max": int(staleness.max()),
    }
    for steps, count in enumerate(np.bincount(staleness.clip(0))):
        metrics[f"rollout/staleness_fraction/{steps}"] = float(count / len(staleness))
    return metrics


def num_refused(trajectory: Trajectory) -> int:
    """Returns the number of an agent's calls that its endpoint refused."""
    refused = trajectory.info.get("refused_calls")
    counts = refused.values() if isinstance(refused, dict) else ()
    return sum(count for count in counts if isinstance(count, int))


def error_codes(trajectories: Sequence[Trajectory]) -> Counter[str]:
    return Counter(t.error.code for t in trajectories if t.error is not None)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
