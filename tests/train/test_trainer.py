"""When the reference becomes the policy, also over steps that had nothing to learn from."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from samples_for_tests import sample_of

from agentrl.algo import KLController
from agentrl.config import RunConfig
from agentrl.train import trainer
from agentrl.train.trainer import Trainer


class _Learner(SimpleNamespace):
    def counters(self) -> dict:
        return {}

    def restore_counters(self, saved: dict) -> None:
        pass


def trainer_of(tmp_path: Path) -> Trainer:
    config = RunConfig.model_validate(
        {
            "model": {"path": "m", "reference_every": 2},
            "env": {"id": "e"},
            "objective": {"kl": {"where": "loss", "coef": 0.1}},
        }
    )
    model: Any = torch.nn.Linear(1, 1, bias=False)
    learner: Any = _Learner(model=model, config=config.train)
    tokenizer: Any = None
    return Trainer(
        config=config,
        run_dir=tmp_path,
        tokenizer=tokenizer,
        learner=learner,
        critic=None,
        reference=torch.nn.Linear(1, 1, bias=False),  # pyright: ignore
        teacher=None,
        kl=KLController.of(config.objective.kl),
    )


@pytest.mark.parametrize(
    ("learned", "renewed"),
    [([1, 2, 3, 4], [2, 4]), ([1, 3, 4], [3, 4]), ([1, 5, 7], [5, 7]), ([1], [])],
    ids=["every step", "none in 2", "none from 2 to 4", "one step"],
)
def test_the_reference_becomes_the_policy_once_in_so_many_steps(
    monkeypatch, tmp_path, learned, renewed
):
    monkeypatch.setattr(trainer, "update_policy", lambda *_, **__: {})
    monkeypatch.setattr(trainer, "capture_state", lambda **given: SimpleNamespace(**given))
    one, found = trainer_of(tmp_path), []
    for step in learned:
        one.model.weight.data.fill_(step)  # pyright: ignore
        one.learn(step, [sample_of([1, 2], [0, 1])], None, None)
        if one.reference.weight.item() == step:  # pyright: ignore
            found.append(step)
        resumed = trainer_of(tmp_path)
        resumed.restore_counters(one.state(step, {}, {}))
        resumed.reference = one.reference
        one = resumed
    assert found == renewed
