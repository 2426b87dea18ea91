"""Rewards for tasks with one right final answer, which is extracted and compared but never run.

    text -> extract_answer -> equal as text? -> equal as exact numbers? -> equal as expressions?
                              (in this process, microseconds)              (killable processes)

Numbers are compared as fractions of integers, so nothing is rounded or evaluated. Only if the
answer or the reference is not a plain number does math-verify compare them, in a process that is
killed at a deadline (`agentrl_rewards.math_pool`). There are three kinds of failure:

* A wrong, missing or unreadable answer scores 0.
* A "bomb" (a power tower, a huge factorial, a megabyte of LaTeX) is refused without being evaluated
  and scores 0.
* A grader that crashed or ran out of time raises `GraderError`: the episode has no reward.

    math_reward("so it is \\\\boxed{\\\\frac12}", "0.5")                    # 1.0
    grade("#### 3 or 4", "3")                # Grade(score=0.0, extracted="3 or 4", ...)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from agentrl.errors import GraderError
from agentrl_rewards.choice import extract_choice
from agentrl_rewards.inputs import without_reasoning
from agentrl_rewards.math_numbers import (
    MAX_ANSWER_CHARS,
    TEXT_COMMAND,
    parse_number,
    plain,
    same_number,
    same_unit,
    split_unit,
    unwrapped,
)
from agentrl_rewards.math_pool import MathPool, default_pool
from agentrl_rewards.math_spelling import spelled

Equivalence = Literal["literal", "numeric", "symbolic"]
"""How an answer may express the reference's value.

`literal`: one written-out number (`1,000`, `-3.50`, `12 apples`), so that repeating the question
`347*28` is not an answer. `numeric`: any exact number, including fractions, percentages and powers
of ten. `symbolic`: also expressions, equations, sets, intervals and matrices, compared by
math-verify, for which an unevaluated `3+4` equals 7.
"""
Method = Literal["text", "exact", "symbolic", "refused", "no_answer"]
"""What decided a grade. `text`: comparison as text. `exact`: comparison as exact numbers.
`symbolic`: math-verify. `refused`: the answer was too long or too expensive to evaluate.
`no_answer`: the text states no answer."""

MAX_TEXT_CHARS = 100_000
"""A final answer is looked for in this many characters at the end of a text."""
MAX_REFERENCE_CHARS = 2000
MAX_DIGITS = 50
"""Digits of the longest number passed to math-verify. Exact numbers may have MAX_ANSWER_CHARS."""
MAX_DEPTH, MAX_FUNCTIONS = 20, 8
"""Limits on nested brackets and on functions in an answer: the parser takes exponential time."""


@dataclass(slots=True, frozen=True)
class Grade:
    """The verdict on an answer and how it was reached."""

    score: float
    """1.0 for the right answer, else 0.0."""
    extracted: str | None
    """The answer that was judged, cut to MAX_ANSWER_CHARS; None if the text states none."""
    method: Method
    """The comparison that decided."""


def grade(
    text: str,
    reference: str,
    *,
    equivalence: Equivalence = "symbolic",
    require_marker: bool = True,
    deadline_s: float = 2.0,
    pool: MathPool | None = None,
) -> Grade:
    """Judges the final answer in `text` against `reference`. May be called from any thread.

    Args:
        text: the policy's text, from which `extract_answer` takes the answer.
        reference: the gold answer, bare or marked (`... #### 18`, `\\boxed{18}`).
        equivalence: see `Equivalence`.
        require_marker: False judges the whole text if it contains no marker.
        deadline_s: seconds one symbolic comparison may take before it is killed.
        pool: processes for symbolic comparisons; None uses the default pool.

    Raises:
        GraderError: the comparison crashed or ran out of time or memory, or the reference is empty
            or longer than MAX_REFERENCE_CHARS.
    """
    outcome = _grade_in_process(text, reference, equivalence, require_marker)
    if isinstance(outcome, Grade):
        return outcome
    answer, gold, shown = outcome
    return _symbolic((pool or default_pool()).check(answer, gold, deadline_s), shown)


async def grade_async(
    text: str,
    reference: str,
    *,
    equivalence: Equivalence = "symbolic",
    require_marker: bool = True,
    deadline_s: float = 2.0,
    pool: MathPool | None = None,
) -> Grade:
    """Does the same as `grade` without blocking the event loop; raises the same errors."""
    outcome = _grade_in_process(text, reference, equivalence, require_marker)
    if isinstance(outcome, Grade):
        return outcome
    answer, gold, shown = outcome
    return _symbolic(await (pool or default_pool()).check_async(answer, gold, deadline_s), shown)


def _symbolic(equal: bool | None, shown: str) -> Grade:
    return Grade(float(bool(equal)), shown, "refused" if equal is None else "symbolic")


def math_reward(text: str, reference: str, **options: Any) -> float:
    """Returns the score of `grade`; takes the same arguments and raises the same errors."""
    return grade(text, reference, **options).score


async def math_reward_async(
    text: str,
    reference: str,
    *,
    equivalence: Equivalence = "symbolic",
    require_marker: bool = True,
    deadline_s: float = 2.0,
) -> float:
    """Returns the score of `grade_async`; takes its arguments and raises its errors."""
    options = {"require_marker": require_marker, "deadline_s": deadline_s}
    return (await grade_async(text, reference, equivalence=equivalence, **options)).score


# --- extraction ----------------------------------------------------------------------------------

# Every alternative starts with a literal, so `re` skips plain text as fast as a byte search.
_MARKERS = re.compile(
    r"(?P<open><[aA]nswer>)|(?P<close></[aA]nswer>)|(?P<hash>\#\#\#\#(?!\#)(?<!\#{5}))"
    r"|(?P<newline>\n)|(?P<boxed>\\f?box(?:ed)?\s*\{)|(?P<bare>\\boxed\s+(?P<token>[^\s{}$\\]+))"
    r"|(?P<escape>\\[\\{}])|(?P<left>\{)|(?P<right>\})"
)
_HEADING = re.compile(r"[ \t*_]*[A-Za-z]{2}")


def extract_answer(text: str) -> str | None:
    """Returns the final answer that a text states, or None if it states none.

    There are three markers: `#### answer` (up to the end of the line), `\\boxed{answer}` (braces
    may nest) and `<answer>answer</answer>`. The one that ends last wins, whatever its kind; if it
    contains another marker, the inner one counts, so `#### \\boxed{5}` states 5. Reasoning up to
    `</think>` is ignored. Unclosed markers do not count; if the last marker is empty, the answer is
    missing. Because `#### Verification` below another marker is a heading, words after `####` count
    only if nothing else is marked.
    """
    answer = _last_marked(without_reasoning(text)[-MAX_TEXT_CHARS:])
    for _ in range(8):
        if (inner := _last_marked(answer or "")) is None:
            break
        answer = inner
    return answer.strip() or None if answer is not None else None


def _last_marked(text: str) -> str | None:
    """Returns the content of the marker that ends last, in time linear in the text's length."""
    last: tuple[int, int] | None = None
    boxes: list[tuple[int, int, int]] = []  # start of the box, start and end of its content
    heading: tuple[int, int] | None = None
    answer_start: int | None = None
    hash_start: int | None = None
    braces: list[tuple[int, int] | None] = []  # start of a box and its content; None: other brace
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
    r"(?:\s|\$|\\[()\[\],;: ]|\\q?quad|\\(?:text|mathrm)\s*\{\s*(?:and|or),?\s*\}|and|or|[,;])*"
    r"|[^\n.:;!?0-9]{0,40}\band\b[\s$\\(){}]*(?:[A-Za-z]\w*\s*=\s*)?"  # " papers and "
)


def _joined(text: str, boxes: list[tuple[int, int, int]]) -> str:
    """Returns the last box joined with the boxes listed before it.

    `\\boxed{1} and \\boxed{2}` states both, and so does `\\boxed{1} \\boxed{2}`.
    """
    contents = [text[boxes[-1][1] : boxes[-1][2]]]
    if not contents[0].strip():
        return ""
    for (_, start, end), (following, _, _) in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        if not _BETWEEN_BOXES.fullmatch(text, end + 1, following):
            break
        if (content := text[start:end]) not in contents:
            contents.insert(0, content)
    return ", ".join(contents)


# --- the decision --------------------------------------------------------------------------------


def _grade_in_process(
    text: str, reference: str, equivalence: Equivalence, require_marker: bool
) -> Grade | tuple[str, str, str]:
    """Returns a grade, or `(answer, reference, answer to show)` if only math-verify can decide."""
    gold = extract_answer(reference) or reference.strip()
    if not 0 < len(gold) <= MAX_REFERENCE_CHARS:
        raise GraderError(
            f"the reference has {len(gold)} characters; it has to have between 1 and "
            f"{MAX_REFERENCE_CHARS}"
        )
    found = extract_answer(text)
    if (
        found is None
        and not require_marker
        and _last_marked(without_reasoning(text)[-MAX_TEXT_CHARS:]) is None
    ):
        found = without_reasoning(text)[-MAX_TEXT_CHARS:].strip() or None
    if found is None:
        return Grade(0.0, None, "no_answer")
    shown = found[:MAX_ANSWER_CHARS]
    if len(found) > MAX_ANSWER_CHARS:
        return Grade(1.0, shown, "text") if found == gold else Grade(0.0, shown, "refused")
    letter = plain(gold)
    is_choice = re.fullmatch("[A-J]", letter) and letter in found  # "B) 17"
    if is_choice and extract_choice(TEXT_COMMAND.sub(r" \1 ", found), 10) == letter:
        return Grade(1.0, shown, "text")
    found, gold = spelled(found), spelled(gold)
    for needed, surplus, kept in _SURPLUS:
        if not needed.search(gold):
            found = surplus.sub(kept, found)

    answer_number, gold_number = parse_number(found), parse_number(gold)
    if answer_number is not None and gold_number is not None:
        allowed = answer_number.literal or equivalence != "literal"
        equal = allowed and same_number(answer_number, gold_number)
        return Grade(float(equal), shown, "exact")
    if _same_text(plain(found), plain(gold)):
        return Grade(1.0, shown, "text")
    if equivalence != "symbolic":
        return Grade(0.0, shown, "text" if gold_number is None else "exact")
    if gold_number is not None and not re.search(r"[0-9\\π√]", found):
        return Grade(0.0, shown, "exact")  # words alone are not a number
    if re.fullmatch(r"[A-Za-z]{2,}(?: [A-Za-z]{2,})+", plain(gold)):
        return Grade(0.0, shown, "text")  # words, some of which the parser would drop
    answer, answer_unit = split_unit(unwrapped(found))
    gold, gold_unit = split_unit(unwrapped(gold))
    if refusal(answer) is not None:
        return Grade(0.0, shown, "refused")
    if _FUNCTION_VALUE.match(answer + "\n" + gold):  # y = 2x where the reference is f(x) = 2x
        answer, gold = (text.partition("=")[2] for text in (answer, gold))
    if _values_of_others(answer, gold):
        return Grade(0.0, shown, "text")
    if not same_unit(answer_unit, gold_unit):
        return Grade(0.0, shown, "text")
    return answer, gold, shown


_SURPLUS = tuple(
    (re.compile(needed), re.compile(surplus), kept)
    for needed, surplus, kept in (
        # the name of what was asked: \\angle ABC = 5, AB = 5, P(A) = 5, S_{\\triangle ABC} = 5
        (
            "[=<>]",
            r"^\s*(?:m\s*)?(?:\\(?:angle|triangle|overline|max|min|text|mathrm)\s*\{?[\sA-Za-z]*\}?|[A-Z]{2}"
            r"|\|[A-Z]{2}\||[A-Z](?:_\{[^{}]*\})?|[A-Z]\([^()]*\))\s*=(?=[^=]*$)",
            "",
        ),
        ("mod", r"^(?:\s*[a-z]\s*\\equiv)?([^=]*?)\\pmod\s*\{?\w+\}?\s*$", r"\1"),
        # what a letter stands for: for all x; k \\in \\mathbb{Z}
        (
            r"for (?:all|any)|\\forall|\\in(?![a-zA-Z])",
            r"[\s,;~]*(?:\\text\s*\{\s*for (?:all|any|every|each)\b.*|\\forall.*"
            r"|(?:,|\()(?:\s|\\q?quad|\\text\s*\{\s*where\s*\}|\\[,;: ])*[a-z]\s*"
            r"\\in\s*\\mathbb.*)$",
            "",
        ),
        # an option's letter: B) 17
        (r"^\W*[A-J]\b", r"^\s*(?:\\text\w*\s*\{\s*)?\(?[A-J][).](?![\w}]*$)[\s}~:]*", ""),
        ("(?i)[ap].?m", r"(?i)(?<=:[0-9]{2})\s*(?:\\text\s*\{)?\s*[ap]\.?m\.?\s*\}?$", ""),
        ("j|^[^i]*$", "^([^i]*)j([^ij]*)$", r"\1i\2"),  # the imaginary unit of engineers
    )
)
"""What an answer may say beyond a reference: a pattern of references that say it, a pattern of it,
and what replaces it in the answer if the reference does not say it."""


def _same_text(answer: str, gold: str) -> bool:
    if re.fullmatch("[A-J](?:[ ,;]*[A-J])+", gold):  # choices, AC
        letters = [re.sub(r"[\s,;]|\band\b", "", each) for each in (answer, gold)]
        return sorted(letters[0]) == list(letters[1]) or answer == gold
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
    (re.compile(r"^dne$"), "does not exist"),
    (re.compile(r"^(?:there (?:is|are) )?no (real )?solutions?(?: exists?)?$"), r"no \1solution"),
)


def _words(text: str) -> str:
    text = text.casefold()
    for pattern, replacement in _WORD_FORMS:
        text = pattern.sub(replacement, text)
    return text


def _decimal_point(text: str) -> str:
    """Replaces a decimal comma, as in 1,22 and 0,111, by a point; 1,234 keeps its separator."""
    return re.sub(r"^([-+]?(?:[0-9]+(?=,[0-9]{1,2}$|,[0-9]{4,}$)|0)),([0-9]+)$", r"\1.\2", text)


_FUNCTION_VALUE = re.compile(
    r"\s*y\s*=[^=\n]*\n\s*[fgh]\(x\)\s*=[^=]*$|\s*[fgh]\(x\)\s*=[^=\n]*\n\s*y\s*=[^=]*$"
)
_OTHER_QUANTITY = re.compile(
    r"\s*(?:[-+0-9.]+\s*[a-z]|[-+0-9.]*\s*(?:[a-z]\s*\^|\\sqrt)\s*\{?\s*[a-z0-9]\s*\}?)\s*="
)
"""2x = 5, x^2 = 5, which do not state x."""
_VALUE_OF = re.compile(r"\s*([A-Za-z])\s*=([^=]*)")


def _values_of_others(answer: str, gold: str) -> bool:
    """Returns whether both state the value of a variable, but of differently named ones."""
    if _OTHER_QUANTITY.match(answer) and not re.search("[=<>]", gold):
        return True
    pair = _VALUE_OF.fullmatch(answer), _VALUE_OF.fullmatch(gold)
    if pair[0] is None or pair[1] is None:
        return False
    if any(
        re.search(r"[a-df-hj-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", each[2])) for each in pair if each
    ):
        return False  # equations with other letters may be equivalent
    return pair[0][1].casefold() != pair[1][1].casefold()


def refusal(answer: str) -> str | None:
    """Returns why an answer is too long or too odd to be parsed; None if it may be parsed."""
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


_ALLOWED_NON_ASCII = "°’"
