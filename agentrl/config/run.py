"""`RunConfig`: all sections, with the checks that involve several of them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from agentrl.algo import Objective
from agentrl.algo.objective import deep_merge
from agentrl.algo.presets import PRESET_DATA, stages_of
from agentrl.config.sections import (
    DECISIVE,
    AgentSection,
    CriticSection,
    EnvSection,
    EvalSection,
    InferenceSection,
    MixedEnvSection,
    ModelSection,
    RewardSection,
    RolloutSection,
    RunSection,
    Section,
    TeacherSection,
    TrackSection,
    TrainSection,
    decisive,
    require_sampler,
)
from agentrl.config.toml_text import toml_text
from agentrl.errors import ConfigError

_LIMITS = {
    "max_turns",
    "max_turn_tokens",
    "turn_timeout_s",
    "step_timeout_s",
    "episode_timeout_s",
    "sampler",
    "sampler_stages",
}


def weight_at(weight: float | list[tuple[int, float]], step: int) -> float:
    """Returns an environment's weight at a step.

    Args:
        weight: a constant, or `(step, weight)` pairs to interpolate linearly; constant before the
            first and after the last.
    """
    if not isinstance(weight, list):
        return weight
    later = next((i for i, (at, _) in enumerate(weight) if at >= step), len(weight) - 1)
    (start, low), (end, high) = weight[max(later - 1, 0)], weight[later]
    if not start < step < end:
        return low if step <= start else high
    return low + (high - low) * (step - start) / (end - start)


class RunConfig(Section):
    """The configuration of a run. `model.path` is the only key that a run needs."""

    run: RunSection = Field(default_factory=RunSection)
    """`[run]`: name, directory, seed, number of steps, saving and resuming."""
    model: ModelSection = Field(default_factory=ModelSection)
    """`[model]`: the model to train."""
    env: EnvSection = Field(default_factory=lambda: EnvSection.model_validate({}))
    """`[env]`: the environment to train in."""
    envs: list[MixedEnvSection] = Field(default_factory=list)
    """`[[env]]`: several environments in one run; `env` is then the first of them, and
    `environments` has a configuration for each."""
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    """`[rollout]`: the number of episodes per step, and their limits."""
    agent: AgentSection = Field(default_factory=AgentSection)
    """`[agent]`: your own program that plays the episodes instead of the built-in loop."""
    inference: InferenceSection = Field(default_factory=lambda: InferenceSection.model_validate({}))
    """`[inference]`: the engine that samples."""
    reward: Annotated[RewardSection, DECISIVE] = Field(default_factory=RewardSection)
    """`[reward]`: functions besides the environment's own reward."""
    objective: Annotated[Objective, DECISIVE] = Field(
        default_factory=lambda: Objective.model_validate({})
    )
    """The objective's stages; `preset` names a starting point, other keys override it."""
    train: TrainSection = Field(default_factory=TrainSection)
    """`[train]`: optimizer, batches, memory."""
    critic: CriticSection = Field(default_factory=CriticSection)
    """`[critic]`: the value model, if the objective needs one."""
    teacher: TeacherSection = Field(default_factory=lambda: TeacherSection.model_validate({}))
    """`[teacher]`: the model to distil from."""
    eval: EvalSection = Field(default_factory=EvalSection)
    """`[eval]`: the tasks on which the policy is evaluated."""
    track: TrackSection = Field(default_factory=TrackSection)
    """`[track]`: metrics and logs."""

    @model_validator(mode="before")
    @classmethod
    def _read_several_environments(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if "envs" in data:
            raise ValueError("unknown section [envs]; several environments are written as [[env]]")
        tables = data.get("env")
        if not isinstance(tables, list):
            return data
        if not tables or not all(isinstance(table, dict) for table in tables):
            raise ValueError("env has to be a table, [env], or a list of tables, [[env]]")
        first = {key: table for key, table in tables[0].items() if key in EnvSection.model_fields}
        return {**data, "env": first, "envs": tables}

    @model_serializer(mode="wrap")
    def _write_several_environments(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data = handler(self)
        tables = data.pop("envs", None)
        return {**data, "env": tables} if tables else data

    @property
    def environments(self) -> dict[str, RunConfig]:
        """Environment name -> configuration of a run with this environment alone.

        With a single environment, `{"": self}`.
        """
        return {each.name: self._alone(each) for each in self.envs} or {"": self}

    def decisive(self) -> dict[str, JsonValue]:
        """Returns the values that a resumed run must have in common with the one that was saved;
        of several environments those of each, by name."""
        found = decisive(self)
        if self.envs:
            found["env"] = {each.name: decisive(each) for each in self.envs}
        return found

    def _alone(self, env: MixedEnvSection) -> RunConfig:
        given = env.model_dump(include=_LIMITS, exclude_none=True)
        return self.model_copy(
            update={
                "env": EnvSection(**env.model_dump(include=set(EnvSection.model_fields))),
                "envs": [],
                "rollout": self.rollout.model_copy(update=given),
                "reward": env.reward or self.reward,
            }
        )

    @model_validator(mode="after")
    def _check_model(self) -> RunConfig:
        if not self.model.path and self.inference.backend != "openai":
            raise ValueError("model.path: missing; this key has no default")
        return self

    @model_validator(mode="after")
    def _check_split_layers(self) -> RunConfig:
        """Refuses what does not work where ranks compute with parts of a layer's weights."""
        parallel, train = self.train.parallel, self.train
        if not parallel.splits_layers:
            return self
        refused = {
            "model.lora": self.model.lora.rank > 0,
            "model.quantization": self.model.quantization is not None,
            "model.compile": self.model.compile,
            "model.freeze_tower = false": not self.model.freeze_tower,
            f"train.optimizer = {train.optimizer!r}": train.optimizer != "adamw",
            "train.router_replay": train.router_replay,
            "train.router_aux_loss": train.router_aux_loss > 0,
            "a critic (the objective's baseline)": self.objective.needs_critic,
        }
        if named := [name for name, wanted in refused.items() if wanted]:
            raise ValueError(
                f"train.parallel.tensor = {parallel.tensor} and expert = {parallel.expert} do not "
                f"work with {', '.join(named)}; leave it out, or divide with data and context only"
            )
        return self

    @model_validator(mode="after")
    def _check_environments(self) -> RunConfig:
        names = [each.name for each in self.envs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two [[env]] tables are named {twice[0]!r}; give each its own name")
        for name, config in self.environments.items():
            if self.envs and config.rollout.max_context_tokens < config.rollout.max_turn_tokens:
                raise ValueError(
                    f"[[env]] {name}: max_turn_tokens = {config.rollout.max_turn_tokens} exceeds "
                    f"rollout.max_context_tokens = {config.rollout.max_context_tokens}"
                )
            try:
                require_sampler(config.rollout.sampler, config.rollout.sampler_stages)
            except ValueError as error:
                raise ValueError(f"[[env]] {name}: {error}") from error
        of_tasks = [config.rollout for config in self.environments.values()]
        has_pools = any(each.sampler not in ("uniform", "difficulty") for each in of_tasks)
        if any(each.sampler_stages for each in of_tasks) and not has_pools:
            raise ValueError(
                "sampler_stages is set, but no sampler uses it; set rollout.sampler = 'staged', or "
                "leave it out"
            )
        weights = [each.weight for each in self.envs]
        corners = {step for w in weights if isinstance(w, list) for step, _ in w}
        for step in sorted({1, self.run.num_steps, *corners}) if weights else ():
            if not sum(weight_at(weight, step) for weight in weights):
                raise ValueError(f"at step {step} the weights of all [[env]] are 0; raise one")
        return self

    @model_validator(mode="before")
    @classmethod
    def _merge_preset_of_run(cls, data: object) -> object:
        objective = data.get("objective") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(objective, dict):
            return data
        preset = PRESET_DATA.get(str(objective.get("preset")))
        return deep_merge(preset.run, data) if preset is not None and preset.run else data

    @model_validator(mode="before")
    @classmethod
    def _set_constant_of_aggregate(cls, data: object) -> object:
        """Sets `max_tokens` of `aggregate.kind = "constant"` to the longest possible trajectory.

        Only if the run file does not set it: a preset's number is that of its paper's runs.
        """
        objective = data.get("objective") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(objective, dict):
            return data
        own = objective.get("aggregate", {})
        preset = stages_of(str(objective.get("preset")))
        if not isinstance(own, dict) or "max_tokens" in own:
            return data
        if (preset.get("aggregate", {}) | own).get("kind") != "constant":
            return data
        try:
            rollout = RolloutSection.model_validate(data.get("rollout", {}))
            envs = [MixedEnvSection.model_validate(env) for env in data.get("envs", [])]
        except ValidationError:
            return data  # the validation after this one reports the problem
        sampled = [
            (env.max_turns or rollout.max_turns) * (env.max_turn_tokens or rollout.max_turn_tokens)
            for env in envs
        ]
        longest = max(sampled, default=rollout.max_turns * rollout.max_turn_tokens)
        longest = min(longest, rollout.max_context_tokens)
        return {**data, "objective": {**objective, "aggregate": {**own, "max_tokens": longest}}}

    @model_validator(mode="before")
    @classmethod
    def _add_correction(cls, data: object) -> object:
        """Adds a correction if the policy that sampled differs from the one that is trained.

        It does with `max_staleness` above 0, and with servers that round their weights. Without a
        correction a run collapses. So, if neither run file nor preset chooses one, ratios are taken
        to the policy that sampled, as in PPO. An objective without a ratio gets the truncated
        importance weight of TIS instead. So does rounding, as otherwise it would exhaust the clip
        range.
        """
        if not isinstance(data, dict):
            return data
        rollout, inference = data.get("rollout"), data.get("inference")
        is_stale = isinstance(rollout, dict) and rollout.get("max_staleness")
        is_rounded = isinstance(inference, dict) and inference.get("quantization")
        own = data.get("objective", {})
        if not (is_stale or is_rounded) or not isinstance(own, dict):
            return data
        preset = stages_of(str(own.get("preset", "grpo")))
        stages = {}
        for stage in ("ratio", "off_policy", "surrogate"):
            if not isinstance(own.get(stage, {}), dict):
                return data
            stages[stage] = preset.get(stage, {}) | own.get(stage, {})
        if "anchor" in stages["ratio"] or stages["off_policy"]:
            return data
        has_no_ratio = stages["surrogate"].get("kind") in ("logprob", "none") and "loss" not in own
        if is_rounded or has_no_ratio:
            correction = {"off_policy": {"level": "token", "high": 2.0}}
        else:
            correction = {"ratio": {**own.get("ratio", {}), "anchor": "rollout"}}
        return {**data, "objective": {**own, **correction}}

    @model_validator(mode="after")
    def _check_user_functions(self) -> RunConfig:
        """Tries out the user's loss and advantage functions before anything is started."""
        if not self.objective.user_functions:
            return self
        # These import torch, which a configuration without user functions does not need.
        from agentrl.algo.split_check import check_user_functions
        from agentrl.algo.user_functions import inputs_of

        loss, corrected = self.objective.loss, self.objective.off_policy.is_on
        try:
            check_user_functions(self.objective)
            if loss is not None and not corrected:
                asked = inputs_of("objective.loss", loss)
                corrected = not {"ratio", "rollout_logprobs"}.isdisjoint(asked)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.rollout.max_staleness and loss is not None and not corrected:
            raise ValueError(
                f"objective.loss = {loss!r} takes neither 'ratio' nor 'rollout_logprobs', so "
                "nothing corrects for samples of an older policy; use the ratio, or set "
                "objective.off_policy.level = 'token' or rollout.max_staleness = 0"
            )
        return self

    @property
    def plays_by_agent(self) -> bool:
        """True if an agent or `rollout.generate` plays the episodes, not the built-in loop."""
        return self.agent.is_on or self.rollout.generate is not None

    @model_validator(mode="after")
    def _check_router_replay(self) -> RunConfig:
        if self.train.router_replay and self.model.compile:
            raise ValueError(
                "train.router_replay hooks into the routers, which model.compile compiles away; "
                "set model.compile = false, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_reference(self) -> RunConfig:
        for key in ("reference", "reference_every"):
            if getattr(self.model, key) and "ref_logprobs" not in self.objective.needs():
                raise ValueError(
                    f"model.{key} is set, but the objective uses no reference policy; set "
                    "objective.kl.where = 'loss' with a coef, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> RunConfig:
        if self.rollout.group_size == 1 and self.objective.needs_groups:
            raise ValueError(
                "rollout.group_size = 1 gives a group baseline nothing to compare with, so every "
                "advantage would be 0; set rollout.group_size to 2 or more (8 is usual), or choose "
                "an objective without a group baseline"
            )
        if self.inference.share == "sleep" and self.rollout.max_staleness:
            raise ValueError(
                "inference.share = 'sleep' puts servers to sleep while the trainer learns, but "
                "rollout.max_staleness above 0 samples meanwhile; set one of them to its default"
            )
        if self.inference.backend == "embedded":
            for key in ("max_staleness", "oversample_groups", "stragglers"):
                if getattr(self.rollout, key):
                    raise ValueError(
                        f"rollout.{key} needs inference.backend = 'vllm' or 'sglang': the "
                        "embedded engine samples in lockstep from the weights that are "
                        "being trained"
                    )
        if self.agent.is_on and self.rollout.generate is not None:
            raise ValueError("both [agent] and rollout.generate play the episodes; remove one")
        if self.plays_by_agent and self.inference.backend == "openai":
            raise ValueError(
                "training with an agent needs token ids, which a chat server does not return; set "
                "inference.backend to 'embedded', 'vllm' or 'sglang'"
            )
        if self.inference.quantization and self.model.dtype != "bfloat16":
            raise ValueError(
                "inference.quantization = 'fp8' rounds bfloat16 weights; set model.dtype = "
                "'bfloat16', or leave it out"
            )
        if self.inference.quantization and self.model.lora.rank:
            raise ValueError(
                "inference.quantization = 'fp8' is for trained weights, but with model.lora they "
                "are frozen; leave it out (model.quantization keeps frozen weights in 4 bits)"
            )
        if self.inference.backend == "sglang":
            if self.model.lora.rank:
                raise ValueError(
                    "model.lora trains an adapter, which cannot be sent to SGLang servers; set "
                    "inference.backend = 'vllm' or 'embedded'"
                )
            if self.rollout.on_update == "wait":
                raise ValueError(
                    "rollout.on_update = 'wait' does not work with SGLang servers, which may fail "
                    "to empty their cache right after the last request; set 'keep' or 'abort'"
                )
        elif self.inference.transfer == "tensor":
            raise ValueError("inference.transfer = 'tensor' needs inference.backend = 'sglang'")
        if self.inference.transfer == "nccl":
            if not self.inference.has_servers:
                raise ValueError(
                    "inference.transfer = 'nccl' needs inference.backend = 'vllm' or 'sglang'"
                )
            if self.model.lora.rank:
                raise ValueError(
                    "inference.transfer = 'nccl' sends full weights, but model.lora trains an "
                    "adapter; set inference.transfer = 'file'"
                )
        if self.rollout.max_staleness and "baselines" in self.objective.needs():
            raise ValueError(
                "this objective compares with greedy answers of the same policy, which "
                "asynchronous rollouts do not have; set rollout.max_staleness = 0"
            )
        if self.train.num_minibatches > self.rollout.groups_per_step:
            raise ValueError(
                f"train.num_minibatches = {self.train.num_minibatches} exceeds "
                f"rollout.groups_per_step = {self.rollout.groups_per_step}"
            )
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> RunConfig:
        given = [key for key in ("path", "url") if getattr(self.teacher, key) is not None]
        if "teacher_logprobs" not in self.objective.needs():
            if given:
                raise ValueError(
                    f"teacher.{given[0]} is set, but the objective does not use a teacher; set "
                    "objective.preset = 'opd' or objective.distill.where, or remove it"
                )
        elif len(given) != 1:
            raise ValueError(
                "objective.distill needs a teacher: set teacher.path to a model with the policy's "
                "tokenizer, or teacher.url to a server with such a model"
                + (", not both" if given else "")
            )
        elif self.teacher.url is not None and self.rollout.temperature != 1:
            raise ValueError(
                "a teacher server returns log-probabilities at temperature 1, but "
                f"rollout.temperature = {self.rollout.temperature:g}; set it to 1, or load the "
                "teacher with teacher.path"
            )
        return self

    @model_validator(mode="after")
    def _check_teacher_of_truncated_policy(self) -> RunConfig:
        if self.rollout.is_truncated and self.teacher.url is not None:
            raise ValueError(
                "a server at teacher.url returns log-probabilities of the full distribution, but "
                "with rollout.top_p, top_k or min_p a truncated one is trained; set teacher.path, "
                "or leave these keys at their defaults"
            )
        return self

    @model_validator(mode="after")
    def _check_replay(self) -> RunConfig:
        if self.run.replay is None:
            return self
        if "baselines" in self.objective.needs():
            raise ValueError(
                "run.replay: this objective compares with greedy answers, which runs do not record"
            )
        if self.rollout.is_truncated:
            raise ValueError(
                "run.replay: with rollout.top_p, top_k or min_p a truncated distribution is "
                "trained, but runs do not record which ids were kept"
            )
        if self.train.router_replay:
            raise ValueError(
                "run.replay: runs do not record the routes that train.router_replay needs; leave "
                "it out"
            )
        if self.run.eval_every or self.run.keep_best:
            raise ValueError(
                "run.replay plays no episodes, so it cannot evaluate; leave out run.eval_every and "
                "run.keep_best, and use agentrl eval --checkpoint afterwards"
            )
        return self

    @model_validator(mode="after")
    def _check_replay_share(self) -> RunConfig:
        if not self.rollout.replay_share:
            return self
        if self.objective.off_policy.level == "none" and self.objective.ratio.anchor != "rollout":
            raise ValueError(
                "rollout.replay_share trains on samples of an older policy, but this objective has "
                "no importance weights; set objective.off_policy.level = 'token', or "
                "objective.ratio.anchor = 'rollout'"
            )
        if "baselines" in self.objective.needs() or self.rollout.is_truncated:
            raise ValueError(
                "rollout.replay_share: runs record neither greedy answers nor the ids that a "
                "truncated distribution kept; leave it at 0 with this objective or with top_p, "
                "top_k or min_p"
            )
        if self.train.router_replay:
            raise ValueError(
                "rollout.replay_share reads the run's log when it resumes, but the log lacks the "
                "routes that train.router_replay needs; set one of them to its default"
            )
        if not self.track.log_trajectories:
            raise ValueError(
                "rollout.replay_share reads the run's log when it resumes; set "
                "track.log_trajectories = true"
            )
        return self

    @model_validator(mode="after")
    def _check_critic_warmup(self) -> RunConfig:
        if self.objective.needs_critic and self.critic.warmup_steps >= self.run.num_steps:
            raise ValueError(
                f"critic.warmup_steps = {self.critic.warmup_steps} leaves none of the "
                f"run.num_steps = {self.run.num_steps} steps to the policy; lower it"
            )
        return self

    def evaluations(self) -> dict[str, tuple[str, RunConfig]]:
        """Returns the evaluations during training.

        Returns:
            Name -> (name in `environments`, configuration with the set's `[eval]`). Without
            `eval.sets`, one evaluation with `[eval]` per environment.
        """
        environments = self.environments
        found = {}
        for name, each in self.eval.sets.items():
            part = each.env if each.env in environments else next(iter(environments))
            config = environments[part]
            id_ = config.env.id if each.env in (None, part) else each.env
            rest = config.env.config if id_ == config.env.id else {}
            env = config.env.model_copy(update={"id": id_, "config": rest | each.config})
            keys = EvalSection(**each.model_dump(exclude={"env", "config"}))
            found[name] = part, config.model_copy(update={"env": env, "eval": keys})
        return found or {name: (name, config) for name, config in environments.items()}

    @model_validator(mode="after")
    def _check_keep_best(self) -> RunConfig:
        if self.run.patience and self.run.keep_best is None:
            raise ValueError(
                "run.patience counts evaluations without an improvement of run.keep_best; set it "
                "to a metric, such as 'eval/avg@1'"
            )
        if self.run.keep_best is None:
            return self
        if self.run.eval_every == 0:
            raise ValueError("run.keep_best needs evaluations; remove run.eval_every = 0")
        keys = [
            f"eval/{name and name + '/'}{figure}"
            for name, (_, config) in self.evaluations().items()
            for figure in (
                f"avg@{config.eval.samples_per_task}",
                *(f"pass@{k}" for k in config.eval.pass_k),
            )
        ]
        if self.run.keep_best not in keys:
            raise ValueError(
                f"run.keep_best = {self.run.keep_best!r} is not a metric of this run's "
                f"evaluations; use one of {', '.join(keys)}"
            )
        return self

    def to_json(self, *, exclude_none: bool = False) -> dict[str, JsonValue]:
        """Returns the resolved configuration without bearer tokens."""
        token = {"token"}
        secret: Any = {"env": token, "inference": token, "teacher": token}
        secret["envs"] = {"__all__": token}
        return self.model_dump(mode="json", exclude=secret, exclude_none=exclude_none)

    def to_toml(self) -> str:
        """Returns the same as TOML, which loads as an equal configuration, except for tokens."""
        return toml_text(self.to_json(exclude_none=True))
