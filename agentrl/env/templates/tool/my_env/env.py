from agentrl.env import Action, Environment, Task, ToolCall, register, tool


@register("my-env")
class MyEnv(Environment):
    def splits(self):
        return {"train": None, "test": 100}  # None: unlimited, generated on demand

    def get(self, split, index):
        n = index if split == "test" else index + 100  # the splits share no tasks
        return Task(f"{split}/{index}", f"{n}+1=?", reference=n + 1)

    @tool(terminal=True)
    def answer(self, number: int) -> float:
        return float(number == self.task.reference)

    def oracle(self):  # a correct solution, which `agentrl env check` plays
        return [Action(tool_calls=(ToolCall("gold", "answer", {"number": self.task.reference}),))]
