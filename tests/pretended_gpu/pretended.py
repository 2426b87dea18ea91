"""GPUs that are pretended: what a CUDA build of torch sees over the stubs of `build_stubs.py`.

Host code runs as it is: which device a tensor is on, what operators, autograd, FSDP2 and NCCL's
process group ask of their arguments, and where the host waits for the device. Kernels compute
nothing: what they would write holds zeros. So numbers mean nothing, and only what raises counts.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_map

_COMPUTED = (
    *("arange", "arange.start_step", "argmax", "all", "any", "cumsum", "eq.Scalar", "eq.Tensor"),
    *("isfinite", "isnan", "ne.Tensor", "searchsorted.Tensor", "sort", "sort.stable"),
    *("sub.Tensor", "topk"),
)
"""Operators that are computed on the host, so that loops over their results end."""
_WAITED_FOR = ("_unique2", "bincount", "nonzero", "repeat_interleave.Tensor", "unique_dim")
"""Those whose result has a size that the host waits for."""
_NOTICE = "called a synchronizing CUDA operation"

_NOT_ASKING = (__file__, warnings.__file__)
"""What stands below the call that waits when its warning is noted."""

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Have a few operators of CUDA computed on the host, and none by cuDNN, which has no stub.

    Flex attention runs uncompiled: Triton needs a driver.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    for name in (*_COMPUTED, *_WAITED_FOR):
        _library.impl(name, _on_host(name, name in _WAITED_FOR), "CUDA", allow_override=True)


def _on_host(name: str, waits: bool) -> Callable:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def to_host(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.cpu()
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def run(*args: object, **kwargs: object) -> object:
        if waits and torch.cuda.get_sync_debug_mode():
            warnings.warn(_NOTICE, stacklevel=2)
        with _uncounted():
            result = operator(*tree_map(to_host, args), **tree_map(to_host, kwargs))
            return tree_map(lambda each: each.cuda() if torch.is_tensor(each) else each, result)

    return run


@contextmanager
def _uncounted() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    if mode:
        torch.cuda.set_sync_debug_mode(0)
    yield
    if mode:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def waits_counted(inside: tuple[str, str], outside: tuple[str, ...] = ()) -> Iterator[Counter[str]]:
    """Count the places of the library at which the host waits for the device.

    Args:
        inside: file and function that they are called from.
        outside: functions whose waits do not count.
    """
    found: Counter[str] = Counter()

    def note(message: object, *_: object, **__: object) -> None:
        if _NOTICE not in str(message):
            return
        stack = traceback.extract_stack()
        names = [(frame.filename.rpartition("/")[2], frame.name) for frame in stack]
        if inside not in names or any(name in outside for _, name in names):
            return
        place = [frame for frame in stack if "/agentrl/" in frame.filename][-1]
        call = [frame for frame in stack if frame.filename not in _NOT_ASKING][-1]
        found[
            " <- ".join(f"{each.filename}:{each.lineno} {each.line}" for each in (call, place))
        ] += 1

    shown = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(0)
            warnings.showwarning = shown
