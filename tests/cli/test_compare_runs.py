"""Two runs that should be equal, and what is planted in the second: one command names it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.compare_runs import first_difference, inputs_that_differ

pytestmark = pytest.mark.slow  # nine processes that train
QUICKSTART = Path(__file__).parents[2] / "examples/quickstart"
RUN_FILE = """
[run]
num_steps = 3
save_every = 1
keep_checkpoints = 9

[model]
path = "{model}"

[rollout]
groups_per_step = 4
group_size = 2
max_turns = 2
max_turn_tokens = 16
max_context_tokens = 256

[objective]
preset = "grpo"

[[env]]
name = "sums"
id = "{folder}/planted_env.py:Sums"

[[env]]
name = "products"
id = "math"

[env.config]
source = "arithmetic"
operators = "*"
"""
ENVIRONMENT = """
import random
from pathlib import Path

import planted_package

from agentrl.env import EnvConfig, Environment, StepResult, Task

ROWS = Path(__file__).with_name("rows.txt").read_text().splitlines()


class Sums(Environment):
    class Config(EnvConfig):
        seed: int = 1

    def splits(self):
        return {"train": len(ROWS), "test": 1}

    def get(self, split, index):
        question, answer = ROWS[index].split(";")
        return Task(f"{split}/{index}", question, reference=answer)

    def step(self, action):
        hint = random.Random(f"{self.config.seed} {self.task.id}").randrange(1000)
        right = planted_package.right(action.text, self.task.reference)
        return StepResult([{"role": "user", "content": f"hint {hint}"}], reward=float(right))
"""
PACKAGE = "def right(text, answer):\n    return {operator}(answer in text)\n"
ROWS = [f"{n}+{n + 1}=?;{2 * n + 1}" for n in range(8)]


def agentrl(*arguments: object, packages: Path, status: int | None = 0) -> str:
    environment = os.environ | {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", *map(str, arguments)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert status is None or done.returncode == status, done.stdout + done.stderr
    return done.stdout


def package(folder: Path, version: str, operator: str) -> Path:
    about = folder / f"planted_package-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: planted-package\nVersion: {version}\n"
    )
    (folder / "planted_package.py").write_text(PACKAGE.format(operator=operator))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run file with two environments, its package, and the run A."""
    folder = tmp_path_factory.mktemp("bisect")
    (folder / "run.toml").write_text(RUN_FILE.format(model=QUICKSTART / "model", folder=folder))
    (folder / "planted_env.py").write_text(ENVIRONMENT)
    (folder / "rows.txt").write_text("\n".join(ROWS))
    package(folder / "one", "1.0", "")
    package(folder / "two", "2.0", "not ")
    trained(folder, "a")
    return folder


def trained(place: Path, name: str, *keys: str, packages: str = "one") -> Path:
    """Trains in a process of its own, which sees the package and the rows as they are now."""
    run = place / name
    agentrl(
        "train", place / "run.toml", "--quiet", "--run.dir", run, *keys, packages=place / packages
    )
    return run


def compared(place: Path, other: Path, *options: str, status: int = 1) -> dict:
    text = agentrl(
        "compare", place / "a", other, "--json", *options, packages=place / "one", status=status
    )
    return json.loads(text)


def test_equal_runs_are_equal(place):
    found = compared(place, trained(place, "b"), status=0)
    assert (found["steps"], found["inputs"], found["difference"]) == (3, {}, None)


def test_the_seed_of_one_environment(place):
    found = compared(place, trained(place, "seed", "--env.sums.config.seed", "2"))
    assert found["inputs"] == {"env.sums.config.seed": ["absent", "2"]}
    difference = found["difference"]
    assert difference["step"] == 1
    assert "trajectory sums-" in difference["where"]
    assert difference["quantity"] == "token of the environment"


def test_the_version_of_one_package(place):
    other = trained(place, "package", packages="two")
    found = compared(place, other)
    assert found["inputs"] == {"package planted-package": ["1.0", "2.0"]}
    difference = found["difference"]
    assert (difference["step"], difference["quantity"]) == (1, "reward")
    assert "trajectory sums-" in difference["where"]


def test_one_key(place):
    found = compared(place, trained(place, "key", "--train.learning_rate", "3e-5"))
    assert [*found["inputs"]] == ["train.learning_rate"]
    assert (found["difference"]["step"], found["difference"]["where"]) == (1, "metrics")


@pytest.mark.parametrize("quantity", ["prompt token", "reward"])
def test_one_row_of_data(place, quantity):
    entries = (place / "a/trajectories/index.jsonl").read_text().splitlines()
    played = [each for each in map(json.loads, entries) if each["group_id"].startswith("sums")]
    step, task = next((each["step"], each["task_id"]) for each in played if each["step"] > 1)
    number = int(task.partition("/")[2])
    # Every answer holds the empty one.
    row = "90+1=?;91" if quantity == "prompt token" else ROWS[number].partition(";")[0] + ";"
    rows, name = place / "rows.txt", f"data-{quantity.split()[0]}"
    rows.write_text("\n".join([*ROWS[:number], row, *ROWS[number + 1 :]]))
    try:
        found = compared(place, trained(place, name), "--replay")
    finally:
        rows.write_text("\n".join(ROWS))
    assert found["inputs"] == {}
    assert found["difference"]["step"] == step
    assert found["difference"]["quantity"] == quantity
    # Both were played again with the row as it was by then: only the run before does not repeat.
    assert "bit for bit" in found["again"]["B"]
    assert "bit for bit" not in found["again"]["A"]


@pytest.mark.parametrize("bit", [3, 7])
def test_a_bit_flipped_in_a_checkpoint(place, tmp_path, bit):
    other = shutil.copytree(place / "a", tmp_path / "flipped")
    file = other / "checkpoints/step_000002/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1 << bit
    file.write_bytes(content)
    found = compared(place, other)["difference"]
    assert found["step"] == 2
    assert "checkpoints/step_000002/model.safetensors" in found["where"]
    assert f"byte {len(content) - 1000}, in " in found["quantity"]
    assert found["first"] ^ found["second"] == 1 << bit


def test_a_bit_flipped_in_the_model_at_the_start(place, tmp_path):
    model = shutil.copytree(QUICKSTART / "model", tmp_path / "model")
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 + 3] ^= 1 << 5
    file.write_bytes(content)
    other = trained(place, f"model-{tmp_path.name}", "--model.path", str(model))
    found = first_difference(place / "a", other, range(4))
    assert found is not None
    assert found.step <= 1
    (name,) = inputs_that_differ(place / "a", other)
    assert "model.safetensors, byte" in name
