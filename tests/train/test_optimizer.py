import pytest
import torch
from torch import nn

from agentrl.config import TrainSection
from agentrl.errors import TrainingError
from agentrl.train.optimizer import Learner, learning_rate


def make_learner(**settings) -> Learner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    config = TrainSection(**{"learning_rate": 0.1, "max_nonfinite_steps": 3, **settings})
    return Learner(model, config, total_updates=10)


def backward(learner: Learner, scale: float = 1.0) -> None:
    (learner.model(torch.ones(2, 4)).sum() * scale).backward()


def test_schedules():
    config = TrainSection(learning_rate=1.0, warmup_steps=3, lr_schedule="linear")
    rates = [learning_rate(config, update, 13) for update in range(15)]
    assert rates[:3] == [0.25, 0.5, 0.75]
    assert rates[3] == 1.0 and rates[8] == pytest.approx(0.5) and rates[13:] == [0.0, 0.0]
    cosine = config.model_copy(update={"lr_schedule": "cosine"})
    assert learning_rate(cosine, 8, 13) == pytest.approx(0.5)
    assert learning_rate(cosine, 5, 13) > learning_rate(config, 5, 13)
    constant = config.model_copy(update={"lr_schedule": "constant"})
    assert learning_rate(constant, 99, 13) == 1.0


def test_weights_decay_and_biases_do_not():
    learner = make_learner(weight_decay=0.5, learning_rate=0.1)
    before = [parameter.clone() for parameter in learner.model.parameters()]
    for parameter in learner.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner.step()
    for old, new in zip(before, learner.model.parameters(), strict=True):
        shrunk = 1 - 0.1 * 0.5 if old.ndim >= 2 else 1.0
        torch.testing.assert_close(new, old * shrunk)


def test_a_gradient_that_is_not_finite_changes_nothing():
    learner, twin = make_learner(), make_learner()
    backward(learner)
    backward(twin)
    learner.step()
    twin.step()
    backward(learner, scale=float("nan"))
    update = learner.step()
    assert not update.applied and learner.num_skipped == 1 and learner.num_updates == 1
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    for learner_ in (learner, twin):
        backward(learner_)
        learner_.step()
    for ours, its in zip(learner.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(ours, its)
    assert learner.num_skipped_in_a_row == 0


def test_too_many_in_a_row_stop_the_run():
    learner = make_learner()
    for _ in range(2):
        backward(learner, scale=float("inf"))
        learner.step()
    backward(learner, scale=float("inf"))
    with pytest.raises(TrainingError, match="3 gradients in a row"):
        learner.step()


def test_gradients_are_scaled_down_to_the_largest_norm(monkeypatch):
    learner = make_learner(max_grad_norm=0.5)
    seen = []

    def spy() -> None:
        seen.append(nn.utils.get_total_norm([p.grad for p in learner.model.parameters()]))

    monkeypatch.setattr(learner.optimizer, "step", spy)
    backward(learner, scale=1000.0)
    assert learner.step().grad_norm > 100, "reported before clipping"
    assert float(seen[0]) == pytest.approx(0.5, rel=1e-3)
