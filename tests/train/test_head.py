import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.model.head import trained_logprobs


def plain(hidden, weight, targets, bias=None, temperature=1.0):
    """Log-probs and entropy from the full logits."""
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    table = (logits / temperature).log_softmax(-1)
    return table.gather(1, targets[:, None]).squeeze(1), -(table.exp() * table).sum(-1)


def inputs(num_tokens=13, hidden_size=8, vocab_size=11, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, dtype=dtype) * scale
    weight = torch.randn(vocab_size, hidden_size, generator=generator, dtype=dtype)
    bias = torch.randn(vocab_size, generator=generator, dtype=dtype)
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    return [t.requires_grad_() for t in (hidden, weight, bias)], targets


@pytest.mark.parametrize("keep_bytes", [0, 4 * 11 * 8, 2**30], ids=["none", "one chunk", "all"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_by_finite_differences(keep_bytes, with_bias, softcap):
    (hidden, weight, bias), targets = inputs(num_tokens=10, dtype=torch.float64)

    def head(hidden, weight, *biases):
        return trained_logprobs(
            hidden,
            weight,
            targets,
            bias=biases[0] if biases else None,
            temperature=0.7,
            softcap=softcap,
            with_entropy=True,
            chunk_tokens=4,
            keep_bytes=keep_bytes,
        )

    parameters = (hidden, weight, bias) if with_bias else (hidden, weight)
    assert torch.autograd.gradcheck(head, parameters)


@pytest.mark.parametrize("keep_bytes", [0, 2**30])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_of_a_truncated_distribution(keep_bytes, softcap):
    """Both results, and their gradients, are those of the logits of the ids that were kept."""
    (hidden, weight, bias), targets = inputs(num_tokens=10, dtype=torch.float64)
    kept = [sorted({int(t), int(t) // 2, (3 * i) % 7}) for i, t in enumerate(targets)]
    ids = torch.tensor([each for row in kept for each in row])
    starts = torch.tensor([0, *map(len, kept)]).cumsum(0)

    def head(hidden, weight, bias):
        return trained_logprobs(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=0.7,
            softcap=softcap,
            with_entropy=True,
            kept=(ids, starts),
            chunk_tokens=4,
            keep_bytes=keep_bytes,
        )

    logprobs, entropy = head(hidden, weight, bias)
    assert entropy is not None
    logits = (hidden @ weight.t() + bias) / 0.7
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    for row, each in enumerate(kept):
        table = logits[row, each].log_softmax(-1)
        torch.testing.assert_close(logprobs[row], table[each.index(int(targets[row]))])
        torch.testing.assert_close(entropy[row], -(table.exp() * table).sum())
    assert torch.autograd.gradcheck(head, (hidden, weight, bias))


def test_a_soft_cap_comes_before_the_temperature():
    """Gemma caps its logits, and the sampler divides what is capped."""
    (hidden, weight, _), targets = inputs(dtype=torch.float64)
    table = (3.0 * torch.tanh(hidden @ weight.t() / 3.0) / 0.7).log_softmax(-1)
    ours, _ = trained_logprobs(hidden, weight, targets, temperature=0.7, softcap=3.0 / 0.7)
    torch.testing.assert_close(ours, table.gather(1, targets[:, None]).squeeze(1))


@settings(max_examples=40)
@given(
    num_tokens=st.integers(0, 20),
    chunk_tokens=st.integers(1, 24),
    keep_bytes=st.sampled_from([0, 100, 300, 600, 10_000]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    loss_uses=st.sampled_from(["logprobs", "entropy", "both"]),
)
def test_equal_to_full_logits(num_tokens, chunk_tokens, keep_bytes, temperature, scale, loss_uses):
    parameters, targets = inputs(num_tokens, scale=scale)
    hidden, weight, bias = parameters
    ours = trained_logprobs(
        hidden,
        weight,
        targets,
        bias=bias,
        temperature=temperature,
        with_entropy=True,
        chunk_tokens=chunk_tokens,
        keep_bytes=keep_bytes,
    )
    reference = plain(hidden.double(), weight.double(), targets, bias.double(), temperature)
    for mine, exact in zip(ours, reference, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), exact, rtol=3e-6, atol=3e-5 * max(1.0, scale))

    factors = torch.linspace(-1, 2, num_tokens)
    uses = {"logprobs": (1, 0), "entropy": (0, 1), "both": (1, 1)}[loss_uses]
    gradients = []
    for logprobs, entropy in (ours, reference):
        loss = sum(
            (factors.to(values.dtype) * values).sum()
            for values, used in zip((logprobs, entropy), uses, strict=True)
            if used
        )
        gradients.append(torch.autograd.grad(loss, parameters))
    # A rounding of p by 1e-7 moves a gradient by that times the size of the hidden states.
    natural = scale / temperature
    for mine, exact in zip(*gradients, strict=True):
        largest = exact.abs().max().item() if exact.numel() else 0.0
        torch.testing.assert_close(mine, exact, rtol=0, atol=1e-4 * largest + 1e-5 * natural)


def test_an_improbable_target_has_a_finite_log_probability():
    hidden = torch.tensor([[200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    logprobs, _ = trained_logprobs(hidden, weight, torch.tensor([1]))
    logprobs.sum().backward()
    assert logprobs.item() == -400.0
    assert hidden.grad is not None
    assert hidden.grad.item() == -2.0


def test_entropy_is_absent_unless_asked_for():
    (hidden, weight, _), targets = inputs()
    assert trained_logprobs(hidden, weight, targets)[1] is None


def test_backward_may_run_twice():
    parameters, targets = inputs()
    hidden, weight, bias = parameters
    logprobs, _ = trained_logprobs(hidden, weight, targets, bias=bias, chunk_tokens=5)
    first = torch.autograd.grad(logprobs.sum(), parameters, retain_graph=True)
    second = torch.autograd.grad(logprobs.sum(), parameters)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_a_frozen_head_gets_no_gradient():
    (hidden, weight, _), targets = inputs()
    weight.requires_grad_(False)
    logprobs, _ = trained_logprobs(hidden, weight, targets)
    logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def saved_bytes(keep_bytes: int) -> int:
    """Bytes that one call with 100 positions keeps for its backward pass."""
    (hidden, weight, _), targets = inputs(num_tokens=100, vocab_size=1000)
    total = 0

    def count(tensor):
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        trained_logprobs(hidden, weight, targets, chunk_tokens=10, keep_bytes=keep_bytes)
    return total


def test_memory_kept_for_the_backward_pass_is_bounded():
    chunk = 10 * 1000 * 4
    nothing = saved_bytes(0)
    assert nothing < 2 * chunk
    assert saved_bytes(3 * chunk + chunk // 2) == nothing + 3 * chunk
    assert saved_bytes(2**30) == nothing + 10 * chunk


def test_without_gradients_the_values_are_the_same():
    (hidden, weight, _), targets = inputs()
    live = trained_logprobs(hidden, weight, targets, with_entropy=True)
    with torch.no_grad():
        old = trained_logprobs(hidden, weight, targets, with_entropy=True)
    for a, b in zip(live, old, strict=True):
        assert torch.equal(a, b)
        assert not b.requires_grad


def test_half_precision_loses_no_more_than_its_inputs():
    (hidden, weight, _), targets = inputs(num_tokens=64, hidden_size=32, vocab_size=200)
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    exact = [tensor.detach().double().requires_grad_() for tensor in half]
    ours = trained_logprobs(*half, targets, with_entropy=True, chunk_tokens=10)
    reference = plain(*exact, targets)
    for mine, expected in zip(ours, reference, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), expected, rtol=1e-5, atol=1e-5)

    factors = torch.linspace(-1, 1, 64)
    gradients = [
        torch.autograd.grad((factors * logprobs).sum() + 0.1 * entropy.sum(), leaves)
        for (logprobs, entropy), leaves in ((ours, half), (reference, exact))
    ]
    for mine, expected in zip(*gradients, strict=True):
        assert mine.dtype == torch.bfloat16
        error = (mine.double() - expected).norm() / expected.norm()
        assert error < 1e-2


def test_a_temperature_of_zero_is_refused():
    (hidden, weight, _), targets = inputs()
    with pytest.raises(ValueError, match="temperature"):
        trained_logprobs(hidden, weight, targets, temperature=0.0)
