"""Write four tasks in Harbor's format and make a model that knows how they are played:

    python examples/harbor/make_model.py --image debian:bookworm-slim

writes build/harbor. Each task asks for a number in a file. The model, a Qwen3 of 0.6 million
parameters, has read episodes with the right number in two of five and others in the rest; which one
pays is left to reinforcement learning. The image needs no more than bash.

With `--agent mini-swe` the model reads mini-swe-agent's own dialogues, played in the tasks'
containers, and is for mini_swe.toml.
"""

import argparse
import asyncio
import random
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "swebench"), str(HERE.parent / "agent")]
from make_model import LANGUAGE  # noqa: E402
from tiny_model import Lesson, make_model  # noqa: E402

from agentrl.env import connect  # noqa: E402
from agentrl.env.tools import tools_of  # noqa: E402
from agentrl.types import Action, Message, ToolCall, assistant_message  # noqa: E402
from agentrl_harbor.env import PROMPT, HarborEnvironment  # noqa: E402

NUMBERS = ("3", "5", "7", "9")


def instruction(number: str) -> str:
    return f"Write the number {number} to the file n."


def write_tasks(out: Path, image: str) -> None:
    for number in NUMBERS:
        files = {
            "task.toml": f'[environment]\ndocker_image = "{image}"\nworkdir = "/tmp"\n'
            'network_mode = "no-network"\nmemory_mb = 256\n',
            "instruction.md": instruction(number) + "\n",
            "tests/test.sh": f'#!/bin/bash\n[ "$(cat /tmp/n)" = {number} ] && reward=1\n'
            'echo "${reward:-0}" > /logs/verifier/reward.txt\n',
            "solution/solve.sh": f"#!/bin/bash\necho {number} > n\n",
        }
        for name, text in files.items():
            path = out / f"number-{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)


def dialogue(asked: str, written: str) -> dict:
    prompt = PROMPT.format(
        instruction=instruction(asked),
        workdir="/tmp",
        network=" and no network",
        command_timeout_s=120.0,
        step="",
    )
    messages: list[Message] = [{"role": "user", "content": prompt}]
    calls = [("bash", {"command": f"echo {written} > n"}, "[exit code 0]"), ("submit", {}, "")]
    for number, (name, arguments, answer) in enumerate(calls):
        call = ToolCall(f"call_{number}", name, arguments)
        messages.append(assistant_message(Action(tool_calls=(call,))))
        if answer:
            messages.append(
                {"role": "tool", "content": answer, "tool_call_id": call.id, "name": name}
            )
    specs = [tool.spec for tool in tools_of(HarborEnvironment).values()]
    return {"messages": messages, "tools": specs}


async def play_mini_swe(tasks: Path) -> dict[tuple[str, str], dict]:
    """Plays mini-swe-agent in the tasks' containers.

    Returns:
        (number asked, number written) -> the agent's dialogue.
    """
    from make_mini_swe_model import mini_swe, play

    played = {}
    async with aclosing(connect()) as client:
        for asked in NUMBERS:
            config = {"source": str(tasks), "task_ids": [f"number-{asked}"]}
            for written in NUMBERS:
                session = await client.session(
                    "harbor", split="test", index=0, config=config, timeout_s=600
                )
                commands, end = [f"echo {written} > n"], [f"echo {mini_swe.DONE}"]
                played[asked, written] = await play(session, commands, end)
                await session.close()
    return played


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--image", default="debian:bookworm-slim")
    parser.add_argument("--out", type=Path, default=Path("build/harbor"))
    parser.add_argument("--agent", choices=["none", "mini-swe"], default="none")
    args = parser.parse_args()
    write_tasks(args.out / "tasks", args.image)
    if args.agent == "none":
        shown = {
            (asked, written): dialogue(asked, written) for asked in NUMBERS for written in NUMBERS
        }
        language, out = LANGUAGE, args.out / "model"
    else:
        shown = asyncio.run(play_mini_swe(args.out / "tasks"))
        # Its prompt is long.
        language = replace(LANGUAGE, vocab_size=2048, isolated=None)
        out = args.out / "mini_swe_model"
    rng = random.Random(0)
    # First how to play, which it then does without mistakes; then to write other numbers as well.
    right = [shown[asked, asked] for asked in rng.choices(NUMBERS, k=3200)]
    mixed = []
    for asked in rng.choices(NUMBERS, k=1600):
        others = [each for each in NUMBERS if each != asked]
        mixed.append(shown[asked, rng.choices([asked, *others], [40, 20, 20, 20])[0]])
    lessons = [Lesson(right, 1.5e-3, batch_size=16), Lesson(mixed, 5e-4, batch_size=16)]
    make_model(lessons, language, out, seed=0)


if __name__ == "__main__":
    main()
