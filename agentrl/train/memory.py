"""Estimates the memory that training takes on its device, before any weight is loaded.

The model is built on torch's meta device, where tensors have shapes but no contents: its parameters
are counted, and one forward pass counts the activations that autograd would keep. A step needs the
memory of its largest moment (`moments_of_a_step`), which is a sum of parts. For P parameters, T of
them trained, N tokens of a micro-batch and a vocabulary of V:

    weights        P in model.dtype, and with bfloat16 also float32 masters of T. Once more for the
                   reference of a KL term, and for a critic. Several ranks hold float32 shards only
    gradients      T in float32
    moments        AdamW's two moments of T: 8 bytes with adamw, 2 with adamw_8bit
    activations    kept by autograd for N tokens, or a rank's slice of them with
                   train.parallel.context; only the input of a layer that is recomputed
    logits         chunks of the head, kept and in progress, and the gradient of its weight
    gathered       weights that ranks gather from their shards, and gradients that they sum

The weights include a vision tower, which is trained with `model.freeze_tower = false`. All N tokens
are assumed to be placeholders of images. Autograd keeps the pixels and the inputs and outputs of
the layers of a trained tower, and nothing of a frozen one.

Updates, pushes and restores need less, because gradients or activations do not exist then. Not
counted: workspace of kernels, fragmentation, CUDA's context (together about a GiB), and a server or
an embedded engine on the same device.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.config import RunConfig
from agentrl.model.attention import ATTENTION_NAME, packed_segments
from agentrl.model.head import default_chunk_tokens, default_keep_bytes
from agentrl.model.load import auto_class
from agentrl.model.logprobs import decoder_of, head_of
from agentrl.model.quantised import BYTES_OF_A_WEIGHT

logger = logging.getLogger(__name__)

BUDGET_STEP = 1024
MAX_TOKEN_BUDGET = 65536
"""Tokens per rank. More would not make kernels faster, and the data that ranks exchange once per
micro-batch is already small beside the work on it."""
USABLE = 0.9
"""Share of a device's memory that the estimate may fill; the rest is for what it leaves out."""
ASLEEP = 2 * 2**30
"""Bytes that a sleeping server keeps for its context, graphs and buffers of libraries."""
# Enough tokens that constant parts are small beside those that grow with the tokens.
_TOKENS_COUNTED = 512


@dataclass(slots=True, frozen=True)
class Memory:
    """Bytes on one device at a moment of a step, by their use."""

    weights: int
    gradients: int
    moments: int
    activations: int
    logits: int
    gathered: int
    when: str = "the forward pass"

    @property
    def parts(self) -> dict[str, int]:
        """Returns the bytes of each part, by name."""
        return {name: value for name, value in asdict(self).items() if name != "when"}

    @property
    def total(self) -> int:
        """Returns the bytes of all parts together."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = (f"{name} {value / 2**30:.2f}" for name, value in self.parts.items() if value)
        return f"{self.total / 2**30:.2f} GiB in {self.when} ({', '.join(parts)})"


def estimate(config: RunConfig, *, device_type: str, num_ranks: int | None = None) -> Memory:
    """Estimates the memory that a run takes on the device of each rank, at its largest moment.

    Args:
        device_type: `cuda` or `cpu`.
        num_ranks: ranks that share weights, gradients and moments; None takes `train.parallel`,
            one rank if that is not set.

    Raises:
        OSError, ValueError: the model's configuration cannot be read.
        NotImplementedError, RuntimeError: its layers use an operation that the meta device lacks,
            as some mixtures of experts do.
    """
    itemsize = 4 if config.model.dtype == "float32" else 2
    model = _on_meta(config).eval()
    parallel = config.train.parallel
    num_ranks = num_ranks or (parallel.data or 1) * parallel.of_a_row
    moments = moments_of_a_step(model, config, itemsize, device_type, num_ranks)
    return max(moments, key=lambda moment: moment.total)


def _on_meta(config: RunConfig) -> PreTrainedModel:
    model_config = AutoConfig.from_pretrained(config.model.path)
    dtype = getattr(torch, config.model.dtype)
    with torch.device("meta"):
        return auto_class(model_config).from_config(model_config, dtype=dtype)


def moments_of_a_step(
    model: PreTrainedModel, config: RunConfig, itemsize: int, device_type: str, num_ranks: int
) -> list[Memory]:
    """Returns the memory at each of the moments of a step that may be the largest.

    Args:
        model: a model on the meta device, as `estimate` builds it.
        itemsize: bytes of a number in `model.dtype`.
    """
    text: PretrainedConfig = model.config.get_text_config()
    whole_row = max(config.train.token_budget, config.rollout.max_context_tokens)
    tokens = -(-whole_row // config.train.parallel.context)  # those that one rank holds
    vocabulary, hidden = text.vocab_size, text.hidden_size
    decoder = decoder_of(model)
    parameters, of_decoder = _numel(model), _numel(decoder)
    linear = [m for m in decoder.modules() if isinstance(m, torch.nn.Linear)]
    rank = config.model.lora.rank
    adapter = sum(rank * (m.in_features + m.out_features) for m in linear)
    text_modules = {*decoder.modules(), head_of(model)}
    tower = [m for m in model.modules() if m not in text_modules]
    still = sum(p.numel() for m in tower for p in m.parameters(recurse=False))
    still *= config.model.freeze_tower
    trained = adapter or parameters - still
    parameters += adapter
    if config.objective.needs_critic:  # a decoder without head and adapter
        parameters, trained = parameters + of_decoder, trained + of_decoder
    frozen = 0
    if "ref_logprobs" in config.objective.needs() and (not rank or config.model.reference):
        frozen = _numel(model)
    on_device = config.train.optimizer != "adamw_cpu"
    if num_ranks > 1:
        weights = 4 * (parameters + frozen) // num_ranks if on_device else 0
    else:
        masters = 4 * trained if itemsize < 4 and on_device else 0
        saved = _saved_by_quantising(config, decoder, config.model.quantization)
        weights = (parameters + frozen) * itemsize + masters - saved
    bytes_of_moments = {"adamw": 8, "adamw_8bit": 2, "adamw_cpu": 0}[config.train.optimizer]
    always = {
        "weights": weights,
        "gradients": 4 * trained // num_ranks if on_device else 0,
        "moments": bytes_of_moments * trained // num_ranks,
    }

    if rank:  # a frozen layer keeps its input only for the adapter beside it
        model.requires_grad_(False)
        for each in linear:
            each.requires_grad_(True)
    by_layer, outside = kept_bytes(model, _TOKENS_COUNTED)
    again = _share_recomputed(by_layer, config.model.gradient_checkpointing)
    inputs = _TOKENS_COUNTED * hidden * itemsize
    kept = outside + sum(by_layer) - sum(again) + inputs * len(again)
    states = tokens * hidden * itemsize
    activations = kept * tokens // _TOKENS_COUNTED + 2 * states  # gathered before the head
    if not config.model.freeze_tower:
        activations += tokens * kept_bytes_of_images(model.config, tower, itemsize)
    widest = max((max(m.in_features, m.out_features) for m in linear), default=hidden)
    layer = max(again, default=0) * tokens // _TOKENS_COUNTED + tokens * widest * itemsize + states

    # In the worst case every token predicts a trained one.
    chunk = min(tokens, default_chunk_tokens(vocabulary, device_type)) * vocabulary
    softmax = min(tokens * vocabulary * itemsize, default_keep_bytes(device_type))
    head = vocabulary * hidden
    cast = head * itemsize if itemsize < 4 else 0  # of the head's complete float32 gradient
    under_way = (4 + 3 * itemsize) * chunk
    of_head = under_way if rank else 4 * head + max(cast, under_way)
    tied = head_of(model).weight is model.get_input_embeddings().get_parameter("weight")
    waiting = head * itemsize if tied and not rank else 0

    layers = [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
    of_a_layer = max(map(_numel, layers), default=0)
    root = _numel(model) - sum(map(_numel, layers))  # embedding and head, gathered all the time
    gathered = itemsize * (root + of_a_layer) if num_ranks > 1 else 0

    def moment(when: str, activations: int, logits: int, gathered: int) -> Memory:
        return Memory(
            **always, activations=activations, logits=logits, gathered=gathered, when=when
        )

    found = [
        moment("the head's forward pass", activations, softmax + 3 * 4 * chunk, gathered),
        moment("the head's backward pass", activations, softmax + of_head + 2 * states, gathered),
        moment("a layer's backward pass", activations + layer, waiting, gathered),
    ]
    if num_ranks > 1 and not rank:
        added_up = 4 * (root - still) * (num_ranks + 1) // num_ranks + itemsize * head
        found.append(moment("the sum of the ranks' gradients", 0, 0, added_up))
    return found


def kept_bytes_of_images(
    config: PretrainedConfig, tower: Sequence[torch.nn.Module], itemsize: int
) -> int:
    """Returns the bytes that autograd keeps of a trained tower for each placeholder in a row.

    Args:
        tower: modules of the model that belong neither to its decoder nor to its head.
        itemsize: bytes of a number in the tower.
    """
    vision: Any = getattr(config, "vision_config", None)
    if vision is None:
        return 0
    merged = getattr(vision, "spatial_merge_size", getattr(config, "spatial_merge_size", 1))
    side = getattr(config, "scale_factor", merged / getattr(config, "downsample_ratio", 1))
    values = max(m.weight[0].numel() for m in tower if isinstance(m, _CONVOLUTIONS))
    linear = [m for m in tower if isinstance(m, torch.nn.Linear)]
    features = sum(m.in_features + m.out_features for m in linear)
    norms = [m.get_parameter("weight") for m in tower if "Norm" in type(m).__name__]
    features += 2 * sum(weight.numel() for weight in norms)  # their inputs and outputs
    return round(side * side * (values + features) * itemsize)


_CONVOLUTIONS = (torch.nn.Conv2d, torch.nn.Conv3d)


def _numel(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def kept_bytes(model: PreTrainedModel, num_tokens: int) -> tuple[list[int], int]:
    """Counts the bytes that autograd keeps of a decoder's forward pass over `num_tokens` tokens.

    Returns:
        The bytes kept in each layer, and those kept outside of layers.
    """
    decoder = decoder_of(model)
    model.set_attn_implementation(ATTENTION_NAME)
    layers = [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
    kept = [0] * (len(layers) + 1)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}  # holds storages, so that no address is used twice
    inside = [len(layers)]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and storage._cdata not in seen:
            seen[storage._cdata] = storage
            kept[inside[-1]] += storage.nbytes()
        return tensor

    handles = []
    for number, layer in enumerate(layers):
        enter = lambda *_, number=number: inside.append(number)  # noqa: E731
        leave = lambda *_: (inside.pop(), None)[1]  # noqa: E731
        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave))
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=model.device)
    with (
        packed_segments([num_tokens]),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        decoder(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    for handle in handles:
        handle.remove()
    return kept[:-1], kept[-1]


def chooses_token_budget(config: RunConfig, device_type: str) -> bool:
    """Tells whether the run chooses its own token budget.

    It does if the run file sets none and the GPU's free memory is for training alone: no engine,
    server or teacher will come onto it.
    """
    inference = config.inference
    starts_server = inference.has_servers and not inference.urls
    shared = inference.backend == "embedded" or (starts_server and inference.transfer != "nccl")
    given = "token_budget" in config.train.model_fields_set
    return device_type == "cuda" and not (given or shared or config.teacher.path)


def with_token_budget(config: RunConfig, num_tokens: int) -> RunConfig:
    """Returns the configuration with another `train.token_budget`."""
    train = config.train.model_copy(update={"token_budget": num_tokens})
    return config.model_copy(update={"train": train})


def fitting_token_budget(
    config: RunConfig, free_bytes: int, *, device_type: str, num_ranks: int
) -> int:
    """Returns the largest token budget with which training fits into a device's free memory.

    It is a multiple of `BUDGET_STEP`, at least one longest row, and at most `MAX_TOKEN_BUDGET` per
    rank that shares a row. If the model cannot be estimated, it is the configuration's.

    Args:
        free_bytes: free memory of the device before the model is loaded.
    """
    ranks_of_a_row = config.train.parallel.context
    smallest = -(-config.rollout.max_context_tokens // BUDGET_STEP)
    largest = max(smallest, MAX_TOKEN_BUDGET * ranks_of_a_row // BUDGET_STEP)

    def too_large(steps: int) -> bool:
        tried = with_token_budget(config, steps * BUDGET_STEP)
        needed = estimate(tried, device_type=device_type, num_ranks=num_ranks)
        return needed.total > USABLE * free_bytes

    try:
        first = bisect_left(range(smallest, largest + 1), True, key=too_large)
    except (NotImplementedError, OSError, RuntimeError, ValueError):
        logger.info("train.token_budget: the model's layers cannot be counted without weights")
        return config.train.token_budget
    return BUDGET_STEP * (smallest + max(first - 1, 0))


def room_for_training(config: RunConfig, there: int) -> float:
    """Returns the bytes of a device that training may take: `USABLE` of its memory, less the memory
    that sleeping servers keep.

    Args:
        there: bytes of the device.
    """
    asleep = ASLEEP * config.inference.num_servers if config.inference.share == "sleep" else 0
    return USABLE * there - asleep


def share_for_servers(config: RunConfig, there: int, *, device_type: str) -> float:
    """Returns the share of a device's memory that training leaves to each server on it.

    The estimate and a tenth for contexts and fragmentation are subtracted; at least 0.05 is left.
    For servers that sleep while the trainer learns, only the policy's weights are subtracted. A
    third if the model cannot be estimated.

    Args:
        there: bytes of the device.
    """
    try:
        if config.inference.share == "sleep":
            needed = bytes_of_weights(config, config.model.quantization)
        else:
            needed = estimate(config, device_type=device_type, num_ranks=1).total
    except (NotImplementedError, OSError, RuntimeError, ValueError):
        logger.warning("training cannot be estimated, so servers get a third of the memory")
        return 0.33
    left = (USABLE - needed / there) / config.inference.num_servers
    return max(0.05, int(100 * left) / 100)


def bytes_of_weights(config: RunConfig, quantization: str | None) -> int:
    """Returns the bytes of the model's weights in `model.dtype` or quantised, without masters.

    Raises:
        OSError, ValueError, NotImplementedError, RuntimeError: see `estimate`.
    """
    model = _on_meta(config)
    whole = _numel(model) * (4 if config.model.dtype == "float32" else 2)
    return whole - _saved_by_quantising(config, decoder_of(model), quantization)


def _saved_by_quantising(
    config: RunConfig, decoder: torch.nn.Module, quantization: str | None
) -> int:
    if quantization is None:
        return 0
    linear = [m.weight.numel() for m in decoder.modules() if isinstance(m, torch.nn.Linear)]
    itemsize = 4 if config.model.dtype == "float32" else 2
    kept = {"nf4": BYTES_OF_A_WEIGHT, "fp8": 1}[quantization]
    # One matrix at a time is unquantised: to multiply by it, or while a server rounds it.
    return int(sum(linear) * (itemsize - kept)) - itemsize * max(linear, default=0)


def share_in_arguments(arguments: Sequence[str], flag: str) -> float | None:
    """Returns the number that follows `flag` in a server's arguments; None if there is none."""
    words = " ".join(arguments).replace("=", " ").split()
    if flag not in words[:-1]:
        return None
    try:
        return float(words[words.index(flag) + 1])
    except ValueError:
        return None


def device_memory(device_type: str) -> int:
    """Returns the bytes of the GPU that trains, or of host memory for another device."""
    if device_type == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def remedies(
    config: RunConfig, *, device_type: str, num_ranks: int
) -> Iterator[tuple[str, Memory]]:
    """Yields settings that reduce a run's memory, the cheapest first, each with its estimate.

    Each setting is added to those before it. Settings that would not help are left out: with
    checkpointing, for example, bfloat16 weights take more beside their masters than they save.
    """
    smallest = estimate(config, device_type=device_type, num_ranks=num_ranks)
    model, train = config.model, config.train
    longest, lora = config.rollout.max_context_tokens, model.lora.model_copy(update={"rank": 32})
    parallel = train.parallel.model_copy(update={"context": 8})
    recomputes, on_host = model.gradient_checkpointing is True, train.optimizer == "adamw_cpu"
    longer, spread = train.token_budget > longest, train.parallel.context >= 8
    fewer_bits = model.quantization is None and num_ranks == 1
    steps: list[tuple[str, dict[str, Any], bool]] = [
        ("model.dtype = 'bfloat16'", {"dtype": "bfloat16"}, model.dtype == "float32"),
        ("model.gradient_checkpointing = true", {"gradient_checkpointing": True}, not recomputes),
        (f"train.token_budget = {longest}", {"token_budget": longest}, longer),
        ("train.optimizer = 'adamw_cpu'", {"optimizer": "adamw_cpu"}, not on_host),
        ("model.lora.rank = 32", {"lora": lora}, not model.lora.rank),
        ("model.quantization = 'nf4'", {"quantization": "nf4"}, fewer_bits),
        ("train.parallel.context = 8 on 8 devices", {"parallel": parallel}, not spread),
    ]
    for setting, update, helps in steps:
        if helps and (config.model.lora.rank or "quantization" not in update):
            section = setting.partition(".")[0]
            changed = getattr(config, section).model_copy(update=update)
            tried = config.model_copy(update={section: changed})
            needed = estimate(tried, device_type=device_type, num_ranks=num_ranks)
            if needed.total < smallest.total:
                config, smallest = tried, needed
                yield setting, needed


def _share_recomputed(by_layer: list[int], share: bool | float) -> list[int]:
    """Returns the kept bytes of the layers that `set_gradient_checkpointing` would recompute."""
    return [
        kept
        for number, kept in enumerate(by_layer)
        if int((number + 1) * share) > int(number * share)
    ]
