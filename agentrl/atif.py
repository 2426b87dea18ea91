"""Trajectories in ATIF, the format in which Harbor's agents write theirs (its RFC 0001).

A document is one dialogue, as steps that number from 1; a tool's answers stand in the step that
called it. A call of the policy carries the ids that it read and those it sampled with their
log-probs, so masks need no place: the completions are what is trained. Of an episode with several
dialogues (a rewritten history, an agent with agents of its own) the document is that of the newest
turn, and the others are embedded. Turns that they share are copied steps, without tokens, there.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from agentrl import __version__
from agentrl.errors import DataError
from agentrl.images import IMAGES_FOLDER, ImageStore, content_parts
from agentrl.types import Content, Message, Trajectory

_NOTES = "Embedded are this episode's other dialogues. Copied steps are context, not to be trained."


def write_atif(
    folder: Path,
    model: str,
    trajectories: Iterable[Trajectory],
    store: ImageStore | None = None,
) -> tuple[int, int]:
    """Writes a file for each trajectory, named by its id; of two with one id the last counts.
    Images are stored beside them in `images/`, each once.

    Returns the number of trajectories, and the number of turns that were left out because no
    message shows them.

    Raises:
        DataError: there are no trajectories.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    untold = {}
    for each in trajectories:
        name = quote(each.trajectory_id, safe="")  # an id may have slashes
        document = to_atif(each, model, _Images(store, ImageStore(partial / IMAGES_FOLDER)))
        (partial / f"{name}.json").write_bytes(msgspec.json.encode(document))
        untold[name] = sum(turn.message < 0 for turn in each.turns)
    if not untold:
        partial.rmdir()
        raise DataError(f"{folder}: there is no trajectory to write")
    partial.replace(folder)
    return len(untold), sum(untold.values())


class _Images(NamedTuple):
    source: ImageStore | None = None
    copies: ImageStore | None = None
    """None: an image's path is a data URL."""

    def content(self, content: Content) -> Any:
        """Returns a message's content in ATIF's shape: images as paths of their copies."""
        if isinstance(content, str):
            return content
        parts = []
        for part in content_parts(content, self.source):
            if isinstance(part, str):
                parts.append({"type": "text", "text": part})
                continue
            path = part.url
            if self.copies is not None:
                self.copies.put(part)
                path = f"{IMAGES_FOLDER}/{part.file_name}"
            parts.append({"type": "image", "source": {"media_type": part.media_type, "path": path}})
        return parts


def to_atif(trajectory: Trajectory, model: str, images: _Images | None = None) -> dict[str, Any]:
    """Returns a trajectory as an ATIF document. JSON has no NaN: msgspec writes null for it."""
    images = images or _Images()
    continued = {turn.parent for turn in trajectory.turns}
    ends = [number for number in range(len(trajectory.turns)) if number not in continued]
    written: set[int] = set()
    dialogues = [_steps(trajectory, end, written, images) for end in (ends[::-1] or [None])]
    if not dialogues[0]:  # a document without steps is not valid
        said = trajectory.error.message if trajectory.error else ""
        dialogues[0].append({"step_id": 1, "source": "system", "message": said})
    documents: list[dict[str, Any]] = [
        {
            "schema_version": "ATIF-v1.7",
            "session_id": trajectory.trajectory_id,
            "trajectory_id": trajectory.trajectory_id + (f"/{number}" if number else ""),
            "agent": {"name": "agentrl", "version": __version__, "model_name": model},
            "steps": steps,
        }
        for number, steps in enumerate(dialogues)
    ]
    root = documents[0]
    root["final_metrics"] = {
        "total_prompt_tokens": trajectory.num_read_tokens or None,
        "total_completion_tokens": trajectory.num_sampled_tokens,
        "total_steps": len(root["steps"]),
        "extra": trajectory.metrics,
    }
    kept = ("reward_components", "env_id", "task_id", "group_id", "seed", "stop_reason", "error")
    root["extra"] = {name: getattr(trajectory, name) for name in (*kept, "total_s", "info")}
    root["extra"]["reward"] = trajectory.reward if trajectory.scored else None
    if len(documents) > 1:
        root |= {"notes": _NOTES, "subagent_trajectories": documents[1:]}
    return root


def _steps(
    trajectory: Trajectory, end: int | None, written: set[int], images: _Images
) -> list[dict[str, Any]]:
    """Returns the steps of the dialogue that turn `end` ends; adds its turns to `written`."""
    messages, turn_at, number = trajectory.messages, {}, end
    if end is not None:
        messages = trajectory.branches[trajectory.turns[end].branch].messages
    while number is not None:
        turn_at[trajectory.turns[number].message] = number
        number = trajectory.turns[number].parent
    shared = max((place for place, turn in turn_at.items() if turn in written), default=-1)
    steps: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        role, text = message["role"], images.content(message["content"])
        if role == "tool" and steps:
            called = [call["tool_call_id"] for call in steps[-1].get("tool_calls", [])]
            of = message.get("tool_call_id")
            result = {"content": text, "source_call_id": of if of in called else None}
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = {"assistant": "agent", "tool": "user"}.get(role, role)
        step: dict[str, Any] = {"step_id": len(steps) + 1, "source": source, "message": text}
        if role == "assistant":
            step |= _said(message)
        if place <= shared or (role == "assistant" and place not in turn_at):
            step["is_copied_context"] = True
        elif place in turn_at:
            step |= _call(trajectory, turn_at[place])
        steps.append(step)
    written.update(turn_at.values())
    return steps


def _said(message: Message) -> dict[str, Any]:
    """Returns an assistant's reasoning and calls; examples in a prompt may write them loosely."""
    said: dict[str, Any] = {"tool_calls": []}
    if reasoning := message.get("reasoning"):
        said["reasoning_content"] = reasoning
    calls: Any = message.get("tool_calls") or []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if isinstance(arguments, str):
            with contextlib.suppress(msgspec.DecodeError):
                arguments = msgspec.json.decode(arguments)
        if not isinstance(arguments, dict):
            arguments = {"arguments": arguments}
        made = {"tool_call_id": call.get("id") or "", "function_name": name, "arguments": arguments}
        said["tool_calls"].append(made)
    return said


def _call(trajectory: Trajectory, number: int) -> dict[str, Any]:
    """Returns a step's record of the model call that made it; a chat server reports no tokens."""
    turn = trajectory.turns[number]
    row, sampled = trajectory.branches[turn.branch], slice(turn.start, turn.start + turn.num_tokens)
    metrics: dict[str, Any] = {"completion_tokens": turn.num_tokens}
    if row.token_ids:
        metrics |= {
            "prompt_tokens": turn.start,
            "prompt_token_ids": row.token_ids[: turn.start],
            "completion_token_ids": row.token_ids[sampled],
            "logprobs": row.rollout_logprobs[sampled],
            "extra": {"policy_versions": row.policy_versions[sampled]},
        }
    kept = ("finish_reason", "parse_status", "reward", "reward_components", "generate_s", "step_s")
    extra = {name: getattr(turn, name) for name in kept}
    return {"llm_call_count": 1, "metrics": metrics, "extra": extra}
