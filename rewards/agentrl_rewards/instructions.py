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
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
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


def count_sentences(text: str) -> int:
    return len(split_sentences(text))


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


def _keywords(text: str, *, keywords: list[str]) -> bool:
    return all(_occurrences(text, keyword) > 0 for keyword in keywords)


def _keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(_occurrences(text, keyword), relation, frequency)


def _forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    return not any(count_word(text, word) for word in forbidden_words)


def _letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def _response_language(text: str, *, language: str) -> bool:
    if language not in LANGUAGES:
        raise ValueError(f"language is {language!r}; use one of {', '.join(sorted(LANGUAGES))}")
    return detect_language(text) == language


def _number_words(text: str, *, num_words: int, relation: str) -> bool:
    return _compare(count_words(text), relation, num_words)


def _number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return _compare(count_sentences(text), relation, num_sentences)


def _number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    if len(parts) > 1:  # a divider before the first or after the last paragraph separates nothing
        parts = parts[1:] if not parts[0] else parts
        parts = parts[:-1] if not parts[-1] else parts
    return all(parts) and len(parts) == num_paragraphs


def _paragraph_first_word(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    parts = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    first = _WORD.search(parts[nth_paragraph - 1].split()[0])
    return first is not None and first[0].lower() == first_word.lower()


def _placeholders(text: str, *, num_placeholders: int) -> bool:
    num_found = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            num_found += 1
            start = line.find("[", end)
    return num_found >= num_placeholders


def _postscript(text: str, *, postscript_marker: str) -> bool:
    known = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    pattern = known.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(pattern, text.lower()) is not None


def _bullets(text: str, *, num_bullets: int) -> bool:
    starts = re.findall(r"^[^\S\n]*+(?:\*[^*].*$|-)", text, re.MULTILINE)
    return len(starts) == num_bullets


def _constrained_response(text: str) -> bool:
    return any(answer in text for answer in _CONSTRAINED)


def _highlights(text: str, *, num_highlights: int) -> bool:
    found = re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", text)
    return sum(bool(part.strip("* ")) for part in found) >= num_highlights


def _sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+\s?", text)) >= num_sections


def _json_format(text: str) -> bool:
    body = text.strip()
    if body.startswith("```") and body.endswith("```") and len(body) >= 6:
        body = re.sub(r"^(?:json|JSON|Json)(?=\s)", "", body[3:-3]).strip()
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text))


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    if len(parts) > 2:
        parts = parts[1:] if not parts[0] else parts
        parts = parts[:-1] if not parts[-1] else parts
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(text: str) -> bool:
    body = text.strip()
    return len(body) > 1 and body.startswith('"') and body.endswith('"')


def _capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    count = sum(match[0].isupper() for match in _WORD.finditer(text))
    return _compare(count, capital_relation, capital_frequency)


def _upper_case(text: str) -> bool:
    return text.isupper() and _may_be_english(text)


def _lower_case(text: str) -> bool:
    return text.islower() and _may_be_english(text)


def _may_be_english(text: str) -> bool:
    return detect_language(text) in ("en", None)


def _no_comma(text: str) -> bool:
    return "," not in text


CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _response_language,
    "length_constraints:number_words": _number_words,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _paragraph_first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _upper_case,
    "change_case:english_lowercase": _lower_case,
    "punctuation:no_comma": _no_comma,
}
