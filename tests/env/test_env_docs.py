"""The code of the pages on environments runs, and every error has a row."""

import re
from pathlib import Path

import pytest

from agentrl.env import make
from agentrl.env.protocol import PROBLEMS

DOCS = Path(__file__).parents[2] / "docs"
WIRE = (DOCS / "wire.md").read_text()
TEXT = (DOCS / "environments.md").read_text() + WIRE
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def names():
    names = {"__name__": "environments_of_the_docs"}
    for block in BLOCKS:
        exec(compile(block, "docs/environments.md", "exec"), names)
    return names


def test_hello_world_is_ten_lines(names):
    body = BLOCKS[0].split("\n\n\n")[1]
    assert len([line for line in body.splitlines() if line.strip()]) <= 10
    assert names["result"].reward == 1.0  # played by the second block


@pytest.mark.parametrize("hints", [True, False])
def test_the_longer_example_plays(names, hints):
    env = make(names["Guess"], high=1, hints=hints).sync
    assert [tool["function"]["name"] for tool in env.info().tools] == ["compare", "guess"][
        not hints :
    ]
    env.reset()
    assert env.call("guess", number=1).reward == 1.0 - 0.01
    env.reset()
    assert env.step("no idea", last=True).reward == -0.01
    env.close()


def test_every_problem_code_is_documented():
    for code, (status, _) in PROBLEMS.items():
        assert re.search(rf"`{code}`.*\|.*\b{status}\b", WIRE), code
