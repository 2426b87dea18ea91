"""Runs ranks above 0: they carry out rank 0's commands, in order, until it tells them to stop.

    start     load this rank's shard of the networks
    restore   load this rank's weights and moments from a checkpoint
    learn     train on a step's samples
    change    change a key of the configuration
    adapter   send this rank's part of the adapter to rank 0, which starts servers with it
    push      send this rank's part of the weights to rank 0, and compute the probe with it
    save      write this rank's shards of a checkpoint
    stop      end

These ranks write only their shards and traces, show nothing, and ignore SIGINT and SIGTERM: rank 0
decides when a run stops, and needs them for the last checkpoint.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentrl import runtime
from agentrl.config import RunConfig
from agentrl.errors import TrainingError
from agentrl.inference.weights.probe import trainer_logprobs
from agentrl.model import ranks
from agentrl.model.load import load_tokenizer
from agentrl.model.tensors import copy_trained, take_part
from agentrl.train import checkpoint
from agentrl.train.checkpoint import Saver
from agentrl.train.profile import Profiler, span
from agentrl.train.trainer import Trainer, make_trainer
from agentrl.types import Sample


def follow(config: RunConfig) -> None:
    """Carries out rank 0's commands until it says stop.

    Raises:
        RuntimeError: the connection to rank 0 or another rank broke.
        SystemExit: training failed; rank 0 reports why.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    trainer: Trainer | None = None
    saver: Saver | None = None
    while True:
        word, content = ranks.told()
        if word == "stop":
            if saver is not None:
                saver.wait()
            return
        with ranks.working(word):
            if word == "start":
                tokenizer = load_tokenizer(config.model.path, config.model.chat_template)
                trainer = runtime.run(make_trainer(config, tokenizer, Path(content)))
                saver = Saver(trainer.run_dir, in_background=config.run.async_save)
            else:
                assert trainer is not None and saver is not None
                _obey(trainer, saver, word, content)


def _obey(trainer: Trainer, saver: Saver, word: str, content: Any) -> None:
    if word == "learn":
        step, states, greedy_rewards, samples = content
        profiler = Profiler(trainer.run_dir, trainer.config.run.profile)
        profiler.start(step)
        try:
            with span("update"):
                trainer.learn(step, unpacked(samples), states, greedy_rewards)
        except TrainingError:
            raise SystemExit(1) from None  # rank 0 reports the reason
        finally:
            profiler.stop()
    elif word == "change":
        trainer.change(*content)
    elif word == "restore":
        fingerprint, force = content
        state = checkpoint.resume(
            trainer.run_dir,
            fingerprint=fingerprint,
            policy=trainer.learner,
            critic=trainer.critic,
            reference=trainer.changing_reference,
            force=force,
        )
        trainer.restore_counters(state)
    elif word == "save":
        step, keep = content
        saver.wait()
        saver.save(trainer.state(step, {}, {}), keep=keep)
    elif word == "adapter":
        take_part(trainer.model)
    elif word == "push":
        version, probe = content
        if probe is None:
            copy_trained(trainer.model, None)
        else:
            take_part(trainer.model)
            ids, temperature = probe
            trainer_logprobs(
                trainer.model,
                ids,
                version=version,
                temperature=temperature,
                quantization=trainer.config.inference.quantization,
            )
    else:
        raise ValueError(f"rank 0 says {word!r}")


def packed(samples: Sequence[Sample]) -> list[bytes]:
    """Returns samples in the form in which `ranks.tell` sends them: each by itself, because msgpack
    takes no more than 4 GiB at once."""
    return [msgspec.msgpack.encode(sample, enc_hook=_of_numpy) for sample in samples]


def unpacked(parts: Sequence[bytes]) -> list[Sample]:
    """Returns the samples that `packed` encoded."""
    return [msgspec.msgpack.decode(part, type=Sample, dec_hook=_array) for part in parts]


def _of_numpy(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return value.dtype.str, value.shape, value.tobytes()


def _array(kind: type, content: Any) -> np.ndarray:
    dtype, shape, data = content
    return np.frombuffer(bytearray(data), dtype).reshape(shape)  # not of `bytes`: read-only
