"""Records which experts a mixture's routers choose while sampling, and forces the trainer to use
them.

Rollout routing replay (R3, arXiv:2510.11370): rounded differently, sampler and trainer choose other
experts for some tokens, and their log-probs differ by far more than rounding. Forced, a router
still computes the weights of its experts, with gradient; only which ones is given.

Every family of transformers chooses by one `torch.topk` over its experts, within a module of its
own. That call is what is listened to and answered here, so no family needs code of its own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from agentrl.errors import ConfigError

ROUTER_CLASS = re.compile(r"(Router|Gating|Gate)$")
UNKNOWN = -1
"""Stands for a token whose choice is not known: the router chooses."""


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that choose experts, in the order of the layers."""
    return [
        module
        for name, module in model.named_modules()
        if ROUTER_CLASS.search(type(module).__name__) or name.endswith(".router")
    ]


class _Choice(TorchFunctionMode):
    """While a router runs: takes down what its `topk` chooses, or answers it."""

    def __init__(self, router: Any) -> None:
        self.router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk) or args[0].ndim != 2:
            return result
        scores, router = args[0], self.router
        if scores.shape[-1] != router.weight.shape[0] or result[1].shape[-1] != router.top_k:
            return result  # of groups of experts
        if router.taken is not None:
            router.taken.append(result[1])
        if router.routes is None:
            return result
        if len(router.routes) != len(scores):
            raise ValueError(f"{len(scores)} tokens came with {len(router.routes)} routes")
        chosen = torch.where(router.routes < 0, result[1], router.routes)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def _enter(router: Any, inputs: Any) -> None:
    router.listening = _Choice(router)
    router.listening.__enter__()


def _leave(router: Any, inputs: Any, output: Any) -> None:
    router.listening.__exit__(None, None, None)
    router.listening = None


def make_replayable(model: PreTrainedModel, *, probe: bool = True) -> None:
    """Let the choices of a model's routers be taken down and forced; of its copies, too.

    Args:
        probe: look whether every router chooses as it is expected to, by one forward pass.

    Raises:
        ConfigError: the model has no routers, or they choose otherwise.
    """
    name = type(model).__name__
    routers: list[Any] = routers_of(model)
    if not routers:
        raise ConfigError(f"train.router_replay = true, but {name} has no routers; leave it out")
    if not all(hasattr(each, "top_k") and hasattr(each, "weight") for each in routers):
        raise ConfigError(
            f"train.router_replay: the routers of {name} choose in a way of their own; leave it out"
        )
    if all(hasattr(each, "taken") for each in routers):
        return  # it is so already
    for router in routers:
        router.routes = router.taken = router.listening = None
        router.register_forward_pre_hook(_enter)
        router.register_forward_hook(_leave, always_call=True)
    if not probe:
        return
    with torch.no_grad(), taking(model) as taken:
        model(torch.arange(3, 8, device=model.device)[None], use_cache=False)
    if [len(each) for each in taken] != [1] * len(routers) or any(
        each[0].shape != (5, router.top_k) for each, router in zip(taken, routers, strict=True)
    ):
        raise ConfigError(
            f"train.router_replay: the routers of {name} do not choose once for each token; "
            "leave it out"
        )


@contextlib.contextmanager
def taking(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Gives, for each router, what it chooses in each forward pass: (tokens, experts per token)."""
    routers: list[Any] = routers_of(model)
    taken: list[list[Tensor]] = [[] for _ in routers]
    for router, own in zip(routers, taken, strict=True):
        router.taken = own
    try:
        yield taken
    finally:
        for router in routers:
            router.taken = None


def taken_now(taken: list[list[Tensor]], num_rows: int) -> Tensor:
    """Takes the choices since the last call: (rows, tokens, routers, experts per token) int16."""
    now = torch.stack([each.pop() for each in taken], dim=1).short()
    return now.view(num_rows, -1, *now.shape[1:]).cpu()


def force(model: nn.Module, routes: Tensor | None) -> None:
    """Say what the routers choose in every forward pass until it is said again.

    It holds in the backward pass as well, where layers are computed a second time.

    Args:
        routes: (tokens, routers, experts per token), `UNKNOWN` where the router chooses; None:
            they choose everywhere.
    """
    for layer, router in enumerate(routers_of(model)):
        if hasattr(router, "taken"):  # else nothing is replayed
            router.routes = None if routes is None else routes[:, layer]  # pyright: ignore
