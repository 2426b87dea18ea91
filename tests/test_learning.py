"""docs/learning.md has the figures of its results file, and the runs behind them would start."""

import json
import sys
from pathlib import Path

import pytest

from agentrl.config import load_config

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def report():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import learning_report

    yield learning_report
    sys.path.remove(str(ROOT / "benchmarks"))


def test_tables_and_curves_are_those_of_the_results(report):
    results = json.loads(report.RESULTS.read_text())
    for path, text in report.pages(results).items():
        assert path.read_text() == text, (
            f"{path.name}: python benchmarks/learning.py --rows '' --write-docs"
        )


def test_every_result_is_shown(report):
    results = json.loads(report.RESULTS.read_text())
    page = (ROOT / "docs" / "learning.md").read_text()
    assert results.keys() <= {arm.name for row in report.ROWS.values() for arm in row.arms}
    for name in report.tables(results):
        assert f"<!-- table: {name}, made by" in page, name
        assert (f"(learning/{name}.svg)" in page) == (
            report.RESULTS.parent / f"{name}.svg"
        ).exists()


def test_every_arm_is_a_run_that_would_start(report, tmp_path):
    """Keys, presets and what they ask of each other, of all commands that take a run file."""
    filled = {"seed": 1, "work": tmp_path, "out": tmp_path / "out", "models": tmp_path}
    filled |= {"trl": "-", "vllm": "-"}
    checked = 0
    for row in report.ROWS.values():
        for arm in row.arms:
            for command in arm.commands:
                words = [word.format(**filled) for word in command]
                files = [word for word in words if word.endswith(".toml")]
                if files:
                    after_out = words.index("--out") + 2
                    config = load_config(files[0], words[after_out:])
                    assert config.run.seed == 1, arm.name
                    checked += 1
    assert checked > 25


def test_samples_to_the_goal_and_the_spread_by_hand(report):
    curve = [0.0] * 5 + [1.0] * 5  # the mean of five steps is .8 after the ninth
    import numpy as np

    row = report.Row("", [], goal=0.8, samples_per_step=64)
    assert report.samples_to_goal(row, np.asarray(curve)) == 9 * 64
    assert np.isnan(report.samples_to_goal(row, np.zeros(10)))
    assert report.smooth(np.asarray([1.0, 0.0, 0.5])).tolist() == [1.0, 0.5, 0.5]
    assert report.spread(np.asarray([0.25, 0.75])) == "0.500 ± 0.354"


def test_the_page_shows_runs_of_the_arms_as_they_are(report):
    results = json.loads(report.RESULTS.read_text())
    arms = {arm.name: arm for row in report.ROWS.values() for arm in row.arms}
    changed = {
        name
        for name, runs in results.items()
        for run in runs.values()
        if run["made"]["arm"] != arms[name].fingerprint()
    }
    assert not changed, "`make learning` runs them again"


def test_a_fingerprint_follows_commands_and_run_files_and_not_the_place(report, tmp_path):
    from dataclasses import replace

    import learning_rows

    (arm,) = [arm for arm in report.ROWS["turns"].arms if arm.name == "turns-outcome"]
    assert replace(arm, about="said otherwise").fingerprint() == arm.fingerprint()
    command = [*arm.commands[-1], "--train.learning_rate", "1"]
    assert replace(arm, commands=[*arm.commands[:-1], command]).fingerprint() != arm.fingerprint()

    text = learning_rows.QUICKSTART.read_text()
    prints = []
    for name, said in (("same", text), ("spaced", "# said\n" + text), ("other", text + "eps = 1")):
        root = tmp_path / name
        (root / "examples").mkdir(parents=True)
        (root / "examples" / "run.toml").write_text(said)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(learning_rows, "ROOT", root)
            arm = learning_rows.Arm("a", [[sys.executable, str(root / "examples" / "run.toml")]])
            prints.append(arm.fingerprint())
    assert prints[0] == prints[1] != prints[2]
