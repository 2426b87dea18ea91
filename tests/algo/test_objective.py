"""Presets, TOML loading, refused names and refused combinations. No torch is needed here."""

from __future__ import annotations

import tomllib

import pytest
from pydantic import ValidationError

from agentrl.algo import PRESETS, Objective
from agentrl.algo.presets import stages_of
from agentrl.algo.stage import AMBIGUOUS_NAMES, Stage
from agentrl.config import load_config

EXPECTED_PRESETS = [
    *("grpo", "dr_grpo", "ssr_grpo", "dapo", "gspo", "rloo", "ppo", "vapo", "reinforce_pp"),
    *("reinforce_pp_baseline", "lite_ppo", "sapo", "cispo", "m2po", "opd", "search_r1"),
    *("maxrl", "gigpo", "gmpo", "remax", "dppo", "swe_grpo", "bnpo", "areal", "slime", "trl"),
]


def test_presets_are_complete_and_name_themselves() -> None:
    assert list(PRESETS) == EXPECTED_PRESETS
    assert all(PRESETS[name].preset == name for name in PRESETS)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reinforce_plus_plus", "it is preset 'reinforce_pp' here"),
        ("gdpo", "objective.reward.combine = 'normalize_then_sum'"),
        ("dr_grop", "did you mean 'dr_grpo'?"),
        ("xyz", "presets are grpo, dr_grpo"),
    ],
)
def test_an_unknown_preset_says_what_is_meant(name: str, said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Objective.from_preset(name)
    assert f"unknown preset {name!r}" in str(raised.value) and said in str(raised.value)


def test_presets_differ_from_each_other() -> None:
    stages = [objective.model_dump_json(exclude={"preset"}) for objective in PRESETS.values()]
    assert len(set(stages)) == len(stages)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_json_and_toml_without_nulls(name: str) -> None:
    objective = PRESETS[name]
    assert Objective.model_validate_json(objective.model_dump_json()) == objective
    without_none = objective.model_dump(mode="json", exclude_none=True)
    assert Objective.model_validate(without_none) == objective


def test_toml_overrides_merge_into_the_preset() -> None:
    data = tomllib.loads("""
        [objective]
        preset = "dapo"
        trust = [{ kind = "veto", low = 1e-3 }]
        [objective.surrogate]
        high = 0.3
        cap = 3.0
        [objective.reward.overlong]
        max_tokens = 100
        buffer_tokens = 20
        [objective.kl]
        where = "loss"
        coef = 0.01
    """)
    objective = Objective.model_validate(data["objective"])
    surrogate = objective.surrogate
    assert surrogate.kind == "clip"
    assert (surrogate.low, surrogate.high, surrogate.cap) == (0.2, 0.3, 3.0)
    assert objective.aggregate.kind == "token"
    assert objective.reward.overlong is not None and objective.reward.overlong.factor == 1
    assert [mask.kind for mask in objective.trust] == ["veto"]
    assert objective == Objective.from_preset("dapo", {**data["objective"]})


def test_another_kind_starts_from_its_own_defaults() -> None:
    objective = Objective.from_preset("dapo", {"surrogate": {"kind": "sapo"}})
    assert objective.surrogate.kind == "sapo"
    assert objective.surrogate.tau_negative == 1.05
    assert stages_of("dapo")["surrogate"] == {"high": 0.28}  # presets stay as they are


def test_a_table_without_a_kind_keeps_the_kind() -> None:
    for preset in (None, "grpo"):
        stages = {"scale": {"eps": 1e-4}, "surrogate": {"high": 0.3}, "preset": preset}
        objective = Objective.model_validate({**stages, "aggregate": {"count_empty": True}})
        assert objective.scale.kind == "std" and objective.surrogate.kind == "clip"
        assert objective.aggregate.kind == "sequence_token_mean"


def test_none_as_text_switches_a_value_off() -> None:
    overlong = {"max_tokens": 10, "buffer_tokens": 5}
    objective = Objective.model_validate({"reward": {"overlong": overlong}})
    assert objective.reward.overlong is not None
    assert Objective.model_validate({"critic": {"value_clip": "none"}}).critic.value_clip is None
    dumped = Objective.from_preset("ppo", {"critic": {"value_clip": "none"}}).model_dump(
        mode="json", exclude_none=True
    )
    assert Objective.model_validate(dumped).critic.value_clip is None


def test_what_is_seldom_meant_is_said(caplog: pytest.LogCaptureFixture) -> None:
    run = {"model": {"path": "m"}, "objective": {"whiten": {"mean": "group"}}}
    load_config(run, ["--objective.kl", '{where = "loss", kind = "k1", coef = 0.1}'])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "long trajectories weigh more" in said[0]
    assert "is zero on average" in said[1]


def test_unknown_keys_and_presets_are_errors() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Objective.model_validate({"surrogate": {"kind": "clip", "hihg": 0.3}})
    with pytest.raises(ValidationError, match="presets are grpo, dr_grpo"):
        Objective.model_validate({"preset": "ppg"})


@pytest.mark.parametrize("name", AMBIGUOUS_NAMES)
@pytest.mark.parametrize("place", ["stage", "value", "top"])
def test_a_name_with_two_meanings_is_refused_with_both(name: str, place: str) -> None:
    data = {
        "stage": {"surrogate": {"kind": "clip", name: 0.2}},
        "value": {"aggregate": {"kind": name}},
        "top": {name: True},
    }[place]
    with pytest.raises(ValidationError) as refused:
        Objective.model_validate(data)
    message = str(refused.value)
    assert "means two things" in message
    for reading in AMBIGUOUS_NAMES[name]:
        assert reading in message


def test_a_sequence_weight_must_say_product_or_geometric() -> None:
    with pytest.raises(ValidationError, match=r"sequence_product.*sequence_geometric"):
        Objective.model_validate({"off_policy": {"level": "sequence"}})


PLAIN = {"baseline": {"kind": "none"}, "scale": {"kind": "none"}}
GAE = {"credit": {"kind": "gae"}}
WEIGHT = {"off_policy": {"level": "token"}}
SEQUENCE = {"ratio": {"level": "sequence"}}
CONTRADICTIONS: list[tuple[dict, str]] = [
    ({"ratio": {"anchor": "rollout"}, **WEIGHT}, "corrects the sampler twice"),
    ({"ratio": {"anchor": "rollout"}, "surrogate": {"kind": "logprob"}}, "uses no ratio"),
    ({"kl": {"where": "reward", "coef": 0.1, "gradient": "score"}}, "has no gradient"),
    ({"kl": {"where": "loss"}}, "penalty of zero"),
    ({"kl": {"coef": 0.1}}, "no effect"),
    ({"kl": {"target": 0.1}}, "not in use"),
    ({"kl": {"where": "both", "coef": 0.1}}, "'none', 'loss' or 'reward'"),
    ({"baseline": {"kind": "none"}, "scale": {"kind": "mean"}}, "MaxRL"),
    ({"baseline": {"kind": "none"}}, "without a baseline"),
    ({"baseline": {"kind": "given"}}, "no group statistics"),
    ({"credit": {"kind": "token"}, "baseline": {"kind": "optimal_token"}}, "per token"),
    ({**GAE}, "baseline is the critic"),
    ({"credit": {"kind": "token"}}, "cannot be their baseline"),
    (
        {"baseline": {"kind": "optimal_token"}, "scale": {"kind": "none"}},
        "needs credit.kind = 'token'",
    ),
    ({**GAE, "baseline": {"kind": "none"}}, "without a baseline"),
    ({"baseline": {"key": "group_turn"}}, "needs credit.kind = 'turn'"),
    ({"credit": {"kind": "turn"}, "baseline": {"kind": "second_best"}}, "whole trajectories"),
    ({"baseline": {"kind": "second_best", "key": "batch"}}, "within a group"),
    ({"reward": {"combine": "normalize_then_sum"}}, "needs reward.weights"),
    (
        {
            "reward": {"combine": "normalize_then_sum", "weights": {"a": 1}},
            "credit": {"kind": "turn"},
        },
        "normalises whole trajectories",
    ),
    ({"whiten": {"std": "batch", "leave_one_out": True}}, "leave_one_out needs a mean"),
    ({"surrogate": {"kind": "clip", "high": 0.28, "cap": 1.1}}, "is not above 1 + high = 1.28"),
    ({"surrogate": {"kind": "cispo", "low": 2.0, "high": 1.0}}, "low must be below"),
    ({**SEQUENCE, "aggregate": {"kind": "sequence_token_sum"}}, "once per token"),
    ({**SEQUENCE, "aggregate": {"kind": "constant", "max_tokens": 8}}, "once per token"),
    ({"ratio": {"mean_advantage": True}}, "needs ratio.level = 'sequence'"),
    ({**SEQUENCE, "surrogate": {"kind": "gmpo"}}, "needs the ratio of each token"),
    ({"aggregate": {"kind": "constant"}}, "needs aggregate.max_tokens"),
    ({"aggregate": {"kind": "local"}}, "needs aggregate.local_rows"),
    (
        {"aggregate": {"denominator": "kept"}, "trust": [{"kind": "opsm"}]},
        "known before the forward pass",
    ),
    ({"off_policy": {"level": "token", "low": 2.0, "high": 1.0}}, "low must be below"),
    ({"off_policy": {"high": 2.0}}, "no effect"),
    ({"distill": {"where": "loss", "aggregate": {"denominator": "kept"}}}, "must be 'original'"),
    ({"distill": {"aggregate": {"kind": "constant"}}}, "needs aggregate.max_tokens"),
    ({"surrogate": {"kind": "none"}}, "nothing to learn from"),
    ({**GAE, **PLAIN, "advantage": "a:b"}, "a critic for nothing"),
    (
        {"reward": {"combine": "normalize_then_sum", "weights": {"a": 1}}, "advantage": "a:b"},
        "which objective.advantage replaces",
    ),
]


@pytest.mark.parametrize(("stages", "part"), CONTRADICTIONS, ids=[p for _, p in CONTRADICTIONS])
def test_contradictions_are_refused_with_a_remedy(stages: dict, part: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Objective.model_validate(stages)
    (problem,) = refused.value.errors()
    assert part in problem["msg"]
    assert "\n" not in problem["msg"]


def test_needs_names_the_fields_an_objective_cannot_do_without() -> None:
    assert PRESETS["grpo"].needs() == frozenset()
    assert PRESETS["ppo"].needs() == {"values"}
    assert PRESETS["search_r1"].needs() == {"ref_logprobs"}
    assert PRESETS["opd"].needs() == {"teacher_logprobs"}
    assert PRESETS["m2po"].needs() == {"old_logprobs"}
    assert PRESETS["ssr_grpo"].needs() == {"policy_versions", "current_version"}
    assert PRESETS["rloo"].needs_groups and not PRESETS["ppo"].needs_groups
    assert PRESETS["vapo"].needs_critic


def test_every_field_says_what_it_is() -> None:
    """The help of the command line is these descriptions; only `kind` speaks for itself."""
    stages = Stage.__subclasses__()
    assert len(stages) > 30
    silent = [
        f"{stage.__name__}.{name}"
        for stage in stages
        for name, field in stage.model_fields.items()
        if not field.description and name != "kind"
    ]
    assert not silent
    assert all(stage.__doc__ for stage in stages)


def test_every_export_resolves() -> None:
    import agentrl.algo

    for name in agentrl.algo.__all__:
        assert getattr(agentrl.algo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = agentrl.algo.nothing
