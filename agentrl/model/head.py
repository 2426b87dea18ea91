"""Computes log-probabilities and entropy at trained positions, a chunk of logits at a time.

The language-model head is the widest layer of a small model, and most positions of an agent's
trajectory (prompt, tool output) are not trained. So hidden states are gathered before the head, and
the head runs on chunks of positions. The backward pass needs the softmax of each chunk: as many as
fit into `keep_bytes` are kept (3 matrix products per chunk in all), the others are recomputed (4),
so memory can be traded for time in small steps.

    z = (h W^T + b) / temperature        logp = z[target] - logsumexp(z)
    dlogp/dz = onehot(target) - p        dentropy/dz = -p (log p + entropy)

A kept chunk holds p - onehot(target). If the loss does not use the entropy, each row of a chunk has
a single factor g, which multiplies the states instead of the chunk. Then no pass over the
vocabulary is needed between the products:

    dh = -g * ((p - onehot) W)           dW = (p - onehot)^T (-g * h)
"""

from __future__ import annotations

import torch

# Memory for kept softmax chunks per call; on a GPU, 7,000 positions of 152k tokens in 16 bits.
_KEEP_BYTES = {"cpu": 512 * 2**20}
_KEEP_BYTES_ELSEWHERE = 2 * 2**30
# Memory for the logits of one chunk. On a CPU a chunk should fit into the caches, and be smaller
# than blocks that the allocator returns to the system after every use; a GPU wants large products.
_CHUNK_BYTES = {"cpu": 8 * 2**20}
_CHUNK_BYTES_ELSEWHERE = 512 * 2**20
_MIN_CHUNK_TOKENS = 128
_LEFT_OUT = -1e9


def trained_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    chunk_tokens: int | None = None,
    keep_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes log softmax(logits / temperature) of the target tokens, natural logarithm.

    Both results are differentiable in `hidden`, `weight` and `bias`; an entropy that the loss does
    not use costs nothing in the backward pass. Under `torch.no_grad()` no chunk is kept.

    Args:
        hidden: (Q, H) states after the final norm, at the positions that predict the targets.
        weight: (V, H) weight of the head.
        targets: (Q,) int64 ids of the target tokens.
        bias: (V,) bias of the head.
        temperature: temperature of the sampling distribution, above 0.
        softcap: replaces logits z, already divided by the temperature, by softcap * tanh(z /
            softcap), as in Gemma 2. No softmax chunk is kept then.
        with_entropy: also return the entropy of the distribution at each position, in nats.
        kept: restricts the distribution at each position to the ids from which the sampler drew
            (top_p, top_k): (M,) ids and (Q + 1,) offsets of each position's ids, int64.
        chunk_tokens: positions whose logits exist at once; None chooses by vocabulary and device.
        keep_bytes: memory for softmax chunks kept for the backward pass; None chooses by device.

    Returns:
        logprobs (Q,) and entropy (Q,) or None; float32 (float64 for float64 `hidden`).

    Raises:
        ValueError: `temperature` is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(weight.shape[0], hidden.device.type)
    if keep_bytes is None:
        keep_bytes = default_keep_bytes(hidden.device.type)
    if softcap is not None or not torch.is_grad_enabled():
        keep_bytes = 0
    logprobs, entropy = _TrainedLogprobs.apply(
        hidden,
        weight,
        bias,
        targets,
        temperature,
        softcap,
        kept,
        with_entropy,
        chunk_tokens,
        keep_bytes,
    )
    return logprobs, entropy if with_entropy else None


def default_chunk_tokens(vocab_size: int, device_type: str) -> int:
    """Returns the number of positions whose logits exist at once."""
    chunk_bytes = _CHUNK_BYTES.get(device_type, _CHUNK_BYTES_ELSEWHERE)
    return max(_MIN_CHUNK_TOKENS, chunk_bytes // (4 * vocab_size))


def default_keep_bytes(device_type: str) -> int:
    """Returns the bytes of softmax chunks to keep for the backward pass."""
    return _KEEP_BYTES.get(device_type, _KEEP_BYTES_ELSEWHERE)


class _TrainedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        targets,
        temperature,
        softcap,
        kept_ids,
        with_entropy,
        chunk_tokens,
        keep_bytes,
    ):
        results = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(targets), dtype=results)
        entropy = hidden.new_empty(len(targets) if with_entropy else 0, dtype=results)
        kept: list[torch.Tensor] = []
        for number, start in enumerate(range(0, len(targets), chunk_tokens)):
            chunk = slice(start, start + chunk_tokens)
            logits = _logits(hidden[chunk], weight, bias, temperature, softcap)  # (C, V)
            _leave_out(logits, kept_ids, start)
            # The largest probability is 1 / sum exp(z - top), so it gives the normaliser without
            # another pass over exponentials.
            top = logits.amax(-1)
            goals = targets[chunk, None]
            target_logits = logits.gather(1, goals).squeeze(1)
            probs = torch.softmax(logits, -1, out=None if with_entropy else logits)
            log_sum = -probs.amax(-1).log()
            logprobs[chunk] = (target_logits - top) - log_sum
            if with_entropy:
                logits.sub_(top[:, None])
                entropy[chunk] = log_sum - torch.linalg.vecdot(probs, logits)
            del logits
            probs = _less_onehot(probs.to(hidden.dtype), goals, logprobs[chunk])
            # Only leading chunks are kept, so that `kept[number]` belongs to chunk `number`: the
            # last, shorter chunk might fit although its predecessor did not.
            if len(kept) == number and probs.nbytes <= keep_bytes:
                keep_bytes -= probs.nbytes
                kept.append(probs)
        ctx.save_for_backward(hidden, weight, bias, targets, logprobs, entropy, *kept)
        ctx.temperature, ctx.softcap, ctx.chunk_tokens = temperature, softcap, chunk_tokens
        ctx.kept_ids = kept_ids
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, logprobs, entropy, *kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logprobs)
        factors = -grad_logprobs / ctx.temperature
        if grad_entropy is not None:
            grad_entropy = -grad_entropy / ctx.temperature
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sums over many chunks are float32 whatever the dtype of the weights.
        grad_weight = torch.zeros_like(weight, dtype=logprobs.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=logprobs.dtype) if needs_bias else None

        for number, start in enumerate(range(0, len(targets), ctx.chunk_tokens)):
            chunk = slice(start, start + ctx.chunk_tokens)
            states, goals = hidden[chunk], targets[chunk, None]
            factor = factors[chunk, None].to(hidden.dtype)  # (C, 1)
            logits = None
            if number < len(kept):
                grad_logits = kept[number]  # (C, V), before its factor
            else:
                logits = _logits(states, weight, bias, ctx.temperature, ctx.softcap)
                _leave_out(logits, ctx.kept_ids, start)
                grad_logits = torch.softmax(logits, -1, out=None if ctx.softcap else logits)
                grad_logits = _less_onehot(grad_logits.to(hidden.dtype), goals, logprobs[chunk])
            if grad_entropy is not None:
                at_target = logprobs[chunk, None].exp().to(grad_logits.dtype)
                probs = grad_logits.scatter(1, goals, at_target)
                spread = probs.log().clamp_(min=torch.finfo(probs.dtype).min)  # 0 log 0 is 0
                spread.add_(entropy[chunk, None].to(probs.dtype)).mul_(probs)
                spread.mul_(grad_entropy[chunk, None].to(probs.dtype))
                grad_logits = spread.addcmul_(grad_logits, factor)
                factor = None
            if logits is not None and ctx.softcap is not None:
                grad_logits *= 1 - (logits / ctx.softcap).square_()  # the derivative of tanh
            scaled = states if factor is None else states * factor
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
                if factor is not None:
                    grad_hidden[chunk] *= factor
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), scaled)
            if grad_bias is not None:
                if factor is not None:
                    grad_logits = grad_logits * factor
                grad_bias += grad_logits.sum(0, dtype=grad_bias.dtype)

        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 7


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    softcap: float | None,
) -> torch.Tensor:
    """Computes the logits (C, V) of a chunk in at least float32, because 16-bit logits would carry
    errors of 0.03 into log-probs."""
    logits = _product(hidden, weight.t())
    if bias is not None:
        logits += bias
    if temperature != 1.0:
        logits /= temperature
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits


def _leave_out(
    logits: torch.Tensor, kept: tuple[torch.Tensor, torch.Tensor] | None, start: int
) -> None:
    """Gives probability 0 to ids that the sampler did not keep, in the logits (C, V) of a chunk."""
    if kept is None:
        return
    ids, starts = kept
    begins = starts[start : start + len(logits) + 1]
    rows = torch.arange(len(logits), device=logits.device).repeat_interleave(begins.diff())
    left_out = torch.ones_like(logits, dtype=torch.bool)
    left_out[rows, ids[begins[0] : begins[-1]]] = False
    # Not minus infinity, because the entropy's 0 * log 0 would then be nan.
    logits.masked_fill_(left_out, _LEFT_OUT)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds a matrix product to `total`, which is at least float32. On a GPU, and where the dtypes
    are equal, no temporary of its size is made."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _less_onehot(probs: torch.Tensor, goals: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Computes p - onehot(target) in place. At the target, p - 1 comes from the log-probability,
    which is exact even if p is rounded or close to 1."""
    return probs.scatter_(1, goals, torch.expm1(logprobs)[:, None].to(probs.dtype))
