"""Rewrites what people write in an answer into the LaTeX that the grader reads.

    spelled("\\boldsymbol{½} π")     # "\\frac{1}{2} \\pi "

Both the answer and the reference are rewritten. Nothing here changes a value.
"""

from __future__ import annotations

import re
import unicodedata

_VULGAR = {
    char: unicodedata.normalize("NFKC", char).split("\u2044") for char in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_NAMES = (
    "α alpha β beta γ gamma δ delta ε epsilon ζ zeta η eta θ theta κ kappa λ lambda μ mu ν nu ξ xi "
    "π pi ρ rho σ sigma τ tau φ phi ϕ phi χ chi ψ psi ω omega Γ Gamma Δ Delta Θ Theta Λ Lambda "
    "Ξ Xi Σ Sigma Φ Phi Ψ Psi Ω Omega ∞ infty × times ± pm ≤ le ⩽ le ≥ ge ⩾ ge ≠ ne ∪ cup ∩ cap "
    "∈ in ≡ equiv ⌊ lfloor ⌋ rfloor ⌈ lceil ⌉ rceil ⋅ cdot ∙ cdot • cdot · cdot"
)
_COMMANDS = dict(zip(_NAMES.split()[::2], _NAMES.split()[1::2], strict=True))
_SIGNS = {
    **{char: rf"\frac{{{top}}}{{{bottom}}}" for char, (top, bottom) in _VULGAR.items()},
    **{char: rf"\{name} " for char, name in _COMMANDS.items()},
    **{char: rf"\mathbb{{{letter}}}" for char, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)},
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("÷∕⁄", "/"),
    # the wide punctuation of Chinese texts
    **{chr(ord(char) + 0xFEE0): char for char in "!()+,:;<=>[]{|}"},
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "、": ",",
    "。": ".",
    "或": " or ",
    "和": " and ",
    "′": "'",
    "º": "°",
}
_TABLE = str.maketrans(_SIGNS)
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣʸᵏᵐⁱ", "0123456789+-nxykmi", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n", strict=True))
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_NUMBER_WORDS = "two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
_BASES = {word: str(number) for number, word in enumerate(_NUMBER_WORDS, 2)} | {"sixteen": "16"}
_BASE = rf"(?i:{'|'.join(_BASES)}|[0-9]{{1,2}})"
_TEXT = r"(?:\\(?:text|mathrm|mbox)\s*\{\s*)?"
_SPACE = r"(?:\s|~|\\[,;: ])*"
_COLOR = r"\\(?:text)?color\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}\s*"
_SIZE = r"\\(?:displaystyle|textstyle|bf|rm|it|tiny|small|large|Large|huge)(?![a-zA-Z])"
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_ARGUMENT = r"(?:[0-9]|[a-zA-Z]|\\(?!sqrt)[a-zA-Z]+)"
_CURRENCY = r"\.?\s*\}?" + _SPACE + r"(?=[-+0-9.\\])"
_CODE = "CAD|AUD|NZD|HKD|SGD|CHF|CNY|JPY|KRW|MXN|BRL|SEK|NOK|DKK|PLN|TRY|ZAR|RUB"
_STYLE = re.compile(
    r"\\(?:boldsymbol|bm|pmb|mathbf|mathit|mathsf|mathnormal|underline|underbar|uline|emph|textsf"
    r"|overline(?=\s*\{[A-Z]{2,}\}))\s*\{(?P<inside>[^{}]*(?:\{[^{}]*\}[^{}]*){0,8})\}"
)
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"\{{\s*{_COLOR}([^{{}}]*)\}}|{_COLOR}", r"\1"),
        (_SIZE, ""),
        (r"\\degree(?![a-zA-Z])", r"^\\circ "),
        (r"\\(?:left|right)\.", ""),
        (r"\(\s*\\?b?mod\s*(\w+)\s*\)", r"\\pmod{\1}"),
        (
            r"\\?(?:operatorname|text|mathrm)?\s*\{?\s*cis\s*\}?\s*(\([^()]*\)|[^-+,=()]+)",
            r"(\\cos(\1)+i\\sin(\1))",
        ),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (r"(?<![0-9A-Za-z])([0-9]\.[0-9]+)[eE]([-+]?[0-9]+)(?![0-9A-Za-z])", r"\1\\times 10^{\2}"),
        (r"\{([pb]?)smallmatrix\}", r"{\1matrix}"),
        (r"\\langle(?![a-zA-Z])(.*)\\rangle(?![a-zA-Z])", r"(\1)"),
        (r"\\hat\s*\{?\s*\\?([ijk])(?:math)?(?![a-zA-Z])\s*\}?", r"\1"),  # unit vectors
        (rf"^\s*{_TEXT}(?i:the )?(?i:final |correct )?(?i:answer)(?i: is)?:?\s*\}}?\s*", ""),
        (rf"^({_NUMBER})\s*(?:\^?\s*\{{?\s*{_TEXT})(?:st|nd|rd|th)\s*\}}*$", r"\1"),  # 5th
        (rf"^({_NUMBER}){_SPACE}{_TEXT}\s*to\s*\}}?{_SPACE}({_NUMBER})$", r"\1:\2"),
        # { x | x > 2 }, in which x is real
        (
            r"^\s*\\?\{\s*([a-z])(?:\s*\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid|\||:)(.*(?:[<>=]|\\[lgn]e).*?)\\?\}\s*$",
            r"\2",
        ),
        (r"^(\s*(?:\\left)?[(\[][^,;]*);([^,;]*[)\]]\s*)$", r"\1,\2"),  # [-2; 7]
        # without braces, an argument of \frac is one digit, letter or command
        (rf"(\\[dtc]?frac)(?![a-zA-Z])\s*({_ARGUMENT})", r"\1{\2}"),
        (rf"(\\[dtc]?frac\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*\}})\s*({_ARGUMENT})", r"\1{\2}"),
        # currencies before a number
        (r"^\s*(?:[A-Z]{1,2}|USD|U\.S\.)\s?(?=\\?\$)", ""),
        (rf"^\s*{_TEXT}(?:USD|US dollars?){_CURRENCY}", "$"),
        (rf"^\s*(?:{_TEXT}(?:EUR|euros?)|\\euro){_CURRENCY}", "€"),
        (rf"^\s*(?:{_TEXT}GBP|\\pounds){_CURRENCY}", "£"),
        (rf"^\s*{_TEXT}(?:Rs|INR|[Rr]upees){_CURRENCY}", "₹"),
        (rf"^\s*{_TEXT}({_CODE})\s*\}}?\s*([0-9.,]+)$", r"\2 \\text{\1}"),
        # repeating decimals
        (r"(?<=[0-9.])\s*\\(?:bar|dot)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))", r"\\overline{\1\2}"),
        (r"(?<=[0-9.])([0-9])\1\1+\s*(?:\.\.\.|…|\\l?dots)$", r"\\overline{\1}"),
        (r"\.\(([0-9]+)\)", r".\\overline{\1}"),
        # (1010)_2, 1010_{\text{two}}, 1010 base two, 1010 (in base 2)
        (r"^\(([0-9A-Za-z]+)\)(?=_)", r"\1"),
        (rf"_\s*\{{?\s*{_TEXT}\(?({_BASE})\)?\s*\}}*$", r"_{\1}"),
        (
            rf"(?<=\w){_SPACE}{_TEXT}\(?\s*(?:in )?\bbase\s*\}}?[\s-]*({_BASE})\s*\)?\s*\}}?$",
            r"_{\1}",
        ),
    )
]


_IN_BASE = re.compile(
    rf"\s*(?:0x)?(?P<digits>[0-9A-Za-z ]+)_\{{?(?:base)? ?(?P<base>{_BASE})\}}?\s*"
)


def spelled(text: str) -> str:
    """Returns the text with unicode signs, styles, colours, currencies and bases as plain LaTeX."""
    if not text.isascii():
        text = _from_unicode(text)
    for _ in range(3):  # styles may nest
        text, count = _STYLE.subn(r"\g<inside>", text)
        if not count:
            break
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    number = _IN_BASE.fullmatch(text)
    base = _BASES.get(number["base"].lower(), number["base"]) if number else ""
    # 2b_{16} and 2B_{16}, but x_1 is another variable than X_1
    if number and (number["digits"].isdigit() or base == "16"):
        text = f"{number['digits'].replace(' ', '').upper().lstrip('0')}_{{{base}}}"
    return text


def _from_unicode(text: str) -> str:
    for sign, command in _ROOTS.items():
        text = re.sub(
            rf"{sign}\s*(?:\(([^()]*)\)|\{{([^{{}}]*)\}}|([0-9.]+|\w|\\\w+))",
            lambda match, command=command: f"{command}{{{match[match.lastindex or 0]}}}",
            text,
        )
    for table, mark in ((_RAISED, "^"), (_LOWERED, "_")):
        run = "".join(table)
        text = re.sub(
            rf"(?<=[\w)}}\]])[{run}]+",
            lambda match, table=table, mark=mark: (
                f"{mark}{{{''.join(map(table.__getitem__, match[0]))}}}"
            ),
            text,
        )
    return text.translate(_TABLE)
