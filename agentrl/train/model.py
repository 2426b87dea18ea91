"""The policy as a transformers model: loading it, and its log-probs on packed rows."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from huggingface_hub import constants as hub
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import enable_progress_bars
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from agentrl.errors import ConfigError
from agentrl.inference.embedded import plain_attention
from agentrl.sync.adapter import CONFIG_FILE
from agentrl.train import context
from agentrl.train.attention import ATTENTION_NAME, SHARED_ATTENTION_NAME, packed_segments
from agentrl.train.head import trained_logprobs
from agentrl.train.lora import base_of, is_adapter, merged
from agentrl.train.plan import MicroBatch, pack
from agentrl.types import Sample

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
# Dropout in the backbone; heads for classification and summaries do not run here.
_PACKED = (SHARED_ATTENTION_NAME, ATTENTION_NAME)
_DROPOUT_KEY = re.compile(r"^(?!classifier|summary).*(dropout|_pdrop$)")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer that can render chats.

    Args:
        path: a local directory, or a name on the Hugging Face hub.

    Raises:
        ConfigError: nothing there, no tokenizer in it, or a tokenizer without a chat template.
    """
    _require_model_files(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {path} has no readable tokenizer ({_first_line(error)}); save one into it "
            "with tokenizer.save_pretrained"
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of model {path} has no chat template; choose an instruction-tuned "
            "model, or add a chat_template.jinja file to its directory"
        )
    return tokenizer


def load_model(path: str, *, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """Load a causal language model whose forward pass accepts packed rows.

    The model comes in evaluation mode, so old and live log-probs are computed by the same function,
    which is also that of the sampler. Towers for images and sound are frozen. Gradient
    checkpointing is off. An adapter's directory gives its base model with the adapter added into
    the weights.

    Args:
        path: a local directory, or a name on the Hugging Face hub.

    Raises:
        ConfigError: nothing there, no chat template, or a model the trainer cannot be exact on
            (see `require_supported` and `require_exact`).
    """
    load_tokenizer(path)
    if (Path(path) / "model").is_dir() or (Path(path) / "adapter_model").is_dir():
        raise ConfigError(
            f"{path} is a checkpoint in shards, which several ranks wrote: `agentrl export {path} "
            "--out DIR` makes a model of it"
        )
    if is_adapter(path):
        model = merged(load_model(base_of(path), dtype=dtype, device=device), path)
        require_exact(model)
        return model
    try:
        config = AutoConfig.from_pretrained(path)
        _require_unquantised(config, path)
        without_dropout(config)
        # The library's types do not know the pair that output_loading_info makes of the result.
        with _bars_for_downloads_only():
            loaded: Any = _auto_class(config).from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if unknown := re.search(r"model type `(.+?)` but Transformers does not", str(error)):
            raise ConfigError(
                f"model {path} is of the family '{unknown[1]}', which the installed transformers "
                "does not know; set model.path to one of docs/models.md, or update transformers"
            ) from error
        raise ConfigError(
            f"model {path} cannot be loaded ({_first_line(error)}); it must hold a config.json of "
            "a causal language model and its safetensors weights"
        ) from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ConfigError(
            f"the weights of model {path} lack {len(missing)} tensors, first {missing[0]}, which "
            "would start at random values; save the model again"
        )
    model.to(torch.device(device))  # pyright: ignore[reportArgumentType, reportCallIssue]
    model.eval()  # as who samples: some routers draw their experts at random in training
    freeze_all_but_text(model)
    require_exact(model)
    return model


def empty_model(path: str) -> PreTrainedModel:
    """The modules of `load_model` in float32 around memory that holds no weights, and that takes
    up none until it is written to."""
    config = AutoConfig.from_pretrained(base_of(path) if is_adapter(path) else path)
    without_dropout(config)
    with no_init_weights():
        model: PreTrainedModel = _auto_class(config).from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    model.tie_weights()
    model.eval()
    freeze_all_but_text(model)
    return model


def load_masters(path: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """The float32 weights that learn where the model computes in a narrower `dtype`, on the host:
    what the files hold, not what is left of it after rounding."""
    if dtype == torch.float32:
        return None
    return load_model(path, dtype=torch.float32, device="cpu")


def _auto_class(config: PretrainedConfig) -> Any:
    """A checkpoint with a vision tower is loaded whole, so that it is saved and sent under its own
    names."""
    whole = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM


def freeze_all_but_text(model: PreTrainedModel) -> None:
    """Leave towers for images and sound out of training and updates."""
    text = {id(parameter) for parameter in decoder_of(model).parameters()}
    text |= {id(parameter) for parameter in _head(model).parameters()}
    for parameter in model.parameters():
        if id(parameter) not in text:
            parameter.requires_grad_(False)


def _require_unquantised(config: PretrainedConfig, path: str) -> None:
    for part in (config, config.get_text_config()):
        if quantised := getattr(part, "quantization_config", None):
            values = quantised if isinstance(quantised, dict) else quantised.to_dict()
            raise ConfigError(
                f"model {path} is quantised ({values.get('quant_method', 'quantization_config')}), "
                "and only float weights can learn; set model.path to its bfloat16 or float32 "
                "checkpoint, or to one that was dequantised and saved without quantization_config"
            )


def without_dropout(config: PretrainedConfig) -> None:
    """Switch off what makes two forward passes differ: the policy that learns must be the policy
    that sampled."""
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{config.model_type} is an encoder-decoder model; choose a family of docs/models.md"
        )
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for key, value in part.to_dict().items():
            if _DROPOUT_KEY.search(key) and isinstance(value, int | float) and value > 0:
                setattr(part, key, 0.0)
                logger.warning("%s: %s = %s is set to 0", part.model_type, key, value)


@contextlib.contextmanager
def _bars_for_downloads_only() -> Iterator[None]:
    """Without transformers' progress bar over tensors, which stays on the screen above a run."""
    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    enable_progress_bars()  # the hub's, which the call above switched off too
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def require_exact(model: PreTrainedModel) -> None:
    """Choose how the model runs on packed rows, by comparing with its own forward pass.

    First as one row that holds a shared prefix once (`agentrl.train.attention`), then as one row;
    where neither is exact, as with recurrent layers that carry their state over the border of two
    segments, one segment after the other.

    Raises:
        ConfigError: the log-probs differ by more than rounding every way.
    """
    problems: dict[str, str] = {}
    for name in (SHARED_ATTENTION_NAME, ATTENTION_NAME, plain_attention(model)):
        try:
            if name in _PACKED and not model._can_set_attn_implementation():
                raise ValueError("its layers attend in ways of their own")
            model.set_attn_implementation(name)
            problem = _inexact(model, share=name == SHARED_ATTENTION_NAME)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            problem = f"cannot run ({_first_line(error)})"
        if problem is None:
            if ATTENTION_NAME in problems and (size := context.current().size) > 1:
                raise ConfigError(
                    f"train.parallel.context = {size} cannot train {type(model).__name__}: over "
                    f"ranks that share a row it {problems[ATTENTION_NAME]}; set it to 1, or "
                    "choose a family whose layers all attend (docs/models.md)"
                )
            if ATTENTION_NAME in problems:
                logger.warning(
                    "%s trains one segment at a time, which is slower than packed rows; as one row "
                    "it %s",
                    type(model).__name__,
                    problems[ATTENTION_NAME],
                )
            return
        problems[name] = problem
    raise ConfigError(
        f"{type(model).__name__} cannot be trained on exactly: on packed rows it "
        f"{problems[ATTENTION_NAME]}, one segment at a time it {problem}; choose a family of "
        "docs/models.md"
    )


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Whether the model is exact on rows in which a shared prefix stands once."""
    return decoder_of(model).config._attn_implementation == SHARED_ATTENTION_NAME


def _inexact(model: PreTrainedModel, *, share: bool) -> str | None:
    """How log-probs of packed segments differ from the family's own; None if by rounding only."""
    vocab_size = _head(model).weight.shape[0]
    # Of two rows that begin alike, the one with the lower next token stands first.
    first, second = (torch.arange(13, 13 + 7919 * n, 7919) % vocab_size for n in (25, 22))
    low, high = sorted({int(first[16]), (int(first[16]) + 1) % vocab_size})
    first[16], second[16:] = low, second[16:].flip(0)
    second[16] = high
    embedded: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        embedded.append(output)

    handle = model.get_input_embeddings().register_forward_hook(keep)
    rows = [_bare_sample(ids.numpy()) for ids in (first, second)]
    micro = pack(rows, [0, 1], share=share)
    logprobs, _ = sample_logprobs(model, micro, temperature=1.0)
    handle.remove()
    # Whatever one segment sees of another, some gradient flows there; nothing is rounded to 0.
    of_second = logprobs[len(first) - 1 :].sum()
    reached = torch.autograd.grad(of_second, embedded, allow_unused=True)
    before = slice(*micro.cu_seqlens[-3:-1].tolist())  # what stands there of the first row alone
    if len(embedded) == 1 and (reached[0] is None or reached[0][:, before].any()):
        return "lets a segment see the one before it"

    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = [
            model(ids[None].to(model.device), use_cache=False)
            .logits[0, :-1]
            .float()
            .log_softmax(-1)
            .gather(1, ids[1:, None].to(model.device))
            .squeeze(1)
            for ids in (first, second)
        ]
    model.set_attn_implementation(implementation or "eager")
    difference = (logprobs.detach() - torch.cat(expected)).abs().mean().item()
    # A 16-bit model's own logits are rounded to about 1/256 of their size.
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    if not difference < tolerance:
        return f"differs from its own forward pass by {difference:.2g}"
    return None


def require_empty(out: Path) -> None:
    """Raises:
    ConfigError: a directory that a model is to be written to holds something.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out} is not empty; remove it or choose another directory")


def merge_adapter(checkpoint: Path, out: Path, *, dtype: str) -> None:
    """Write the model that an adapter and its base model make together.

    Raises:
        ConfigError: `checkpoint` holds no adapter, its base model is not there, or `out` is not
            empty.
    """
    require_empty(out)
    if not is_adapter(str(checkpoint)):
        raise ConfigError(f"{checkpoint} holds no adapter ({CONFIG_FILE}); is it a whole model?")
    model = load_model(str(checkpoint), dtype=torch.float32, device="cpu")
    save_model(model, load_tokenizer(str(checkpoint)), out, dtype)


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, dtype: str
) -> None:
    """Write a model directory that `load_model` reads: whole, or not at all.

    Args:
        out: absent, or an empty directory.
        dtype: of the saved weights, `float32` or `bfloat16`.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(dtype=getattr(torch, dtype)).save_pretrained(partial)  # pyright: ignore
    tokenizer.save_pretrained(partial)
    if out.exists():
        out.rmdir()
    partial.rename(out)


def set_gradient_checkpointing(model: PreTrainedModel, layers: bool | float) -> None:
    """Recompute activations in the backward pass: about a third more time, and activation memory
    that grows with one layer instead of all.

    Args:
        layers: all, none, or the share of the layers that do so, evenly spread.
    """
    if layers:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    found = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for number, module in enumerate(found):
        # It recomputes in training only; what it holds stays as it is.
        module.training = int((number + 1) * layers) > int(number * layers)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The text model without its head, whose last hidden state has been through the final norm."""
    decoder = model.get_decoder()
    if decoder.get_output_embeddings() is not None:  # of Llama 4 it is the model itself
        decoder = decoder.model
    return decoder


def computing_device(model: PreTrainedModel) -> torch.device:
    """Where the model computes, which is not where it is if its shards are in host memory."""
    return getattr(model, "computes_on", model.device)


def backbone_hidden(
    model: PreTrainedModel, micro: MicroBatch, *, router_logits: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Hidden states of every packed position after the final norm: (N, hidden_size).

    Args:
        micro: this rank's part of it (`context.own_part`).
        router_logits: gets those of every layer with experts, (tokens, experts) each.
    """
    decoder = decoder_of(model)
    wanted = {} if router_logits is None else {"output_router_logits": True}
    device = computing_device(model)
    input_ids = torch.from_numpy(micro.input_ids)[None].to(device)
    if decoder.config._attn_implementation not in _PACKED:
        segments = input_ids.split(micro.segment_lengths, dim=1)
        outputs = [decoder(input_ids=ids, use_cache=False, **wanted) for ids in segments]
    else:
        position_ids = torch.from_numpy(micro.position_ids)[None].to(device)
        segments = micro.segment_lengths, micro.branch_ends.tolist(), context.of(model)
        with packed_segments(*segments):
            outputs = [
                decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **wanted)
            ]
    if router_logits is not None:
        router_logits.extend(logits for output in outputs for logits in output.router_logits)
    return torch.cat([output.last_hidden_state[0] for output in outputs])


def sample_logprobs(
    model: PreTrainedModel,
    micro: MicroBatch,
    *,
    temperature: float,
    with_entropy: bool = False,
    router_logits: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of a micro-batch's trained tokens under the model, on the model's device.

    Args:
        temperature: the one the tokens were sampled with.
        router_logits: see `backbone_hidden`.

    Returns:
        logprobs (Q,) float32 and, if asked for, the entropy (Q,) float32 in nats; both with
        gradients unless under `torch.no_grad()`.
    """
    compute = getattr(model, "fsdp_logprobs", functools.partial(logprobs_and_routing, model))
    logprobs, entropy, routing = compute(
        micro, temperature, with_entropy=with_entropy, with_routing=router_logits is not None
    )
    if router_logits is not None:
        router_logits.extend(routing)
    return logprobs, entropy


def logprobs_and_routing(
    model: PreTrainedModel,
    micro: MicroBatch,
    temperature: float,
    *,
    with_entropy: bool,
    with_routing: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """What `sample_logprobs` returns, and the router logits if they are asked for. All of it is
    returned: of what stands in an argument a sharded model sees copies."""
    router_logits: list[torch.Tensor] | None = [] if with_routing else None
    head = _head(model)
    factor, cap = _logit_factor_and_cap(model.config.get_text_config())
    together = context.of(model)
    whole, micro = micro, context.own_part(micro, together)
    hidden = backbone_hidden(model, micro, router_logits=router_logits)
    kept = None
    if micro.kept is not None:
        ids, starts = torch.from_numpy(micro.kept.ids), torch.from_numpy(micro.kept.starts)
        kept = ids.to(hidden.device), starts.to(hidden.device)
    logprobs, entropy = trained_logprobs(
        hidden[torch.from_numpy(micro.trained_index).to(hidden.device)],
        head.weight,
        torch.from_numpy(micro.targets).to(hidden.device),
        bias=head.bias,
        temperature=temperature / factor,
        softcap=None if cap is None else cap / temperature,
        with_entropy=with_entropy,
        kept=kept,
    )
    logprobs = context.of_all(whole, logprobs, together)
    entropy = None if entropy is None else context.of_all(whole, entropy, together)
    return logprobs, entropy, router_logits or []


@torch.no_grad()
def recomputed_logprobs(
    model: PreTrainedModel, prompt_ids: list[int], token_ids: list[int], temperature: float
) -> list[float]:
    """What the trainer computes for sampled tokens: log softmax(logits / temperature) of each.

    Its own path from packed rows to log-probs, in the model's dtype.
    """
    row = _bare_sample(np.array(prompt_ids + token_ids, np.int32))
    logprobs, _ = sample_logprobs(model, pack([row], [0]), temperature=temperature)
    return logprobs[len(prompt_ids) - 1 :].tolist()


def trained_matrix(micro: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Values (Q,) of trained tokens as a matrix (num_rows, max_trained), padded with 0."""
    matrix = values.new_zeros(micro.num_rows, micro.max_trained)
    index = (torch.from_numpy(micro.row_of), torch.from_numpy(micro.column_of))
    return matrix.index_put(tuple(part.to(values.device) for part in index), values)


def _head(model: PreTrainedModel) -> torch.nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(
            f"{type(model).__name__} has no linear language-model head; choose a causal language "
            "model such as Qwen3 or Llama"
        )
    return head


def _logit_factor_and_cap(config: PretrainedConfig) -> tuple[float, float | None]:
    """What the family multiplies its logits with after the head, and where it caps them then."""
    factor = getattr(config, "logit_scale", None)  # Cohere
    if factor is None:
        factor = getattr(config, "lm_head_multiplier", None)  # Falcon-H1
    if factor is None:
        factor = getattr(config, "logits_scaling", 1.0)  # HyperCLOVA X; Granite divides by it
        if config.model_type.startswith("granite"):
            factor = 1.0 / factor
        elif config.model_type == "minicpm3":
            factor = config.dim_model_base / config.hidden_size
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return factor, cap or getattr(config, "logits_soft_cap", None)  # RecurrentGemma


def _bare_sample(token_ids: np.ndarray) -> Sample:
    """Every token after the first is trained; nothing else is known."""
    return Sample(
        token_ids=token_ids,
        loss_mask=(np.arange(len(token_ids)) > 0).astype(np.uint8),
        rollout_logprobs=np.zeros(len(token_ids), np.float32),
        policy_versions=np.zeros(len(token_ids), np.int32),
        turn_ids=np.zeros(len(token_ids), np.int32),
        trajectory_id="",
        group_id="",
        reward=0.0,
        turn_rewards=np.zeros(1, np.float32),
    )


def _require_model_files(path: str) -> None:
    directory = Path(path)
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"model directory {path} has no config.json; is it a model?")
    elif path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(
            f"model directory {path} does not exist; give an existing directory or a Hugging Face "
            "name such as Qwen/Qwen3-0.6B"
        )
    elif try_to_load_from_cache(path, "config.json") is None:
        # The hub's own client repeats for a minute what a machine without a network cannot do.
        try:
            httpx.head(hub.ENDPOINT, timeout=HUB_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"model.path = '{path}' is no directory here, and the Hugging Face hub, where it "
                f"could be a name, cannot be reached ({error or type(error).__name__})"
            ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
