"""Exact numbers and their units, read from text without evaluating any of it.

`plain` makes spellings that mean the same the same text. `parse_number` reads such a text as one
fraction of integers, with its unit and whether it was a percentage, or says that it is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

Unit = dict[str, int]
"""Power by name of a known unit, `{"km": 1, "h": -1}`; other words have the power 0."""
MAX_ANSWER_CHARS = 300
"""A longer answer is not read."""


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


def same_number(answer: Number, gold: Number) -> bool:
    if not same_unit(answer.unit, gold.unit):
        return False
    if answer.percent == gold.percent:
        return answer.value == gold.value
    percent, bare = (answer, gold) if answer.percent else (gold, answer)
    if bare.value == percent.value / 100:
        return True
    # "What percentage ...?" rows say 50 and mean 50%. Up to 1 that reading would let 0.5% pass
    # for a half.
    return bare.value == percent.value and abs(bare.value) > 1


def same_unit(answer: Unit, gold: Unit) -> bool:
    """A unit that one of them leaves out is no difference."""
    if not answer or not gold:
        return True
    known = [{name: power for name, power in each.items() if power} for each in (answer, gold)]
    return known[0] == known[1] if all(known) else not answer.keys().isdisjoint(gold)


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


def unwrapped(answer: str) -> str:
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
def plain(answer: str) -> str:
    """For comparison as text or number: spelling that makes no difference is the same.

    White space stays where it parts letters or digits, so "1 2" is not "12".
    """
    answer = _TEXT_COMMAND.sub(r" \1 ", unwrapped(answer))
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
    match = _NUMBER.fullmatch(plain(text)) if len(text) <= MAX_ANSWER_CHARS else None
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


def split_unit(answer: str) -> tuple[str, Unit]:
    """An expression and the unit that ends it, such as `6\\sqrt{3}` and inches."""
    match = _TRAILING_UNIT.fullmatch(answer)
    read = _read_unit(" " + plain(match["unit"])) if match else None
    return (match["head"], read[1]) if match and read and read[0] == 0 else (answer, {})
