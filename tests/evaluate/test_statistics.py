import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.evaluate.statistics import (
    Estimate,
    evaluation_statistics,
    mean_estimate,
    paired_difference,
    pass_at_k,
    proportion_estimate,
    student_t_quantile,
)

# ------------------------------------------------------------------------------- pass@k


@settings(max_examples=200)
@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=10), data=st.data())
def test_pass_at_k_is_the_share_of_all_subsets_with_a_pass(outcomes, data):
    k = data.draw(st.integers(1, len(outcomes)))
    subsets = list(itertools.combinations(outcomes, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_holds_for_large_counts():
    assert pass_at_k(1000, 1, 1) == pytest.approx(0.001)
    assert pass_at_k(1000, 1000, 1000) == 1.0
    assert pass_at_k(1000, 0, 1000) == 0.0
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - (100 * 99 * 98) / (200 * 199 * 198))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0)])
def test_pass_at_k_refuses_nonsense(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    # Two-sided 95 %, from the usual printed tables; 1 and 2 also in closed form.
    [
        (1, math.tan(math.pi * 0.475)),
        (2, 0.95 * math.sqrt(2 / (1 - 0.95**2))),
        (3, 3.182446),
        (5, 2.570582),
        (10, 2.228139),
        (30, 2.042272),
        (120, 1.979930),
        (100_000, 1.959988),
    ],
)
def test_student_t_quantiles(degrees, expected):
    assert student_t_quantile(0.975, degrees) == pytest.approx(expected, rel=2e-6)


def test_student_t_median_is_zero_and_the_tail_grows():
    assert student_t_quantile(0.5, 7) == 0.0
    assert student_t_quantile(0.995, 10) == pytest.approx(3.169273, rel=2e-6)
    with pytest.raises(ValueError):
        student_t_quantile(1.0, 3)
    with pytest.raises(ValueError):
        student_t_quantile(0.9, 0)


def test_one_sample_per_task_is_wilsons_interval_with_t():
    """With independent binary observations the clustering must change nothing but SE's n - 1."""
    values = np.array([1.0] * 30 + [0.0] * 70)
    found = proportion_estimate(values, 100)
    t, n, p = student_t_quantile(0.975, 99), 99, 0.3  # p(1-p)/SE^2 = n - 1 for binary values
    centre = (p + t * t / (2 * n)) / (1 + t * t / n)
    half = t / (1 + t * t / n) * math.sqrt(p * (1 - p) / n + t * t / (4 * n * n))
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half), rel=1e-12)


def test_copies_of_a_sample_add_no_information():
    once = {str(i): [float(i < 12)] for i in range(40)}
    copied = {task: values * 16 for task, values in once.items()}
    one, many = (evaluation_statistics(r).average for r in (once, copied))
    assert (one.value, one.low, one.high) == pytest.approx((many.value, many.low, many.high))


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_tasks_that_all_agree_count_once_each(reward):
    """The interval of Wilson at an end reaches t^2 / (n + t^2) from it, with n tasks."""
    found = evaluation_statistics({str(i): [reward] * 16 for i in range(20)}).average
    reach = student_t_quantile(0.975, 19) ** 2
    reach /= 20 + reach
    assert (found.low, found.high) == pytest.approx(
        (max(0, reward - reach), min(1, reward + reach))
    )


@settings(max_examples=200)
@given(
    counts=st.lists(st.integers(0, 4), min_size=2, max_size=30), confidence=st.floats(0.5, 0.999)
)
def test_a_proportions_interval_contains_it_and_stays_in_range(counts, confidence):
    values = np.array(counts) / 4
    estimate = proportion_estimate(values, 4 * len(values), confidence)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.high > estimate.low, "no evaluation is certain"
    wider = proportion_estimate(values, 4 * len(values), confidence + (1 - confidence) / 2)
    assert wider.low <= estimate.low and wider.high >= estimate.high


def test_mean_interval_by_hand():
    estimate = mean_estimate(np.array([1.0, 2.0, 6.0]))
    error = math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 2) / math.sqrt(3)
    assert estimate.standard_error == pytest.approx(error)
    assert estimate.low == pytest.approx(3 - 4.302653 * error, rel=1e-6)
    assert estimate.high == pytest.approx(3 + 4.302653 * error, rel=1e-6)


def coverage(concentration: float, mean: float, *, num_tasks: int, samples: int) -> tuple:
    """Share of simulated evaluations whose interval holds the true mean: clustered and naive."""
    generator = np.random.default_rng(0)
    clustered = naive = 0
    num_trials = 2000
    for _ in range(num_trials):
        p = generator.beta(mean * concentration, (1 - mean) * concentration, num_tasks)
        task_values = generator.binomial(samples, p) / samples
        found = proportion_estimate(task_values, num_tasks * samples)
        assert found.low is not None and found.high is not None
        clustered += found.low <= mean <= found.high
        value = task_values.mean()
        half = 1.96 * math.sqrt(value * (1 - value) / (num_tasks * samples))
        naive += value - half <= mean <= value + half
    return clustered / num_trials, naive / num_trials


@pytest.mark.parametrize(
    ("concentration", "mean", "num_tasks", "samples"),
    [(1.0, 0.5, 30, 8), (1.0, 0.15, 40, 8), (1.0, 0.9, 64, 4), (1000.0, 0.3, 30, 8)],
)
def test_the_interval_covers_the_truth_about_as_often_as_it_says(
    concentration, mean, num_tasks, samples
):
    clustered, naive = coverage(concentration, mean, num_tasks=num_tasks, samples=samples)
    assert 0.93 <= clustered <= 0.985
    if concentration == 1.0:
        assert naive < 0.85, "the simulated tasks do not differ enough to tell the two apart"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("concentration", "mean", "num_tasks", "highest"),
    # Where tasks are much alike, the intervals are wider than they need be.
    [(1.0, 0.5, 30, 0.965), (4.0, 0.6, 100, 0.97), (1.0, 0.9, 64, 0.97), (1000.0, 0.3, 30, 1.0)],
)
def test_intervals_of_k_samples_and_of_graded_rewards_cover_the_truth(
    concentration, mean, num_tasks, highest
):
    generator = np.random.default_rng(0)
    a, b = mean * concentration, (1 - mean) * concentration
    steps = np.arange(4)
    all_pass, none_passes = (np.prod((x + steps) / (a + b + steps)) for x in (a, b))
    truth = {"pass@4": 1 - none_passes, "pass^4": all_pass, "graded": 0.5 * mean + 0.25}
    covered = dict.fromkeys(truth, 0)
    for _ in range(2000):
        chances = generator.beta(a, b, (num_tasks, 1))
        passed = generator.random((num_tasks, 8)) < chances
        binary = evaluation_statistics(dict(enumerate(passed * 1.0)), ks=[4])
        graded = passed * 0.5 + generator.uniform(0, 0.5, passed.shape)
        found = {
            "pass@4": binary.pass_at[4],
            "pass^4": binary.all_of[4],
            "graded": mean_estimate(graded.mean(axis=1)),
        }
        for name, estimate in found.items():
            covered[name] += estimate.low <= truth[name] <= estimate.high
    print(covered)
    for name, count in covered.items():
        assert 0.93 <= count / 2000 <= (0.965 if name == "graded" else highest), name


def test_summary_of_a_small_evaluation():
    rewards = {"a": [1.0, 0.0, 1.0, 0.0], "b": [0.0] * 4, "c": [1.0] * 4}
    result = evaluation_statistics(rewards, ks=[1, 2, 4])
    assert (result.num_tasks, result.num_samples, result.samples_per_task) == (3, 12, 4)
    assert result.average.value == pytest.approx(0.5)
    assert [e.value for e in result.pass_at.values()] == pytest.approx(
        [0.5, (5 / 6 + 0 + 1) / 3, 2 / 3]
    )
    assert list(result.pass_at) == list(result.all_of) == [1, 2, 4]
    # Of the six pairs of a's samples one has two that pass.
    assert [e.value for e in result.all_of.values()] == pytest.approx(
        [0.5, (1 / 6 + 0 + 1) / 3, 1 / 3]
    )
    # Rewards of 0 and 1: pass@1 is avg@k, interval included.
    assert result.pass_at[1] == result.average


def test_tasks_count_once_however_many_samples_they_have():
    result = evaluation_statistics({"a": [1.0] * 9, "b": [0.0]})
    assert result.average.value == 0.5
    assert result.samples_per_task == 1


def test_graded_rewards_use_the_threshold_and_the_t_interval():
    rewards = {"a": [0.2, 0.8], "b": [1.5, -0.5], "c": [0.7, 0.7]}
    result = evaluation_statistics(rewards, success_threshold=0.7, ks=[1])
    assert result.pass_at[1].value == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert result.average == mean_estimate(np.array([0.5, 0.5, 0.7]))


def test_one_task_has_no_interval():
    result = evaluation_statistics({"a": [1.0, 0.0]}, ks=[1])
    assert result.average == Estimate(0.5, None, None, None)
    assert str(result.average) == "0.500"
    assert str(Estimate(0.5, 0.25, 0.75, 0.1)) == "0.500 [0.250, 0.750]"


@pytest.mark.parametrize(
    ("rewards", "ks", "message"),
    [
        ({}, [1], "no task"),
        ({"t7": []}, [1], "t7 has no sample"),
        ({"t7": [1.0, math.nan]}, [1], "t7 has a reward that is not finite"),
        ({"a": [1.0] * 4, "b": [1.0] * 3}, [4], "pass@4 needs at least 4"),
        ({"a": [1.0]}, [0], "k >= 1"),
    ],
)
def test_what_cannot_be_summarised_is_refused(rewards, ks, message):
    with pytest.raises(DataError, match=message):
        evaluation_statistics(rewards, ks=ks)


def test_a_paired_difference_by_hand():
    found = paired_difference([(0.0, 1.0), (0.5, 0.5), (0.25, 0.75)])
    assert (found.num_tasks, found.first, found.second) == (3, 0.25, 0.75)
    assert found.value == pytest.approx(0.5)
    # Of the four signs of 1 and 0.5, two have a sum as large as 1.5.
    assert found.p_value == 0.5
    assert (found.low, found.high) == (None, None), "1 of 8 sets of signs is as rare as any"
    six = paired_difference([(0.0, float(i)) for i in range(1, 7)])
    # Of 64 subsets one may lie outside at each end, and that is the empty one.
    assert (six.low, six.high, six.p_value) == (1.0, 6.0, 2 / 64)
    assert found.tasks_for(found.detectable) == 3
    # n >= 48 (t(n - 1) / t(2))^2, where the quantiles add up to 5.36 at 2 degrees and 3.00 at 15.
    assert found.tasks_for(-found.detectable / 4) == 16
    many = paired_difference([(0.0, float(i % 2)) for i in range(400)])
    assert many.tasks_for(many.detectable / 2) == pytest.approx(1600, abs=10)
    with pytest.raises(DataError, match="same in every task"):
        paired_difference([(0.5, 0.5), (1.0, 1.0)]).tasks_for(0.1)
    assert paired_difference([(0.5, 0.5), (1.0, 1.0)]).p_value == 1.0
    with pytest.raises(DataError, match="at least two tasks"):
        paired_difference([(0.0, 1.0)])


@pytest.mark.parametrize("num_tasks", [6, 9, 14, 15, 30, 50])
def test_the_interval_holds_zero_exactly_where_the_test_does_not_reject_it(num_tasks):
    generator = np.random.default_rng(num_tasks)
    rejected = 0
    for effect in (0.0, 0.3, 0.6) * 40:
        pairs = generator.integers(0, 3, (num_tasks, 2)) / 2 + np.array([0.0, effect])
        found = paired_difference([(a, b) for a, b in pairs], num_draws=999)
        assert found.low is not None and found.high is not None
        assert (found.p_value <= 0.05) == (not found.low <= 0 <= found.high), pairs
        rejected += found.p_value <= 0.05
    assert 0 < rejected < 120


def test_many_tasks_are_compared_in_seconds():
    generator = np.random.default_rng(0)
    pairs = generator.integers(0, 2, (14_000, 2)) + np.array([0.0, 0.02])
    started = time.process_time()
    found = paired_difference([(a, b) for a, b in pairs])
    assert time.process_time() - started < 20.0
    assert found.low is not None and found.high is not None
    error = 1.96 * math.sqrt(0.5 / 14_000)
    assert found.high - found.low == pytest.approx(2 * error, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("num_tasks", [12, 40])
def test_the_paired_test_errs_as_often_as_it_says_and_finds_what_it_says(num_tasks):
    generator = np.random.default_rng(num_tasks)

    def rejected(effect: float) -> tuple[float, float]:
        """Shares of simulated comparisons with p <= 0.05, and with the effect in the interval."""
        small = covered = 0
        for _ in range(2000):
            difficulty = generator.uniform(0, 1, num_tasks)
            first = generator.binomial(8, difficulty * 0.8) / 8
            second = generator.binomial(8, difficulty * 0.8 + effect) / 8
            found = paired_difference(list(zip(first, second, strict=True)), num_draws=2000)
            small += found.p_value <= 0.05
            covered += found.low <= effect <= found.high
        return small / 2000, covered / 2000

    size, coverage = rejected(0.0)
    # Of few tasks there are few signs to exchange: the test then errs less often than it says.
    assert 0.015 <= size <= 0.065 and 0.935 <= coverage <= 0.985
    power, coverage = rejected(0.15)
    print(size, power, coverage)
    assert power > (0.35 if num_tasks == 12 else 0.85) and 0.935 <= coverage <= 0.985
