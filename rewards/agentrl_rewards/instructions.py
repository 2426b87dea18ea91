"""Checks whether a text keeps IFEval's verifiable constraints.

    ifeval(text, {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"relation": "at least", "num_words": 100}],
    })

Identifiers and arguments are those of IFEval's rows (Zhou et al. 2023, "Instruction-Following
Evaluation for Large Language Models", arXiv:2311.07911). The text is judged strictly, as it is. All
25 constraints are implemented. The verdicts match the benchmark's own code, with these exceptions:

* Sentences, and the words counted by `change_case:capital_word_frequency`, are split by regular
  expressions, not by a trained tokenizer, so counts differ at abbreviations ("e.g. this").
* `language:*` and `change_case:english_*` detect the language with the rules of
  `agentrl_rewards.languages`. The benchmark's classifier is random, so the two may disagree about
  short, mixed or made-up text.
* A missing argument is an error; the benchmark draws one at random.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from agentrl.errors import GraderError
from agentrl_rewards.languages import LANGUAGES, detect_language

Constraints = Mapping[str, Callable[..., bool]]
"""Constraint name -> `check(text, **arguments)`, which returns whether the text keeps it."""

_WORD = re.compile(r"\w+(?:[’'\-]\w+)*")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]]*+(?=\s|$)")
_MAX_COUNT_CHARS = 1_000_000


def ifeval(text: str, reference: Mapping[str, Any] | str) -> dict[str, float]:
    """Scores how many of a row's constraints the text keeps.

    Returns:
        `score`, 1.0 if all constraints are kept, else 0.0; and `share`, the fraction kept, which
        is the better reward while a policy rarely keeps all of them. An empty text keeps none.

    Raises:
        GraderError: the row is not in IFEval's format, or a constraint is unknown.
    """
    return score_constraints(text, reference, CONSTRAINTS)


def score_constraints(
    text: str, reference: Mapping[str, Any] | str, constraints: Constraints
) -> dict[str, float]:
    """Returns `score` and `share`, as `ifeval` does, with the checks in `constraints`.

    Raises:
        GraderError: see `ifeval`.
    """
    if isinstance(reference, str):
        try:
            reference = json.loads(reference)
        except ValueError as error:
            raise GraderError(f"the reference is a string but not valid JSON: {error}") from None
    if not isinstance(reference, Mapping):
        raise GraderError(f"the reference is not a JSON object: {str(reference)[:80]!r}")
    names, arguments = reference.get("instruction_id_list"), reference.get("kwargs")
    if not isinstance(names, list) or not names:
        raise GraderError(
            "the reference needs instruction_id_list, a list of constraint names, and "
            "kwargs, a list of their arguments"
        )
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise GraderError(
            f"the reference has {len(names)} constraints; `kwargs` has to be a list of as many"
        )
    kept = [
        follows(text, name, given or {}, constraints)
        for name, given in zip(names, arguments, strict=True)
    ]
    return {"score": float(all(kept)), "share": sum(kept) / len(kept)}


def follows(
    text: str, name: str, arguments: Mapping[str, Any], constraints: Constraints | None = None
) -> bool:
    """Returns whether the text keeps one constraint.

    Args:
        name: the constraint's identifier, such as `punctuation:no_comma`.
        arguments: the constraint's arguments; those that are None count as not given.
        constraints: the checks by name; None uses IFEval's.

    Raises:
        GraderError: the constraint is unknown, or an argument is missing, unknown or invalid.
    """
    constraints = CONSTRAINTS if constraints is None else constraints
    check = constraints.get(name)
    if check is None:
        raise GraderError(f"unknown constraint {name!r}; use one of {', '.join(constraints)}")
    given = {key: value for key, value in arguments.items() if value is not None}
    try:
        return bool(text.strip()) and check(text[:_MAX_COUNT_CHARS], **given)
    except (TypeError, AttributeError, ValueError) as error:
        raise GraderError(f"constraint {name!r} cannot take the kwargs {given}: {error}") from error


def split_words(text: str) -> list[str]:
    """Returns the runs of letters, digits and underscores, joined at apostrophes and hyphens."""
    return _WORD.findall(text)


def split_sentences(text: str) -> list[str]:
    """Splits the text after each `.`, `!` or `?` that white space or the end of the text follows.

    A rest without such an end is a sentence too, if it contains a word.
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    sentences = [text[start:end].strip() for start, end in pairwise([0, *ends])]
    rest = text[ends[-1] if ends else 0 :].strip()
    return [*sentences, rest] if _WORD.search(rest) else sentences


def count_words(text: str) -> int:
    """Counts runs of letters, digits and underscores, as IFEval does, so "don't" is two words."""
    return len(re.findall(r"\w+", text))


def count_word(text: str, word: str) -> int:
    """Counts the whole-word occurrences of a word or phrase, ignoring case."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE))


def _compare(count: int, relation: str, number: float) -> bool:
    if relation == "at least":
        return count >= number
    if relation == "less than":
        return count < number
    raise ValueError(f'relation is {relation!r}; use "at least" or "less than"')


def _occurrences(text: str, keyword: str) -> int:
    return len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE))


def _in_language(text: str, *, language: str) -> bool:
    if language not in LANGUAGES:
        raise ValueError(f"language is {language!r}; use one of {', '.join(sorted(LANGUAGES))}")
    return detect_language(text) == language


def _parts(text: str, divider: str) -> list[str]:
    """Splits at a divider; one before the first or after the last part separates nothing."""
    parts = [part.strip() for part in re.split(divider, text)]
    start = len(parts) > 1 and not parts[0]
    return parts[start : -1 if len(parts) - start > 1 and not parts[-1] else None]


def _paragraph_first_word(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    parts = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    first = _WORD.search(parts[nth_paragraph - 1].split()[0])
    return first is not None and first[0].lower() == first_word.lower()


def _num_placeholders(text: str) -> int:
    num_found = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            num_found += 1
            start = line.find("[", end)
    return num_found


def _postscript(text: str, *, postscript_marker: str) -> bool:
    known = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    pattern = known.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(pattern, text.lower()) is not None


def _num_highlights(text: str) -> int:
    found = re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", text)
    return sum(bool(part.strip("* ")) for part in found)


def _is_json(text: str) -> bool:
    body = text.strip()
    if body.startswith("```") and body.endswith("```") and len(body) >= 6:
        body = re.sub(r"^(?:json|JSON|Json)(?=\s)", "", body[3:-3]).strip()
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _may_be_english(text: str) -> bool:
    return detect_language(text) in ("en", None)


CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, *, keywords: all(
        _occurrences(text, keyword) for keyword in keywords
    ),
    "keywords:frequency": lambda text, *, keyword, frequency, relation: _compare(
        _occurrences(text, keyword), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, *, forbidden_words: (
        not any(count_word(text, word) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, *, letter, let_frequency, let_relation: _compare(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": _in_language,
    "length_constraints:number_words": lambda text, *, num_words, relation: _compare(
        count_words(text), relation, num_words
    ),
    "length_constraints:number_sentences": lambda text, *, num_sentences, relation: _compare(
        len(split_sentences(text)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda text, *, num_paragraphs: (
        all(parts := _parts(text, r"\s?\*\*\*\s?")) and len(parts) == num_paragraphs
    ),
    "length_constraints:nth_paragraph_first_word": _paragraph_first_word,
    "detectable_content:number_placeholders": lambda text, *, num_placeholders: (
        _num_placeholders(text) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, *, num_bullets: (
        len(re.findall(r"^[^\S\n]*+(?:\*[^*].*$|-)", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(
        f"My answer is {answer}." in text for answer in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": lambda text, *, num_highlights: (
        _num_highlights(text) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, *, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+\s?", text)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda text: any(
        title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text)
    ),
    "combination:two_responses": lambda text: (
        all(parts := _parts(text, r"\*{6}")) and len(parts) == 2 and parts[0] != parts[1]
    ),
    "combination:repeat_prompt": lambda text, *, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, *, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: len(body := text.strip()) > 1 and body[0] == body[-1] == '"',
    "change_case:capital_word_frequency": lambda text, *, capital_frequency, capital_relation: (
        _compare(sum(map(str.isupper, split_words(text))), capital_relation, capital_frequency)
    ),
    "change_case:english_capital": lambda text: text.isupper() and _may_be_english(text),
    "change_case:english_lowercase": lambda text: text.islower() and _may_be_english(text),
    "punctuation:no_comma": lambda text: "," not in text,
}
