"""Exact numbers and their units, parsed from text without evaluating it.

`plain` normalises spellings that mean the same to the same text. `parse_number` parses such a text
as one fraction of integers with a unit and a percent flag, or returns None if it is not a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

Unit = dict[str, int]
"""Unit name -> power, as in `{"km": 1, "h": -1}`; words that are not known units have power 0."""
MAX_ANSWER_CHARS = 300
"""Longer answers are not parsed."""


@dataclass(slots=True, frozen=True)
class Number:
    """An exact number parsed from a text."""

    value: Fraction
    percent: bool = False
    """A percent sign follows; `value` is the number before it, not divided by 100."""
    unit: Unit = field(default_factory=dict)
    """The unit; empty if none is given."""
    literal: bool = True
    """Written out in digits: no fraction, power of ten or word like "million"."""
    name: str = ""
    """The variable whose value this is, such as `x` in `x = 5`."""
    step: Fraction = Fraction(0)
    """Place value of the last digit, such as 1/100 for 3.14; 0 for fractions."""
    is_product: bool = False
    """The unit is a single letter that is not marked as text, so it may be a variable."""


MIN_ROUNDED_DIGITS = 10
"""A decimal with at least this many digits may round a repeating one: 0.3333333333 for 1/3."""


def same_number(answer: Number, gold: Number) -> bool:
    if answer.name and gold.name and answer.name.casefold() != gold.name.casefold():
        return False
    factor = unit_factor(answer.unit, gold.unit)
    if factor is None or (answer.is_product and not gold.unit):
        return False
    if answer.percent == gold.percent:
        value = answer.value * factor
        pair = (answer.step * factor, value), (gold.step, gold.value)
        return value == gold.value or any(
            _is_rounded(*one, other[1]) for one, other in (pair, pair[::-1])
        )
    if answer.unit or gold.unit:
        return False
    percent, bare = (answer, gold) if answer.percent else (gold, answer)
    if bare.value == percent.value / 100:
        return True
    # References of "What percentage ...?" say 50 and mean 50%. At or below 1, that reading would
    # let 0.5% pass for one half.
    return bare.value == percent.value and abs(bare.value) > 1


def _is_rounded(step: Fraction, value: Fraction, exact: Fraction) -> bool:
    """Returns whether a decimal rounds a fraction whose decimal expansion never ends."""
    rest = exact.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    has_end = rest == 1
    enough = step and abs(value) >= step * 10 ** (MIN_ROUNDED_DIGITS - 1)
    return bool(not has_end and enough and abs(value - exact) < step)


def unit_factor(answer: Unit, gold: Unit) -> Fraction | None:
    """Returns the factor that converts the answer's unit to the reference's; None if none does.

    If either has no unit, the factor is 1.
    """
    if not answer or not gold:
        return Fraction(1)
    known = [{name: power for name, power in each.items() if power} for each in (answer, gold)]
    if not all(known):
        return None if answer.keys().isdisjoint(gold) else Fraction(1)
    if known[0] == known[1]:
        return Fraction(1)
    factors, bases = [], []
    for unit in known:
        factor, base = Fraction(1), dict[str, int]()
        for name, power in unit.items():
            number, basic = _CONVERSIONS.get(name, (Fraction(1), name))
            factor *= number**power
            base[basic] = base.get(basic, 0) + power
        factors.append(factor)
        bases.append(base)
    return factors[0] / factors[1] if bases[0] == bases[1] else None


def same_unit(answer: Unit, gold: Unit) -> bool:
    """Returns whether no conversion is needed, which includes a missing unit on either side."""
    return unit_factor(answer, gold) == 1


_WRAPPERS = (
    re.compile(r"(\$\$?)(?P<inside>[^$]*[^$\\])\1"),
    re.compile(r"\\[(\[](?P<inside>.*)\\[)\]]", re.DOTALL),
    re.compile(r"(\*\*|`)(?P<inside>[^*`]+)\1"),
    re.compile(r"\{(?P<inside>[^{},\\]*)\}"),
    re.compile(r"\((?P<inside>\s*[-+]?[0-9.]+\s*)\)"),
    re.compile(r"\\(?:text|math)(?:bf|rm|it)?\s*\{(?P<inside>[^{}]*)\}"),
)
TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|rm|it)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
_REPLACEMENTS = (
    (
        re.compile(r"\\varnothing(?![a-zA-Z])|\u2205|^(?:the )?empty set$|\\\{\s*\\\}"),
        r"\\emptyset",
    ),
    (re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\!"), ""),
    (re.compile(r"\\[dt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\([nlg]e)q(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\,)(?=[0-9]{3}(?![0-9]))"), ","),
    # `\\` is a line break, not an escaped space
    (re.compile(r"(\\\\)|\\[,;: ]|\\q?quad(?![a-zA-Z])|[\u00a0\u2009\u202f~]"), r"\1 "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"°|\^?\s*\{?\s*\\circ(?![a-z])\s*\}?"), " degree "),
    (re.compile(r"([_^])\s*\{\s*(\w)\s*\}"), r"\1\2"),
    (re.compile(r"(?<=[A-Za-z])\s*\\cdot\s*(?=[A-Za-z])"), "*"),
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])"), ""),
    (re.compile(r"^ |(?: in (?:total|all))?[ .]*$"), ""),
    (re.compile(r"^\(([A-Za-z])\)$"), r"\1"),  # a choice, "(B)"
)


_TRAILING = re.compile(r"(?<!\\)(?:[.;,]|\\\\?)\s*$")


def unwrapped(answer: str) -> str:
    """Strips delimiters, a leading equals sign, and trailing punctuation."""
    for _ in range(4):
        before = answer
        answer = answer.strip().removeprefix("=").strip()
        answer = _TRAILING.sub("", answer)
        for wrapper in _WRAPPERS:
            if match := wrapper.fullmatch(answer):
                answer = match["inside"]
        if answer == before:
            break
    return answer


@lru_cache(maxsize=1024)
def plain(answer: str) -> str:
    """Normalises spelling differences that do not matter, for comparison as text or number.

    White space between letters or digits is kept, so "1 2" does not become "12".
    """
    answer = TEXT_COMMAND.sub(r" \1 ", unwrapped(answer))
    for pattern, replacement in _REPLACEMENTS:
        answer = pattern.sub(replacement, answer)
    return answer


_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?:\ [0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = (
    rf"(?:(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:\\overline\{{[0-9]+\}})?|\.\\overline\{{[0-9]+\}})"
)
_POWER = r"10(?:\^|\*\*)(?:\{(?P<power>[-+]?[0-9]+)\}|(?P<power1>[-+]?[0-9]+))"
_NUMBER = re.compile(
    rf"""
    (?:(?P<name>[A-Za-z])(?:=|\\approx\ ?|\u2248))?            # x = 5
    (?P<sign>[-+]?)(?P<currency>[$€£¥₹]?)(?P<sign2>[-+]?)
    (?:
        (?P<whole>{_DIGITS})?\ ?\\frac\ ?
        (?:\{{(?P<top>[-+]?{_DECIMAL})\}}|(?P<top1>[0-9]))\ ?
        (?:\{{(?P<bottom>[-+]?{_DECIMAL})\}}|(?P<bottom1>[0-9]))
      | (?:(?P<whole1>{_DIGITS})\ )?(?P<top2>{_DECIMAL})/(?P<bottom2>{_DECIMAL})
      | (?:(?P<decimal>{_DECIMAL})(?:\\times\ ?|\\cdot\ ?|[×·*]))?{_POWER}
      | (?P<decimal1>{_DECIMAL})(?:[eE](?P<power2>[-+]?[0-9]+))?
    )
    (?P<percent>\ ?(?:%|percent\b|per\ cent\b|pct\b))?
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
    """.replace("\n", "").replace(" ", "")
)
"""Words after a number that change its value, so it is not read as a number with a unit."""
_LINKS = frozenset("of a an the each every for".split())  # noqa: SIM905
_UNIT_NAMES = """
    mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre
    |inch inches|ft foot feet|yd yard|mi mile|mg milligram|g gram|kg kilogram|lb pound lbs|oz ounce
    |ml milliliter millilitre|l liter litre|gallon gal|s second sec secs|min minute mins
    |h hour hr hrs|day|week|month|year yr yrs|dollar usd buck|cent|euro eur|yen yuan rmb
    |rupee|degree deg
    |coulomb|kelvin|tesla|farad|henry|ev|pascal|erg|dyne|khz|mhz|ghz
    |tonne|radian rad|joule|kj kilojoule|newton|watt|kw kilowatt|volt|amp|ohm|mole mol|hz hertz
"""
_UNITS: dict[str, str] = {}
for _names in map(str.split, _UNIT_NAMES.split("|")):
    _UNITS |= dict.fromkeys((*_names, *(f"{name}s" for name in _names if len(name) > 1)), _names[0])
_ABBREVIATIONS = {"J": "joule", "N": "newton", "W": "watt", "V": "volt", "A": "amp"}
_ABBREVIATIONS |= {"C": "coulomb", "K": "kelvin", "T": "tesla", "F": "farad", "Pa": "pascal"}
_ABBREVIATIONS |= {"mph": "mile/hour", "mpg": "mile/gallon", "in": "inch"}
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "lb", "¥": "yen"}  # "pound" and "¥" are both
_CURRENCIES |= {"¢": "cent", "₹": "rupee"}
_CONVERSIONS = {
    name: (Fraction(number), basic)
    for basic, parts in (
        ("m", "mm 1/1000|cm 1/100|m 1|km 1000"),
        ("inch", "inch 1|ft 12|yd 36|mi 63360"),
        ("g", "mg 1/1000|g 1|kg 1000|tonne 1000000"),
        ("oz", "oz 1|lb 16"),
        ("s", "s 1|min 60|h 3600|day 86400|week 604800"),
        ("dollar", "cent 1/100|dollar 1"),
        ("joule", "joule 1|kj 1000"),
        ("watt", "watt 1|kw 1000"),
        ("l", "ml 1/1000|l 1"),
    )
    for name, number in (part.split() for part in parts.split("|"))
}
"""Unit -> (size in the basic unit, basic unit), for exact conversions."""
_CHINESE_NAMES = """
    毫米 mm|厘米 cm|分米 dm|米 m|千米 km|公里 km|毫克 mg|克 g|千克 kg|公斤 kg|吨 tonne|毫升 ml|升 l
    |秒 s|分钟 min|小时 h|天 day|周 week|年 year|岁 year
    |元 yen|美元 dollar|美分 cent|欧元 euro|度 degree
"""
_CHINESE_UNITS: dict[str, str] = {
    name: unit for name, unit in (part.split() for part in _CHINESE_NAMES.split("|"))
}
_CHINESE = re.compile(
    "(?P<scale>[万亿])?(?P<power>平方|立方)?"
    f"(?:(?P<unit>{'|'.join(sorted(_CHINESE_UNITS, key=len, reverse=True))})"
    "(?:每(?P<per>秒|分钟|小时))?"
    "|(?P<counter>[个只条本名人张支件辆棵头次种位块枚组包箱盒双对套家朵])?"
    "(?P<noun>[\u4e00-\u9fff]{0,6}))"
)
_CHINESE_CHANGES = re.compile(
    "[十百千万亿半多余几成折倍点零一二三四五六七八九两负]|分之|以上|以下|左右"
)
"""Words after a number that change its value."""


_LETTER_AFTER = re.compile(
    r".*[0-9.})](?:\s|~|\\[,;: ])*(?P<letter>[A-Za-z])(?P<power>\s*\^\s*\{?[-0-9]+\}?)?\s*",
    re.DOTALL,
)
"""A letter after a number, such as `5 m`, `3 a^{2}`, but not `5\\text{ m}`."""
_LIST = re.compile(r"[0-9],(?:\s|\\[ ;:,]|~)+[0-9]")
"""A list such as "32, 349", which is not the number 32,349."""


def parse_number(text: str) -> Number | None:
    """Parses the whole text as one exact number; returns None if it is not one.

    Understands signs, thousands separators, decimals, fractions (`1/2`, `\\frac{1}{2}`, `1 1/2`),
    powers of ten (`1.5e3`, `2 \\times 10^{3}`, `10^3`), percentages, currency signs and units. Only
    ASCII digits count. Nothing is evaluated or converted to floating point: `3+4` is not a number.
    """
    if re.fullmatch("[0-9]{1,300}", text):
        return Number(Fraction(text))
    if len(text) > MAX_ANSWER_CHARS or _LIST.search(text):
        return None
    match = _NUMBER.fullmatch(plain(text))
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
    letter = None
    if match["rest"]:
        read = _read_unit(match["rest"])
        letter = _LETTER_AFTER.fullmatch(unwrapped(text))
        if read is None or (letter and letter["power"] and letter["letter"] != "m"):
            return None
        value, literal, unit = value * 10 ** read[0], literal and read[0] == 0, unit | read[1]
    step = Fraction(0)
    if top is None:
        places = len((match["decimal"] or match["decimal1"] or "").partition(".")[2])
        step = Fraction(10) ** (int(power or 0) - places)
    return Number(
        sign * value,
        percent=bool(match["percent"]),
        unit=unit,
        literal=literal,
        name=match["name"] or "",
        step=step,
        is_product=letter is not None,
    )


def _fraction(decimal: str) -> Fraction:
    decimal, _, repeated = decimal.replace(",", "").replace(" ", "").partition(r"\overline")
    value = Fraction(decimal.rstrip(".") or "0")
    if repeated:  # 0.1\overline{6}
        digits, places = repeated.strip("{}"), len(decimal.partition(".")[2])
        value += Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
    return value


def _read_unit(text: str) -> tuple[int, Unit] | None:
    """Returns the power of ten and the unit of the words after a number; None if not a unit."""
    if text.strip() in _CURRENCIES:
        return 0, {_CURRENCIES[text.strip()]: 1}
    if "\u4e00" <= text.strip()[:1] <= "\u9fff":
        return _read_chinese(text.strip())
    match = _UNIT.fullmatch(text)
    if match is None:
        return None
    unit: Unit = {}
    scale, sign, power, last = 0, 1, 1, ""
    words = match["words"]
    words = re.sub(
        r"^[A-Za-z]+|[A-Z]\w*", lambda word: _ABBREVIATIONS.get(word[0], word[0]), words
    ).lower()
    parts = _UNIT_PART.findall(words)
    for position, (word, over, digit) in enumerate(parts):
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
        elif word and (word not in _LINKS or sum(bool(part[0]) for part in parts) == 1):
            # A short word, or letters attached to the number, are more likely variables than units.
            is_short = len(word) < 3 or not re.search("[aeiou]", word)
            if _CHANGES_THE_VALUE.fullmatch(word) or is_short or not match["gap"]:
                return None
            unit.setdefault(word.removesuffix("s"), 0)
    if not match["gap"] and re.match(r"[A-Za-z]\b", match["words"]):  # 5m may be a product
        return None
    return scale, unit


def _read_chinese(text: str) -> tuple[int, Unit] | None:
    match = _CHINESE.fullmatch(text)
    if match is None or _CHINESE_CHANGES.search(match["noun"] or ""):
        return None
    scale = {"万": 4, "亿": 8, None: 0}[match["scale"]]
    if match["unit"]:
        power = {"平方": 2, "立方": 3, None: 1}[match["power"]]
        per = {_CHINESE_UNITS[match["per"]]: -1} if match["per"] else {}
        return scale, {_CHINESE_UNITS[match["unit"]]: power} | per
    if match["power"]:
        return None
    return scale, {match["noun"]: 0} if match["noun"] else {}


_TRAILING_UNIT = re.compile(
    r"(?P<head>.*[^\s\\])(?:\s|\\[,;: ])*"
    r"(?P<unit>\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?[23]\}?)?"
    r"|(?<=\s)[A-Za-z][A-Za-z /^23]+|[\u4e00-\u9fff]+)",
    re.DOTALL,
)


def split_unit(answer: str) -> tuple[str, Unit]:
    """Splits a trailing unit off an expression, such as inches off `6\\sqrt{3}`.

    A single letter is a variable unless it is marked as text.
    """
    if _LETTER_AFTER.fullmatch(answer):
        return answer, {}
    match = _TRAILING_UNIT.fullmatch(answer)
    read = _read_unit(" " + plain(match["unit"])) if match else None
    return (match["head"], read[1]) if match and read and read[0] == 0 else (answer, {})
