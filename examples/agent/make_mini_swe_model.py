"""Make a model that plays mini-swe-agent's game on two of the fixture instances:

    python benchmarks/swe_fixtures/build.py --out build/swebench
    python examples/agent/make_mini_swe_model.py

As examples/swebench/make_model.py, which has the menu of commands and says what the model learns;
the demonstrations are mini-swe-agent's own dialogues in the containers.
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "swebench"))
import mini_swe  # noqa: E402
from make_model import LANGUAGE, main  # noqa: E402
from minisweagent.models.utils.actions_toolcall import BASH_TOOL  # noqa: E402

from agentrl.env import Action, EnvSession, ToolCall  # noqa: E402

SUBMISSION = ["git diff > patch.txt", f"echo {mini_swe.DONE} && cat patch.txt"]


class Scripted(mini_swe.LitellmModel):
    """Says what it was given to say."""

    def __init__(self, commands: list[str]) -> None:
        super().__init__(**mini_swe.CONFIG["model"])
        self.commands = iter(commands)

    def query(self, messages: list[dict], **kwargs) -> dict:
        call = {"command": next(self.commands), "tool_call_id": f"call_{len(messages)}"}
        function = {"name": "bash", "arguments": {"command": call["command"]}}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call["tool_call_id"], "type": "function", "function": function}],
            "extra": {"actions": [call]},
        }


async def play(
    session: EnvSession, commands: list[str], submission: list[str] = SUBMISSION
) -> dict:
    loop = asyncio.get_running_loop()

    def bash(command: str) -> str:
        action = Action(tool_calls=(ToolCall("call", "bash", {"command": command}),))
        step = asyncio.run_coroutine_threadsafe(session.step(action, timeout_s=600), loop)
        return step.result().observation[0]["content"]

    model = Scripted([*commands, *submission])
    (prompt,) = session.messages
    played = await asyncio.to_thread(mini_swe.work, model, bash, prompt["content"])
    messages = [
        {key: value for key, value in message.items() if key != "extra"}
        for message in played
        if message["role"] != "exit"
    ]
    return {"messages": messages, "tools": [BASH_TOOL]}


if __name__ == "__main__":
    main(
        play,
        description=__doc__,
        max_turns=None,
        language=replace(LANGUAGE, vocab_size=2048, isolated=None),
        out=Path("build/swebench/mini_swe_model"),
        dialogues=2400,
    )
