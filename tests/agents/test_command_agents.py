"""qwen-code, a command-line agent of npm, as it comes: `make test-agents` installs it.

Its system prompt and tools take 70,000 characters; `--bare` leaves out what it gathers of its
surroundings, which halves them.
"""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from agent_play import LIMITS, TASKS, Recording, calculated, play, require_trained_alike
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import make_tokenizer

from agentrl.inference.embedded import EmbeddedEngine
from agentrl.model.load import load_model, load_tokenizer, resolve_dtype
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.command import CommandRunner

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
CONTEXT = 65_536
BINARIES = [str(Path(sys.prefix) / "npm/node_modules/.bin"), str(Path(sys.prefix) / "bin")]

pytestmark = pytest.mark.skipif(
    shutil.which("qwen", path=BINARIES[0]) is None, reason="no qwen-code: see `make test-agents`"
)


def played(engine, renderer, *, max_turns, max_turn_tokens):
    path = os.pathsep.join([*BINARIES, os.environ["PATH"]])
    qwen = ["qwen", "--auth-type", "openai", "--model", "policy", "--yolo", "--bare"]
    runner = CommandRunner(["env", f"PATH={path}", "HOME=.", *qwen, "{prompt}"])
    limits = replace(LIMITS, max_turns=max_turns, turn_timeout_s=240, episode_timeout_s=300)
    sizes = {"max_turn_tokens": max_turn_tokens, "max_context_tokens": CONTEXT}
    batch = play(engine, renderer, runner, env_config=TASKS, limits=limits, **sizes)
    (trajectory,) = batch.trajectories
    assert trajectory.error is None, trajectory.error
    return trajectory


def test_an_episode_on_the_quickstarts_model_is_exact(tmp_path):
    """Its context made long enough: what it says there is nonsense, token by token its own."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    model = load_model(str(folder), dtype=resolve_dtype("float32"), device="cpu")
    engine = Recording(EmbeddedEngine(model, seed=1, patience_s=0.2))
    renderer = Renderer(load_tokenizer(str(folder)))
    trajectory = played(engine, renderer, max_turns=2, max_turn_tokens=12)
    assert trajectory.reward == 0.0
    print(f"\nqwen-code: {require_trained_alike(model, [trajectory], engine.calls)}")
    assert all(len(prompt) > 5000 for _, prompt, _ in engine.calls)


def test_its_shell_is_used_and_its_answer_graded():
    """The policy asks the agent's shell, reads what it printed, and answers."""

    def say(request_id, prompt):
        if printed := re.search(r"Output: (-?\d+)\n", prompt):
            return f"#### {printed[1]}"
        asked = re.findall(r"(\d+[-+*]\d+)=\?<\|im_end\|>", prompt)[-1]
        arguments = {"command": f"echo $(({asked}))", "is_background": False}
        call = json.dumps({"name": "run_shell_command", "arguments": arguments})
        return f"<think>I count</think>Let me see.<tool_call>{call}</tool_call>"

    renderer = Renderer(make_tokenizer())
    trajectory = played(ScriptedEngine(renderer, say), renderer, max_turns=8, max_turn_tokens=400)
    assert trajectory.reward == 1.0
    assert len(trajectory.turns) >= 2 and len(trajectory.branches) == 1
    # Now and then the agent takes a turn more, so the question's place is not known.
    said = [str(message["content"]) for message in trajectory.messages]
    asked = [found[1] for text in said if (found := re.search(r"(\d+[-+*]\d+)=\?$", text))]
    assert said[-1] == f"#### {calculated(asked[-1])}"
