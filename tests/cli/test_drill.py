"""Every planted fault is named, and a run without one is left alone."""

import pytest

from agentrl.cli import drill as drills
from agentrl.cli.drill import FAULTS, Ground, drill
from agentrl.cli.main import main
from agentrl.errors import TrainingError


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_is_named(fault):
    (outcome,) = drill(fault.what)
    print(f"{outcome.seconds:.0f} s: {outcome.line}")
    assert outcome.line, f"nothing named: {fault.what}"


def test_a_run_that_ends_of_something_else_has_not_named_its_fault(monkeypatch, capsys):
    def breaks(ground: Ground) -> None:
        raise TrainingError("the disk is full")

    fault = drills.Fault("a fault", breaks, "guard", "names it")
    monkeypatch.setattr(drills, "FAULTS", [fault])
    assert main(["drill"]) == 1
    assert capsys.readouterr().out.startswith("MISSED")
    assert main(["drill", "--only", "typo"]) == 2, "nothing was planted"
    assert "no fault has these words: a fault" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sound_run_is_told_nothing(tmp_path):
    ground = Ground(tmp_path)
    ground.train(train__learning_rate="1e-4")
    assert ground.said == []
