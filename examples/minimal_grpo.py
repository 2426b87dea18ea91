"""Reinforcement learning of a tool-using agent, the whole idea in one file.

    python examples/minimal_grpo.py            # CPU, a minute or two, reward 0.4 -> 0.9

A policy is asked `347*28=?`. It may guess, or call a calculator and read the answer. One step:

    1. rollout     the policy plays G episodes of each of P tasks; every token it sampled is kept
    2. advantage   an episode's reward minus the mean of its group: no critic, no labels per token
    3. loss        -advantage * ratio at sampled tokens only; what the tool wrote has mask 0
    4. step        AdamW, then the same weights play again

Uses torch and transformers alone, none of agentrl. What `agentrl train` adds to these lines: packed
rows without padding, deadlines and errors as data, environments over HTTP, every objective of the
field, metrics, reports, and runs that survive a kill.
"""

import json
import random
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).parent / "quickstart" / "model"
STEPS, TASKS, GROUP_SIZE, LEARNING_RATE, CLIP = 40, 8, 8, 1e-4, 0.2

torch.manual_seed(0)
rng = random.Random(0)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
END = tokenizer.eos_token_id
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


def make_task() -> tuple[str, int]:
    a, b, operator = rng.randint(100, 999), rng.randint(100, 999), rng.choice("+-*")
    return f"{a}{operator}{b}", {"+": a + b, "-": a - b, "*": a * b}[operator]


def calculator(expression: str) -> str:
    match = re.fullmatch(r"(\d+)([-+*])(\d+)", expression)
    if not match:
        return "error"
    a, operator, b = int(match[1]), match[2], int(match[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[operator])


@torch.no_grad()
def sample(prompts: list[list[int]], max_new_tokens: int = 24) -> list[list[int]]:
    """One sampled turn per prompt, its end token included."""
    width = max(map(len, prompts))
    ids = torch.tensor([[END] * (width - len(p)) + p for p in prompts])  # (B, width), left-padded
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=True, top_k=0, top_p=1.0
    )
    turns = [row[width:].tolist() for row in out]
    return [turn[: turn.index(END) + 1] if END in turn else turn for turn in turns]


def rollout(tasks: list[tuple[str, int]]) -> tuple[list[list[int]], list[list[int]], list[float]]:
    """Play one episode per task. Returns token rows, their masks (1 = sampled), and rewards."""
    rows = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"{expression}=?"}],
                tools=TOOLS,
                add_generation_prompt=True,
                tokenize=False,
            )
        )
        for expression, _ in tasks
    ]
    masks = [[0] * len(row) for row in rows]
    rewards = [0.0] * len(tasks)
    playing = list(range(len(tasks)))
    for _ in range(2):  # a tool call and an answer
        still_playing = []
        for i, turn in zip(playing, sample([rows[i] for i in playing]), strict=True):
            rows[i] += turn
            masks[i] += [1] * len(turn)
            text = tokenizer.decode([token for token in turn if token != END])
            if call := re.fullmatch(r"<tool_call>(.*)</tool_call>", text):
                try:
                    expression = json.loads(call[1])["arguments"]["expression"]
                except (ValueError, KeyError, TypeError):
                    continue
                # The tool's words extend the row; sampled ids are never tokenised again.
                heard = f"<|im_start|>tool\n{calculator(str(expression))}<|im_end|>"
                ids = tokenizer.encode(heard + "<|im_start|>assistant\n")
                rows[i] += ids
                masks[i] += [0] * len(ids)
                still_playing.append(i)
            elif answer := re.search(r"#### (-?\d+)$", text):
                rewards[i] = float(int(answer[1]) == tasks[i][1])
        playing = still_playing
        if not playing:
            break
    return rows, masks, rewards


def token_logprobs(rows: list[list[int]]) -> torch.Tensor:
    """Log-probability of every token given those before it: (B, T - 1)."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [END] * (width - len(row)) for row in rows])  # right-padded: causal
    logits = model(ids[:, :-1]).logits
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)


for step in range(1, STEPS + 1):
    tasks = [task for task in (make_task() for _ in range(TASKS)) for _ in range(GROUP_SIZE)]
    rows, masks, rewards = rollout(tasks)

    reward = torch.tensor(rewards).view(TASKS, GROUP_SIZE)
    centred = reward - reward.mean(1, keepdim=True)
    advantage = (centred / (reward.std(1, keepdim=True) + 1e-6)).view(-1, 1)  # (B, 1)

    width = max(map(len, rows))
    mask = torch.tensor([m + [0] * (width - len(m)) for m in masks])[:, 1:].bool()  # (B, T - 1)
    logprobs = token_logprobs(rows)
    ratio = (logprobs - logprobs.detach()).exp()  # 1 on the first use of a batch; has a gradient
    loss = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    # One mean over all sampled tokens of the step, however it may be cut into micro-batches.
    loss = torch.where(mask, loss, 0).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    bar = "#" * round(40 * reward.mean().item())
    print(f"step {step:3d}  reward {reward.mean():.3f}  {bar}", flush=True)
