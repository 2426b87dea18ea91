"""Choice, form, instructions and recipes: what they read, what they refuse, how they scale."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_rewards.choice import extract_choice, gpqa
from agentrl_rewards.recipes import dapo, deepscaler
from agentrl_rewards.style import format, length, repetition


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"so \boxed{B}", "B"),
        (r"\boxed{\text{(C)}}", "C"),
        ("Answer: A", "A"),
        ("ANSWER: **D**", "D"),
        ("**Answer:** (B)", "B"),
        ("The correct answer is option C.", "C"),
        ("the answer is A, no: the answer is B", "B"),
        ("<answer> (D) </answer>", "D"),
        ("<think>Answer: A</think> Answer: B", "B"),
        ("It follows that\n(C)", "C"),
        ("b", "B"),
        ("The answer is a good question", None),
        ("Answer: All of them", None),
        ("Answer: E", None),
        ("A and B", None),
        ("<think>Answer: A", None),
        ("", None),
        ("answer: b", "B"),
        ("the answer is c.", "C"),
        ("Option B", "B"),
        ("(D) Paris", "D"),
        ("B. Paris", "B"),
        ("B) A city on the Rhine", "B"),
        ("Rome is not in France.\n**B. Paris**", "B"),
        ("Answer: B. A city on the Rhine", "B"),
        ("Answer: B) Paris and Rome", "B"),
        ("A is wrong. The correct option is C", "C"),
        ("Correct choice: D", "D"),
        ("答案：B", "B"),
        ("答案是 C。", "C"),
        ("The answer is A, not B", "A"),
        ("The answer is A. Options B and C are wrong.", "A"),
        ("The answer is B because A and C are false.", "B"),
        (r"Not \boxed{A}. On second thought it has to be \boxed{B}", "B"),
        (r"\boxed{B}\boxed{B}", "B"),
        (r"\boxed{C. 17}", "C"),
        ("Answer: A or B", None),
        ("Answer: A, B, C, D", None),
        ("Answer: A B C D", None),
        ("Answer: (A) (B)", None),
        ("Answer: A/B", None),
        ("Answer: A & D", None),
        ("**Answer:** **A** or **B**", None),
        ("Answer: A) 3 or B) 4", None),
        ("The answer is A or maybe C", None),
        ("Answer: A? No, B.", None),
        ("<answer>A or B or C</answer>", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{A \text{ and } C}", None),
        (r"\boxed{A}\boxed{B}", None),
        (r"\boxed{A}, \boxed{B} or \boxed{A}", None),
        ("The answer is not A", None),
        ("Answer: AB", None),
        ("(A) Oslo\n(B) Paris\n(C) Rome\n(D) Bern", None),
        ("A. Oslo or B. Paris", None),
        ("answer: a dog", None),
    ],
)
def test_extract_choice(text, letter):
    assert extract_choice(text) == letter
    assert gpqa(text, "B") == float(letter == "B")


@pytest.mark.parametrize(
    ("text", "style", "score"),
    [
        ("<think>a</think><answer>b</answer>", "think_answer", 1),
        (" <think>a</think>\n\n<answer>b</answer>\n", "think_answer", 1),
        ("a</think><answer>b</answer>", "think_answer", 1),
        ("<think>a</think>b", "think_answer", 0),
        ("<think>a</think>x<answer>b</answer>", "think_answer", 0),
        ("<think>a</think><answer>b</answer>x", "think_answer", 0),
        ("<think></think><answer>b</answer>", "think_answer", 0),
        ("<think>a</think><answer> </answer>", "think_answer", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", "think_answer", 0),
        ("<think>a<answer>b</answer></think>", "think_answer", 0),
        ("<answer>b</answer>", "think_answer", 0),
        ("", "think_answer", 0),
        ("<think>a</think><answer>b</answer>", "search", 1),
        (
            "<think>a</think><search>q</search>\n<information>i</information>\n"
            "<think>b</think><answer>c</answer>",
            "search",
            1,
        ),
        ("<think>a</think><search>q</search><think>b</think><answer>c</answer>", "search", 0),
        ("<search>q</search><information>i</information><answer>c</answer>", "search", 0),
        ("<think>a</think><search>q</search><information>i</information>", "search", 0),
        ("a</think><answer>b</answer>", "search", 0),
    ],
)
def test_format(text, style, score):
    assert format(text, style=style) == score


def test_length_is_the_paper_s_equation():
    lengths = [0, 16_384, 16_385, 18_432, 20_480, 20_481, 10**9]
    got = [length("", max_length=20_480, buffer=4_096, num_tokens=n) for n in lengths]
    assert got == [0, 0, -1 / 4096, -0.5, -1, -1, -1]
    assert length("one two three", max_length=2) == -1
    assert length("one two", max_length=2) == 0
    with pytest.raises(ValueError, match="buffer"):
        length("", max_length=2, buffer=3)


def test_repetition_counts_grams():
    assert repetition("a b c d e f") == 0
    assert repetition("a a a a a a") == pytest.approx(1 / 3 - 1)
    assert repetition("a b a b", n=2) == pytest.approx(2 / 3 - 1)
    assert repetition("a b") == repetition("") == 0
    with pytest.raises(ValueError):
        repetition("a", n=0)


@given(st.text(max_size=200))
def test_penalties_stay_in_range(text):
    assert -1 <= repetition(text, n=2) <= 0


@pytest.mark.parametrize("pattern", [" ", "!", "\n", "(", "*", "- ", "answer ", "<", "a.", "["])
def test_no_text_takes_long(pattern):
    text = "answer" + pattern * (200_000 // len(pattern)) + "x"
    start = time.process_time()
    extract_choice(text)
    format(text)
    repetition(text)
    assert time.process_time() - start < 2.0


async def test_recipes():
    right, late = "<think>t</think>#### 42", "#### 42"
    assert await deepscaler(right, "42") == 1
    assert await deepscaler("t</think> \\boxed{42}", "42") == 1
    assert await deepscaler(late, "42") == 0
    assert await deepscaler("#### 42</think> so yes", "42") == 0
    options = {"max_length": 100, "buffer": 20}
    assert await dapo(right, "42", num_tokens=80, **options) == {
        "score": 1,
        "accuracy": 1,
        "overlong": 0,
    }
    assert (await dapo(right, "42", num_tokens=90, **options))["score"] == 0.5
    assert (await dapo(right, "43", num_tokens=200, **options))["score"] == -2


@pytest.mark.parametrize(
    ("text", "accuracy"),
    [
        ("so\nAnswer: 34", 1),
        ("so\nanswer: $34$.", 1),
        ("Answer: 33\nAnswer: \\boxed{34}", 1),
        ("Answer: 34\nAnswer: 33", 0),
        ("<think>Answer: 34</think>I do not know", 0),
        ("Answer: 34" + " " * 300, 0),  # not in its last 300 characters
        ("#### 34", 1),
    ],
)
async def test_dapo_reads_its_own_marker(text, accuracy):
    result = await dapo(text, "34")
    assert (result["accuracy"], result["score"]) == (accuracy, 2 * accuracy - 1)
