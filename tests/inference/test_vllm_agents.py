"""An agent against a real vLLM: what is sampled is trained, and log-probs are the trainer's."""

import asyncio
import json

import pytest
from agent_play import LIMITS, play_groups, require_recorded
from openai import AsyncOpenAI
from vllm_fixture import TOY_MODEL, running_vllm, vllm_python

from agentrl.inference.vllm import VLLMEngine
from agentrl.rollout.render import Renderer
from agentrl.train.model import load_model, load_tokenizer, recomputed_logprobs
from agentrl.train.setup import resolve_dtype
from agentrl.types import samples_of

pytestmark = pytest.mark.vllm

TASKS = {
    "source": "arithmetic",
    "operators": "+-*",
    "min_digits": 2,
    "digits": 3,
    "tools": True,
    "instruction": "",
}


class Recording:
    """An engine, and all that it was asked and answered."""

    def __init__(self, engine):
        self.engine, self.calls = engine, []

    async def generate(self, request_id, prompt_ids, sampling):
        generation = await self.engine.generate(request_id, prompt_ids, sampling)
        self.calls.append((request_id, list(prompt_ids), generation))
        return generation

    def __getattr__(self, name):
        return getattr(self.engine, name)


async def solve(task, base_url, api_key):
    """A loop of the SDK with the environment's own calculator; every other call is streamed."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list = list(task.messages)
        for turn in range(3):
            asked = {"model": "policy", "messages": messages, "tools": task.tools}
            if turn % 2:
                async with client.chat.completions.stream(**asked) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                reply = await client.chat.completions.create(**asked)
                message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                arguments = json.loads(call.function.arguments)
                reply = await client._client.post(
                    f"{task.tools_url}/{call.function.name}", json=arguments
                )
                content = reply.json()["content"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return message.content or ""


def test_what_vllm_sampled_for_an_agent_is_what_is_trained(tmp_path, capsys):
    vllm_python()
    model = load_model(str(TOY_MODEL), dtype=resolve_dtype("float32"), device="cpu").eval()

    async def go(url):
        engine = Recording(VLLMEngine([url], seed=1))
        try:
            batch = await play_groups(
                engine,
                Renderer(load_tokenizer(str(TOY_MODEL))),
                solve,
                groups=8,
                group_size=2,
                env_config=TASKS,
                limits=LIMITS,
                max_turn_tokens=24,
                max_context_tokens=1024,
            )
        finally:
            await engine.engine.aclose()
        return batch.trajectories, engine.calls

    with running_vllm(tmp_path) as launcher:
        trajectories, calls = asyncio.run(go(launcher.urls[0]))
    assert len(trajectories) == 16 and all(each.error is None for each in trajectories)
    require_recorded(trajectories, calls)
    trained = sum(sample.num_trained for each in trajectories for sample in samples_of(each))
    sampled = sum(len(generation.token_ids) for _, _, generation in calls)
    difference = max(
        abs(got - wanted)
        for _, prompt, generation in calls
        for got, wanted in zip(
            generation.logprobs,
            recomputed_logprobs(model, prompt, generation.token_ids, 1.0),
            strict=True,
        )
    )
    with capsys.disabled():
        print(
            f"\n{len(calls)} calls, {sampled} sampled = {trained} trained tokens, log-probs differ "
            f"by at most {difference:.1e}"
        )
    assert sampled == trained and len(calls) > 16
    assert difference < 1e-4
