"""Make the example's model from nothing: demonstrations, a tokenizer, and a warm start.

    python benchmarks/swe_fixtures/build.py --out build/swebench
    python examples/swebench/make_model.py

writes `model/` beside this file, and the demonstrations beside the instances. Commands of the menu
below, right ones and wrong ones, are played in real containers, so that every observation in a
demonstration is the environment's own. Then a Qwen3 of 0.6 million parameters is taught to write
such episodes, with the menu's weights. It has seen the right command for each bug among four or
five others; which of them pay is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tiny_model import Language, Lesson, make_model, write_rows  # noqa: E402

from agentrl.env import EnvSession, connect  # noqa: E402
from agentrl.types import JSON, Action, Message, ToolCall, assistant_message  # noqa: E402

# ChatML, with tools listed by signature: a small model needs a short prompt.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "tools:{% for tool in tools %} {{ tool.function.name }}("
    "{{ tool.function.parameters.properties | join(', ') }}){% endfor %}<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Words are not merged with what surrounds them, so that a command is several tokens.
LANGUAGE = Language(
    CHAT_TEMPLATE, ["<tool_call>", "</tool_call>"], vocab_size=640, isolated=r"[a-z]+"
)
MAX_TURNS = 4

Choice = dict[str, int]
"""Commands by weight; "" is none."""


@dataclass(slots=True, frozen=True)
class Menu:
    """Lists the choices of demonstrations for one instance; each plays one command per choice."""

    instance_id: str
    choices: tuple[Choice, ...]


MENUS = (
    Menu(
        "agentrl__spans-1",
        (
            {"cat spans/core.py": 50, "": 50},
            {  # spans that touch
                "sed -i 's/start < /start <= /' spans/core.py": 70,
                "sed -i 's/start < /start > /' spans/core.py": 10,
                "sed -i 's/sorted(spans)/spans/' spans/core.py": 10,
                "": 10,
            },
            {  # a span inside another
                "sed -i 's/, stop)$/, max(merged[-1][1], stop))/' spans/core.py": 60,
                "sed -i 's/, stop)$/, min(merged[-1][1], stop))/' spans/core.py": 20,
                "sed -i 's/==/!=/' tests/test_spans.py": 10,
                "": 10,
            },
        ),
    ),
    Menu(
        "agentrl__gauge-1",
        (
            {"cat lib/Gauge.pm": 50, "": 50},
            {
                "sed -i 's/total = \\$1/total += $1/' lib/Gauge.pm": 50,
                "sed -i 's/total = 0/total = 1/' lib/Gauge.pm": 15,
                "sed -i 's/h => 3600/h => 60/' lib/Gauge.pm": 15,
                "sed -i 's/1800/5400/' tests/gauge.t": 10,
                "": 10,
            },
        ),
    ),
)


Play = Callable[[EnvSession, list[str]], Awaitable[dict]]
"""An agent: runs commands in an instance's container. The dialogue: `messages` and `tools`."""


async def play(session: EnvSession, commands: list[str]) -> dict:
    """As agentrl plays an episode itself."""
    messages: list[Message] = [*session.messages]
    for number, command in enumerate([*commands, None]):
        name = "submit" if command is None else "bash"
        arguments: dict[str, JSON] = {} if command is None else {"command": command}
        action = Action(tool_calls=(ToolCall(f"call_{number}", name, arguments),))
        messages.append(assistant_message(action))
        result = await session.step(action, timeout_s=600)
        messages += result.observation
    return {"messages": messages, "tools": session.tools}


async def play_all(play: Play, source: str, max_turns: int | None) -> tuple[list[dict], list[int]]:
    """Every episode of the menus, once each, and their weights."""
    config: dict[str, JSON] = {"source": source, "memory_mb": 1024}
    config |= {"min_free_gb": 2, "grade": False}
    limit = asyncio.Semaphore(4)
    async with aclosing(connect()) as client:

        async def episode(instance_id: str, commands: tuple[str, ...]) -> dict:
            async with limit:
                session = await client.session(
                    "swebench",
                    split="test",
                    index=0,
                    config={**config, "instance_ids": [instance_id]},
                    timeout_s=600,
                    max_turns=max_turns,
                )
                dialogue = await play(session, [*filter(None, commands)])
                await session.close()
                return dialogue

        episodes, weights = [], []
        for menu in MENUS:
            for picks in itertools.product(*(choice.items() for choice in menu.choices)):
                commands, parts = zip(*picks, strict=True)
                weight = 1
                for part in parts:
                    weight *= part
                # Menus have choices of 100 in all; a shorter one counts as much as a longer.
                weights.append(weight * 100 ** (3 - len(parts)))
                episodes.append(episode(menu.instance_id, commands))
        return await asyncio.gather(*episodes), weights


def main(
    play: Play = play,
    *,
    description: str | None = __doc__,
    max_turns: int | None = MAX_TURNS,
    language: Language = LANGUAGE,
    out: Path = HERE / "model",
    dialogues: int = 3200,
) -> None:
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--source", default="build/swebench/dataset.jsonl", help="the instances")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--dialogues", type=int, default=dialogues)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    episodes, weights = asyncio.run(play_all(play, args.source, max_turns))
    print(f"{len(episodes)} different episodes were played")
    drawn = random.Random(args.seed).choices(episodes, weights, k=args.dialogues)
    write_rows(Path(args.source).with_name("demonstrations.jsonl"), drawn)
    make_model([Lesson(drawn, 1.5e-3, batch_size=8)], language, args.out, seed=args.seed)


if __name__ == "__main__":
    main()
