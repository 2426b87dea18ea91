"""The policy as a transformers model: loading and saving it."""

from __future__ import annotations

import contextlib
import fnmatch
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
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from agentrl.errors import ConfigError, first_line
from agentrl.inference.embedded_images import EXACT_FAMILIES, require_exact_images
from agentrl.inference.embedded_lengths import fix_angles
from agentrl.rollout.dialects.choose import template_source
from agentrl.rollout.processor import Processor
from agentrl.sync.adapter import CONFIG_FILE
from agentrl.train import ranks
from agentrl.train.logprobs import decoder_of, head_of, require_exact
from agentrl.train.lora import base_of, is_adapter, merged

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
# Dropout in the backbone; heads for classification and summaries do not run here.
_DROPOUT_KEY = re.compile(r"^(?!classifier|summary).*(dropout|_pdrop$)")


def load_tokenizer(path: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer that can render chats.

    Args:
        path: a local directory, or a name on the Hugging Face hub.
        chat_template: as `model.chat_template`, in place of the model's own.

    Raises:
        ConfigError: nothing there, no tokenizer in it, or a tokenizer without a chat template.
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


def load_processor(path: str, tokenizer: PreTrainedTokenizerBase) -> Processor | None:
    """Returns what turns images into tokens and pixels for a model; None for one of texts alone,
    and, with a warning, where the model's own processor is not to be loaded."""
    config = AutoConfig.from_pretrained(base_of(path) if is_adapter(path) else path)
    if config.model_type not in EXACT_FAMILIES:
        return None
    try:
        processor = stills_only(config).from_pretrained(path)
    except (OSError, ValueError, ImportError, TypeError, AttributeError) as error:
        logger.warning(
            "%s cannot be shown images: its processor is not to be loaded (%s)",
            path,
            first_line(error),
        )
        return None
    processor.tokenizer = tokenizer
    return Processor(processor, config.model_type)


def stills_only(config: PretrainedConfig) -> Any:
    """The family's class of processors without that of videos, which needs torchvision."""
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
) -> PreTrainedModel:
    """Load a causal language model whose forward pass accepts packed rows.

    The model comes in evaluation mode, so old and live log-probs are computed by the same function,
    which is also that of the sampler. Towers for images and sound are frozen. Gradient
    checkpointing is off. An adapter's directory gives its base model with the adapter added into
    the weights.

    Args:
        path: a local directory, or a name on the Hugging Face hub.
        max_tokens: of the longest row that the model will compute (see `fix_angles`).

    Raises:
        ConfigError: nothing there, no tokenizer, or a model the trainer cannot be exact on
            (see `require_supported` and `require_exact`).
    """
    _read_tokenizer(path)
    if (Path(path) / "model").is_dir() or (Path(path) / "adapter_model").is_dir():
        raise ConfigError(
            f"{path} is a checkpoint in shards, which several ranks wrote: `agentrl export {path} "
            "--out DIR` makes a model of it"
        )
    if is_adapter(path):
        base = load_model(base_of(path), dtype=dtype, device=device, max_tokens=max_tokens)
        model = merged(base, path)
        require_exact(model)
        return model
    try:
        config = AutoConfig.from_pretrained(path)
        _require_unquantised(config, path)
        without_dropout(config)
        # The library's types do not know the pair that output_loading_info makes of the result.
        with _bars_for_downloads_only():
            loaded: Any = auto_class(config).from_pretrained(
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
            f"model {path} cannot be loaded ({first_line(error)}); it must hold a config.json of "
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
    fix_angles(model, max_tokens)
    require_exact(model)
    model.processor_files = _processor_files(model, path)  # pyright: ignore
    return model


def _processor_files(model: PreTrainedModel, path: str) -> dict[str, str]:
    """Returns the texts of the files that make a vision-language model's processor, for those who
    save the model, by name."""
    if model.config.model_type not in EXACT_FAMILIES:
        return {}
    names = "processor_config.json", "preprocessor_config.json"
    found = {
        name: cached_file(path, name, _raise_exceptions_for_missing_entries=False) for name in names
    }
    return {name: Path(file).read_text("utf-8") for name, file in found.items() if file}


def empty_model(path: str, max_tokens: int | None = None) -> PreTrainedModel:
    """The modules of `load_model` in float32 around memory that holds no weights, and that takes
    up none until it is written to."""
    config = AutoConfig.from_pretrained(base_of(path) if is_adapter(path) else path)
    without_dropout(config)
    with no_init_weights():
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    model.tie_weights()
    model.eval()
    freeze_all_but_text(model)
    fix_angles(model, max_tokens)
    return model


def load_masters(path: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """The float32 weights that learn where the model computes in a narrower `dtype`, on the host:
    what the files hold, not what is left of it after rounding."""
    if dtype == torch.float32:
        return None
    return load_model(path, dtype=torch.float32, device="cpu")


def auto_class(config: PretrainedConfig) -> Any:
    """A checkpoint with a vision tower is loaded whole, so that it is saved and sent under its own
    names."""
    whole = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM


def freeze_all_but_text(model: PreTrainedModel) -> None:
    """Leave towers for images and sound out of training and updates."""
    text = {id(parameter) for parameter in decoder_of(model).parameters()}
    text |= {id(parameter) for parameter in head_of(model).parameters()}
    for parameter in model.parameters():
        if id(parameter) not in text:
            parameter.requires_grad_(False)


def train_tower(model: PreTrainedModel) -> None:
    """Train what turns images into embeddings as well.

    Raises:
        ConfigError: the model has no tower for images, or none that is known to be exact.
    """
    require_exact_images(model)
    if hasattr(model, "fsdp_logprobs") or ranks.size() > 1:
        raise ConfigError("model.freeze_tower = false trains on one rank only; start one process")
    model.requires_grad_(True)


def freeze_named(model: PreTrainedModel, patterns: list[str]) -> None:
    """Leave parameters out of training whose names match one of the patterns of `model.freeze`.

    Raises:
        ConfigError: a pattern matches none, or nothing is left that learns.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        found = fnmatch.filter(named, pattern)
        if not found:
            learning = [name for name, each in named.items() if each.requires_grad]
            raise ConfigError(
                f"model.freeze names {pattern!r}, which matches no parameter of "
                f"{type(model).__name__}; they have names such as {learning[0]} and {learning[-1]}"
            )
        for name in found:
            named[name].requires_grad_(False)
    if not any(each.requires_grad for each in named.values()):
        raise ConfigError("model.freeze leaves nothing that learns; name fewer parameters")


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
    """Without transformers' progress bars over tensors and files, which stay above a run."""
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
    with _bars_for_downloads_only():
        model.to(dtype=getattr(torch, dtype)).save_pretrained(partial)  # pyright: ignore
    tokenizer.save_pretrained(partial)
    for name, text in getattr(model, "processor_files", {}).items():
        (partial / name).write_text(text, encoding="utf-8")
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
