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
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

from agentrl.errors import GraderError
from agentrl_rewards.math_pool import MathPool, default_pool

Equivalence = Literal["literal", "numeric", "symbolic"]
"""What counts as the reference's value.

`literal`: one written-out number (`1,000`, `-3.50`, `12 apples`), so that the question itself, as
in `347*28`, is not an answer. `numeric`: any exact number, fractions, percentages and powers of
ten included. `symbolic`: also expressions, equations, sets, intervals and matrices, by
math-verify, where an unevaluated `3+4` equals 7.
"""
Unit = dict[str, int]
"""Power by name of a known unit, `{"km": 1, "h": -1}`; other words have the power 0."""
Method = Literal["text", "exact", "symbolic", "refused", "no_answer"]
"""How a grade came about: the answer read the same as the reference; exact numbers; math-verify;
it was too long or too dangerous to read; there was no marked answer."""

MAX_TEXT_CHARS = 100_000
"""A final answer is looked for in as many characters at the end of a text."""
MAX_ANSWER_CHARS = 300
MAX_REFERENCE_CHARS = 2000
MAX_DIGITS = 50
"""Longest number handed to math-verify. Exact numbers may fill MAX_ANSWER_CHARS."""
MAX_DEPTH, MAX_FUNCTIONS = 20, 8
"""Deepest nesting of brackets, and most functions, that a parser of exponential time is given."""


@dataclass(slots=True, frozen=True)
class Grade:
    """Whether an answer is right, and how that was found."""

    score: float
    """1.0 for the right answer, else 0.0."""
    extracted: str | None
    """The answer that was judged, at most MAX_ANSWER_CHARS of it; None when there was none."""
    method: Method
    """What decided."""


@dataclass(slots=True, frozen=True)
class Number:
    """An exactly read number."""

    value: Fraction
    percent: bool = False
    """`value` is what stands before the percent sign."""
    unit: Unit = field(default_factory=dict)
    """What is counted; empty where nothing is said."""
    literal: bool = True
    """Written out in digits: no fraction, power of ten or word like "million"."""


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
    r"|(?P<escape>\\.)|(?P<left>\{)|(?P<right>\})"
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
    """What the marker that ends last encloses. One pass, so linear in the text's length."""
    last: tuple[int, int] | None = None
    heading: tuple[int, int] | None = None
    answer_start: int | None = None
    hash_start: int | None = None
    braces: list[int | None] = []  # where a box's content starts; None for any other brace
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
            braces.append(end if kind == "boxed" else None)
        elif kind == "right" and braces:
            box_start = braces.pop()
            if box_start is not None:
                last = (box_start, start)
    last = last or heading
    return None if last is None else text[last[0] : last[1]]


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
        equal = allowed and _same_number(answer_number, gold_number)
        return Grade(float(equal), shown, "exact")
    if _same_text(_plain(found), _plain(gold)):
        return Grade(1.0, shown, "text")
    if equivalence != "symbolic":
        return Grade(0.0, shown, "text" if gold_number is None else "exact")
    if gold_number is not None and not re.search(r"[0-9\\π√]", found):
        return Grade(0.0, shown, "exact")  # words alone are no number
    if refusal(found) is not None:
        return Grade(0.0, shown, "refused")
    answer, answer_unit = _split_unit(_unwrapped(found))
    gold, gold_unit = _split_unit(_unwrapped(gold))
    if not _same_unit(answer_unit, gold_unit):
        return Grade(0.0, shown, "text")
    return answer, gold, shown


def _same_number(answer: Number, gold: Number) -> bool:
    if not _same_unit(answer.unit, gold.unit):
        return False
    if answer.percent == gold.percent:
        return answer.value == gold.value
    percent, bare = (answer, gold) if answer.percent else (gold, answer)
    if bare.value == percent.value / 100:
        return True
    # "What percentage ...?" rows say 50 and mean 50%. Up to 1 that reading would let 0.5% pass
    # for a half.
    return bare.value == percent.value and abs(bare.value) > 1


def _same_unit(answer: Unit, gold: Unit) -> bool:
    """A unit that one of them leaves out is no difference."""
    if not answer or not gold:
        return True
    known = [{name: power for name, power in each.items() if power} for each in (answer, gold)]
    return known[0] == known[1] if all(known) else not answer.keys().isdisjoint(gold)


def _same_text(answer: str, gold: str) -> bool:
    if len(gold) > 1 and gold.replace(" ", "").isalpha():  # one letter may be a variable
        return answer.casefold() == gold.casefold()
    return answer == gold


def refusal(answer: str) -> str | None:
    """Why an answer is too long or too odd to be parsed at all; None if it is not."""
    if len(answer) > MAX_ANSWER_CHARS:
        return f"more than {MAX_ANSWER_CHARS} characters"
    if re.search(rf"[0-9,.]{{{MAX_DIGITS + 1},}}", answer):
        return f"a number of more than {MAX_DIGITS} digits"
    if len(re.findall(r"\\(?:arc|log|ln|exp|sin|cos|tan|cot|sec|csc)", answer)) > MAX_FUNCTIONS:
        return f"more than {MAX_FUNCTIONS} functions"
    if re.search(r"(?:binom|choose).*[0-9]{5}|[0-9]{5}.*choose", answer, re.DOTALL):
        return "a large binomial coefficient"
    if any(ord(char) > 127 and char not in _ALLOWED_NON_ASCII for char in answer):
        return "a character that looks like another"
    steps = ((char in "([{") - (char in ")]}") for char in answer)
    deepest = max(accumulate(steps), default=0)
    return f"brackets nested more than {MAX_DEPTH} deep" if deepest > MAX_DEPTH else None


_ALLOWED_NON_ASCII = "°π√×·÷∞≤≥≠²³±−∪∩∈θ’"


_WRAPPERS = (
    re.compile(r"(\$\$?)(?P<inside>[^$]*[^$\\])\1"),
    re.compile(r"\\[(\[](?P<inside>.*)\\[)\]]", re.DOTALL),
    re.compile(r"(\*\*|`)(?P<inside>[^*`]+)\1"),
    re.compile(r"\{(?P<inside>[^{},\\]*)\}"),
    re.compile(r"\((?P<inside>\s*[-+]?[0-9.]+\s*)\)"),
    re.compile(r"\\(?:text|math)(?:bf|rm|it)?\s*\{(?P<inside>[^{}]*)\}"),
)
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|rm|it)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
_REPLACEMENTS = (
    (re.compile("\u2212"), "-"),
    (re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\!"), ""),
    (re.compile(r"\\[dt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\([nlg]e)q(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\,)(?=[0-9]{3}(?![0-9]))"), ","),
    # a line break, `\\`, is no space
    (re.compile(r"(\\\\)|\\[,;: ]|\\q?quad(?![a-zA-Z])|[\u00a0\u2009\u202f~]"), r"\1 "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"°|\^?\s*\{?\s*\\circ(?![a-z])\s*\}?"), " degree "),
    (re.compile(r"([_^])\s*\{\s*(\w)\s*\}"), r"\1\2"),
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])"), ""),
    (re.compile(r"^ |[ .]+$"), ""),
    (re.compile(r"^\(([A-Za-z])\)$"), r"\1"),  # a choice, "(B)"
)


def _unwrapped(answer: str) -> str:
    """The answer without the delimiters, the equals sign and the full stop around it."""
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
    return answer


@lru_cache(maxsize=1024)
def _plain(answer: str) -> str:
    """For comparison as text or number: spelling that makes no difference is the same.

    White space stays where it parts letters or digits, so "1 2" is not "12".
    """
    answer = _TEXT_COMMAND.sub(r" \1 ", _unwrapped(answer))
    for pattern, replacement in _REPLACEMENTS:
        answer = pattern.sub(replacement, answer)
    return answer


_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:\\overline\{{[0-9]+\}})?)"
_POWER = r"10(?:\^|\*\*)(?:\{(?P<power>[-+]?[0-9]+)\}|(?P<power1>[-+]?[0-9]+))"
_NUMBER = re.compile(
    rf"""
    (?:[A-Za-z]=)?                                           # x = 5
    (?P<sign>[-+]?)(?P<currency>[$€£¥]?)(?P<sign2>[-+]?)
    (?:
        (?P<whole>{_DIGITS})?\ ?\\frac\ ?
        (?:\{{(?P<top>[-+]?{_DECIMAL})\}}|(?P<top1>[0-9]))\ ?
        (?:\{{(?P<bottom>[-+]?{_DECIMAL})\}}|(?P<bottom1>[0-9]))
      | (?:(?P<whole1>{_DIGITS})\ )?(?P<top2>{_DECIMAL})/(?P<bottom2>{_DECIMAL})
      | (?:(?P<decimal>{_DECIMAL})(?:\\times\ ?|\\cdot\ ?|[×·*]))?{_POWER}
      | (?P<decimal1>{_DECIMAL})(?:[eE](?P<power2>[-+]?[0-9]+))?
    )
    (?P<percent>\ ?(?:%|percent\b|per\ cent\b))?
    (?P<rest>.*)
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_UNIT = re.compile(
    r"(?P<gap>\ ?)(?P<words>[A-Za-z][A-Za-z'’.-]*(?:\^?\{?-?[1-9²³]\}?)?"
    r"(?:[ /*][A-Za-z'’.-]+(?:\^?\{?-?[1-9²³]\}?)?){0,6})"
)
_UNIT_PART = re.compile(r"([a-z]+)|(/)|(-?[1-9²³])")
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_CHANGES_THE_VALUE = re.compile(
    """
    e|i|pi|sqrt|roots?|sin|cos|tan|cot|sec|csc|log|ln|exp|mod|modulo|choose|factorial|nan|inf\\w*
    |and|or|nor|to|from|plus|minus|times|over|by|divided|multiplied|point|negative|positive|than
    |out|in|into|below|under|above|short|not|squared|cubed|power|base|binary|decimal|octal|hex\\w*
    |double|twice|triple|half|halves|quarters?|third|thirds|\\w*(?:four|fif|six|seven|eigh|nin|ten|el\\w*en
    |twelf|teen|tie|hundred|thousand|million)ths?|dozens?|scores?|hundreds?|thousands|millions
    |one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\\w+teen|\\w+ty
    |at|if|when|where|but|so|then|is|are|was|about|around|between|through|until|less|fewer|import
    """.replace("\n", "").replace(" ", ""),
)
"""Words after a number that change its value, so it is not read as a number with a unit."""
_LINKS = frozenset("of a an the each every for".split())  # noqa: SIM905
_UNIT_NAMES = """
    mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre
    |inch inches|ft foot feet|yd yard|mi mile|mg milligram|g gram|kg kilogram|lb pound lbs|oz ounce
    |ml milliliter millilitre|l liter litre|gallon gal|s second sec secs|min minute mins
    |h hour hr hrs|day|week|month|year yr yrs|dollar usd buck|cent|euro eur|yen|degree deg
    |radian rad|joule|kj kilojoule|newton|watt|kw kilowatt|volt|amp|ohm|mole mol|hz hertz
"""
_UNITS: dict[str, str] = {}
for _names in map(str.split, _UNIT_NAMES.split("|")):
    _UNITS |= dict.fromkeys((*_names, *(f"{name}s" for name in _names)), _names[0])
_ABBREVIATIONS = {"J": "joule", "N": "newton", "W": "watt", "V": "volt", "A": "amp"}
_ABBREVIATIONS |= {"mph": "mile/hour", "mpg": "mile/gallon", "in": "inch"}
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "lb", "¥": "yen"}  # "pound" is both


def parse_number(text: str) -> Number | None:
    """Read a whole text as one exact number, or None when it is not one.

    Signs, thousands separators, decimals, fractions (`1/2`, `\\frac{1}{2}`, `1 1/2`), powers of
    ten (`1.5e3`, `2 \\times 10^{3}`, `10^3`), percentages, currency signs and units are read; only
    ASCII digits count. No floating point and no evaluation: `3+4` is not a number.
    """
    if re.fullmatch("[0-9]{1,300}", text):
        return Number(Fraction(text))
    match = _NUMBER.fullmatch(_plain(text)) if len(text) <= MAX_ANSWER_CHARS else None
    if match is None or (match["sign"] and match["sign2"]):
        return None
    sign = -1 if "-" in (match["sign"], match["sign2"]) else 1
    top = match["top"] or match["top1"] or match["top2"]
    power = match["power"] or match["power1"] or match["power2"]
    literal = top is None and power is None
    if top is not None:
        divisor = _fraction(match["bottom"] or match["bottom1"] or match["bottom2"])
        if divisor == 0:
            return None
        value = _fraction(match["whole"] or match["whole1"] or "0") + _fraction(top) / divisor
    else:
        value = _fraction(match["decimal"] or match["decimal1"] or "1")
    if power is not None:
        if len(power) > 4 or abs(int(power)) > MAX_ANSWER_CHARS:
            return None
        value *= Fraction(10) ** int(power)
    unit: Unit = {_CURRENCIES[match["currency"]]: 1} if match["currency"] else {}
    if match["rest"]:
        read = _read_unit(match["rest"])
        if read is None:
            return None
        value, literal, unit = value * 10 ** read[0], literal and read[0] == 0, unit | read[1]
    return Number(sign * value, percent=bool(match["percent"]), unit=unit, literal=literal)


def _fraction(decimal: str) -> Fraction:
    decimal, _, repeated = decimal.replace(",", "").partition(r"\overline")
    value = Fraction(decimal.rstrip(".") or "0")
    if repeated:  # 0.1\overline{6}
        digits, places = repeated.strip("{}"), len(decimal.partition(".")[2])
        value += Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
    return value


def _read_unit(text: str) -> tuple[int, Unit] | None:
    """Power of ten and unit of the words after a number; None if they are no unit."""
    match = _UNIT.fullmatch(text)
    if match is None:
        return None
    unit: Unit = {}
    scale, sign, power, last = 0, 1, 1, ""
    words = match["words"]
    first = words.partition("^")[0].rstrip(".")
    words = words.replace(first, _ABBREVIATIONS.get(first, first), 1).lower()
    for position, (word, over, digit) in enumerate(_UNIT_PART.findall(words)):
        if digit and last:
            unit[last] = sign * int(digit.translate({ord("²"): "2", ord("³"): "3"}))
        elif over or word == "per":
            sign = -1
        elif word in ("square", "sq", "cubic", "cu"):
            power = 2 if word.startswith("s") else 3
        elif position == 0 and word in _SCALES:
            scale = _SCALES[word]
        elif word in _UNITS:
            last = _UNITS[word]
            unit[last], power = sign * power, 1
        elif word and word not in _LINKS:
            # Few letters, or letters attached to the number, are more often variables than units.
            is_short = len(word) < 3 or not re.search("[aeiou]", word)
            if _CHANGES_THE_VALUE.fullmatch(word) or is_short or not match["gap"]:
                return None
            unit.setdefault(word.removesuffix("s"), 0)
    if not match["gap"] and re.match(r"[a-z]\b", words):  # 5m may be a product
        return None
    return scale, unit


_TRAILING_UNIT = re.compile(
    r"(?P<head>.*[^\s\\])(?:\s|\\[,;: ])*"
    r"(?P<unit>\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?[23]\}?)?"
    r"|(?<=\s)[A-Za-z][A-Za-z /^23]+)",
    re.DOTALL,
)


def _split_unit(answer: str) -> tuple[str, Unit]:
    """An expression and the unit that ends it, such as `6\\sqrt{3}` and inches."""
    match = _TRAILING_UNIT.fullmatch(answer)
    read = _read_unit(" " + _plain(match["unit"])) if match else None
    return (match["head"], read[1]) if match and read and read[0] == 0 else (answer, {})
