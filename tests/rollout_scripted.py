"""An engine that says what the test wants said, at once. What it stands in for is the sampling
itself; the contract that it follows is tested on the real engines in tests/inference."""

import asyncio
from collections.abc import Callable

from agentrl.inference.base import Generation, SamplingParams
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.driver import Limits
from agentrl.rollout.scheduler import GroupScheduler, TaskSource

LIMITS = Limits(max_turns=6, turn_timeout_s=20, step_timeout_s=20, episode_timeout_s=60)


def scheduler_of(policy, env, source: TaskSource | None = None, **options) -> GroupScheduler:
    """Makes a scheduler of five tasks, one episode each, where the arguments say nothing else."""
    known = {"env_config": {}, "group_size": 1, "max_concurrent": 64, "limits": LIMITS, "seed": 1}
    return GroupScheduler(policy, env, source or TaskSource("train", 5, seed=1), **known | options)


class ScriptedEngine:
    def __init__(self, renderer: Renderer, say: Callable[[str, str], str], delay_s: float = 0.0):
        """`say(request_id, prompt_text)` returns the turn's text, which the close token follows
        unless it ends with a stop token."""
        self.renderer, self.say, self.delay_s = renderer, say, delay_s
        self.prompts: dict[str, list[int]] = {}
        self.seats = 0
        self.version = 0
        self.context_tokens: int | None = None

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams
    ) -> Generation:
        assert self.seats > 0, "a request without a reserved seat"
        self.prompts[request_id] = list(prompt_ids)
        await asyncio.sleep(self.delay_s)
        tokenizer = self.renderer.tokenizer
        text = self.say(request_id, tokenizer.decode(prompt_ids, skip_special_tokens=False))
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not ids or ids[-1] not in self.renderer.stop_token_ids:
            ids = [*ids, self.renderer.close_token_id]
        finish = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        return Generation(ids, [-0.5] * len(ids), [self.version] * len(ids), finish)

    def reserve(self, num_episodes: int) -> None:
        self.seats += num_episodes

    def release(self, num_episodes: int = 1) -> None:
        self.seats -= num_episodes

    async def aclose(self) -> None:
        pass


class NumberedEngine:
    """Says "turn 1", "turn 2" and so on, written as the template would; keeps what it was sent."""

    policy_version = 0

    def __init__(self, renderer: Renderer, takes_images: bool = True):
        self.renderer, self.takes_images = renderer, takes_images
        self.asked: list[tuple[list[int], list]] = []

    async def generate(self, request_id, ids, sampling, images=()) -> Generation:
        self.asked.append((list(ids), list(images)))
        said = {"role": "assistant", "content": f"turn {len(self.asked)}"}
        sampled = self.renderer.assistant_turn(said)
        return Generation(sampled, [-1.0] * len(sampled), [0] * len(sampled), "stop")

    def reserve(self, num_episodes: int) -> None:
        pass

    def release(self, num_episodes: int = 1) -> None:
        pass
