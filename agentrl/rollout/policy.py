"""The policies that act in episodes, and the rows of token ids that they read and sample.

    prompt -> sample -> write

`prompt` finds the ids that a turn reads: a row that goes on, one that branches off, or a new one.
Nothing is written before the turn was sampled, so an unfinished turn leaves no trace.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agentrl.errors import InferenceError
from agentrl.inference.base import Generation, InferenceEngine, SamplingParams
from agentrl.model.text.renderer import Renderer
from agentrl.types import (
    Action,
    Message,
    ShownImage,
    TokenRow,
    ToolSpec,
    Trajectory,
    Turn,
    assistant_message,
)


class Policy(Protocol):
    """Acts in an episode. `TokenPolicy` below is the policy that can be trained."""

    @property
    def max_turn_tokens(self) -> int: ...

    def read(
        self,
        trajectory: Trajectory,
        observation: list[Message],
        tools: list[ToolSpec],
        *,
        tools_changed: bool,
    ) -> bool:
        """Takes in the environment's messages. Returns False if the context has no room for a turn.

        Args:
            tools: those offered in the turn that begins.
            tools_changed: whether the tools differ from the previous turn's.
        """
        ...

    async def act(self, trajectory: Trajectory, tools: list[ToolSpec]) -> Action:
        """Appends one turn to the trajectory and returns its action."""
        ...

    def reserve(self, num_episodes: int) -> None: ...

    def release(self, num_episodes: int = 1) -> None: ...

    async def aclose(self) -> None: ...


@dataclass(slots=True, frozen=True)
class Prompt:
    """The prompt of a turn: the beginning of a row, and the ids appended to it."""

    parent: int | None
    """The turn that it continues; None where a dialogue begins."""
    branch: int | None
    """The index of that turn's row."""
    row: TokenRow
    """That row itself; an empty one where a dialogue begins."""
    num_kept: int
    """Tokens of that row at its beginning. It goes on in place if these are all of it, else they
    are copied into a new one."""
    behind: list[int]
    messages: list[Message]
    """The dialogue so far, as the tokens write it out."""
    shown: list[ShownImage] = field(default_factory=list)
    """Images among the tokens behind."""

    @property
    def images(self) -> list[ShownImage]:
        """The images of the whole prompt, in their order."""
        return [each for each in self.row.images if each.end <= self.num_kept] + self.shown

    @property
    def token_ids(self) -> list[int]:
        return self.row.token_ids[: self.num_kept] + self.behind

    def __len__(self) -> int:
        return self.num_kept + len(self.behind)


@dataclass(slots=True, frozen=True)
class TokenPolicy:
    """The policy that is trained: an engine that samples ids, with its renderer."""

    engine: InferenceEngine
    renderer: Renderer
    max_turn_tokens: int
    """Sampled tokens of one turn."""
    max_context_tokens: int
    """Length of a token row, prompt included."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(1))
    """How ids are drawn; its `max_tokens` and `stop_token_ids` are each turn's own."""
    stop_strings: tuple[str, ...] = ()
    """A turn ends with the first token that completes one of them."""

    def read(
        self,
        trajectory: Trajectory,
        observation: list[Message],
        tools: list[ToolSpec],
        *,
        tools_changed: bool,
    ) -> bool:
        """Extends the newest token row by the ids that the policy reads next; forks it if the past
        changed.

        Raises:
            ValueError: the first prompt alone fills the context.
        """
        parent = len(trajectory.turns) - 1 if trajectory.turns else None
        prompt = self.prompt(trajectory, parent, observation, tools, tools_changed=tools_changed)
        row = trajectory.branches[self._append_prompt(trajectory, prompt)]
        if parent is None and tools:
            # Some chat templates leave them out without a word.
            told = self.renderer.tokenizer.decode(row.token_ids)
            names: list[Any] = [tool["function"] for tool in tools]
            unseen = sum(each["name"] not in told for each in names)
            if unseen:
                trajectory.metrics["unseen_tools"] = float(unseen)
        if parent is None and len(row) >= self.context_tokens:
            raise ValueError(
                f"the prompt has {len(row)} tokens, which leaves no room within "
                f"{self.context_tokens} (rollout.max_context_tokens, or the servers' context)"
            )
        return len(row) < self.context_tokens

    @property
    def context_tokens(self) -> int:
        """Length that a token row may have: `max_context_tokens`, or the servers' own context if it
        is smaller."""
        served = getattr(self.engine, "context_tokens", None)
        return min(self.max_context_tokens, served or self.max_context_tokens)

    async def act(self, trajectory: Trajectory, tools: list[ToolSpec]) -> Action:
        branch, turn_id = len(trajectory.branches) - 1, len(trajectory.turns)
        row = trajectory.branches[branch]
        generation = await self.sample(
            f"{trajectory.trajectory_id}-t{turn_id:03d}", row.token_ids, row.images
        )
        parent = turn_id - 1 if turn_id else None
        return self._append_turn(trajectory, branch, parent, generation, tools)

    def prompt(
        self,
        trajectory: Trajectory,
        parent: int | None,
        observation: list[Message],
        tools: list[ToolSpec],
        *,
        tools_changed: bool = False,
    ) -> Prompt:
        """Returns the prompt of the turn after turn `parent`. Writes nothing.

        The tools come at the beginning of a prompt, so other tools mean another past, whatever the
        template does with messages.

        Args:
            observation: messages since that turn; all messages where a dialogue begins.
            tools_changed: whether the tools differ from those of turn `parent`.
        """
        if parent is None:
            ids, shown = self.renderer.show(self.renderer.prompt(observation, tools), observation)
            return Prompt(None, None, TokenRow(), 0, ids, list(observation), shown)
        turn = trajectory.turns[parent]
        row, end = trajectory.branches[turn.branch], turn.start + turn.num_tokens
        messages = row.messages[: turn.message + 1] + observation
        closed_by = row.token_ids[end - 1] if turn.finish_reason == "stop" else None
        behind = None
        if not tools_changed:
            behind = self.renderer.continuation(
                messages, len(observation), tools, closed_by=closed_by
            )
        if behind is not None:
            behind, shown = self.renderer.show(behind, observation, end)
            return Prompt(parent, turn.branch, row, end, behind, messages, shown)
        # What the policy had seen was rewritten. The old row keeps its sampled tokens; in the new
        # one everything up to here is context: no token is trained twice.
        whole, shown = self.renderer.show(self.renderer.prompt(messages, tools), messages)
        fork_at = num_equal(row.token_ids[:end], whole)
        fork_at = _before_other_images(row.images, shown, fork_at)
        shown = [image for image in shown if image.end > fork_at]
        return Prompt(parent, turn.branch, row, fork_at, whole[fork_at:], messages, shown)

    async def sample(
        self, request_id: str, prompt_ids: list[int], images: Sequence[ShownImage] = ()
    ) -> Generation:
        """Samples one turn after these ids, cut at the first of the stop strings.

        Args:
            images: the images whose tokens are among the ids, in order.

        Raises:
            InferenceError: the engine takes no images.
        """
        room = self.max_context_tokens - len(prompt_ids)
        engine: Any = self.engine
        if images and not getattr(engine, "takes_images", False):
            raise InferenceError(
                "the episode shows an image, which this inference backend is not sent; set "
                "inference.backend = 'embedded' or 'vllm'"
            )
        generation = await engine.generate(
            request_id,
            prompt_ids,
            replace(
                self.sampling,
                max_tokens=min(self.max_turn_tokens, room),
                stop_token_ids=self.renderer.stop_token_ids,
            ),
            *([list(images)] if images else []),
        )
        if self.stop_strings:
            generation = _cut_at_stop_string(generation, self.renderer, self.stop_strings)
        return generation

    def write(
        self,
        trajectory: Trajectory,
        prompt: Prompt,
        generation: Generation,
        tools: list[ToolSpec],
    ) -> Action:
        """Appends the prompt and the sampled ids as the trajectory's next turn, and returns its
        action."""
        branch = self._append_prompt(trajectory, prompt)
        return self._append_turn(trajectory, branch, prompt.parent, generation, tools)

    def _append_prompt(self, trajectory: Trajectory, prompt: Prompt) -> int:
        """Appends the prompt to its row, and returns the row's branch number."""
        turn_id, branch, row = len(trajectory.turns), prompt.branch, prompt.row
        if branch is not None and len(row) == prompt.num_kept:
            row.append_context(prompt.behind, turn_id)
            row.images += prompt.shown
        else:
            row = TokenRow(branch_of=branch, fork_at=None if branch is None else prompt.num_kept)
            row.append_context(prompt.token_ids, turn_id)
            row.images += prompt.images
            trajectory.branches.append(row)
            branch = len(trajectory.branches) - 1
        row.messages = prompt.messages
        return branch

    def _append_turn(
        self,
        trajectory: Trajectory,
        branch: int,
        parent: int | None,
        generation: Generation,
        tools: list[ToolSpec],
    ) -> Action:
        row, turn_id = trajectory.branches[branch], len(trajectory.turns)
        start = len(row)
        row.append_sampled(
            generation.token_ids,
            generation.logprobs,
            generation.versions,
            turn_id,
            generation.kept_ids,
            generation.routes,
        )
        action, status = self.renderer.read_turn(row.token_ids, start, tools, turn_id=turn_id)
        row.messages.append(assistant_message(action))
        trajectory.turns.append(
            Turn(
                branch=branch,
                start=start,
                num_tokens=len(generation.token_ids),
                finish_reason=generation.finish_reason,
                parse_status=status,
                message=len(row.messages) - 1,
                parent=parent,
            )
        )
        return action

    def reserve(self, num_episodes: int) -> None:
        self.engine.reserve(num_episodes)

    def release(self, num_episodes: int = 1) -> None:
        self.engine.release(num_episodes)

    async def aclose(self) -> None:
        await self.engine.aclose()


def _cut_at_stop_string(
    generation: Generation, renderer: Renderer, stop_strings: tuple[str, ...]
) -> Generation:
    """Returns the shortest beginning whose text contains a stop string.

    A token's distribution does not depend on later tokens, so the beginning of a sample is exactly
    a sample of an engine that stops there."""

    def stops(num_tokens: int) -> bool:
        text = renderer.decode(generation.token_ids[:num_tokens])
        return any(stop in text for stop in stop_strings)

    end = len(generation.token_ids)
    if not stops(end):
        return generation
    end = bisect.bisect_left(range(end + 1), True, key=stops)
    kept_ids, routes = generation.kept_ids, generation.routes
    too_many = len(generation.token_ids) - end
    return Generation(
        generation.token_ids[:end],
        generation.logprobs[:end],
        generation.versions[:end],
        "stop",
        None if kept_ids is None else kept_ids[:end],
        None if routes is None else routes[: len(routes) - too_many],
    )


def _before_other_images(
    before: Sequence[ShownImage], now: Sequence[ShownImage], fork_at: int
) -> int:
    """Returns where two rows part that have the same tokens up to `fork_at`: before the first
    position at which they show different images, and never inside an image."""
    for old, new in itertools.zip_longest(before, now):
        same = old and new and (old.sha256, old.start) == (new.sha256, new.start)
        if not same or old.end > fork_at:
            return min([fork_at, *(each.start for each in (old, new) if each)])
    return fork_at


def num_equal(a: Sequence[object], b: Sequence[object]) -> int:
    """Returns the length of what two sequences begin with alike."""
    differ = (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))
