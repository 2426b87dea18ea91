"""Starts the engine that samples for a run, and sends it new weights.

`embedded` samples in this process from the trainer's own weights, so nothing is sent. `vllm` and
`sglang` are servers at `inference.urls`, or started and supervised by this run; after every
training step `agentrl.inference.weights` sends them the weights in a file, in requests or by NCCL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, InferenceError
from agentrl.inference.backends import BACKENDS
from agentrl.inference.base import InferenceEngine
from agentrl.inference.embedded import EmbeddedEngine
from agentrl.inference.embedded_sampling import require_exact_cache, share_weights
from agentrl.inference.http import EngineSession
from agentrl.inference.launcher import ServerLauncher
from agentrl.inference.program import ServerSettings
from agentrl.inference.remote import ServerEngine
from agentrl.inference.sglang import workers_of
from agentrl.inference.vllm_images import NORMALISED
from agentrl.inference.weights.control import SGLangControl, VLLMControl
from agentrl.inference.weights.nccl import Library, NCCLTransfer
from agentrl.inference.weights.plugin import write_plugin
from agentrl.inference.weights.push import ServerWeightSync
from agentrl.inference.weights.sglang import FolderTransfer, TensorTransfer, TorchTransfer
from agentrl.inference.weights.transfer import FileTransfer, Transfer, in_thread
from agentrl.model import ranks
from agentrl.model.adapter_files import ADAPTER_FOLDER, has_adapter, write_adapter
from agentrl.model.build import build
from agentrl.model.logprobs import computing_device
from agentrl.model.lora import add_adapter, base_of, is_adapter
from agentrl.model.routes import make_replayable, routers_of
from agentrl.model.tensors import copy_trained, is_sharded
from agentrl.train.memory import device_memory, share_for_servers, share_in_arguments

logger = logging.getLogger(__name__)

PROBE_TOKENS = 32
"""Tokens of the prompt with which a server's weights are compared with the trainer's."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "fp8": 0.15}
"""Dtype or quantization -> largest difference that the probe allows; see `sync.probe`."""
QUANTIZATIONS = {"nf4": "bitsandbytes", "fp8": "fp8_per_channel"}
"""Quantization -> vLLM's name for it; vLLM rounds the 16-bit weights that it loads."""
AGENT_PATIENCE_S = 0.2
"""Seconds without a call from an agent after which the embedded engine starts a round of sampling.
A longer time makes larger batches, but delays them while an agent is busy between two calls."""


@dataclass(slots=True)
class Serving:
    """The engine of a run, and everything that keeps its weights current."""

    engine: InferenceEngine
    sync: ServerWeightSync | None = None
    """None for the embedded engine."""
    launcher: ServerLauncher | None = None
    """None unless this run started the servers."""
    sleeps: bool = False
    """The servers sleep while the trainer learns (`inference.share`)."""
    own_model: PreTrainedModel | None = None
    """The embedded engine's own model if ranks hold shards of the trainer's; else None."""

    async def push(self, model: PreTrainedModel, version: int) -> dict[str, float]:
        """Makes the engine sample from a model's weights; returns metrics.

        Args:
            version: the policy version of the weights.

        Raises:
            WeightSyncError: a server refused the weights, or its log-probs are those of others.
            InferenceError: the servers died too often to be restarted again.
        """
        if self.launcher is not None and self.launcher.failure is not None:
            raise InferenceError(self.launcher.failure)
        if self.sleeps and self.launcher is not None:
            self.launcher.release()
        if ranks.size() > 1:  # they put the weights together with this one, and compute the probe
            probe = None if self.sync is None else [self.sync.probe_ids, self.sync.temperature]
            ranks.tell("push", [version, probe])
        if self.own_model is not None:
            own_model = self.own_model

            def copy() -> None:
                with ranks.working("push"):
                    copy_trained(model, own_model)

            await in_thread(copy)
        if isinstance(self.engine, ServerEngine):
            self.engine.sent_version = version
        metrics = {} if self.sync is None else await self.sync.push(model, version)
        if self.launcher is not None:
            metrics["sync/server_restarts"] = self.launcher.restarts
        self.engine.policy_version = version
        return metrics

    async def sleep(self, model: PreTrainedModel) -> dict[str, float]:
        """Makes the servers free their GPU's memory until the next push; returns metrics.

        A server that cannot is stopped, and no server is restarted before the push. Does nothing
        unless `sleeps`.
        """
        if not self.sleeps:
            return {}
        assert self.sync is not None and self.launcher is not None
        started = time.monotonic()
        self.launcher.hold()
        # A push of an adapter does not bring the weights beneath it.
        failed = await self.sync.sleep(keep_weights=has_adapter(model))
        for url, error in failed.items():
            logger.warning(
                "%s does not sleep, so it is stopped until the trainer is done: %s", url, error
            )
            await self.launcher.stop(url)
        return {"sync/sleep_s": time.monotonic() - started, "sync/not_asleep": len(failed)}

    async def aclose(self) -> None:
        """Closes the engine and stops the servers that this run started."""
        await self.engine.aclose()
        if self.sync is not None:
            await self.sync.aclose()
        if self.launcher is not None:
            await self.launcher.aclose()


def embedded_engine(
    config: RunConfig, model: PreTrainedModel, *, for_agents: bool
) -> EmbeddedEngine:
    """Makes an engine that samples from `model` in this process.

    Args:
        for_agents: agents call the engine, so it waits a moment for further calls.

    Raises:
        InferenceError: the embedded engine cannot sample exactly from the model's family.
    """
    if config.train.router_replay:  # with several ranks this is not the trainer's own model
        make_replayable(model)
    require_exact_cache(share_weights(model), config.rollout.max_context_tokens)
    patience_s = AGENT_PATIENCE_S if for_agents else None
    return EmbeddedEngine(
        model,
        seed=config.run.seed,
        max_batch_tokens=config.inference.max_batch_tokens,
        patience_s=patience_s,
    )


async def start_serving(
    config: RunConfig, model: PreTrainedModel, run_dir: Path, *, quiet: bool = True
) -> Serving:
    """Starts the engine of a training run. Servers hold `model.path` until the first `push`.

    Raises:
        ConfigError: the backend, or a combination of keys, cannot be trained with.
        InferenceError: a server does not start or cannot be reached.
    """
    inference = config.inference
    if inference.backend == "embedded":
        own_model = _own_model(config, model) if is_sharded(model) else None
        return Serving(
            embedded_engine(config, own_model or model, for_agents=config.plays_by_agent),
            own_model=own_model,
        )
    backend = BACKENDS.get(inference.backend)
    if backend is None:
        raise ConfigError(
            f"inference.backend = {inference.backend!r} is for evaluation, not for training: it "
            "returns no token ids and takes no weights; use embedded, vllm or sglang"
        )
    if inference.quantization and routers_of(model):
        raise ConfigError(
            "inference.quantization = 'fp8' is for dense models only, because servers are not "
            "known to round experts again after every update; leave it out"
        )
    launcher = None
    weights_dir = inference.weights_dir or run_dir / "weights"
    transfer = _transfer_of(config, model, weights_dir)
    if not inference.urls:
        adapter = None
        if has_adapter(model):
            ranks.tell("adapter")
            adapter = write_adapter(model, weights_dir / ADAPTER_FOLDER).parent
        # The first push replaces the weights that the servers are started with.
        start, _ = servable(config.model.path, run_dir / "served")
        must_be_others = transfer.backend == "nccl" or is_sharded(model)
        if inference.share == "sleep" and ranks.size() > 1:
            raise ConfigError(
                f"inference.share = 'sleep' works with one rank only, but {ranks.size()} were "
                "started; give the servers their own GPUs, or start one rank"
            )
        devices, extra = _servers_devices(config, computing_device(model), must_be_others)
        settings = server_settings(
            config,
            start,
            log_dir=run_dir / "logs",
            plugin_dir=write_plugin(run_dir / "plugin") if inference.backend == "vllm" else None,
            transfer_backend=transfer.backend,
            adapter=adapter,
            env=devices,
            extra_args=extra,
        )
        launcher = ServerLauncher(settings, backend.program)
        if not quiet:
            name = backend.program.name
            print(f"starting {name} takes half a minute or more; its log is in {run_dir / 'logs'}")
        await launcher.start()
    urls = inference.urls or (launcher.urls if launcher else [])
    vocab_size = model.config.get_text_config().vocab_size
    engine = backend.engine(
        urls,
        model=inference.model,
        token=inference.token,
        # A server's batches depend on timing, so seeds would not make a run repeatable. They would
        # slow sampling down, and crash vLLM's CPU build (partial prefills of seeded requests).
        seed=None,
        request_timeout_s=config.rollout.turn_timeout_s,
        # If one of our servers dies, requests wait until it has had time to start again.
        retry_for_s=max(inference.retry_for_s, inference.startup_timeout_s if launcher else 0),
        vocab_size=vocab_size,
    )
    tolerance = TOLERANCE[inference.quantization or config.model.dtype]
    probe = np.random.default_rng(0).integers(vocab_size, size=PROBE_TOKENS)
    sync = ServerWeightSync(
        await _workers(config, urls),
        model_name=inference.model,
        token=inference.token,
        transfer=transfer,
        control=VLLMControl if inference.backend == "vllm" else SGLangControl,
        on_update=config.rollout.on_update,
        probe_ids=probe.tolist(),
        temperature=config.rollout.temperature,
        tolerance=inference.sync_tolerance or tolerance,
        quantization=inference.quantization,
        # Long enough for a server that died to start again.
        timeout_s=inference.startup_timeout_s,
        on_missed=engine.distrust,
    )
    engine.resync = sync.push_to
    serving = Serving(engine, sync, launcher, sleeps=inference.share == "sleep")
    try:
        await engine.start()
    except BaseException:
        await serving.aclose()
        raise
    return serving


async def _workers(config: RunConfig, urls: Sequence[str]) -> list[str]:
    """Returns the addresses to send weights to; in place of a router, those of its workers."""
    if config.inference.backend != "sglang":
        return list(urls)
    async with contextlib.aclosing(EngineSession(config.inference.token)) as http:
        return [worker for url in urls for worker in await workers_of(http, url.rstrip("/"))]


def _own_model(config: RunConfig, model: PreTrainedModel) -> PreTrainedModel:
    """Loads a whole model for the embedded engine, because `model` is sharded."""
    whole = build(config.model.path, "sampler", config).module
    if has_adapter(model):
        add_adapter(whole, config.model.lora, path=config.model.path)
    return whole


def _transfer_of(config: RunConfig, model: PreTrainedModel, weights_dir: Path) -> Transfer:
    on_sglang = config.inference.backend == "sglang"
    if config.inference.transfer == "tensor":
        return TensorTransfer(weights_dir)
    if config.inference.transfer == "file":
        return FolderTransfer(weights_dir) if on_sglang else FileTransfer(weights_dir)
    if (device := computing_device(model)).type != "cuda":
        raise ConfigError(
            f"inference.transfer = 'nccl' sends from GPU to GPU, but the model is on the "
            f"{device.type}; set model.device = 'cuda' or inference.transfer = 'file'"
        )
    return TorchTransfer() if on_sglang else NCCLTransfer(Library())


def _servers_devices(
    config: RunConfig, trainers: torch.device, must_be_others: bool
) -> tuple[dict[str, str] | None, list[str]]:
    """Chooses the GPUs of the servers.

    Args:
        trainers: the trainer's device.
        must_be_others: servers cannot share the trainer's GPU.

    Returns:
        Environment variables that select the GPUs (None keeps the environment), and arguments that
        limit the memory of servers that share the trainer's GPU.
    """
    if trainers.type != "cuda":
        return None, []
    takes_turns = config.inference.share == "sleep"
    if must_be_others or (len(_visible_gpus()) > 1 and not takes_turns):
        return _other_gpus(trainers), []
    devices = None
    if takes_turns and len(_visible_gpus()) > 1:
        devices = {"CUDA_VISIBLE_DEVICES": _visible_gpus()[trainers.index or 0]}
    flag = BACKENDS[config.inference.backend].program.share_flag
    if share_in_arguments(config.inference.args, flag) is not None:
        return devices, []
    share = share_for_servers(config, device_memory("cuda"), device_type="cuda")
    logger.info(
        "servers %s the trainer's GPU: each gets %.2f of its memory, which training leaves free; "
        "set another share with inference.args = ['%s', '...']",
        "take turns on" if takes_turns else "share",
        share,
        flag,
    )
    return devices, [flag, f"{share:.2f}"]


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]


def _other_gpus(trainers: torch.device) -> dict[str, str]:
    """Returns the environment variable that gives servers all GPUs here without a rank."""
    visible = _visible_gpus()
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    used = range(num_ranks) if num_ranks > 1 else [trainers.index or 0]
    others = [gpu for number, gpu in enumerate(visible) if number not in used]
    if not others:
        raise ConfigError(
            f"the servers need a GPU besides the trainer's, which takes all {len(visible)}; set "
            "inference.urls, start fewer ranks or, with one rank, set inference.transfer = 'file'"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(others)}


def servable(path: str, folder: Path) -> tuple[str, Path | None]:
    """Returns the path to start a server with, and the directory of the adapter on top, or None.

    A server takes every safetensors file of a directory for weights of the model, but a run's
    checkpoint also holds others, such as the optimizer's. So a checkpoint is served from `folder`,
    which links to all its files but those.
    """
    checkpoint = Path(path)
    if is_adapter(path):
        return base_of(path), checkpoint
    if not (checkpoint / "optimizer.safetensors").exists():
        return path, None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors" or file.name.startswith("model"):
            (folder / file.name).symlink_to(file.resolve())
    return str(folder), None


def server_settings(
    config: RunConfig,
    model_path: str,
    *,
    log_dir: Path,
    plugin_dir: Path | None,
    transfer_backend: str = "agentrl",
    adapter: Path | None = None,
    env: dict[str, str] | None = None,
    extra_args: Sequence[str] = (),
    python: str | None = None,
) -> ServerSettings:
    """Returns the settings with which a run's servers are started.

    Args:
        model_path: model that the servers load.
        log_dir: directory of the servers' logs.
        plugin_dir: directory with vLLM's weight-transfer plugin for the servers to load; None for
            servers whose weights never change, or that have agentrl installed.
        transfer_backend: see `Transfer.backend`.
        adapter: directory of the adapter that is trained.
        env: further environment variables of the servers.
        extra_args: arguments that precede, and so yield to, those of `inference.args`.
        python: the servers' interpreter; if None, it is found as `inference.python` describes.

    Raises:
        ConfigError: no interpreter with the servers' package is found.
    """
    inference = config.inference
    quantization = config.model.quantization or inference.quantization
    program = BACKENDS[inference.backend].program
    python = python or inference.python or os.environ.get(program.python_variable)
    if python is None and program.beside.exists():
        python = str(program.beside)
    if python is None:
        raise ConfigError(
            f"inference.backend = {inference.backend!r} needs servers: name running ones with "
            "inference.urls, or set inference.python to the interpreter of an environment that has "
            f"{program.name} (`make {program.package}` makes {program.beside.parents[1]}, which is "
            "found automatically)"
        )
    families = BACKENDS[inference.backend].engine.image_families
    return ServerSettings(
        python=python,
        model=model_path,
        num_servers=inference.num_servers,
        served_model_name=inference.model,
        dtype=config.model.dtype,
        max_model_len=config.rollout.max_context_tokens,
        log_dir=log_dir,
        plugin_dir=plugin_dir,
        transfer_backend=transfer_backend,
        sleeps=inference.share == "sleep",
        adapter=adapter,
        extra_args=[
            *(["--quantization", QUANTIZATIONS[quantization]] if quantization else []),
            *([NORMALISED] if _family(model_path) in families else []),
            *(["--enable-return-routed-experts"] if config.train.router_replay else []),
            *extra_args,
            *inference.args,
        ],
        env=env or {},
        startup_timeout_s=inference.startup_timeout_s,
        hung_after_s=inference.hung_after_s,
        seed=config.run.seed,
    )


def _family(model_path: str) -> str | None:
    """Returns the family of a model; None if its configuration is not on this machine, as it may be
    for `agentrl launch --print-servers`."""
    try:
        return AutoConfig.from_pretrained(model_path, local_files_only=True).model_type
    except (OSError, ValueError):
        return None
