"""A parse that another thread interrupts is tried again, wherever a policy's text is parsed."""

import ast
from contextlib import contextmanager

import pytest

from agentrl.python_source import MAX_ATTEMPTS, parse_python
from agentrl.rollout.dialects.calls import pythonic_calls
from agentrl_math.calculator import calculate
from agentrl_rewards.code import read_tests
from agentrl_swebench.alter import python_tests


@contextmanager
def interrupted(times):
    """Lets the next calls of `ast.parse` fail as CPython 3.11's do; all of them must be made."""
    parse, left = ast.parse, [times]

    def fails(*args, **keywords):
        if left[0]:
            left[0] -= 1
            raise SystemError("AST constructor recursion depth mismatch (before=30, after=32)")
        return parse(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "parse", fails)
        yield
    assert not left[0]


@pytest.mark.parametrize(
    "read, text",
    [
        (calculate, "17+25"),
        (lambda text: pythonic_calls(text, []), "[add(a=1, b=2)]"),
        (read_tests, "assert f(1) == 1"),
        (lambda text: list(python_tests(text)), "def test_one():\n    assert True\n"),
    ],
)
def test_a_parse_that_another_thread_interrupts_is_tried_again(read, text):
    undisturbed = read(text)
    with interrupted(2):
        again = read(text)
    assert again == undisturbed


def test_an_error_that_stays_is_raised():
    with interrupted(MAX_ATTEMPTS), pytest.raises(SystemError):
        parse_python("1")
