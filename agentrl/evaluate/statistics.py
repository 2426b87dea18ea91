"""The claims of an evaluation: avg@k, pass@k, pass^k and their confidence intervals. No torch.

Tasks are drawn from a benchmark's population and samples are drawn for each task, so samples of one
task resemble each other and tasks are the independent units. Every interval here is clustered by
task: 64 tasks with 16 samples each are 64 observations of the benchmark, not 1024. Treating them as
1024 makes intervals up to four times too narrow, and "significant" differences out of noise.

Every figure is the mean over tasks of one number per task, and gets an interval for such a mean:

* Rewards of 0 and 1, pass@k and pass^k: the score interval (Wilson, 1927) with the effective size
  p(1 - p) / SE^2, where SE is the standard error over tasks, and Student's t quantile with
  num_tasks - 1 degrees of freedom (Dean and Pagano, 2015, "Evaluating confidence interval methods
  for binomial proportions in clustered surveys"; the truncation of the effective size follows Korn
  and Graubard, 1998). It stays within [0, 1], is not symmetric near the ends, and does not shrink
  to nothing when every task agrees, where a bootstrap over tasks and the normal interval do.
* Other rewards: mean +- t * SE over tasks (Miller, 2024, "Adding error bars to evals").

One task gives no interval: nothing in the data says how much tasks differ. With fewer than about
ten tasks all such intervals are rough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from agentrl.errors import DataError

CONFIDENCE = 0.95
"""Confidence of the two-sided intervals."""


@dataclass(slots=True, frozen=True)
class Estimate:
    """A mean over tasks with its confidence interval."""

    value: float
    """The mean."""
    low: float | None
    """Lower end of the interval; None with a single task."""
    high: float | None
    """Upper end."""
    standard_error: float | None
    """Over tasks; None with a single task."""

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(slots=True, frozen=True)
class EvalStatistics:
    """The result of `evaluation_statistics`."""

    num_tasks: int
    """Tasks with at least one sample that did not fail."""
    num_samples: int
    """Samples over all tasks."""
    samples_per_task: int
    """The k of avg@k: the smallest number of samples of any task."""
    confidence: float
    """Confidence of the intervals: 0.95 covers the true mean in 95 of 100 evaluations."""
    average: Estimate
    """avg@k: the mean reward of a task, averaged over tasks; every task counts once."""
    pass_at: dict[int, Estimate]
    """pass@k by k: the chance that at least one of k samples of a task passes."""
    all_of: dict[int, Estimate]
    """pass^k by k: the chance that all k samples of a task pass, which is its reliability."""


@dataclass(slots=True, frozen=True)
class PairedDifference:
    """The result of `paired_difference`."""

    num_tasks: int
    first: float
    """Mean over tasks of the first evaluation."""
    second: float
    value: float
    """Second less first."""
    low: float | None
    """Lower end of the interval of the difference: what the sign test of `p_value` does not reject;
    None with fewer than six tasks, of which no set of signs is rare enough."""
    high: float | None
    p_value: float
    """Two-sided, of the hypothesis that the two do not differ: how often the mean difference is at
    least as large when each task's difference has a random sign."""
    detectable: float
    """The smallest true difference that 80% of such evaluations would find at 5%; with fewer than
    eight tasks, fewer would."""

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:+.3f} (no interval: fewer than six tasks)"
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    def tasks_for(self, difference: float) -> int:
        """Returns how many such tasks, with as many samples each, are needed to find a difference
        in 80% of evaluations: the error shrinks with the root of their number, and so do the
        quantiles.

        Raises:
            DataError: no task differs between the two, so nothing is known of the error.
        """
        if self.detectable == 0:
            raise DataError("both evaluations are the same in every task: nothing says how noisy")
        of_one = self.num_tasks * (self.detectable / _power(self.num_tasks) / difference) ** 2
        needed = max(2, math.floor(of_one * _power(100_000) ** 2))  # with the normal's quantiles
        while needed < of_one * _power(needed) ** 2 * (1 - 1e-9):
            needed += 1
        return needed


def paired_difference(
    pairs: Sequence[tuple[float, float]], *, num_draws: int = 20_000
) -> PairedDifference:
    """Compares two evaluations of the same tasks, task by task.

    The tasks' own difficulty cancels, so the interval is narrower than those of the two averages
    suggest. The test exchanges the signs of the tasks' differences (Miller, 2024, section 3.2), and
    the interval holds the differences that it does not reject: a sum with some signs turned is at
    least the sum itself where the mean of those turned is at most 0, so the interval's ends are
    quantiles of means of random subsets (Hartigan, 1969, "Using subsample values as typical
    values"). Up to 14 tasks all subsets are tried, above that `num_draws` random ones.

    Args:
        pairs: the mean reward of each task in the first and the second evaluation.

    Raises:
        DataError: fewer than two tasks.
    """
    if len(pairs) < 2:
        raise DataError("a comparison needs at least two tasks that both evaluations have")
    values = np.array(pairs, np.float64)  # (tasks, 2)
    differences = values[:, 1] - values[:, 0]
    means = _subset_means(differences, num_draws)
    means[np.abs(means) <= 1e-9 * np.abs(differences).max()] = 0.0  # but for rounding
    num_subsets = len(means) + 1  # with the empty one, which belongs to every tail
    at_most, at_least = 1 + np.sum(means <= 0), 1 + np.sum(means >= 0)
    outside = math.floor((1 - CONFIDENCE) / 2 * num_subsets)
    ordered = np.sort(means)
    return PairedDifference(
        num_tasks=len(differences),
        first=float(values[:, 0].mean()),
        second=float(values[:, 1].mean()),
        value=float(differences.mean()),
        low=float(ordered[outside - 1]) if outside else None,
        high=float(ordered[-outside]) if outside else None,
        p_value=min(1.0, float(2 * min(at_most, at_least) / num_subsets)),
        detectable=_power(len(differences)) * _standard_error(differences),
    )


def _subset_means(differences: np.ndarray, num_draws: int) -> np.ndarray:
    """Returns the means of all subsets but the empty one, or of random ones. float64 [subsets]."""
    num_tasks = len(differences)
    if num_tasks <= 14:
        chosen = np.arange(1, 2**num_tasks)[:, None] >> np.arange(num_tasks) & 1
        return chosen @ differences / chosen.sum(1)
    generator, means = np.random.default_rng(0), []
    rows = max(1, 4_000_000 // num_tasks)  # a block of them takes 32 MB
    for start in range(0, num_draws, rows):
        shape = (min(rows, num_draws - start), -(-num_tasks // 8))
        bits = generator.integers(0, 256, shape, np.uint8)
        chosen = np.unpackbits(bits, axis=1, count=num_tasks).astype(np.float64)
        means.append(chosen @ differences / np.maximum(chosen.sum(1), 1))
    return np.concatenate(means)


def _power(num_tasks: int) -> float:
    """Returns by how many standard errors two evaluations have to differ for a 5% test to find it
    in 80% of cases."""
    quantiles = (student_t_quantile(p, num_tasks - 1) for p in (0.5 + CONFIDENCE / 2, 0.8))
    return sum(quantiles)


def evaluation_statistics(
    rewards: Mapping[str, Sequence[float]],
    *,
    success_threshold: float = 1.0,
    ks: Iterable[int] = (1,),
) -> EvalStatistics:
    """Summarises an evaluation.

    Args:
        rewards: task id -> rewards of its samples. Samples without a reward (an error of the
            grader) must be left out and reported beside the result.
        success_threshold: a sample passes if its reward is at least this.
        ks: the k of pass@k and pass^k; none may exceed the number of samples of any task.

    Raises:
        DataError: no tasks, a task without samples, a reward that is not finite, or a k larger than
            the number of samples of a task (leaving that task out would change the benchmark).
    """
    if not rewards:
        raise DataError("no task was evaluated: there is nothing to summarise")
    for task_id, values in rewards.items():
        if len(values) == 0:
            raise DataError(f"task {task_id} has no sample with a reward; leave it out and say so")
        if not all(math.isfinite(value) for value in values):
            raise DataError(f"task {task_id} has a reward that is not finite: {list(values)}")
    num_samples = [len(values) for values in rewards.values()]
    task_means = np.array([np.mean(values) for values in rewards.values()], np.float64)
    binary = all(value in (0, 1) for values in rewards.values() for value in values)
    num_passed = [
        sum(value >= success_threshold for value in values) for values in rewards.values()
    ]
    pass_estimates, all_estimates = {}, {}
    for k in sorted(set(ks)):
        if k < 1 or k > min(num_samples):
            raise DataError(
                f"pass@{k} needs at least {max(k, 1)} samples of every task (and k >= 1); the "
                f"smallest task has {min(num_samples)}"
            )
        counts = list(zip(num_samples, num_passed, strict=True))
        # A task with n samples says at most as much about pass@k as n // k separate tries of k.
        most = sum(n // k for n in num_samples)
        some = np.array([pass_at_k(n, c, k) for n, c in counts])
        every = np.array([1.0 - pass_at_k(n, n - c, k) for n, c in counts])  # none of k fails
        pass_estimates[k] = proportion_estimate(some, most)
        all_estimates[k] = proportion_estimate(every, most)
    return EvalStatistics(
        num_tasks=len(rewards),
        num_samples=sum(num_samples),
        samples_per_task=min(num_samples),
        confidence=CONFIDENCE,
        average=(
            proportion_estimate(task_means, sum(num_samples))
            if binary
            else mean_estimate(task_means)
        ),
        pass_at=pass_estimates,
        all_of=all_estimates,
    )


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimates, without bias, the chance that at least one of k samples passes, from n >= k
    samples of which c passed: 1 - C(n - c, k) / C(n, k) (Chen et al., 2021, equation 1).

    `1 - (1 - c/n)**k` would be biased, and the share of tasks solved in k tries is the special case
    n = k with more noise.
    """
    if not 0 <= num_passed <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"no pass@{k} from {num_passed} passed of {num_samples} samples")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def mean_estimate(task_values: np.ndarray) -> Estimate:
    """Computes the mean over tasks with Student's t interval. `task_values` is float64
    [num_tasks]."""
    value = float(np.mean(task_values))
    if len(task_values) < 2:
        return Estimate(value, None, None, None)
    standard_error = _standard_error(task_values)
    half = student_t_quantile(0.5 + CONFIDENCE / 2, len(task_values) - 1) * standard_error
    return Estimate(value, value - half, value + half, standard_error)


def proportion_estimate(
    task_values: np.ndarray, max_effective_size: int, confidence: float = CONFIDENCE
) -> Estimate:
    """Computes the mean over tasks of values in [0, 1] with the clustered score interval (module
    docstring).

    Args:
        task_values: float64 [num_tasks], the estimated proportion of each task.
        max_effective_size: the effective sample size is at most this, however alike the tasks
            happen to be: the number of samples, were they independent.
    """
    value = float(np.mean(task_values))
    num_tasks = len(task_values)
    if num_tasks < 2:
        return Estimate(value, None, None, None)
    standard_error = _standard_error(task_values)
    if value in (0.0, 1.0):
        # All tasks agree at an end. The samples within a task may be copies of each other for all
        # the data says, so each task counts once.
        size = float(num_tasks)
    elif standard_error > 0:
        size = min(value * (1 - value) / standard_error**2, float(max_effective_size))
    else:
        size = float(max_effective_size)
    quantile = student_t_quantile(0.5 + confidence / 2, num_tasks - 1)
    shrink = quantile**2 / size
    centre = (value + shrink / 2) / (1 + shrink)
    half = math.sqrt(shrink * value * (1 - value) + shrink**2 / 4) / (1 + shrink)
    low = 0.0 if value == 0.0 else max(0.0, centre - half)
    high = 1.0 if value == 1.0 else min(1.0, centre + half)
    return Estimate(value, low, high, standard_error)


@lru_cache(maxsize=256)
def student_t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Computes the upper quantile (probability >= 0.5) of Student's t, to about 6 digits.

    With t = sqrt(df) * tan(angle) the density becomes cos(angle)**(df - 1) on [0, pi/2), whose
    cumulative sum is inverted on a grid: no gamma function, no scipy.
    """
    if not 0.5 <= probability < 1 or degrees_of_freedom < 1:
        raise ValueError(f"no quantile at {probability} with {degrees_of_freedom} degrees")
    # Nearly all mass lies within some standard deviations of 0, and the angle's is 1/sqrt(df).
    widest = min(math.pi / 2, 40 / math.sqrt(degrees_of_freedom))
    angles = np.linspace(0.0, widest, 200_001)
    density = np.cos(angles) ** (degrees_of_freedom - 1)
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp(2 * probability - 1, cumulative / cumulative[-1], angles)
    return math.sqrt(degrees_of_freedom) * math.tan(float(angle))


def _standard_error(task_values: np.ndarray) -> float:
    return float(np.std(task_values, ddof=1) / math.sqrt(len(task_values)))
