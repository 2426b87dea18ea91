"""A command-line agent trained beside agentrl's own driver: the quickstart, both curves.

    python benchmarks/agent_curve.py [--steps 30] [--groups 4] [--seed 0]

The agent is a process per episode. It knows the URL, the key and the environment's tools, sends its
whole history with every call and ends when the policy answers without one; it has a system call of
its own for a title, which is served and carries no gradient. Printed are the mean rewards of both
runs, step by step, and the largest difference of a log-probability between the engine and the
trainer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from agentrl.api import load_config, train
from agentrl.rollout import read_trajectories
from agentrl.view.tracking import read_metrics

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart" / "run.toml"
AGENT = """
import http.client, json, os
host, path = os.environ["OPENAI_BASE_URL"].split("/", 3)[2:]
tools_path = "/" + os.environ["AGENTRL_TOOLS_URL"].split("/", 3)[3]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
connection = http.client.HTTPConnection(host)
def ask(method, path, body=None):
    connection.request(method, path, body and json.dumps(body), headers)
    return json.load(connection.getresponse())
def say(messages, tools):
    asked = {"model": "policy", "messages": messages, **({"tools": tools} if tools else {})}
    return ask("POST", f"/{path}/chat/completions", asked)["choices"][0]["message"]
messages = [{"role": "user", "content": os.environ["AGENTRL_PROMPT"]}]
tools = ask("GET", tools_path)
say([{"role": "system", "content": "Write a title."}, *messages], None)
while True:
    message = say(messages, tools)
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        function = call["function"]
        result = ask("POST", f"{tools_path}/{function['name']}", json.loads(function["arguments"]))
        messages.append(
            {"role": "tool", "tool_call_id": call["id"], "content": str(result.get("content"))}
        )
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    curves, rows = {}, {}
    with tempfile.TemporaryDirectory(prefix="agentrl-curve-") as folder:
        script = Path(folder) / "agent.py"
        script.write_text(AGENT)
        for name in ("native", "command"):
            run_dir = Path(folder) / name
            overrides = [
                *("--run.num_steps", str(arguments.steps), "--run.seed", str(arguments.seed)),
                *("--run.dir", str(run_dir), "--rollout.groups_per_step", str(arguments.groups)),
            ]
            if name == "command":
                command = [sys.executable, "-I", "-S", str(script)]
                # A title takes a turn too.
                overrides += ["--agent.command", json.dumps(command), "--rollout.max_turns", "4"]
                overrides += ["--agent.answer", "policy"]
            train(load_config(QUICKSTART, overrides), quiet=True)
            rows[name] = read_metrics(run_dir)
            curves[name] = [row["reward/mean"] for row in rows[name]]
            if name == "command":
                played = [each for _, each in read_trajectories(run_dir)]
    print("step    native    command")
    for step, pair in enumerate(zip(*curves.values(), strict=True), 1):
        print(f"{step:4}    {pair[0]:6.3f}    {pair[1]:7.3f}")
    for name, metrics in rows.items():
        worst = max(row["policy/rollout_train_logprob_diff_max"] for row in metrics)
        print(f"{name}: log-probabilities differ by at most {worst:.1e}")
    titles = sum(len(each.info.get("served_turns", ())) for each in played)
    learned = sum(
        sum(row.loss_mask) > 0 and row.messages[0]["content"] == "Write a title."
        for each in played
        for row in each.branches
    )
    print(f"{len(played)} kept episodes of the command: {titles} titles served, {learned} trained")


if __name__ == "__main__":
    main()
