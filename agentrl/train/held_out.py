"""Evaluations during a run, which decide its best checkpoint and may end it early.

The best step is derived from the lines of metrics.jsonl alone, so a resumed run finds it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.env.client import EnvClient
from agentrl.evaluate.measure import evaluate, evaluation_metrics
from agentrl.evaluate.red_team import play_cheaters, red_team_metrics
from agentrl.inference.base import SamplingParams
from agentrl.rollout.agent.runner import Agents
from agentrl.rollout.mixture import Mixture
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.setup import split_size
from agentrl.train.checkpoint import BEST_NAME, point_best_to
from agentrl.train.sampling import evaluation_sampling

logger = logging.getLogger(__name__)

SHORTEST = 10
"""Fewest steps between evaluations that the run file did not ask for; a run has at most ten."""


async def default_interval(config: RunConfig, envs: Mapping[str, EnvClient], *, quiet: bool) -> int:
    """Returns the steps between evaluations if `run.eval_every` is not set; 0 for none.

    Raises:
        ConfigError: the run file asks for an evaluation on a split that the environment lacks.
    """
    run, split = config.run, config.eval.split
    asked = run.eval_every or run.keep_best or config.eval.sets
    if asked and run.eval_every != 0:
        for part, each in config.evaluations().values():
            await split_size(envs[part], each, each.eval.split)
    if run.eval_every is not None:
        return 0
    if not asked:
        for name, alone in config.environments.items():
            splits = (await envs[name].info(alone.env.id, alone.env.config)).splits
            if split == alone.env.split or splits.get(split, 0) == 0 or run.num_steps < SHORTEST:
                return 0
    interval = max(min(SHORTEST, run.num_steps), run.num_steps // 10)
    if not quiet:
        print(
            f"evaluates {config.eval.num_tasks} tasks of split {split!r} every {interval} steps; "
            "--run.eval_every 0 turns it off"
            if not config.eval.sets
            else f"evaluates {', '.join(config.eval.sets)} every {interval} steps"
        )
    return interval


class HeldOut:
    """Plays the evaluations of a run and remembers the best one so far."""

    def __init__(self, config: RunConfig, default_interval: int) -> None:
        """
        Raises:
            ConfigError: the model's generation_config.json cannot be used.
        """
        self.sets = config.evaluations()
        both = {
            name: evaluation_sampling(each, each.model.path)
            for name, (_, each) in self.sets.items()
        }
        self.sampling = {name: sampling for name, (sampling, _) in both.items()}
        is_on = bool(default_interval or config.run.eval_every)
        self.notes = list(dict.fromkeys(note for _, note in both.values() if note and is_on))
        """Lines about settings taken from the model's generation_config.json."""
        self.best_step: int | None = None
        self.best: float | None = None
        self._default_interval = default_interval
        self._key, self._patience = config.run.keep_best, config.run.patience
        self._num_since = 0
        self._cheaters_due = config.eval.red_team

    def is_due(self, step: int, config: RunConfig) -> bool:
        """Tells whether a step ends with evaluations.

        Args:
            config: the current one; a callback may have changed `run.eval_every`.
        """
        given = config.run.eval_every
        every = self._default_interval if given is None else given
        return bool(every) and step % every == 0

    def record(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Records a step's metrics; returns whether `run.keep_best` is at its best so far."""
        value = metrics.get(self._key) if self._key else None
        if value is None:
            return False
        if self.best is None or value > self.best:
            self.best, self.best_step, self._num_since = value, step, 0
            return True
        self._num_since += 1
        return False

    def reason_to_stop(self) -> str | None:
        """Returns why the run ends before its last step; None if it continues."""
        if not self._patience or self._num_since < self._patience:
            return None
        return (
            f"{self._key} did not rise above {self.best:.3f}, that of step {self.best_step}, in "
            f"{self._num_since} evaluations (run.patience)"
        )

    def restore(self, rows: Iterable[Mapping[str, Any]], last_step: int, run_dir: Path) -> None:
        """Records the earlier steps of a run that resumes after `last_step`, and points
        `checkpoints/best` to the best of them.

        Args:
            rows: lines of metrics.jsonl.
        """
        for row in rows:
            if row["step"] <= last_step:
                self.record(row["step"], row)
        if self.best_step is None:
            return
        root = run_dir / "checkpoints"
        target = root / f"step_{self.best_step:06d}"
        if target.is_dir():
            point_best_to(target)
            return
        logger.warning(
            "%s was best at step %d, whose checkpoint is gone; the next evaluation counts as best",
            self._key,
            self.best_step,
        )
        (root / BEST_NAME).unlink(missing_ok=True)
        self.best = self.best_step = None
        self._num_since = 0

    async def play(
        self,
        step: int,
        mixture: Mixture,
        policy: Callable[[SamplingParams], TokenPolicy],
        agents: Agents | None,
        on_progress: Callable[[int, int], None],
    ) -> dict[str, float]:
        """Plays every evaluation set with the current policy; returns the metrics of all."""
        metrics = {}
        parts = {part.name: part.scheduler for part in mixture.parts}
        for name, (part, config) in self.sets.items():
            rollouts = await evaluate(
                config,
                policy(self.sampling[name]),
                parts[part].env,
                capacity=parts[part].capacity,
                agents=agents,
                id_prefix=f"eval{step:06d}-{name and name + '-'}",
                on_progress=on_progress,
            )
            metrics |= evaluation_metrics(rollouts, config, name)
            if self._cheaters_due:
                paid = await play_cheaters(config, parts[part].env, capacity=parts[part].capacity)
                metrics |= red_team_metrics(paid, name)
        self._cheaters_due = False
        return metrics
