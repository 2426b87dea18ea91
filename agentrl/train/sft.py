"""Fine-tunes a model on demonstrations: the cold start for reinforcement learning.

Dialogues are tokenised turn by turn with the renderer of rollouts, so a demonstration has the same
ids, boundaries of turns included, as a rollout of the same words would have. Only assistant turns
are trained, each with its closing token.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentrl.config import LoraSection, TrainSection, load_config
from agentrl.errors import ConfigError, DataError
from agentrl.images import IMAGES_FOLDER, ImageStore
from agentrl.model.adapter_files import write_adapter
from agentrl.model.load import (
    load_model,
    load_processor,
    load_tokenizer,
    merge_adapter,
    require_empty,
    resolve_device,
    save_model,
)
from agentrl.model.logprobs import sample_logprobs
from agentrl.model.lora import add_adapter
from agentrl.model.rows import pack, plan_micro_batches
from agentrl.model.text.processor import restore_pixels
from agentrl.model.text.renderer import Renderer
from agentrl.model.text.template import HIDDEN_TOOLS
from agentrl.rollout.messages import RequestRefused, read_messages, read_tools
from agentrl.rollout.recorded import best_trajectories
from agentrl.train.optimizer import Learner
from agentrl.types import Message, Sample, TokenRow, ToolSpec, samples_of

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class SFTResult:
    """The outcome of `sft`."""

    first_loss: float
    """Mean negative log-likelihood per trained token in the first update, in nats."""
    last_loss: float
    """The same in the last update."""
    num_updates: int
    num_dropped: int
    """Dialogues left out because they are longer than `max_tokens`."""


def sft(
    demonstrations: Path | None,
    *,
    model_path: str | None = None,
    run_dir: Path | None = None,
    best: int = 1,
    min_reward: float = 1.0,
    out: Path,
    num_epochs: int = 1,
    batch_size: int = 32,
    learning_rate: float = 1e-5,
    warmup_steps: int = 10,
    token_budget: int = 8192,
    max_tokens: int = 4096,
    device: str = "auto",
    save_dtype: str = "float32",
    seed: int = 1,
    dialect: str = "auto",
    tools: str = "template",
    chat_template: str | None = None,
    lora_rank: int = 0,
) -> SFTResult:
    """Fine-tunes a model on demonstrations and saves it with its tokenizer to `out`.

    Args:
        demonstrations: a file of dialogues (see `read_demonstrations`); None learns from `run_dir`.
        model_path: model to start from; None takes the one that the run started from.
        run_dir: a run whose best trajectories are the demonstrations, token for token as sampled.
        best: number of trajectories of each task of that run, those with the highest rewards.
        min_reward: smallest reward of a trajectory to learn from.
        out: directory of the tuned model, absent or empty.
        batch_size: dialogues per update.
        warmup_steps: updates over which the learning rate rises; then it falls on a cosine to 0.
        token_budget: most tokens of a micro-batch.
        max_tokens: longer dialogues are dropped.
        save_dtype: dtype of the saved weights, `float32` or `bfloat16`.
        seed: seed of the order of dialogues.
        dialect: see `rollout.dialect`.
        tools: see `rollout.tools`.
        chat_template: see `model.chat_template`; it is saved with the model.
        lora_rank: train an adapter of this rank instead of all weights, and merge it at the end; 0
            trains all weights.

    Raises:
        DataError: the file is missing or empty, a line of it is not a dialogue, or all dialogues
            are too long.
        ConfigError: the model cannot be loaded, its prompt would not show the tools of a dialogue,
            or `out` is not empty.
    """
    require_empty(out)
    if demonstrations is not None and run_dir is None and model_path is not None:
        dialogues = read_demonstrations(demonstrations)
        tokenizer = load_tokenizer(model_path, chat_template)
        renderer = Renderer(
            tokenizer, dialect=dialect, tools=tools, processor=load_processor(model_path, tokenizer)
        )
        samples = _of_demonstrations(demonstrations, dialogues, renderer, tools)
    elif demonstrations is None and run_dir is not None:
        recorded = load_config(run_dir / "config.toml").model.path
        model_path = model_path or recorded
        _require_same_tokens(model_path, recorded)
        chosen = best_trajectories(run_dir, best, min_reward)
        tokenizer = load_tokenizer(model_path, chat_template)
        images = ImageStore(run_dir / IMAGES_FOLDER)
        restore_pixels(chosen, images, load_processor(model_path, tokenizer))
        samples = [sample for trajectory in chosen for sample in samples_of(trajectory)]
    else:
        raise ConfigError(
            "sft learns from DEMOS.jsonl with --model, or from a run with --from; give one of the "
            "two"
        )
    kept = [sample for sample in samples if len(sample) <= max_tokens]
    if not kept:
        raise DataError(
            f"{demonstrations or run_dir}: all {len(samples)} dialogues are longer than "
            f"--max-tokens {max_tokens}; raise it"
        )
    model = load_model(
        model_path,
        dtype=torch.float32,
        device=resolve_device(device),
        max_tokens=max(map(len, kept)),
    )
    if lora_rank:
        add_adapter(model, LoraSection(rank=lora_rank), path=model_path)
    updates_per_epoch = -(-len(kept) // batch_size)
    learner = Learner(
        model,
        TrainSection(
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            lr_schedule="cosine",
            betas=(0.9, 0.95),
        ),
        total_updates=num_epochs * updates_per_epoch,
    )
    losses: list[float] = []
    with Progress(
        TextColumn("sft"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    ) as progress:
        bar = progress.add_task("sft", total=num_epochs * updates_per_epoch, loss=float("nan"))
        for epoch in range(num_epochs):
            order = list(range(len(kept)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            for start in range(0, len(order), batch_size):
                batch = [kept[index] for index in order[start : start + batch_size]]
                losses.append(_update(learner, batch, token_budget))
                progress.update(bar, advance=1, loss=losses[-1])
    if lora_rank:
        with TemporaryDirectory(prefix="agentrl-sft-") as folder:
            write_adapter(model, Path(folder))
            tokenizer.save_pretrained(folder)
            merge_adapter(Path(folder), out, dtype=save_dtype)
    else:
        save_model(model, tokenizer, out, save_dtype)
    return SFTResult(losses[0], losses[-1], len(losses), len(samples) - len(kept))


def _of_demonstrations(
    demonstrations: Path, dialogues: list[Dialogue], renderer: Renderer, tools: str
) -> list[Sample]:
    has_tools = any(dialogue.tools for dialogue in dialogues)
    if has_tools and tools == "template" and renderer.template.hides_tools:
        raise ConfigError(f"{demonstrations} offers tools, and {HIDDEN_TOOLS} (in sft: --tools)")
    return [
        dialogue_to_sample(renderer, dialogue, f"dialogue-{number}")
        for number, dialogue in enumerate(dialogues, 1)
    ]


def _require_same_tokens(model_path: str, recorded: str) -> None:
    """Checks that a model has the vocabulary of the model that a run recorded."""
    if model_path != recorded:
        ours, its = load_tokenizer(model_path), load_tokenizer(recorded)
        if ours.get_vocab() != its.get_vocab():
            raise ConfigError(
                f"--model {model_path} has another vocabulary than {recorded}, with which the run "
                "was played; name a model with the same tokenizer"
            )


@dataclass(slots=True, frozen=True)
class Dialogue:
    """One demonstration, as templates read it."""

    messages: list[Message]
    tools: list[ToolSpec]
    untrained: frozenset[int] = frozenset()
    """Indices of assistant messages that are read and not trained (`weight: 0`)."""


def read_demonstrations(path: Path) -> list[Dialogue]:
    """Reads the dialogues of a JSONL file, each `{"messages": [...], "tools": [...]}` in OpenAI's
    form (tools are optional, and may be JSON text).

    Raises:
        DataError: the file is missing or empty, or a line is not a dialogue; names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    unread: set[str] = set()
    dialogues = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                dialogues.append(_read_dialogue(line, unread))
            except (RequestRefused, DataError) as error:
                raise DataError(f"{path}:{number}: {error}") from None
    if not dialogues:
        raise DataError(f"{path}: the file is empty")
    if unread:
        logger.warning(
            "%s: these keys of messages are not read: %s", path, ", ".join(sorted(unread))
        )
    return dialogues


def _read_dialogue(line: bytes, unread: set[str]) -> Dialogue:
    try:
        row = msgspec.json.decode(line)
        given = row.get("messages") if isinstance(row, dict) else None
        offered = row.get("tools") if isinstance(row, dict) else None
        offered = msgspec.json.decode(offered) if isinstance(offered, str) else offered
    except msgspec.DecodeError as error:
        raise DataError(f"not valid JSON: {error}") from None
    if not isinstance(given, list) or not given:
        raise DataError('no "messages"; a line is {"messages": [...]}')
    if offered is not None and not isinstance(offered, list):
        raise DataError(f'"tools" is a list of functions, not {type(offered).__name__}')
    # A column of a table has one type, so files made of tables fill what a row lacks with nulls.
    tools, others = read_tools(_without_nulls(offered))
    if others:
        raise DataError(f"the tools {', '.join(others)} are not functions")
    messages = read_messages(given, unread)
    untrained = set()
    for index, (message, raw) in enumerate(zip(messages, given, strict=True)):
        if message["role"] == "assistant":
            if (weight := raw.get("weight", 1)) not in (0, 1, None):
                raise DataError(f"messages[{index}]: weight is 0 or 1, not {weight!r}")
            if weight == 0:
                untrained.add(index)
            if not message["content"] and not message.get("tool_calls"):
                raise DataError(f"messages[{index}]: the assistant says nothing and calls no tool")
            calls: list[Any] = message.get("tool_calls", [])
            for call in calls:
                _drop_padding(call["function"], tools)
    roles = [message["role"] for message in messages]
    if roles[0] == "assistant" or roles.count("assistant") == len(untrained):
        raise DataError(
            "a dialogue must start with another role and hold at least one assistant message to "
            "train"
        )
    return Dialogue(messages, tools, frozenset(untrained))


def _without_nulls(value: Any) -> Any:
    """Returns a value without the keys that hold null, at every depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _drop_padding(function: dict[str, Any], tools: list[ToolSpec]) -> None:
    """Removes null arguments of a call, unless its tool has such a parameter that may be null."""
    functions: list[Any] = [tool["function"] for tool in tools]
    schemas = {each["name"]: each["parameters"] for each in functions}
    properties = schemas.get(function["name"], {}).get("properties", {})
    function["arguments"] = {
        key: value
        for key, value in function["arguments"].items()
        if value is not None or _may_be_null(properties.get(key))
    }


def _may_be_null(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    kinds, alternatives = schema.get("type"), [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return (
        bool(schema.get("nullable"))
        or "null" in (kinds if isinstance(kinds, list) else [kinds])
        or None in schema.get("enum", ())
        or any(map(_may_be_null, alternatives))
    )


def dialogue_to_sample(renderer: Renderer, dialogue: Dialogue, name: str) -> Sample:
    """Makes a dialogue a token row, in which only assistant turns have a loss mask of 1.

    Messages after the last assistant turn are left out, because they would not be trained.

    Args:
        name: trajectory id and group id of the sample.
    """
    messages = dialogue.messages
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    row = TokenRow()
    first = messages[: turns[0]]
    prompt, row.images = renderer.show(renderer.prompt(first, dialogue.tools), first)
    row.append_context(prompt, 0)
    for turn_id, index in enumerate(turns):
        ids = renderer.assistant_turn(messages[index])
        if index in dialogue.untrained:
            row.append_context(ids, turn_id)
        else:
            row.append_sampled(ids, [0.0] * len(ids), [0] * len(ids), turn_id)
        if turn_id + 1 < len(turns):
            observation = messages[index + 1 : turns[turn_id + 1]]
            suffix = renderer.suffix(observation, closed_by=ids[-1])
            suffix, shown = renderer.show(suffix, observation, len(row))
            row.append_context(suffix, turn_id + 1)
            row.images += shown
    return Sample(
        **row.arrays(),
        trajectory_id=name,
        group_id=name,
        reward=0.0,
        turn_rewards=np.zeros(len(turns), np.float32),
        images=row.images,
    )


def _update(learner: Learner, batch: list[Sample], token_budget: int) -> float:
    """Makes one update on a batch; returns the mean negative log-likelihood per trained token, in
    nats, or nan."""
    num_trained = sum(sample.num_trained for sample in batch)
    total = torch.zeros((), device=learner.model.device)  # read only once, at the end: that waits
    for rows in plan_micro_batches([len(sample) for sample in batch], token_budget):
        logprobs, _ = sample_logprobs(learner.model, pack(batch, rows), temperature=1.0)
        part = -logprobs.sum() / num_trained
        part.backward()
        total += part.detach()
    learner.step()
    loss = float(total)
    return loss if np.isfinite(loss) else float("nan")
