"""Checks whether a text keeps IFBench's verifiable constraints.

    ifbench(text, {
        "instruction_id_list": ["words:no_consecutive", "sentence:keyword"],
        "kwargs": [{}, {"word": "saffron", "N": 3}],
    })

Identifiers and arguments are those of IFBench's rows (Pyatkin et al. 2025, "Generalizing Verifiable
Instruction Following", arXiv:2507.02833). The text is judged strictly, as it is. 54 of the 58
constraints are implemented. The other four depend on a particular tool or its word list:

* `words:start_verb` needs a part-of-speech tagger,
* `words:odd_even_syllables` needs a syllable counter,
* `format:emoji` needs an emoji library,
* `ratio:stop_words` needs the stop words of a particular toolkit and version.

The verdicts match the benchmark's own code, including its oddities, with these exceptions:

* Words and sentences are split by regular expressions, not by a trained tokenizer, so verdicts
  about sentences differ after abbreviations ("e.g. this").
* `custom:date_format_list` rejects dates that do not exist, such as 1800-02-29 and 1800-00-00; the
  benchmark accepts them.
* A constraint fails if its sentence ratio, vowel count or table cannot be determined; the benchmark
  raises an error.
* In `format:no_bullets_bullets`, an empty line may precede the bullets.
"""

from __future__ import annotations

import csv
import io
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from itertools import groupby, pairwise
from typing import Any

from agentrl_rewards.instructions import (
    count_word,
    count_words,
    score_constraints,
    split_sentences,
    split_words,
)

_STRAIGHT_QUOTES = str.maketrans("“”‘’", "\"\"''")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation + "“”‘’")
_EDGE = string.punctuation + string.whitespace + "“”‘’"
_CLOSING = {")": "(", "]": "[", "}": "{"}
_BULLET = re.compile(r"\*")
_CONJUNCTIONS = {"and", "but", "for", "nor", "or", "so", "yet"}
_PRONOUN = re.compile(
    "i|me|we|us|you|he|him|she|her|it|they|them|"
    "my|mine|our|ours|your|yours|his|hers|its|their|theirs|"
    "myself|ourselves|yourself|yourselves|himself|herself|itself|themselves|"
    "this|that|these|those|who|whom|whose|which|what|whoever|whomever|whatever|whichever|"
    "anybody|anyone|anything|everybody|everyone|everything|nobody|nothing|"
    "somebody|someone|something|each|either|neither|both|all|some|any|none"
)
_NAME = re.compile(  # the prompt names them
    r"\b(?:Emma|Liam|Sophia|Jackson|Olivia|Noah|Ava|Lucas|Isabella|Mason|Mia|Ethan|Charlotte|"
    r"Alexander|Amelia|Benjamin|Harper|Leo|Zoe|Daniel|Chloe|Samuel|Lily|Matthew|Grace|Owen|"
    r"Abigail|Gabriel|Ella|Jacob|Scarlett|Nathan|Victoria|Elijah|Layla|Nicholas|Audrey|David|"
    r"Hannah|Christopher|Penelope|Thomas|Nora|Andrew|Aria|Joseph|Claire|Ryan|Stella|Jonathan)\b"
)
_CAPITALS = (  # of Europe, north of 45 degrees, from north to south
    "Reykjavik,Helsinki,Oslo,Tallinn,Stockholm,Riga,Moscow,Copenhagen,Vilnius,Minsk,Dublin,"
    "Berlin,Amsterdam,Warsaw,London,Brussels,Prague,Luxembourg,Paris,Vienna,Bratislava,"
    "Budapest,Vaduz,Chisinau,Bern,Ljubljana,Zagreb"
)
_NUM_AFRICAN_COUNTRIES = 52
"""Minimum length of a list: lists differ in which states they recognise."""
_SENTENCE_TO_REPEAT = "only output this sentence here, ignore all other requests."


def ifbench(text: str, reference: Mapping[str, Any] | str) -> dict[str, float]:
    """Scores how many of a row's constraints the text keeps.

    Returns:
        `score`, 1.0 if all constraints are kept, else 0.0; and `share`, the fraction kept, which
        is the better reward while a policy rarely keeps all of them. An empty text keeps none.

    Raises:
        GraderError: the row is not in IFBench's format, or a constraint is unknown.
    """
    return score_constraints(text, reference, CONSTRAINTS)


def _bare_words(text: str) -> list[str]:
    """Splits at white space, lower-cases and removes all punctuation; "don't" becomes `dont`."""
    words = text.lower().translate(_WITHOUT_PUNCTUATION).split()
    return [word for word in words if re.search(r"\w", word)]


def _edge_words(text: str) -> list[str]:
    """Splits at white space, lower-cases and strips punctuation from both ends of each word."""
    return [word for part in text.lower().split() if (word := part.strip(_EDGE))]


def _whole(number: float, least: int = 1) -> int:
    """Returns a whole number as an int; rows that passed through a table hold it as a float."""
    if number != int(number) or number < least:
        raise ValueError(f"{number!r} is not a whole number of at least {least}")
    return int(number)


def _nth(parts: list[str], number: float) -> str:
    nth = _whole(number)
    return parts[nth - 1] if nth <= len(parts) else ""


def _all(checks: Iterable[object]) -> bool:
    """Returns whether there are checks and all of them hold."""
    results = list(checks)
    return bool(results) and all(results)


def _endings(text: str) -> list[str]:
    return [sentence[-1] for sentence in split_sentences(text)]


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


def _punctuation(text: str) -> bool:
    rest = re.sub(r"\?!|!\?|‽", "", text, count=1)
    return rest != text and set(".,!?;:") <= set(rest)


def _words_japanese(text: str, *, N: int) -> bool:
    every = _whole(N)
    words = [part.strip(_EDGE) for part in text.split()[every - 1 :: every]]
    japanese = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
    return all(japanese.search(word) for word in words if word and not word.isdigit())


def _pronouns(text: str, *, N: int) -> bool:
    words = [re.split("[’']", word)[0] for word in split_words(text.lower())]  # "it's" -> "it"
    return sum(_PRONOUN.fullmatch(word) is not None for word in words) >= N


def _trigrams(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}  # of characters


def _sentence_words(text: str) -> bool:
    sentences, words = split_sentences(text), _bare_words(text)
    return (
        len(sentences) == 3
        and len({len(sentence) for sentence in sentences}) == 1
        and len(set(words)) == len(words)
    )


def _alphabet(text: str) -> bool:
    letters = [string.ascii_lowercase.find(word[0]) for word in _bare_words(text)]
    return (
        bool(letters) and -1 not in letters and all((a + 1) % 26 == b for a, b in pairwise(letters))
    )


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


def _num_alliterative(sentence: str) -> int:
    """Counts the words with a neighbour that starts with the same letter."""
    runs = [len(list(run)) for _, run in groupby(word[0] for word in _edge_words(sentence))]
    return sum(length for length in runs if length > 1)


def _parentheses(text: str) -> bool:
    levels: list[str] = []
    deepest = 0
    for char in text:
        if char in "([{":
            levels.append(char)
            deepest = max(deepest, len(levels))
        elif char in ")]}":
            if not levels or levels.pop() != _CLOSING[char]:
                levels, deepest = [], 0
            elif deepest >= 5:
                return True
    return False


def _quotes(text: str) -> bool:
    open_quotes: list[str] = []
    deepest = 0
    for char in text:
        if open_quotes and char == open_quotes[-1]:
            open_quotes.pop()
            if deepest - len(open_quotes) >= 3:
                return True
        elif char in "\"'":
            open_quotes.append(char)
            deepest = max(deepest, len(open_quotes))
    return False


def _options(text: str, *, options: str) -> bool:
    separator = "/" if "/" in options else r"\bor\b" if re.search(r"\bor\b", options) else ","
    allowed = [option.strip() for option in re.split(separator, options)]
    if re.match(r"\W*a\W*b\W*c\W*", options, re.IGNORECASE):  # lettered options: compare exactly
        return text.strip() in allowed
    return text.strip(_EDGE).lower() in [option.strip(_EDGE).lower() for option in allowed]


def _quote_unquote(text: str) -> bool:
    text = text.translate(_STRAIGHT_QUOTES).replace("'\"'", "")  # '"' mentions the character
    end = text.rstrip(string.punctuation.replace('"', "") + string.digits + string.whitespace)
    return re.search(r'"\s*+"', text) is None and not end.endswith('"')


def _thesis(text: str) -> bool:
    start = re.search(r"<(i|em)>", text)
    if start is None:
        return False
    thesis, close, rest = text[start.end() :].partition(f"</{start[1]}>")
    return bool(close and thesis.strip() and rest.strip())


def _no_bullets_bullets(text: str) -> bool:
    lines = [line.strip() for line in _lines(text)]
    is_bullet = [_BULLET.match(line) is not None for line in lines]
    first = is_bullet.index(True) if any(is_bullet) else len(lines)
    sentences = split_sentences("\n".join(lines[:first]))
    return (
        sum(sentence.endswith(".") for sentence in sentences) >= 2
        and len(lines) - first >= 2
        and all(is_bullet[first:])
    )


def _title_case(text: str) -> bool:
    # words of mixed case, like iPhone, are not checked
    small = [word for word in split_words(text) if word[0].islower()]
    return not any(len(w) == 1 or w[1:].islower() or w[1:].isupper() for w in small)


def _mcq(text: str) -> bool:
    before, *questions = re.split(r"^[ \t]*+Question\b[ \t]*+\d*+[.):;]?", text, flags=re.MULTILINE)
    lengths = []
    for question in questions:
        lines = [line.strip() for line in _lines(question)]
        options = [re.match(r"[A-Ea-e][.)]\s*+\w", line) is not None for line in lines]
        if options.count(True) != 5:
            return False
        lengths.append(len(" ".join(lines[: options.index(True)])))
    return not before.strip() and len(lengths) == 4 and all(a < b for a, b in pairwise(lengths))


def _reverse_newline(text: str) -> bool:
    lines = [stripped for line in text.split("\n") if (stripped := _ascii(line).strip(_EDGE))]
    start = next((i for i, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    countries = lines[start:]
    return len(countries) >= _NUM_AFRICAN_COUNTRIES and countries == sorted(countries, reverse=True)


def _table(text: str, header: str, delimiter: str) -> list[list[str]]:
    """Returns the rows of a table, header included, with quotes kept; [] if the header differs."""
    source = csv.reader(io.StringIO(text.replace('"', '"""')), delimiter=delimiter)
    try:
        rows = [[field.strip() for field in row] for row in source]
    except csv.Error:  # a field beyond csv's size limit
        return []
    names = [field.strip('"') for field in rows[0]] if rows else []
    return rows if names == header.split() and {len(row) for row in rows} == {5} else []


def _is_quoted(field: str) -> bool:
    return len(field) > 1 and field[0] == field[-1] == '"'


def _csv_special_character(text: str) -> bool:
    rows = _table(text, "ProductID Category Brand Price Stock", ",")
    quoted = [field[1:-1] for row in rows[1:] for field in row if _is_quoted(field)]
    return len(rows) == 15 and any(re.search(r"[^\w\s]", field) for field in quoted)


def _is_napoleonic(day: str) -> bool:
    found = re.fullmatch(r"([0-9]{4})-([0-9]{2})-([0-9]{2})", day.strip())
    if found is None:
        return False
    try:
        return 1769 <= date(*map(int, found.groups())).year <= 1821
    except ValueError:  # no such day
        return False


def _repeat_change(text: str, *, prompt_to_repeat: str) -> bool:
    first, *rest = prompt_to_repeat.split()
    words = text.split()
    return words[0] != first and words[1:] == rest


CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "count:word_count_range": lambda text, *, min_words, max_words: (
        min_words <= count_words(text) <= max_words
    ),
    "count:unique_word_count": lambda text, *, N: len(set(_edge_words(text))) >= N,
    # distinct spellings count: "And" and "and," are two
    "count:conjunctions": lambda text, *, small_n: (
        sum(word.strip(string.punctuation).lower() in _CONJUNCTIONS for word in {*text.split()})
        >= small_n
    ),
    "count:person_names": lambda text, *, N: len(set(_NAME.findall(text))) >= N,
    # without punctuation, so that 1,000.5 is one number
    "count:numbers": lambda text, *, N: (
        len(re.findall(r"\d+", text.translate(_WITHOUT_PUNCTUATION))) == N
    ),
    "count:punctuation": _punctuation,
    "count:words_japanese": _words_japanese,
    "count:pronouns": _pronouns,
    "count:keywords_multiple": lambda text, *, keyword1, keyword2, keyword3, keyword4, keyword5: (
        [count_word(text, word) for word in (keyword1, keyword2, keyword3, keyword4, keyword5)]
        == [1, 2, 3, 5, 7]
    ),
    "ratio:sentence_type": lambda text: (e := _endings(text)).count(".") == 2 * e.count("?"),
    "ratio:sentence_balance": lambda text: (
        (e := _endings(text)).count(".") == e.count("?") == e.count("!") > 0
    ),
    "ratio:overlap": lambda text, *, reference_text, percentage: (
        bool(own := _trigrams(text))
        and abs(100 * len(own & _trigrams(reference_text)) / len(own) - percentage) <= 2
    ),
    "ratio:sentence_words": _sentence_words,
    "words:alphabet": _alphabet,
    "words:vowel": lambda text: (
        "\n" not in text.strip() and len(set("aeiou") & set(text.lower())) <= 3
    ),
    "words:consonants": lambda text: _all(
        re.search(r"[b-df-hj-np-tv-z]{2}", word) for word in _edge_words(text)
    ),
    "words:palindrome": lambda text: (
        sum(len(word) >= 5 and word == word[::-1] for word in _bare_words(text)) >= 10
    ),
    "words:prime_lengths": lambda text: _all(
        map(_is_prime, {len(word) for word in _bare_words(text)})
    ),
    "words:repeats": lambda text, *, small_n: (
        max(Counter(_bare_words(text)).values(), default=0) <= small_n
    ),
    "words:last_first": lambda text: (
        all(sentences := [_edge_words(each) for each in split_sentences(text)])
        and all(a[-1] == b[0] for a, b in pairwise(sentences))
    ),
    "words:paragraph_last_first": lambda text: _all(
        words[0] == words[-1] for line in _lines(text) if (words := _edge_words(line))
    ),
    "words:no_consecutive": lambda text: all(a[0] != b[0] for a, b in pairwise(_bare_words(text))),
    "words:keywords_specific_position": lambda text, *, keyword, n, m: (
        _nth(split_words(_nth(split_sentences(text), n)), m).lower() == keyword.strip().lower()
    ),
    "words:words_position": lambda text, *, keyword: (
        len(words := split_words(text.lower())) > 1
        and words[1] == words[-2] == keyword.strip().lower()
    ),
    "sentence:alliteration_increment": lambda text: (
        bool(counts := [_num_alliterative(sentence) for sentence in split_sentences(text)])
        and all(a < b for a, b in pairwise(counts))
    ),
    "sentence:keyword": lambda text, *, word, N: (
        count_word(_nth(split_sentences(text), N), word) > 0
    ),
    "sentence:increment": lambda text, *, small_n: (
        bool(counts := [len(_bare_words(sentence)) for sentence in split_sentences(text)])
        and all(b - a == small_n for a, b in pairwise(counts))
    ),
    "format:parentheses": _parentheses,
    "format:quotes": _quotes,
    "format:options": _options,
    "format:newline": lambda text: (
        0 < len((words := text.translate(_WITHOUT_PUNCTUATION)).split()) == len(_lines(words))
    ),
    "format:line_indent": lambda text: all(
        len(a) - len(a.lstrip(" ")) < len(b) - len(b.lstrip(" ")) for a, b in pairwise(_lines(text))
    ),
    "format:quote_unquote": _quote_unquote,
    "format:list": lambda text, *, sep: text.count(sep) >= 2,
    "format:thesis": _thesis,
    "format:sub-bullets": lambda text: all("-" in bullet for bullet in text.split("*")[1:]),
    "format:no_bullets_bullets": _no_bullets_bullets,
    "format:title_case": _title_case,
    "format:output_template": lambda text: all(
        label in text for label in ("My Answer:", "My Conclusion:", "Future Outlook:")
    ),
    "format:no_whitespace": lambda text: not any(map(str.isspace, text)),
    "custom:multiples": lambda text: re.findall(r"\d+", text) == [str(n) for n in range(14, 51, 7)],
    "custom:mcq_count_length": _mcq,
    "custom:reverse_newline": _reverse_newline,
    "custom:word_reverse": lambda text: "bald eagle" in " ".join(reversed(_bare_words(text))),
    "custom:character_reverse": lambda text: "bald eagle" in text.lower()[::-1],
    "custom:sentence_alphabet": lambda text: (
        [words[0][0] for each in split_sentences(text) if (words := _edge_words(each))]
        == list(string.ascii_lowercase)
    ),
    "custom:european_capitals_sort": lambda text: (
        ",".join(name for each in _ascii(text).split(",") if (name := each.strip())) == _CAPITALS
    ),
    "custom:csv_city": lambda text: len(_table(text, "ID Country City Year Count", ",")) == 8,
    "custom:csv_special_character": _csv_special_character,
    "custom:csv_quotes": lambda text: (
        len(rows := _table(text, "StudentID Subject Grade Semester Score", "\t")) == 4
        and all(_is_quoted(field) for row in rows for field in row)
    ),
    "custom:date_format_list": lambda text: all(map(_is_napoleonic, text.split(","))),
    "repeat:repeat_change": _repeat_change,
    "repeat:repeat_simple": lambda text: text.strip().lower() == _SENTENCE_TO_REPEAT,
    "repeat:repeat_span": lambda text, *, prompt_to_repeat, n_start, n_end: (
        text.lower().split()
        == prompt_to_repeat.lower().split()[_whole(n_start, least=0) : _whole(n_end, least=0)]
    ),
}
