"""Extraction, exact and symbolic equivalence, refusals: what scores 1 and what must not."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from labelled import judge, read_pairs

from agentrl.errors import DataError, GraderError
from agentrl_rewards.math import MAX_ANSWER_CHARS, extract_answer, grade, math_reward, refusal
from agentrl_rewards.recipes import gsm8k_reference, gsm8k_reward

DATA = Path(os.environ.get("AGENTRL_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 18", "18"),
        ("#### 18\nthat is all", "18"),
        (r"thus \boxed{18}.", "18"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed 7 follows", "7"),
        (r"\fbox{7}", "7"),
        ("<answer> 18 </answer>", "18"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>185\\</answer>", "185\\"),
        # the marker that ends last wins, whatever its kind
        (r"#### 1" + "\n" + r"\boxed{2}", "2"),
        (r"\boxed{1}" + "\n#### 2", "2"),
        ("<answer>1</answer> \\boxed{2} <answer>3</answer>", "3"),
        ("#### 1 #### 2", "2"),
        # boxes of one list are one answer
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"$\boxed{k = 45} \quad \text{and} \quad \boxed{n = 2}$", "k = 45, n = 2"),
        (r"\(y_1 = \boxed{3x}\) and \(y_2 = \boxed{4x}\)", "3x, 4x"),
        (r"\boxed{1} papers and \boxed{2} bins", "1, 2"),
        (r"\boxed{5}, \boxed{5}", "5"),
        (r"\boxed{1} \boxed{2}", "1, 2"),
        ("$\\boxed{1}$\n$\\boxed{2}$", "1, 2"),
        (r"\boxed{1}\boxed{}", None),
        (r"\boxed{4}. So it is \boxed{5}", "5"),
        (r"\boxed{4} and hence \boxed{5}", "5"),
        # markers inside the winner are opened
        (r"#### \boxed{5}.", "5"),
        (r"<answer>#### 5</answer>", "5"),
        (r"<answer>\boxed{\boxed{5}}</answer>", "5"),
        # a heading is no marker where another one is
        ("\\boxed{7}\n#### Verification\n7 is prime", "7"),
        ("#### 7\n#### Step 3: check", "7"),
        ("\\boxed{7}\n#### **Check**", "7"),
        ("#### Tuesday", "Tuesday"),
        ("\\boxed{7}\n#### x = 8", "x = 8"),
        # reasoning holds no final answer
        ("<think>#### 3</think>#### 4", "4"),
        ("#### 3</think>\\boxed{4}", "4"),
        ("<think>#### 3</think>", None),
        ("<think>maybe \\boxed{3}", None),
        # no marker, one never closed, an empty one
        ("the answer is 18", None),
        (r"\boxed{18", None),
        ("<answer>18", None),
        ("#### 18\n####", None),
        (r"\boxed{18} \boxed{}", None),
        ("##### 18", None),
        ("", None),
    ],
)
def test_extraction(text, answer):
    assert extract_answer(text) == answer


@given(st.text(alphabet=st.sampled_from(list("#<>/answerboxed\\{} 1\n")), max_size=60))
def test_extraction_returns_a_part_of_the_text(text):
    answer = extract_answer(text)
    assert answer is None or all(part in text for part in answer.split(", "))


@pytest.mark.parametrize(
    "piece", ["x", "\\boxed{", "<answer>", "#### ", "{", "\\boxed ", "}", "\\", "<think>"]
)
def test_extraction_of_a_megabyte_is_linear(piece):
    text = piece * (1_000_000 // len(piece))
    started = time.process_time()
    extract_answer(text)
    assert time.process_time() - started < 2.5


EXAMPLES = read_pairs("examples")


@pytest.mark.parametrize("pair", EXAMPLES, ids=lambda pair: f"{pair.kind}: {pair.answer[:20]}")
def test_examples(pair):
    equivalence = "numeric" if pair.kind == "numeric" else "symbolic"
    result = grade(f"<answer>{pair.answer}</answer>", pair.reference, equivalence=equivalence)
    assert result.score == pair.right
    if pair.kind in ("numeric", "symbolic"):
        assert (result.method == "symbolic") is (pair.kind == "symbolic")
    else:  # and the reference itself would have scored
        assert math_reward(f"\\boxed{{{pair.reference}}}", pair.reference) == 1.0


def test_the_question_is_no_answer_where_a_literal_is_asked_for():
    assert math_reward("#### 347*28", "9716", equivalence="literal") == 0.0
    assert math_reward("#### 12/4", "3", equivalence="literal") == 0.0
    assert math_reward("#### 12/4", "3", equivalence="numeric") == 1.0
    assert math_reward("#### 9,716.", "9716", equivalence="literal") == 1.0
    assert math_reward("#### 347*28", "9716", equivalence="numeric") == 0.0


def test_a_marker_may_be_optional():
    assert math_reward("9716", "9716", require_marker=False) == 1.0
    assert math_reward("<think>9716</think> 9715", "9716", require_marker=False) == 0.0
    # a marker still wins when there is one, even an empty one
    assert math_reward("9716 #### 9715", "9716", require_marker=False) == 0.0
    assert grade("9716\n####", "9716", require_marker=False).method == "no_answer"
    assert grade("  ", "9716", require_marker=False).method == "no_answer"


def test_grade_says_how_it_came_about():
    assert grade("#### 18 ducks", "18").method == "exact"
    assert grade("#### 18 ducks", "18").extracted == "18 ducks"
    assert grade("#### yes", "Yes").method == "text"
    assert grade("#### 9^{9^{9}}", "18").method == "refused"
    assert grade("18", "18").method == "no_answer"
    long = grade("#### " + "x" * 5000, "18")
    assert long.method == "refused" and long.extracted == "x" * MAX_ANSWER_CHARS


@pytest.mark.parametrize("reference", ["", "  ", "x" * 3000])
def test_an_unusable_reference_is_an_error_not_a_wrong_answer(reference):
    with pytest.raises(GraderError):
        grade("#### 5", reference)


@given(st.fractions(min_value=-(10**30), max_value=10**30, max_denominator=10**12))
def test_every_fraction_reads_back(value):
    text = f"#### {value.numerator}/{value.denominator}"
    assert math_reward(text, f"{value.numerator * 3}/{value.denominator * 3}") == 1.0


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20))
def test_every_decimal_reads_back_with_separators_and_units(value):
    plain = f"{value:f}"
    for text in (f"{value:,f}", f"${plain}", f"{plain} apples", f"${value:,f}$"):
        assert grade(f"#### {text}", plain, equivalence="numeric").score == 1.0, text


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_different_integers_are_never_equal(answer, reference):
    assert math_reward(f"#### {answer}", str(reference)) == float(answer == reference)


@given(st.text(max_size=40))
def test_no_text_breaks_the_exact_path(text):
    result = grade(text, "18", equivalence="numeric", require_marker=False)
    assert result.score in (0.0, 1.0)
    refusal(text)


@pytest.mark.parametrize("answer", ["e^{x^2}", "x^{2n}", "10^{40}", "2^{3}3^{4}5^{6}", "f(x)=x^9"])
def test_ordinary_powers_are_not_refused(answer):
    assert refusal(answer) is None


def test_gsm8k_reference_and_reward():
    answer = "She sells 9 for <<9*2=18>>18.\n#### 1,018"
    assert gsm8k_reference(answer) == "1,018"
    assert gsm8k_reward("... #### 1018", answer) == 1.0
    assert gsm8k_reward("... #### 18", answer) == 0.0
    assert gsm8k_reward("1018", answer, require_marker=False) == 1.0
    with pytest.raises(DataError):
        gsm8k_reference("no marker")


@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.slow), "test"])
def test_every_gsm8k_gold_solution_scores_one(split):
    path = DATA / "gsm8k" / f"{split}.jsonl"
    if not path.is_file():
        pytest.skip(f"GSM8K is not at {path}; set AGENTRL_DATA to the folder that holds gsm8k/")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == {"train": 7473, "test": 1319}[split]
    for row in rows:
        reference = gsm8k_reference(row["answer"])
        assert gsm8k_reward(row["answer"], row["answer"]) == 1.0
        assert math_reward(row["answer"], row["answer"]) == 1.0
        assert grade(f"\\boxed{{{reference}}}", reference).method == "exact"
        value = int(reference.replace(",", ""))
        corrupted = {value + 1, value - 1, -value, value * 10, value * 1000, int(f"{value}5")}
        for wrong in corrupted - {value}:
            assert gsm8k_reward(f"#### {wrong}", row["answer"]) == 0.0
            assert gsm8k_reward(f"#### {wrong:,}", row["answer"]) == 0.0


def test_the_text_is_bounded_before_it_is_read():
    for piece in ("{", "\\boxed{", "}", "x"):
        text = "#### 18\n" + piece * (10_000_000 // len(piece))
        started = time.process_time()
        assert math_reward(text, "18") == 0.0
        assert time.process_time() - started < 2
    assert math_reward("x" * 10_000_000 + "#### 18", "18") == 1.0


FORMS = read_pairs("development")[:60] + read_pairs("forms")[::3]


@pytest.mark.parametrize("pair", FORMS, ids=lambda pair: pair.kind)
def test_answers_of_the_development_tables(pair):
    assert math_reward(f"\\boxed{{{pair.answer}}}", pair.reference, deadline_s=20.0) == pair.right


def test_a_comparison_that_raises_gives_no_reward_unless_the_answer_is_at_fault():
    with pytest.raises(GraderError):
        grade("#### 7", r"\frac{1}{0}")
    for answer in (r"\frac{1}{0}", r"\frac{0}{0}", r"\begin{pmatrix}1&2\\3\end{pmatrix}", "x^{"):
        assert grade(f"<answer>{answer}</answer>", r"\sqrt{5}").score == 0.0
    # the two are not of one kind
    assert grade(r"\boxed{\{1, 2\}}", r"\frac{1}{0}").score == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("table", ["heldout", "forms", "forms_heldout", "fresh"])
def test_precision_and_recall(table):
    precision, recall, errors = judge(read_pairs(table))
    assert precision == 1.0 and recall >= 0.985, errors
