from agentrl.env import Action, Environment, Task, ToolCall, register, tool
from agentrl.env.container.container import Container, ContainerSpec
from agentrl.env.container.engine import Engine, reap_abandoned

SPEC = ContainerSpec("python:3.12-slim")  # any image on this machine with /bin/bash


@register("my-env", max_sessions=16)
class MyEnv(Environment):
    max_creating = 4  # resets that run at a time: each may start a container

    @classmethod
    def load_shared(cls, config):
        reap_abandoned()  # what killed processes left
        return Engine()

    def splits(self):
        return {"train": None, "test": 100}  # None: unlimited, generated on demand

    def get(self, split, index):
        n = index if split == "test" else index + 100  # the splits share no tasks
        return Task(f"{split}/{index}", f"Write {n + 1} to /tmp/answer.", reference=n + 1)

    async def reset(self, task, *, seed):
        self.container = await Container.create(self.shared, SPEC)
        return task.prompt

    @tool
    async def bash(self, command: str) -> str:
        return (await self.container.run(command, timeout_s=30, max_chars=10_000)).output

    @tool(terminal=True)
    async def submit(self) -> float:
        answer = await self.container.run("cat /tmp/answer", timeout_s=30, max_chars=100)
        return float(answer.output.strip() == str(self.task.reference))

    async def close(self):
        if hasattr(self, "container"):  # reset may have failed before
            await self.container.remove()

    def oracle(self):  # a correct solution, which `agentrl env check` plays
        command = f"echo {self.task.reference} > /tmp/answer"
        yield Action(tool_calls=(ToolCall("write", "bash", {"command": command}),))
        yield Action(tool_calls=(ToolCall("submit", "submit", {}),))
