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
from fractions import Fraction
from typing import Literal

from agentrl.errors import DataError, GraderError
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

MAX_ANSWER_CHARS = 300
MAX_REFERENCE_CHARS = 2000
MAX_DIGITS = 50
"""Longest number handed to math-verify. Exact numbers may fill MAX_ANSWER_CHARS."""
MAX_EXPONENT = 10_000
MAX_EXPONENT_PRODUCT = 100_000
MAX_DEPTH = 20
"""Deepest nesting of brackets handed to math-verify."""


@dataclass(slots=True, frozen=True)
class Grade:
    score: float
    """1.0 for the right answer, else 0.0."""
    extracted: str | None
    """The answer that was judged, at most MAX_ANSWER_CHARS of it; None when there was none."""
    method: Method


@dataclass(slots=True, frozen=True)
class Number:
    """An exactly read number."""

    value: Fraction
    percent: bool = False
    """`value` is what stands before the percent sign."""
    unit: str | None = None
    """Canonical name of a known unit (`km`, `dollar`); other words after a number are dropped."""
    literal: bool = True
    """Written out in digits: no fraction, power of ten or word like "million"."""


# --- the public reward functions -----------------------------------------------------------------


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
    equal = (pool or default_pool()).check(outcome.answer, outcome.reference, deadline_s)
    return outcome.grade(equal)


async def grade_async(
    text: str,
    reference: str,
    *,
    equivalence: Equivalence = "symbolic",
    require_marker: bool = True,
    deadline_s: float = 2.0,
    pool: MathPool | None = None,
) -> Grade:
    """`grade` that never blocks the event loop while a comparison runs.

    Raises:
        GraderError: as `grade`.
    """
    outcome = _grade_in_process(text, reference, equivalence, require_marker)
    if isinstance(outcome, Grade):
        return outcome
    chosen = pool or default_pool()
    equal = await chosen.check_async(outcome.answer, outcome.reference, deadline_s)
    return outcome.grade(equal)


def math_reward(
    text: str,
    reference: str,
    *,
    equivalence: Equivalence = "symbolic",
    require_marker: bool = True,
    deadline_s: float = 2.0,
) -> float:
    """1.0 if the final answer in `text` equals `reference`, else 0.0. Arguments as for `grade`.

    Raises:
        GraderError: as `grade`; never scored 0.
    """
    return grade(
        text,
        reference,
        equivalence=equivalence,
        require_marker=require_marker,
        deadline_s=deadline_s,
    ).score


async def math_reward_async(
    text: str,
    reference: str,
    *,
    equivalence: Equivalence = "symbolic",
    require_marker: bool = True,
    deadline_s: float = 2.0,
) -> float:
    """`math_reward` that never blocks the event loop.

    Raises:
        GraderError: as `grade`; never scored 0.
    """
    result = await grade_async(
        text,
        reference,
        equivalence=equivalence,
        require_marker=require_marker,
        deadline_s=deadline_s,
    )
    return result.score


def gsm8k_reference(answer: str) -> str:
    """The number after `####` in a GSM8K row's `answer`.

    Raises:
        DataError: there is none.
    """
    head, marker, tail = answer.rpartition("####")
    if not marker or not tail.strip():
        raise DataError(
            f"GSM8K answer {(head + marker + tail)[-60:]!r} does not end in `#### N`; "
            "point the label key at the column that does"
        )
    return tail.strip()


def gsm8k_reward(text: str, answer: str, *, require_marker: bool = True) -> float:
    """1.0 if the final answer in `text` is the number that ends a GSM8K row's `answer`.

    Numbers only, so no process is ever started. Cobbe et al. 2021, "Training Verifiers to Solve
    Math Word Problems", arXiv:2110.14168.

    Raises:
        DataError: `answer` does not end in `#### N`.
    """
    reference = gsm8k_reference(answer)
    return grade(text, reference, equivalence="numeric", require_marker=require_marker).score


# --- extraction ----------------------------------------------------------------------------------

# Every alternative starts with a literal, so `re` skips plain text at the speed of a byte search.
_MARKERS = re.compile(
    r"(?P<open><[aA]nswer>)|(?P<close></[aA]nswer>)|(?P<hash>\#\#\#\#(?!\#)(?<!\#{5}))"
    r"|(?P<newline>\n)|(?P<boxed>\\f?box(?:ed)?\s*\{)|(?P<bare>\\boxed\s+(?P<token>[^\s{}$\\]+))"
    r"|(?P<escape>\\.)|(?P<left>\{)|(?P<right>\})"
)


def extract_answer(text: str) -> str | None:
    """The final answer a text states, or None when it states none.

    Three markers count: `#### answer` (to the end of its line), `\\boxed{answer}` (braces may
    nest) and `<answer>answer</answer>`. The one that ends last wins, whatever its kind; a marker
    inside the winner is opened in turn, so `#### \\boxed{5}` states 5. Text in or before
    `<think>...</think>` is reasoning and holds no final answer. A marker that was never closed is
    none; an empty last marker is an answer that is missing.
    """
    answer = _last_marked(_after_reasoning(text))
    for _ in range(8):
        inner = None if answer is None else _last_marked(answer)
        if inner is None:
            break
        answer = inner
    return answer.strip() or None if answer is not None else None


def _after_reasoning(text: str) -> str:
    text = text[text.rfind("</think>") + 8 :] if "</think>" in text else text
    return text.split("<think>", 1)[0]


def _last_marked(text: str) -> str | None:
    """What the marker that ends last encloses. One pass, so linear in the text's length."""
    last: tuple[int, int] | None = None
    answer_start: int | None = None
    hash_start: int | None = None
    braces: list[int | None] = []  # where a box's content starts; None for any other brace
    for match in _MARKERS.finditer(text):
        start, end = match.span()
        kind = match.lastgroup if match.lastgroup != "token" else "bare"
        if kind in ("hash", "newline", "close") and hash_start is not None:
            last, hash_start = (hash_start, start), None
        if kind == "hash":
            hash_start = end
        elif kind == "open":
            answer_start = end
        elif kind == "close" and answer_start is not None:
            last, answer_start = (answer_start, start), None
        elif kind == "bare":
            last = match.span("token")
        elif kind in ("boxed", "left"):
            braces.append(end if kind == "boxed" else None)
        elif kind == "right" and braces:
            box_start = braces.pop()
            if box_start is not None:
                last = (box_start, start)
    if hash_start is not None:
        last = (hash_start, len(text))
    return None if last is None else text[last[0] : last[1]]


# --- the decision --------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class _Comparison:
    """What only math-verify can decide."""

    answer: str
    reference: str
    extracted: str

    def grade(self, equal: bool) -> Grade:
        return Grade(float(equal), self.extracted, "symbolic")


def _grade_in_process(
    text: str, reference: str, equivalence: Equivalence, require_marker: bool
) -> Grade | _Comparison:
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

    answer_text, gold_text = _tidy(found), _tidy(gold)
    answer_number, gold_number = _read_number(answer_text), _read_number(gold_text)
    if answer_number is not None and gold_number is not None:
        equal = _same_number(answer_number, gold_number)
        if equivalence == "literal" and not answer_number.literal:
            equal = False
        return Grade(float(equal), shown, "exact")
    if _same_text(answer_text, gold_text):
        return Grade(1.0, shown, "text")
    if equivalence != "symbolic":
        return Grade(0.0, shown, "text" if gold_number is None else "exact")
    if gold_number is not None and not re.search(r"[0-9\\π√]", answer_text):
        return Grade(0.0, shown, "exact")  # words alone are no number
    if refusal(answer_text) is not None:
        return Grade(0.0, shown, "refused")
    # math-verify drops a unit only where it is set as text
    return _Comparison(
        _tidy(found, keep_text_commands=True), _tidy(gold, keep_text_commands=True), shown
    )


def _same_number(answer: Number, gold: Number) -> bool:
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if answer.percent == gold.percent:
        return answer.value == gold.value
    percent, bare = (answer, gold) if answer.percent else (gold, answer)
    if bare.value == percent.value / 100:
        return True
    # "What percentage ...?" rows say 50 and mean 50%. Up to 1 that reading would let 0.5% pass
    # for a half.
    return bare.value == percent.value and abs(bare.value) > 1


def _same_text(answer: str, gold: str) -> bool:
    answer, gold = re.sub(r"\s+", "", answer), re.sub(r"\s+", "", gold)
    if re.fullmatch(r"\([A-Za-z]\)", answer):  # a choice, "(B)"
        answer = answer[1:-1]
    if re.fullmatch(r"\([A-Za-z]\)", gold):
        gold = gold[1:-1]
    if len(gold) > 1 and gold.isalpha():  # single letters may be variables: x is not X
        return answer.casefold() == gold.casefold()
    return answer == gold


# --- exact numbers -------------------------------------------------------------------------------

_WRAPPERS = (
    re.compile(r"\$\$(?P<inside>[^$]+)\$\$"),
    re.compile(r"\$(?P<inside>[^$]*[^$\\])\$"),
    re.compile(r"\\\((?P<inside>.*)\\\)", re.DOTALL),
    re.compile(r"\\\[(?P<inside>.*)\\\]", re.DOTALL),
    re.compile(r"\*\*(?P<inside>[^*]+)\*\*"),
    re.compile(r"`(?P<inside>[^`]+)`"),
    re.compile(r"\{(?P<inside>[^{}]*)\}"),
    re.compile(r"\((?P<inside>\s*[-+]?[0-9.]+\s*)\)"),
)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_REPLACEMENTS = (
    (re.compile(r"[\u00a0\u2009\u202f~]"), " "),
    (re.compile("\u2212"), "-"),
    (re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\!"), ""),
    (re.compile(r"\\[dt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\,)(?=[0-9]{3})"), ","),
    (re.compile(r"\\[,;: ]|\\q?quad(?![a-zA-Z])"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
)


def _tidy(answer: str, *, keep_text_commands: bool = False) -> str:
    """The answer without what only sets it: math and markdown delimiters, spacing, full stop."""
    for _ in range(4):
        before = answer
        answer = answer.strip().removeprefix("=").strip()
        if answer.endswith(".") and not answer.endswith("\\."):
            answer = answer[:-1].rstrip()
        for wrapper in _WRAPPERS:
            if match := wrapper.fullmatch(answer):
                answer = match["inside"]
        if answer == before:
            break
    if not keep_text_commands:
        answer = _TEXT_COMMAND.sub(r" \1 ", answer)
    for pattern, replacement in _REPLACEMENTS:
        answer = pattern.sub(replacement, answer)
    return " ".join(answer.split())


_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?:[A-Za-z]\s*=\s*)?                                     # x = 5
    (?P<sign>[-+]?)\s*(?P<currency>[$€£¥]?)\s*(?P<sign2>[-+]?)\s*
    (?:
        (?P<whole>{_DIGITS})?\s*\\frac\s*
        (?:\{{\s*(?P<top>[-+]?\s*{_DECIMAL})\s*\}}|(?P<top1>[0-9]))\s*
        (?:\{{\s*(?P<bottom>[-+]?\s*{_DECIMAL})\s*\}}|(?P<bottom1>[0-9]))
      | (?:(?P<whole2>{_DIGITS})\s+)?(?P<top2>{_DECIMAL})\s*/\s*(?P<bottom2>{_DECIMAL})
      | 10\s*(?:\^|\*\*)\s*(?:\{{\s*(?P<power4>[-+]?[0-9]+)\s*\}}|(?P<power5>[-+]?[0-9]+))
      | (?P<decimal>{_DECIMAL})
        (?:[eE](?P<power>[-+]?[0-9]+)
         | \s*(?:\\times|\\cdot|[×·*])\s*10\s*(?:\^|\*\*)\s*(?:\{{\s*(?P<power2>[-+]?[0-9]+)\s*\}}
           | (?P<power3>[-+]?[0-9]+)))?
    )
    (?P<rest>.*)
    """,
    re.VERBOSE | re.DOTALL,
)
_PERCENT = re.compile(r"\s*(?:%|percent\b|per\s+cent\b)", re.IGNORECASE)
_UNIT = re.compile(
    r"(?P<gap>\s*)(?:(?P<degree>°|\^\s*\\circ|\^\s*\{\s*\\circ\s*\}|\\circ)\s*[CFK]?"
    r"|(?P<words>[A-Za-z][A-Za-z'’./-]*(?:\s+[A-Za-z'’./-]+){0,5})\s*(?:\^?\s*\{?\s*[23²³]\s*\}?)?)"
    r"\s*"
)
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NOT_UNITS = frozenset(
    """
    e i pi sqrt sin cos tan cot sec csc arcsin arccos arctan log ln exp mod and or to plus minus
    times over by divided dozen hundred half halves quarter quarters third thirds fourth fourths
    fifth fifths inf infinity nan point negative squared cubed choose factorial about more less at
    least most approximately not import print
    """.split()  # noqa: SIM905
)
"""Words after a number that change its value, so it is not read as a number with a unit."""
_UNITS = {
    alias: names.split()[0]
    for names in (
        "mm millimeter millimetre",
        "cm centimeter centimetre",
        "m meter metre",
        "km kilometer kilometre",
        "inch inches",
        "ft foot feet",
        "yd yard",
        "mi mile",
        "mg milligram",
        "g gram",
        "kg kilogram",
        "lb pound lbs",
        "oz ounce",
        "ml milliliter millilitre",
        "l liter litre",
        "s second sec secs",
        "min minute mins",
        "h hour hr hrs",
        "day",
        "week",
        "month",
        "year yr yrs",
        "dollar usd buck",
        "cent",
        "euro eur",
        "yen",
        "degree",
    )
    for name in names.split()
    for alias in (name, name + "s")
}
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "lb", "¥": "yen"}  # "pound" is both


def parse_number(text: str) -> Number | None:
    """Read a whole text as one exact number, or None when it is not one.

    Signs, thousands separators, decimals, fractions (`1/2`, `\\frac{1}{2}`, `1 1/2`), powers of
    ten (`1.5e3`, `2 \\times 10^{3}`, `10^3`), percentages, currency signs and units are read; only
    ASCII digits count. No floating point and no evaluation: `3+4` is not a number.
    """
    return _read_number(_tidy(text)) if len(text) <= MAX_REFERENCE_CHARS else None


def _read_number(text: str) -> Number | None:
    if len(text) > MAX_ANSWER_CHARS:
        return None
    match = _NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["sign2"]):
        return None
    sign = -1 if "-" in (match["sign"], match["sign2"]) else 1
    value, literal = Fraction(0), True
    top = match["top"] or match["top1"] or match["top2"]
    if top is not None:
        bottom = match["bottom"] or match["bottom1"] or match["bottom2"]
        divisor = _fraction(bottom)
        if divisor == 0:
            return None
        whole = match["whole"] or match["whole2"] or "0"
        value, literal = _fraction(whole) + _fraction(top) / divisor, False
    else:
        value = _fraction(match["decimal"] or "1")
        names = ("power", "power2", "power3", "power4", "power5")
        power = next((match[name] for name in names if match[name]), None)
        if power is not None:
            if len(power) > 4 or abs(int(power)) > MAX_ANSWER_CHARS:
                return None
            value, literal = value * Fraction(10) ** int(power), False
    rest, unit = match["rest"], _CURRENCIES.get(match["currency"])
    percent = _PERCENT.match(rest)
    if percent:
        rest = rest[percent.end() :]
    if rest:
        read = _read_unit(rest)
        if read is None:
            return None
        scale, words_unit = read
        value, literal, unit = value * 10**scale, literal and scale == 0, words_unit or unit
    return Number(sign * value, percent=percent is not None, unit=unit, literal=literal)


def _fraction(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", "").replace(" ", "").rstrip(".") or "0")


def _read_unit(text: str) -> tuple[int, str | None] | None:
    """Power of ten and canonical unit of the words after a number; None if they are no unit."""
    match = _UNIT.fullmatch(text)
    if match is None:
        return None
    if match["degree"]:
        return 0, "degree"
    words = re.findall(r"[a-z]+", match["words"].lower())
    scale = 0
    if words and words[0] in _SCALES:
        scale = _SCALES[words.pop(0)]
    if any(word in _NOT_UNITS for word in words):
        return None
    known = next((_UNITS[word] for word in words if word in _UNITS), None)
    # Letters attached to a number, or standing alone, are more often variables than units.
    if words and known is None and (not match["gap"] or len(words[0]) == 1):
        return None
    if words and len(words[0]) == 1 and not match["gap"]:
        return None
    return scale, known


# --- what math-verify is never shown -------------------------------------------------------------

_REFUSED = (
    (re.compile(r"!|factorial|\\Gamma(?![a-zA-Z])|\\zeta(?![a-zA-Z])"), "a factorial"),
    (
        re.compile(r"\\(?:sum|prod|i+nt|oint|lim|limsup|liminf|bigcup|bigcap)(?![a-zA-Z])"),
        "a sum, product, integral or limit",
    ),
    (re.compile(r"__|[`\"@#;]\s*\w|\b(?:import|lambda|exec|eval|open|print|def)\b"), "code"),
    (re.compile(r"[0-9]\s+[0-9]"), "numbers side by side"),  # would be added as a mixed number
    (re.compile(r"\b(?:or|and) (?:more|less|fewer)\b"), "an open range"),
    (re.compile(r"\\binom.*(?:\^|[0-9]{4})", re.DOTALL), "a large binomial coefficient"),
)
_ALLOWED_NON_ASCII = frozenset("°π√×·÷∞≤≥≠²³±−∪∩∈θ’")
_OPENING, _CLOSING = "([{", ")]}"


def refusal(answer: str) -> str | None:
    """Why an answer is too dangerous or too odd for a computer algebra system; None if it is not.

    Deliberately strict: every right answer can be written without what is refused here.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return f"more than {MAX_ANSWER_CHARS} characters"
    if re.search(rf"[0-9,.]{{{MAX_DIGITS + 1},}}", answer):
        return f"a number of more than {MAX_DIGITS} digits"
    for pattern, reason in _REFUSED:
        if pattern.search(answer):
            return reason
    if any(ord(char) > 127 and char not in _ALLOWED_NON_ASCII for char in answer):
        return "a character that looks like another"
    depth = deepest = 0
    for char in answer:
        depth += (char in _OPENING) - (char in _CLOSING)
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return f"brackets nested more than {MAX_DEPTH} deep"
    return _refused_powers(answer.replace("**", "^").replace(" ", ""))


def _refused_powers(text: str) -> str | None:
    product = 1
    for position, char in enumerate(text):
        if char != "^":
            continue
        exponent = _operand(text, position + 1)
        if text[position + 1 + len(exponent) :].startswith("^"):
            return "a power tower"
        inner = exponent.count("^")
        if inner > 1 or (inner and not re.search(r"[a-zA-Z]", exponent)):
            return "a power tower"
        for digits in re.findall(r"[0-9]+", exponent):
            if len(digits) > 5 or int(digits) > MAX_EXPONENT:
                return f"an exponent above {MAX_EXPONENT}"
            product *= max(int(digits), 1)
    if product > MAX_EXPONENT_PRODUCT:
        return "powers of powers"
    return None


def _operand(text: str, start: int) -> str:
    """The bracketed group, command or run of digits that starts at `start`."""
    if text[start : start + 1] in tuple(_OPENING):
        depth = 0
        for position in range(start, len(text)):
            depth += (text[position] in _OPENING) - (text[position] in _CLOSING)
            if depth == 0:
                return text[start : position + 1]
        return text[start:]
    match = re.compile(r"-?(?:\\[a-zA-Z]+|[0-9.]+|.?)", re.DOTALL).match(text, start)
    return match.group() if match else ""
