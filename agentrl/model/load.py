"""Loads, freezes and saves transformers models and their tokenizers."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from huggingface_hub import constants as hub
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import enable_progress_bars
from safetensors import SafetensorError
from torch.distributed.fsdp import FSDPModule
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PROCESSOR_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from agentrl.config import ParallelSection
from agentrl.errors import ConfigError, first_line
from agentrl.model import context, mesh, ranks, sharding
from agentrl.model.adapter_files import CONFIG_FILE
from agentrl.model.lengths import fix_angles, longest_row
from agentrl.model.logprobs import decoder_of, head_of, logit_shape, require_exact
from agentrl.model.lora import base_of, is_adapter, merged
from agentrl.model.tensors import set_dtype
from agentrl.model.text.processor import Processor
from agentrl.model.text.template import template_source
from agentrl.model.towers import EXACT_FAMILIES, require_exact_images

logger = logging.getLogger(__name__)

# transformers 5.24: Llama 4 with its vision tower reads this of its decoder's output.
MoeCausalLMOutputWithPast.image_outputs = None  # pyright: ignore[reportAttributeAccessIssue]

HUB_TIMEOUT_S = 10.0
# Dropout in the backbone; heads for classification and summaries do not run here.
_DROPOUT_KEY = re.compile(r"^(?!classifier|summary).*(dropout|_pdrop$)")


def load_tokenizer(path: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Loads a tokenizer that can render chats.

    Args:
        path: a local directory, or a name on the Hugging Face hub.
        chat_template: replaces the model's own, as `model.chat_template` does.

    Raises:
        ConfigError: there is no model, it has no tokenizer, or the tokenizer has no chat template.
    """
    tokenizer = _read_tokenizer(path)
    if chat_template is not None:
        tokenizer.chat_template = template_source(chat_template)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of model {path} has no chat template; choose an instruction-tuned "
            "model, name a Jinja file with model.chat_template, or set it to none for prompts "
            "without a template"
        )
    return tokenizer


def _read_tokenizer(path: str) -> PreTrainedTokenizerBase:
    _require_model_files(path)
    if Path(path).is_dir() and not any(
        file.name.startswith(("tokenizer", "vocab", "tekken")) or file.suffix in (".model", ".spm")
        for file in Path(path).iterdir()
    ):
        raise ConfigError(
            f"model directory {path} has no tokenizer; save one into it with "
            "tokenizer.save_pretrained"
        )
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {path} has no readable tokenizer ({first_line(error)}); save one into it "
            "with tokenizer.save_pretrained"
        ) from error


def model_config(path: str) -> PretrainedConfig:
    """Reads the configuration of a model, or of the base model of an adapter."""
    return AutoConfig.from_pretrained(base_of(path) if is_adapter(path) else path)


def require_context(path: str, max_tokens: int) -> None:
    """Checks that a model was made for rows of this many tokens.

    Raises:
        ConfigError: it was made for fewer.
    """
    limit = longest_row(model_config(path))
    if limit is not None and max_tokens > limit:
        raise ConfigError(
            f"rollout.max_context_tokens = {max_tokens}, but the model at {path} was made for "
            f"{limit} tokens; set rollout.max_context_tokens to {limit} or less"
        )


def identity_of(path: str) -> str:
    """Returns a text that is equal for equal models, wherever they lie: a name on the hub as it is,
    and for a directory a hash of its configuration and of the end of each file of weights."""
    if not Path(path).is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        if file.suffix == ".safetensors" or file.name in ("config.json", CONFIG_FILE):
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as opened:
                opened.seek(max(0, size - 2**20))
                digest.update(opened.read())
    return f"sha256 {digest.hexdigest()[:16]}"


def load_processor(path: str, tokenizer: PreTrainedTokenizerBase) -> Processor | None:
    """Loads the processor that turns images into tokens and pixels for a model.

    Returns None for a model that only reads text, and, with a warning, for a model whose processor
    cannot be loaded.
    """
    config = model_config(path)
    if config.model_type not in EXACT_FAMILIES:
        return None
    try:
        processor = stills_only(config).from_pretrained(path)
    except (OSError, ValueError, ImportError, TypeError, AttributeError) as error:
        logger.warning(
            "%s cannot be shown images: its processor cannot be loaded (%s)",
            path,
            first_line(error),
        )
        return None
    processor.tokenizer = tokenizer
    return Processor(processor, config.model_type)


def stills_only(config: PretrainedConfig) -> Any:
    """Returns the family's processor class without its video processor, which needs torchvision."""
    family: Any = PROCESSOR_MAPPING[type(config)]
    parts = [name for name in family.get_attributes() if "video" not in name]
    own = {"get_attributes": classmethod(lambda cls: parts)}
    return type(family.__name__, (family,), own)


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    max_tokens: int | None = None,
    parallel: ParallelSection | None = None,
) -> PreTrainedModel:
    """Loads a causal language model whose forward pass accepts packed rows.

    The model is in evaluation mode, so that sampler, old log-probs and live log-probs all compute
    the same function. Towers for images and sound are frozen, and gradient checkpointing is off.
    The directory of an adapter gives its base model with the adapter merged into the weights.

    Args:
        path: a local directory, or a name on the Hugging Face hub.
        dtype: dtype of weights and activations.
        max_tokens: tokens of the longest row that the model will compute (see `fix_angles`).
        parallel: loads this rank's part in float32, if there are several ranks; every rank calls
            it. Divided layers are ready to compute, in `dtype`; all else is in host memory, to be
            prepared and then passed to `agentrl.model.sharding.shard`.

    Raises:
        ConfigError: there is no model, it has no tokenizer, it is sharded, quantised or incomplete,
            or the trainer cannot compute it exactly (see `require_exact`).
    """
    _read_tokenizer(path)
    if (Path(path) / "model").is_dir() or (Path(path) / "adapter_model").is_dir():
        raise ConfigError(
            f"{path} is a checkpoint in shards, which several ranks wrote; turn it into a model "
            f"with `agentrl export {path} --out DIR`"
        )
    if ranks.size() == 1:
        parallel = None
    in_rows = parallel is not None and not parallel.splits_layers
    form = _form_of(path, max_tokens) if in_rows else None
    with ranks.failing_together() if in_rows else contextlib.nullcontext():
        model = _read(path, dtype=dtype, device=torch.device(device), parallel=parallel)
    model.eval()  # as the sampler does: in training mode some routers draw experts at random
    freeze_all_but_text(model)
    fix_angles(model, max_tokens)
    if form is None:
        require_exact(model)
    else:
        attention, experts, factor, cap = form
        model.set_attn_implementation(attention)
        model.set_experts_implementation(experts)
        model.logit_shape = factor, cap  # pyright: ignore[reportArgumentType]
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.reshard()  # without a backward pass the last layers would stay whole
    return model


def _read(
    path: str, *, dtype: torch.dtype, device: torch.device, parallel: ParallelSection | None
) -> PreTrainedModel:
    """Reads a model's weights, see `load_model`."""
    _require_model_files(path)
    in_rows = parallel is not None and not parallel.splits_layers
    if is_adapter(path) and (parallel is None or in_rows):
        base = _read(base_of(path), dtype=dtype, device=device, parallel=parallel)
        return merged(base, path)
    with _errors_in_words(path):
        config = model_config(path)
        _require_unquantised(config, path)
        without_dropout(config)
        family, arguments = auto_class(config), {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_bars_for_downloads_only())
            if in_rows:
                family = family._model_mapping[type(config)]
                family = stack.enter_context(sharding.reading_rows(family))
            elif parallel is not None:
                family, arguments = mesh.divided(
                    family._model_mapping[type(config)],
                    config,
                    path,
                    parallel,
                    dtype=dtype,
                    device=device,
                )
            # The library's types do not know the pair that output_loading_info makes of the result.
            loaded: Any = family.from_pretrained(
                path,
                config=config,
                dtype=dtype if parallel is None else torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
                **arguments,
            )
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ConfigError(
            f"the weights of model {path} lack {len(missing)} tensors, first {missing[0]}, which "
            "would start at random values; save the model again"
        )
    if parallel is None:
        model.to(device)  # pyright: ignore[reportArgumentType, reportCallIssue]
    elif in_rows:
        sharding.set_rows_aside(model)
    else:
        sharding.finish(model, dtype=dtype, device=device)
    model.processor_files = _processor_files(model, path)  # pyright: ignore
    return model


@contextlib.contextmanager
def _errors_in_words(path: str) -> Iterator[None]:
    """Turns what transformers raises about a model into a ConfigError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if unknown := re.search(r"model type `(.+?)` but Transformers does not", str(error)):
            raise ConfigError(
                f"model {path} is of the family '{unknown[1]}', which the installed transformers "
                "does not know; set model.path to one of docs/models.md, or update transformers"
            ) from error
        raise ConfigError(
            f"model {path} cannot be loaded ({first_line(error)}); it must hold a config.json of "
            "a causal language model and its safetensors weights"
        ) from error


def _processor_files(model: PreTrainedModel, path: str) -> dict[str, str]:
    """Returns the configuration files of a vision-language model's processor, name -> text, which
    `save_model` writes; empty for other models."""
    if model.config.model_type not in EXACT_FAMILIES:
        return {}
    names = "processor_config.json", "preprocessor_config.json"
    found = {
        name: cached_file(path, name, _raise_exceptions_for_missing_entries=False) for name in names
    }
    return {name: Path(file).read_text("utf-8") for name, file in found.items() if file}


def _form_of(path: str, max_tokens: int | None) -> Any:
    """Proves on rank 0, before weights are read, that a model can be computed exactly
    (`require_exact`). Every rank calls it.

    Returns:
        Its implementations of attention and experts, and its `logit_shape`.
    """
    form: Any = None
    with ranks.failing_together():
        if ranks.rank() == 0:
            with _errors_in_words(path):
                model = _stand_in(path, max_tokens)
            require_exact(model)
            config: Any = model.config
            form = [config._attn_implementation, config._experts_implementation]
            form += logit_shape(model)
    return ranks.share(form)


@torch.no_grad()
def _stand_in(path: str, max_tokens: int | None) -> PreTrainedModel:
    """Builds a model of the same configuration in float32, with random weights that all layers
    share. So it takes the memory of one layer, the embedding and the head, and computes as the
    model does."""
    config = model_config(path)
    _require_unquantised(config, path)
    without_dropout(config)
    if context.current().size > 1:
        context.require_position_free(config)
    with torch.device("meta"), meta_device_safe_creation_ops():
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    drawn: dict[object, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for prefix, module in model.named_modules():
            for name, empty in module._parameters.items():
                if empty is None:
                    continue
                # A tied parameter stays tied; others are those of the first layer.
                place = re.sub(r"\.\d+\.", ".", f"{prefix}.{name}", count=1), empty.shape
                if (drawn_before := drawn.get(empty, drawn.get(place))) is None:
                    drawn_before = _drawn(empty)
                drawn[empty] = drawn[place] = module._parameters[name] = drawn_before
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
        model.initialize_weights()  # buffers, vectors and scalars as the family begins with them
        for vector in {each for each in drawn.values() if each.ndim < 2}:
            vector.add_(torch.randn_like(vector), alpha=0.1)  # so that no gate is closed
    model.eval()
    fix_angles(model, max_tokens)
    return model


def _drawn(empty: torch.Tensor) -> torch.nn.Parameter:
    """Returns a frozen parameter of the shape of `empty`, drawn at random if it is a matrix."""
    values = torch.empty_like(empty, device="cpu")
    parameter: Any = torch.nn.Parameter(values, requires_grad=False)
    if values.ndim > 1:
        parameter.normal_(std=values.shape[-1] ** -0.5)
        parameter._is_hf_initialized = True
    return parameter


def resolve_device(device: str) -> torch.device:
    """Returns the torch device; `auto` is the GPU if there is one, else the CPU.

    Raises:
        ConfigError: `device` is `cuda`, but torch sees no GPU.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "model.device = 'cuda', but torch sees no GPU; install a CUDA build of torch, or set "
            "model.device = 'cpu'"
        )
    return torch.device(device)


def resolve_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a `model.dtype`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_masters(path: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """Loads float32 master weights into host memory, exactly as the files hold them.

    None if the model computes in float32 and so needs no masters.
    """
    if dtype == torch.float32:
        return None
    return load_model(path, dtype=torch.float32, device="cpu")


def auto_class(config: PretrainedConfig) -> Any:
    """Returns the transformers class that loads a model. One with a vision tower is loaded whole,
    so that its weights keep their names when they are saved or sent."""
    whole = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM


def freeze_all_but_text(model: PreTrainedModel) -> None:
    """Freezes everything but the decoder and the head: towers for images and sound."""
    text = {id(parameter) for parameter in decoder_of(model).parameters()}
    text |= {id(parameter) for parameter in head_of(model).parameters()}
    for parameter in model.parameters():
        if id(parameter) not in text:
            parameter.requires_grad_(False)


def train_tower(model: PreTrainedModel) -> None:
    """Unfreezes the whole model, with the tower that turns images into embeddings.

    Raises:
        ConfigError: the model has no tower for images, its family is not known to be exact on
            images, or there are several ranks.
    """
    require_exact_images(model)
    if hasattr(model, "fsdp_logprobs") or ranks.size() > 1:
        raise ConfigError("model.freeze_tower = false trains on one rank only; start one process")
    model.requires_grad_(True)


def freeze_named(model: PreTrainedModel, patterns: list[str]) -> None:
    """Freezes the parameters whose names match a pattern of `model.freeze`.

    Raises:
        ConfigError: a pattern matches no parameter, or no trainable parameter is left.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        found = fnmatch.filter(named, pattern)
        if not found:
            learning = [name for name, each in named.items() if each.requires_grad]
            raise ConfigError(
                f"model.freeze names {pattern!r}, which matches no parameter of "
                f"{type(model).__name__}; its parameters have names such as {learning[0]} and "
                f"{learning[-1]}"
            )
        for name in found:
            named[name].requires_grad_(False)
    if not any(each.requires_grad for each in named.values()):
        raise ConfigError("model.freeze leaves nothing to train; name fewer parameters")


def _require_unquantised(config: PretrainedConfig, path: str) -> None:
    for part in (config, config.get_text_config()):
        if quantised := getattr(part, "quantization_config", None):
            values = quantised if isinstance(quantised, dict) else quantised.to_dict()
            raise ConfigError(
                f"model {path} is quantised ({values.get('quant_method', 'quantization_config')}), "
                "and only float weights can be trained; set model.path to its bfloat16 or float32 "
                "checkpoint, or dequantise it and save it without quantization_config"
            )


def without_dropout(config: PretrainedConfig) -> None:
    """Sets all dropout to 0, so that the policy that learns is the policy that sampled.

    Raises:
        ConfigError: the model is an encoder-decoder.
    """
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
    """Hides transformers' progress bars over tensors and files, but not those of downloads."""
    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    enable_progress_bars()  # the hub's, which the call above switched off too
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def require_empty(out: Path) -> None:
    """Checks that a model can be written to a directory.

    Raises:
        ConfigError: the directory is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out} is not empty; remove it or choose another directory")


def merge_adapter(checkpoint: Path, out: Path, *, dtype: str) -> None:
    """Merges an adapter into its base model and writes the whole model.

    Args:
        checkpoint: directory of the adapter.
        dtype: see `save_model`.

    Raises:
        ConfigError: `checkpoint` holds no adapter, its base model is missing, or `out` is not
            empty.
    """
    require_empty(out)
    if not is_adapter(str(checkpoint)):
        raise ConfigError(
            f"{checkpoint} holds neither shards nor an adapter ({CONFIG_FILE}): if it is a whole "
            "model, use it as it is"
        )
    model = load_model(str(checkpoint), dtype=torch.float32, device="cpu")
    save_model(model, load_tokenizer(str(checkpoint)), out, dtype)


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, dtype: str
) -> None:
    """Writes a model directory that `load_model` reads, completely or not at all.

    The model itself is cast to `dtype`.

    Args:
        out: a path that does not exist, or an empty directory.
        dtype: dtype of the saved weights, `float32` or `bfloat16`.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(dtype=getattr(torch, dtype))  # pyright: ignore[reportCallIssue, reportArgumentType]
    set_dtype(model.config, getattr(torch, dtype))
    with _bars_for_downloads_only():
        model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for name, text in getattr(model, "processor_files", {}).items():
        (partial / name).write_text(text, encoding="utf-8")
    if out.exists():
        out.rmdir()
    partial.rename(out)


def set_gradient_checkpointing(model: PreTrainedModel, layers: bool | float) -> None:
    """Makes layers recompute their activations in the backward pass.

    With all layers a step takes about a third more time, and of the activations only the layers'
    inputs and those of one layer at a time are in memory.

    Args:
        layers: True for all layers, False for none, or the share of them to recompute, spread
            evenly.
    """
    if layers:
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.activation_checkpointing_disable()
    found = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for number, module in enumerate(found):
        # A layer recomputes in training mode only; its submodules stay in evaluation mode.
        module.training = int((number + 1) * layers) > int(number * layers)


def _require_model_files(path: str) -> None:
    directory = Path(path)
    if directory.is_dir():
        if not (directory / "config.json").is_file() and not is_adapter(path):
            raise ConfigError(f"model directory {path} has no config.json; is it a model?")
    elif path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(
            f"model directory {path} does not exist; give an existing directory or a Hugging Face "
            "name such as Qwen/Qwen3-0.6B"
        )
    elif try_to_load_from_cache(path, "config.json") is None:
        # Without a network the hub's own client would retry for a minute.
        try:
            httpx.head(hub.ENDPOINT, timeout=HUB_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"model.path = '{path}' is not a directory here, and the Hugging Face hub, where "
                f"it could be a name, cannot be reached ({error or type(error).__name__})"
            ) from error
