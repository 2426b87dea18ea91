"""Multiple choice: reads the letter that a text chooses.

gpqa("... Answer: B", "B")             # 1.0
"""

from __future__ import annotations

import re
import string

from agentrl_rewards.inputs import without_reasoning

# Possessive quantifiers throughout: a long run of spaces is scanned once, without backtracking.
_OPENING = r"\s*+(?:\*\*|[(\[{$\"'`]|\\text(?:bf)?\{|\\mathrm\{|\\boxed\{)*+"
# "answer" in any case; a small letter only at the end of a line, for "a" is an article
_LETTER = r"(?P<letter>[A-Z](?![A-Za-z0-9])|[a-z](?=[)\]}.*$\"'`]*+\s*+(?:$|\n|<)))"
_MARKED = re.compile(
    r"(?:\\boxed\s*+\{|<answer>"
    r"|(?:(?<!<)(?<!/)(?i:answer)\b|答案|\b(?i:option|choice)(?=\s*+(?:\*\*\s*+)?+(?::|：|is\b)))"
    r"\s*+(?i:(?:is|choice|option)\b\s*+|[是为]){0,2}+(?:\*\*\s*+)?+(?:[:：]\s*+)?+(?:\*\*\s*+)?+)"
    + _OPENING
    + _LETTER
)
_LIST_WORDS = r"\b(?:or|and|maybe|perhaps|possibly|also|even|either|both|no|wait|actually)\b"
_BETWEEN = rf"(?i:[ \t,;/&|?+(){{}}\[\]*$\\]|text|boxed|{_LIST_WORDS})*+"
_OTHER = re.compile(rf"(?P<between>{_BETWEEN})(?P<letter>[A-Z])(?![A-Za-z0-9'’])")
_ANOTHER_OPTION = re.compile(r"[^\n]{0,200}?\b(?:or|and)[ \t]*+\(?(?P<letter>[A-Z])[).:]")
_ALONE = re.compile(
    r"[(\[*$]{0,3}(?P<alone>[A-Za-z])[)\].:*$]{0,4}"
    r"|(?i:(?:the )?option|choice)\s*+[(\[*$]{0,3}(?P<option>[A-Z])[)\].:*$]{0,4}"
    r"|\**+(?:\((?P<bracket>[A-Z])\)|(?P<point>[A-Z])[.):])\**+\s[^\n]*+"
)


def extract_choice(text: str, num_choices: int = 4) -> str | None:
    """Returns the capital letter of the option that a text chooses, or None if it chooses none.

    The last of `\\boxed{B}`, `<answer>B</answer>`, `answer is (B)` and `correct option: B` counts;
    without any of them, the last line counts if it is a letter or an option (`B`, `Option B`,
    `(B) Paris`, `B. Paris`) and no other line is another option. Reasoning up to `</think>` is
    ignored. Returns None for a list of letters (`A or B`, `A, B, C`) and for a letter beyond the
    options.
    """
    text = without_reasoning(text).strip()
    options = string.ascii_uppercase[:num_choices]
    letter, end, hedged = None, 0, False
    for match in _MARKED.finditer(text):
        chosen = match["letter"].upper()
        beside = letter is not None and re.fullmatch(_BETWEEN, text[end : match.start()])
        hedged = bool(beside) and (hedged or chosen != letter)
        letter, end = chosen, match.end()
    if letter is not None:
        hedged |= _is_list(text, end, options)
    else:
        lines = [line.strip() for line in text.split("\n")]
        found = {_option_of(line) for line in lines} - {None}
        letter = _option_of(lines[-1])
        hedged = len(found) > 1 or bool(re.search(r"\b(?:or|and) \(?[A-Z][).]", lines[-1]))
    return letter if letter and letter in options and not hedged else None


def _is_list(text: str, end: int, options: str) -> bool:
    """Returns whether another option follows the letter before `end`, as in `A, B` or `A or B`."""
    if (other := _ANOTHER_OPTION.match(text, end)) and other["letter"] in options:
        return True
    other = _OTHER.match(text, end)
    if other is None or other["letter"] not in options:
        return False
    # "A B" is a list, "A) A city" is not
    has_comma_or_word = re.search(r"[,;/&|?+]|[a-z]", other["between"].replace("text", ""))
    return bool(has_comma_or_word) or not re.match(r"[ \t]*[a-z]", text[other.end() :])


def _option_of(line: str) -> str | None:
    """Returns the letter of a line that is an option, or None."""
    match = _ALONE.fullmatch(line)
    return match[match.lastgroup or 0].upper() if match else None


def gpqa(text: str, reference: str, *, num_choices: int = 4) -> float:
    """Returns 1.0 if the text chooses the letter `reference`, else 0.0.

    Named after the benchmark it is mostly used for (Rein et al. 2023, arXiv:2311.12022).
    """
    return float(extract_choice(text, num_choices) == reference.strip(" ()").upper())
