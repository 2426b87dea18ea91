"""One trajectory for a page: its dialogues by turn, and its tokens in windows."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from agentrl.errors import DataError
from agentrl.images import shown_images, shown_text
from agentrl.rollout.log import TrajectoryEntry, read_trajectory
from agentrl.rollout.signals import RowSignals, read_row_signals
from agentrl.types import Message, ShownImage, Trajectory
from agentrl.view.groups import grouped, member_of
from agentrl.view.runs import Decode, RunFiles

MAX_MESSAGE_CHARS = 20_000
"""Characters; of a longer message both ends are shown, unless it is asked for whole."""
MESSAGES_IN_WINDOW = 200
MAX_QUESTION_CHARS = 2_000
"""Characters of the question and the last answer, which stand above the dialogue."""
MAX_TOKENS_IN_WINDOW = 4_096
MAX_CACHED_TOKENS = 3_000_000
CONTEXT_TOKENS = 8
"""Tokens before a window that are decoded with it, so that a character cut there is whole."""


class Cache:
    """The trajectories that were looked at last, with their signals, as many as memory allows."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, int, int], _Held] = OrderedDict()

    def get(self, run: RunFiles, step: int, offset: int) -> _Held:
        """Returns the trajectory at this step and offset.

        Raises:
            DataError: there is no trajectory at that byte of the step's file.
        """
        key = (run.id, step, offset)
        with run.lock:
            held = self._held.get(key)
            if held is None or not held.signals:
                held = _Held(run, step, offset)
                self._held[key] = held
            self._held.move_to_end(key)
            while len(self._held) > 1 and sum(h.size for h in self._held.values()) > (
                MAX_CACHED_TOKENS
            ):
                self._held.popitem(last=False)
            return held


class _Held:
    def __init__(self, run: RunFiles, step: int, offset: int) -> None:
        trajectory, rows = read_trajectory(run.path, step, offset)
        self.trajectory, self.rows = trajectory, rows
        self.size = sum(len(row["token_ids"]) for row in rows)
        try:
            found = read_row_signals(run.path, step, trajectory.trajectory_id)
        except DataError:
            found = []
        self.signals: dict[int, RowSignals] = {signals.row: signals for signals in found}


def describe(run: RunFiles, held: _Held, step: int, offset: int) -> dict[str, Any]:
    """Returns everything that the page shows before messages and tokens: facts, turns, rows, the
    group."""
    trajectory = held.trajectory
    group = next(
        (
            group
            for group in grouped(run)
            if group.step == step and group.entries[0].group_id == trajectory.group_id
        ),
        None,
    )
    return {
        "offset": offset,
        **_facts(trajectory, step),
        "question": _beginning(trajectory.messages, "user"),
        "answer": _beginning(trajectory.messages[::-1], "assistant"),
        "total_s": trajectory.total_s,
        "turns": [
            {
                "row": turn.branch,
                "start": turn.start,
                "num_tokens": turn.num_tokens,
                "finish_reason": turn.finish_reason,
                "parse_status": turn.parse_status,
                "reward": _finite(turn.reward),
                "reward_components": _finite_values(turn.reward_components),
                "generate_s": turn.generate_s,
                "step_s": turn.step_s,
                "message": turn.message,
                "parent": turn.parent,
            }
            for turn in trajectory.turns
        ],
        "rows": [
            {
                "num_tokens": len(held.rows[number]["token_ids"]),
                "num_sampled": int(held.rows[number]["loss_mask"].sum()),
                "num_messages": len(row.messages),
                "branch_of": row.branch_of,
                "fork_at": row.fork_at,
                "has_signals": number in held.signals,
                "advantage": _mean(held.signals.get(number)),
            }
            for number, row in enumerate(trajectory.branches)
        ],
        "siblings": [member_of(entry) for entry in group.entries] if group else [],
    }


def _facts(trajectory: Trajectory, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "env_id": trajectory.env_id,
        "task_id": trajectory.task_id,
        "seed": trajectory.seed,
        # What a failed episode summed up before it failed is not its reward.
        "reward": None if trajectory.error else _finite(trajectory.reward),
        "reward_components": _finite_values(trajectory.reward_components),
        "metrics": _finite_values(trajectory.metrics),
        "info": trajectory.info,
        "stop_reason": str(trajectory.stop_reason or "running"),
        "error": None
        if trajectory.error is None
        else {name: getattr(trajectory.error, name) for name in ("stage", "code", "message")},
    }


def _beginning(messages: Sequence[Message], role: str) -> str:
    """Returns the beginning of the first message with this role; "" without one."""
    said = next((m.get("content") for m in messages if m.get("role") == role), "")
    return shown_text(said)[:MAX_QUESTION_CHARS]


def exported(run: RunFiles, entries: Iterable[TrajectoryEntry]) -> Iterator[str]:
    """Yields a line of JSON for each trajectory: its index entry and its messages. `messages` is
    the newest dialogue, as `agentrl sft --data` reads it; `dialogues` holds all of them if there
    are several."""
    for entry in entries:
        trajectory, _ = read_trajectory(run.path, entry.step, entry.offset)
        line = _facts(trajectory, entry.step) | {"messages": trajectory.messages}
        if len(trajectory.branches) > 1:
            line["dialogues"] = [row.messages for row in trajectory.branches]
        yield json.dumps(line, separators=(",", ":")) + "\n"


def messages(held: _Held, row: int, start: int, *, whole: bool = False) -> dict[str, Any]:
    """Returns a window of a row's dialogue; with `whole`, one message in full length."""
    said = held.trajectory.branches[_checked(held, row)].messages
    window = said[start : start + (1 if whole else MESSAGES_IN_WINDOW)]
    limit = None if whole else MAX_MESSAGE_CHARS
    return {
        "start": start,
        "num_messages": len(said),
        "messages": [
            {
                "role": str(message.get("role", "")),
                "name": str(message.get("name") or ""),
                **_shortened("content", shown_text(message.get("content")), limit),
                **_shortened("reasoning", str(message.get("reasoning") or ""), limit),
                "images": shown_images(message.get("content")),
                "tool_calls": message.get("tool_calls") or [],
            }
            for message in window
        ],
    }


def _shortened(name: str, text: str, limit: int | None) -> dict[str, Any]:
    if limit is None or len(text) <= limit:
        return {name: text}
    half = limit // 2
    return {name: text[:half], f"{name}_end": text[-half:], f"{name}_left_out": len(text) - limit}


def tokens(held: _Held, decode: Decode | None, row: int, start: int, count: int) -> dict[str, Any]:
    """Returns `count` tokens of a row starting at `start`, with the values that sampler and trainer
    computed for each.

    The lists have equal length; null where there is no value: context has no log-probability,
    untrained tokens no advantage."""
    arrays = held.rows[_checked(held, row)]
    length = len(arrays["token_ids"])
    start = min(max(start, 0), length)
    window = slice(start, min(start + min(count, MAX_TOKENS_IN_WINDOW), length))
    ids = arrays["token_ids"][window]
    sampled = arrays["loss_mask"][window].astype(bool)
    before = max(0, start - CONTEXT_TOKENS)
    texts = None
    if decode is not None:
        texts = token_texts(arrays["token_ids"][before : window.stop].tolist(), decode)
        texts = texts[start - before :]
    logprobs = arrays["rollout_logprobs"][window]
    data: dict[str, Any] = {
        "start": start,
        "num_tokens": length,
        "ids": ids.tolist(),
        "texts": texts,
        "sampled": sampled.tolist(),
        "turns": arrays["turn_ids"][window].tolist(),
        "versions": arrays["policy_versions"][window].tolist(),
        "logprobs": _listed(np.where(sampled, logprobs, np.nan)),
        # The number of the image, from 1, that a token stands for; 0 for none.
        "images": _images_at(held.trajectory.branches[row].images, window.start, len(ids)),
    }
    if (signals := held.signals.get(row)) is not None:
        old, live = signals.old_logprobs[window], signals.logprobs[window]
        with np.errstate(over="ignore"):
            data |= {
                "trained": signals.trained[window].tolist(),
                "advantages": _listed(signals.advantages[window]),
                "old_logprobs": _listed(old),
                "live_logprobs": _listed(live),
                "ratios": _listed(np.exp(live - old)),
                "differences": _listed(old - logprobs),
                "weights": _listed(signals.weights[window]),
                "kept": {name: kept[window].tolist() for name, kept in signals.kept.items()},
            }
        if signals.values is not None:
            data["values"] = _listed(signals.values[window])
    return data


def _images_at(images: Sequence[ShownImage], start: int, count: int) -> list[int]:
    numbers = np.zeros(count, np.int32)
    for number, image in enumerate(images, 1):
        numbers[max(image.start - start, 0) : max(image.end - start, 0)] = number
    return numbers.tolist()


def _checked(held: _Held, row: int) -> int:
    if not 0 <= row < len(held.rows):
        raise DataError(f"the trajectory has rows 0 to {len(held.rows) - 1}, and no row {row}")
    return row


def _listed(values: np.ndarray) -> list[float | None]:
    """Rounds values to six digits; a value that is not finite becomes null."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]


def _mean(signals: RowSignals | None) -> float | None:
    if signals is None or not signals.trained.any():
        return None
    return _finite(float(signals.advantages[signals.trained].mean(dtype=np.float64)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _finite_values(values: dict[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in values.items()}


def token_texts(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """Returns the text that each token adds.

    A token is decoded after its predecessor, because decoders drop a leading space at the start of
    a text. Tokens that hold parts of one character get it together: the first of them shows it, the
    others are empty.
    """
    cache: dict[tuple[int, ...], str] = {}

    def text_of(*ids: int) -> str:
        if ids not in cache:
            cache[ids] = decode(list(ids))
        return cache[ids]

    texts = []
    for position, token in enumerate(token_ids):
        alone = text_of(token)
        if position == 0:
            texts.append(alone)
            continue
        before = text_of(token_ids[position - 1])
        both = text_of(token_ids[position - 1], token)
        texts.append(both[len(before) :] if both.startswith(before) else alone)
    start = 0
    while start < len(texts):
        end = start + 1
        while "�" in texts[start] and end < len(texts) and end - start < 8:
            end += 1
            joined = text_of(*token_ids[start:end])
            if "�" not in joined:
                texts[start:end] = [joined] + [""] * (end - start - 1)
        start = end if "�" not in texts[start] else start + 1
    return texts
