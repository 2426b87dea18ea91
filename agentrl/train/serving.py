"""The engine that samples for a run, and how it gets new weights.

`embedded`: this process, from the trainer's own weights; there is nothing to send.
`vllm`, `sglang`: servers behind `inference.urls`, or started and watched over by this run; after
every training step they get the weights through `agentrl.sync`: in a file, in requests or by NCCL.
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
from agentrl.inference.embedded_routes import make_replayable, routers_of
from agentrl.inference.embedded_sampling import require_exact_cache, share_weights
from agentrl.inference.http import EngineSession
from agentrl.inference.launcher import ServerLauncher
from agentrl.inference.program import ServerSettings
from agentrl.inference.sglang import workers_of
from agentrl.inference.vllm_images import NORMALISED
from agentrl.sync.adapter import ADAPTER_FOLDER, has_adapter, write_adapter
from agentrl.sync.control import SGLangControl, VLLMControl
from agentrl.sync.nccl import Library, NCCLTransfer
from agentrl.sync.plugin import write_plugin
from agentrl.sync.push import ServerWeightSync
from agentrl.sync.sglang import FolderTransfer, TensorTransfer, TorchTransfer
from agentrl.sync.shards import computing_dtype, copy_trained, is_sharded
from agentrl.sync.transfer import FileTransfer, Transfer, in_thread
from agentrl.train import ranks
from agentrl.train.logprobs import computing_device
from agentrl.train.lora import add_adapter, base_of, is_adapter
from agentrl.train.memory import (
    device_memory,
    share_for_servers,
    share_in_arguments,
)
from agentrl.train.model import load_model

logger = logging.getLogger(__name__)

PROBE_TOKENS = 32
"""Length of the prompt by which a server's weights are compared with the trainer's."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "fp8": 0.15}
"""Of the probe; see `sync.probe`."""
QUANTIZATIONS = {"nf4": "bitsandbytes", "fp8": "fp8_per_channel"}
"""What vLLM calls them; it rounds the 16-bit weights that it loads."""
AGENT_PATIENCE_S = 0.2
"""Agents do other things between two calls: a round starts without them when none called for so
long. More makes larger batches, and each of them later where an agent is busy."""


@dataclass(slots=True)
class Serving:
    engine: InferenceEngine
    sync: ServerWeightSync | None = None
    """None where engine and trainer share their weights."""
    launcher: ServerLauncher | None = None
    """None unless this run started the servers."""
    sleeps: bool = False
    """The servers sleep while the trainer learns (`inference.share`)."""
    own_model: PreTrainedModel | None = None
    """The model that the embedded engine samples from where ranks have shards of the trainer's."""

    async def push(self, model: PreTrainedModel, version: int) -> dict[str, float]:
        """Have the engine sample from these weights; returns metrics.

        Raises:
            WeightSyncError: a server refused them, or answers as if it had others.
            InferenceError: the servers died so often that they were given up on.
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
        metrics = {} if self.sync is None else await self.sync.push(model, version)
        self.engine.policy_version = version
        return metrics

    async def sleep(self, model: PreTrainedModel) -> dict[str, float]:
        """Have the servers give their GPU's memory back until the next push; returns metrics.

        One that cannot is ended. None is started before the push, in whatever state it is.
        """
        if not self.sleeps:
            return {}
        assert self.sync is not None and self.launcher is not None
        started = time.monotonic()
        self.launcher.hold()
        # An update of an adapter brings none of the weights beneath it.
        failed = await self.sync.sleep(keep_weights=has_adapter(model))
        for url, error in failed.items():
            logger.warning(
                "%s does not sleep and is ended until the trainer is done: %s", url, error
            )
            await self.launcher.stop(url)
        return {"sync/sleep_s": time.monotonic() - started, "sync/not_asleep": len(failed)}

    async def aclose(self) -> None:
        await self.engine.aclose()
        if self.sync is not None:
            await self.sync.aclose()
        if self.launcher is not None:
            await self.launcher.aclose()


def embedded_engine(
    config: RunConfig, model: PreTrainedModel, *, for_agents: bool
) -> EmbeddedEngine:
    """
    Raises:
        InferenceError: the family cannot be sampled from exactly in this process.
    """
    if config.train.router_replay:  # where ranks share the weights it is another than the trainer's
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
    """Start the engine of a training run. Servers hold `model.path` until the first `push`.

    Raises:
        ConfigError: the backend cannot be trained with.
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
            f"inference.backend = {inference.backend!r} can be evaluated against, but not trained "
            "with: it returns no token ids and takes no weights; use embedded, vllm or sglang"
        )
    if inference.quantization and routers_of(model):
        raise ConfigError(
            "inference.quantization = 'fp8' is for dense models: whether a server's experts are "
            "rounded anew with every update is not known; leave it out"
        )
    launcher = None
    weights_dir = inference.weights_dir or run_dir / "weights"
    transfer = _transfer_of(config, model, weights_dir)
    if not inference.urls:
        adapter = None
        if has_adapter(model):
            ranks.tell("adapter")
            adapter = write_adapter(model, weights_dir / ADAPTER_FOLDER).parent
        # Whatever it is started with, the first push brings the trainer's weights.
        start, _ = servable(config.model.path, run_dir / "served")
        must_be_others = transfer.backend == "nccl" or is_sharded(model)
        if inference.share == "sleep" and ranks.size() > 1:
            raise ConfigError(
                f"inference.share = 'sleep' works with one rank, and {ranks.size()} were started; "
                "give the servers GPUs of their own, or start one"
            )
        devices, extra = _servers_devices(config, computing_device(model), must_be_others)
        launcher = launcher_of(
            config,
            start,
            log_dir=run_dir / "logs",
            plugin_dir=run_dir / "plugin" if inference.backend == "vllm" else None,
            transfer_backend=transfer.backend,
            adapter=adapter,
            env=devices,
            extra_args=extra,
        )
        if not quiet:
            name = backend.program.name
            print(f"starting {name}, half a minute or more; its log is in {run_dir / 'logs'}")
        await launcher.start()
    urls = inference.urls or (launcher.urls if launcher else [])
    engine = backend.engine(
        urls,
        model=inference.model,
        token=inference.token,
        # No seeds: a server's batches depend on timing, so they would not make a run repeatable;
        # they slow sampling down, and vLLM's CPU build dies of them (partial prefills of requests
        # with a generator of their own).
        seed=None,
        request_timeout_s=config.rollout.turn_timeout_s,
        # One of ours that died is waited for until it had the time to start again.
        retry_for_s=max(inference.retry_for_s, inference.startup_timeout_s if launcher else 0),
    )
    tolerance = TOLERANCE[inference.quantization or config.model.dtype]
    vocab_size = model.config.get_text_config().vocab_size
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
        # Long enough for a server that died to be there again.
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
    """Returns the addresses that get weights: the servers, and those behind a router in its place.

    Raises:
        InferenceError: an address does not answer, or is a router without a worker.
    """
    if config.inference.backend != "sglang":
        return list(urls)
    async with contextlib.aclosing(EngineSession(config.inference.token)) as http:
        return [worker for url in urls for worker in await workers_of(http, url.rstrip("/"))]


def _own_model(config: RunConfig, model: PreTrainedModel) -> PreTrainedModel:
    whole = load_model(
        config.model.path,
        dtype=computing_dtype(model),
        device=computing_device(model),
        max_tokens=config.rollout.max_context_tokens,
    )
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
            f"inference.transfer = 'nccl' sends from GPU to GPU, and the model is on the "
            f"{device.type}; set model.device = 'cuda' or inference.transfer = 'file'"
        )
    return TorchTransfer() if on_sglang else NCCLTransfer(Library())


def _servers_devices(
    config: RunConfig, trainers: torch.device, must_be_others: bool
) -> tuple[dict[str, str] | None, list[str]]:
    """Returns the environment variables that give servers their GPUs, and arguments that limit
    their memory where they share the trainer's only GPU.

    Raises:
        ConfigError: they must be on other GPUs, and there are none.
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
        "servers %s the trainer's GPU: each gets %.2f of its memory, which the trainer leaves; "
        "inference.args = ['%s', '...'] sets another share",
        "take turns on" if takes_turns else "share",
        share,
        flag,
    )
    return devices, [flag, f"{share:.2f}"]


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]


def _other_gpus(trainers: torch.device) -> dict[str, str]:
    """Returns the environment variable that leaves servers all GPUs but those of the ranks here."""
    visible = _visible_gpus()
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    used = range(num_ranks) if num_ranks > 1 else [trainers.index or 0]
    others = [gpu for number, gpu in enumerate(visible) if number not in used]
    if not others:
        raise ConfigError(
            f"the servers need a GPU beside the trainer's, which takes all {len(visible)}; set "
            "inference.urls, start fewer ranks or, with one rank, set inference.transfer = 'file'"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(others)}


def servable(path: str, folder: Path) -> tuple[str, Path | None]:
    """Returns the path that a server is started with, and the folder of an adapter on top.

    A server takes every safetensors file of a folder for weights of the model, and a run's
    checkpoint has other such files too. It is served from `folder`, which links to the rest.
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


def launcher_of(
    config: RunConfig,
    model_path: str,
    *,
    log_dir: Path,
    plugin_dir: Path | None,
    transfer_backend: str = "agentrl",
    adapter: Path | None = None,
    env: dict[str, str] | None = None,
    extra_args: Sequence[str] = (),
) -> ServerLauncher:
    """Returns a launcher of servers for this run, not started yet; `server_settings` says more."""
    return ServerLauncher(
        server_settings(
            config,
            model_path,
            log_dir=log_dir,
            plugin_dir=None if plugin_dir is None else write_plugin(plugin_dir),
            transfer_backend=transfer_backend,
            adapter=adapter,
            env=env,
            extra_args=extra_args,
        ),
        BACKENDS[config.inference.backend].program,
    )


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
    """Returns how a run's servers are started.

    Args:
        plugin_dir: where vLLM's weight-transfer plugin is written for the servers to load; None for
            servers whose weights never change, or that have agentrl installed.
        transfer_backend: see `Transfer.backend`.
        adapter: folder of the adapter that is trained.
        env: further environment variables of the servers.
        extra_args: arguments before those of `inference.args`, which win.
        python: the servers' interpreter; found as `inference.python` says when None.

    Raises:
        ConfigError: no interpreter with the servers' package is named.
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
            "inference.urls, or with inference.python the interpreter of an environment that has "
            f"{program.name} (`make {program.package}` makes {program.beside.parents[1]}, which is "
            "found by itself)"
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
        align_rounding=inference.align_rounding,
        sleeps=inference.share == "sleep",
        adapter=adapter,
        extra_args=[
            *(["--quantization", QUANTIZATIONS[quantization]] if quantization else []),
            *([NORMALISED] if _family(model_path) in families else []),
            *extra_args,
            *inference.args,
        ],
        env=env or {},
        startup_timeout_s=inference.startup_timeout_s,
        hung_after_s=inference.hung_after_s,
        seed=config.run.seed,
    )


def _family(model_path: str) -> str | None:
    """Returns the family of a model; None where its configuration is not on this machine, as for
    `agentrl inference command`."""
    try:
        return AutoConfig.from_pretrained(model_path, local_files_only=True).model_type
    except (OSError, ValueError):
        return None
