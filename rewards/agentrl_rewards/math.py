"""Rewards for tasks with one right final answer: extract it, compare it, never run it.

    text -> extract_answer -> equal as text? -> equal as exact numbers? -> equal as expressions?
                              (in this process, microseconds)              (killable processes)

Numbers are compared as fractions of integers, so there is no rounding and no evaluation. Only an
answer or a reference that is not a plain number goes to math-verify, in a process that is killed
at a deadline (`agentrl_rewards.math_pool`). Three kinds of failure stay apart:

* a wrong, missing or unreadable answer scores 0;
* a "bomb" (a power tower, a huge factorial, a megabyte of LaTeX) is refused unread and scores 0;
* a grader that crashed or ran out of time raises `GraderError`: the episode has no reward.

    math_reward("so it is \\\\boxed{\\\\frac12}", "0.5")                    # 1.0
    grade("#### 3 or 4", "3")                # Grade(score=0.0, extracted="3 or 4", ...)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from agentrl.errors import GraderError
from agentrl_rewards.math_numbers import (
    MAX_ANSWER_CHARS,
    parse_number,
    plain,
    same_number,
    same_unit,
    split_unit,
    unwrapped,
)
from agentrl_rewards.math_pool import MathPool, default_pool

Equivalence = Literal["literal", "numeric", "symbolic"]
"""What counts as the reference's value.

`literal`: one written-out number (`1,000`, `-3.50`, `12 apples`), so that the question itself, as
in `347*28`, is not an answer. `numeric`: any exact number, fractions, percentages and powers of
ten included. `symbolic`: also expressions, equations, sets, intervals and matrices, by
math-verify, where an unevaluated `3+4` equals 7.
"""
Method = Literal["text", "exact", "symbolic", "refused", "no_answer"]
"""How a grade came about: the answer read the same as the reference; exact numbers; math-verify;
it was too long or too dangerous to read; there was no marked answer."""

MAX_TEXT_CHARS = 100_000
"""A final answer is looked for in as many characters at the end of a text."""
MAX_REFERENCE_CHARS = 2000
MAX_DIGITS = 50
"""Longest number handed to math-verify. Exact numbers may fill MAX_ANSWER_CHARS."""
MAX_DEPTH, MAX_FUNCTIONS = 20, 8
"""Deepest nesting of brackets, and most functions, that a parser of exponential time is given."""


@dataclass(slots=True, frozen=True)
class Grade:
    """The verdict on an answer, and how it was found."""

    score: float
    """1.0 for the right answer, else 0.0."""
    extracted: str | None
    """The answer that was judged, at most MAX_ANSWER_CHARS of it; None when there was none."""
    method: Method
    """What decided."""


def grade(
    text: str,
    reference: str,
    *,
    equivalence: Equivalence = "symbolic",
    require_marker: bool = True,
    deadline_s: float = 2.0,
    pool: MathPool | None = None,
) -> Grade:
    """Judge the final answer in `text` against `reference`. May be called from any thread.

    Args:
        text: what the policy wrote; see `extract_answer` for where the answer is looked for.
        reference: the gold answer, bare or itself marked (`... #### 18`, `\\boxed{18}`).
        equivalence: see `Equivalence`.
        require_marker: False judges the whole text when it holds no marker at all.
        deadline_s: seconds one symbolic comparison may take before it is killed.
        pool: processes for symbolic comparisons; None shares the default pool.

    Raises:
        GraderError: the comparison crashed, ran out of time or memory, or the reference can't be
            used (empty, or longer than MAX_REFERENCE_CHARS).
    """
    outcome = _grade_in_process(text, reference, equivalence, require_marker)
    if isinstance(outcome, Grade):
        return outcome
    answer, gold, shown = outcome
    equal = (pool or default_pool()).check(answer, gold, deadline_s)
    return Grade(float(bool(equal)), shown, "refused" if equal is None else "symbolic")


async def grade_async(
    text: str,
    reference: str,
    *,
    equivalence: Equivalence = "symbolic",
    require_marker: bool = True,
    deadline_s: float = 2.0,
    pool: MathPool | None = None,
) -> Grade:
    """`grade` that never blocks the event loop. Raises GraderError as `grade`."""
    outcome = _grade_in_process(text, reference, equivalence, require_marker)
    if isinstance(outcome, Grade):
        return outcome
    answer, gold, shown = outcome
    equal = await (pool or default_pool()).check_async(answer, gold, deadline_s)
    return Grade(float(bool(equal)), shown, "refused" if equal is None else "symbolic")


def math_reward(text: str, reference: str, **options: Any) -> float:
    """The score of `grade`, with its arguments and errors."""
    return grade(text, reference, **options).score


async def math_reward_async(
    text: str,
    reference: str,
    *,
    equivalence: Equivalence = "symbolic",
    require_marker: bool = True,
    deadline_s: float = 2.0,
) -> float:
    """The score of `grade_async`, with its arguments and errors."""
    options = {"require_marker": require_marker, "deadline_s": deadline_s}
    return (await grade_async(text, reference, equivalence=equivalence, **options)).score


# --- extraction ----------------------------------------------------------------------------------

# Every alternative starts with a literal, so `re` skips plain text at the speed of a byte search.
_MARKERS = re.compile(
    r"(?P<open><[aA]nswer>)|(?P<close></[aA]nswer>)|(?P<hash>\#\#\#\#(?!\#)(?<!\#{5}))"
    r"|(?P<newline>\n)|(?P<boxed>\\f?box(?:ed)?\s*\{)|(?P<bare>\\boxed\s+(?P<token>[^\s{}$\\]+))"
    r"|(?P<escape>\\[\\{}])|(?P<left>\{)|(?P<right>\})"
)
_HEADING = re.compile(r"[ \t*_]*[A-Za-z]{2}")


def extract_answer(text: str) -> str | None:
    """The final answer a text states, or None when it states none.

    Three markers count: `#### answer` (to the end of its line), `\\boxed{answer}` (braces may
    nest) and `<answer>answer</answer>`. The one that ends last wins, whatever its kind; a marker
    inside the winner is opened in turn, so `#### \\boxed{5}` states 5. Text in or before
    `<think>...</think>` is reasoning and holds no final answer. A marker that was never closed is
    none; an empty last marker is an answer that is missing. `#### Verification` below another
    marker is a heading, so words after `####` count only where nothing else is marked.
    """
    answer = _last_marked(_after_reasoning(text))
    for _ in range(8):
        if (inner := _last_marked(answer or "")) is None:
            break
        answer = inner
    return answer.strip() or None if answer is not None else None


def _after_reasoning(text: str) -> str:
    text = text[text.rfind("</think>") + 8 :] if "</think>" in text else text
    return text.split("<think>", 1)[0][-MAX_TEXT_CHARS:]


def _last_marked(text: str) -> str | None:
    """Returns what the marker that ends last encloses, in time linear in the text's length."""
    last: tuple[int, int] | None = None
    boxes: list[tuple[int, int, int]] = []  # where a box starts, and its content's start and end
    heading: tuple[int, int] | None = None
    answer_start: int | None = None
    hash_start: int | None = None
    braces: list[tuple[int, int] | None] = []  # a box and its content start; None: another brace
    for match in _MARKERS.finditer(text + "\n"):
        start, end = match.span()
        kind = match.lastgroup if match.lastgroup != "token" else "bare"
        if kind in ("hash", "newline", "close") and hash_start is not None:
            if _HEADING.match(text, hash_start):
                heading = hash_start, start
            else:
                last = hash_start, start
            hash_start = None
        if kind == "hash":
            hash_start = end
        elif kind == "open":
            answer_start = end
        elif kind == "close" and answer_start is not None:
            last, answer_start = (answer_start, start), None
        elif kind == "bare":
            last = match.span("token")
        elif kind in ("boxed", "left"):
            braces.append((start, end) if kind == "boxed" else None)
        elif kind == "right" and braces:
            box = braces.pop()
            if box is not None:
                last = (box[1], start)
                boxes.append((*box, start))
    if last is not None and boxes and last == boxes[-1][1:]:
        return _joined(text, boxes)
    last = last or heading
    return None if last is None else text[last[0] : last[1]]


_BETWEEN_BOXES = re.compile(
    r"(?:\s|\$|\\[()\[\],;: ]|\\q?quad|\\(?:text|mathrm)\s*\{\s*(?:and|or),?\s*\}|and|or|[,;])+"
    r"|[^\n.:;!?0-9]{0,40}\band\b[\s$\\(){}]*(?:[A-Za-z]\w*\s*=\s*)?"  # " papers and "
)


def _joined(text: str, boxes: list[tuple[int, int, int]]) -> str:
    """The last box, with those it is listed with: `\\boxed{1} and \\boxed{2}` states both."""
    contents = [text[boxes[-1][1] : boxes[-1][2]]]
    for (_, start, end), (following, _, _) in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        between = text[end + 1 : following]
        is_list = _BETWEEN_BOXES.fullmatch(between) and re.search("[,;]|and|or", between)
        if not is_list:
            break
        if (content := text[start:end]) not in contents:
            contents.insert(0, content)
    return ", ".join(contents)


# --- the decision --------------------------------------------------------------------------------


def _grade_in_process(
    text: str, reference: str, equivalence: Equivalence, require_marker: bool
) -> Grade | tuple[str, str, str]:
    """The grade, or what only math-verify can decide: answer, reference and answer to show."""
    gold = extract_answer(reference) or reference.strip()
    if not 0 < len(gold) <= MAX_REFERENCE_CHARS:
        raise GraderError(
            f"the reference has {len(gold)} characters; a final answer has between 1 and "
            f"{MAX_REFERENCE_CHARS}"
        )
    found = extract_answer(text)
    if found is None and not require_marker and _last_marked(_after_reasoning(text)) is None:
        found = _after_reasoning(text).strip() or None
    if found is None:
        return Grade(0.0, None, "no_answer")
    shown = found[:MAX_ANSWER_CHARS]
    if len(found) > MAX_ANSWER_CHARS:
        return Grade(1.0, shown, "text") if found == gold else Grade(0.0, shown, "refused")

    answer_number, gold_number = parse_number(found), parse_number(gold)
    if answer_number is not None and gold_number is not None:
        allowed = answer_number.literal or equivalence != "literal"
        equal = allowed and same_number(answer_number, gold_number)
        return Grade(float(equal), shown, "exact")
    if _same_text(plain(found), plain(gold)):
        return Grade(1.0, shown, "text")
    if equivalence != "literal" and _same_base(plain(found), plain(gold)):
        return Grade(1.0, shown, "exact")
    if equivalence != "symbolic":
        return Grade(0.0, shown, "text" if gold_number is None else "exact")
    if gold_number is not None and not re.search(r"[0-9\\π√]", found):
        return Grade(0.0, shown, "exact")  # words alone are no number
    if re.fullmatch(r"[A-Za-z]{2,}(?: [A-Za-z]{2,})+", plain(gold)):
        return Grade(0.0, shown, "text")  # words, of which a parser would drop some
    answer, answer_unit = split_unit(unwrapped(found))
    gold, gold_unit = split_unit(unwrapped(gold))
    if refusal(answer) is not None:
        return Grade(0.0, shown, "refused")
    if _FUNCTION_VALUE.match(answer + "\n" + gold):  # y = 2x for f(x) = 2x
        answer, gold = (text.partition("=")[2] for text in (answer, gold))
    if _values_of_others(answer, gold):
        return Grade(0.0, shown, "text")
    if not same_unit(answer_unit, gold_unit):
        return Grade(0.0, shown, "text")
    return answer, gold, shown


def _same_text(answer: str, gold: str) -> bool:
    if "\\" not in gold and re.search(r"[A-Za-z]{3}|\b[ap]\.?m\b", gold, re.IGNORECASE):
        return _words(answer) == _words(gold)
    if len(gold) > 1 and gold.replace(" ", "").isalpha():  # one letter may be a variable
        return answer.casefold() == gold.casefold()
    return answer == gold or _decimal_point(answer) == _decimal_point(gold)


_WORD_FORMS = (
    (re.compile(r"^(?:the|an?) "), ""),
    (re.compile(r"\b([ap])\.? ?m\b\.?"), r"\1m"),
    (re.compile(r"(?<=[0-9])(?:st|nd|rd|th)\b"), ""),  # March 5th
    (re.compile(r"(?<=[0-9]):00(?= ?[ap]m)"), ""),
    (re.compile(r"(?<=[0-9]) (?=[ap]m)"), ""),
    (re.compile(r"(?<=[a-z0-9]), ?(?=[0-9]{4}$)"), " "),  # March 5, 2020
)


def _words(text: str) -> str:
    text = text.casefold()
    for pattern, replacement in _WORD_FORMS:
        text = pattern.sub(replacement, text)
    return text


def _decimal_point(text: str) -> str:
    """Read the comma of 1,22 and of 0,111 as a decimal one. That of 1,234 parts thousands."""
    return re.sub(r"^([-+]?(?:[0-9]+(?=,[0-9]{1,2}$|,[0-9]{4,}$)|0)),([0-9]+)$", r"\1.\2", text)


_BASE_NUMBER = re.compile(r"(?:0x)?([0-9A-Za-z ]+)_\{?(?:base)? ?([0-9]{1,2})\}?")


def _same_base(answer: str, gold: str) -> bool:
    """Tells whether both are the same digits in the same base: 2b_{16} and 2B_{16}."""
    pair = _BASE_NUMBER.fullmatch(answer), _BASE_NUMBER.fullmatch(gold)
    if pair[0] is None or pair[1] is None or pair[0][2] != pair[1][2]:
        return False
    digits = [each[1].replace(" ", "").casefold().lstrip("0") for each in pair if each]
    return digits[0] == digits[1]


_FUNCTION_VALUE = re.compile(
    r"\s*y\s*=[^=\n]*\n\s*[fgh]\(x\)\s*=[^=]*$|\s*[fgh]\(x\)\s*=[^=\n]*\n\s*y\s*=[^=]*$"
)
_VALUE_OF = re.compile(r"\s*([A-Za-z])\s*=([^=]*)")


def _values_of_others(answer: str, gold: str) -> bool:
    """Tells whether two numbers are the values of variables with different names."""
    pair = _VALUE_OF.fullmatch(answer), _VALUE_OF.fullmatch(gold)
    if pair[0] is None or pair[1] is None:
        return False
    if any(
        re.search(r"[a-df-hj-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", each[2])) for each in pair if each
    ):
        return False  # equations, which may say the same
    return pair[0][1].casefold() != pair[1][1].casefold()


def refusal(answer: str) -> str | None:
    """Why an answer is too long or too odd to be parsed at all; None if it is not."""
    if len(answer) > MAX_ANSWER_CHARS:
        return f"more than {MAX_ANSWER_CHARS} characters"
    if re.search(rf"[0-9,.]{{{MAX_DIGITS + 1},}}", answer):
        return f"a number of more than {MAX_DIGITS} digits"
    functions = r"(?<![a-zA-Z])(?:arc|log|ln|exp|sin|cos|tan|cot|sec|csc)"
    if len(re.findall(functions, answer)) > MAX_FUNCTIONS:
        return f"more than {MAX_FUNCTIONS} functions"
    if re.search(r"(?:binom|choose).*[0-9]{5}|[0-9]{5}.*choose", answer, re.DOTALL):
        return "a large binomial coefficient"
    if any(ord(char) > 127 and char not in _ALLOWED_NON_ASCII for char in answer):
        return "a character that looks like another"
    steps = ((char in "([{") - (char in ")]}") for char in answer)
    deepest = max(accumulate(steps), default=0)
    return f"brackets nested more than {MAX_DEPTH} deep" if deepest > MAX_DEPTH else None


_ALLOWED_NON_ASCII = "°π√×·÷∞≤≥≠²³±−∪∩∈θ’"
