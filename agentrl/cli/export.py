"""`agentrl export`: a checkpoint as one model folder, or an evaluation as a log of inspect_ai."""

from __future__ import annotations

import hashlib
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.evaluate.episodes import CONFIG_FILE, groups_of, read_evaluation
from agentrl.evaluate.measure import summarise
from agentrl.evaluate.statistics import EvalStatistics
from agentrl.images import IMAGES_FOLDER, ImageStore, content_parts
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.types import Message, Trajectory


def export_model(checkpoint: Path, out: Path, *, dtype: str) -> None:
    """Writes a checkpoint as one model folder: its shards together, an adapter in its base model,
    and nothing that only training needs.

    Args:
        checkpoint: of any kind, or a run's directory, whose newest one is taken.
        dtype: dtype of the weights, for an adapter that is merged: `float32` or `bfloat16`.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: `checkpoint` is none, or `out` is not empty.
    """
    if not checkpoint.is_dir():  # before torch is loaded
        there = sorted(each.name for each in checkpoint.parent.glob("step_*"))
        known = f"; there are {', '.join(there[-5:])}" if there else ""
        raise ConfigError(f"there is no checkpoint {checkpoint}{known}")
    from agentrl.model.load import is_adapter, merge_adapter
    from agentrl.train.checkpoint import export, has_shards, latest_checkpoint

    checkpoint = latest_checkpoint(checkpoint) or checkpoint
    if not is_adapter(str(checkpoint)):
        export(checkpoint, out)
    elif not has_shards(checkpoint):
        merge_adapter(checkpoint, out, dtype=dtype)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent) as folder:
            export(checkpoint, Path(folder) / "adapter")
            merge_adapter(Path(folder) / "adapter", out, dtype=dtype)


def export_evaluation(folder: Path, path: Path) -> None:
    """Writes an evaluation as inspect_ai's log; a failed episode becomes a sample with an error.

    Raises:
        ConfigError: inspect_ai is not installed, or `path` exists.
        DataError: `folder` holds no evaluation.
    """
    try:
        from inspect_ai.log import EvalLog, write_eval_log  # pyright: ignore
    except ImportError as error:
        raise ConfigError(
            f"--out {path}: a log is written by inspect_ai: pip install 'agentrl-gym[inspect]' "
            f"({error})"
        ) from None
    if path.exists():
        raise ConfigError(f"--out {path} exists already; remove it, or name another file")
    config, trajectories = read_evaluation(folder, images=True)
    store = ImageStore(folder / IMAGES_FOLDER)
    groups = groups_of(trajectories)
    created = datetime.fromtimestamp((folder / CONFIG_FILE).stat().st_mtime, UTC)
    ids = [group.task_id for group in groups]
    spec = {
        "eval_id": hashlib.sha256(config.to_toml().encode()).hexdigest()[:22],
        "created": created.isoformat(timespec="seconds"),
        "task": config.env.id,
        "model": config.model.path,
        "dataset": {"name": config.eval.split, "samples": len(ids), "sample_ids": ids},
        "config": {"epochs": config.eval.samples_per_task, "epochs_reducer": ["mean"]},
        "metadata": {"agentrl": config.to_json(exclude_none=True)},
    }
    samples = [
        _sample(trajectory, epoch, config.model.path, store)
        for group in groups
        for epoch, trajectory in enumerate(group.trajectories, 1)
    ]
    results = _results(trajectories, summarise(RolloutBatch(groups, trajectories), config))
    log = {"status": "success", "eval": spec, "results": results, "samples": samples}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_eval_log(EvalLog.model_validate(log), str(path), format="eval")


def _results(trajectories: list[Trajectory], statistics: EvalStatistics | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "total_samples": len(trajectories),
        "completed_samples": sum(t.error is None for t in trajectories),
    }
    if statistics is not None:
        average = statistics.average
        named = {"mean": average.value, "stderr": average.standard_error}
        named |= {f"pass@{k}": estimate.value for k, estimate in statistics.pass_at.items()}
        metrics = {n: {"name": n, "value": v} for n, v in named.items() if v is not None}
        found["scores"] = [{"name": "reward", "scorer": "reward", "metrics": metrics}]
    return found


def _sample(trajectory: Trajectory, epoch: int, model: str, store: ImageStore) -> dict[str, Any]:
    messages = [_message(message, store) for message in trajectory.messages]
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    read, sampled = trajectory.num_read_tokens, trajectory.num_sampled_tokens
    usage = {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}
    reference = trajectory.info.get("reference", "")
    answers = [{"message": messages[-1]}] if roles and roles[-1] == "assistant" else []
    sample: dict[str, Any] = {
        "id": trajectory.task_id,
        "epoch": epoch,
        "input": messages[:first],
        "messages": messages,
        "target": reference if isinstance(reference, str) else json.dumps(reference),
        "output": {"model": model, "choices": answers, "usage": usage},
        "model_usage": {model: usage},
        "total_time": trajectory.total_s,
        "uuid": trajectory.trajectory_id,
        "metadata": {"seed": trajectory.seed, "info": trajectory.info},
    }
    if (error := trajectory.error) is None:
        return sample | {"scores": {"reward": {"value": trajectory.reward}}}
    text = f"{error.stage}: {error.code}: {error.message}"
    return sample | {"error": {"message": text, "traceback": "", "traceback_ansi": ""}}


def _message(message: Message, store: ImageStore) -> dict[str, Any]:
    parts: list[Any] = []
    if reasoning := message.get("reasoning"):
        parts.append({"type": "reasoning", "reasoning": reasoning})
    for part in content_parts(message["content"], store):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            parts.append({"type": "image", "image": part.url})
    wire: dict[str, Any] = {"role": message["role"], "content": parts}
    calls: Any = message.get("tool_calls")
    if calls:
        wire["tool_calls"] = [
            {
                "id": call.get("id") or "",  # examples in a prompt may have none
                "function": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
            for call in calls
        ]
    if message["role"] == "tool":
        wire["tool_call_id"] = message.get("tool_call_id")
        wire["function"] = message.get("name")
    return wire
