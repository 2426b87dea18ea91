"""Silent faults, planted one after the other in a short run: a message, or the error that ends the
run, names each. None raises an error by itself, and docs/drill.md lists them.

Each fault is a function that plants it and trains.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from agentrl.cli.examples import copy_examples
from agentrl.config import load_config
from agentrl.errors import AgentRLError
from agentrl.model import logprobs
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.mixture import Mixture
from agentrl.rollout.scheduler import GroupScheduler
from agentrl.train import loop, run, serving
from agentrl.types import TokenRow
from agentrl.view.display import Display

SHORT = {
    "run.num_steps": "4",
    "rollout.groups_per_step": "4",
    "rollout.group_size": "4",
    "train.learning_rate": "2e-3",
    "train.warmup_steps": "0",
    "track.signals": "0",
}
JUDGED = """
from agentrl.env import Environment, Task, reward

class Judged(Environment):
    def splits(self):
        return {"train": None}

    def get(self, split, index):
        return Task(f"{split}/{index}", f"{index}+1=?", reference=index + 1)

    def step(self, action):
        self.finish()

    @reward
    def judge(self, episode) -> float:
        raise ConnectionError("the judge at 10.0.0.9 refuses the connection")
"""


class Ground:
    """The quickstart's model and task in a separate folder, and the messages of runs on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_file = copy_examples(folder / "examples") / "quickstart" / "run.toml"
        self.said: list[str] = []

    def train(self, name: str = "run", **keys: str) -> None:
        given = SHORT | {key.replace("__", "."): value for key, value in keys.items()}
        overrides = [f"--{key}={value}" for key, value in given.items()]
        config = load_config(self.run_file, [*overrides, f"--run.dir={self.folder / name}"])
        log, agentrl = _Log(self.said), logging.getLogger("agentrl")
        agentrl.addHandler(log)
        try:
            with patch.object(Display, "note", lambda _, line: self.said.append(line)):
                loop.train(config, quiet=True)
        finally:
            agentrl.removeHandler(log)


class _Log(logging.Handler):
    """Collects warnings."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def old_weights(ground: Ground) -> None:
    engine = serving.embedded_engine

    def stale(config: Any, model: Any, **keys: Any) -> Any:
        return engine(config, copy.deepcopy(model), **keys)

    with patch.object(serving, "embedded_engine", stale):
        ground.train()


def adapter_twice(ground: Ground) -> None:
    engine = serving.embedded_engine

    def twice(config: Any, model: Any, **keys: Any) -> Any:
        made = engine(config, model, **keys)
        for module in made._model.modules():
            if isinstance(scaling := getattr(module, "scaling", None), dict):  # PEFT's
                scaling.update({name: 2 * factor for name, factor in scaling.items()})
        return made

    with patch.object(serving, "embedded_engine", twice):
        ground.train(model__lora__rank="8", train__learning_rate="2e-2")


def separator_dropped(ground: Ground) -> None:
    tail = Renderer._tail

    def dropped(self: Renderer, observation: Any) -> str:
        text = tail(self, observation)
        return text.replace("<|im_start|>", "", 1) if hasattr(self, "num_audited") else text

    with patch.object(Renderer, "_tail", dropped):
        ground.train()


def mask_shifted(ground: Ground) -> None:
    arrays = TokenRow.arrays

    def shifted(self: TokenRow) -> Any:
        row = arrays(self)
        row["token_ids"] = np.roll(row["token_ids"], -1)
        return row

    with patch.object(TokenRow, "arrays", shifted):
        ground.train()


def packed_rows_leak(ground: Ground) -> None:
    segments = logprobs.packed_segments

    def as_one(lengths: list[int], *_: Any) -> Any:
        return segments([sum(lengths)])

    with patch.object(logprobs, "packed_segments", as_one):
        ground.train()


def judge_is_down(ground: Ground) -> None:
    (ground.folder / "judged.py").write_text(JUDGED)
    ground.train(env__id=f"{ground.folder / 'judged.py'}:Judged", env__config="{}")


def stale_samples_dropped(ground: Ground) -> None:
    collect = GroupScheduler.collect

    async def dropping(self: GroupScheduler, *given: Any, **keys: Any) -> Any:
        batch = await collect(self, *given, **keys)
        batch.dropped["stale"] += len(batch.groups) - 1
        del batch.groups[1:]
        return batch

    with patch.object(GroupScheduler, "collect", dropping):
        ground.train()


def untold_top_p(ground: Ground) -> None:
    sampling = run.training_sampling

    def truncated(*given: Any, **keys: Any) -> Any:
        return replace(sampling(*given, **keys), top_p=0.6, report_kept=False)

    with patch.object(run, "training_sampling", truncated):
        ground.train()


def wrong_member(ground: Ground) -> None:
    collect = GroupScheduler.collect

    async def dealt(self: GroupScheduler, *given: Any, **keys: Any) -> Any:
        batch = await collect(self, *given, **keys)
        for group in batch.groups:
            rewards = [t.reward for t in group.trajectories]
            for trajectory, reward in zip(group.trajectories, np.roll(rewards, 1), strict=True):
                trajectory.reward = float(reward)
        return batch

    with patch.object(GroupScheduler, "collect", dealt):
        ground.train()


def hidden_tools(ground: Ground) -> None:
    template = ground.folder / "without_tools.jinja"
    whole = (ground.run_file.parent / "model" / "chat_template.jinja").read_text()
    shown = re.compile(r"\{% if tools %\}.*?\{% endif %\}", re.DOTALL)
    template.write_text(shown.sub("", whole, count=1))
    ground.train(model__chat_template=str(template))


def call_in_a_thought(ground: Ground) -> None:
    from agentrl.model.text.template import named_dialect

    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    said = f"<think>Should I? {call} No.</think>#### 2"
    action, _ = named_dialect("hermes").read_turn(said, [], turn_id=0)
    calls = len(action.tool_calls)
    ground.said.append(f"{calls} calls are executed of a turn whose thought holds one")


def data_skipped(ground: Ground) -> None:
    ground.train("skipped", run__num_steps="2")
    restore = Mixture.restore

    def further(self: Mixture, saved: Any) -> None:
        restore(self, {**saved, "position": saved["position"] + 12})

    with patch.object(Mixture, "restore", further):
        ground.train("skipped", run__num_steps="4", run__resume="true")


@dataclass(slots=True, frozen=True)
class Fault:
    what: str
    plant: Callable[[Ground], None]
    names_it: str
    """Pattern of the line that names it."""


FAULTS = [
    Fault("the sampler keeps its old weights", old_weights, "sampler and trainer"),
    Fault("an adapter is applied twice", adapter_twice, "sampler and trainer"),
    Fault("a separator between turns is dropped", separator_dropped, "writes the past"),
    Fault("tokens and mask are shifted by one", mask_shifted, "sampler and trainer"),
    Fault("packed rows see each other", packed_rows_leak, "one segment at a time"),
    Fault("a judge is down", judge_is_down, "grader_error.*refuses"),
    Fault("stale samples are dropped", stale_samples_dropped, "stale"),
    Fault("an untold top-p", untold_top_p, "sampler and trainer"),
    Fault("rewards go to the wrong member", wrong_member, "went to other members"),
    Fault("the template hides the tools", hidden_tools, "has tools"),
    Fault("a call in a thought is executed", call_in_a_thought, "^0 calls"),
    Fault("a resumed run skips data", data_skipped, "would be skipped"),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_is_named(fault, tmp_path):
    ground = Ground(tmp_path)
    try:
        fault.plant(ground)
    except AgentRLError as error:
        ground.said.append(str(error))
    assert any(re.search(fault.names_it, line) for line in ground.said), ground.said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sound_run_is_told_nothing(tmp_path):
    ground = Ground(tmp_path)
    ground.train(train__learning_rate="1e-4")
    assert ground.said == []
