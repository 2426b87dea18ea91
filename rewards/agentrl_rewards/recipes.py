"""Rewards of published recipes, built on the math grader."""

from __future__ import annotations

import re

from agentrl.errors import DataError
from agentrl_rewards.inputs import without_reasoning
from agentrl_rewards.math import grade, math_reward_async
from agentrl_rewards.style import length


def gsm8k_reference(answer: str) -> str:
    """Returns the number after `####` in a GSM8K row's `answer`.

    Raises:
        DataError: `answer` does not end in `#### N`.
    """
    head, marker, tail = answer.rpartition("####")
    if not marker or not tail.strip():
        raise DataError(
            f"GSM8K answer {(head + marker + tail)[-60:]!r} does not end in `#### N`; "
            "set the label key to the column that does"
        )
    return tail.strip()


def gsm8k_reward(text: str, answer: str, *, require_marker: bool = True) -> float:
    """Returns 1.0 if the final answer in `text` is the number that ends a GSM8K row's `answer`.

    Compares numbers only, so it never starts a process. Cobbe et al. 2021, "Training Verifiers to
    Solve Math Word Problems", arXiv:2110.14168.

    Raises:
        DataError: `answer` does not end in `#### N`.
    """
    reference = gsm8k_reference(answer)
    return grade(text, reference, equivalence="numeric", require_marker=require_marker).score


async def dapo(
    text: str,
    reference: str,
    *,
    num_tokens: int | None = None,
    max_length: int = 20_480,
    buffer: int = 4_096,
    deadline_s: float = 2.0,
    whole_text: str = "",
) -> dict[str, float]:
    """Returns +1 for a right final answer, else -1, plus a soft penalty for overlong texts.

    The recipe's own marker, `Answer: 34` up to the end of the line, takes precedence over those of
    `math` if it is in the last 300 characters.

    Yu et al. 2025, "DAPO", arXiv:2503.14476, section 3.4 and equation 13; the defaults are the
    paper's, in tokens.

    Args:
        num_tokens: length of the text in tokens; None counts words instead.
        max_length: see `agentrl_rewards.style.length`.
        buffer: see `agentrl_rewards.style.length`.

    Returns:
        `score`, between -2 and 1; `accuracy`, 1 for a right answer, else 0; and `overlong`, the
        penalty, between -1 and 0.

    Raises:
        GraderError: the comparison failed; such answers are never scored as wrong.
    """
    # computed first, so that wrong settings fail before the expensive comparison
    penalty = length(
        whole_text or text, max_length=max_length, buffer=buffer, num_tokens=num_tokens
    )
    stated = re.findall(r"(?i)answer\s*:\s*([^\n]+)", without_reasoning(text)[-300:])
    answer = f"<answer>{stated[-1]}</answer>" if stated else text
    right = await math_reward_async(answer, reference, deadline_s=deadline_s)
    return {"score": 2 * right - 1 + penalty, "accuracy": right, "overlong": penalty}


async def deepscaler(
    text: str, reference: str, *, deadline_s: float = 2.0, whole_text: str = ""
) -> float:
    """Returns 1.0 for a right final answer after `</think>`, else 0.0.

    Unlike with `math`, a text whose reasoning is not closed always scores 0 (Luo et al. 2025,
    "DeepScaleR"). The opening tag may be part of the prompt.

    Raises:
        GraderError: the comparison failed; such answers are never scored 0.
    """
    head, tag, answer = (whole_text or text).rpartition("</think>")
    if not tag or not head.strip():
        return 0.0
    return await math_reward_async(answer, reference, deadline_s=deadline_s)
