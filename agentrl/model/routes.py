"""Records the experts that a mixture's routers choose while sampling, and forces the trainer to use
them.

Rollout routing replay (R3, arXiv:2510.11370): because they round differently, sampler and trainer
choose different experts for some tokens, and their log-probs then differ by far more than rounding.
A forced router still computes the weights of its experts, with gradient; only the choice of experts
is given.

Every family of transformers chooses experts by one `torch.topk` call, within a router module. That
call is intercepted here, so no family needs its own code.
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
"""Route of a token whose experts are not known: the router chooses them."""


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that choose experts, in the order of the layers."""
    return [module for name, module in model.named_modules() if _is_router(name, module)]


def _is_router(name: str, module: nn.Module) -> bool:
    return bool(ROUTER_CLASS.search(type(module).__name__)) or name.endswith(".router")


class _Choice(TorchFunctionMode):
    """Records or replaces the result of a router's `topk`, while the router runs."""

    def __init__(self, router: Any) -> None:
        self.router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk) or args[0].ndim != 2:
            return result
        scores, router = args[0], self.router
        if scores.shape[-1] != router.weight.shape[0] or result[1].shape[-1] != router.top_k:
            return result  # it chooses among groups of experts
        if router.recorded is not None:
            router.recorded.append(result[1])
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


def make_replayable(model: PreTrainedModel) -> None:
    """Makes the choices of a model's routers recordable and forcible, in its copies too.

    Raises:
        ConfigError: the model has no routers, or they lack what a forced choice needs.
    """
    name = type(model).__name__
    routers: list[Any] = routers_of(model)
    if not routers:
        raise ConfigError(f"train.router_replay = true, but {name} has no routers; leave it out")
    if not all(hasattr(each, "top_k") and hasattr(each, "weight") for each in routers):
        raise ConfigError(
            f"train.router_replay: the routers of {name} choose in an unknown way; leave it out"
        )
    if all(hasattr(each, "recorded") for each in routers):
        return  # it was called before
    for router in routers:
        router.routes = router.recorded = router.listening = None
        router.register_forward_pre_hook(_enter)
        router.register_forward_hook(_leave, always_call=True)


def require_choices(model: PreTrainedModel) -> None:
    """Checks with one forward pass that every router of a replayable model chooses as expected.
    Every rank of a sharded model calls it.

    Raises:
        ConfigError: a router chooses in another way.
    """
    routers: list[Any] = routers_of(model)
    with torch.no_grad(), recording(model) as recorded:
        device = getattr(model, "computes_on", model.device)
        model(torch.arange(3, 8, device=device)[None], use_cache=False)
    if [len(each) for each in recorded] != [1] * len(routers) or any(
        each[0].shape != (5, router.top_k) for each, router in zip(recorded, routers, strict=True)
    ):
        raise ConfigError(
            f"train.router_replay: the routers of {type(model).__name__} do not choose once for "
            "each token; leave it out"
        )


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Records the routers' choices within the block. Yields a list for each router, to which every
    forward pass appends the choices (tokens, experts per token)."""
    routers: list[Any] = routers_of(model)
    recorded: list[list[Tensor]] = [[] for _ in routers]
    for router, own in zip(routers, recorded, strict=True):
        router.recorded = own
    try:
        yield recorded
    finally:
        for router in routers:
            router.recorded = None


def last_recorded(recorded: list[list[Tensor]], num_rows: int) -> Tensor:
    """Removes and returns the last forward pass's choices, on the CPU: (rows, tokens, routers,
    experts per token) int16."""
    now = torch.stack([each.pop() for each in recorded], dim=1).short()
    return now.view(num_rows, -1, *now.shape[1:]).cpu()


def force(model: nn.Module, routes: Tensor | None) -> None:
    """Forces the routers' choices in every forward pass until the next call.

    They stay forced in the backward pass, when layers are computed a second time.

    Args:
        routes: (tokens, routers, experts per token), or with every layer instead of every router,
            and the last two axes as one, as servers report them. `UNKNOWN` where the router is to
            choose. None lets the routers choose everywhere.

    Raises:
        ValueError: the routes are not of so many layers and experts.
    """
    routers: list[Any] = routers_of(model)
    if not routers or not hasattr(routers[0], "recorded"):  # `make_replayable` was not called
        return
    if routes is None:
        for router in routers:
            router.routes = None
        return
    if routes.ndim == 2:
        routes = _of_routers(model, routes, routers[0].top_k)
    for index, router in enumerate(routers):
        router.routes = routes[:, index]


def _of_routers(model: nn.Module, routes: Tensor, top_k: int) -> Tensor:
    """Returns the routes (tokens, routers, `top_k`) among those of all layers."""
    names = [name for name, module in model.named_modules() if _is_router(name, module)]
    layers = [int(re.findall(r"\.(\d+)\.", name)[0]) for name in names]
    if routes.shape[1] % top_k or routes.shape[1] // top_k <= max(layers):
        raise ValueError(
            f"the server reports {routes.shape[1]} experts for each token, but the routers of "
            f"{type(model).__name__} choose {top_k} in each of at least {max(layers) + 1} layers; "
            "does it have the model at model.path?"
        )
    return routes.view(len(routes), -1, top_k)[:, layers]
