"""The policy's log-probs on packed rows, and the check that they are its own."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.errors import ConfigError, first_line
from agentrl.inference.embedded_images import DecoderInputs, Towers, joined
from agentrl.inference.embedded_lengths import within_reach
from agentrl.inference.embedded_routes import force
from agentrl.inference.embedded_sampling import plain_attention
from agentrl.train import context
from agentrl.train.attention import ATTENTION_NAME, SHARED_ATTENTION_NAME, packed_segments
from agentrl.train.head import trained_logprobs
from agentrl.train.plan import MicroBatch, pack
from agentrl.types import Sample

logger = logging.getLogger(__name__)

PACKED = (SHARED_ATTENTION_NAME, ATTENTION_NAME)
"""Attention of models that compute several segments as one row."""


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
            if name in PACKED and not model._can_set_attn_implementation():
                raise ValueError("its layers attend in ways of their own")
            if name in PACKED and hasattr(model.config.get_text_config(), "compress_rates"):
                raise ValueError("its layers make one key of several tokens, of any segment")
            model.set_attn_implementation(name)
            with within_reach(model):
                problem = _inexact(model, share=name == SHARED_ATTENTION_NAME)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            problem = f"cannot run ({first_line(error)})"
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
            elif SHARED_ATTENTION_NAME in problems:
                logger.warning(
                    "%s computes what samples of a group begin with once for each of them; "
                    "standing in a row once, it %s",
                    type(model).__name__,
                    problems[SHARED_ATTENTION_NAME],
                )
            return
        problems[name] = problem
    raise ConfigError(
        f"{type(model).__name__} cannot be trained on exactly: on packed rows it "
        f"{problems[ATTENTION_NAME]}, one segment at a time it {problem}; choose a family of "
        "docs/models.md"
    )


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Tells whether the model is exact on rows in which a shared prefix stands once."""
    return packing_of(model) == 2


def packing_of(model: PreTrainedModel) -> int:
    """Returns how the model runs on packed rows: 2 as one row that holds shared prefixes once, 1 as
    one row, 0 one segment at a time."""
    implementation = decoder_of(model).config._attn_implementation
    return {SHARED_ATTENTION_NAME: 2, ATTENTION_NAME: 1}.get(str(implementation), 0)


def _inexact(model: PreTrainedModel, *, share: bool) -> str | None:
    """Returns how log-probs of packed segments differ from the family's; None if by rounding."""
    first, second = _probe_ids(model)
    logit_shape(model)  # now, not while its own forward pass would be counted
    embedded: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        embedded.append(output)

    handle = model.get_input_embeddings().register_forward_hook(keep)
    micro = probe_rows(model, share=share)
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
        ends_otherwise = torch.cat([first[:16], first[16:].flip(0)])[None].to(model.device)
        early = model(ends_otherwise, use_cache=False).logits[0, :15].float().log_softmax(-1)
    model.set_attn_implementation(implementation or "eager")
    early = early.gather(1, first[1:16, None].to(model.device)).squeeze(1)
    leaked = (early - expected[0][:15]).abs().mean().item()
    if not leaked < tolerance(model.dtype):
        return f"lets a token see those that follow it (log-probs differ by {leaked:.2g})"
    difference = (logprobs.detach() - torch.cat(expected)).abs().mean().item()
    if not difference < tolerance(model.dtype):
        return f"differs from its own forward pass by {difference:.2g}"
    return None


def tolerance(dtype: torch.dtype) -> float:
    """Returns the largest difference between log-probs that counts as rounding. The logits of a
    16-bit model are rounded to about 1/256 of their size."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.1


def probe_rows(model: PreTrainedModel, *, share: bool | None = None) -> MicroBatch:
    """Two short rows that begin alike, all of whose tokens are trained.

    Args:
        model: it or its decoder; the vocabulary is its own.
        share: that beginning stands there once; None: as the model runs.
    """
    share = shares_prefixes(model) if share is None else share
    rows = [_bare_sample(ids.numpy()) for ids in _probe_ids(model)]
    return pack(rows, [0, 1], share=share)


def _probe_ids(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    embedding: Any = model.get_input_embeddings()
    vocab_size = embedding.weight.shape[0]
    # Of two rows that begin alike, the one with the lower next token stands first.
    first, second = (torch.arange(13, 13 + 7919 * n, 7919) % vocab_size for n in (25, 22))
    low, high = sorted({int(first[16]), (int(first[16]) + 1) % vocab_size})
    first[16], second[16:] = low, second[16:].flip(0)
    second[16] = high
    return first, second


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The text model without its head, whose last hidden state has been through the final norm."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # of ModernBERT it is the head
        return model.base_model  # pyright: ignore[reportReturnType]
    if decoder.get_output_embeddings() is not None:  # of Llama 4 it is the model itself
        decoder = decoder.model
    return decoder


def computing_device(model: PreTrainedModel) -> torch.device:
    """Returns the device on which the model computes. Shards in host memory compute elsewhere."""
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
    """Returns what the decoder reads of each segment. Images that several rows show are computed
    once.

    Raises:
        ConfigError: the model is in shards or its rows are, or its family is not exact on images.
    """
    if hasattr(model, "fsdp_logprobs") or context.of(model).size > 1:
        raise ConfigError(
            "rows with images are trained on one rank only; set train.parallel.context = 1 and "
            "leave the model whole"
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
    """Computes what `sample_logprobs` returns, and the router logits if they are asked for. All of
    it is returned: a sharded model sees a copy of what stands in an argument."""
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
        head.weight,
        torch.from_numpy(micro.targets).to(hidden.device, non_blocking=True),
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
    """Computes log softmax(logits / temperature) of every sampled token, as the trainer does.

    It goes the trainer's way from packed rows to log-probs, in the model's dtype.
    """
    row = _bare_sample(np.array(prompt_ids + token_ids, np.int32))
    logprobs, _ = sample_logprobs(model, pack([row], [0]), temperature=temperature)
    return logprobs[len(prompt_ids) - 1 :].tolist()


def trained_matrix(micro: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Values (Q,) of trained tokens as a matrix (num_rows, max_trained), padded with 0."""
    matrix = values.new_zeros(micro.num_rows, micro.max_trained)
    index = (torch.from_numpy(micro.row_of), torch.from_numpy(micro.column_of))
    return matrix.index_put(
        tuple(part.to(values.device, non_blocking=True) for part in index), values
    )


def head_of(model: PreTrainedModel) -> torch.nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(
            f"{type(model).__name__} has no linear language-model head; choose a causal language "
            "model such as Qwen3 or Llama"
        )
    return head


def logit_shape(model: PreTrainedModel) -> tuple[float, float | None]:
    """Finds out how the family scales its logits, before the head or after, and where it caps them.

    Measured once: the model's forward pass runs with known numbers in place of what its decoder and
    its head say.
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
