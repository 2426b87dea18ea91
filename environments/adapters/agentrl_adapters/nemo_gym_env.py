"""A resources server of NeMo Gym, with the rows of its data sets: `nemo-gym:URL`.

    agentrl train run.toml --env.id nemo-gym:http://127.0.0.1:8000 --env.config.tasks example.jsonl

The adapter does what Gym's simple agent does, with the policy in the model's place: it seeds a
session with the row, calls the row's tools at the server, and has the answer verified. Tools are
those of all rows. The package is not needed here. Whoever sets the URL decides where it connects.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from agentrl.env.base import Observation
from agentrl.env.registry import register
from agentrl.env.rows import read_rows
from agentrl.errors import ConfigError, DataError, EnvError, EnvUnavailable, GraderError
from agentrl.types import JSON, Action, Message, Task, ToolSpec
from agentrl_adapters.packages import to_json
from agentrl_adapters.rows_env import RowsEnvironment


@dataclass(frozen=True)
class Shared:
    """The tasks by split, and the tools of all rows."""

    tasks: dict[str, list[Task]]
    tools: list[ToolSpec]


@register("nemo-gym")
class NemoGymEnvironment(RowsEnvironment):
    """A resources server of NeMo Gym: its tools, and its verdict on the answer."""

    http: aiohttp.ClientSession | None = None

    @classmethod
    async def load_shared(cls, config: Any) -> Shared:
        if not config.target.startswith(("http://", "https://")):
            raise ConfigError(f"nemo-gym:{config.target}: name the resources server's URL")
        return await asyncio.to_thread(_read, {"train": config.tasks, "test": config.test})

    def splits(self) -> dict[str, int | None]:
        return {split: len(tasks) for split, tasks in self.shared.tasks.items()}

    def get(self, split: str, index: int) -> Task:
        return self.shared.tasks[split][index]

    def offered_tools(self) -> list[ToolSpec]:
        return self.shared.tools

    async def reset(self, task: Task, *, seed: int) -> Observation:
        await self.close()
        # The session is a cookie, which is kept for servers without a name, too.
        self.http = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
        self.output: list[dict[str, Any]] = []
        status, text = await self._post("seed_session", task.metadata)
        if status >= 400:
            raise EnvError(f"{self.config.target}/seed_session answered {status}: {text[:300]}")
        return task.prompt

    async def step(self, action: Action) -> Observation:
        if action.text or not action.tool_calls:
            part = {"type": "output_text", "text": action.text, "annotations": []}
            self._add("message", role="assistant", status="completed", content=[part])
        for call in action.tool_calls:
            arguments = json.dumps(call.arguments)
            self._add("function_call", call_id=call.id, name=call.name, arguments=arguments)
        observation = await self.run_tools(action)
        for message in observation if isinstance(observation, list) else ():
            if message["role"] == "tool":
                called = message.get("tool_call_id")
                self._add("function_call_output", call_id=called, output=str(message["content"]))
        if self.episode.last_turn and self._finish is None:
            await self._verify(truncated=True)
        return observation

    def _add(self, kind: str, **item: Any) -> None:
        self.output.append({"type": kind, "id": f"{kind}-{len(self.output)}", **item})

    async def on_call(self, name: str, arguments: dict[str, JSON]) -> str:
        return (await self._post(name, arguments))[1]  # an error is an answer, as in Gym's agent

    async def on_text(self, text: str) -> None:
        await self._verify(truncated=False)

    async def _verify(self, *, truncated: bool) -> None:
        """Has the server judge the conversation, and ends the episode with its reward."""
        response = {"id": "response", "object": "response", "created_at": 0, "model": "policy"}
        response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        body = self.task.metadata | {"response": response | {"output": self.output}}
        status, text = await self._post("verify", body)
        if status >= 400:
            raise GraderError(f"{self.config.target}/verify answered {status}: {text[:300]}")
        verdict = json.loads(text)
        kept = {k: v for k, v in verdict.items() if k not in body and k != "reward"}
        self.finish(float(verdict["reward"]), kept, truncated=truncated)

    async def _post(self, path: str, body: Any) -> tuple[int, str]:
        assert self.http is not None
        try:
            async with self.http.post(f"{self.config.target.rstrip('/')}/{path}", json=body) as got:
                return got.status, await got.text()
        except aiohttp.ClientError as error:
            raise EnvUnavailable(f"NeMo Gym's server {self.config.target}: {error}") from error

    async def close(self) -> None:
        if self.http is not None:
            await self.http.close()


def _read(files: dict[str, str | None]) -> Shared:
    tasks: dict[str, list[Task]] = {}
    tools: dict[str, ToolSpec] = {}
    for split, name in files.items():
        for number, (place, row) in enumerate(read_rows(Path(name)) if name else ()):
            asked = row.get("responses_create_params") or {}
            if not asked.get("input"):
                raise DataError(f"{place}: `responses_create_params.input` is missing")
            for each in asked.get("tools") or ():
                function = {k: each[k] for k in ("name", "description", "parameters") if k in each}
                tools.setdefault(each["name"], {"type": "function", "function": function})
            columns: Any = to_json(row)
            task = Task(f"{split}/{number}", _messages(asked["input"]), metadata=columns)
            tasks.setdefault(split, []).append(task)
    return Shared(tasks, list(tools.values()))


def _messages(given: Any) -> list[Message]:
    """Returns OpenAI's input of a response as messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for item in given:
        content = item["content"]
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": content})
    return messages
