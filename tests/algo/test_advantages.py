"""Advantages against recursions written out in plain Python, over multi-turn trajectories."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo import (
    PRESETS,
    Batch,
    Objective,
    advantage_metrics,
    compute_advantages,
    reduce_metrics,
    value_targets,
)

PLAIN = {"baseline": {"kind": "none"}, "scale": {"kind": "none"}}


@dataclass
class Token:
    """One trained token of the reference: what the recursion may know about it."""

    turn: int
    value: float
    old: float
    ref: float


@dataclass
class Episode:
    group: int
    turn_rewards: list[float]
    extra: float  # outcome reward beyond the turns'
    tokens: list[Token]
    tool_tokens: list[int]  # how many tool tokens follow each trained token

    @property
    def reward(self) -> float:
        return sum(self.turn_rewards) + self.extra


number = st.floats(-2, 2, allow_nan=False).map(lambda x: round(x, 3))


@st.composite
def episodes(draw: st.DrawFn) -> list[Episode]:
    result = []
    for _ in range(draw(st.integers(1, 5))):
        turns = draw(st.integers(1, 3))
        tokens = [
            Token(turn, draw(number), -abs(draw(number)), -abs(draw(number)))
            for turn in range(turns)
            for _ in range(draw(st.integers(1, 3)))
        ]
        gaps = [draw(st.integers(0, 2)) for _ in tokens]
        rewards = [draw(number) for _ in range(turns)]
        result.append(
            Episode(
                draw(st.integers(0, 1)), rewards, draw(st.sampled_from([0.0, 1.0])), tokens, gaps
            )
        )
    return result


def batch_of(played: list[Episode], *, tool_tokens: bool = True) -> Batch:
    """Rows of the episodes; tool tokens carry values and log-probs that must never be read."""
    rows: list[list[tuple[int, int, float, float, float]]] = []
    for episode in played:
        row = [(0, 0, 99.0, -99.0, -77.0)] if tool_tokens else []
        for token, gap in zip(episode.tokens, episode.tool_tokens, strict=True):
            row.append((1, token.turn, token.value, token.old, token.ref))
            if tool_tokens:
                row += [(0, token.turn + 1, 99.0, -99.0, -77.0)] * gap
        rows.append(row)
    width, turns = max(map(len, rows)), max(len(e.turn_rewards) for e in played)

    def column(index: int) -> torch.Tensor:
        padded = [[cell[index] for cell in row] + [0] * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.float64)

    return Batch(
        loss_mask=column(0),
        rewards=torch.tensor([e.reward for e in played], dtype=torch.float64),
        group_ids=torch.tensor([e.group for e in played]),
        turn_ids=column(1).long(),
        rollout_logprobs=column(3),
        values=column(2),
        old_logprobs=column(3),
        ref_logprobs=column(4),
        turn_rewards=torch.tensor(
            [e.turn_rewards + [0.0] * (turns - len(e.turn_rewards)) for e in played],
            dtype=torch.float64,
        ),
    )


def trained(batch: Batch, advantages: torch.Tensor) -> list[list[float]]:
    assert (advantages[batch.loss_mask == 0] == 0).all()
    pairs = zip(advantages, batch.loss_mask, strict=True)
    return [row[mask != 0].tolist() for row, mask in pairs]


def token_rewards(episode: Episode, where: str, kl_coef: float) -> list[float]:
    """Each turn's reward on its last token, the rest (or everything) on the last token of all."""
    rewards = [-kl_coef * (token.old - token.ref) for token in episode.tokens]
    if where == "end":
        rewards[-1] += episode.reward
        return rewards
    for turn, reward in enumerate(episode.turn_rewards):
        last = max(i for i, token in enumerate(episode.tokens) if token.turn == turn)
        rewards[last] += reward
    rewards[-1] += episode.extra
    return rewards


def reference_gae(
    episode: Episode, where: str, gamma: float, lam: float, kl_coef: float
) -> tuple[list[float], list[float]]:
    rewards = token_rewards(episode, where, kl_coef)
    advantages, following, carried = [], 0.0, 0.0
    for token, reward in zip(reversed(episode.tokens), reversed(rewards), strict=True):
        carried = reward + gamma * following - token.value + gamma * lam * carried
        following = token.value
        advantages.append(carried)
    advantages.reverse()
    values = [token.value for token in episode.tokens]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def close(got: list[list[float]], want: list[list[float]]) -> None:
    for ours, reference in zip(got, want, strict=True):
        assert ours == pytest.approx(reference, abs=1e-9)


@settings(max_examples=40, derandomize=True)
@given(episodes(), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.8]), st.booleans())
def test_gae_runs_over_trained_tokens_only(
    played: list[Episode], gamma: float, lam: float, at_end: bool
) -> None:
    where = "end" if at_end else "turn"
    objective = Objective.model_validate(
        {
            **PLAIN,
            "credit": {"kind": "gae", "gamma": gamma, "lam": lam, "reward_at": where},
            "kl": {"where": "reward", "kind": "k1", "coef": 0.1},
        }
    )
    batch = batch_of(played)
    want = [reference_gae(episode, where, gamma, lam, 0.1) for episode in played]
    close(trained(batch, compute_advantages(objective, batch)), [a for a, _ in want])
    close(trained(batch, value_targets(objective, batch)), [r for _, r in want])


@settings(max_examples=30, derandomize=True)
@given(episodes())
def test_vapo_uses_a_lambda_per_length_and_another_for_the_critic(played: list[Episode]) -> None:
    credit = {"kind": "gae", "gamma": 0.95, "lam_value": 0.7, "length_alpha": 0.5}
    objective = Objective.model_validate({**PLAIN, "credit": credit})
    batch = batch_of(played)
    lams = [max(1 - 1 / (0.5 * len(episode.tokens)), 0) for episode in played]
    want = [reference_gae(e, "turn", 0.95, lam, 0)[0] for e, lam in zip(played, lams, strict=True)]
    close(trained(batch, compute_advantages(objective, batch)), want)
    targets = [reference_gae(episode, "turn", 0.95, 0.7, 0)[1] for episode in played]
    close(trained(batch, value_targets(objective, batch)), targets)


@settings(max_examples=40, derandomize=True)
@given(episodes(), st.sampled_from([1.0, 0.9]))
def test_rewards_to_go_cost_no_discount_at_tool_tokens(played: list[Episode], gamma: float) -> None:
    objective = Objective.model_validate(
        {
            **PLAIN,
            "credit": {"kind": "token", "gamma": gamma},
            "kl": {"where": "reward", "kind": "k1", "coef": 0.1},
        }
    )
    batch = batch_of(played)
    want = []
    for episode in played:
        rewards = token_rewards(episode, "turn", 0.1)
        want.append(
            [
                sum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards)))
                for t in range(len(rewards))
            ]
        )
    close(trained(batch, compute_advantages(objective, batch)), want)


def reference_turn_returns(episode: Episode, gamma: float) -> list[float]:
    rewards = list(episode.turn_rewards)
    rewards[-1] += episode.extra
    return [
        sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards)))
        for k in range(len(rewards))
    ]


@settings(max_examples=40, derandomize=True)
@given(episodes(), st.sampled_from([1.0, 0.9]), st.sampled_from(["none", "group", "group_turn"]))
def test_turn_returns_discount_per_turn_and_compare_turns(
    played: list[Episode], gamma: float, key: str
) -> None:
    baseline = {"kind": "none"} if key == "none" else {"kind": "mean", "key": key}
    objective = Objective.model_validate(
        {
            "baseline": baseline,
            "scale": {"kind": "none"},
            "credit": {"kind": "turn", "gamma": gamma},
        }
    )
    returns = [reference_turn_returns(episode, gamma) for episode in played]

    def peers(i: int, k: int) -> list[float]:
        same_group = [j for j, other in enumerate(played) if other.group == played[i].group]
        if key == "group_turn":
            return [returns[j][k] for j in same_group if k < len(returns[j])]
        return [value for j in same_group for value in returns[j]]

    def advantage(i: int, k: int) -> float:
        if key == "none":
            return returns[i][k]
        others = peers(i, k)
        if max(others) - min(others) <= 1e-6:
            return 0.0
        return returns[i][k] - sum(others) / len(others)

    want = [[advantage(i, t.turn) for t in e.tokens] for i, e in enumerate(played)]
    batch = batch_of(played)
    close(trained(batch, compute_advantages(objective, batch)), want)


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=8, derandomize=True)
@given(episodes())
def test_tool_tokens_change_no_preset(name: str, played: list[Episode]) -> None:
    """The same episodes with and without tool tokens between and around the trained ones."""
    objective = PRESETS[name]
    with_tools, without = batch_of(played), batch_of(played, tool_tokens=False)
    for batch in (with_tools, without):
        batch.teacher_logprobs = batch.ref_logprobs
        batch.baselines = torch.full_like(batch.rewards, 0.25)
        batch.state_ids = torch.zeros_like(batch.turn_rewards, dtype=torch.long)
    close(
        trained(with_tools, compute_advantages(objective, with_tools)),
        trained(without, compute_advantages(objective, without)),
    )


@pytest.mark.parametrize(
    "credit",
    [
        {"kind": "outcome"},
        {"kind": "turn", "gamma": 0.9},
        {"kind": "token", "gamma": 0.9},
        {"kind": "gae", "gamma": 0.9, "lam": 0.8},
        {"kind": "gigpo"},
    ],
    ids=lambda credit: credit["kind"],
)
@settings(max_examples=20, derandomize=True)
@given(played=episodes())
def test_a_trajectory_in_several_rows_is_one_trajectory(
    credit: dict, played: list[Episode]
) -> None:
    """Fan-out: each turn in a row of its own, rows in reverse order; credited the same."""
    stages = PLAIN if credit["kind"] in ("token", "gae") else {"scale": {"kind": "std"}}
    objective = Objective.model_validate({**stages, "credit": credit})
    whole = batch_of(played, tool_tokens=False)
    rows = [(i, turn) for i, e in enumerate(played) for turn in range(len(e.turn_rewards))][::-1]
    index = torch.tensor([i for i, _ in rows])
    fields = ("rewards", "group_ids", "turn_ids", "rollout_logprobs", "values", "turn_rewards")
    states = torch.arange(whole.turn_rewards.shape[1]).expand(len(played), -1) % 2  # type: ignore
    whole.state_ids = states
    mask = (whole.loss_mask != 0)[index] & (
        whole.turn_ids[index] == torch.tensor([[turn] for _, turn in rows])  # type: ignore
    )
    fanned = Batch(
        loss_mask=mask,
        trajectory_ids=index,
        state_ids=states[index],
        **{field: getattr(whole, field)[index] for field in fields},
    )
    expected = compute_advantages(objective, whole)[index]
    torch.testing.assert_close(
        compute_advantages(objective, fanned), torch.where(mask, expected, 0)
    )


def simple(rewards: list[float], groups: list[int], **fields: object) -> Batch:
    rows = len(rewards)
    return Batch(
        loss_mask=torch.ones(rows, 1),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(groups),
        rollout_logprobs=torch.zeros(rows, 1, dtype=torch.float64),
        **fields,  # type: ignore[arg-type]
    )


def advantages(stages: dict, batch: Batch) -> list[float]:
    return compute_advantages(Objective.model_validate(stages), batch)[:, 0].tolist()


def test_groups_go_by_id_not_by_position() -> None:
    batch = simple([1, 5, 0, 7, 1, 6], [4, 9, 4, 9, 4, 9])
    got = advantages({"scale": {"kind": "none"}}, batch)
    assert got == pytest.approx([1 / 3, -1, -2 / 3, 1, 1 / 3, 0])


def test_a_success_rate_divides_the_centred_rewards_of_the_step() -> None:
    batch = simple([1, 0, 2, 3], [0, 0, 1, 1])
    got = advantages({"scale": {"kind": "success_rate"}}, batch)
    assert got == pytest.approx([0.5 / 0.75, -0.5 / 0.75, -0.5 / 0.75, 0.5 / 0.75])


def test_a_group_of_one_and_a_group_without_variance_have_advantage_zero() -> None:
    noise = 1e-9
    batch = simple([3.0, 0.1 + 0.2, 0.3, 0.3 + noise, 1.0, 0.0], [0, 1, 1, 1, 2, 2])
    for baseline in ("mean", "leave_one_out", "second_best"):
        scale = {"kind": "none" if baseline == "leave_one_out" else "std", "eps": 0.0}
        got = advantages({"baseline": {"kind": baseline}, "scale": scale}, batch)
        assert got[:4] == [0.0] * 4
        assert got[4] > 0.5


def test_unscored_trajectories_enter_no_statistic_and_no_loss() -> None:
    batch = simple([1.0, math.nan, 0.0, 2.0], [0, 0, 0, 0])
    objective = Objective.model_validate({"scale": {"kind": "none"}})
    assert advantages({"scale": {"kind": "none"}}, batch) == pytest.approx([0, 0, -1, 1])
    from agentrl.algo import loss_weights

    assert loss_weights(objective, batch)[:, 0].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    metrics = reduce_metrics([advantage_metrics(objective, batch)])
    assert metrics == {"group/zero_variance_fraction": 0.0, "reward/unscored_fraction": 0.25}


def test_rloo_is_unbiased_where_a_token_weighted_baseline_is_not() -> None:
    """Lengths 100, 10, 10, 10 with rewards 1, 0, 0, 0: the baseline counts trajectories."""
    mask = torch.arange(100)[None, :] < torch.tensor([[100], [10], [10], [10]])
    batch = Batch(
        loss_mask=mask,
        rewards=torch.tensor([1.0, 0, 0, 0], dtype=torch.float64),
        group_ids=torch.zeros(4, dtype=torch.long),
        rollout_logprobs=torch.zeros(4, 100, dtype=torch.float64),
    )
    assert compute_advantages(PRESETS["rloo"], batch)[:, 0].tolist() == pytest.approx(
        [1, -1 / 3, -1 / 3, -1 / 3]
    )
    assert compute_advantages(PRESETS["dr_grpo"], batch)[:, 0].tolist() == pytest.approx(
        [0.75, -0.25, -0.25, -0.25]
    )
    opo = {"baseline": {"kind": "mean", "weighting": "token"}, "scale": {"kind": "none"}}
    mean = 100 / 130
    assert compute_advantages(Objective.model_validate(opo), batch)[:, 0].tolist() == pytest.approx(
        [1 - mean, -mean, -mean, -mean]
    )


def test_norm_levels_ddof_and_eps_modes() -> None:
    """Every combination of the std's level, source and degrees of freedom, by hand."""
    rewards, groups = [1.0, 0.0, 0.5, 2.0, 4.0], [0, 0, 0, 1, 1]
    batch = simple(rewards, groups)
    means = [0.5, 0.5, 0.5, 3.0, 3.0]
    centred = [r - m for r, m in zip(rewards, means, strict=True)]

    def std(values: list[float], ddof: int) -> float:
        mean = sum(values) / len(values)
        return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - ddof))

    for ddof in (0, 1):
        for level in ("group", "batch"):
            for of in ("raw", "centred"):
                source = rewards if of == "raw" else centred
                stds = [
                    std([s for s, h in zip(source, groups, strict=True) if h == g], ddof)
                    if level == "group"
                    else std(source, ddof)
                    for g in groups
                ]
                for mode, divisor in (
                    ("add", lambda s: s + 0.1),
                    ("sqrt", lambda s: math.sqrt(s * s + 0.1)),
                    ("max", lambda s: max(s, 0.1)),
                ):
                    scale = {"kind": "std", "level": level, "of": of, "ddof": ddof}
                    scale |= {"eps": 0.1, "eps_mode": mode}
                    want = [c / divisor(s) for c, s in zip(centred, stds, strict=True)]
                    assert advantages({"scale": scale}, batch) == pytest.approx(want)


def test_reward_shaping_order() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    batch = Batch(
        loss_mask=mask,
        rewards=torch.tensor([1.0, 3.0, -9.0], dtype=torch.float64),
        group_ids=torch.zeros(3, dtype=torch.long),
        rollout_logprobs=torch.zeros(3, 6, dtype=torch.float64),
        truncated=torch.tensor([False, True, False]),
    )
    reward = {"scale": 2.0, "bias": 1.0, "clip": 5.0, "truncated": "zero"}
    overlong = {"max_tokens": 5, "buffer_tokens": 2, "factor": 0.5}
    objective = Objective.model_validate({**PLAIN, "reward": {**reward, "overlong": overlong}})
    got = compute_advantages(objective, batch).max(1).values, compute_advantages(objective, batch)
    # 2 * 1 + 1 = 3, 5 sampled tokens are 2 of the buffer's 2: -0.5; truncated: 0; clipped: -5 - 0.5
    assert got[1][0, 0] == pytest.approx(2.5)
    assert got[1][1, 0] == 0
    assert got[1][2, 0] == pytest.approx(-5.5)


def test_reward_components_weights_and_missing_values() -> None:
    nan = math.nan
    components = torch.tensor([[1.0, 0.0], [nan, nan], [0.5, nan], [0.0, 1.0]])
    batch = simple(
        [9.0] * 4, [0] * 4, reward_components=components, reward_names=["right", "brief"]
    )
    weights = {"right": 1.0, "brief": 0.5}
    got = advantages({**PLAIN, "reward": {"weights": weights}}, batch)
    assert got == pytest.approx([1.0, 0.0, 0.5, 0.5])
    got = advantages({**PLAIN, "reward": {"weights": weights, "missing": "exclude"}}, batch)
    assert got == pytest.approx([1.0, 0.0, 0.0, 0.5])
    for wrong, message in (
        ({"right": 1.0}, "component brief has no weight"),
        ({**weights, "long": 1.0}, "names long"),
    ):
        with pytest.raises(ValueError, match=message):
            advantages({**PLAIN, "reward": {"weights": wrong}}, batch)


def test_a_missing_field_is_named() -> None:
    batch = simple([1.0, 0.0], [0, 0])
    for name in ("ppo", "opd", "reinforce_pp"):
        with pytest.raises(ValueError, match=r"Batch\."):
            compute_advantages(PRESETS[name], batch)
        missing = PRESETS[name].needs()
        assert missing


def test_rows_of_one_trajectory_must_agree_on_the_reward() -> None:
    batch = simple([1.0, 0.0], [0, 0], trajectory_ids=torch.tensor([3, 3]))
    batch.turn_ids = torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match="same reward"):
        compute_advantages(PRESETS["grpo"], batch)


def test_gigpo_adds_the_advantage_within_the_same_state() -> None:
    """Two trajectories of two turns; both visit state 7 in turn 0, then separate states."""
    batch = Batch(
        loss_mask=torch.ones(2, 2),
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        group_ids=torch.zeros(2, dtype=torch.long),
        turn_ids=torch.tensor([[0, 1], [0, 1]]),
        rollout_logprobs=torch.zeros(2, 2, dtype=torch.float64),
        turn_rewards=torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        state_ids=torch.tensor([[7, 1], [7, 2]]),
    )
    credit = {"kind": "gigpo", "gamma": 0.5, "episode_weight": 1.0, "step_weight": 2.0}
    objective = Objective.model_validate({"credit": credit, "scale": {"kind": "none"}})
    # episode: +-0.5. Step returns in state 7: 0.5 and 0, centred +-0.25; other states stand alone.
    assert compute_advantages(objective, batch).tolist() == [[1.0, 0.5], [-1.0, -0.5]]


@pytest.mark.parametrize(
    "stages",
    [
        {"whiten": {"mean": "batch", "std": "batch"}},
        {"scale": {"kind": "std", "level": "batch"}},
        {"scale": {"kind": "success_rate"}},
        {"scale": {"kind": "std"}},
    ],
)
def test_statistics_of_an_environment_are_those_of_its_trajectories_alone(stages: dict) -> None:
    rewards, groups = [0.0, 1.0, 3.0, 10.0, 40.0, 20.0], [0, 0, 0, 1, 1, 1]
    mixed = simple(rewards, groups, env_ids=torch.tensor(groups), env_names=["a", "b"])
    within = advantages({**stages, "statistics": "environment"}, mixed)
    alone = [
        advantages(stages, simple(rewards[part], groups[part])) for part in (slice(3), slice(3, 6))
    ]
    assert within == pytest.approx(alone[0] + alone[1])
    has_statistics_of_the_batch = stages != {"scale": {"kind": "std"}}
    assert (advantages(stages, mixed) != pytest.approx(within)) == has_statistics_of_the_batch
