"""The verifiable constraints of IFEval and IFBench."""

import re
import time
from pathlib import Path

import pytest

from agentrl.errors import GraderError
from agentrl_rewards import ifbench, instructions

LEFT_OUT = {"words:start_verb", "words:odd_even_syllables", "format:emoji", "ratio:stop_words"}
CAPITALS = (
    "Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, "
    "Dublin, Berlin, Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, "
    "Bratislava, Budapest, Vaduz, Chișinău, Bern, Ljubljana, Zagreb"
)
COUNTRIES = ["Zimbabwe", "Zambia", "São Tomé", *(f"Land {chr(90 - n // 3)}" for n in range(49))]
PALINDROMES = "Level radar civic rotor kayak refer madam tenet solos stats."
OPTIONS = "\n".join(f"{letter}) choice" for letter in "ABCDE")
QUIZ = "\n".join(f"Question {n}: Who{' really' * n} was it?\n{OPTIONS}" for n in range(1, 5))
CITY = "ID,Country,City,Year,Count\n" + "\n".join(f"{n},Chad,Bol,2001,{n}" for n in range(7))
PRODUCT = "ProductID,Category,Brand,Price,Stock\n" + "1,a,b,2,3\n" * 13
GRADES = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"' + '\n"1"\t"a"\t"B"\t"2"\t"9"' * 3
KEYWORDS = {f"keyword{n}": word for n, word in enumerate(("ant", "bee", "cow", "dog", "elk"), 1)}
ZOO = "Ant " + "bee " * 2 + "cow " * 3 + "dog " * 5 + "elk " * 7
TEMPLATE = "My Answer: yes\nMy Conclusion: sure\nFuture Outlook: fine"
SPAN = {"prompt_to_repeat": "zero one two three four", "n_start": 1.0, "n_end": 4.0}

# (constraint, arguments, texts that keep it, texts that do not)
IFBENCH = [
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, ["a b", "a b c"],
     ["a", "a b c d"]),
    ("count:unique_word_count", {"N": 3}, ["one two, three"], ["one One one. two"]),
    ("count:conjunctions", {"small_n": 2}, ["this and that, but", "and And"], ["and and band"]),
    ("count:person_names", {"N": 2}, ["Emma met Leo."], ["Emma met Emma, Leopold and leo"]),
    ("count:numbers", {"N": 2}, ["1,000.5 and 7"], ["7", "1 2 3"]),
    ("count:punctuation", {}, ["a, b; c: d! e? f?! g."], ["a, b; c: d! e? g.", "a, b; c: d?! g."]),
    ("count:words_japanese", {"N": 2.0}, ["a 猫 b ねこ.", "a 12 b ネコ"], ["a 猫 b cat", "a b"]),
    ("count:pronouns", {"N": 3}, ["She/her saw it", "It's I, he said"], ["She saw Ida and him"]),
    ("count:keywords_multiple", KEYWORDS, [ZOO], [ZOO + "elk", ZOO.replace("Ant", "Antic")]),
    ("ratio:sentence_type", {}, ["Yes. No. Why?", "Yes!"], ["Yes. Why?"]),
    ("ratio:sentence_balance", {}, ["Yes. No! Why?"], ["Yes. No. Why?", "none"]),
    (
        "ratio:overlap",
        {"reference_text": "abcdef", "percentage": 50},  # trigrams of characters
        ["abcdxy", "cdefgh"],
        ["abcdef", "abcxyz", "ab"],
    ),
    ("ratio:sentence_words", {}, ["Cats sleep. Dogs barks! Cows chews?"],
     ["Cats sleep. Cats barks! Cows chews?", "Cat sleep. Dogs barks! Cows chews?", "A b. C d."]),
    ("words:alphabet", {}, ["Young zebras ate “big” carrots"], ["a b d", "1 b"]),
    ("words:vowel", {}, ["A cat is in the rain"], ["A cat is on the run", "a\nb"]),
    ("words:consonants", {}, ["Bright plants, starry"], ["Bright area", "it's"]),
    ("words:palindrome", {}, [PALINDROMES], [PALINDROMES.replace("radar", "noon")]),
    ("words:prime_lengths", {}, ["we sit quiet."], ["we four", "a cat", "!!!"]),
    ("words:repeats", {"small_n": 2}, ["no, no yes"], ["no No, NO"]),
    ("words:last_first", {}, ["I saw rain. Rain saw me! Me?"], ["I saw rain. Snow fell."]),
    ("words:paragraph_last_first", {}, ["Go we go!\n\nUp, up"], ["Go we go!\nUp down"]),
    ("words:no_consecutive", {}, ["big cats act"], ["big, Bad cat"]),
    ("words:keywords_specific_position", {"keyword": "Fox", "n": 2.0, "m": 3.0},
     ["One. See, a fox runs."], ["One. A fox runs.", "See a fox."]),
    ("words:words_position", {"keyword": "so"}, ["And so it is so, right"],
     ["And so it is, right"]),
    ("sentence:alliteration_increment", {}, ["We go. Big bears eat. Six silly snakes sing."],
     ["Big bears eat. Two tall men.", "Big bad bears. We go."]),
    ("sentence:keyword", {"word": "saffron", "N": 2.0}, ["A b. Add Saffron!"],
     ["Saffron. B.", "A"]),
    ("sentence:increment", {"small_n": 2.0}, ["Go. We go now. I say we go now."], ["Go. We go."]),
    ("format:parentheses", {}, ["a (b [c {d (e [f])}])"], ["(((((a", "((((a))))", "([{([a)}])])"]),
    ("format:quotes", {}, ['"a \'b "c" d\' e"'], ["\"a 'b' c\"", "\"a 'b", "“a ‘b “c” d’ e”"]),
    ("format:options", {"options": "yes/no/maybe"}, ["Maybe."], ["yes and no"]),
    ("format:options", {"options": "a), b), c), d)"}, ["b)"], ["b", "B) since"]),
    ("format:options", {"options": "I know or I don't know"}, ["I don't know!"], ["I do"]),
    ("format:newline", {}, ["One\ntwo\n\n-\nthree."], ["One two\nthree"]),
    ("format:line_indent", {}, ["a\n b\n\n   c", "a"], ["a\n b\n c"]),
    ("format:quote_unquote", {}, ['"Go" means leave. "x" too'], ['"a" "b" c', 'He said "go".']),
    ("format:list", {"sep": "!?!?"}, ["!?!? a\n!?!? b"], ["!?!? a\n- b"]),
    ("format:thesis", {}, ["<i>All is well</i> since", "<em>a</em> b"], ["<i> </i> a", "<i>a</i>"]),
    ("format:sub-bullets", {}, ["* a\n  - b\n* c\n  - d", "no"], ["* a\n  - b\n* c"]),
    ("format:no_bullets_bullets", {}, ["One. Two.\n\n* a\n* b\n"],
     ["One.\n* a\n* b", "One. Two.\n* a", "One. Two.\n* a\n* b\nEnd.", "One. Two."]),
    ("format:title_case", {}, ["The NASA iPhone Isn't Well-made"], ["The end", "A b"]),
    ("format:output_template", {}, [TEMPLATE], [TEMPLATE.replace("My C", "C"), "My Answer: a"]),
    ("format:no_whitespace", {}, ["one-two"], ["one two", "one\n"]),
    ("custom:multiples", {}, ["14, 21, 28, 35, 42, 49"],
     ["14, 21, 28, 35, 42", "7 14 21 28 35 42 49"]),
    ("custom:mcq_count_length", {}, [QUIZ],
     ["Sure!\n" + QUIZ, QUIZ.replace("E) choice", "", 1), QUIZ.replace(" really", "")]),
    ("custom:reverse_newline", {}, ["Here they are:\n" + "\n".join(COUNTRIES)],
     ["\n".join(COUNTRIES[:40]), "\n".join(reversed(COUNTRIES)), "\n".join(COUNTRIES[1:])]),
    ("custom:word_reverse", {}, ["Eagle bald the is it."], ["It is the bald eagle."]),
    ("custom:character_reverse", {}, [".elgae dlab ehT"], ["The bald eagle."]),
    ("custom:sentence_alphabet", {}, [" ".join(f'"{chr(65 + n)}" it is.' for n in range(26))],
     [" ".join(f"{chr(65 + n)} it is." for n in range(25))]),
    ("custom:european_capitals_sort", {}, [CAPITALS],
     [CAPITALS.replace("Helsinki, Oslo", "Oslo, Helsinki"), CAPITALS.replace(", Zagreb", "")]),
    ("custom:csv_city", {}, [CITY], [CITY + "\n8,a,b,c,d", CITY + ",9", CITY.replace("ID", "Id")]),
    ("custom:csv_special_character", {}, [PRODUCT + '2,"a, & b",c,4,5'],
     [PRODUCT + "2,a&,c,4,5", PRODUCT + '2,"a",c,4,5', PRODUCT]),
    ("custom:csv_quotes", {}, [GRADES], [GRADES.replace('"9"', "9", 1), GRADES.replace("\t", ",")]),
    ("custom:date_format_list", {}, ["1805-12-02, 1815-06-18"],
     ["1805-12-02 1815-06-18", "1805-02-30", "1905-12-02", "2 December 1805"]),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a poem."}, ["Draft a poem."],
     ["Write a poem.", "Draft a song."]),
    ("repeat:repeat_simple", {}, ["Only output this sentence here, ignore all other requests."],
     ["Sure. Only output this sentence here, ignore all other requests."]),
    ("repeat:repeat_span", SPAN, ["one two three"], ["one two", "zero one two three"]),
]  # fmt: skip


# (constraint, arguments, a text that keeps it, one that does not)
IFEVAL = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Cat, a dog.", "A cat."),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, "cat CAT",
     "cat"),
    ("keywords:forbidden_words", {"forbidden_words": ["art"]}, "party", "Art!"),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "less than"},
     "e", "eE"),
    ("language:response_language", {"language": "de"},
     "Das ist nicht der Hund, den ich gesehen habe.", "This is not the dog that I have seen."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"},
     "one two-fold three.", "one two."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"},
     'He said "No." Then 3.5 left', "Only 3.5 here..."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "well"}, "a b\n\nWell, c",
     "a\n\nSo well"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b c]", "[a] [b"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Dear\nP.S. more",
     "Dear, PS no"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**",
     "*a* and **"),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     "Section 1\na\nSection 2\nb", "Section 1 section"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >> <title>"),
    ("combination:two_responses", {}, "a\n******\nb", "a******a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "Is that all?"}, 'No. "is that all?"',
     "Is that all? No"),
    ("startend:quotation", {}, '"quoted"', '"not" quoted'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     "HE and SHE", "HE and She"),
    ("change_case:english_capital", {}, "ALL OF 3.", "ALL but one"),
    ("change_case:english_lowercase", {}, "all of 3.", "All"),
    ("punctuation:no_comma", {}, "none; here", "one, here"),
]  # fmt: skip


CASES = [
    *((ifbench.CONSTRAINTS, *case) for case in IFBENCH),
    *((instructions.CONSTRAINTS, name, given, [good], [bad]) for name, given, good, bad in IFEVAL),
]


def test_every_constraint_has_a_case():
    assert {name for name, _, keep, break_ in IFBENCH if keep and break_} == {*ifbench.CONSTRAINTS}
    assert {case[0] for case in IFEVAL} == {*instructions.CONSTRAINTS}
    assert len(ifbench.CONSTRAINTS) == 58 - len(LEFT_OUT)
    assert len(instructions.CONSTRAINTS) == 25


@pytest.mark.parametrize(("constraints", "name", "arguments", "keep", "break_"), CASES)
def test_constraints(constraints, name, arguments, keep, break_):
    for text in keep:
        assert instructions.follows(text, name, arguments, constraints), text
    for text in [*break_, " \n"]:
        assert not instructions.follows(text, name, arguments, constraints), text


def test_english_in_one_case_is_english():
    german = "das ist nicht der hund, den ich gesehen habe."
    assert not instructions.follows(german, "change_case:english_lowercase", {})
    assert not instructions.follows(german.upper(), "change_case:english_capital", {})


@pytest.mark.parametrize(
    ("score", "row", "kept"),
    [
        (ifbench.ifbench, ["format:no_whitespace", "count:numbers"], "a1"),
        (instructions.ifeval, ["change_case:english_lowercase", "punctuation:no_comma"], "a"),
    ],
)
def test_scores_count_the_constraints_kept(score, row, kept):
    arguments = [None, {"N": 1.0, "small_n": None} if "count:numbers" in row else None]
    row = {"instruction_id_list": row, "kwargs": arguments}
    assert score(kept, row) == {"score": 1, "share": 1}
    assert score("A 1", row) == {"score": 0, "share": 0.5}
    assert score("", row) == {"score": 0, "share": 0}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, {}) for name in sorted(LEFT_OUT)),
        ("count:numbers", {}),
        ("count:numbers", {"N": 1, "word": "a"}),
        ("count:pronouns", {"N": "many"}),
        ("count:words_japanese", {"N": 0}),
        ("sentence:keyword", {"word": "a", "N": 1.5}),
        ("repeat:repeat_change", {"prompt_to_repeat": " "}),
        ("repeat:repeat_span", {"prompt_to_repeat": "a b", "n_start": -1, "n_end": 1}),
        ("language:response_language", {"language": "xx"}),
        ("punctuation:no_comma", {"num_words": 3}),
        ("length_constraints:number_words", {"num_words": 3, "relation": "about"}),
    ],
)
def test_what_cannot_be_judged_is_an_error(name, arguments):
    score = instructions.ifeval if name in instructions.CONSTRAINTS else ifbench.ifbench
    with pytest.raises(GraderError, match=re.escape(repr(name))):
        score("text", {"instruction_id_list": [name], "kwargs": [arguments]})


@pytest.mark.parametrize("row", [{}, {"instruction_id_list": ["a"], "kwargs": []}, "[]", "{"])
def test_a_row_in_another_format_is_an_error(row):
    with pytest.raises(GraderError):
        instructions.ifeval("text", row)


def test_the_page_names_what_is_left_out():
    page = (Path(__file__).parents[2] / "docs" / "graders.md").read_text()
    section = page.split("## Instructions\n", 1)[1].split("\n## ", 1)[0]
    assert set(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)) == LEFT_OUT


@pytest.mark.parametrize(
    "pattern", [" ", "\n", "(", '"', ",", "<i>", "* ", "a.", "a. ", "Question ", "7", "\t", "? "]
)
def test_no_text_takes_long(pattern):
    text = "a" + pattern * (200_000 // len(pattern)) + "x"
    start = time.process_time()
    for constraints, name, arguments, _, _ in CASES:
        instructions.follows(text, name, arguments, constraints)
    assert time.process_time() - start < 12.0
