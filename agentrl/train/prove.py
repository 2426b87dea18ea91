"""`agentrl import --prove`: one recorded batch through another trainer's own code and through ours.

    record   a small model, completions of every kind, rewards
    theirs   advantages, loss and gradients by TRL's `GRPOTrainer` with the script's settings
    ours     the same by the trainer here, with the objective that was imported

Both start from the same weights and, after the advantages, move them by the same noise, so that
ratios differ from 1 and are clipped, and a reference model differs from the policy.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.algo import merge_metrics, reduce_metrics
from agentrl.errors import ConfigError
from agentrl.model.load import load_model
from agentrl.train.batch import make_batch
from agentrl.train.optimizer import Learner, Update
from agentrl.train.update import UpdateOptions, evaluate, learn, plan
from agentrl.types import Sample

if TYPE_CHECKING:
    from agentrl.config import RunConfig

TOLERANCE = 1e-6
"""Largest difference of a certificate, relative to values above 1: the rounding of float32."""
NUM_GROUPS = 4
_OF_THE_LOSS = (
    "num_generations", "max_completion_length", "temperature", "beta", "use_bias_correction_kl",
    "epsilon", "epsilon_high", "delta", "loss_type", "sapo_temperature_pos",
    "sapo_temperature_neg", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg",
    "importance_sampling_level", "scale_rewards", "mask_truncated_completions", "entropy_coef",
    "top_entropy_quantile", "off_policy_mask_threshold", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)  # fmt: skip
"""Settings of TRL's that its loss depends on, given one total reward per completion."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The numbers of one trainer."""

    advantages: Tensor
    """(B,) of the completions that are trained."""
    loss: float
    gradients: dict[str, Tensor]
    """By the name of the parameter."""

    @property
    def gradient_norm(self) -> float:
        """The norm over all parameters."""
        return float(torch.stack([g.double().norm() for g in self.gradients.values()]).norm())


@dataclass(frozen=True, slots=True)
class Certificate:
    """The numbers of both trainers, side by side."""

    peer: str
    """Name and version of the other trainer."""
    theirs: Computed
    ours: Computed

    @property
    def differences(self) -> dict[str, float]:
        """The largest difference of each number, relative where the number is above 1."""
        theirs, ours = self.theirs, self.ours
        gradients = (_apart(theirs.gradients[n], g) for n, g in ours.gradients.items())
        return {
            "advantages": _apart(theirs.advantages, ours.advantages),
            "loss": _apart(theirs.loss, ours.loss),
            "gradient norm": _apart(theirs.gradient_norm, ours.gradient_norm),
            "gradient, each weight": max(gradients),
        }

    @property
    def holds(self) -> bool:
        """True if nothing differs by more than `TOLERANCE`."""
        return max(self.differences.values()) <= TOLERANCE

    def __str__(self) -> str:
        rows = len(self.theirs.advantages)
        lines = [f"{'':<22}{self.peer:>16}{'agentrl':>16}{'difference':>14}"]
        shown = {
            "advantages": (f"{rows} rows", f"{rows} rows"),
            "loss": (f"{self.theirs.loss:.8f}", f"{self.ours.loss:.8f}"),
            "gradient norm": (f"{self.theirs.gradient_norm:.8f}", f"{self.ours.gradient_norm:.8f}"),
        }
        for name, difference in self.differences.items():
            theirs, ours = shown.get(name, ("", ""))
            lines.append(f"{name:<22}{theirs:>16}{ours:>16}{difference:>14.1e}")
        largest = max(self.differences.values())
        verdict = "the same" if self.holds else "NOT the same: see what the run file does not take"
        lines.append(f"largest difference {largest:.1e}, allowed {TOLERANCE:.0e}: {verdict}")
        return "\n".join(lines)


def _apart(one: Tensor | float, other: Tensor | float) -> float:
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return float(((one - other).abs() / one.abs().clamp(min=1)).max())


def prove(name: str, given: Mapping[str, Any], config: RunConfig, shape: Path) -> Certificate:
    """Computes one update by another trainer's own code and by ours.

    Args:
        name: a name of `peers()`; only `trl` has a trainer that computes on a CPU.
        given: the settings of its file.
        config: the imported run.
        shape: directory of a small model, whose configuration and tokenizer are used.

    Raises:
        ConfigError: there is no certificate for this trainer, or its package is not installed.
    """
    if name != "trl":
        raise ConfigError(
            f"--prove: there is no certificate for {name}, whose loss cannot be computed without "
            "its cluster; tests/algo compares the formulas here with numbers that its functions "
            "gave"
        )
    try:
        peer = f"TRL {importlib.metadata.version('trl')}"
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError("--prove needs TRL beside agentrl: pip install trl") from error
    size = given.get("num_generations", 8)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        _make_model(shape, folder)
        samples = _record(folder, size if isinstance(size, int) else 8)
        served = given.get("use_vllm") is True
        if served:  # only a sampler of its own differs from the trainer
            _report_logprobs(folder, samples, config)
        try:
            theirs = _theirs(folder, samples, given, served=served)
        except ValueError as error:
            raise ConfigError(f"--prove: {peer} refuses the settings: {error}") from error
        ours = _ours(folder, samples, config, served=served)
    return Certificate(peer, theirs, ours)


# the recorded batch ---------------------------------------------------------------------------


def _make_model(shape: Path, folder: str) -> None:
    """Saves a model whose random weights give probabilities that are far from uniform."""
    config = AutoConfig.from_pretrained(shape, initializer_range=0.06, dtype=torch.float32)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shape).save_pretrained(folder)


def _record(folder: str, group_size: int) -> list[Sample]:
    """Returns completions of several lengths, with tool results inside and cut at a limit, and
    rewards that differ within a group or are all equal."""
    config, rng = AutoConfig.from_pretrained(folder), np.random.default_rng(0)
    samples = []
    for group in range(NUM_GROUPS):
        prompt = rng.integers(3, config.vocab_size, rng.integers(3, 12))
        for member in range(group_size):
            completion = rng.integers(3, config.vocab_size, rng.integers(4, 24))
            cut = bool(rng.random() < 0.2)
            if not cut:
                completion[-1] = config.eos_token_id
            trained = np.ones(len(completion), np.uint8)
            if member % 3 == 2:
                trained[1:3] = 0  # a tool's result
            reward = float(rng.choice([0.0, 0.25, 1.0])) if group else 1.0
            mask = np.concatenate([np.zeros(len(prompt), np.uint8), trained])
            turns = np.cumsum(np.diff(mask, prepend=0) == 1) - 1
            samples.append(
                Sample(
                    token_ids=np.concatenate([prompt, completion]).astype(np.int32),
                    loss_mask=mask,
                    rollout_logprobs=np.zeros(len(mask), np.float32),
                    policy_versions=np.where(mask, 0, -1).astype(np.int32),
                    turn_ids=np.maximum(turns, 0).astype(np.int32),
                    trajectory_id=f"{group}/{member}",
                    group_id=str(group),
                    reward=reward,
                    turn_rewards=np.zeros(turns.max() + 1, np.float32),
                    truncated=cut,
                )
            )
            samples[-1].turn_rewards[-1] = reward
    return samples


def _report_logprobs(folder: str, samples: Sequence[Sample], config: RunConfig) -> None:
    """Gives every token the log-prob that a sampler with rounding errors would report."""
    model = load_model(folder, dtype=torch.float32, device="cpu")
    batch = make_batch(samples, current_version=0)
    evaluate(model, samples, batch, _options(config, model, own_logprobs=True))
    assert batch.old_logprobs is not None
    rng = np.random.default_rng(1)
    for sample, logprobs in zip(samples, batch.old_logprobs.numpy(), strict=True):
        off = rng.normal(0, 0.3, sample.num_trained)
        trained = np.flatnonzero(sample.loss_mask)
        sample.rollout_logprobs[trained] = logprobs[: len(trained)] + off


@torch.no_grad()
def _move(model: nn.Module) -> None:
    """Adds the same noise to the weights of any copy of the model."""
    noise = torch.Generator().manual_seed(2)
    for _, parameter in sorted(model.named_parameters()):
        parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.01)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# both trainers --------------------------------------------------------------------------------


def _theirs(
    folder: str, samples: Sequence[Sample], given: Mapping[str, Any], *, served: bool
) -> Computed:
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore
    from trl.trainer.utils import split_tensor_dict  # pyright: ignore

    starts = [int(sample.loss_mask.argmax()) for sample in samples]
    cut = list(zip(samples, starts, strict=True))

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        return {
            "prompt_ids": [sample.token_ids[:start].tolist() for sample, start in cut],
            "completion_ids": [sample.token_ids[start:].tolist() for sample, start in cut],
            "env_mask": [sample.loss_mask[start:].tolist() for sample, start in cut],
            "logprobs": [sample.rollout_logprobs[start:].tolist() for sample, start in cut],
            "recorded": [sample.reward for sample in samples],
        }

    def recorded_reward(completions: Any, recorded: list[float], **_: Any) -> list[float]:
        return recorded

    own = given.get("per_device_train_batch_size", 8)
    per_device = own if isinstance(own, int) and len(samples) % own == 0 else len(samples)
    rows = [{"prompt": "recorded"} for _ in samples]  # TRL adds to each
    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=len(samples) // per_device,
            num_iterations=2,  # log-probs before the update are then computed
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            use_cpu=True,
            bf16=False,
            report_to="none",
            **{key: value for key, value in given.items() if key in _OF_THE_LOSS},
        )
        trainer = GRPOTrainer(
            model=folder,
            args=args,
            train_dataset=Dataset.from_list(rows),
            rollout_func=rollout,
            reward_funcs=recorded_reward,
        )
        # Generation is recorded, so no server is needed: only the correction for one is.
        trainer.use_vllm, trainer._last_loaded_step = served, trainer.state.global_step
        parts = trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        trainer.model.train()
        inputs = trainer._generate_and_score_completions(rows)
        _move(trainer.model)
        loss = 0.0
        for part in split_tensor_dict(inputs, parts):
            share = trainer._compute_loss(trainer.model, part)
            share.backward()
            loss += share.item()
    kept = inputs["completion_mask"].any(1)
    return Computed(inputs["advantages"][kept], loss, _gradients(trainer.model))


class _Still(Learner[PreTrainedModel]):
    """Leaves weights and gradients as they are after a backward pass."""

    def step(self) -> Update:
        return Update(applied=False, grad_norm=0.0, learning_rate=0.0)


def _options(config: RunConfig, reference: PreTrainedModel, **more: Any) -> UpdateOptions:
    train = config.train.model_copy(update={"num_epochs": 1, "num_minibatches": 1})
    return UpdateOptions(
        objective=config.objective,
        config=train,
        temperature=config.rollout.temperature,
        seed=0,
        reference=reference,
        **more,
    )


def _ours(folder: str, samples: Sequence[Sample], config: RunConfig, *, served: bool) -> Computed:
    model, reference = (load_model(folder, dtype=torch.float32, device="cpu") for _ in range(2))
    options = _options(config, reference, own_logprobs=not served)
    several = options.config.model_copy(update={"num_epochs": 2})  # the first of several updates
    batch = make_batch(samples, current_version=0)
    evaluate(model, samples, batch, dataclasses.replace(options, config=several))
    _move(model)
    learner = _Still(model, options.config, total_updates=1)
    learned = learn(learner, samples, batch, plan(model, samples, batch, options), options)
    metrics = reduce_metrics([merge_metrics(learned.metrics)])
    loss = sum(value for name, value in metrics.items() if name.startswith("loss/"))
    assert batch.advantages is not None and batch.truncated is not None
    kept = torch.ones(len(samples), dtype=torch.bool)
    if config.objective.reward.truncated == "mask":
        kept = ~batch.truncated
    return Computed(batch.advantages[kept, 0], loss, _gradients(model))
