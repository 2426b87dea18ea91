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
"""Lets a list be given as a comma-separated string or a single number."""


class Decisive:
    """Marks a key of which a resumed run must have the same value as the run that was saved.

    Keys of memory, speed, addresses and deadlines are not marked."""


DECISIVE = Decisive()


def decisive(section: BaseModel) -> dict[str, JsonValue]:
    """Returns the values of a section's keys that are marked so, with its tables nested."""
    found: dict[str, JsonValue] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            whole = DECISIVE in field.metadata
            if table := value.model_dump(mode="json") if whole else decisive(value):
                found[name] = table
        elif DECISIVE in field.metadata:
            found[name] = section.model_dump(mode="json", include={name})[name]
    return found


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
    def _refuse_booleans_as_numbers(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name is not None:
            type_ = cls.model_fields[info.field_name].annotation
            if {int, float} & {type_, *get_args(type_)} and bool not in (type_, *get_args(type_)):
                raise ValueError(f"{str(value).lower()} is not a number")
        return value


class RunSection(Section):
    name: str = "run"
    """Name of the run in experiment trackers and of its directory, `runs/<name>`. Use `dir` for a
    directory elsewhere."""
    dir: Path | None = None
    """Run directory; by default `runs/<name>`."""
    seed: Annotated[NonNegativeInt, DECISIVE] = 1
    """Seed of all random choices of the run: task order, environments, sampling, dropout."""
    num_steps: PositiveInt = 100
    """Number of rollout batches to train on."""
    save_every: PositiveInt = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep. With two, a damaged one costs only a few steps."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in host memory (docs/scaling.md)."""
    eval_every: NonNegativeInt | None = None
    """Steps between evaluations (docs/evaluation.md); 0 for none during training. By default a
    tenth of the run, but at least 10 steps, if the environment has a separate `eval.split`."""
    keep_best: str | None = None
    """An evaluation metric, such as `eval/avg@1`. The checkpoint with its highest value is kept as
    `checkpoints/best`, besides the newest ones."""
    patience: NonNegativeInt = 0
    """End the run after this many evaluations in a row without an improvement of `keep_best`; 0
    never does."""
    preflight: bool = True
    """Stop if the first episodes show that the run cannot learn with its settings; false continues
    anyway (docs/troubleshooting.md)."""
    resume: bool | Literal["force"] = False
    """Continue from the newest checkpoint in the run directory; an error if there is none, or if
    the dataset, model, group size or another defining setting changed, except with "force"."""
    replay: Path | None = None
    """Directory of another run, whose recorded trajectories are trained on step by step instead of
    new ones (docs/mixtures.md)."""
    profile: Annotated[list[PositiveInt], Commas] = Field(default_factory=list)
    """Steps for which a trace is written to `traces/` (docs/troubleshooting.md)."""
    stall_timeout_s: Seconds = 3600.0
    """If no episode makes progress for this long while the trainer waits, the run reports the state
    of each and ends with exit status 75. Should exceed the rollout deadlines, which end single
    episodes."""

    @model_validator(mode="after")
    def _check_profile(self) -> RunSection:
        if max(self.profile, default=0) > self.num_steps:
            raise ValueError(
                f"profile = {self.profile} contains a step beyond num_steps = {self.num_steps}"
            )
        return self

    @property
    def path(self) -> Path:
        return self.dir or Path("runs") / self.name

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        parts = value.split("/")
        if not all(part.strip() for part in parts) or {".", ".."} & set(parts):
            raise ValueError(
                f"{value!r} is not a valid folder name below runs/; use a name such as 'first', or "
                "set the directory with run.dir"
            )
        if "\0" in value or any(len(part.encode()) > 200 for part in parts):
            raise ValueError("a folder cannot have this name; use one of at most 200 bytes")
        return value

    @field_validator("dir", mode="before")
    @classmethod
    def _check_dir(cls, value: object) -> object:
        if isinstance(value, str) and not value.strip():
            raise ValueError("it is empty; give a directory, or leave it out for runs/<run.name>")
        return value


class LoraSection(Section):
    """Train a low-rank adapter instead of all weights; needs `pip install 'agentrl-gym[lora]'`."""

    rank: Annotated[int, Field(ge=0, le=512), DECISIVE] = 0
    """Rank of the adapter's matrices. 0 trains all weights, without an adapter."""
    alpha: Annotated[PositiveInt, DECISIVE] = 32
    """The adapter's output is scaled by `alpha / rank`."""
    targets: Annotated[str | list[str], DECISIVE] = "all-linear"
    """Names of the linear layers to adapt, such as `["q_proj", "v_proj"]`; `all-linear` is every
    one except the head."""


class ModelSection(Section):
    path: Annotated[str, DECISIVE] = ""
    """Directory in Hugging Face layout, or the name of a model on the Hugging Face Hub. Needed,
    except with `inference.backend = "openai"`."""
    chat_template: str | None = None
    """File with a Jinja template to use instead of the model's own. `none` concatenates the texts
    of the messages, for base models (docs/models.md)."""
    dtype: Annotated[Literal["float32", "bfloat16"], DECISIVE] = "float32"
    """dtype of activations and of the weights used for computing and sampling. With `bfloat16`, the
    optimizer updates float32 weights, which are cast. Log-probabilities are always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses a GPU if there is one."""
    gradient_checkpointing: bool | Annotated[float, Field(gt=0, lt=1)] = False
    """Recompute activations in the backward pass: about a third more time, far less memory. A
    number such as 0.5 does it in that fraction of the layers; `agentrl doctor` says what fits."""
    compile: bool = False
    """Fuse the operations between each layer's matrix products (`torch.compile`, docs/memory.md).
    Takes a minute at the start, then less memory and often less time. Needs g++ on a CPU."""
    quantization: Annotated[Literal["nf4"] | None, DECISIVE] = None
    """Keep the frozen weights beneath an adapter in 4 bits (QLoRA, docs/memory.md), about half a
    byte each. Needs `model.lora.rank`, one rank and `pip install 'agentrl-gym[8bit]'`."""
    freeze_router: bool = False
    """Freeze the routers of a mixture of experts; the experts are still trained."""
    freeze_tower: bool = True
    """Freeze the image encoder of a vision-language model; false trains it as well."""
    freeze: list[str] = Field(default_factory=list)
    """Names of parameters to freeze, in which `*` matches any characters:
    `["*.embed_tokens.*", "model.layers.0.*"]`."""
    reference: Annotated[str | None, DECISIVE] = None
    """Frozen reference model for the KL, in the form of `path`; by default the model at `path`
    before training."""
    reference_every: Annotated[PositiveInt | None, DECISIVE] = None
    """Every so many steps, replace the reference model by the current policy."""
    lora: LoraSection = Field(default_factory=LoraSection)

    @field_validator("freeze", mode="before")
    @classmethod
    def _make_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_adapter(self) -> ModelSection:
        if self.quantization and (not self.lora.rank or self.compile):
            raise ValueError(
                "model.quantization needs an adapter and no compilation; set model.lora.rank (32, "
                "for example) and leave model.compile out"
            )
        if not self.freeze_tower and self.lora.rank:
            raise ValueError(
                "model.freeze_tower = false has no effect with model.lora.rank, which freezes all "
                "weights of the model; leave model.freeze_tower out"
            )
        if self.freeze and self.lora.rank:
            raise ValueError(
                "model.freeze has no effect with model.lora.rank, which freezes all weights of the "
                "model; leave it out, and choose the adapter's layers with model.lora.targets"
            )
        if self.reference_every and self.lora.rank:
            raise ValueError(
                "model.reference_every does not work with model.lora.rank: the reference is the "
                "model without the adapter, which never changes; leave model.reference_every out"
            )
        return self


class EnvSection(Section):
    id: Annotated[str, DECISIVE] = "math"
    """Id of a registered environment, `module:Class` or `path/to/env.py:Class`."""
    url: Annotated[list[str], Commas, Field(default_factory=list)]
    """URLs of environment servers (`agentrl env serve`), comma-separated; by default the
    environment runs in this process."""
    token: str | None = Field(default=None, repr=False)
    """Bearer token of those servers; by default AGENTRL_ENV_TOKEN."""
    split: Annotated[str, DECISIVE] = "train"
    """Split to train on."""
    config: Annotated[dict[str, JsonValue], DECISIVE] = Field(default_factory=dict)
    """The environment's own settings; see `agentrl env info ID`."""


class MixedEnvSection(EnvSection):
    """One of several environments, `[[env]]`, with the keys of `[env]` and those below."""

    name: str = ""
    """Name in metrics, group ids and on the command line; by default `id`."""
    weight: Annotated[NonNegative | list[tuple[PositiveInt, NonNegative]], DECISIVE] = 1.0
    """Its share of a step's groups is this, divided by the sum of all weights. `(step, weight)`
    pairs, such as `[[1, 1.0], [100, 0.2]]`, are interpolated linearly."""
    max_turns: Annotated[PositiveInt | None, DECISIVE] = None
    """Maximum number of turns of its episodes. By default, this and the next four keys are those of
    `[rollout]`."""
    max_turn_tokens: Annotated[PositiveInt | None, DECISIVE] = None
    """Maximum number of tokens sampled in one turn."""
    turn_timeout_s: Seconds | None = None
    """Deadline of one turn's generation."""
    step_timeout_s: Seconds | None = None
    """Deadline of one environment step, and of reset."""
    episode_timeout_s: Seconds | None = None
    """Deadline of a whole episode."""
    sampler: Annotated[str | None, DECISIVE] = None
    """How its tasks are chosen. By default, this and the next key are those of `[rollout]`."""
    sampler_stages: Annotated[list[PositiveInt] | None, Commas, DECISIVE] = None
    """For `staged`: indices of the tasks at which the second and later pools begin."""
    reward: Annotated[RewardSection | None, DECISIVE] = None
    """`[env.reward]`: its own reward functions, instead of those in `[reward]`."""

    @model_validator(mode="before")
    @classmethod
    def _set_name(cls, data: object) -> object:
        if isinstance(data, dict) and not data.get("name"):
            return {**data, "name": data.get("id", EnvSection.model_fields["id"].default)}
        return data

    @model_validator(mode="after")
    def _check_name_and_weight(self) -> MixedEnvSection:
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", self.name):
            raise ValueError(
                f"{self.name!r} cannot be used in the names of metrics and groups; give this "
                "environment a name of letters, digits, - and _, such as name = 'sums'"
            )
        steps = [step for step, _ in self.weight] if isinstance(self.weight, list) else [1]
        if not steps or steps != sorted(set(steps)):
            raise ValueError("weight needs (step, weight) pairs with increasing steps")
        return self


def require_sampler(name: str, stages: list[int]) -> None:
    """Checks the name of a sampler and its stages.

    Raises:
        ValueError: there is no such sampler, or its stages are not in order.
    """
    if name not in ("uniform", "difficulty", "staged") and ":" not in name:
        raise ValueError(
            f"there is no sampler {name!r}; choose 'uniform', 'difficulty' or 'staged', or give "
            "your own function as 'package.module:function' or 'path/to/file.py:function'"
        )
    if stages != sorted(set(stages)):
        raise ValueError(
            f"sampler_stages = {stages} has to be in increasing order, such as [100, 300]"
        )
    if name == "staged" and not stages:
        raise ValueError(
            "sampler = 'staged' needs sampler_stages, the indices of the tasks at which the next "
            "pools begin, such as [100, 300]"
        )


class RolloutSection(Section):
    groups_per_step: Annotated[PositiveInt, DECISIVE] = 8
    """Number of tasks per step."""
    group_size: Annotated[PositiveInt, DECISIVE] = 8
    """Number of trajectories per task; they share a baseline."""
    max_concurrent: PositiveInt = 256
    """Maximum number of episodes in flight."""
    max_turns: PositiveInt = 8
    """Maximum number of turns of an episode; the environment may end it earlier."""
    max_turn_tokens: PositiveInt = 512
    """Maximum number of tokens sampled in one turn."""
    max_context_tokens: PositiveInt = 4096
    """Maximum number of tokens of a trajectory, including prompt and observations. The servers' own
    context holds if it is smaller."""
    stop_strings: list[str] = Field(default_factory=list)
    """Strings that end a turn, such as `["</search>"]`. The turn ends with the first token that
    completes one of them; tokens that the engine sampled after it are dropped."""
    stop_token_ids: list[NonNegativeInt] = Field(default_factory=list)
    """Tokens that end a turn, in addition to the chat template's own. They are not part of the
    turn's text, and the template's own end token follows them."""
    temperature: Annotated[float, Field(gt=0), DECISIVE] = 1.0
    """Sampling temperature, by which the trainer divides its logits, too."""
    top_p: Annotated[float, Field(gt=0, le=1), DECISIVE] = 1.0
    """Sample from the most likely tokens with this total probability. Below 1, and with the next
    two keys, the sampled distribution differs from the trainer's full one, which is refused unless
    `truncated_sampling` is `correct`."""
    top_k: Annotated[int, Field(ge=-1), DECISIVE] = -1
    """Sample from this many of the most likely tokens; -1 for all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1), DECISIVE] = 0.0
    """Do not sample tokens with less than this fraction of the most likely token's probability."""
    truncated_sampling: Literal["refuse", "correct"] = "refuse"
    """`correct`: the trainer computes the same truncated distribution from the token ids that the
    engine reports as kept (`embedded`, or vLLM with --return-sampling-mask). If an engine does not
    report them, the trainer's own log-probabilities are used as the old ones, and a log line says
    what is lost."""
    history: Literal["auto", "append_only", "fork"] = "auto"
    """How later turns are rendered; `auto` follows the chat template's self-test."""
    template: dict[str, JsonValue] = Field(default_factory=dict)
    """Extra variables for the chat template, such as `enable_thinking`."""
    tools: Literal["template", "prompt", "hidden"] = "template"
    """How the model learns of its tools. `template`: from the chat template. `prompt`: from the
    system message, in `hermes` format, for a template that does not show tools. `hidden`: from the
    task's own text."""
    dialect: str = "auto"
    """How the model writes reasoning and tool calls: a name from docs/dialects.md, or `text` for
    neither. `auto` derives it from the chat template; `--dry-run` shows the result."""
    generate: Annotated[str | None, DECISIVE] = None
    """An async function `(task, policy, session)` that plays an episode instead of the driver:
    `package.module:function` or `path/to/file.py:function`; see docs/agents.md."""
    turn_timeout_s: Seconds = 600.0
    """Deadline of one turn's generation."""
    step_timeout_s: Seconds = 60.0
    """Deadline of one environment step, and of reset."""
    episode_timeout_s: Seconds = 1800.0
    """Deadline of a whole episode."""
    max_waves: PositiveInt = 1
    """Maximum number of rounds of play per step. Each further round replaces the groups that
    filters dropped; 1 trains on the remaining groups."""
    keep: Annotated[list[str], Commas] = Field(default_factory=list)
    """Filters that a group has to pass, in this order: `zero_variance`, or your own functions,
    `package.module:function` or `path/to/file.py:function` (docs/mixtures.md). `zero_variance`
    drops groups whose rewards are all equal, because their advantages are zero; with `max_waves` of
    4 or more it is DAPO's dynamic sampling."""
    sampler: Annotated[str, DECISIVE] = "uniform"
    """How tasks are chosen. `uniform` shuffles the split anew each epoch, `difficulty` prefers
    tasks with a pass rate near a target, `staged` opens pools of harder tasks one by one. Or your
    own function, `package.module:function` or `path/to/file.py:function` (docs/mixtures.md)."""
    sampler_target: Annotated[float, Field(gt=0, lt=1), DECISIVE] = 0.5
    """For `difficulty`: tasks with a pass rate near this one are drawn most often."""
    sampler_fresh: Annotated[float, Field(ge=0, le=1), DECISIVE] = 0.25
    """For `difficulty`: fraction of tasks that were never played, as long as there are any."""
    sampler_retired: Annotated[float, Field(ge=0, le=1), DECISIVE] = 0.1
    """Fraction of tasks that are already passed; for `staged`, of tasks from earlier pools."""
    sampler_passed: Annotated[float, Field(gt=0, le=1), DECISIVE] = 0.9
    """Pass rate from which a task, or a pool of tasks, counts as passed."""
    sampler_stages: Annotated[list[PositiveInt], Commas, DECISIVE] = Field(default_factory=list)
    """For `staged`: indices of the tasks at which the second and later pools begin."""
    replay_share: Annotated[float, Field(ge=0, le=1), DECISIVE] = 0.0
    """Number of earlier groups to train on again in each step, as a fraction of `groups_per_step`;
    groups whose rewards differ most are preferred. Needs importance weights (docs/mixtures.md)."""
    replay_max_age: Annotated[PositiveInt, DECISIVE] = 4
    """Steps after which a group is no longer trained on again."""
    max_staleness: NonNegativeInt = 0
    """Maximum number of steps by which the policy that sampled may lag behind the trained one,
    counted from a trajectory's oldest token. 0 alternates between playing and training, 1 plays one
    step ahead while the trainer works, more is asynchronous. Above 0, it needs servers."""
    on_update: Literal["keep", "wait", "abort"] = "keep"
    """What happens to running requests when a server gets new weights. `keep` continues them with
    the new weights, `wait` finishes them first, `abort` cuts them off and resumes them from their
    token ids afterwards."""
    oversample_groups: NonNegativeInt = 0
    """Number of groups in flight beyond what a step needs. A step then takes the first ones that
    are ready, and groups too old for the next step are played again later. Faster, but biased
    towards short episodes. Needs servers."""
    stragglers: tuple[PositiveInt, Seconds] | None = None
    """`[6, 30.0]`: once 6 episodes of a group have ended, the others have 30 s to end, too; then
    they are cancelled and the group is trained without them. Biases training towards short
    episodes. Needs servers."""

    @field_validator("stop_strings", mode="before")
    @classmethod
    def _make_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("keep")
    @classmethod
    def _check_filters(cls, value: list[str]) -> list[str]:
        for name in value:
            if name != "zero_variance" and ":" not in name:
                raise ValueError(
                    f"there is no filter {name!r}; use 'zero_variance', or give your own function "
                    "as 'package.module:function' or 'path/to/file.py:function'"
                )
        return value

    @model_validator(mode="after")
    def _check_sampler(self) -> RolloutSection:
        require_sampler(self.sampler, self.sampler_stages)
        if self.sampler_fresh + self.sampler_retired > 1:
            raise ValueError(
                f"rollout.sampler_fresh = {self.sampler_fresh} and rollout.sampler_retired = "
                f"{self.sampler_retired} add up to more than 1; lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_context(self) -> RolloutSection:
        if self.max_context_tokens < self.max_turn_tokens:
            raise ValueError(
                f"rollout.max_context_tokens = {self.max_context_tokens} is less than "
                f"rollout.max_turn_tokens = {self.max_turn_tokens}, although it includes the "
                "prompt; raise the first or lower the second"
            )
        return self

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @model_validator(mode="after")
    def _check_truncated_sampling(self) -> RolloutSection:
        if self.is_truncated and self.truncated_sampling == "refuse":
            raise ValueError(
                "with top_p < 1, top_k > 0 or min_p > 0, the sampled distribution differs from the "
                "trainer's full one; set top_p = 1, top_k = -1 and min_p = 0, and use temperature "
                "instead, or set rollout.truncated_sampling = 'correct' (docs/precision.md)"
            )
        return self

    @model_validator(mode="after")
    def _check_stragglers(self) -> RolloutSection:
        if self.stragglers is not None and self.stragglers[0] > self.group_size:
            raise ValueError(
                f"rollout.stragglers waits for {self.stragglers[0]} episodes of a group, which is "
                f"more than rollout.group_size = {self.group_size}"
            )
        return self


class AgentRole(Section):
    """A rule for an agent's calls. It applies if all of its patterns match.

    Patterns are regular expressions, which may match anywhere, ignoring case.
    """

    model: str | None = None
    """Pattern for the name of the model that the call requests."""
    system: str | None = None
    """Pattern for the call's system prompt."""
    header: str | None = None
    """Pattern for one of the call's headers, as a line `name: value`."""
    role: Literal["trained", "served"]
    """`trained`: the policy answers and learns from it. `served`: it answers without learning."""
    url: str | None = None
    """An OpenAI-compatible server (`http://host:8000/v1`) that answers these calls instead of the
    policy. They are not turns of the episode, but recorded in its `info`."""
    served_model: str | None = None
    """Model to request from that server; by default the one that the call requests."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the server's API key."""

    @model_validator(mode="after")
    def _check_patterns(self) -> AgentRole:
        if self.url is not None and self.role != "served":
            raise ValueError("url is for calls that are not trained on; set role = 'served'")
        for key in ("model", "system", "header"):
            try:
                re.compile(getattr(self, key) or "")
            except re.error as error:
                raise ValueError(f"{key} is not a regular expression: {error}") from None
        return self


class AgentSection(Section):
    """Your own agent that plays the episodes. Without one, the built-in loop does."""

    run: Annotated[str | None, DECISIVE] = None
    """A function `(task, base_url, api_key) -> answer`, plain or async, as
    `package.module:function` or `path/to/file.py:function`. If it returns a number, that is the
    reward; a string is graded by the environment; None grades the policy's last text."""
    command: Annotated[list[str], DECISIVE] = Field(default_factory=list)
    """A program to run per episode, instead of `run`, such as `["mini", "-t", "{prompt}"]`. It
    finds the model through OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY. `{prompt}`, `{task_id}`, `{base_url}`, `{api_key}`, `{mcp_url}` and
    `{tools_url}` are filled in."""
    answer: Annotated[str, DECISIVE] = "last_line"
    """What to grade as the answer of `command`: `last_line` of its output, `policy` (the policy's
    last text) or `file:PATH`, a file that it wrote (empty if it is missing)."""
    home: str = "private"
    """HOME of `command`. `private`: an empty folder per episode. `shared`: that of this process. Or
    a folder, for example with an agent's settings, of which each episode gets a copy. Containers
    have their own."""
    leave_out_provider_tools: bool = True
    """Ignore tools in a call that the model provider would run (web_search), and log their names;
    false refuses such calls."""
    container: Annotated[str | None, DECISIVE] = None
    """Local Docker image in which to run `command`, one container per episode."""
    network: str | None = None
    """Docker network of those containers; by default one that reaches only the endpoint and this
    machine."""
    memory_mb: PositiveInt = 2048
    """Memory limit of each container in MB, including swap."""
    roles: Annotated[list[AgentRole], DECISIVE] = Field(default_factory=list)
    """Rules for which calls are trained on; the first match decides. Calls without a match are
    trained on, except calls without tools whose system prompt is not used by any call with
    tools."""
    host: str | None = None
    """Address of the endpoint. Every call needs a key, so it need not be loopback. By default
    127.0.0.1, or with `container` this machine's address in the containers' network."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the endpoint; 0 picks a free one."""

    @property
    def is_on(self) -> bool:
        return self.run is not None or bool(self.command)

    @model_validator(mode="after")
    def _check_agent(self) -> AgentSection:
        if self.run is not None and self.command:
            raise ValueError("agent.run and agent.command are both set; remove one")
        if self.container is not None and not self.command:
            raise ValueError("agent.container needs agent.command, the program to run in it")
        if self.answer not in ("last_line", "policy") and not self.answer.startswith("file:"):
            raise ValueError(
                f"agent.answer has to be 'last_line', 'policy' or 'file:PATH', not {self.answer!r}"
            )
        for key in ("answer", "home"):
            # A run directory's copy of the file sets every key, so compare with the default.
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and self.run is not None:
                raise ValueError(f"agent.{key} applies to agent.command only; remove it")
        if self.home != "private" and self.container is not None:
            raise ValueError("agent.home does not apply to agent.container; remove it")
        if self.network is not None and self.container is None:
            raise ValueError("agent.network applies to agent.container, which is not set; set it")
        return self


class InferenceSection(Section):
    backend: Literal["embedded", "vllm", "sglang", "openai"] = "embedded"
    """`embedded`: samples in this process from the trainer's own weights.
    `vllm`, `sglang`: samples token ids over HTTP from servers at `urls`, or started by this run.
    `openai`: any chat server, for `agentrl eval` and `agentrl rollout` only."""
    urls: Annotated[list[str], Commas, Field(default_factory=list)]
    """URLs of the servers, comma-separated, without `/v1`; not for `embedded`. For `sglang`, a URL
    may be that of an sglang-router. If empty, `vllm` and `sglang` start their own servers."""
    model: str = "policy"
    """The servers' name for the model."""
    token: str | None = Field(default=None, repr=False)
    """Bearer token of the servers; for the `openai` backend, by default OPENAI_API_KEY."""
    python: str | None = None
    """Python interpreter with vLLM or SGLang installed, to start servers with. By default
    AGENTRL_VLLM_PYTHON or AGENTRL_SGLANG_PYTHON, or the one in .venv-vllm or .venv-sglang, made by
    `make vllm` or `make sglang`."""
    max_batch_tokens: PositiveInt = 32768
    """For `embedded`: maximum batch size times padded length when sampling. Limits the memory for
    keys and values; `agentrl doctor` says how much that is."""
    num_servers: PositiveInt = 1
    """Number of servers to start if there are no `urls`."""
    args: list[str] = Field(default_factory=list)
    """Further arguments for the servers that this run starts, such as
    `["--gpu-memory-utilization", "0.5"]` for vLLM."""
    startup_timeout_s: Seconds = 600.0
    """Time in which a started server has to become ready."""
    hung_after_s: Seconds = 300.0
    """A started server is restarted if its engine does not answer for this long. It does not answer
    while it loads weights, so raise this if loading takes minutes."""
    retry_for_s: Seconds = 120.0
    """How long a request waits for servers that are down or full."""
    transfer: Literal["file", "nccl", "tensor"] = "file"
    """How new weights reach the servers. `file`: through `weights_dir`, on any machine.
    `nccl`: from the trainer's GPU to the servers' GPUs, which have to be different ones; the
    trainer keeps a copy of the weights in host memory. `tensor`, for SGLang servers with one GPU
    each: in HTTP requests, for servers without access to `weights_dir`."""
    share: Literal["split", "sleep"] = "split"
    """How the trainer and the servers that it starts share a machine's only GPU. `split`: each
    keeps its part of the memory. `sleep`: they take turns. The servers release their memory while
    the trainer learns; while they sample, the trainer keeps only its weights on the GPU and its
    optimizer state in host memory (docs/memory.md)."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: vLLM servers keep the weights of their layers in 8 bits, which halves their memory,
    and round every update themselves (docs/precision.md). Needs `model.dtype = "bfloat16"`, a dense
    model, no adapter, and GPUs with 8-bit matrix products (Ada, Hopper or newer)."""
    weights_dir: Path | None = None
    """Directory for the weight files, which trainer and servers share, on disk or in memory
    (/dev/shm/my-run); by default `weights` in the run directory."""
    sync_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Maximum difference between a server's log-probabilities of a probe and the trainer's after
    an update; if it is exceeded, the run stops. By default 1e-3 with float32 weights and 0.2 with
    bfloat16. With `quantization` it limits the mean difference, by default 0.15."""

    @property
    def has_servers(self) -> bool:
        """True if the run samples from servers, to which it sends its weights."""
        return self.backend in ("vllm", "sglang")

    @model_validator(mode="after")
    def _check_servers(self) -> InferenceSection:
        if self.backend == "openai" and len(self.urls) != 1:
            raise ValueError(
                f"backend 'openai' takes one URL in inference.urls, not {len(self.urls)}; put a "
                "router before several servers"
            )
        if self.share == "sleep" and (not self.has_servers or self.urls or self.transfer == "nccl"):
            raise ValueError(
                "inference.share = 'sleep' is for servers that this run starts on the trainer's "
                "GPU; it needs backend = 'vllm' or 'sglang', no urls, and a transfer other than "
                "'nccl'"
            )
        if self.quantization and self.backend != "vllm":
            raise ValueError(
                f"inference.quantization = {self.quantization!r} works with vLLM servers only; set "
                "inference.backend = 'vllm', or leave it out"
            )
        if self.backend == "embedded" and self.urls:
            raise ValueError(
                "inference.urls is set, but backend 'embedded' does not use servers; set "
                "inference.backend = 'vllm' or 'sglang' (or 'openai', for eval and rollout), or "
                "remove the urls"
            )
        return self


class ParallelSection(Section):
    """Division of work among the ranks that torchrun (or Slurm, or Ray Train) started."""

    data: PositiveInt | None = None
    """Number of data-parallel ranks, or with `context` or `tensor`, of groups of ranks, among which
    a batch's rows are divided. All ranks together hold the shards of every network (FSDP). By
    default it follows from the number of ranks started; a number guards against a different
    launch."""
    context: PositiveInt = 1
    """Number of neighbouring ranks that share a row, each with a slice, for rows too long for one
    device. Each rank then has the activations of `token_budget / context` tokens
    (docs/scaling.md)."""
    tensor: PositiveInt = 1
    """Number of neighbouring ranks that hold a part of every matrix each and compute the same rows
    together, with the plan of the model's family (docs/scaling.md)."""
    expert: PositiveInt = 1
    """Number of ranks among which a mixture's experts are divided; tokens are sent to theirs. A
    multiple of `tensor`, and a divisor of the number of ranks."""
    meeting_s: Seconds = 300.0
    """Time in which all ranks have to connect to each other; otherwise they exit."""
    deadline_s: Seconds = 1800.0
    """If the other ranks wait for a rank for this long, it counts as hung and the run ends."""

    @property
    def of_a_row(self) -> int:
        """Number of ranks that compute the same rows together."""
        return self.context * self.tensor

    @property
    def splits_layers(self) -> bool:
        """Returns whether ranks compute with parts of a layer's weights."""
        return self.tensor > 1 or self.expert > 1

    @model_validator(mode="after")
    def _check_axes(self) -> ParallelSection:
        if self.splits_layers and self.context > 1:
            raise ValueError(
                "train.parallel.context above 1 does not work with tensor or expert above 1; set "
                "context = 1, or both of the others"
            )
        if self.expert > 1 and self.expert % self.tensor:
            raise ValueError(
                f"train.parallel.expert = {self.expert} is no multiple of train.parallel.tensor = "
                f"{self.tensor}, whose ranks hold the same rows; choose a multiple"
            )
        return self


class TrainSection(Section):
    learning_rate: Annotated[float, Field(gt=0), DECISIVE] = 1e-6
    """Peak of the learning-rate schedule."""
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], DECISIVE] = "constant"
    """Schedule after the warm-up, over all optimizer steps of the run."""
    warmup_steps: Annotated[NonNegativeInt, DECISIVE] = 0
    """Optimizer steps of linear warm-up."""
    optimizer: Literal["adamw", "adamw_8bit", "adamw_cpu"] = "adamw"
    """Where and how AdamW stores its two moments. `adamw`: in float32 on the device. `adamw_8bit`:
    in 8 bits, 2 instead of 8 bytes per weight; needs `pip install 'agentrl-gym[8bit]'`.
    `adamw_cpu`: in host memory, together with the float32 weights and gradients; the update runs on
    the CPU and is slower. With several ranks, a layer's weights are then on the device only while
    it computes."""
    weight_decay: Annotated[float, Field(ge=0), DECISIVE] = 0.0
    betas: Annotated[tuple[float, float], DECISIVE] = (0.9, 0.999)
    """AdamW's betas."""
    eps: Annotated[float, Field(gt=0), DECISIVE] = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, Field(gt=0), DECISIVE] = 1.0
    """Gradients with a larger norm are scaled down to it."""
    router_replay: Annotated[bool, DECISIVE] = False
    """Mixtures of experts: route each token to the experts that it went to when it was sampled
    (docs/models.md). Servers that are not started by the run need
    `--enable-return-routed-experts`."""
    router_aux_loss: Annotated[float, Field(ge=0), DECISIVE] = 0.0
    """Mixtures of experts: weight of the model family's load-balancing loss. It is computed per
    micro-batch, so, unlike everything else, it depends on `token_budget`."""
    token_budget: PositiveInt = 8192
    """Tokens per micro-batch on each rank. Affects memory and speed, never the gradient. By
    default, ranks that do not share their GPUs use as many as fit (docs/memory.md)."""
    share_prefixes: bool = True
    """Compute the common beginning of a group's samples, such as the prompt, only once, if the
    model family supports it and it saves time (docs/models.md). Changes the gradient by rounding
    only; set it to false to rule it out as the cause of a problem."""
    num_epochs: Annotated[PositiveInt, DECISIVE] = 1
    """Passes over a batch of rollouts."""
    num_minibatches: Annotated[PositiveInt, DECISIVE] = 1
    """Optimizer steps per pass; groups are split evenly."""
    parallel: ParallelSection = Field(default_factory=ParallelSection)

    @model_validator(mode="after")
    def _check_router_loss(self) -> TrainSection:
        if self.router_aux_loss and self.parallel.context > 1:
            raise ValueError(
                "train.router_aux_loss needs whole rows, but with train.parallel.context above 1 a "
                "rank has only a slice of them; set one of them to its default"
            )
        return self


class RewardSection(Section):
    """Reward functions that the trainer runs. Without any, the environment's reward is used."""

    functions: Annotated[list[str], Commas] = Field(default_factory=list)
    """Names from the reward library (`math`, `f1`, `format`, ...), `package.module:function` or
    `path/to/file.py:function`."""
    weights: Annotated[list[float], Commas] = Field(default_factory=list)
    """Weights of the functions' scores in the reward, one per function; by default 1 each."""
    options: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    """Function name, as in `functions` -> keyword arguments."""
    text: Literal["last_turn", "answer"] = "last_turn"
    """The text to score: the policy's text in its last turn, or the `answer` that the environment
    extracted from it."""
    add_to_environment: bool = False
    """Add to the environment's reward instead of replacing it."""
    deadline_s: Seconds = 60.0
    """Deadline of one call. An answer whose call fails has no reward and is not trained on."""
    max_concurrency: PositiveInt = 64
    """Maximum number of concurrent calls."""

    @model_validator(mode="after")
    def _check_functions(self) -> RewardSection:
        if not self.functions and (self.add_to_environment or self.text != "last_turn"):
            raise ValueError(
                "reward.text and reward.add_to_environment need reward.functions, which is empty; "
                "set it"
            )
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"reward.weights has {len(self.weights)} numbers for {len(self.functions)} "
                "functions"
            )
        if unknown := sorted(set(self.options) - set(self.functions)):
            raise ValueError(
                f"reward.options has {', '.join(unknown)}, but reward.functions does not list it"
            )
        return self


class CriticSection(Section):
    """The critic of objectives with `credit.kind = "gae"` (ppo, vapo). Others do not use one."""

    path: Annotated[str | None, DECISIVE] = None
    """Model that the critic starts from, with a value head of zeros; by default the policy's."""
    learning_rate: Annotated[float, Field(gt=0), DECISIVE] = 1e-5
    """Peak of its learning-rate schedule. Its other optimizer settings are those in `train`."""
    warmup_steps: Annotated[NonNegativeInt, DECISIVE] = 0
    """Number of first steps in which only the critic learns, so that its values are meaningful
    when the policy starts to learn."""


class TeacherSection(Section):
    """The teacher of objectives with `distill.where` (opd): either `path` or `url`."""

    path: Annotated[str | None, DECISIVE] = None
    """Frozen model to load beside the policy, with the policy's tokenizer, dtype and device."""
    url: str | None = None
    """URL of a vLLM or SGLang server with the teacher, without `/v1`."""
    model: str = "teacher"
    """The server's name for the teacher."""
    token: str | None = Field(default=None, repr=False)
    """Bearer token of that server."""


class EvalKeys(Section):
    split: str = "test"
    """Split to evaluate on."""
    num_tasks: PositiveInt = 64
    """Number of tasks, from the start of the split."""
    samples_per_task: PositiveInt = 1
    """Number of trajectories per task, the k of avg@k."""
    max_total_tokens: PositiveInt | None = None
    """Limit of cost: once so many tokens were sampled, or are expected of the episodes that run, no
    further task is begun. `--resume` with a higher limit plays the rest."""
    pass_k: Annotated[list[PositiveInt], Commas] = Field(default_factory=lambda: [1])
    """Values of k for the unbiased pass@k estimates; each at most samples_per_task."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature; 0 is greedy. By default, this and the next five keys are those of the
    model's generation_config.json, if it has one, and a line of the output says so. With the
    `openai` backend, the server's defaults apply."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the most likely tokens with this total probability."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample from this many of the most likely tokens; -1 for all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Do not sample tokens with less than this fraction of the most likely token's probability."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Above 1, tokens that already occur in the prompt or the answer become less likely."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens sampled in one turn; `rollout.max_turn_tokens` if neither this nor
    the model sets it."""
    seed: NonNegativeInt | None = None
    """Seed for sampling; by default `run.seed`, or a server's own random stream."""
    success_threshold: float = 1.0
    """Minimum reward of a trajectory that counts as passed."""

    def sampling(self) -> dict[str, Any]:
        """Returns the sampling parameters that are set, by their names in `SamplingParams`."""
        keys = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"}
        return self.model_dump(include=keys | {"seed"}, exclude_none=True)

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        if max(self.pass_k, default=1) > self.samples_per_task:
            raise ValueError(
                f"pass_k = {self.pass_k} needs samples_per_task >= {max(self.pass_k)}, "
                f"which is {self.samples_per_task}"
            )
        return self


class EvalSet(EvalKeys):
    """`[eval.sets.NAME]`: keys that differ from `[eval]`, and the environment to evaluate in."""

    env: str | None = None
    """Environment, in the form of `env.id`, or the name of an `[[env]]`; by default the run's first
    one."""
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the environment, in addition to `env.config` unless `env` is another one."""


class EvalSection(EvalKeys):
    sets: dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], EvalSet] = Field(default_factory=dict)
    """Several named evaluations during training. Each is a table `[eval.sets.NAME]` with the keys
    that differ from `[eval]`, and `env` and `config` for another environment."""
    red_team: bool = False
    """Play cheaters in the first evaluation, as `agentrl env attack` does: metrics `red_team/...`
    show what each is paid. They give tools commands that write rewards, so tools must run in a
    sandbox."""

    @model_validator(mode="before")
    @classmethod
    def _fill_sets(cls, data: object) -> object:
        sets = data.get("sets") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(sets, dict):
            return data
        rest = {key: value for key, value in data.items() if key not in ("sets", "red_team")}
        return rest | {"sets": {k: rest | v if isinstance(v, dict) else v for k, v in sets.items()}}


class TrackSection(Section):
    sinks: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], Commas] = Field(
        default_factory=list
    )
    """Trackers that get the metrics besides metrics.jsonl; needs
    `pip install 'agentrl-gym[track]'`."""
    project: str = "agentrl"
    """Project name in wandb and trackio."""
    log_trajectories: bool = True
    """Write every trajectory to `trajectories/`."""
    signals: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of a step's groups whose per-token advantages, log-probabilities, weights and masks
    are written to `signals/`, for `agentrl view`; about 10 bytes per trained token."""
