"""Names other trainers' settings as they are called here: one table for `agentrl import`, for the
pages docs/from_*.md and for the hint that an unknown key gets.

The names on the left are those of the versions that `PEERS` states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of another trainer.

    `agentrl import` takes it if there is `to` or `values`. A `note` says how it differs, and
    without either what to do instead, or why nothing has to be done.
    """

    theirs: str
    to: str | None = None
    """The key here that takes the value as it is."""
    note: str = ""
    also: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keys that are set beside it, unless the value is false, zero or missing."""
    values: Mapping[str, Mapping[str, JsonValue]] = field(default_factory=dict)
    """The keys that each value sets; the value is compared as text, in lower case."""
    needs: str = ""
    """Another setting without which this one has no effect there."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another trainer and its settings."""

    name: str
    version: str
    preset: str
    """The preset from which an imported run file starts."""
    about: str
    """What differs in the whole, as a paragraph of the page."""
    rows: tuple[Row, ...]
    defaults: Mapping[str, JsonValue] = field(default_factory=dict)
    """Its defaults that are neither those of the preset nor of a run file, by the key here."""
    asked: tuple[str, ...] = ()
    """Settings that decide a run and whose defaults are not known here."""
    placement: tuple[str, ...] = ()
    """Patterns of settings that say on which machines, in which pieces and with which memory the
    other trainer computes, which changes no result. A setting with a row is none of them."""


def _one_of(key: str, *names: str, **renamed: str) -> dict[str, dict[str, JsonValue]]:
    """Returns `Row.values` for a key that takes these names, as they are or renamed."""
    here = dict(zip(names, names, strict=True)) | renamed
    return {theirs: {key: mine} for theirs, mine in here.items()}


def _when_on(keys: dict[str, JsonValue]) -> dict[str, dict[str, JsonValue]]:
    """Returns `Row.values` for a flag that sets these keys."""
    return {"true": keys, "false": {}}


_SCHEDULES = _one_of(
    "train.lr_schedule", "constant", "linear", "cosine", constant_with_warmup="constant"
)
_OPTIMIZERS = _one_of(
    "train.optimizer",
    "adamw_8bit",
    adamw="adamw",
    adam="adamw",
    adamw_torch="adamw",
    adamw_torch_fused="adamw",
    adamw_bnb_8bit="adamw_8bit",
    paged_adamw_8bit="adamw_8bit",
)
_DTYPES = _one_of(
    "model.dtype", "bfloat16", "float32", bf16="bfloat16", fp32="float32", auto="bfloat16"
)
_KL_KINDS = _one_of("objective.kl.kind", "k1", "k2", "k3", "low_var_kl", kl="k1", mse="k2")
_IN_LOSS: dict[str, JsonValue] = {"objective.kl.where": "loss"}
_IN_REWARD: dict[str, JsonValue] = {"objective.kl.where": "reward"}
_CORRECTED: dict[str, JsonValue] = {"rollout.truncated_sampling": "correct"}
_ENGINES = _one_of("inference.backend", "vllm", "sglang", hf="embedded")


def _whole_level(key: str) -> dict[str, dict[str, JsonValue]]:
    return {level: {key: level} for level in ("batch", "group", "none")}


TRL = Peer(
    "TRL",
    "TRL 1.16, `GRPOConfig`",
    "trl",
    "TRL counts completions per device and updates; here a step plays `rollout.groups_per_step` "
    "tasks `rollout.group_size` times each, and how it is cut into micro-batches changes no "
    "gradient. "
    "Reward functions run as they are ([rewards](rewards.md#functions-of-other-trainers)).",
    (
        Row("model", "model.path"),
        Row("model_name_or_path", "model.path"),
        Row("reward_weights", "reward.weights"),
        Row("learning_rate", "train.learning_rate"),
        Row("lr_scheduler_type", values=_SCHEDULES),
        Row("warmup_steps", "train.warmup_steps"),
        Row("warmup_ratio", note="set `train.warmup_steps`"),
        Row("weight_decay", "train.weight_decay"),
        Row("adam_beta1", note="with `adam_beta2`: `train.betas`"),
        Row("adam_beta2", note="with `adam_beta1`: `train.betas`"),
        Row("adam_epsilon", "train.eps"),
        Row("max_grad_norm", "train.max_grad_norm"),
        Row("optim", values=_OPTIMIZERS),
        Row("router_aux_loss_coef", "train.router_aux_loss"),
        Row("max_steps", note="`run.num_steps`, which counts batches of rollouts, not updates"),
        Row("num_train_epochs", note="set `run.num_steps`: steps, whatever the number of tasks"),
        Row("num_generations", "rollout.group_size"),
        Row(
            "generation_batch_size",
            note="`rollout.groups_per_step` is this over `num_generations`",
        ),
        Row(
            "per_device_train_batch_size",
            note="times `steps_per_generation`, over `num_generations`: `rollout.groups_per_step`; "
            "the micro-batch is `train.token_budget` and changes no gradient",
        ),
        Row(
            "gradient_accumulation_steps",
            note="`train.num_minibatches` is `steps_per_generation` over this",
        ),
        Row("steps_per_generation", note="`train.num_minibatches`, with the row above"),
        Row("num_processes", note="`agentrl launch RUN.toml --gpus N`, or torchrun"),
        Row("num_iterations", "train.num_epochs"),
        Row("max_completion_length", "rollout.max_turn_tokens", "of one turn"),
        Row(
            "max_prompt_length",
            note="nothing: a prompt is never cut; `rollout.max_context_tokens` limits the whole",
        ),
        Row("max_tool_calling_iterations", note="`rollout.max_turns` is one more"),
        Row("temperature", "rollout.temperature"),
        Row("top_p", "rollout.top_p", "the trainer computes the truncated distribution again"),
        Row("top_k", values={"0": {"rollout.top_k": -1}}, to="rollout.top_k"),
        Row("min_p", "rollout.min_p"),
        Row("repetition_penalty", note="none in training: it would be learned to be undone"),
        Row("chat_template_kwargs", "rollout.template"),
        Row("beta", "objective.kl.coef", also=_IN_LOSS),
        Row(
            "use_bias_correction_kl",
            values={
                "true": {"objective.kl.gradient": "unbiased"},
                "false": {"objective.kl.gradient": "naive"},
            },
            needs="beta",
        ),
        Row("epsilon", "objective.surrogate.low"),
        Row("epsilon_high", "objective.surrogate.high"),
        Row("delta", "objective.surrogate.cap"),
        Row(
            "loss_type",
            values={
                "grpo": {"objective.aggregate.kind": "sequence_token_mean"},
                "dapo": {"objective.aggregate.kind": "token"},
                "bnpo": {"objective.preset": "bnpo"},
                "dr_grpo": {"objective.aggregate.kind": "constant"},
                "cispo": {
                    "objective.surrogate.kind": "cispo",
                    "objective.aggregate.kind": "token",
                },
                "sapo": {
                    "objective.surrogate.kind": "sapo",
                    "objective.aggregate.kind": "sequence_token_mean",
                },
                "vespo": {"objective.surrogate.kind": "vespo", "objective.aggregate.kind": "token"},
            },
        ),
        Row("sapo_temperature_pos", "objective.surrogate.tau_positive"),
        Row("sapo_temperature_neg", "objective.surrogate.tau_negative"),
        Row(
            "importance_sampling_level",
            values=_one_of("objective.ratio.level", "token", "sequence"),
        ),
        Row(
            "scale_rewards",
            values={
                "group": {"objective.scale.kind": "std", "objective.scale.level": "group"},
                "batch": {"objective.scale.kind": "std", "objective.scale.level": "batch"},
                "none": {"objective.scale.kind": "none"},
                "true": {"objective.scale.kind": "std", "objective.scale.level": "group"},
                "false": {"objective.scale.kind": "none"},
            },
        ),
        Row(
            "multi_objective_aggregation",
            values=_one_of(
                "objective.reward.combine",
                "normalize_then_sum",
                sum_then_normalize="sum",
            ),
        ),
        Row(
            "mask_truncated_completions",
            values={"true": {"objective.reward.truncated": "mask"}, "false": {}},
        ),
        Row("entropy_coef", "objective.entropy.coef"),
        Row(
            "top_entropy_quantile",
            note='an entry of `objective.trust` with `kind = "top_entropy"`',
        ),
        Row("off_policy_mask_threshold", note='an entry of `objective.trust`, `kind = "opsm"`'),
        Row(
            "vllm_importance_sampling_correction",
            values={
                "true": {"objective.off_policy.level": "token"},
                "false": {
                    "objective.off_policy.level": "none",
                    "objective.off_policy.high": "none",
                },
            },
        ),
        Row(
            "vllm_importance_sampling_mode",
            values={
                "token_truncate": {"objective.off_policy.level": "token"},
                "token_mask": {
                    "objective.off_policy.level": "token",
                    "objective.off_policy.outside": "zero",
                },
                "sequence_truncate": {"objective.off_policy.level": "sequence_product"},
                "sequence_mask": {
                    "objective.off_policy.level": "sequence_product",
                    "objective.off_policy.outside": "zero",
                },
            },
        ),
        Row("vllm_importance_sampling_clip_max", "objective.off_policy.high"),
        Row("vllm_importance_sampling_clip_min", "objective.off_policy.low"),
        Row("use_vllm", values={"true": {"inference.backend": "vllm"}, "false": {}}),
        Row("vllm_mode", note="a server of your own: `inference.urls`; else the run starts one"),
        Row("vllm_server_base_url", "inference.urls"),
        Row("vllm_gpu_memory_utilization", note="vLLM's own options: `inference.args`"),
        Row("vllm_tensor_parallel_size", note="vLLM's own options: `inference.args`"),
        Row("vllm_max_model_length", note="vLLM's own options: `inference.args`"),
        Row("vllm_server_timeout", "inference.startup_timeout_s"),
        Row(
            "sync_ref_model", note="`model.reference_every`: the reference becomes the policy whole"
        ),
        Row("ref_model_sync_steps", note="`model.reference_every`"),
        Row(
            "bf16",
            note="TRL computes in bfloat16 over float32 weights; here `model.dtype` is of both",
            values={"false": {"model.dtype": "float32"}},
        ),
        Row("use_cpu", note="nothing: the accelerator that is there, or else the CPU"),
        Row("processing_class", note="nothing: the model's own tokenizer"),
        Row("dtype", values=_DTYPES),
        Row("gradient_checkpointing", "model.gradient_checkpointing"),
        Row("torch_compile", "model.compile"),
        Row("load_in_4bit", values={"true": {"model.quantization": "nf4"}, "false": {}}),
        Row("lora_r", "model.lora.rank"),
        Row("lora_alpha", "model.lora.alpha"),
        Row("lora_target_modules", "model.lora.targets"),
        Row("lora_dropout", note="none here: what was sampled is trained without dropout"),
        Row("save_steps", "run.save_every", "in steps, not updates"),
        Row("save_total_limit", "run.keep_checkpoints"),
        Row("eval_steps", "run.eval_every", "in steps, not updates"),
        Row("num_generations_eval", "eval.samples_per_task"),
        Row("output_dir", "run.dir"),
        Row("run_name", "run.name"),
        Row("seed", "run.seed"),
        Row("report_to", note="`track.sinks`: tensorboard, wandb, trackio"),
        Row("project", "track.project"),
        Row("log_completions", note="nothing: every trajectory is kept (`track.log_trajectories`)"),
        Row("logging_steps", note="nothing: every step is a line of metrics.jsonl"),
        Row("remove_unused_columns", note="nothing: an environment decides what a task keeps"),
        Row("use_liger_kernel", note="nothing: logits are never whole"),
        Row("train_dataset", note="an environment: `env.id` and `env.config.source`"),
        Row("reward_funcs", note="`reward.functions`"),
        Row("environment_factory", note="`env.id`, as `trl:module:Class`"),
        Row("shuffle_dataset", note="nothing: always, by `run.seed`"),
        Row("tools", note="methods with `@tool` of an environment"),
        Row("resume_from_checkpoint", note="`agentrl train RUN.toml --resume`"),
    ),
    {"train.lr_schedule": "linear", "run.seed": 42, "rollout.max_turns": 1},
)

VERL = Peer(
    "verl",
    "verl 0.9, `ppo_trainer.yaml`",
    "grpo",
    "verl measures lengths of prompt and response; here a trajectory has turns, and one limit for "
    "all of it. Its reward functions run as they are "
    "([rewards](rewards.md#functions-of-other-trainers)).",
    (
        Row("actor_rollout_ref.model.path", "model.path"),
        Row("data.train_files", note="an environment: `env.id`, `env.config.source`"),
        Row("data.val_files", note="a split of the environment: `eval.split`"),
        Row("data.prompt_key", note="`env.config.input_key`"),
        Row("data.train_batch_size", "rollout.groups_per_step"),
        Row(
            "data.max_prompt_length",
            note="with `data.max_response_length`: `rollout.max_context_tokens`",
        ),
        Row("data.max_response_length", "rollout.max_turn_tokens", "of one turn"),
        Row("data.apply_chat_template_kwargs", "rollout.template"),
        Row("data.truncation", note="nothing: a prompt is never cut"),
        Row("data.shuffle", note="nothing: always, by `run.seed`"),
        Row("data.seed", "run.seed"),
        Row(
            "data.filter_overlong_prompts",
            note="nothing: a prompt without room for a turn is left out and counted",
        ),
        Row("custom_reward_function.path", note="`reward.functions`"),
        Row("custom_reward_function.name", note="`reward.functions`"),
        Row("actor_rollout_ref.rollout.name", values=_ENGINES),
        Row("actor_rollout_ref.rollout.n", "rollout.group_size"),
        Row("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
        Row("actor_rollout_ref.rollout.top_p", "rollout.top_p"),
        Row("actor_rollout_ref.rollout.top_k", "rollout.top_k"),
        Row(
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            note="the server's own options: `inference.args`",
        ),
        Row(
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            note="the server's own options: `inference.args`",
        ),
        Row("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "rollout.max_turns"),
        Row(
            "actor_rollout_ref.rollout.multi_turn.tool_config_path",
            note="methods with `@tool` of an environment",
        ),
        Row(
            "actor_rollout_ref.rollout.multi_turn.format",
            note="nothing: `rollout.dialect` is found from the chat template",
        ),
        Row(
            "actor_rollout_ref.rollout.agent.default_agent_loop",
            note="`agent.run` or `agent.command` ([agents](agents.md))",
        ),
        Row("actor_rollout_ref.rollout.over_sample_rate", note="`rollout.oversample_groups`"),
        Row("actor_rollout_ref.rollout.val_kwargs.temperature", "eval.temperature"),
        Row("actor_rollout_ref.rollout.val_kwargs.top_p", "eval.top_p"),
        Row("actor_rollout_ref.rollout.val_kwargs.top_k", "eval.top_k"),
        Row("actor_rollout_ref.rollout.val_kwargs.n", "eval.samples_per_task"),
        Row("actor_rollout_ref.actor.optim.lr", "train.learning_rate"),
        Row("actor_rollout_ref.actor.optim.lr_warmup_steps", "train.warmup_steps"),
        Row("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", note="set `train.warmup_steps`"),
        Row("actor_rollout_ref.actor.optim.clip_grad", "train.max_grad_norm"),
        Row("actor_rollout_ref.actor.optim.weight_decay", "train.weight_decay"),
        Row("actor_rollout_ref.actor.optim.betas", "train.betas"),
        Row("actor_rollout_ref.actor.optim.lr_scheduler_type", values=_SCHEDULES),
        Row("actor_rollout_ref.actor.grad_clip", "train.max_grad_norm"),
        Row(
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            note="`train.num_minibatches` is `data.train_batch_size` over this",
        ),
        Row("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "train.token_budget"),
        Row(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            note="`train.token_budget`, in tokens; it changes no gradient",
        ),
        Row("actor_rollout_ref.actor.use_dynamic_bsz", note="nothing: always"),
        Row("actor_rollout_ref.actor.ppo_epochs", "train.num_epochs"),
        Row("actor_rollout_ref.actor.clip_ratio", "objective.surrogate.low"),
        Row("actor_rollout_ref.actor.clip_ratio_low", "objective.surrogate.low"),
        Row("actor_rollout_ref.actor.clip_ratio_high", "objective.surrogate.high"),
        Row(
            "actor_rollout_ref.actor.clip_ratio_c",
            "objective.surrogate.cap",
            "verl's default is 3; a run file without it has no cap",
        ),
        Row(
            "actor_rollout_ref.actor.loss_agg_mode",
            values={
                "token-mean": {"objective.aggregate.kind": "token"},
                "seq-mean-token-mean": {"objective.aggregate.kind": "sequence_token_mean"},
                "seq-mean-token-sum": {"objective.aggregate.kind": "sequence_token_sum"},
            },
        ),
        Row(
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            values={"vanilla": {}, "gspo": {"objective.preset": "gspo"}},
        ),
        Row("actor_rollout_ref.actor.entropy_coeff", "objective.entropy.coef"),
        Row(
            "actor_rollout_ref.actor.use_kl_loss",
            values={"true": _IN_LOSS, "false": {}},
        ),
        Row(
            "actor_rollout_ref.actor.kl_loss_coef",
            "objective.kl.coef",
            needs="actor_rollout_ref.actor.use_kl_loss",
        ),
        Row("actor_rollout_ref.actor.kl_loss_type", values=_KL_KINDS),
        Row(
            "actor_rollout_ref.model.enable_gradient_checkpointing", "model.gradient_checkpointing"
        ),
        Row("actor_rollout_ref.model.lora_rank", "model.lora.rank"),
        Row("actor_rollout_ref.model.lora_alpha", "model.lora.alpha"),
        Row("actor_rollout_ref.model.target_modules", "model.lora.targets"),
        Row("actor_rollout_ref.model.use_remove_padding", note="nothing: sequences are packed"),
        Row("model.partial_pretrain", note="supervised training: `agentrl sft`"),
        Row("algorithm.use_kl_in_reward", values={"true": _IN_REWARD, "false": {}}),
        Row("algorithm.kl_ctrl.kl_coef", "objective.kl.coef", needs="algorithm.use_kl_in_reward"),
        Row("algorithm.kl_ctrl.target_kl", "objective.kl.target"),
        Row("algorithm.kl_ctrl.horizon", "objective.kl.horizon"),
        Row("algorithm.kl_ctrl.type", note="adaptive where `objective.kl.target` is set"),
        Row(
            "algorithm.adv_estimator",
            values={
                **_one_of("objective.preset", "grpo", "rloo", "remax", gae="ppo"),
                "reinforce_plus_plus": {"objective.preset": "reinforce_pp"},
                "reinforce_plus_plus_baseline": {"objective.preset": "reinforce_pp_baseline"},
            },
        ),
        Row(
            "algorithm.norm_adv_by_std_in_grpo",
            values={"true": {}, "false": {"objective.scale.kind": "none"}},
        ),
        Row("algorithm.gamma", "objective.credit.gamma", "of PPO (`gae`) and REINFORCE++"),
        Row("algorithm.lam", "objective.credit.lam", "of PPO (`gae`)"),
        Row(
            "algorithm.filter_groups.enable",
            values={"true": {"rollout.keep": ["zero_variance"]}, "false": {}},
        ),
        Row("algorithm.filter_groups.max_num_gen_batches", "rollout.max_waves"),
        Row(
            "algorithm.rollout_correction.rollout_is",
            values=_one_of("objective.off_policy.level", "token", sequence="sequence_product"),
        ),
        Row("algorithm.rollout_correction.rollout_is_threshold", "objective.off_policy.high"),
        Row("algorithm.rollout_correction.rollout_rs", note="entries of `objective.trust`"),
        Row(
            "algorithm.rollout_correction.bypass_mode",
            values={"true": {"objective.ratio.anchor": "rollout"}, "false": {}},
        ),
        Row(
            "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
            note="`objective.reward.overlong`",
        ),
        Row("reward_model.enable", note="a function that asks it, in `reward.functions`"),
        Row("critic.optim.lr", "critic.learning_rate"),
        Row("critic.model.path", "critic.path"),
        Row("trainer.critic_warmup", "critic.warmup_steps"),
        Row("trainer.total_training_steps", "run.num_steps"),
        Row(
            "trainer.total_epochs", note="set `run.num_steps`: steps, whatever the number of tasks"
        ),
        Row("trainer.save_freq", values={"-1": {}}, to="run.save_every"),
        Row("trainer.max_actor_ckpt_to_keep", "run.keep_checkpoints"),
        Row("trainer.test_freq", values={"-1": {"run.eval_every": 0}}, to="run.eval_every"),
        Row("trainer.resume_mode", note="`agentrl train RUN.toml --resume`"),
        Row("trainer.logger", note="`track.sinks`: tensorboard, wandb, trackio"),
        Row("trainer.project_name", "track.project"),
        Row("trainer.experiment_name", "run.name"),
        Row("trainer.default_local_dir", "run.dir"),
        Row("trainer.nnodes", note="`agentrl launch RUN.toml --nodes N` ([scaling](scaling.md))"),
        Row("trainer.n_gpus_per_node", note="`agentrl launch RUN.toml --gpus N`"),
    ),
    {
        "objective.aggregate.kind": "token",
        "objective.surrogate.cap": 3.0,
        "train.weight_decay": 0.01,
        "rollout.max_turns": 1,
    },
    (
        "data.train_batch_size",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.optim.lr",
    ),
    (
        "*.fsdp_config.*",
        "*.megatron.*",
        "*micro_batch_size*",
        "*log_prob_*",
        "*_per_gpu",
        "*.rollout.*parallel*",
        "*.rollout.enable_chunked_prefill",
        "*.rollout.enforce_eager",
        "*.rollout.engine_kwargs.*",
        "*.rollout.free_cache_engine",
        "*.rollout.layered_summon",
        "*.rollout.load_format",
        "*.rollout.max_num_*",
        "*.rollout.mode",
        "*ulysses*",
        "*.model.use_*",
        "*torch_compile",
        "*strategy",
        "data.return_*",
        "ray_kwargs.*",
        "critic.model.enable_gradient_checkpointing",
        "critic.*offload*",
        "trainer.balance_batch",
        "trainer.log_val*",
        "trainer.device",
        "global_profiler.*",
        "*.profiler.*",
        "--config-*",
        "--nnodes",
        "--nproc*",
        "--standalone",
    ),
)

SLIME = Peer(
    "slime",
    "slime 0.3",
    "slime",
    "slime's `--global-batch-size` follows here from groups, samples and minibatches. Its reward "
    "functions run as they are ([rewards](rewards.md#functions-of-other-trainers)).",
    (
        Row("--hf-checkpoint", "model.path"),
        Row("--ref-load", note="`model.reference`, where it is another model than the start"),
        Row("--ref-update-interval", "model.reference_every"),
        Row("--prompt-data", "env.config.source"),
        Row("--input-key", "env.config.input_key"),
        Row("--label-key", "env.config.label_key"),
        Row("--metadata-key", "env.config.metadata_key"),
        Row("--multimodal-keys", note="nothing: a message shows images ([images](images.md))"),
        Row("--rollout-batch-size", "rollout.groups_per_step"),
        Row("--n-samples-per-prompt", "rollout.group_size"),
        Row("--num-steps-per-rollout", "train.num_minibatches"),
        Row(
            "--global-batch-size",
            note="follows: groups x samples / `train.num_minibatches`",
        ),
        Row("--num-rollout", "run.num_steps"),
        Row("--use-dynamic-batch-size", note="nothing: always"),
        Row("--max-tokens-per-gpu", "train.token_budget"),
        Row("--micro-batch-size", note="`train.token_budget`, in tokens; it changes no gradient"),
        Row("--rollout-max-response-len", "rollout.max_turn_tokens", "of one turn"),
        Row("--rollout-max-context-len", "rollout.max_context_tokens"),
        Row("--rollout-temperature", "rollout.temperature"),
        Row("--rollout-top-p", "rollout.top_p"),
        Row("--rollout-top-k", "rollout.top_k"),
        Row("--rollout-stop", "rollout.stop_strings"),
        Row("--rollout-stop-token-ids", "rollout.stop_token_ids"),
        Row("--rollout-seed", "run.seed"),
        Row("--seed", "run.seed"),
        Row("--rollout-shuffle", note="nothing: always, by `run.seed`"),
        Row(
            "--apply-chat-template",
            note='nothing: always; `model.chat_template = "none"` is without',
        ),
        Row("--apply-chat-template-kwargs", "rollout.template"),
        Row("--rm-type", "reward.functions"),
        Row("--custom-rm-path", "reward.functions"),
        Row("--rm-url", "reward.options.remote_rm.url"),
        Row("--group-rm", note="nothing: a function whose first parameter is `samples`"),
        Row("--custom-generate-function-path", "rollout.generate"),
        Row("--rollout-function-path", note="`rollout.generate`, for one episode"),
        Row("--over-sampling-batch-size", note="`rollout.oversample_groups`, beyond a step's"),
        Row(
            "--dynamic-sampling-filter-path",
            "rollout.keep",
            "`check_reward_nonzero_std` is `zero_variance`; with `rollout.max_waves`",
        ),
        Row(
            "--buffer-filter-path",
            note="nothing, `pop_first` neither: groups are trained in the order of dispatch",
        ),
        Row("--custom-reward-post-process-path", "objective.advantage"),
        Row("--custom-advantage-function-path", "objective.advantage"),
        Row("--custom-loss-function-path", "objective.loss"),
        Row(
            "--partial-rollout",
            values=_when_on({"rollout.max_staleness": 1, "rollout.on_update": "keep"}),
        ),
        Row(
            "--mask-offpolicy-in-partial-rollout",
            values=_when_on({"objective.trust": [{"kind": "staleness", "max_gap": 0}]}),
        ),
        Row("--lr", "train.learning_rate"),
        Row("--lr-decay-style", values=_SCHEDULES),
        Row("--weight-decay", "train.weight_decay"),
        Row("--adam-beta1", note="with `--adam-beta2`: `train.betas`"),
        Row("--adam-beta2", note="with `--adam-beta1`: `train.betas`"),
        Row("--attention-dropout", values={"0.0": {}, "0": {}}, note="none here"),
        Row("--hidden-dropout", values={"0.0": {}, "0": {}}, note="none here"),
        Row("--clip-grad", "train.max_grad_norm"),
        Row("--optimizer", values=_OPTIMIZERS),
        Row(
            "--advantage-estimator",
            values={
                **_one_of("objective.preset", "gspo", "ppo", grpo="slime"),
                "reinforce_plus_plus": {"objective.preset": "reinforce_pp"},
                "reinforce_plus_plus_baseline": {"objective.preset": "reinforce_pp_baseline"},
            },
        ),
        Row("--eps-clip", "objective.surrogate.low"),
        Row("--eps-clip-high", "objective.surrogate.high"),
        Row("--eps-clip-c", "objective.surrogate.cap"),
        Row("--use-kl-loss", values=_when_on(_IN_LOSS)),
        Row("--kl-loss-coef", "objective.kl.coef", needs="--use-kl-loss"),
        Row("--kl-loss-type", values=_KL_KINDS),
        Row("--kl-coef", "objective.kl.coef", also=_IN_REWARD),
        Row("--use-unbiased-kl", values=_when_on({"objective.kl.gradient": "unbiased"})),
        Row("--entropy-coef", "objective.entropy.coef"),
        Row(
            "--gamma",
            "objective.credit.gamma",
            "tokens of tools cost no discount here, while slime counts them in REINFORCE++",
        ),
        Row("--lambd", "objective.credit.lam"),
        Row("--value-clip", "objective.critic.value_clip"),
        Row("--num-critic-only-steps", "critic.warmup_steps"),
        Row("--use-critic", values=_when_on({"objective.preset": "ppo"})),
        Row(
            "--normalize-advantages",
            values=_when_on({"objective.whiten.mean": "batch", "objective.whiten.std": "batch"}),
        ),
        Row(
            "--disable-grpo-std-normalization",
            values=_when_on({"objective.scale.kind": "none"}),
        ),
        Row(
            "--calculate-per-token-loss",
            values=_when_on({"objective.aggregate.kind": "token"}),
        ),
        Row("--use-tis", values=_when_on({"objective.off_policy.level": "token"})),
        Row("--tis-clip", "objective.off_policy.high"),
        Row("--tis-clip-low", "objective.off_policy.low"),
        Row(
            "--use-rollout-logprobs",
            values=_when_on({"objective.ratio.anchor": "rollout"}),
        ),
        Row("--use-opsm", note='an entry of `objective.trust`, `kind = "opsm"`'),
        Row("--opsm-delta", note="`max_kl` of that entry"),
        Row("--use-opd", values=_when_on({"objective.preset": "opd"})),
        Row("--opd-teacher-load", "teacher.path"),
        Row("--opd-kl-coef", "objective.distill.coef"),
        Row("--opd-type", note="`teacher.path` loads the teacher, `teacher.url` asks a server"),
        Row("--eval-interval", "run.eval_every"),
        Row("--eval-prompt-data", note="a split of the environment, or `eval.sets`"),
        Row("--n-samples-per-eval-prompt", "eval.samples_per_task"),
        Row("--eval-temperature", "eval.temperature"),
        Row("--eval-top-p", "eval.top_p"),
        Row("--eval-max-response-len", "eval.max_tokens"),
        Row("--loss-type", values={"policy_loss": {}}, note="supervised training: `agentrl sft`"),
        Row("--save", "run.dir"),
        Row("--save-interval", "run.save_every"),
        Row("--load", note="`agentrl train RUN.toml --resume`"),
        Row("--use-wandb", values=_when_on({"track.sinks": ["wandb"]})),
        Row("--use-tensorboard", values=_when_on({"track.sinks": ["tensorboard"]})),
        Row("--wandb-project", "track.project"),
        Row("--sglang-router-ip", note="`inference.urls`"),
        Row("--sglang-router-port", note="`inference.urls`"),
        Row("--rollout-external-engine-addrs", "inference.urls"),
        Row("--update-weight-mode", note="`inference.transfer`"),
        Row("--load-debug-rollout-data", note="`run.replay`"),
        Row("--debug-rollout-only", note="`agentrl rollout RUN.toml`"),
        Row("--actor-num-nodes", note="`agentrl launch` ([scaling](scaling.md))"),
        Row("--actor-num-gpus-per-node", note="`agentrl launch` ([scaling](scaling.md))"),
        Row("--colocate", note='`inference.share = "sleep"`'),
        Row("--critic-num-nodes", note="nothing: the critic is sharded over the policy's ranks"),
        Row("--critic-num-gpus-per-node", note="nothing: as `--critic-num-nodes`"),
    ),
    {"rollout.max_turns": 1, "inference.backend": "sglang"},
    (
        "--rollout-batch-size",
        "--n-samples-per-prompt",
        "--lr",
        "--lr-decay-style",
        "--weight-decay",
        "--rollout-temperature",
    ),
    (
        "--sglang-*",
        "--recompute-*",
        "--*-parallel-size",
        "--sequence-parallel",
        "--attention-softmax-in-fp32",
        "--attention-backend",
        "--accumulate-*",
        "--moe-token-dispatcher-type",
        "--moe-enable-deepep",
        "--decoder-*",
        "--rollout-num-gpus*",
        "--num-gpus*",
        "--optimizer-cpu-*",
        "--overlap-*",
        "--use-precision-*",
        "--balance-data",
        "--update-weight-*",
        "--log-probs-*",
        "--address",
        "--head",
        "--force",
        "--node-ip-address",
        "--disable-usage-stats",
        "--dashboard-*",
        "--runtime-env-json",
        "--wandb-*",
    ),
)

AREAL = Peer(
    "AReaL",
    "AReaL 1.0, a GRPO yaml",
    "areal",
    '`objective.preset = "areal"` is its asynchronous recipe.',
    (
        Row("experiment_name", "run.name"),
        Row("trial_name", note="part of `run.name`"),
        Row("seed", "run.seed"),
        Row("total_train_steps", "run.num_steps"),
        Row("total_train_epochs", note="set `run.num_steps`: steps, whatever the number of tasks"),
        Row("actor.path", "model.path"),
        Row("actor.dtype", values=_DTYPES),
        Row("actor.gradient_checkpointing", "model.gradient_checkpointing"),
        Row("ref.path", note="`model.reference`, where it is another model than the start"),
        Row("train_dataset.path", note="an environment: `env.id`, `env.config.source`"),
        Row("train_dataset.batch_size", "rollout.groups_per_step"),
        Row("train_dataset.shuffle", note="nothing: always, by `run.seed`"),
        Row("gconfig.n_samples", "rollout.group_size"),
        Row("gconfig.max_new_tokens", "rollout.max_turn_tokens", "of one turn"),
        Row("gconfig.min_new_tokens", values={"0": {}}, note="none here"),
        Row("actor.max_new_tokens", note="nothing: `gconfig.max_new_tokens`"),
        Row("train_dataset.max_length", note="nothing: a prompt is never cut"),
        Row("gconfig.temperature", "rollout.temperature"),
        Row("gconfig.top_p", "rollout.top_p"),
        Row(
            "gconfig.greedy",
            note="nothing: episodes of one task are to differ",
            values={"false": {}},
        ),
        Row("rollout.max_concurrent_rollouts", "rollout.max_concurrent"),
        Row("rollout.max_head_offpolicyness", "rollout.max_staleness"),
        Row("actor.temperature", note="nothing: the temperature of sampling"),
        Row("dynamic_filter_fn", "rollout.keep"),
        Row("valid_dataset.path", note="`eval.split`, or `eval.sets`"),
        Row(
            "actor.dynamic_bs",
            values={
                "true": {"rollout.keep": ["zero_variance"], "rollout.max_waves": 1},
                "false": {},
            },
        ),
        Row("actor.ppo_n_minibatches", "train.num_minibatches"),
        Row("actor.mb_spec.max_tokens_per_mb", "train.token_budget"),
        Row("actor.optimizer.type", values=_OPTIMIZERS),
        Row("actor.optimizer.lr", "train.learning_rate"),
        Row("actor.optimizer.weight_decay", "train.weight_decay"),
        Row("actor.optimizer.beta1", note="with `beta2`: `train.betas`"),
        Row("actor.optimizer.beta2", note="with `beta1`: `train.betas`"),
        Row("actor.optimizer.eps", "train.eps"),
        Row("actor.optimizer.gradient_clipping", "train.max_grad_norm"),
        Row("actor.optimizer.lr_scheduler_type", values=_SCHEDULES),
        Row("actor.optimizer.warmup_steps_proportion", note="set `train.warmup_steps`"),
        Row("actor.eps_clip", "objective.surrogate.low"),
        Row("actor.eps_clip_higher", "objective.surrogate.high"),
        Row("actor.c_clip", "objective.surrogate.cap"),
        Row("actor.reward_scaling", "objective.reward.scale"),
        Row("actor.reward_bias", "objective.reward.bias"),
        Row("actor.reward_clip", "objective.reward.clip"),
        Row(
            "actor.importance_sampling_level",
            values=_one_of("objective.ratio.level", "token", "sequence"),
        ),
        Row(
            "actor.reward_norm.mean_level",
            values={
                "group": {"objective.baseline.kind": "mean", "objective.baseline.key": "group"},
                "batch": {"objective.baseline.kind": "mean", "objective.baseline.key": "batch"},
                "none": {"objective.baseline.kind": "none"},
            },
        ),
        Row(
            "actor.reward_norm.std_level",
            values={
                "group": {
                    "objective.scale.kind": "std",
                    "objective.scale.level": "group",
                    "objective.scale.of": "centred",
                },
                "batch": {
                    "objective.scale.kind": "std",
                    "objective.scale.level": "batch",
                    "objective.scale.of": "centred",
                },
                "none": {"objective.scale.kind": "none"},
            },
        ),
        Row(
            "actor.reward_norm.mean_leave1out",
            values={"true": {"objective.baseline.kind": "leave_one_out"}, "false": {}},
        ),
        Row(
            "actor.reward_norm.std_unbiased",
            values={"true": {"objective.scale.ddof": 1}, "false": {"objective.scale.ddof": 0}},
        ),
        Row("actor.reward_norm.eps", "objective.scale.eps"),
        Row("actor.reward_norm.group_size", note="nothing: groups go by their tasks"),
        Row("actor.adv_norm.mean_level", values=_whole_level("objective.whiten.mean")),
        Row("actor.adv_norm.std_level", values=_whole_level("objective.whiten.std")),
        Row(
            "actor.adv_norm.mean_leave1out",
            values={"true": {"objective.whiten.leave_one_out": True}, "false": {}},
        ),
        Row(
            "actor.adv_norm.std_unbiased",
            values={"true": {"objective.whiten.ddof": 1}, "false": {"objective.whiten.ddof": 0}},
        ),
        Row("actor.adv_norm.eps", "objective.whiten.eps"),
        Row(
            "actor.use_decoupled_loss",
            values={"true": {"objective.ratio.anchor": "old"}, "false": {}},
        ),
        Row(
            "actor.rejection_sampling.level",
            values=_one_of("objective.off_policy.level", "token", sequence="sequence_geometric"),
        ),
        Row(
            "actor.rejection_sampling.action",
            values=_one_of("objective.off_policy.outside", "clamp", mask="zero"),
        ),
        Row(
            "actor.rejection_sampling.metric",
            note="an entry of `objective.trust`",
            values={"ratio": {}},
        ),
        Row("actor.rejection_sampling.upper", "objective.off_policy.high"),
        Row("actor.rejection_sampling.lower", "objective.off_policy.low"),
        Row(
            "actor.prox_logp_method",
            values={"recompute": {}, "loglinear": {"objective.ratio.anchor": "loglinear"}},
        ),
        Row("actor.discount", "objective.credit.gamma", "of PPO"),
        Row("actor.gae_lambda", "objective.credit.lam", "of PPO"),
        Row("actor.recompute_logprob", note="nothing: follows from `objective.ratio.anchor`"),
        Row("actor.kl_ctl", "objective.kl.coef", also=_IN_REWARD),
        Row("actor.kl_estimator", values=_KL_KINDS),
        Row("actor.overlong_tokens", note="`objective.reward.overlong`"),
        Row("actor.overlong_reward_penalty", note="`objective.reward.overlong`"),
        Row("actor.use_sapo_loss", values={"true": {"objective.preset": "sapo"}, "false": {}}),
        Row("actor.sapo_tau_pos", "objective.surrogate.tau_positive", needs="actor.use_sapo_loss"),
        Row("actor.sapo_tau_neg", "objective.surrogate.tau_negative", needs="actor.use_sapo_loss"),
        Row("actor.m2_threshold", note='`objective.preset = "m2po"`, `max_second_moment`'),
        Row("actor.use_lora", note="`model.lora`"),
        Row("actor.lora_rank", "model.lora.rank"),
        Row("actor.lora_alpha", "model.lora.alpha"),
        Row("actor.target_modules", "model.lora.targets"),
        Row("actor.weight_update_mode", note="`inference.transfer`"),
        Row(
            "allocation_mode", note="`agentrl launch` and `inference.urls` ([scaling](scaling.md))"
        ),
        Row("cluster.n_nodes", note="`agentrl launch RUN.toml --nodes N`"),
        Row("cluster.n_gpus_per_node", note="`agentrl launch RUN.toml --gpus N`"),
        Row("cluster.fileroot", note="`run.dir`"),
        Row("perf_tracer.enabled", note="`agentrl train RUN.toml --profile 3`"),
        Row("saver.freq_steps", "run.save_every"),
        Row("saver.freq_epochs", note="set `run.save_every`"),
        Row("evaluator.freq_steps", "run.eval_every"),
        Row("evaluator.freq_epochs", note="set `run.eval_every`"),
    ),
    {"rollout.max_turns": 1, "inference.backend": "sglang"},
    (
        "train_dataset.batch_size",
        "gconfig.n_samples",
        "gconfig.temperature",
        "actor.optimizer.lr",
        "actor.optimizer.weight_decay",
        "actor.eps_clip",
    ),
    (
        "*.experiment_name",
        "*.trial_name",
        "*.fileroot",
        "*.backend",
        "*.scheduling_*",
        "*.num_workers",
        "*.pin_memory",
        "*.packing_algorithm",
        "*.dtype",
        "*.init_from_scratch",
        "*.disable_dropout",
        "*.tokenizer_path",
        "*dataset.type",
        "cluster.*",
        "scheduler.*",
        "launcher.*",
        "sglang.*",
        "vllm.*",
        "recover.*",
        "saver.freq_secs",
        "evaluator.freq_secs",
        "stats_logger.*",
        "perf_tracer.*",
        "ref.*",
        "rollout.queue_size",
        "rollout.consumer_batch_size",
        "rollout.enable_rollout_tracing",
        "rollout.dump_to_file",
        "rollout.*timeout*",
        "*_dataset.drop_last",
        "valid_dataset.batch_size",
        "valid_dataset.shuffle",
        "actor.fsdp.*",
        "actor.megatron.*",
        "actor.archon.*",
        "tokenizer_path",
        "enable_offload",
    ),
)

PRIME_RL = Peer(
    "prime-rl",
    "prime-rl 0.8, `rl.toml`",
    "grpo",
    "prime-rl counts rollouts in a batch; here a step has groups. Its loss is its own: the run "
    "file starts from GRPO, and `objective` is yours to choose. Its environments are verifiers' "
    "tasksets: `env.id` is `verifiers:PACKAGE`, or they are written again as an `Environment` "
    "([which](migration.md#verifiers)).",
    (
        Row("max_steps", "run.num_steps"),
        Row("seq_len", "rollout.max_context_tokens"),
        Row("model.name", "model.path"),
        Row("monitors.wandb.project", "track.project"),
        Row("monitors.wandb.name", "run.name"),
        Row("wandb.project", "track.project"),
        Row("wandb.name", "run.name"),
        Row("output_dir", "run.dir"),
        Row("ckpt.interval", "run.save_every"),
        Row("ckpt.keep_last", "run.keep_checkpoints"),
        Row("trainer.optim.type", values=_OPTIMIZERS),
        Row("trainer.optim.lr", "train.learning_rate"),
        Row("trainer.optim.weight_decay", "train.weight_decay"),
        Row("trainer.optim.max_norm", "train.max_grad_norm"),
        Row("trainer.scheduler.type", values=_SCHEDULES),
        Row("trainer.scheduler.warmup_steps", "train.warmup_steps"),
        Row("trainer.model.lora.rank", "model.lora.rank"),
        Row("trainer.model.lora.alpha", "model.lora.alpha"),
        Row("trainer.model.lora.target_modules", "model.lora.targets"),
        Row("resume.step", note="`agentrl train RUN.toml --resume`"),
        Row("trainer.model.ac.freq", values={"1": {"model.gradient_checkpointing": True}}),
        Row("trainer.model.compile", note="`model.compile`"),
        Row("trainer.model.seq_len", note="nothing: `train.token_budget` packs sequences"),
        Row("trainer.loss.type", note="set `objective`, see [algorithms](algorithms.md)"),
        Row(
            "orchestrator.batch_size",
            note="`rollout.groups_per_step` is this over `orchestrator.group_size`",
        ),
        Row("orchestrator.group_size", "rollout.group_size"),
        Row("orchestrator.rollouts_per_example", "rollout.group_size"),
        Row("orchestrator.seq_len", "rollout.max_context_tokens"),
        Row("orchestrator.max_async_level", "rollout.max_staleness"),
        Row("orchestrator.max_off_policy_steps", "rollout.max_staleness"),
        Row("orchestrator.train.sampling.max_completion_tokens", "rollout.max_turn_tokens"),
        Row("orchestrator.train.sampling.temperature", "rollout.temperature"),
        Row("orchestrator.sampling.max_tokens", "rollout.max_turn_tokens"),
        Row("orchestrator.sampling.temperature", "rollout.temperature"),
        Row("orchestrator.train.source", note="`env.id`, as `verifiers:PACKAGE`"),
        Row("orchestrator.eval.source", note="an environment: `eval.sets`"),
        Row("orchestrator.train.env", note="an environment: `env.id`"),
        Row("orchestrator.env", note="an environment: `env.id`"),
        Row("orchestrator.concurrency.max_inflight", "rollout.max_concurrent"),
        Row(
            "orchestrator.algo.type",
            values={
                "grpo": {"objective.scale.kind": "none"},
                **_one_of("objective.preset", "opd", max_rl="maxrl"),
            },
        ),
        Row("orchestrator.algo.teacher.name", note="`teacher.path`, or `teacher.url`"),
        Row("orchestrator.algo.teacher.base_url", "teacher.url"),
        Row("orchestrator.renderer.name", note="nothing: the model's chat template"),
        Row("orchestrator.eval.group_size", "eval.samples_per_task"),
        Row(
            "orchestrator.eval.sampling.max_completion_tokens",
            "eval.max_tokens",
        ),
        Row("orchestrator.eval.sampling.temperature", "eval.temperature"),
        Row("orchestrator.eval.interval", "run.eval_every"),
        Row("orchestrator.eval.num_examples", "eval.num_tasks"),
        Row("orchestrator.eval.rollouts_per_example", "eval.samples_per_task"),
        Row("data.batch_size", note="supervised training: `agentrl sft`"),
        Row("deployment.num_train_gpus", note="`agentrl launch RUN.toml --gpus N`"),
        Row("deployment.num_infer_gpus", note="`inference.num_servers`"),
        Row("inference.model.max_model_len", note="the server's own options: `inference.args`"),
    ),
    {"inference.backend": "vllm"},
    ("trainer.optim.lr", "orchestrator.batch_size"),
    (
        "slurm.*",
        "deployment.*",
        "inference.*",
        "weight_broadcast.*",
        "log.*",
        "env_vars.*",
        "*.env_vars.*",
        "monitors.*",
        "trainer.model.impl",
        "trainer.model.attn",
        "trainer.model.cp*",
        "trainer.model.ep*",
        "trainer.model.ac*",
        "trainer.model.fused_*",
        "trainer.model.*offload*",
        "trainer.dist_*",
        "trainer.ckpt.skip_*",
        "orchestrator.concurrency.*",
    ),
)

PEERS: dict[str, Peer] = {
    "trl": TRL,
    "verl": VERL,
    "slime": SLIME,
    "areal": AREAL,
    "prime-rl": PRIME_RL,
}


def hint_for(name: str) -> str | None:
    """Returns what another trainer's setting is called here, as a hint; None if nobody has it.

    Args:
        name: the last part counts: `rollout.num_generations` asks for `num_generations`.
    """
    leaf = name.rpartition(".")[2].replace("-", "_")
    for peer in PEERS.values():
        for row in peer.rows:
            if row.theirs.rpartition(".")[2].lstrip("-").replace("-", "_") == leaf:
                keys = [row.to] if row.to else list(next(iter(row.values.values()), {}))
                if keys or row.note:
                    here = f"is {keys[0]} here" if keys else f"here: {row.note.replace('`', '')}"
                    return f"{peer.name}'s {row.theirs} {here}"
    return None
