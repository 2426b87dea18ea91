"""An agent against a real vLLM: what is sampled is trained, and log-probs are the trainer's."""

import asyncio

import pytest
from agent_play import TASKS, Recording, openai_sdk, play_groups, require_trained_alike
from vllm_fixture import TOY_MODEL, running_vllm, vllm_python

from agentrl.inference.vllm import VLLMEngine
from agentrl.rollout.render import Renderer
from agentrl.train.model import load_model, load_tokenizer
from agentrl.train.setup import resolve_dtype

pytestmark = pytest.mark.vllm


def test_what_vllm_sampled_for_an_agent_is_what_is_trained(tmp_path, capsys):
    vllm_python()
    model = load_model(str(TOY_MODEL), dtype=resolve_dtype("float32"), device="cpu")

    async def go(url):
        engine = Recording(VLLMEngine([url], seed=1))
        try:
            batch = await play_groups(
                engine,
                Renderer(load_tokenizer(str(TOY_MODEL))),
                openai_sdk,
                groups=8,
                group_size=2,
                env_config=TASKS,
                max_turn_tokens=24,
                max_context_tokens=1024,
            )
        finally:
            await engine.engine.aclose()
        return batch.trajectories, engine.calls

    with running_vllm(tmp_path) as launcher:
        trajectories, calls = asyncio.run(go(launcher.urls[0]))
    assert len(trajectories) == 16 and all(each.error is None for each in trajectories)
    said = require_trained_alike(model, trajectories, calls)
    with capsys.disabled():
        print(f"\n{said}")
    assert len(calls) > 16
