"""Counts the memory of a training step on its device with fake tensors, which hold no data."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl.config import RunConfig
from agentrl.model import attention, sharding
from agentrl.model.attention import SHARED_ATTENTION_NAME
from agentrl.model.critic import Critic
from agentrl.model.head import _TrainedLogprobs
from agentrl.model.load import set_gradient_checkpointing
from agentrl.model.logprobs import decoder_of, sample_logprobs
from agentrl.model.lora import add_adapter, without_adapter
from agentrl.model.rows import MicroBatch, pack
from agentrl.model.tensors import CheckpointTensors
from agentrl.train import optimizer
from agentrl.train.optimizer import Learner
from agentrl.types import Sample

GPU = torch.device("cuda", 0)


class Ledger(TorchDispatchMode):
    """Adds up the storages on the device as they come and go.

    Attributes:
        held: bytes now.
        peak: the most since `start`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._sizes: dict[int, int] = {}

    def start(self) -> None:
        self.peak = self.held

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it asks again with what it holds
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.device.type == "cuda":
                self._note(each.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        if place not in self._sizes:
            weakref.finalize(storage, self._resized, place, None)
        self._resized(place, storage.nbytes())

    def _resized(self, place: int, size: int | None) -> None:
        self.held += (size or 0) - self._sizes.pop(place, 0)
        if size is not None:
            self._sizes[place] = size
        self.peak = max(self.peak, self.held)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """FSDP gives memory back, and takes it again, by the size of a storage."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._resized(storage._cdata, size)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield


def measured(config: RunConfig, num_ranks: int) -> dict[str, dict[str, int]]:
    """Returns by moment of a step, as `agentrl.train.memory` names them, the bytes of its parts:
    weights, gradients and moments, and all else as `rest`.

    The step is not the first: there are moments, and gradients of micro-batches before.
    """
    ledger, mesh = Ledger(), None
    if num_ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        mesh = init_device_mesh("cuda", (num_ranks,), mesh_dim_names=("data",))
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            ledger.counting(),
            mock.patch.object(attention, "flex_attention_forward", _compiled_flex),
        ):
            return _step(config, mesh, ledger)
    finally:
        if num_ranks > 1:
            dist.destroy_process_group()


def _step(config: RunConfig, mesh: DeviceMesh | None, ledger: Ledger) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    model = _network(config, mesh)
    if config.model.lora.rank:
        _with_adapter(model, config)
    set_gradient_checkpointing(model, config.model.gradient_checkpointing)
    model = _sharded(model, config, mesh)
    learners: list[Learner] = [Learner(model, config.train, total_updates=10)]
    networks: list[nn.Module] = [model]
    reference = model
    if "ref_logprobs" in config.objective.needs() and not config.model.lora.rank:
        reference = _sharded(_network(config, mesh).requires_grad_(False), config, mesh)
        networks.append(reference)
    if config.objective.needs_critic:
        with GPU:
            critic = Critic(decoder_of(_network(config, mesh)))
        set_gradient_checkpointing(critic.backbone, config.model.gradient_checkpointing)
        learners.append(Learner(_sharded(critic, config, mesh), config.train, total_updates=10))
        networks.append(learners[-1].model)
    trained = [each for learner in learners for each in learner._trained]
    weights = _bytes([p for each in networks for p in each.parameters()] + trained)
    assert ledger.held - weights < 2**20, "nothing else is held"

    def gradients() -> int:
        return _bytes([each.grad for each in trained if each.grad is not None])

    def note(moment: str, gradients: int) -> None:
        moments = _bytes(
            each
            for learner in learners
            for state in learner.optimizer.state.values()
            for each in state.values()
            if each.ndim
        )
        rest = ledger.peak - weights - gradients - moments
        if rest >= found.get(moment, {"rest": -1})["rest"]:
            found[moment] = dict(weights=weights, gradients=gradients, moments=moments, rest=rest)
        ledger.start()

    def gradients_of_before() -> None:
        for each in trained:
            each.grad = torch.empty_like(each)

    micro = _rows(config)
    if "ref_logprobs" in config.objective.needs():
        with torch.no_grad(), without_adapter(reference):
            sample_logprobs(reference, micro, temperature=1.0)
    for learner in learners:  # so that there are moments
        gradients_of_before()
        _update(learner)
    gradients_of_before()
    forward, backward = _TrainedLogprobs.forward, _TrainedLogprobs.backward

    def head_forward(*arguments: Any) -> Any:
        results = forward(*arguments)
        note("forward", gradients())
        return results

    def head_backward(*arguments: Any) -> Any:
        ledger.start()
        results = backward(*arguments)
        note("head", gradients())
        return results

    ledger.start()
    with (
        mock.patch.object(_TrainedLogprobs, "forward", staticmethod(head_forward)),
        mock.patch.object(_TrainedLogprobs, "backward", staticmethod(head_backward)),
    ):
        results = sample_logprobs(model, micro, temperature=1.0, with_entropy=True)
        note("forward", gradients())
        results[0].sum().add(results[1].sum()).backward()
    del results
    note("backward", gradients())
    for learner in learners[1:]:
        learner.model(micro).sum().backward()
        note("critic", gradients())
    held = gradients()
    for learner in learners:
        _update(learner)
    note("update", held)
    if not config.model.lora.rank:
        deque(CheckpointTensors(model), maxlen=0)
    note("push", gradients())
    left = ledger.held - weights - found["push"]["moments"]
    assert left < 2**20, "nothing is left of the step"
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = {each.untyped_storage()._cdata: each for each in local if each.is_cuda}
    return sum(each.untyped_storage().nbytes() for each in storages.values())


def _network(config: RunConfig, mesh: DeviceMesh | None) -> PreTrainedModel:
    model_config = AutoConfig.from_pretrained(config.model.path)
    dtype = torch.float32 if mesh else getattr(torch, config.model.dtype)
    with GPU:
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation="eager"
        ).eval()
    model.set_attn_implementation(SHARED_ATTENTION_NAME)
    model.logit_shape = 1.0, None  # which is measured by numbers
    return model


def _with_adapter(model: PreTrainedModel, config: RunConfig) -> None:
    """Its layers are made where they belong: PEFT moves them there, which fake ones do not bear."""
    given = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    with GPU, mock.patch.object(nn.Module, "to", lambda module, *_, **__: module):
        add_adapter(model, config.model.lora, path=config.model.path)
    torch.set_default_dtype(given)


def _sharded(module: Any, config: RunConfig, mesh: DeviceMesh | None) -> Any:
    """As `sharding.shard`, whose weights come from files and from rank 0."""
    if mesh is None:
        return module
    dtype = getattr(torch, config.model.dtype)
    with mock.patch.object(sharding, "_fill", lambda *_: None):  # a Mock would keep the whole
        sharding._wrap(module, mesh, dtype, OffloadPolicy())
    sharding.finish(module, dtype=dtype, device=GPU)
    return module


def _rows(config: RunConfig) -> MicroBatch:
    """A full micro-batch, of which every token is trained."""
    length = config.rollout.max_context_tokens
    zeros = np.zeros(length, np.float32)
    ids = np.full(length, 7, np.int32)
    mask = (np.arange(length) > 0).astype(np.uint8)
    row = Sample(ids, mask, zeros, ids, ids, "t", "g", 0.0, zeros[:1])
    rows = [row] * (config.train.token_budget // length)
    return pack(rows, range(len(rows)))


class _CompiledFlex(torch.autograd.Function):
    """Makes and keeps what the kernels do. Uncompiled it has all scores in memory."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def _compiled_flex(module: nn.Module, *given: Any, **_: Any) -> tuple[Tensor, None]:
    query, key, value, mask = given
    assert isinstance(mask, BlockMask)
    return _CompiledFlex.apply(query, key, value).transpose(1, 2), None


def _update(learner: Learner) -> None:
    """Without the numbers that the host looks at."""
    clip = nn.utils.clip_grad_norm_

    def clipped(*arguments: Any) -> float:
        clip(*arguments)
        return 1.0

    with (
        mock.patch.object(nn.utils, "clip_grad_norm_", clipped),
        mock.patch.object(optimizer, "whole", lambda norm: norm),
        mock.patch.object(optimizer, "relative_update", lambda _: None),
    ):
        learner.step()
