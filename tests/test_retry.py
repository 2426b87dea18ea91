import time

import pytest

from agentrl.retry import retry


class Busy(Exception):
    pass


def flaky(num_failures, error=Busy):
    calls = []

    async def attempt(remaining_s):
        calls.append(remaining_s)
        if len(calls) <= num_failures:
            raise error(f"attempt {len(calls)}")
        return "done"

    return attempt, calls


def busy_only(error):
    return 0.0 if isinstance(error, Busy) else None


async def test_what_failed_is_called_again_with_less_time_left():
    attempt, calls = flaky(3)
    done = await retry(attempt, timeout_s=5.0, retry_after_s=busy_only, first_pause_s=0.001)
    assert done == "done" and len(calls) == 4
    assert calls == sorted(calls, reverse=True)


@pytest.mark.parametrize(
    ("error", "options", "num_calls"),
    [
        (ValueError, {"timeout_s": 5.0, "retry_after_s": busy_only}, 1),  # final, raised at once
        (Busy, {"timeout_s": 1.0, "retry_after_s": lambda error: 60.0}, 1),  # longer than is left
        (Busy, {"retry_after_s": busy_only, "first_pause_s": 0.001, "max_attempts": 3}, 3),
    ],
)
async def test_the_last_error_is_raised_after_so_many_calls(error, options, num_calls):
    attempt, calls = flaky(10**6, error)
    with pytest.raises(error, match=f"attempt {num_calls}"):
        await retry(attempt, **options)
    assert len(calls) == num_calls


async def test_the_last_error_is_raised_when_the_next_pause_would_pass_the_deadline():
    attempt, calls = flaky(10**6)
    started = time.monotonic()
    with pytest.raises(Busy, match=r"attempt \d+"):
        await retry(attempt, timeout_s=0.05, retry_after_s=busy_only, first_pause_s=0.01)
    assert len(calls) >= 2 and time.monotonic() - started < 2.0


async def test_no_pause_is_shorter_than_was_asked_for(monkeypatch):
    monkeypatch.setattr("agentrl.retry.random.uniform", lambda low, high: low)
    attempt, _ = flaky(1)
    started = time.monotonic()
    await retry(attempt, retry_after_s=lambda error: 0.1, first_pause_s=0.001)
    assert time.monotonic() - started >= 0.1
