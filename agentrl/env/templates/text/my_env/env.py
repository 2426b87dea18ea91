from agentrl.env import Action, Environment, Task, register


@register("my-env")
class MyEnv(Environment):
    def splits(self):
        return {"train": None, "test": 100}  # None: unlimited, generated on demand

    def get(self, split, index):
        n = index if split == "test" else index + 100  # the splits share no tasks
        return Task(f"{split}/{index}", f"{n}+1=?", reference=str(n + 1))

    def on_text(self, text):
        self.finish(float(text.strip() == self.task.reference))

    def oracle(self):  # a correct solution, which `agentrl env check` plays
        return [Action(text=str(self.task.reference))]
