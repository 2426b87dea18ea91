"""Holds the networks of a run and trains them on a step's samples; every rank has one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.algo import Batch, KLController
from agentrl.config import RunConfig, with_change
from agentrl.errors import ConfigError, TrainingError
from agentrl.model import ranks, sharding
from agentrl.model.build import build
from agentrl.model.critic import Critic
from agentrl.model.load import resolve_device
from agentrl.rollout.scheduler import stable_seed
from agentrl.train.batch import all_kept_are_known, make_batch, require_components
from agentrl.train.memory import chooses_token_budget, fitting_token_budget, with_token_budget
from agentrl.train.optimizer import Learner
from agentrl.train.setup import seed_everything
from agentrl.train.signals import StepSignals
from agentrl.train.state import TrainState, capture_state
from agentrl.train.teacher import TeacherServer, make_teacher
from agentrl.train.update import UpdateOptions, update_policy
from agentrl.types import JSON, Sample


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The networks of a run. `make_trainer` loads them, then every step calls `learn`."""

    config: RunConfig
    run_dir: Path
    tokenizer: PreTrainedTokenizerBase
    learner: Learner[PreTrainedModel]
    critic: Learner[Critic] | None
    reference: PreTrainedModel | None
    teacher: PreTrainedModel | TeacherServer | None
    kl: KLController
    chose_token_budget: bool = False
    """The run file does not set `train.token_budget`. A resumed run then takes the saved one,
    because another budget would round differently."""
    reference_step: int = 0
    """The step after which the reference last took the policy's weights."""
    changes: dict[str, JSON] = field(default_factory=dict)
    """Keys changed by callbacks since the run began, and their current values."""

    @property
    def model(self) -> PreTrainedModel:
        """Returns the policy."""
        return self.learner.model

    @property
    def changing_reference(self) -> sharding.Frozen | None:
        """Returns the reference if it changes (`model.reference_every`), so that checkpoints must
        hold it; else None."""
        if self.reference is None or not self.config.model.reference_every:
            return None
        return sharding.Frozen(self.reference)

    def learn(
        self,
        step: int,
        samples: Sequence[Sample],
        states: Mapping[str, Sequence[int]] | None,
        greedy_rewards: Mapping[str, float] | None,
        on_progress: Callable[[int, int], None] | None = None,
        on_signals: Callable[[StepSignals], None] | None = None,
    ) -> dict[str, float]:
        """Trains on a step's samples and returns the metrics.

        Args:
            states, greedy_rewards: see `make_batch`.
            on_progress: see `UpdateOptions`.
            on_signals: called with the values computed for each token, if `track.signals` is set.

        Raises:
            TrainingError: too many updates in a row had a non-finite gradient.
        """
        config, objective = self.config, self.config.objective
        batch = make_batch(
            samples,
            current_version=step - 1,
            weighted=objective.reward.weights or (),
            states=states,
            greedy_rewards=greedy_rewards,
        )
        require_components(objective, batch)
        signals = StepSignals(batch) if config.track.signals else None
        options = UpdateOptions(
            objective=objective,
            config=config.train,
            temperature=config.rollout.temperature,
            seed=stable_seed(config.run.seed, step),
            reference=self.reference,
            teacher=self.teacher,
            critic=self.critic,
            policy_learns=self.critic is None or step > config.critic.warmup_steps,
            own_logprobs=config.rollout.is_truncated and not all_kept_are_known(samples),
            kl_coef=self.kl.coef,
            signals=signals,
            on_progress=on_progress,
        )
        try:
            metrics = update_policy(self.learner, samples, batch, options)
        except TrainingError:
            if ranks.rank() == 0:
                _save_failed_batch(self.run_dir, step, batch)
            raise
        if signals is not None and on_signals is not None:
            on_signals(signals)
        every, reference = config.model.reference_every, self.changing_reference
        # A step without samples does not come here, so an overdue change is made up for now.
        if reference and every and step // every > self.reference_step // every:
            reference.become(self.model)
            self.reference_step = step
        if greedy_rewards is not None:
            metrics["reward/greedy_mean"] = sum(greedy_rewards.values()) / len(greedy_rewards)
        if config.train.router_replay:
            metrics["train/unrouted"] = sum(each.routes is None for each in samples)
        if "policy/kl_ref" in metrics:
            metrics["policy/kl_coef"] = self.kl.coef
            num_trajectories = len({sample.trajectory_id for sample in samples})
            self.kl = self.kl.updated(metrics["policy/kl_ref"], num_trajectories)
        return metrics

    def change(self, key: str, value: JSON) -> None:
        """Changes a key of the configuration from now on.

        Raises:
            ConfigError: the key cannot change, or not to this value.
        """
        config = with_change(self.config, key, value)
        if config.objective.kl != self.config.objective.kl:
            self.kl = KLController.of(config.objective.kl)
        self.config, self.learner.config = config, config.train
        self.changes[key] = value

    def state(
        self, step: int, fingerprint: dict[str, JSON], position: dict[str, JSON]
    ) -> TrainState:
        """Returns the contents of a checkpoint after this step.

        Args:
            position: see `Run.data_position`.
        """
        extra: dict[str, JSON] = {
            "policy": self.learner.counters(),
            "critic": self.critic and self.critic.counters(),
            "kl": dict(self.kl.state_dict()),
        }
        if self.changes:
            extra["changes"] = self.changes
        if self.reference_step:
            extra["reference_step"] = self.reference_step
        if self.chose_token_budget:
            extra["token_budget"] = self.config.train.token_budget
        return capture_state(
            step=step,
            fingerprint=fingerprint,
            policy=self.learner,
            critic=self.critic,
            reference=self.changing_reference,
            data_position=position,
            extra=extra,
            tokenizer=self.tokenizer,
            copy_tensors=self.config.run.async_save,
        )

    def restore_counters(self, state: TrainState) -> None:
        """Restores everything but tensors, whose values `checkpoint.resume` has restored before."""
        saved: Any = state.extra
        if self.chose_token_budget and "token_budget" in saved:
            self.config = with_token_budget(self.config, saved["token_budget"])
            self.learner.config = self.config.train
        for key, value in saved.get("changes", {}).items():
            self.change(key, value)
        self.reference_step = saved.get("reference_step", 0)
        self.learner.restore_counters(saved["policy"])
        if self.critic is not None:
            self.critic.restore_counters(saved["critic"])
        self.kl = self.kl.loaded(saved["kl"])


async def make_trainer(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, run_dir: Path
) -> Trainer:
    """Loads every network of a run. Every rank calls it and gets its shard of each network.

    Raises:
        ConfigError: a model cannot be loaded or trained, or a teacher cannot be reached.
    """
    objective = config.objective
    seed_everything(config.run.seed)
    device_type = resolve_device(config.model.device).type
    chooses = chooses_token_budget(config, device_type)
    if chooses:
        config = with_token_budget(config, _fitting_token_budget(config, device_type))
    teacher = await make_teacher(config, tokenizer)
    updates_per_step = config.train.num_epochs * config.train.num_minibatches
    num_updates = config.run.num_steps * updates_per_step
    critic = None
    if objective.needs_critic:
        built = build(config.critic.path or config.model.path, "critic", config, tokenizer)
        critic = Learner(
            built.module,
            config.train.model_copy(update={"learning_rate": config.critic.learning_rate}),
            total_updates=num_updates,
            section="critic",
            weights=built.weights,
        )
        num_updates -= config.critic.warmup_steps * updates_per_step
    policy = build(config.model.path, "policy", config)
    reference = None
    if "ref_logprobs" in objective.needs():
        named = config.model.reference
        if config.model.lora.rank and not named:
            reference = policy.module  # `without_adapter` makes it the frozen base
        else:
            reference = build(named or config.model.path, "reference", config, tokenizer).module
            if config.model.reference_every:
                _require_same_shapes(reference, policy.module)
    learner = Learner(
        policy.module, config.train, total_updates=num_updates, weights=policy.weights
    )
    return Trainer(
        config=config,
        run_dir=run_dir,
        tokenizer=tokenizer,
        learner=learner,
        critic=critic,
        reference=reference,
        teacher=teacher,
        kl=KLController.of(objective.kl),
        chose_token_budget=chooses,
    )


def _require_same_shapes(reference: PreTrainedModel, model: PreTrainedModel) -> None:
    """Checks that the reference can take the policy's weights (`model.reference_every`)."""
    theirs, ours = ([each.shape for each in m.parameters()] for m in (reference, model))
    if theirs != ours:
        raise ConfigError(
            "model.reference_every: the reference cannot take the policy's weights, because the "
            "shapes differ; set model.reference to a model of the same shape, or leave "
            "model.reference_every out"
        )


def _fitting_token_budget(config: RunConfig, device_type: str) -> int:
    """Returns a token budget that fits the rank with the least free memory; the same on all."""
    free: list[Any] = ranks.gather(torch.cuda.mem_get_info()[0])
    budget: Any = None
    if ranks.rank() == 0:
        budget = fitting_token_budget(
            config, min(free), device_type=device_type, num_ranks=ranks.size()
        )
    return ranks.share(budget)  # pyright: ignore[reportReturnType]


def _save_failed_batch(run_dir: Path, step: int, batch: Batch) -> None:
    """Writes the batch whose gradients were not finite to `failed_batch.safetensors`, with its step
    in `failed_batch.json`, for inspection."""
    tensors = {
        name: value.contiguous()
        for name in ("loss_mask", "rewards", "group_ids", "rollout_logprobs", "advantages")
        if (value := getattr(batch, name)) is not None
    }
    save_file(tensors, run_dir / "failed_batch.safetensors")
    (run_dir / "failed_batch.json").write_text(json.dumps({"step": step}) + "\n")
