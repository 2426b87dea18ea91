"""Computes a model's log-probs on packed rows, and checks them against its own forward pass."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentrl.errors import ConfigError, first_line
from agentrl.model import context
from agentrl.model.attention import ATTENTION_NAME, SHARED_ATTENTION_NAME, packed_segments
from agentrl.model.cache import plain_attention
from agentrl.model.head import trained_logprobs
from agentrl.model.lengths import within_reach
from agentrl.model.routes import force
from agentrl.model.rows import MicroBatch, pack
from agentrl.model.towers import DecoderInputs, Towers, joined
from agentrl.types import Sample

logger = logging.getLogger(__name__)

PACKED = (SHARED_ATTENTION_NAME, ATTENTION_NAME)
"""Attention implementations that compute several segments as one row."""


def require_exact(model: PreTrainedModel) -> None:
    """Chooses how the model runs on packed rows: the fastest way that agrees with its own forward
    pass.

    The ways are, in this order: one row that holds a shared prefix once
    (`agentrl.model.attention`); one row; one segment after another. The last is for models such as
    those with recurrent layers, which carry their state from one segment into the next.

    Raises:
        ConfigError: the log-probs differ by more than rounding in all of them.
    """
    _require_exact_experts(model)
    problems: dict[str, str] = {}
    for name in (SHARED_ATTENTION_NAME, ATTENTION_NAME, plain_attention(model)):
        try:
            if name in PACKED and not model._can_set_attn_implementation():
                raise ValueError("its layers attend in ways of their own")
            if name in PACKED and hasattr(model.config.get_text_config(), "compress_rates"):
                raise ValueError("its layers make one key of several tokens, of any segment")
            logit_shape(model)  # measured once, with an attention that all families have
            model.set_attn_implementation(name)
            with within_reach(model):
                problem = _inexact(model, share=name == SHARED_ATTENTION_NAME)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            problem = f"cannot run ({first_line(error)})"
        if problem is None:
            if ATTENTION_NAME in problems and (size := context.current().size) > 1:
                raise ConfigError(
                    f"train.parallel.context = {size} cannot train {type(model).__name__}: split "
                    f"over several ranks, it {problems[ATTENTION_NAME]}; set it to 1, or "
                    "choose a family whose layers all attend (docs/models.md)"
                )
            if ATTENTION_NAME in problems:
                logger.warning(
                    "%s trains one segment at a time, which is slower than packed rows, because as "
                    "one row it %s",
                    type(model).__name__,
                    problems[ATTENTION_NAME],
                )
            elif SHARED_ATTENTION_NAME in problems:
                logger.warning(
                    "%s computes a prefix that samples of a group share once for each sample, "
                    "because with a shared prefix it %s",
                    type(model).__name__,
                    problems[SHARED_ATTENTION_NAME],
                )
            return
        problems[name] = problem
    raise ConfigError(
        f"{type(model).__name__} cannot be trained exactly: on packed rows it "
        f"{problems[ATTENTION_NAME]}, and one segment at a time it {problem}; choose a family of "
        "docs/models.md"
    )


def _require_exact_experts(model: PreTrainedModel) -> None:
    """Has a mixture computed by one grouped product of all experts if that agrees with a loop over
    the experts, which is some times slower; else by the loop.

    Experts that are divided over ranks have no loop: tokens are sent to them in groups.
    """
    divided = any(isinstance(each, DTensor) for each in model.parameters())
    if divided or not model._can_set_experts_implementation():
        return
    ids = _probe_ids(model)[0][None].to(model.device)

    def logprobs_by(implementation: str) -> torch.Tensor:
        model.set_experts_implementation(implementation)
        with torch.no_grad(), within_reach(model):
            return model(ids, use_cache=False).logits.float().log_softmax(-1)

    expected = logprobs_by("eager")
    try:
        difference = (logprobs_by("grouped_mm") - expected).abs().mean().item()
        if difference < tolerance(model.dtype):
            return
        problem = f"it differs from a loop over the experts by {difference:.2g}"
    except (ImportError, RuntimeError, ValueError) as error:
        problem = f"it cannot run ({first_line(error)})"
    model.set_experts_implementation("eager")
    logger.warning(
        "%s computes one expert after another, which is slower than a grouped product, because %s",
        type(model).__name__,
        problem,
    )


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Tells whether the model runs on rows that hold a shared prefix once (`require_exact`)."""
    return packing_of(model) == 2


def packing_of(model: PreTrainedModel) -> int:
    """Returns how the model runs on packed rows: 2 for one row that holds shared prefixes once, 1
    for one row, 0 for one segment at a time."""
    implementation = decoder_of(model).config._attn_implementation
    return {SHARED_ATTENTION_NAME: 2, ATTENTION_NAME: 1}.get(str(implementation), 0)


def _inexact(model: PreTrainedModel, *, share: bool) -> str | None:
    """Compares the model on packed rows with its own forward pass.

    Returns:
        A predicate that completes "it ..." with the difference; None if they agree up to rounding.
    """
    first, second = _probe_ids(model)
    embedded: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        embedded.append(output.requires_grad_())

    handle = model.get_input_embeddings().register_forward_hook(keep)
    micro = probe_rows(model, share=share)
    logprobs, _ = sample_logprobs(model, micro, temperature=1.0)
    handle.remove()
    # If a segment sees anything of another, a gradient flows there, and none is rounded to 0.
    of_second = logprobs[len(first) - 1 :].sum()
    reached = torch.autograd.grad(of_second, embedded, allow_unused=True)
    before = slice(*micro.cu_seqlens[-3:-1].tolist())  # positions that only the first row has
    if len(embedded) == 1 and (reached[0] is None or reached[0][:, before].any()):
        return "lets a segment see the one before it"

    sharded = hasattr(model, "fsdp_logprobs")  # its weights are float32, whatever computes
    computes_in: Any = model.config.dtype if sharded else model.dtype
    rounding = tolerance(computes_in)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ends_otherwise = torch.cat([first[:16], first[16:].flip(0)])
    expected = []
    with torch.no_grad():
        for ids in (first, second, ends_otherwise):
            ids = ids.to(model.device)
            logits = model(ids[None], use_cache=False).logits[0, :-1].float()
            expected.append(logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1))
    model.set_attn_implementation(implementation or "eager")
    leaked = (expected.pop()[:15] - expected[0][:15]).abs().mean().item()
    if not leaked < rounding:
        return f"lets a token see later ones (log-probs differ by {leaked:.2g})"
    difference = (logprobs.detach() - torch.cat(expected)).abs().mean().item()
    if not difference < rounding:
        return f"differs from its own forward pass by {difference:.2g}"
    return None


def tolerance(dtype: torch.dtype) -> float:
    """Returns the largest mean difference between log-probs, in nats, that counts as rounding. The
    logits of a 16-bit model are rounded to about 1/256 of their size."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.1


def probe_rows(model: PreTrainedModel, *, share: bool | None = None) -> MicroBatch:
    """Packs two short rows that begin alike. Every token that has a predecessor is trained.

    Args:
        model: the model or its decoder, whose vocabulary the rows use.
        share: hold the common beginning once; None does as the model runs.
    """
    share = shares_prefixes(model) if share is None else share
    rows = [_bare_sample(ids.numpy()) for ids in _probe_ids(model)]
    return pack(rows, [0, 1], share=share)


def _probe_ids(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    embedding: Any = model.get_input_embeddings()
    vocab_size = embedding.weight.shape[0]
    # `pack` puts the row with the lower next token first.
    first, second = (torch.arange(13, 13 + 7919 * n, 7919) % vocab_size for n in (25, 22))
    low, high = sorted({int(first[16]), (int(first[16]) + 1) % vocab_size})
    first[16], second[16:] = low, second[16:].flip(0)
    second[16] = high
    return first, second


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the text model without its head; its last hidden state is after the final norm."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # ModernBERT returns its head
        return model.base_model  # pyright: ignore[reportReturnType]
    if decoder.get_output_embeddings() is not None:  # Llama 4 returns the model itself
        decoder = decoder.model
    return decoder


def computing_device(model: PreTrainedModel) -> torch.device:
    """Returns the device on which the model computes; its shards may be in host memory."""
    return getattr(model, "computes_on", model.device)


def backbone_hidden(
    model: PreTrainedModel, micro: MicroBatch, *, router_logits: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Computes the hidden states (N, hidden_size) of all packed positions after the final norm.

    Args:
        micro: this rank's part of a micro-batch (`context.own_part`).
        router_logits: list to extend by the router logits of every layer with experts, (tokens,
            experts) each.
    """
    decoder = decoder_of(model)
    wanted = {} if router_logits is None else {"output_router_logits": True}
    device = computing_device(model)
    input_ids = torch.from_numpy(micro.input_ids)[None].to(device, non_blocking=True)
    shown = None if micro.shown is None else _decoder_inputs(model, micro)
    routes = None
    if micro.routes is not None:
        routes = torch.from_numpy(micro.routes).to(device, torch.long, non_blocking=True)
    if decoder.config._attn_implementation not in PACKED:
        outputs, start = [], 0
        for number, ids in enumerate(input_ids.split(micro.segment_lengths, dim=1)):
            force(decoder, None if routes is None else routes[start : start + ids.shape[1]])
            read = {"input_ids": ids} if shown is None else joined([shown[number]], [0])
            outputs.append(decoder(**read, use_cache=False, **wanted))
            start += ids.shape[1]
    else:
        force(decoder, routes)
        position_ids = torch.from_numpy(micro.position_ids)[None].to(device, non_blocking=True)
        read = {"input_ids": input_ids, "position_ids": position_ids}
        if shown is not None and micro.shown is not None:
            read = joined(shown, [each.start for each in micro.shown])
        segments = micro.segment_lengths, micro.branch_ends.tolist(), context.of(model)
        with packed_segments(*segments):
            outputs = [decoder(**read, use_cache=False, **wanted)]
    if router_logits is not None:
        router_logits.extend(logits for output in outputs for logits in output.router_logits)
    return torch.cat([output.last_hidden_state[0] for output in outputs])


def _decoder_inputs(model: PreTrainedModel, micro: MicroBatch) -> list[DecoderInputs]:
    """Returns the decoder's inputs for each segment, with images turned into embeddings. An image
    that several rows show is computed once."""
    if hasattr(model, "fsdp_logprobs") or context.of(model).size > 1:
        raise ConfigError(
            "rows with images are trained on one rank only; start one process, with "
            "train.parallel.context = 1"
        )
    towers, parts = Towers(model), []
    for segment in micro.shown or ():
        ids = torch.from_numpy(segment.token_ids).to(computing_device(model), torch.long)
        inputs = towers.inputs(ids, segment.images)
        parts.append(inputs.part(segment.start, len(ids)))
    return parts


def sample_logprobs(
    model: PreTrainedModel,
    micro: MicroBatch,
    *,
    temperature: float,
    with_entropy: bool = False,
    router_logits: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the log-probs of a micro-batch's trained tokens under the model, on its device.

    Args:
        temperature: temperature at which the tokens were sampled.
        with_entropy: also return the entropy.
        router_logits: see `backbone_hidden`.

    Returns:
        logprobs (Q,) float32, and entropy (Q,) float32 in nats or None. Both have gradients unless
        under `torch.no_grad()`.
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
    """Computes the results of `sample_logprobs`, and the router logits if `with_routing`.

    The router logits are returned rather than put into a list of the caller's, because FSDP passes
    a copy of every argument to the methods that it registers.
    """
    router_logits: list[torch.Tensor] | None = [] if with_routing else None
    head = head_of(model)
    factor, cap = logit_shape(model)
    together = context.of(model)
    whole, micro = micro, context.own_part(micro, together)
    hidden = backbone_hidden(model, micro, router_logits=router_logits)
    kept = None
    if micro.kept is not None:
        ids, starts = torch.from_numpy(micro.kept.ids), torch.from_numpy(micro.kept.starts)
        kept = ids.to(hidden.device, non_blocking=True), starts.to(hidden.device, non_blocking=True)
    logprobs, entropy = trained_logprobs(
        hidden[torch.from_numpy(micro.trained_index).to(hidden.device, non_blocking=True)],
        _whole(head.weight),
        torch.from_numpy(micro.targets).to(hidden.device, non_blocking=True),
        bias=None if head.bias is None else _whole(head.bias),
        temperature=temperature / factor,
        softcap=None if cap is None else cap / temperature,
        with_entropy=with_entropy,
        kept=kept,
    )
    logprobs = context.of_all(whole, logprobs, together)
    entropy = None if entropy is None else context.of_all(whole, entropy, together)
    return logprobs, entropy, router_logits or []


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers what ranks hold parts of while they compute (`train.parallel.tensor`). Each of them
    computes the same gradient of the result, and keeps its part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def recomputed_logprobs(
    model: PreTrainedModel, prompt_ids: list[int], token_ids: list[int], temperature: float
) -> list[float]:
    """Computes the log-prob of every token of `token_ids` after `prompt_ids`, as the trainer does:
    on packed rows, in the model's dtype."""
    row = _bare_sample(np.array(prompt_ids + token_ids, np.int32))
    logprobs, _ = sample_logprobs(model, pack([row], [0]), temperature=temperature)
    return logprobs[len(prompt_ids) - 1 :].tolist()


def trained_matrix(micro: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Puts values (Q,) of trained tokens into a matrix (num_rows, max_trained), padded with 0."""
    matrix = values.new_zeros(micro.num_rows, micro.max_trained)
    index = (torch.from_numpy(micro.row_of), torch.from_numpy(micro.column_of))
    return matrix.index_put(
        tuple(part.to(values.device, non_blocking=True) for part in index), values
    )


def head_of(model: PreTrainedModel) -> torch.nn.Linear:
    """Returns the language-model head.

    Raises:
        ConfigError: the model has none, or it is not a linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(
            f"{type(model).__name__} has no linear language-model head; choose a causal language "
            "model such as Qwen3 or Llama"
        )
    return head


def logit_shape(model: PreTrainedModel) -> tuple[float, float | None]:
    """Returns the factor by which the model's family scales its logits, before or after the head,
    and the value at which it caps them (None: it does not).

    Measured once: the model's forward pass runs with known numbers in place of the results of its
    decoder and its head.

    Raises:
        ValueError: the family changes hidden states or logits in another way.
    """
    if (known := getattr(model, "logit_shape", None)) is None:
        known = model.logit_shape = _measured_logit_shape(model)  # pyright: ignore
    return known


@torch.no_grad()
def _measured_logit_shape(model: PreTrainedModel) -> tuple[float, float | None]:
    head = head_of(model)
    given = torch.tensor([2.0**-10, 1.0, 8.0, 2.0**20], device=model.device)
    entered: list[torch.Tensor] = []

    def leave(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = torch.ones_like(output.last_hidden_state, dtype=torch.float32)
        return output

    def enter(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        entered.append(inputs[0].double())
        return inputs[0].to(head.weight.dtype)

    def answer(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return given[None, :, None].expand(output.shape)

    handles = [
        decoder_of(model).register_forward_hook(leave),
        head.register_forward_pre_hook(enter),
        head.register_forward_hook(answer),
    ]
    try:
        ids = torch.full((1, len(given)), 3, device=model.device)
        logits = model(ids, use_cache=False).logits[0].double()  # (4, V)
    finally:
        for handle in handles:
            handle.remove()
    before = entered[0].flatten()[0].item()
    smallest, *_, largest = logits[:, 0].tolist()
    factor = smallest / given[0].item()
    uncapped = given.double() * factor
    cap = None if largest > 0.999 * uncapped[-1] else largest
    expected = uncapped if cap is None else cap * torch.tanh(uncapped / cap)
    if not (
        torch.allclose(entered[0], torch.full_like(entered[0], before), rtol=1e-4)
        and torch.allclose(logits, expected[:, None].expand_as(logits), rtol=1e-4)
    ):
        raise ValueError("changes hidden states before its head, or logits behind it")
    return before * factor, cap


def _bare_sample(token_ids: np.ndarray) -> Sample:
    """Returns a sample in which every token after the first is trained and nothing else is set."""
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
