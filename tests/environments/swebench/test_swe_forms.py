"""Designs: the forms of a test in a control run."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl_swebench.alter import Edit
from agentrl_swebench.forms import altered_forms, make_design, num_forms, without

EDITS = st.dictionaries(st.integers(0, 9), st.integers(1, 16), min_size=1, max_size=6).map(
    lambda sizes: [
        Edit(10 * at, 10 * at + 1, str(k)) for at, number in sizes.items() for k in range(number)
    ]
)
WANTED = st.sampled_from([2, 4, 8, 16])


@given(EDITS, WANTED)
def test_no_form_stands_out_and_there_are_as_many_as_wanted_if_there_can_be(edits, wanted):
    """A patch that counts the results of a value learns nothing."""
    design = make_design(edits, wanted)
    forms = [(), *altered_forms(design)]
    assert num_forms(design) == len(forms) == len({*forms})
    for at in {edit.start for edit in edits}:
        results = [next((edit.text for edit in form if edit.start == at), "") for form in forms]
        assert len({results.count(text) for text in results}) == 1
    possible = num_forms(make_design(edits, 1 << 30))
    assert min(wanted, possible) <= len(forms) < 2 * wanted


def test_values_come_before_results_and_first_ones_first():
    a, b, c = ([Edit(at, at + 1, str(k)) for k in range(9)] for at in (30, 10, 20))
    assert make_design([a[0], b[0], c[0], a[1], b[1], c[1]], 4) == [[a[0]], [b[0]]]
    assert make_design([a[0], b[0], c[0], a[1], b[1], c[1]], 9) == [[a[0], a[1]], [b[0]], [c[0]]]
    assert make_design(a, 8) == [a[:7]]
    assert make_design([], 8) == []


@given(EDITS, WANTED, st.randoms())
def test_a_design_without_forms_keeps_every_other_form_that_it_can(edits, wanted, dice):
    design = make_design(edits, wanted)
    forms = altered_forms(design)
    wrong = {form for form in forms if dice.random() < 0.2}
    left = without(design, wrong)
    assert not wrong & {*altered_forms(left)}
    assert {*altered_forms(left)} <= {*forms} and all(left)
    assert without(design, set()) == design


def test_a_change_that_is_in_most_wrong_forms_goes():
    """Two changes that make a true statement again are not both used."""
    one, two, three = (Edit(at, at + 1, "x") for at in (0, 10, 20))
    left = without([[one], [two], [three]], {(one, two), (one, two, three)})
    assert left in ([[one], [three]], [[two], [three]])
    assert without([[one], [two]], {(one,), (two,), (one, two)}) == []
