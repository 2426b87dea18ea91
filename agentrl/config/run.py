"""`RunConfig`: the sections together, and what one asks of another."""

from __future__ import annotations

from typing import Any

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
    require_sampler,
)
from agentrl.config.toml_text import toml_text
from agentrl.errors import ConfigError

_LIMITS = {
    *("max_turns", "max_turn_tokens"),
    *("turn_timeout_s", "step_timeout_s", "episode_timeout_s"),
    *("sampler", "sampler_stages"),
}


def weight_at(weight: float | list[tuple[int, float]], step: int) -> float:
    """Returns an environment's weight at a step: a number, or a line between pairs of a step and a
    weight, level before the first and after the last."""
    if not isinstance(weight, list):
        return weight
    later = next((i for i, (at, _) in enumerate(weight) if at >= step), len(weight) - 1)
    (start, low), (end, high) = weight[max(later - 1, 0)], weight[later]
    if not start < step < end:
        return low if step <= start else high
    return low + (high - low) * (step - start) / (end - start)


class RunConfig(Section):
    """A run, as read from TOML. `model.path` is the only key without a default."""

    run: RunSection = Field(default_factory=RunSection)
    """`[run]`: name, directory, seed, number of steps, saving and resuming."""
    model: ModelSection
    """`[model]`: what is trained."""
    env: EnvSection = Field(default_factory=lambda: EnvSection.model_validate({}))
    """`[env]`: what is played."""
    envs: list[MixedEnvSection] = Field(default_factory=list)
    """`[[env]]`: several environments in one run; `env` is then the first of them, and
    `environments` has a configuration for each."""
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    """`[rollout]`: how many episodes a step plays, and their limits."""
    agent: AgentSection = Field(default_factory=AgentSection)
    """`[agent]`: a program of your own that plays in place of the built-in turns."""
    inference: InferenceSection = Field(default_factory=lambda: InferenceSection.model_validate({}))
    """`[inference]`: who samples."""
    reward: RewardSection = Field(default_factory=RewardSection)
    """`[reward]`: functions besides the environment's own reward."""
    objective: Objective = Field(default_factory=lambda: Objective.model_validate({}))
    """The objective's stages; `preset` names a starting point, other keys override it."""
    train: TrainSection = Field(default_factory=TrainSection)
    """`[train]`: optimizer, batches, memory."""
    critic: CriticSection = Field(default_factory=CriticSection)
    """`[critic]`: the value model, where the objective needs one."""
    teacher: TeacherSection = Field(default_factory=lambda: TeacherSection.model_validate({}))
    """`[teacher]`: the model that is distilled from."""
    eval: EvalSection = Field(default_factory=EvalSection)
    """`[eval]`: the tasks that measure the policy."""
    track: TrackSection = Field(default_factory=TrackSection)
    """`[track]`: what is written down, and for whom."""

    @model_validator(mode="before")
    @classmethod
    def _several_environments_are_a_list(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if "envs" in data:
            raise ValueError("unknown section [envs]; several environments are written as [[env]]")
        tables = data.get("env")
        if not isinstance(tables, list):
            return data
        if not tables or not all(isinstance(table, dict) for table in tables):
            raise ValueError("env is a table, [env], or a list of tables, [[env]]")
        first = {key: table for key, table in tables[0].items() if key in EnvSection.model_fields}
        return {**data, "env": first, "envs": tables}

    @model_serializer(mode="wrap")
    def _several_environments_are_written_as_a_list(
        self, handler: SerializerFunctionWrapHandler
    ) -> dict[str, Any]:
        data = handler(self)
        tables = data.pop("envs", None)
        return {**data, "env": tables} if tables else data

    @property
    def environments(self) -> dict[str, RunConfig]:
        """For each environment by name the configuration of a run that plays it alone; of a single
        one, whose name is empty, this one."""
        return {each.name: self._alone(each) for each in self.envs} or {"": self}

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
    def _environments_share_a_step(self) -> RunConfig:
        names = [each.name for each in self.envs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two [[env]] are named {twice[0]!r}; give each a name of its own")
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
                "sampler_stages are the pools of sampler = 'staged', and none is; set "
                "rollout.sampler = 'staged', or leave them out"
            )
        weights = [each.weight for each in self.envs]
        corners = {step for w in weights if isinstance(w, list) for step, _ in w}
        for step in sorted({1, self.run.num_steps, *corners}) if weights else ():
            if not sum(weight_at(weight, step) for weight in weights):
                raise ValueError(f"at step {step} every weight of [[env]] is 0; raise one")
        return self

    @model_validator(mode="before")
    @classmethod
    def _a_preset_may_be_a_whole_recipe(cls, data: object) -> object:
        objective = data.get("objective") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(objective, dict):
            return data
        preset = PRESET_DATA.get(str(objective.get("preset")))
        return deep_merge(preset.run, data) if preset is not None and preset.run else data

    @model_validator(mode="before")
    @classmethod
    def _longest_trajectory_is_the_constant(cls, data: object) -> object:
        """Sets `max_tokens` of `aggregate.kind = "constant"` to what a trajectory may sample.

        Only where the run file gives none: a preset's number belongs to its paper's runs.
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
            return data  # the validation that follows says what is wrong with it
        sampled = [
            (env.max_turns or rollout.max_turns) * (env.max_turn_tokens or rollout.max_turn_tokens)
            for env in envs
        ]
        longest = max(sampled, default=rollout.max_turns * rollout.max_turn_tokens)
        longest = min(longest, rollout.max_context_tokens)
        return {**data, "objective": {**objective, "aggregate": {**own, "max_tokens": longest}}}

    @model_validator(mode="before")
    @classmethod
    def _samples_of_another_policy_are_corrected(cls, data: object) -> object:
        """With `max_staleness` above 0, and from servers that round their weights, the policy that
        sampled is not the one that is trained.

        Treated alike, a run collapses. So where neither run file nor preset chooses, ratios are
        taken to the policy that sampled, as PPO defines them. An objective without a ratio gets
        the truncated weight of TIS instead, and so does rounding, which would use up the clip.
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
    def _own_functions_hold(self) -> RunConfig:
        """A user's own loss and advantage are tried here, before anything is started."""
        if not self.objective.user_functions:
            return self
        # These load torch, which a configuration without own functions never needs.
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
                f"objective.loss = {loss!r} asks for neither 'ratio' nor 'rollout_logprobs', so "
                "nothing corrects for samples of an older policy; use the ratio, or set "
                "objective.off_policy.level = 'token' or rollout.max_staleness = 0"
            )
        return self

    @property
    def plays_by_agent(self) -> bool:
        """Something else than the policy decides what it is asked."""
        return self.agent.is_on or self.rollout.generate is not None

    @model_validator(mode="after")
    def _routes_are_known(self) -> RunConfig:
        if self.train.router_replay and self.inference.backend != "embedded":
            raise ValueError(
                "train.router_replay is read from the embedded engine only; set "
                "inference.backend = 'embedded', or leave it out"
            )
        if self.train.router_replay and self.model.compile:
            raise ValueError(
                "train.router_replay answers the routers' calls, which model.compile compiles "
                "away; set model.compile = false, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _a_reference_is_compared_with(self) -> RunConfig:
        for key in ("reference", "reference_every"):
            if getattr(self.model, key) and "ref_logprobs" not in self.objective.needs():
                raise ValueError(
                    f"model.{key} is set, and nothing is compared with a reference; set "
                    "objective.kl.where = 'loss' with a coef, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _groups_make_sense(self) -> RunConfig:
        if self.rollout.group_size == 1 and self.objective.needs_groups:
            raise ValueError(
                "rollout.group_size = 1 leaves a group baseline nothing to compare with, every "
                "advantage would be 0; set rollout.group_size to 2 or more (8 is usual), or choose "
                "an objective without a group baseline"
            )
        if self.inference.share == "sleep" and self.rollout.max_staleness:
            raise ValueError(
                "inference.share = 'sleep' has servers asleep while the trainer learns, and "
                "rollout.max_staleness above 0 plays meanwhile; set one of them to its default"
            )
        if self.inference.backend == "embedded":
            for key in ("max_staleness", "oversample_groups", "min_group_size"):
                if getattr(self.rollout, key):
                    raise ValueError(
                        f"rollout.{key} needs inference.backend = 'vllm' or 'sglang': the "
                        "embedded engine samples in lockstep from the weights that are "
                        "being trained"
                    )
        if self.agent.is_on and self.rollout.generate is not None:
            raise ValueError("[agent] and rollout.generate both play the episodes; remove one")
        if self.plays_by_agent and self.inference.backend == "openai":
            raise ValueError(
                "agents are recorded token by token, which a chat server cannot do; set "
                "inference.backend to 'embedded', 'vllm' or 'sglang'"
            )
        if self.inference.quantization and self.model.dtype != "bfloat16":
            raise ValueError(
                "inference.quantization = 'fp8' rounds bfloat16 weights; set model.dtype = "
                "'bfloat16', or leave it out"
            )
        if self.inference.quantization and self.model.lora.rank:
            raise ValueError(
                "inference.quantization = 'fp8' rounds weights that learn, and beneath an adapter "
                "none do; leave it out (model.quantization keeps the frozen weights in 4 bits)"
            )
        if self.inference.backend == "sglang":
            if self.model.lora.rank:
                raise ValueError(
                    "model.lora trains an adapter, which is not sent to SGLang servers; set "
                    "inference.backend = 'vllm' or 'embedded'"
                )
            if self.rollout.on_update == "wait":
                raise ValueError(
                    "rollout.on_update = 'wait' is not for SGLang servers, which may not empty "
                    "their cache at the moment when the last request ends; set 'keep' or 'abort'"
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
                    "inference.transfer = 'nccl' sends whole weights, and model.lora trains an "
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
    def _a_teacher_where_one_is_learned_from(self) -> RunConfig:
        given = [key for key in ("path", "url") if getattr(self.teacher, key) is not None]
        if "teacher_logprobs" not in self.objective.needs():
            if given:
                raise ValueError(
                    f"teacher.{given[0]} is set, but the objective learns from no teacher; set "
                    "objective.preset = 'opd' or objective.distill.where, or remove it"
                )
        elif len(given) != 1:
            raise ValueError(
                "objective.distill learns from a teacher: set teacher.path to a model with the "
                "policy's tokenizer, or teacher.url to a server that holds one"
                + (", not both" if given else "")
            )
        elif self.teacher.url is not None and self.rollout.temperature != 1:
            raise ValueError(
                "a teacher server reports log-probabilities at temperature 1, and "
                f"rollout.temperature = {self.rollout.temperature:g}; set it to 1, or load the "
                "teacher with teacher.path"
            )
        return self

    @model_validator(mode="after")
    def _a_truncated_policy_has_no_whole_teacher(self) -> RunConfig:
        if self.rollout.is_truncated and self.teacher.url is not None:
            raise ValueError(
                "teacher.url gives log-probabilities of the whole distribution, and rollout.top_p, "
                "top_k or min_p trains a truncated one: set teacher.path, or sample untruncated"
            )
        return self

    @model_validator(mode="after")
    def _a_replay_has_all_it_needs(self) -> RunConfig:
        if self.run.replay is None:
            return self
        if "baselines" in self.objective.needs():
            raise ValueError(
                "run.replay: this objective compares with greedy answers, which no run records"
            )
        if self.rollout.is_truncated:
            raise ValueError(
                "run.replay: rollout.top_p, top_k or min_p trains a truncated distribution, and no "
                "run records which ids were kept"
            )
        if self.train.router_replay:
            raise ValueError(
                "run.replay: no run records the routes that train.router_replay needs; leave it out"
            )
        if self.run.eval_every or self.run.keep_best:
            raise ValueError(
                "run.replay plays no episodes, so it cannot evaluate; leave out run.eval_every and "
                "run.keep_best, and use agentrl eval --checkpoint afterwards"
            )
        return self

    @model_validator(mode="after")
    def _what_is_trained_again_is_weighted(self) -> RunConfig:
        if not self.rollout.replay_share:
            return self
        if self.objective.off_policy.level == "none" and self.objective.ratio.anchor != "rollout":
            raise ValueError(
                "rollout.replay_share trains on what an older policy sampled, and this objective "
                "has no importance weights; set objective.off_policy.level = 'token', or "
                "objective.ratio.anchor = 'rollout'"
            )
        if "baselines" in self.objective.needs() or self.rollout.is_truncated:
            raise ValueError(
                "rollout.replay_share: no run records greedy answers or which ids a truncated "
                "distribution kept; leave it at 0 with this objective or with top_p, top_k, min_p"
            )
        if self.train.router_replay:
            raise ValueError(
                "rollout.replay_share reads the run's log where it is resumed, and it lacks the "
                "routes of train.router_replay; set one of them to its default"
            )
        if not self.track.log_trajectories:
            raise ValueError(
                "rollout.replay_share reads the run's log where it is resumed; set "
                "track.log_trajectories = true"
            )
        return self

    @model_validator(mode="after")
    def _the_critic_warms_up_before_the_end(self) -> RunConfig:
        if self.objective.needs_critic and self.critic.warmup_steps >= self.run.num_steps:
            raise ValueError(
                f"critic.warmup_steps = {self.critic.warmup_steps} leaves none of the "
                f"run.num_steps = {self.run.num_steps} steps to the policy; lower it"
            )
        return self

    def evaluations(self) -> dict[str, tuple[str, RunConfig]]:
        """Returns what is evaluated while training, by name: the environment of `environments` that
        plays, and its configuration with the set's `[eval]`. Without `eval.sets` that is `[eval]`
        in every environment."""
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
    def _the_best_is_of_a_metric(self) -> RunConfig:
        if self.run.patience and self.run.keep_best is None:
            raise ValueError(
                "run.patience counts evaluations that do not raise a metric: name it with "
                "run.keep_best, such as 'eval/avg@1'"
            )
        if self.run.keep_best is None:
            return self
        if self.run.eval_every == 0:
            raise ValueError("run.keep_best needs evaluations: leave out run.eval_every = 0")
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
                f"run.keep_best = {self.run.keep_best!r} is no figure of this run's evaluations, "
                f"which are {', '.join(keys)}"
            )
        return self

    def to_json(self, *, exclude_none: bool = False) -> dict[str, JsonValue]:
        """The resolved configuration, bearer tokens left out."""
        token = {"token"}
        secret: Any = {"env": token, "inference": token, "teacher": token}
        secret["envs"] = {"__all__": token}
        return self.model_dump(mode="json", exclude=secret, exclude_none=exclude_none)

    def to_toml(self) -> str:
        """The same as TOML that loads back to an equal configuration."""
        return toml_text(self.to_json(exclude_none=True))
