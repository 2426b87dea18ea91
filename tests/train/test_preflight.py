"""Wrong set-ups, each named with its remedy before step 1, or at the first rollouts."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from rows_for_tests import write_rows
from samples_for_tests import trajectory_of

from agentrl.cli.doctor import doctor
from agentrl.cli.doctor_play import play_findings
from agentrl.cli.main import main
from agentrl.config import RunConfig, load_config
from agentrl.errors import TrainingError
from agentrl.train import preflight
from agentrl.train.loop import train
from agentrl.train.preflight import FirstRewards, rate_is_unusual
from agentrl.types import StopReason, Trajectory, Turn

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
PAYS = """
from agentrl.env import Environment, Task

class Pays(Environment):
    reward = {reward}

    def splits(self):
        return {{"train": None, "test": 8}}

    def get(self, split, index):
        return Task(f"{{split}}/{{index}}", f"{{split}} {{index}}+1=?", reference=index + 1)

    def step(self, action):
        self.finish(reward=self.reward)
"""


def config(**sections) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, **sections})


def episodes(count: int, rewards: list[float], **turn) -> list[Trajectory]:
    settings = {"finish_reason": "stop", "parse_status": "text", **turn}
    stop = settings.pop("stop", StopReason.TERMINATED)
    rewards = [rewards[number % len(rewards)] for number in range(count)]
    return [
        trajectory_of(each, turns=[Turn(0, 1, 1, **settings)], stop_reason=stop) for each in rewards
    ]


def with_tool_errors(played: list[Trajectory]) -> list[Trajectory]:
    for each in played[::2]:
        each.metrics |= {"tool_calls": 1.0, "tool_errors": 1.0}
    return played


@pytest.mark.parametrize(
    ("played", "message"),
    [
        (episodes(64, [0.0], finish_reason="length"),
         "64 of 64 turns by rollout.max_turn_tokens = 512"),
        (episodes(64, [0.0], parse_status="malformed"),
         "64 of 64 turns .*could not be read.*rollout.dialect"),
        (episodes(64, [0.0], stop=StopReason.MAX_TURNS), "64 by rollout.max_turns = 8"),
        (episodes(64, [0.0], stop=StopReason.CONTEXT_LENGTH),
         "64 by rollout.max_context_tokens = 4096"),
        (episodes(64, [1.0]), "all 64 rewards so far are 1.*harder tasks"),
        (episodes(preflight.MOST, [0.0]), "the episodes are sound: take easier tasks"),
        (with_tool_errors(episodes(preflight.MOST, [0.0])),
         "100% of the tool calls failed.*mend the tool or grader"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_learn_stops_with_the_cause_and_how_to_go_on(played, message):
    with pytest.raises(TrainingError, match=f"{message}.*run.preflight = false"):
        FirstRewards(True).look(played, config())
    assert FirstRewards(False).look(played, config()) is None


def test_equal_rewards_of_different_lengths_are_learned_from_where_length_costs():
    played = episodes(preflight.MOST, [0.0])
    played[0].turns[0].num_tokens = 4
    overlong = {"max_tokens": 4, "buffer_tokens": 2}
    costs = config(objective={"reward": {"overlong": overlong}})
    assert FirstRewards(True).look(played, costs) is None
    with pytest.raises(TrainingError, match="the episodes are sound"):
        FirstRewards(True).look(played, config())


def test_hard_tasks_are_warned_of_and_go_on():
    first = FirstRewards(True)
    for _ in range(2):
        assert "agentrl sft" in (first.look(episodes(64, [0.0]), config()) or "")
    assert first.look(episodes(64, [0.0] * 63 + [1.0]), config()) is None
    # One reward was seen: from here on the run is left alone.
    assert first.look(episodes(640, [0.0]), config()) is None
    # What keeps episodes from a reward is told where a few have one as well.
    told = FirstRewards(True).look(episodes(64, [0.0, 1.0], finish_reason="length"), config())
    assert told and "max_turn_tokens = 512" in told
    # Few episodes prove nothing.
    assert FirstRewards(True).look(episodes(16, [1.0]), config())


@pytest.mark.parametrize(
    ("num_parameters", "rate", "rank", "said"),
    [
        *((135e6, 1e-5, 0, None), (0.6e6, 1e-4, 0, None), (8e9, 1e-6, 0, None)),
        *((1.5e9, 1e-6, 0, None), (135e6, 1e-4, 8, None)),
        *((135e6, 1e-6, 0, "low"), (135e6, 1e-7, 0, "low"), (135e6, 1e-3, 0, "high")),
        (8e9, 1e-4, 0, "high"),
    ],
)
def test_a_learning_rate_far_from_those_of_such_models_is_told(num_parameters, rate, rank, said):
    chosen = config(model={"path": "m", "lora": {"rank": rank}}, train={"learning_rate": rate})
    found = rate_is_unusual(chosen, int(num_parameters))
    assert (found is None) == (said is None)
    assert said is None or (said in found and "about" in found)


def examined(capsys, *overrides: str) -> str:
    doctor(QUICKSTART, list(overrides), 8)
    return " ".join(capsys.readouterr().out.split())


def without_tools(tmp_path: Path) -> list[str]:
    template = tmp_path / "plain.jinja"
    text = json.loads((QUICKSTART.parent / "model" / "tokenizer_config.json").read_text())
    text = (
        text.get("chat_template") or (QUICKSTART.parent / "model/chat_template.jinja").read_text()
    )
    template.write_text(re.sub(r"\{% if tools %\}.*?\{% endif %\}", "", text, count=1, flags=re.S))
    return ["--model.chat_template", str(template)]


def no_template(tmp_path: Path) -> list[str]:
    model = tmp_path / "model"
    shutil.copytree(QUICKSTART.parent / "model", model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return ["--model.path", str(model)]


def pays(reward: float):
    def overrides(tmp_path: Path) -> list[str]:
        (tmp_path / "pays.py").write_text(PAYS.format(reward=reward))
        return ["--env.id", f"{tmp_path / 'pays.py'}:Pays", "--env.config", "{}"]

    return overrides


def same_tasks(tmp_path: Path) -> list[str]:
    rows = [{"question": f"{n}+1=?", "answer": str(n + 1)} for n in range(20)]
    file = str(write_rows(tmp_path / "tasks.jsonl", rows))
    source = {"train": file, "test": file}
    return ["--env.config", json.dumps({"source": source, "tools": True})]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("overrides", "finding"),
    [
        (without_tools, "fix .*tools.*rollout.tools"),
        (lambda _: ["--train.learning_rate", "1e-6"], "learning rate: .*is low.* about 1e-04"),
        (lambda _: ["--train.learning_rate", "1e-2"], "learning rate: .*is high.* about 1e-04"),
        (lambda _: ["--rollout.max_turn_tokens", "3"], "max_turn_tokens = 3"),
        (pays(0.0), "all 8 rewards so far are 0.*easier tasks"),
        (pays(1.0), "all 8 rewards so far are 1.*harder tasks"),
        (lambda _: ["--rollout.dialect", "llama3"], "fix .*dialect"),
        (same_tasks, "fix test tasks: 16 of the first 16 tasks of split 'test'"),
        (no_template, "fix .*has no chat template.*model.chat_template"),
        (
            lambda _: ["--rollout.top_p=0.6", "--rollout.truncated_sampling=correct"],
            "ok sampler and trainer",
        ),
    ],
)
def test_doctor_names_a_wrong_set_up_and_its_remedy(overrides, finding, tmp_path, capsys):
    said = examined(capsys, *overrides(tmp_path))
    assert re.search(finding, said), said


def test_doctor_plays_a_run_file_with_something_to_train():
    keys = ["--inference.backend", "openai", "--inference.urls", "http://127.0.0.1:1"]
    ((status, _, said),) = play_findings(load_config(QUICKSTART, keys), 2)
    assert status == "fix" and "a chat server cannot be trained" in said
    for words in (["--play", "2"], [str(QUICKSTART), "--play", "-1"]):
        assert main(["doctor", *words]) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("planted", "dtype", "finding"),
    [
        ("shifted", "float32", "fix mismatch: .*differ by"),
        ("rounded", "bfloat16", "fix mismatch: .* in bfloat16, above 0.05"),
        (None, "float32", "ok sampler and trainer: differ by .* in float32"),
    ],
)
def test_doctor_measures_sampler_against_trainer(planted, dtype, finding, capsys, monkeypatch):
    from agentrl.cli import doctor_play as play

    def changed(trajectory):
        samples = play_samples(trajectory)
        for sample in samples:
            if planted == "shifted":
                sample.loss_mask = np.roll(sample.loss_mask, 1)
                sample.loss_mask[0] = 0
                sample.rollout_logprobs = np.roll(sample.rollout_logprobs, 1) * sample.loss_mask
                sample.token_ids = sample.token_ids[np.r_[0, 0 : len(sample) - 1]]
                sample.token_ids = np.roll(sample.token_ids, 3)
            elif planted == "rounded":
                sample.rollout_logprobs = sample.rollout_logprobs * 1.5 - 0.2 * sample.loss_mask
        return samples

    play_samples = play.samples_of
    monkeypatch.setattr(play, "samples_of", changed)
    said = examined(capsys, "--model.dtype", dtype)
    assert re.search(finding, said), said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_stops_before_it_learns_and_keeps_what_it_played(tmp_path):
    keys = ["--run.dir", str(tmp_path / "run"), "--run.num_steps", "2"]
    short = [*keys, "--rollout.max_turn_tokens", "1"]
    with pytest.raises(TrainingError, match=r"max_turn_tokens = 1"):
        train(load_config(QUICKSTART, short))
    assert list((tmp_path / "run" / "trajectories").iterdir())
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
    goes_on = [*short, "--run.preflight", "false", "--run.dir", str(tmp_path / "on")]
    train(load_config(QUICKSTART, goes_on), quiet=True)
