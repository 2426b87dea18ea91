"""`agentrl convert`: converts evaluations from and to the formats of other programs.

inspect_ai's `.eval` is a zip archive of JSON documents, which it compresses with zstd; it reads
deflate as well, which is written here. lm-evaluation-harness writes a line of JSON for each task
and filter (`--log_samples`). Neither package is needed. ATIF, which is written only, has a module
of its own (`agentrl.atif`).
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import zstandard

from agentrl.api import Evaluation
from agentrl.atif import write_atif
from agentrl.config import RunConfig, load_config
from agentrl.errors import ConfigError, DataError
from agentrl.evaluate.episodes import (
    CONFIG_FILE,
    EpisodeLog,
    by_group,
    open_episodes,
    read_evaluation,
)
from agentrl.evaluate.measure import summarise
from agentrl.images import IMAGES_FOLDER, ImageStore, content_parts, content_text, count_images
from agentrl.rollout.scheduler import RolloutBatch
from agentrl.types import (
    JSON,
    Group,
    Message,
    StopReason,
    TokenRow,
    Trajectory,
    TrajectoryError,
    Turn,
)

_ZSTD = 93
"""The archive's number for zstd, which Python's zipfile does not know before 3.14."""
_LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""inspect_ai's correct, partly correct, incorrect, and no answer."""


def convert_command(source: Path, out: Path, score: str | None) -> int:
    """Runs `agentrl convert`: reads `source` in whatever format it has, and writes the format that
    the suffix of `out` names."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(f"{out} is there already; remove it, or name another")
    if not source.exists():
        raise ConfigError(f"{source}: no such file or folder")
    store = ImageStore(source / IMAGES_FOLDER) if source.is_dir() else None
    if source.is_dir() and out.suffix == ".atif":
        # One by one: a training run has many.
        return _to_atif(out, *open_episodes(source), store)
    if source.is_dir():
        config, trajectories = read_evaluation(source, images=True)
    elif source.suffix == ".eval":
        config, trajectories = read_inspect(source, score)
    elif source.suffix == ".jsonl":
        config, trajectories = read_lm_eval(source, score)
    else:
        raise ConfigError(f"{source}: neither a folder of agentrl eval, nor .eval, nor .jsonl")
    if out.suffix == ".atif":
        return _to_atif(out, config, trajectories, store)
    out.parent.mkdir(parents=True, exist_ok=True)
    result = _evaluation(config, trajectories)
    if out.suffix == ".eval":
        created = (source / CONFIG_FILE if source.is_dir() else source).stat().st_mtime
        write_inspect(out, config, result, created, store)
    elif out.suffix == ".jsonl":
        write_lm_eval(out, trajectories)
    else:
        EpisodeLog(out, config).finish(trajectories)
        (out / "eval.json").write_text(json.dumps(result.to_json(), indent=2) + "\n")
    average = result.statistics.average if result.statistics else "no sample has a reward"
    print(f"{out}: {len(trajectories)} episodes of {len(result.groups)} tasks, average {average}")
    return 0


def _to_atif(
    out: Path, config: RunConfig, trajectories: Iterable[Trajectory], store: ImageStore | None
) -> int:
    written, untold = write_atif(out, config.model.path, trajectories, store)
    print(f"{out}: {written} trajectories")
    if untold:
        print(f"{out}: {untold} turns have no message and were left out", file=sys.stderr)
    return 0


def _evaluation(config: RunConfig, trajectories: list[Trajectory]) -> Evaluation:
    groups = [Group(m[0].group_id, m[0].task_id, m) for m in by_group(trajectories)]
    batch = RolloutBatch(groups, trajectories)
    return Evaluation(groups, trajectories, summarise(batch, config))


def _config_of(env: str, model: str, trajectories: list[Trajectory]) -> RunConfig:
    size = max(len(members) for members in by_group(trajectories))
    tasks = len({t.task_id for t in trajectories})
    evaluation: dict[str, JSON] = {"num_tasks": tasks, "samples_per_task": size}
    return load_config({"env": {"id": env}, "model": {"path": model}, "eval": evaluation})


# inspect_ai ---------------------------------------------------------------------------------------


def write_inspect(
    path: Path,
    config: RunConfig,
    result: Evaluation,
    created: float,
    store: ImageStore | None = None,
) -> None:
    """Writes an evaluation as inspect_ai's log; a failed episode becomes a sample with an error.

    Args:
        store: the evaluation's images, which the log holds whole.
    """
    samples = []
    for group in result.groups:
        for epoch, trajectory in enumerate(group.trajectories, 1):
            samples.append(_to_sample(trajectory, epoch, config.model.path, store))
    when = datetime.fromtimestamp(created, UTC).isoformat(timespec="seconds")
    name = hashlib.sha256(config.to_toml().encode()).hexdigest()[:22]
    ids = [group.task_id for group in result.groups]
    spec = {
        "eval_id": name,
        "run_id": name,
        "task_id": name,
        "created": when,
        "task": config.env.id,
        "task_version": 0,
        "model": config.model.path,
        "dataset": {"name": config.eval.split, "samples": len(ids), "sample_ids": ids},
        "config": {"epochs": config.eval.samples_per_task, "epochs_reducer": ["mean"]},
        "metadata": {"agentrl": config.to_json(exclude_none=True)},
    }
    plan = {"name": "plan", "steps": [{"solver": "agentrl", "params": {}}], "config": {}}
    header: dict[str, Any] = {
        "version": 2,
        "status": "success",
        "eval": spec,
        "plan": plan,
        "results": _results(result),
        "stats": {"started_at": when, "completed_at": when},
    }
    partial = path.with_name(f".{path.name}.partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        start = {"version": 2, "eval": spec, "plan": plan}
        archive.writestr("_journal/start.json", json.dumps(start))
        for sample in samples:
            place = f"samples/{sample['id']}_epoch_{sample['epoch']}.json"
            archive.writestr(place, json.dumps(sample))
        kept = ("id", "epoch", "input", "target", "scores", "total_time")
        summaries = [{key: sample[key] for key in kept if key in sample} for sample in samples]
        for summary, sample in zip(summaries, samples, strict=True):
            summary["completed"] = True
            if "error" in sample:
                summary["error"] = sample["error"]["message"]
        archive.writestr("summaries.json", json.dumps(summaries))
        archive.writestr("header.json", json.dumps(header))
    partial.replace(path)


def _results(result: Evaluation) -> dict[str, Any]:
    found: dict[str, Any] = {
        "total_samples": len(result.trajectories),
        "completed_samples": sum(t.error is None for t in result.trajectories),
        "scores": [],
    }
    if (of := result.statistics) is not None:
        named = {"mean": of.average.value, "stderr": of.average.standard_error}
        named |= {f"pass@{k}": estimate.value for k, estimate in of.pass_at.items()}
        named |= {f"pass^{k}": estimate.value for k, estimate in of.all_of.items() if k > 1}
        metrics = {
            n: {"name": n, "value": value} for n, value in named.items() if value is not None
        }
        score = {"name": "reward", "scorer": "reward", "reducer": "mean", "metrics": metrics}
        found["scores"].append(score)
    return found


def _to_sample(
    trajectory: Trajectory, epoch: int, model: str, store: ImageStore | None
) -> dict[str, Any]:
    said = [_to_inspect(message, store) for message in trajectory.messages]
    prompt = said[: _first_turn(trajectory)]
    answer = said[-1] if said and said[-1]["role"] == "assistant" else None
    cut = trajectory.turns and trajectory.turns[-1].finish_reason == "length"
    choice = {"message": answer, "stop_reason": "max_tokens" if cut else "stop"}
    usage = {
        "input_tokens": trajectory.num_read_tokens,
        "output_tokens": trajectory.num_sampled_tokens,
    }
    usage["total_tokens"] = sum(usage.values())
    sample: dict[str, Any] = {
        "id": trajectory.task_id,
        "epoch": epoch,
        "input": prompt,
        "messages": said,
        "target": _as_text(trajectory.info.get("reference", "")),
        "output": {
            "model": model,
            "choices": [choice] if answer else [],
            "usage": usage,
        },
        "model_usage": {model: usage},
        "total_time": trajectory.total_s,
        "uuid": trajectory.trajectory_id,
        "metadata": {
            "seed": trajectory.seed,
            "stop_reason": str(trajectory.stop_reason),
            "reward_components": trajectory.reward_components,
            "info": trajectory.info,
        },
    }
    if (error := trajectory.error) is None:
        sample["scores"] = {"reward": {"value": trajectory.reward}}
    else:
        text = f"{error.stage}: {error.code}: {error.message}"
        sample["error"] = {"message": text, "traceback": "", "traceback_ansi": ""}
    return sample


def _first_turn(trajectory: Trajectory) -> int:
    """Returns the position of the first message that the policy wrote."""
    roles = [message["role"] for message in trajectory.messages]
    told = trajectory.turns[0].message if len(trajectory.branches) == 1 and trajectory.turns else -1
    return told if told >= 0 else roles.index("assistant") if "assistant" in roles else len(roles)


def _to_inspect(message: Message, store: ImageStore | None) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    reasoning = message.get("reasoning")
    if reasoning or not isinstance(message["content"], str):
        parts: list[Any] = [{"type": "reasoning", "reasoning": reasoning}] if reasoning else []
        for part in content_parts(message["content"], store):
            if isinstance(part, str):
                parts.append({"type": "text", "text": part})
            else:
                parts.append({"type": "image", "image": part.url})
        wire["content"] = parts
    calls: Any = message.get("tool_calls")
    if calls:
        wire["tool_calls"] = [
            {
                "id": call.get("id") or "",  # examples in a prompt may have none
                "type": "function",
                "function": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
            for call in calls
        ]
    if "tool_call_id" in message:
        wire["tool_call_id"] = message["tool_call_id"]
    if message["role"] == "tool" and "name" in message:
        wire["function"] = message["name"]
    return wire


def read_inspect(path: Path, score: str | None = None) -> tuple[RunConfig, list[Trajectory]]:
    """Reads inspect_ai's log.

    Args:
        score: the scorer whose values become rewards; None takes the first one found.

    Raises:
        DataError: the file is not such a log, or a score is not a number.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            first = "header.json" if "header.json" in names else "_journal/start.json"
            spec = json.loads(_entry(path, archive, first))["eval"]
            places = [name for name in names if name.startswith("samples/")]
            samples = [json.loads(_entry(path, archive, name)) for name in places]
        if not samples:
            raise DataError(f"{path}: it holds no samples (log_samples was off, or none ended)")
        order = {str(each): i for i, each in enumerate(spec["dataset"].get("sample_ids") or [])}
        samples.sort(key=lambda s: (order.get(str(s["id"]), len(order)), str(s["id"]), s["epoch"]))
        names = list(dict.fromkeys(name for s in samples for name in s.get("scores") or {}))
        name = _chosen(path, names, score)
        trajectories = [_from_sample(path, spec["task"], sample, name) for sample in samples]
        model, own = spec["model"], (spec.get("metadata") or {}).get("agentrl")
    except (zipfile.BadZipFile, zstandard.ZstdError) as error:
        raise DataError(f"{path}: not a log of inspect_ai: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not a log of inspect_ai: {error!r}") from None
    # What agentrl wrote says itself what was played.
    return load_config(own) if own else _config_of(spec["task"], model, trajectories), trajectories


def _entry(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != _ZSTD:
        return archive.read(name)
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        sizes = [int.from_bytes(file.read(2), "little") for _ in range(2)]  # name and extra field
        file.seek(sum(sizes), 1)
        packed = file.read(info.compress_size)
    return zstandard.ZstdDecompressor().decompressobj().decompress(packed)


def _chosen(path: Path, names: Sequence[str], wanted: str | None) -> str | None:
    if wanted is not None and wanted not in names:
        raise ConfigError(f"--score {wanted}: {path} has {', '.join(names) or 'no scores'}")
    if wanted is None and len(names) > 1:
        others = ", ".join(names[1:])
        print(f"{path}: rewards are {names[0]}; --score takes {others}", file=sys.stderr)
    return wanted or (names[0] if names else None)


def _from_sample(path: Path, task: str, sample: Mapping[str, Any], name: str | None) -> Trajectory:
    given = sample["input"] if isinstance(sample["input"], list) else []
    messages = [_from_inspect(each, sample.get("attachments") or {}) for each in sample["messages"]]
    skipped = sum(each["role"] == "assistant" for each in given)
    usage = list((sample.get("model_usage") or {}).values())
    target = sample["target"]
    found = _made(
        str(sample.get("uuid") or f"{sample['id']}-{sample['epoch']}"),
        (task, str(sample["id"])),
        messages,
        skipped=skipped,
        num_tokens=sum(of.get("output_tokens", 0) for of in usage),
        reference=target[0] if isinstance(target, list) and len(target) == 1 else target,
    )
    found.info["prompt_tokens"] = sum(of.get("input_tokens", 0) for of in usage)
    found.total_s = sample.get("total_time") or 0.0
    if error := sample.get("error"):
        _fail(found, "step", "inspect_error", error["message"].split("\n")[0])
    elif name is None or name not in (sample.get("scores") or {}):
        _fail(found, "grade", "no_score", f"the sample has no score {name or ''}")
    else:
        value = sample["scores"][name]["value"]
        value = _LETTERS.get(value, value) if isinstance(value, str) else value
        if not isinstance(value, int | float):
            said = json.dumps(value)[:80]
            raise DataError(f"{path}: sample {sample['id']}: score {name} is {said}, not a number")
        _reward(found, value, name)
    return found


def _reward(found: Trajectory, value: float, name: str) -> None:
    """Sets an episode's reward. An episode whose reward is NaN, as inspect_ai writes it, has
    failed."""
    if math.isfinite(value):
        found.reward = float(value)
    else:
        _fail(found, "grade", "no_score", f"{name} is {value}")


def _fail(found: Trajectory, stage: Literal["step", "grade"], code: str, message: str) -> None:
    found.error = TrajectoryError(stage, code, message)
    found.stop_reason = StopReason.ERROR


def _from_inspect(message: Mapping[str, Any], attachments: Mapping[str, str]) -> Message:
    content, reasoning = message.get("content") or "", ""
    if isinstance(content, list):
        reasoning = "".join(part.get("reasoning", "") for part in content)
        parts = [_from_part(part, attachments) for part in content if "reasoning" not in part]
        has_images = any(part["type"] != "text" for part in parts)
        content = parts if has_images else "\n".join(part["text"] for part in parts)
    if isinstance(content, str):
        content = attachments.get(content.removeprefix("attachment://"), content)
    read: Message = {"role": message["role"], "content": content}
    if reasoning:
        read["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        read["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    if "tool_call_id" in message:
        read["tool_call_id"] = message["tool_call_id"]
    if message["role"] == "tool" and message.get("function"):
        read["name"] = message["function"]
    return read


def _from_part(part: Mapping[str, Any], attachments: Mapping[str, str]) -> dict[str, Any]:
    """Returns a part of a content in our shape. Downloads nothing that the part only refers to."""
    image = part.get("image")
    if isinstance(image, str):
        image = attachments.get(image.removeprefix("attachment://"), image)
        if image.startswith("data:"):
            return {"type": "image_url", "image_url": {"url": image}}
    return {"type": "text", "text": part.get("text", f"[{part['type']}]")}


def _made(
    trajectory_id: str,
    task: tuple[str, str],
    messages: list[Message],
    *,
    skipped: int,
    num_tokens: int,
    reference: Any,
) -> Trajectory:
    """Makes an episode from a dialogue without tokens; the first `skipped` turns are not the
    policy's."""
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"][skipped:]
    if not places:
        messages.append({"role": "assistant", "content": ""})
        places = [len(messages) - 1]
    turns = [
        Turn(
            branch=0,
            start=0,
            num_tokens=num_tokens // len(places) + (number < num_tokens % len(places)),
            finish_reason="stop",
            parse_status="tool_calls" if messages[place].get("tool_calls") else "text",
            message=place,
            parent=number - 1 if number else None,
        )
        for number, place in enumerate(places)
    ]
    env_id, task_id = task
    return Trajectory(
        trajectory_id,
        group_id=task_id,
        env_id=env_id,
        task_id=task_id,
        seed=0,
        branches=[TokenRow(messages=messages)],
        turns=turns,
        info={"reference": reference},
        stop_reason=StopReason.TERMINATED,
    )


# lm-evaluation-harness ----------------------------------------------------------------------------


def write_lm_eval(path: Path, trajectories: list[Trajectory]) -> None:
    """Writes a line for each task, with its last answers and the mean of their rewards. Prompts are
    texts with `[image]` in place of each image.

    `rewards` and `trajectory_ids` are additions: the harness has one value for a task."""
    lines = []
    num_images = 0
    for number, members in enumerate(by_group(trajectories)):
        first = members[0]
        shown = [message["content"] for message in first.messages[: _first_turn(first)]]
        num_images += sum(map(count_images, shown))
        prompt = "\n\n".join(content_text(content, "[image]") for content in shown)
        target = _as_text(first.info.get("reference", ""))
        answers = [_last_answer(trajectory) for trajectory in members]
        rewards = [t.reward if t.error is None else None for t in members]
        scored = [reward for reward in rewards if reward is not None]
        lines.append(
            {
                "doc_id": number,
                "doc": {"id": first.task_id},
                "target": target,
                "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {}}},
                "resps": [answers],
                "filtered_resps": answers[:1],
                "filter": "none",
                "metrics": ["reward"],
                "reward": statistics.fmean(scored) if scored else None,
                "rewards": rewards,
                "trajectory_ids": [t.trajectory_id for t in members],
                "doc_hash": _hash(first.task_id),
                "prompt_hash": _hash(prompt),
                "target_hash": _hash(target),
            }
        )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    partial.replace(path)
    if num_images:
        said = "the format has none: [image] stands for each"
        print(f"{path}: {num_images} images of prompts are left out ({said})", file=sys.stderr)


def read_lm_eval(path: Path, score: str | None = None) -> tuple[RunConfig, list[Trajectory]]:
    """Reads the samples of one task that `lm_eval --log_samples` wrote.

    Args:
        score: `metric` or, as the harness writes it, `metric,filter`; None takes the first of both.

    Raises:
        DataError: a line is not such a sample.
    """
    lines = list(_lines(path))
    if not lines:
        raise DataError(f"{path}: it holds no samples")
    names = [f"{name},{line['filter']}" for line in lines for name in line["metrics"]]
    names = list(dict.fromkeys(names))
    if score is not None and "," not in score:
        score = next((name for name in names if name.split(",")[0] == score), score)
    chosen = _chosen(path, names, score)
    if chosen is None:
        raise DataError(f"{path}: its samples have no metrics")
    metric, filter_ = chosen.split(",", 1)
    task = path.stem.removeprefix("samples_")
    lines = [line for line in lines if line["filter"] == filter_]
    tasks = [line["doc"].get("id") if isinstance(line.get("doc"), dict) else None for line in lines]
    if None in tasks or len(set(map(str, tasks))) < len(tasks):
        tasks = [line["doc_id"] for line in lines]  # the data set's own do not tell them apart
    trajectories = []
    for line, task_id in zip(lines, tasks, strict=True):
        trajectories += _from_line(path, (task, str(task_id)), line, metric)
    several = sum("rewards" not in line and len(_answers(line)) > 1 for line in lines)
    if several:
        said = "one value for all of them, so they become one episode"
        print(f"{path}: {several} tasks have several answers and {said}", file=sys.stderr)
    without = sum(not t.messages[-1]["content"] for t in trajectories)
    if without:
        said = "log-likelihoods, or empty answers: they can be compared, and not graded again"
        print(f"{path}: {without} of {len(trajectories)} have no text ({said})", file=sys.stderr)
    return _config_of(task, "lm-eval", trajectories), trajectories


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:  # by bytes: a text may hold U+2028, at which str splits lines
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not JSON: {error}") from None
            wanted = {"doc_id", "target", "arguments", "resps", "filter", "metrics"}
            if lacks := sorted(wanted - set(line if isinstance(line, dict) else ())):
                raise DataError(f"{path}:{number}: not a sample of lm-eval: no {', '.join(lacks)}")
            yield line


def _answers(line: Mapping[str, Any]) -> list[Any]:
    return line["resps"][0] if line["resps"] else [""]


def _from_line(
    path: Path, task: tuple[str, str], line: Mapping[str, Any], metric: str
) -> Iterator[Trajectory]:
    answers, rewards = _answers(line), line.get("rewards")
    if rewards is None:  # one value for all answers: that of the one which the filter made of them
        answers = answers if len(answers) == 1 else [*(line.get("filtered_resps") or answers)][:1]
        rewards = [line.get(metric)]
    ids = line.get("trajectory_ids") or [f"{task[1]}-{i}" for i in range(len(answers))]
    prompt = _prompt(line["arguments"])
    for trajectory_id, answer, reward in zip(ids, answers, rewards, strict=True):
        said = answer if isinstance(answer, str) else ""
        dialogue: list[Message] = [{"role": "user", "content": prompt}]
        dialogue.append({"role": "assistant", "content": said})
        reference = line["target"]
        found = _made(trajectory_id, task, dialogue, skipped=0, num_tokens=0, reference=reference)
        if reward is None:
            stage = "step" if "rewards" in line else "grade"  # agentrl's own failed in playing
            _fail(found, stage, "no_score", f"the sample has no {metric}")
        elif isinstance(reward, int | float):
            _reward(found, reward, metric)
        else:
            raise DataError(f"{path}: doc_id {line['doc_id']}: {metric} is not a number: {reward}")
        yield found


def _prompt(arguments: Any) -> str:
    """Returns the text of the first request, which older versions write as a list."""
    first = arguments.get("gen_args_0", {}).get("arg_0") if isinstance(arguments, dict) else None
    if isinstance(arguments, list) and arguments:
        first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
    return _as_text(first if first is not None else "")


def _last_answer(trajectory: Trajectory) -> str:
    said = (m["content"] for m in reversed(trajectory.messages) if m["role"] == "assistant")
    return content_text(next(said, ""))


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
