"""One batch into updates: every objective gets what it needs, and the cut changes nothing."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from samples_for_tests import sample_of

from agentrl.algo import PRESETS, Objective
from agentrl.config import RunConfig, TrainSection, load_config
from agentrl.errors import ConfigError
from agentrl.model.critic import Critic
from agentrl.model.load import load_model
from agentrl.model.logprobs import backbone_hidden
from agentrl.model.rows import pack
from agentrl.rollout.log import read_trajectories
from agentrl.train.batch import (
    make_batch,
    require_components,
    trainable_samples,
    turn_states,
    zero_variance,
)
from agentrl.train.loop import train
from agentrl.train.optimizer import Learner
from agentrl.train.update import UpdateOptions, agreement, update_policy
from agentrl.types import Group, Sample, TokenRow, Trajectory, Turn

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
MODEL = QUICKSTART.parent / "model"
TEMPERATURE = 0.9

# Whatever `Objective.needs` may name, by a setting that names it.
STAGES = {
    "gigpo": {"credit": {"kind": "gigpo"}},
    "turn": {"credit": {"kind": "turn"}, "baseline": {"key": "group_turn"}},
    "remax": {"baseline": {"kind": "given"}, "scale": {"kind": "none"}},
    "optimal_token": {
        "credit": {"kind": "token"},
        "baseline": {"kind": "optimal_token"},
        "scale": {"kind": "none"},
    },
    "gibberish": {"trust": [{"kind": "gibberish", "min_token_id": 100, "max_logprob": -2.0}]},
    "top_entropy": {"trust": [{"kind": "top_entropy", "quantile": 0.5}]},
    "clip_cov": {"trust": [{"kind": "clip_cov", "fraction": 0.1, "low": -9.0, "high": 9.0}]},
    "kl_cov": {"surrogate": {"kind": "kl_cov", "fraction": 0.1}},
    "veto, kept": {"trust": [{"kind": "veto"}], "aggregate": {"denominator": "kept"}},
    "loglinear": {"ratio": {"anchor": "loglinear"}},
    "normalised weights": {"off_policy": {"level": "token", "high": 2.0, "normalize": "token"}},
    "kl to old": {"kl": {"where": "loss", "coef": 0.1, "base": "old"}},
    "masked": {"reward": {"truncated": "mask"}},
    "components": {"reward": {"weights": {"correct": 1.0, "rare": 0.5}}},
    "distilled": {
        "surrogate": {"kind": "none"},
        "distill": {"where": "loss", "aggregate": {"kind": "token"}},
    },
    "entropy": {"entropy": {"coef": 0.01}},
}
OBJECTIVES = PRESETS | {name: Objective.model_validate(data) for name, data in STAGES.items()}


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> list[Group]:
    """Three real groups of four, with rewards that differ within each."""
    run_dir = tmp_path_factory.mktemp("runs") / "played"
    overrides = [
        *("--rollout.groups_per_step", "3", "--rollout.group_size", "4", "--run.num_steps", "1"),
        *("--rollout.temperature", str(TEMPERATURE), "--run.dir", str(run_dir)),
    ]
    train(load_config(QUICKSTART, overrides), quiet=True)
    groups: dict[str, Group] = {}
    for number, (_, trajectory) in enumerate(read_trajectories(run_dir)):
        trajectory.reward = float(number % 3) / 2
        trajectory.turns[-1].reward = trajectory.reward
        trajectory.reward_components = {"correct": trajectory.reward}
        group = Group(trajectory.group_id, trajectory.task_id, [])
        groups.setdefault(trajectory.group_id, group).trajectories.append(trajectory)
    return list(groups.values())


@pytest.fixture(scope="module")
def models():
    def load():
        return load_model(str(MODEL), dtype=torch.float32, device="cpu")

    teacher = load()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.02)
    return load(), teacher.requires_grad_(False)


def batch_of(groups: list[Group], objective: Objective):
    samples = trainable_samples(groups)
    trajectories = [t for group in groups for t in group.trajectories]
    batch = make_batch(
        samples,
        current_version=1,
        weighted=objective.reward.weights or (),
        states={t.trajectory_id: turn_states(t) for t in trajectories},
        greedy_rewards={group.group_id: 0.5 for group in groups},
    )
    return samples, batch


def update(groups, models, objective, settings=None, *, lr=1e-4, critic=None, **kwargs):
    """One call of `update_policy` on a fresh copy of the policy; returns learner, metrics."""
    policy, teacher = models
    settings = TrainSection(learning_rate=lr, token_budget=8192, **(settings or {}))
    learner = Learner(copy.deepcopy(policy), settings, total_updates=10)
    if critic is None and objective.needs_critic:
        critic = make_critic(policy)
    samples, batch = batch_of(groups, objective)
    needs = objective.needs()
    options = UpdateOptions(
        objective=objective,
        config=settings,
        temperature=TEMPERATURE,
        reference=teacher if "ref_logprobs" in needs else None,
        teacher=teacher if "teacher_logprobs" in needs else None,
        critic=critic,
        seed=1,
        **kwargs,
    )
    metrics = update_policy(learner, samples, batch, options)
    return learner, metrics, batch


def make_critic(policy, lr=1e-3) -> Learner[Critic]:
    critic = Critic(copy.deepcopy(policy).get_decoder())
    return Learner(critic, TrainSection(learning_rate=lr), total_updates=10, section="critic")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_gets_what_it_needs_and_moves_the_policy(played, models, name):
    objective = OBJECTIVES[name]
    before = {k: v.clone() for k, v in models[0].state_dict().items()}
    learner, metrics, batch = update(played, models, objective)
    for need in objective.needs():
        assert getattr(batch, need) is not None, need
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train/updates"] == 1 and metrics["train/grad_norm"] > 0
    after = learner.model.state_dict()
    assert any(not torch.equal(after[name], value) for name, value in before.items())


def test_the_objectives_above_cover_every_need():
    needs = set().union(*(objective.needs() for objective in OBJECTIVES.values()))
    assert needs == {
        *("old_logprobs", "ref_logprobs", "teacher_logprobs", "values", "state_ids"),
        *("sum_squared_probs", "baselines", "reward_components", "token_ids", "old_entropy"),
        *("policy_versions", "current_version", "truncated"),
    }


@pytest.mark.parametrize("name", ["grpo", "ppo", "vapo", "optimal_token", "top_entropy", "gigpo"])
def test_the_token_budget_changes_nothing(played, models, name):
    objective = OBJECTIVES[name]
    critics = [make_critic(models[0]), make_critic(models[0])]
    given = [c if objective.needs_critic else None for c in critics]
    whole, whole_metrics, _ = update(played, models, objective, critic=given[0])
    samples, batch = batch_of(played, objective)
    settings = TrainSection(learning_rate=1e-4, token_budget=48)
    cut = Learner(copy.deepcopy(models[0]), settings, total_updates=10)
    options = UpdateOptions(
        objective=objective, config=settings, temperature=TEMPERATURE, critic=given[1], seed=1
    )
    cut_metrics = update_policy(cut, samples, batch, options)
    # Cut, the rows share less of what they begin with.
    assert whole_metrics.pop("computed_tokens") <= cut_metrics.pop("computed_tokens")
    assert cut_metrics.keys() == whole_metrics.keys()
    for key, value in whole_metrics.items():
        assert cut_metrics[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    pairs = [(whole.model, cut.model)]
    if objective.needs_critic:
        pairs.append((critics[0].model, critics[1].model))
    for one, other in pairs:
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            # Adam's first step is a sign: entries with a gradient of 0 but for rounding may differ.
            assert (a - b).abs().gt(1e-5).float().mean() < 0.02


def test_what_the_head_knows_before_the_update(played, models):
    """Entropy and sum of squares against the full distribution; ids against the rows."""
    samples, _ = batch_of(played, OBJECTIVES["optimal_token"])
    _, _, by_square = update(played, models, OBJECTIVES["optimal_token"])
    _, _, by_entropy = update(played, models, OBJECTIVES["top_entropy"])
    model = models[0]
    for row, sample in enumerate(samples):
        micro = pack(samples, [row])
        with torch.no_grad():
            hidden = backbone_hidden(model, micro)[micro.trained_index]
            logprobs = (hidden @ model.get_output_embeddings().weight.t() / TEMPERATURE).double()
            logprobs = logprobs.log_softmax(-1)
        trained = slice(0, sample.num_trained)
        square, entropy = logprobs.exp().square().sum(-1), -(logprobs.exp() * logprobs).sum(-1)
        torch.testing.assert_close(
            by_square.sum_squared_probs[row, trained].double(), square, rtol=1e-4, atol=1e-6
        )
        torch.testing.assert_close(
            by_entropy.old_entropy[row, trained].double(), entropy, rtol=1e-4, atol=1e-5
        )
        ids = sample.token_ids[sample.loss_mask > 0]
        assert by_square.token_ids[row, trained].tolist() == ids.tolist()


def test_the_critic_warms_up_alone(played, models):
    critic = make_critic(models[0])
    learner, metrics, _ = update(
        played, models, OBJECTIVES["ppo"], critic=critic, policy_learns=False
    )
    for mine, its in zip(learner.model.parameters(), models[0].parameters(), strict=True):
        assert torch.equal(mine, its)
    assert learner.num_updates == 0 and critic.num_updates == 1
    assert critic.model.value_head.weight.abs().sum() > 0
    assert metrics["critic/grad_norm"] > 0 and "train/grad_norm" not in metrics


def test_the_critic_gets_better_on_the_same_batch(played, models):
    """Returns that the task foretells; without the clip, which keeps values near the old ones."""
    groups = copy.deepcopy(played)
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            trajectory.reward = trajectory.turns[-1].reward = float(number)
    objective = Objective.from_preset("ppo", {"critic": {"value_clip": "none"}})
    critic = make_critic(models[0])
    settings = {"num_epochs": 15}
    _, first, _ = update(groups, models, objective, settings, critic=critic, policy_learns=False)
    _, second, _ = update(groups, models, objective, critic=critic, policy_learns=False)
    assert first["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert second["critic/explained_variance"] > 0.5
    assert second.keys() >= {"loss/value", "critic/value_mean", "critic/grad_norm"}


def test_the_kl_coefficient_is_the_one_that_is_passed(played, models):
    objective = OBJECTIVES["search_r1"]
    _, once, _ = update(played, models, objective)
    _, thrice, _ = update(played, models, objective, kl_coef=3 * objective.kl.coef)
    assert thrice["loss/kl"] == pytest.approx(3 * once["loss/kl"], rel=1e-5)
    in_reward = OBJECTIVES["reinforce_pp"]
    _, _, none = update(played, models, in_reward, kl_coef=0.0)
    _, _, much = update(played, models, in_reward, kl_coef=5.0)
    assert not torch.allclose(none.advantages, much.advantages, atol=1e-3)


def test_a_greedy_answer_is_the_baseline(played, models):
    _, _, batch = update(played, models, OBJECTIVES["remax"])
    expected = (batch.rewards - 0.5)[:, None].expand_as(batch.advantages)
    torch.testing.assert_close(batch.advantages[batch.loss_mask], expected[batch.loss_mask])


def bare_trajectory(*messages: tuple[str, str], num_turns: int) -> Trajectory:
    row = TokenRow()
    row.messages = [
        {"role": role, "content": content, "tool_call_id": f"t{number}"}
        for number, (role, content) in enumerate(messages)
    ]
    said = [index for index, (role, _) in enumerate(messages) if role == "assistant"]
    turns = [
        Turn(0, 1, 1, "stop", "text", message=index, parent=number - 1 if number else None)
        for number, index in enumerate(said[-num_turns:])
    ]
    return Trajectory("t", "g", "e", "k", 0, [row], turns)


def test_a_state_is_what_was_said_before_the_turn():
    question, more = ("user", "2*3?"), ("tool", "6")
    one = turn_states(
        bare_trajectory(
            question, ("assistant", "a"), more, ("assistant", "b"), ("tool", "end"), num_turns=2
        )
    )
    other = turn_states(
        bare_trajectory(
            question, ("assistant", "x"), ("tool", "7"), ("assistant", "y"), more,
            ("assistant", "z"), num_turns=3,
        )
    )  # fmt: skip
    # The same question; the same observation, although it came a turn later under another id.
    assert one[0] == other[0] and one[1] == other[2]
    assert len({*one, *other}) == 3 and all(0 <= state < 2**63 for state in one)
    # Assistant messages of the prompt are no turns.
    shown = bare_trajectory(
        ("user", "1?"), ("assistant", "1"), question, ("assistant", "a"), num_turns=1
    )
    assert len(turn_states(shown)) == 1 and turn_states(shown)[0] != one[0]


def test_weights_and_components_must_meet(played):
    weighted = OBJECTIVES["components"]
    samples, batch = batch_of(played, weighted)
    require_components(weighted, batch)  # `rare` may be absent from a step
    assert list(batch.reward_names) == ["correct", "rare"]
    nobody = Objective.model_validate({"reward": {"weights": {"corect": 1.0}}})
    with pytest.raises(ConfigError, match=r"names corect, but .* components are correct; name"):
        require_components(nobody, make_batch(samples, current_version=0, weighted=("corect",)))
    more = [replace(s, reward_components={"correct": 1.0, "format": 0.0}) for s in samples]
    with pytest.raises(ConfigError, match=r"no weight for format, .* give it one, 0 to ignore"):
        require_components(weighted, make_batch(more, current_version=0, weighted=("correct",)))
    bare = [replace(sample, reward_components={}) for sample in samples]
    require_components(weighted, make_batch(bare, current_version=7, weighted=("correct",)))
    with pytest.raises(ConfigError, match="components are none"):
        require_components(weighted, make_batch(bare, current_version=0, weighted=("correct",)))


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.0, 1.0], None),
        ([1.0, 1.0 + 1e-9], "zero_variance"),
        ([1.0], "single"),
        ([], "unscored"),
        ([math.nan, math.nan], "unscored"),
    ],
)
def test_groups_without_a_comparison_are_dropped_with_the_reason(rewards, reason):
    trajectories = []
    for reward in rewards:
        trajectory = bare_trajectory(("assistant", "a"), num_turns=1)
        trajectory.reward = reward
        trajectories.append(trajectory)
    assert zero_variance(Group("g", "t", trajectories)) == reason


@pytest.mark.parametrize("preset", ["dr_grpo", "ssr_grpo"])
def test_the_constant_of_dr_grpo_is_what_a_trajectory_may_sample(preset):
    def constant(**sections):
        objective = {"preset": preset} | sections.pop("objective", {})
        config = RunConfig.model_validate(
            {"model": {"path": "m"}, "objective": objective} | sections
        )
        return config.objective.aggregate.max_tokens

    rollout = {"max_turns": 3, "max_turn_tokens": 24, "max_context_tokens": 256}
    assert constant(rollout=rollout) == 72
    assert constant(rollout=rollout | {"max_turns": 30}) == 256
    assert constant() == 4096  # the defaults: 8 turns of 512 tokens
    # A number in the run file stands, also where it is the preset's own.
    own = PRESETS[preset].aggregate.max_tokens
    assert constant(rollout=rollout, objective={"aggregate": {"max_tokens": own}}) == own
    config = {"model": {"path": "m"}, "objective": {"aggregate": {"kind": "constant"}}}
    assert RunConfig.model_validate(config).objective.aggregate.max_tokens == 4096


def test_a_resolved_constant_survives_the_run_directory(tmp_path):
    config = load_config(QUICKSTART, ["--objective.preset", "dr_grpo"])
    assert config.objective.aggregate.max_tokens == 72
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    assert load_config(path, []) == config


def test_rows_of_one_trajectory_share_states_and_baseline():
    """A forked history has two rows; turn ids index the trajectory's states in both."""

    def row(turn_id: int) -> Sample:
        return sample_of(
            [1, 2],
            [0, 1],
            turn_ids=np.full(2, turn_id, np.int32),
            reward=1.0,
            turn_rewards=np.zeros(2, np.float32),
        )

    batch = make_batch(
        [row(0), row(1)], current_version=0, states={"t": [7, 8]}, greedy_rewards={"g": 0.25}
    )
    assert batch.state_ids.tolist() == [[7, 8], [7, 8]]
    assert batch.baselines.tolist() == [0.25, 0.25]


def test_what_rows_share_counts_as_computed_once_and_every_epoch(played, models):
    objective = OBJECTIVES["grpo"]
    samples, batch = batch_of(played, objective)
    computed = {}
    for share, epochs in ((True, 1), (False, 1), (False, 2)):
        settings = TrainSection(learning_rate=1e-4, share_prefixes=share, num_epochs=epochs)
        learner = Learner(copy.deepcopy(models[0]), settings, total_updates=10)
        options = UpdateOptions(
            objective=objective, config=settings, temperature=TEMPERATURE, critic=None, seed=1
        )
        metrics = update_policy(learner, samples, copy.copy(batch), options)
        computed[share, epochs] = metrics["computed_tokens"]
    num_tokens = sum(map(len, samples))
    assert computed[False, 1] == num_tokens and computed[False, 2] == 2 * num_tokens
    assert 0 < computed[True, 1] < num_tokens


def test_sampler_and_trainer_are_compared_over_turns_that_the_newest_policy_sampled_whole():
    def two_turns(versions, name):
        return sample_of(
            [1] * 21,
            [0, *[1] * 20],
            turn_ids=np.repeat(np.array([0, 1], np.int32), [11, 10]),
            policy_versions=np.array([-1, *versions], np.int32),
            turn_rewards=np.zeros(2, np.float32),
            trajectory_id=name,
        )

    samples = [two_turns([3] * 20, "a"), two_turns([2] * 11 + [3] * 9, "b")]
    batch = make_batch(samples, current_version=3)
    live = torch.zeros(batch.loss_mask.shape)
    live[0, 4], live[0, 10:20], live[1] = -2.5, -0.5, -9.0  # the second row's turns are both old
    found = {key: metric.value() for key, metric in agreement(batch, live, True).items()}
    assert found == {
        "policy/fresh_diff_mean": pytest.approx(7.5 / 20),
        "policy/fresh_diff_max": pytest.approx(2.5),
        "policy/fresh_diff_turn_max": pytest.approx(0.5),
        "policy/fresh_diff_far": pytest.approx(1 / 20),
    }
    # Before the first update there is no older policy, whatever a label says.
    first = agreement(batch, live, False)
    assert first["policy/fresh_diff_turn_max"].value() == pytest.approx(9.0)
    batch.old_logprobs = torch.zeros_like(live)
    assert agreement(batch, live, False)["policy/fresh_diff_max"].value() == 0
