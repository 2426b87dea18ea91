"""Every planted fault is named, and a run without one is left alone."""

import pytest

from agentrl.drill import FAULTS, Ground, drill


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_is_named(fault):
    (outcome,) = drill(fault.what)
    print(f"{outcome.seconds:.0f} s: {outcome.line}")
    assert outcome.line, f"nothing named: {fault.what}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sound_run_is_told_nothing(tmp_path):
    ground = Ground(tmp_path)
    ground.train(train__learning_rate="1e-4")
    assert ground.said == []
