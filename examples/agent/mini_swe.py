"""mini-swe-agent on SWE-bench instances: its own loop, prompts and model class. Only its shell is
replaced, by one in the instance's container, which the environment offers as the tool `bash`."""

import os
import re
from collections.abc import Callable

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

import httpx
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.exceptions import Submitted
from minisweagent.models.litellm_model import LitellmModel

CONFIG = get_config_from_spec("swebench.yaml")
STEP_LIMIT = 10  # as rollout.max_turns
DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class Shell:
    """What mini-swe-agent calls an environment."""

    config = None

    def __init__(self, bash: Callable[[str], str]) -> None:
        self.bash = bash  # the tool: a command's output, and how it ended

    def execute(self, action: dict, cwd: str = "") -> dict:
        content = self.bash(action["command"])
        output, ended = re.fullmatch(r"(.*)\[(.*?)\]\s*", content, re.DOTALL).groups()
        exited = re.match(r"exit code (-?\d+)", ended)
        first, _, rest = output.lstrip().partition("\n")
        if exited and exited[1] == "0" and first.strip() == DONE:
            extra = {"exit_status": "Submitted", "submission": rest}
            raise Submitted({"role": "exit", "content": rest, "extra": extra})
        return {
            "output": output,
            "returncode": int(exited[1]) if exited else -1,
            "exception_info": "" if exited else ended,
        }

    def get_template_vars(self, **kwargs) -> dict:
        return kwargs

    def serialize(self) -> dict:
        return {}


def work(model: LitellmModel, bash: Callable[[str], str], prompt: str) -> list[dict]:
    """Have the agent work on the problem in the environment's prompt; its messages."""
    limits = {"step_limit": STEP_LIMIT, "cost_limit": 0}
    agent = DefaultAgent(model, Shell(bash), **(CONFIG["agent"] | limits))
    problem = re.search(r"<problem>\n(.*?)\n</problem>", prompt, re.DOTALL)
    agent.run(problem[1] if problem else prompt)
    return agent.messages


def solve(task, base_url: str, api_key: str) -> None:
    """What is in the container at the end is graded; there is nothing to answer."""

    def bash(command: str) -> str:
        url = f"{task.tools_url}/bash"
        reply = httpx.post(url, json={"command": command}, timeout=None)
        return reply.raise_for_status().json()["content"]

    model = LitellmModel(
        **(CONFIG["model"] | {"model_name": "openai/policy", "cost_tracking": "ignore_errors"}),
    )
    model.config.model_kwargs |= {"api_base": base_url, "api_key": api_key, "timeout": 3600}
    work(model, bash, task.prompt)
