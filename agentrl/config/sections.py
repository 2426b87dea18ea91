"""The sections of a run file: every key with its type, default and meaning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import annotated_types
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, annotated_types.Gt(0)]


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


Commas = BeforeValidator(_split_commas)
"""A list may be given as one text with commas, or as one number."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        frozen=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name is not None:
            type_ = cls.model_fields[info.field_name].annotation
            if {int, float} & {type_, *get_args(type_)} and bool not in (type_, *get_args(type_)):
                raise ValueError(f"{str(value).lower()} is not a number")
        return value


class RunSection(Section):
    name: str = "run"
    """Names the run directory `runs/<name>` and the run in experiment trackers. It stays below
    `runs/`; `dir` names any other place."""
    dir: Path | None = None
    """Run directory; `runs/<name>` when not given."""
    seed: NonNegativeInt = 1
    """Every random choice of a run follows from it: task order, environments, sampling, dropout."""
    num_steps: PositiveInt = 100
    """Batches of rollouts to train on."""
    save_every: PositiveInt = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept. Two, so that a damaged newest one costs a few steps only."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in host memory (docs/scaling.md)."""
    eval_every: NonNegativeInt | None = None
    """Steps between evaluations (docs/evaluation.md); 0 never evaluates during training. When not
    given a tenth of the run, at least 10 steps, where the environment holds `eval.split` out."""
    keep_best: str | None = None
    """A metric of the evaluations, such as `eval/avg@1`: the checkpoint at which it was highest is
    kept besides the newest ones, as `checkpoints/best`."""
    patience: NonNegativeInt = 0
    """The run ends once so many evaluations in a row did not raise `keep_best`; 0 never."""
    preflight: bool = True
    """Stop where the first episodes show that the run cannot learn as it is set up; false goes on
    (docs/troubleshooting.md)."""
    resume: bool = False
    """Continue from the newest checkpoint in the run directory; an error if there is none."""
    replay: Path | None = None
    """Directory of a run whose recorded trajectories are trained on in place of new ones, step by
    step (docs/mixtures.md)."""
    profile: Annotated[list[PositiveInt], Commas] = Field(default_factory=list)
    """Steps of which a trace is written to `traces/` (docs/troubleshooting.md)."""
    stall_timeout_s: Seconds = 3600.0
    """When no episode moves for so long while the trainer waits, the run says where each stands
    and ends with exit status 75. Longer than the rollout deadlines, which end single episodes."""
    force_resume: bool = False
    """Resume although the dataset, model, group size or another identity of the run changed."""

    @model_validator(mode="after")
    def _traces_are_of_its_steps(self) -> RunSection:
        if max(self.profile, default=0) > self.num_steps:
            raise ValueError(
                f"profile = {self.profile} names a step beyond num_steps = {self.num_steps}"
            )
        return self

    @property
    def path(self) -> Path:
        return self.dir or Path("runs") / self.name

    @field_validator("name")
    @classmethod
    def _names_a_folder_of_runs(cls, value: str) -> str:
        parts = value.split("/")
        if not all(part.strip() for part in parts) or {".", ".."} & set(parts):
            raise ValueError(
                f"{value!r} does not name a folder below runs/; give a name such as 'first', or "
                "the whole directory as run.dir"
            )
        if "\0" in value or any(len(part.encode()) > 200 for part in parts):
            raise ValueError("a folder cannot have this name; give one of at most 200 bytes")
        return value

    @field_validator("dir", mode="before")
    @classmethod
    def _names_a_directory(cls, value: object) -> object:
        if isinstance(value, str) and not value.strip():
            raise ValueError("it is empty; name a directory, or leave it out for runs/<run.name>")
        return value


class LoraSection(Section):
    """A low-rank adapter in place of all weights; needs `pip install 'agentrl-gym[lora]'`."""

    rank: Annotated[int, Field(ge=0, le=512)] = 0
    """Rank of the adapter's matrices. 0 trains all weights and no adapter."""
    alpha: PositiveInt = 32
    """The adapter's share is scaled by `alpha / rank`."""
    targets: str | list[str] = "all-linear"
    """Names of the linear layers that get one, such as `["q_proj", "v_proj"]`; `all-linear` is all
    but the head."""


class ModelSection(Section):
    path: str
    """Directory in Hugging Face layout, or a model name on its hub."""
    chat_template: str | None = None
    """A file with a Jinja template in place of the model's own. `none`: a prompt is the texts of
    its messages, one after the other, for base models (docs/models.md)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations, and of the weights that compute and that servers sample from. With `bfloat16`
    they are the cast of float32 weights, which learn; log-probabilities are float32 always."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU when there is one."""
    gradient_checkpointing: bool | Annotated[float, Field(gt=0, lt=1)] = False
    """Recompute activations in the backward pass: about a third more time, far less memory. A
    number such as 0.5 does so in that share of the layers; `agentrl doctor` says what fits."""
    compile: bool = False
    """Fuse what each layer computes between its matrix products (`torch.compile`, docs/memory.md):
    a minute at the start, then less memory and often less time. A CPU needs g++ for it."""
    quantization: Literal["nf4"] | None = None
    """Keep the frozen weights beneath an adapter in 4 bits (QLoRA, docs/memory.md), about half a
    byte each. Needs `model.lora.rank`, one rank and `pip install 'agentrl-gym[8bit]'`."""
    freeze_router: bool = False
    """Mixtures of experts: the routers stay as they are, and the experts learn."""
    freeze_tower: bool = True
    """Vision-language models: what turns images into embeddings stays as it is; false trains it
    as well."""
    freeze: list[str] = Field(default_factory=list)
    """Parameters that stay as they are, by name, `*` standing for any letters:
    `["*.embed_tokens.*", "model.layers.0.*"]`."""
    reference: str | None = None
    """The frozen model of a KL to the reference, as `path`. Where it is not given: the policy as it
    was at `path`."""
    reference_every: PositiveInt | None = None
    """After so many steps the reference becomes the policy as it is then, again and again."""
    lora: LoraSection = Field(default_factory=LoraSection)

    @field_validator("freeze", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _all_is_frozen_beneath_an_adapter(self) -> ModelSection:
        if self.quantization and (not self.lora.rank or self.compile):
            raise ValueError(
                "model.quantization is for the frozen weights beneath an adapter, uncompiled: set "
                "model.lora.rank (32, for example) and leave model.compile out"
            )
        if not self.freeze_tower and self.lora.rank:
            raise ValueError(
                "model.freeze_tower = false and model.lora.rank: beneath an adapter all weights "
                "are frozen; leave model.freeze_tower out"
            )
        if self.freeze and self.lora.rank:
            raise ValueError(
                "model.freeze and model.lora.rank: beneath an adapter all weights are frozen; "
                "leave model.freeze out, and name the adapter's layers in model.lora.targets"
            )
        if self.reference_every and self.lora.rank:
            raise ValueError(
                "model.reference_every and model.lora.rank: the reference of an adapter is the "
                "model beneath it, which does not change; leave model.reference_every out"
            )
        return self


class EnvSection(Section):
    id: str = "math"
    """A registered environment, or `module:Class`, or `path/to/env.py:Class`."""
    url: Annotated[list[str], Commas, Field(default_factory=list)]
    """Environment servers (`agentrl env serve`), comma-separated; none plays in this process."""
    token: str | None = Field(default=None, repr=False)
    """Bearer token of those servers; AGENTRL_ENV_TOKEN is read when not given."""
    split: str = "train"
    """Split whose tasks are trained on."""
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Passed to the environment, which checks it; see `agentrl env info ID`."""


class MixedEnvSection(EnvSection):
    """One of several environments, `[[env]]`: what `[env]` has, and the keys below."""

    name: str = ""
    """In metrics, group ids and on the command line; `id` when not given."""
    weight: NonNegative | list[tuple[PositiveInt, NonNegative]] = 1.0
    """Its share of a step's groups, over the sum of all weights. Pairs of a step and a weight, such
    as `[[1, 1.0], [100, 0.2]]`, are joined by straight lines."""
    max_turns: PositiveInt | None = None
    """Of its episodes; this and the next four keys are those of `[rollout]` when not given."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens sampled in one turn."""
    turn_timeout_s: Seconds | None = None
    """Deadline of one turn's generation."""
    step_timeout_s: Seconds | None = None
    """Deadline of one environment step (and of reset)."""
    episode_timeout_s: Seconds | None = None
    """Deadline of a whole episode."""
    sampler: str | None = None
    """Chooses its tasks; this and the next key are those of `[rollout]` when not given."""
    sampler_stages: Annotated[list[PositiveInt] | None, Commas] = None
    """Where the pools of `staged` begin, after the first."""
    reward: RewardSection | None = None
    """`[env.reward]`: reward functions of its own, in place of `[reward]`."""

    @model_validator(mode="before")
    @classmethod
    def _is_named_after_its_id(cls, data: object) -> object:
        if isinstance(data, dict) and not data.get("name"):
            return {**data, "name": data.get("id", EnvSection.model_fields["id"].default)}
        return data

    @model_validator(mode="after")
    def _has_a_short_name(self) -> MixedEnvSection:
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", self.name):
            raise ValueError(
                f"{self.name!r} cannot stand in the names of metrics and groups; give this "
                "environment a name of letters, digits, - and _, such as name = 'sums'"
            )
        steps = [step for step, _ in self.weight] if isinstance(self.weight, list) else [1]
        if not steps or steps != sorted(set(steps)):
            raise ValueError("weight needs pairs of a step and a weight, in the order of the steps")
        return self


def require_sampler(name: str, stages: list[int]) -> None:
    """
    Raises:
        ValueError: there is no such sampler, or its pools are not in order.
    """
    if name not in ("uniform", "difficulty", "staged") and ":" not in name:
        raise ValueError(
            f"there is no sampler {name!r}; choose 'uniform', 'difficulty' or 'staged', or name a "
            "function of your own as 'package.module:function' or 'path/to/file.py:function'"
        )
    if stages != sorted(set(stages)):
        raise ValueError(f"sampler_stages = {stages} are not in order; write [100, 300]")
    if name == "staged" and not stages:
        raise ValueError(
            "sampler = 'staged' needs the tasks at which the next pools begin, such as "
            "sampler_stages = [100, 300]"
        )


class RolloutSection(Section):
    groups_per_step: PositiveInt = 8
    """Tasks of one step."""
    group_size: PositiveInt = 8
    """Trajectories of one task; they share a baseline."""
    max_concurrent: PositiveInt = 256
    """Episodes in flight."""
    max_turns: PositiveInt = 8
    """Turns of an episode; the environment may end it earlier."""
    max_turn_tokens: PositiveInt = 512
    """Tokens sampled in one turn."""
    max_context_tokens: PositiveInt = 4096
    """Tokens of a trajectory, prompt and observations included."""
    stop_strings: list[str] = Field(default_factory=list)
    """A turn ends with the first token that completes one of these, `["</search>"]` for example.
    Tokens that an engine sampled beyond it are dropped, which is what stopping there gives."""
    stop_token_ids: list[NonNegativeInt] = Field(default_factory=list)
    """Tokens that end a turn beside the chat template's own. The turn's text goes without them, and
    the template's own end is written behind them."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The trainer divides its logits by the same number."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The likeliest tokens that have this probability together are sampled from. Below 1, as with
    the next two keys, the sampler's distribution is another than the trainer's whole one: refused
    unless `truncated_sampling` says what to do."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """So many of the likeliest tokens are; -1 keeps every token."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Tokens below this share of the likeliest one's probability are not sampled."""
    repetition_penalty: float = 1.0
    """Only 1. Under another penalty a token's distribution depends on the tokens before it, and the
    trainer's, which is the model's own, would learn to undo that. `eval` takes one."""
    truncated_sampling: Literal["refuse", "correct"] = "refuse"
    """`correct`: the trainer computes the same truncated distribution, from the ids that the engine
    says it kept (`embedded`; vLLM with --return-sampling-mask). Of an engine that does not say, the
    old log-probabilities are the trainer's own, and a line says what is lost."""
    history: Literal["auto", "append_only", "fork"] = "auto"
    """How later turns are rendered; `auto` follows the chat template's self-test."""
    template: dict[str, JsonValue] = Field(default_factory=dict)
    """Extra variables for the chat template, such as `enable_thinking`."""
    tools: Literal["template", "prompt", "hidden"] = "template"
    """Who tells the model of its tools: the chat template, or the system message in `hermes`' words
    (`prompt`), for a template that shows none. `hidden`: the task's own text does."""
    dialect: str = "auto"
    """How the model writes reasoning and tool calls: a name in docs/dialects.md, or `text` for
    neither; `auto` asks the chat template. `--dry-run` says which it is."""
    generate: str | None = None
    """An async function `(task, policy, session)` that plays an episode in place of the driver:
    `package.module:function` or `path/to/file.py:function`; see docs/agents.md."""
    turn_timeout_s: Seconds = 600.0
    """Deadline of one turn's generation."""
    step_timeout_s: Seconds = 60.0
    """Deadline of one environment step (and of reset)."""
    episode_timeout_s: Seconds = 1800.0
    """Deadline of a whole episode."""
    max_waves: PositiveInt = 1
    """How often a step plays: groups that the filter dropped are replaced by new ones in the next
    wave; 1 trains on what is left."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal, because their advantage is zero. With `max_waves` of
    4 or more that is DAPO's dynamic sampling. The same as "zero_variance" in `keep`."""
    keep: Annotated[list[str], Commas] = Field(default_factory=list)
    """Filters that a group has to pass, in this order: `zero_variance`, or functions of your own,
    `package.module:function` or `path/to/file.py:function` (docs/mixtures.md)."""
    sampler: str = "uniform"
    """Chooses the tasks: `uniform` goes through the split in a new order each epoch, `difficulty`
    prefers those with a pass rate near a target, `staged` opens pools of harder ones; or a function
    of your own, `package.module:function` or `path/to/file.py:function` (docs/mixtures.md)."""
    sampler_target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """`difficulty`: tasks whose pass rate is near this one are drawn most."""
    sampler_fresh: Annotated[float, Field(ge=0, le=1)] = 0.25
    """`difficulty`: share of tasks that were never played, as long as there are any."""
    sampler_retired: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of tasks that were passed; with `staged`, of those of earlier pools."""
    sampler_passed: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Pass rate at which a task, or a pool of them, is passed."""
    sampler_stages: Annotated[list[PositiveInt], Commas] = Field(default_factory=list)
    """`staged`: indices of the tasks at which the second pool begins, the third, and so on."""
    replay_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Groups that are trained on once more, as a share of `groups_per_step`, beside those that a
    step plays: those whose rewards differ most. It needs importance weights (docs/mixtures.md)."""
    replay_max_age: PositiveInt = 4
    """Steps after which a group is not trained on again."""
    max_staleness: NonNegativeInt = 0
    """Steps by which the policy that sampled may lag behind the one that is trained, counted from
    a trajectory's oldest token. 0 plays and trains in turn, 1 plays a step ahead while the trainer
    works, more is asynchronous. Above 0 it needs servers."""
    on_update: Literal["keep", "wait", "abort"] = "keep"
    """Requests in flight when new weights arrive at a server: `keep` goes on with them under the
    new weights, `wait` ends them first, `abort` cuts them and resumes by ids afterwards."""
    oversample_groups: NonNegativeInt = 0
    """Groups in flight beyond what a step needs. A step then takes those that are ready first and
    what would be too old for the next is played again later: faster, and biased to short episodes.
    Needs servers."""
    min_group_size: PositiveInt | None = None
    """With `straggler_timeout_s`: once so many members of a group ended, the others have that long
    to end too; then they are cancelled and the group goes without them. Needs servers."""
    straggler_timeout_s: Seconds | None = None
    """See `min_group_size`. Cutting stragglers biases training to short episodes."""

    @field_validator("repetition_penalty")
    @classmethod
    def _none_in_training(cls, value: float) -> float:
        if value != 1:
            raise ValueError(
                "a penalty in training would be learned to be undone: the trainer's distribution "
                "is the model's own; leave it at 1, set eval.repetition_penalty for evaluation, or "
                "reward less repetition"
            )
        return value

    @field_validator("stop_strings", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("keep")
    @classmethod
    def _known_filters(cls, value: list[str]) -> list[str]:
        for name in value:
            if name != "zero_variance" and ":" not in name:
                raise ValueError(
                    f"there is no filter {name!r}; name 'zero_variance', or a function of your own "
                    "as 'package.module:function' or 'path/to/file.py:function'"
                )
        return value

    @model_validator(mode="after")
    def _known_sampler(self) -> RolloutSection:
        require_sampler(self.sampler, self.sampler_stages)
        if self.sampler_fresh + self.sampler_retired > 1:
            raise ValueError(
                "rollout.sampler_fresh and rollout.sampler_retired are shares of the same whole; "
                f"lower one of {self.sampler_fresh} and {self.sampler_retired}"
            )
        return self

    @model_validator(mode="after")
    def _a_turn_fits_the_context(self) -> RolloutSection:
        if self.max_context_tokens < self.max_turn_tokens:
            raise ValueError(
                f"rollout.max_context_tokens = {self.max_context_tokens} is less than "
                f"rollout.max_turn_tokens = {self.max_turn_tokens}, and it holds the prompt as "
                "well; raise the first or lower the second"
            )
        return self

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @model_validator(mode="after")
    def _truncated_sampling_is_chosen(self) -> RolloutSection:
        if self.is_truncated and self.truncated_sampling == "refuse":
            raise ValueError(
                "top_p < 1, top_k > 0 or min_p > 0 samples from another distribution than the "
                "trainer's whole one; set top_p = 1, top_k = -1 and min_p = 0, and use temperature "
                "instead, or set rollout.truncated_sampling = 'correct' (docs/precision.md)"
            )
        return self

    @model_validator(mode="after")
    def _stragglers_have_both_keys(self) -> RolloutSection:
        if (self.min_group_size is None) != (self.straggler_timeout_s is None):
            raise ValueError(
                "rollout.min_group_size and rollout.straggler_timeout_s go together; set both"
            )
        if self.min_group_size is not None and self.min_group_size > self.group_size:
            raise ValueError(
                f"rollout.min_group_size = {self.min_group_size} exceeds rollout.group_size = "
                f"{self.group_size}"
            )
        return self


class AgentRole(Section):
    """A rule about an agent's calls: all patterns that it has (regular expressions, found anywhere
    and in any case) have to match."""

    model: str | None = None
    """The name of the model that the call asks for."""
    system: str | None = None
    """Its system prompt."""
    header: str | None = None
    """One of its headers, as a line `name: value`."""
    role: Literal["trained", "served"]
    """`trained`, or `served`: the policy answers, and does not learn from it."""
    url: str | None = None
    """An OpenAI-compatible server (`http://host:8000/v1`) that answers such calls in place of the
    policy; they are not turns of the episode, and stand in its info."""
    served_model: str | None = None
    """Which model of that server; the one that the call asks for when not given."""
    api_key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds its key."""

    @model_validator(mode="after")
    def _patterns(self) -> AgentRole:
        if self.url is not None and self.role != "served":
            raise ValueError("a server at url answers calls that are served: set role = 'served'")
        for key in ("model", "system", "header"):
            try:
                re.compile(getattr(self, key) or "")
            except re.error as error:
                raise ValueError(f"{key} is not a regular expression: {error}") from None
        return self


class AgentSection(Section):
    """An agent of your own that plays the episodes; without any, the policy itself does."""

    run: str | None = None
    """A function `(task, base_url, api_key) -> answer`, async or not: `package.module:function` or
    `path/to/file.py:function`. A number that it returns is the reward; a text is graded by the
    environment; None stands for what the policy said last."""
    command: list[str] = Field(default_factory=list)
    """A program per episode in place of `run`, such as `["mini", "-t", "{prompt}"]`. It finds its
    model by OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY; `{prompt}`,
    `{task_id}`, `{base_url}`, `{api_key}`, `{mcp_url}` and `{tools_url}` are filled in."""
    answer: str = "last_line"
    """What of `command` is graded: `last_line` that it printed, `policy` (what the policy said
    last) or `file:PATH`, a file that it wrote; one that is missing is an empty answer."""
    home: str = "private"
    """HOME of `command`: `private`, an empty folder of its own; `shared`, this process's; or a
    folder, of which each gets a copy, such as one that holds an agent's settings. Containers have
    their own."""
    leave_out_provider_tools: bool = True
    """A call that offers tools which a provider would run (web_search) is served without them, and
    a line of the log names them; false refuses it."""
    container: str | None = None
    """A local Docker image, in a container of which `command` runs, one per episode."""
    network: str | None = None
    """The Docker network of those containers. When not given, one that reaches the endpoint and
    this machine, and nothing beyond it."""
    memory_mb: PositiveInt = 2048
    """Memory of each container, swap included."""
    roles: list[AgentRole] = Field(default_factory=list)
    """Which calls are trained; the first rule that matches decides. Where none does, calls are
    trained, except those without tools whose system prompt no call with tools has."""
    host: str | None = None
    """Address of the endpoint. Every call needs a key, so others than loopback are allowed. When
    not given 127.0.0.1, or with `container` this machine's address in the containers' network."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free one."""

    @property
    def is_on(self) -> bool:
        return self.run is not None or bool(self.command)

    @model_validator(mode="after")
    def _one_agent(self) -> AgentSection:
        if self.run is not None and self.command:
            raise ValueError("agent.run and agent.command are two agents; remove one")
        if self.container is not None and not self.command:
            raise ValueError("agent.container needs agent.command, the program to run in it")
        if self.answer not in ("last_line", "policy") and not self.answer.startswith("file:"):
            raise ValueError(
                f"agent.answer is 'last_line', 'policy' or 'file:PATH', not {self.answer!r}"
            )
        for key in ("answer", "home"):
            # A run's own file names every key.
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and self.run is not None:
                raise ValueError(f"agent.{key} is that of agent.command; remove it")
        if self.home != "private" and self.container is not None:
            raise ValueError("agent.home is that of a command without agent.container; remove it")
        if self.network is not None and self.container is None:
            raise ValueError("agent.network is that of agent.container, which is not set")
        return self


class InferenceSection(Section):
    backend: Literal["embedded", "vllm", "sglang", "openai"] = "embedded"
    """`embedded`: samples in this process from the trainer's own weights.
    `vllm`, `sglang`: token ids over HTTP from servers, `urls` or started by this run.
    `openai`: any chat server, for `agentrl eval` and `agentrl rollout`."""
    urls: Annotated[list[str], Commas, Field(default_factory=list)]
    """Servers of the other backends, comma-separated, without `/v1`; refused with `embedded`. One
    of `sglang` may be an sglang-router. Empty with `vllm` or `sglang`: the run starts its own."""
    model: str = "policy"
    """Name under which those servers know the model."""
    token: str | None = Field(default=None, repr=False)
    """Bearer token of those servers; OPENAI_API_KEY is read for the `openai` backend."""
    python: str | None = None
    """Interpreter of the virtual environment in which vLLM or SGLang is installed, to start servers
    with; when not given AGENTRL_VLLM_PYTHON or AGENTRL_SGLANG_PYTHON, or what `make vllm` or `make
    sglang` made in .venv-vllm or .venv-sglang."""
    max_batch_tokens: PositiveInt = 32768
    """Of the `embedded` engine: rows times padded length that it samples at once. Bounds the memory
    of keys and values; `agentrl doctor` says how much that is."""
    num_servers: PositiveInt = 1
    """Servers to start when there are no `urls`."""
    args: list[str] = Field(default_factory=list)
    """Further arguments of the servers that are started, for vLLM
    `["--gpu-memory-utilization", "0.5"]`."""
    align_rounding: bool = True
    """A vLLM server that this run starts on a CPU with bfloat16 rounds where the trainer's model
    does, so that both compute the same log-probabilities; its layers are then not compiled and its
    attention is slower. No effect in float32 or on a GPU."""
    startup_timeout_s: Seconds = 600.0
    """How long a started server may take until it answers."""
    hung_after_s: Seconds = 300.0
    """A started server whose engine answers nothing for so long is restarted. It answers nothing
    while it loads new weights: raise this where that takes minutes."""
    retry_for_s: Seconds = 120.0
    """How long a request waits for servers that are down or full."""
    transfer: Literal["file", "nccl", "tensor"] = "file"
    """How new weights reach the servers. `file`: through `weights_dir`, on any machine.
    `nccl`: from the trainer's GPU to the servers' GPUs, which must be others; the trainer's host
    memory holds a copy of the weights. `tensor`, of SGLang servers with one GPU each: in HTTP
    requests, to servers that do not see `weights_dir`."""
    share: Literal["split", "sleep"] = "split"
    """How the trainer and servers that this run starts share a GPU, where it is the only one.
    `split`: each keeps its part of the memory. `sleep`: they take turns; while the trainer learns
    the servers give their memory back, and while they sample it keeps its weights there alone, the
    optimizer's state in host memory (docs/memory.md)."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: vLLM servers keep the weights of their layers in 8 bits, half the memory, and round
    every update themselves (docs/precision.md). Needs `model.dtype = "bfloat16"`, a dense model, no
    adapter, and GPUs that multiply in 8 bits (Ada, Hopper or newer)."""
    weights_dir: Path | None = None
    """Where the file goes: a directory that trainer and servers share, on disk or in memory
    (/dev/shm/my-run); `weights` in the run directory when not given."""
    sync_tolerance: Annotated[float, Field(gt=0)] | None = None
    """After every update a server's log-probabilities of a probe may differ from the trainer's by
    so much, else the run stops; 1e-3 with float32 weights and 0.2 with bfloat16 when not given.
    With `quantization` it is the mean difference, 0.15."""

    @property
    def has_servers(self) -> bool:
        """Tells whether the run samples from servers, to which it sends its weights."""
        return self.backend in ("vllm", "sglang")

    @model_validator(mode="after")
    def _chat_servers_have_urls(self) -> InferenceSection:
        if self.backend == "openai" and not self.urls:
            raise ValueError("backend 'openai' needs inference.urls")
        if self.share == "sleep" and (not self.has_servers or self.urls or self.transfer == "nccl"):
            raise ValueError(
                "inference.share = 'sleep' is for servers that this run starts on the trainer's "
                "GPU: it needs backend = 'vllm' or 'sglang', no urls, and another transfer than "
                "'nccl'"
            )
        if self.quantization and self.backend != "vllm":
            raise ValueError(
                f"inference.quantization = {self.quantization!r} is for vLLM servers, which round "
                "the weights that they are sent; set inference.backend = 'vllm', or leave it out"
            )
        if self.backend == "embedded" and self.urls:
            raise ValueError(
                "inference.urls names servers, and backend 'embedded' asks none; set "
                "inference.backend = 'vllm' or 'sglang' (or 'openai', for eval and rollout), or "
                "remove the urls"
            )
        return self


class ParallelSection(Section):
    """The division of the work among the ranks that torchrun (or Slurm, or Ray Train) started."""

    data: PositiveInt | None = None
    """Ranks (with `context`, groups of them) that a batch's rows are dealt to; all ranks together
    hold the shards of every network (FSDP). Absent: as many as were started. A number guards
    against a launch with another."""
    context: PositiveInt = 1
    """Neighbouring ranks that hold one row together, each a slice of it: for rows too long for one
    device. Each needs the activations of `token_budget / context` tokens (docs/scaling.md)."""
    meeting_s: Seconds = 300.0
    """Ranks that are started together find each other within this time, or each of them ends."""
    deadline_s: Seconds = 1800.0
    """A rank that the others wait for so long is taken for hung, and the run ends."""


class TrainSection(Section):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak of the schedule."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, over all optimizer steps of the run."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    optimizer: Literal["adamw", "adamw_8bit", "adamw_cpu"] = "adamw"
    """Where AdamW keeps its two moments. `adamw`: in float32 beside the weights. `adamw_8bit`: in 8
    bit, 2 instead of 8 bytes per weight; needs `pip install 'agentrl-gym[8bit]'`. `adamw_cpu`: in
    host memory, with the float32 weights and gradients; the update is computed there and is slower.
    On several ranks no weights stay on the device: a layer's are there while it computes."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    router_replay: bool = False
    """Mixtures of experts: each token goes to the experts that it went to when it was sampled
    (docs/models.md). With `inference.backend = "embedded"`."""
    router_aux_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the family's load-balancing loss (mixtures of experts). It is computed on each
    micro-batch by itself, so it alone depends on `token_budget`."""
    token_budget: PositiveInt = 8192
    """Tokens of one micro-batch, on each rank. Changes memory and speed, never the gradient. Where
    it is not set, ranks that have their GPUs to themselves take what fits (docs/memory.md)."""
    share_prefixes: bool = True
    """What samples of a group begin with, such as their prompt, is computed once, where the model
    family allows it and it pays (docs/models.md). Changes the gradient by rounding only; false is
    for finding out whether a problem lies there."""
    num_epochs: PositiveInt = 1
    """Passes over a batch of rollouts."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass; groups are split evenly."""
    max_nonfinite_steps: PositiveInt = 5
    """Consecutive updates skipped for a non-finite gradient before the run stops."""
    parallel: ParallelSection = Field(default_factory=ParallelSection)

    @model_validator(mode="after")
    def _slices_have_no_balance(self) -> TrainSection:
        if self.router_aux_loss and self.parallel.context > 1:
            raise ValueError(
                "train.router_aux_loss balances whole rows, of which a rank has a slice with "
                "train.parallel.context above 1; set one of them to its default"
            )
        return self


class RewardSection(Section):
    """Reward functions on the trainer's side; without any, the environment's reward stands."""

    functions: Annotated[list[str], Commas] = Field(default_factory=list)
    """Names of the reward library (`math`, `f1`, `format`, ...), `package.module:function` or
    `path/to/file.py:function`."""
    weights: Annotated[list[float], Commas] = Field(default_factory=list)
    """Weights of their scores in the reward, one per function; none weighs each 1."""
    options: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    """Keyword arguments of a function, by its name in `functions`."""
    text: Literal["last_turn", "answer"] = "last_turn"
    """What is scored: what the policy wrote in its last turn, or the `answer` that the
    environment read from it."""
    add_to_environment: bool = False
    """Add to the environment's reward instead of replacing it."""
    deadline_s: Seconds = 60.0
    """Deadline of one call. An answer whose call fails has no reward and is not trained on."""
    max_concurrency: PositiveInt = 64
    """Calls under way at a time."""

    @model_validator(mode="after")
    def _functions_for_the_rest(self) -> RewardSection:
        if not self.functions and (self.add_to_environment or self.text != "last_turn"):
            raise ValueError("reward.functions is empty, so nothing is scored; name a function")
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} numbers for {len(self.functions)} "
                "functions"
            )
        if unknown := sorted(set(self.options) - set(self.functions)):
            raise ValueError(
                f"reward.options names {', '.join(unknown)}, which is not in reward.functions"
            )
        return self


class CriticSection(Section):
    """The critic of objectives with `credit.kind = "gae"` (ppo, vapo); others have none."""

    path: str | None = None
    """Model it starts from, below a value head of zeros; the policy's own when not given."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak of its schedule. Everything else about its optimizer is as in `train`."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the run in which only the critic learns, so that the policy's first
    advantages come from values that mean something."""


class TeacherSection(Section):
    """The teacher of objectives with `distill.where` (opd): `path` or `url`, not both."""

    path: str | None = None
    """Frozen model that runs beside the policy, with the policy's tokenizer, dtype and device."""
    url: str | None = None
    """A vLLM or SGLang server that holds the teacher, without `/v1`."""
    model: str = "teacher"
    """Name under which that server knows it."""
    token: str | None = Field(default=None, repr=False)
    """Bearer token of that server."""


class EvalKeys(Section):
    split: str = "test"
    """Split that is evaluated."""
    num_tasks: PositiveInt = 64
    """First tasks of the split."""
    samples_per_task: PositiveInt = 1
    """Trajectories per task, the k of avg@k."""
    pass_k: Annotated[list[PositiveInt], Commas] = Field(default_factory=lambda: [1])
    """k of the unbiased pass@k estimates; each at most samples_per_task."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """0 is greedy. This and the next five keys are those of the model's generation_config.json when
    not given, which a line of the output then says; without one they change nothing. Behind the
    `openai` backend they are the server's own."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample from so many of the likeliest tokens; -1 from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Leave out tokens below this share of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Above 1: makes tokens that stand in the prompt or the answer less likely."""
    max_tokens: PositiveInt | None = None
    """Tokens sampled in one turn; `rollout.max_turn_tokens` where the model names none either."""
    seed: NonNegativeInt | None = None
    """Seed of what is sampled. When not given `run.seed`, or a server's own random stream."""
    success_threshold: float = 1.0
    """Reward from which a trajectory counts as passed."""

    def sampling(self) -> dict[str, Any]:
        """Returns the sampling parameters that are given, by the names of `SamplingParams`."""
        keys = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"}
        return self.model_dump(include=keys | {"seed"}, exclude_none=True)

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if max(self.pass_k, default=1) > self.samples_per_task:
            raise ValueError(
                f"pass_k = {self.pass_k} needs samples_per_task >= {max(self.pass_k)}, "
                f"which is {self.samples_per_task}"
            )
        return self


class EvalSet(EvalKeys):
    """`[eval.sets.NAME]`: what differs from `[eval]`, and whose tasks they are."""

    env: str | None = None
    """Environment, as `env.id`, or the name of an `[[env]]`; the run's first when not given."""
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Passed to it, besides those of `env.config` where `env` does not name another one."""


class EvalSection(EvalKeys):
    sets: dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], EvalSet] = Field(default_factory=dict)
    """Several evaluations while training, by name; each is a table `[eval.sets.NAME]` with keys of
    `[eval]` that differ, and `env` and `config` where it is of another environment."""

    @model_validator(mode="before")
    @classmethod
    def _sets_differ_from_the_rest(cls, data: object) -> object:
        sets = data.get("sets") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(sets, dict):
            return data
        rest = {key: value for key, value in data.items() if key != "sets"}
        return rest | {"sets": {k: rest | v if isinstance(v, dict) else v for k, v in sets.items()}}


class TrackSection(Section):
    sinks: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], Commas] = Field(
        default_factory=list
    )
    """Where metrics go besides metrics.jsonl; needs `pip install 'agentrl-gym[track]'`."""
    project: str = "agentrl"
    """Project name in wandb and trackio."""
    log_trajectories: bool = True
    """Keep every trajectory under `trajectories/`."""
    signals: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of a step's groups whose advantages, log-probabilities, weights and masks are kept per
    token under `signals/`, for `agentrl view`; about 10 bytes a trained token. 0 keeps none."""
