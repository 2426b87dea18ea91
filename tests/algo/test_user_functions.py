"""A user's own loss and advantage: the example of the docs, what is refused, and a real run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from agentrl.algo import Batch, Objective, compute_advantages, policy_loss, prepare
from agentrl.algo.split_check import check_user_functions
from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
QUICKSTART = ROOT / "examples" / "quickstart" / "run.toml"
SAME_BUILT_IN = {"baseline": {"kind": "leave_one_out"}, "scale": {"kind": "none"}}

REFUSED = {
    "loss": {
        "scalar(ratio, advantages): return -(ratio * advantages).mean()": "one float per token",
        "ids(logprobs, token_ids): return token_ids": "returned a Tensor",
        "centred(ratio, advantages): return -ratio * (advantages - advantages.mean())": (
            "a mean over the micro-batch"
        ),
        "padded(ratio, advantages): return -ratio * advantages / ratio.shape[1]": "micro-batches",
        "neighbour(ratio, advantages): return -ratio * advantages.roll(1, 0)": "micro-batches",
        "constant(advantages): return -advantages": "has no gradient",
        "infinite(logprobs): return (logprobs * 0).log()": "not finite",
        "steep(ratio): return (ratio - ratio.detach()).abs().sqrt()": "gradient that is not finite",
        "unknown(logprobs, rewardz): return logprobs": "'rewardz' is not offered",
        "any_number(*tensors): return tensors[0]": "'*tensors' is not offered",
    },
    "advantage": {
        "positional(rewards): return rewards - rewards.view(-1, 2).mean(1).repeat_interleave(2)": (
            "order of the rows"
        ),
        "one(rewards): return rewards.mean()": "(B, T) or (B,)",
        "single(rewards, group_ids): return rewards / (group_ids == 9).sum()": "not finite",
        "live(logprobs): return logprobs": "'logprobs' is not offered",
    },
}


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """The example of the docs, to the letter."""
    (block,) = re.findall(r"```python\n# my_objective.py\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 11
    path = tmp_path / "my_objective.py"
    path.write_text(block)
    return path


def example(path: Path, **stages: object) -> Objective:
    own = {"advantage": f"{path}:lead", "loss": f"{path}:clipped"}
    return Objective.model_validate({**own, **stages})


def test_the_example_computes_what_the_same_stages_do(own_file: Path) -> None:
    torch.manual_seed(0)
    old, live = -torch.rand(5, 4), -torch.rand(5, 4)
    results = []
    for objective in (example(own_file), Objective.model_validate(SAME_BUILT_IN)):
        check_user_functions(objective)
        batch = Batch(
            loss_mask=torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0] * 4, [1, 1, 0, 0], [1] * 4]),
            rewards=torch.tensor([1.0, 0.0, 0.5, 1.0, float("nan")]),
            group_ids=torch.tensor([0, 0, 0, 1, 0]),
            rollout_logprobs=old,
            old_logprobs=old,
        )
        logprobs = live.clone().requires_grad_()
        prepare(objective, batch)
        loss = policy_loss(objective, batch, logprobs).loss
        (gradient,) = torch.autograd.grad(loss, logprobs)
        results.append((batch.advantages, loss.detach(), gradient))
    for own, built_in in zip(*results, strict=True):
        torch.testing.assert_close(own, built_in)
    assert (results[0][0] != 0).any()


def test_inputs_are_asked_for_by_name_and_only_then_computed(own_file: Path) -> None:
    own_file.write_text(
        "def loss(logprobs, ref_logprobs, old_logprobs, rewards, weight=0.5):\n"
        "    return weight * (logprobs - ref_logprobs) ** 2 * rewards[:, None]\n"
        "def advantage(rewards, old_logprobs, turn_rewards, mask):\n"
        "    assert (old_logprobs[~mask] == 0).all()\n"
        "    return rewards[:, None] + turn_rewards[:, :1] + old_logprobs\n"
    )
    own = {"loss": f"{own_file}:loss", "advantage": f"{own_file}:advantage"}
    objective = Objective.model_validate(own)
    check_user_functions(objective)
    assert objective.needs() == {"ref_logprobs", "old_logprobs"}
    assert not objective.needs_groups
    batch = Batch(torch.ones(1, 2), torch.ones(1), torch.zeros(1), torch.zeros(1, 2))
    with pytest.raises(ConfigError, match="needs turn_rewards"):
        compute_advantages(objective, batch)


@pytest.mark.parametrize(
    ("key", "function", "reason"),
    [(key, code, reason) for key, cases in REFUSED.items() for code, reason in cases.items()],
    ids=lambda text: text.partition("(")[0],
)
def test_what_would_go_wrong_later_is_refused_now(
    key: str, function: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"def {function}\n")
    reference = f"{path}:{function.partition('(')[0]}"
    with pytest.raises(ConfigError) as refused:
        check_user_functions(Objective.model_validate({key: reference}))
    message = str(refused.value)
    assert f"objective.{key} = '{reference}'" in message and reason in message
    assert "\n" not in message


AGGREGATES = [
    *({"kind": kind} for kind in ("token", "sequence_token_mean", "sequence_token_sum", "prompt")),
    {"kind": "constant", "max_tokens": 8},
    {"kind": "local", "local_rows": 2},
    {"kind": "trajectory", "count_empty": True},
    {"kind": "token", "denominator": "kept"},
    {"kind": "sum"},
]


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_a_loss_that_depends_on_the_split_hides_behind_no_aggregate(
    aggregate: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import torch\n"
        "def alone(ratio, advantages):\n"
        "    return -ratio * advantages\n"
        "def in_row(ratio, advantages, mask):\n"
        "    x = torch.where(mask, ratio * advantages, 0)\n"
        "    return x.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1) - x\n"
        "def less_mean(ratio, advantages, mask):\n"
        "    x = -ratio * advantages\n"
        "    return x - (x * mask).sum() / mask.sum().clamp(min=1)\n"
        "def less_mean_of_columns(ratio, advantages, mask):\n"
        "    x = torch.where(mask, -ratio * advantages, 0)\n"
        "    return x - x.sum(0) / mask.sum(0).clamp(min=1)\n"
        "def exchanged(ratio, advantages, mask):\n"
        "    x = torch.where(mask, -ratio * advantages, 0)\n"
        "    return torch.where(mask, x.sum() / mask.sum().clamp(min=1), 0)\n"
    )
    trust = {"trust": [{"kind": "veto"}]} if "denominator" in aggregate else {}
    for name in ("alone", "in_row"):
        check_user_functions(
            Objective.model_validate({"loss": f"{path}:{name}", "aggregate": aggregate, **trust})
        )
    for name in ("less_mean", "less_mean_of_columns", "exchanged"):
        with pytest.raises(ConfigError, match="micro-batches"):
            check_user_functions(
                Objective.model_validate(
                    {"loss": f"{path}:{name}", "aggregate": aggregate, **trust}
                )
            )


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("clipped", "names nothing that can be imported"),
        ("no_such_file.py:clipped", "no file"),
        ("no_such_module:clipped", "no module named 'no_such_module'"),
        ("agentrl.errors:nothing", "has no 'nothing'"),
        ("agentrl.errors:__name__", "is not a function"),
    ],
)
def test_a_function_that_is_not_there(reference: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "m"\n[objective]\nloss = "{reference}"\n')
    with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
        load_config(path, [])
    assert str(refused.value).startswith(f"{path}: objective.loss = ")


def test_stale_samples_need_a_loss_that_corrects_for_them(own_file: Path) -> None:
    own_file.write_text("def plain(logprobs, advantages):\n    return -logprobs * advantages\n")
    run = own_file.with_name("run.toml")
    run.write_text('[model]\npath = "m"\n[objective]\nloss = "my_objective.py:plain"\n')
    stale = ["--inference.backend", "vllm", "--rollout.max_staleness", "1"]
    assert load_config(run, []).objective.loss == f"{own_file}:plain"
    with pytest.raises(ConfigError, match="nothing corrects for samples of an older policy"):
        load_config(run, stale)
    corrected = load_config(run, [*stale, "--objective.off_policy.level", "token"])
    assert corrected.objective.ratio.anchor == "old"


def test_a_real_run_learns_as_with_the_same_stages(own_file: Path, tmp_path: Path) -> None:
    arguments = [
        *("train", str(QUICKSTART), "--run.num_steps", "2", "--train.num_minibatches", "2"),
        *("--rollout.groups_per_step", "4", "--rollout.group_size", "4"),
        *("--train.token_budget", "300"),
    ]
    own = [f"--objective.advantage={own_file}:lead", f"--objective.loss={own_file}:clipped"]
    built_in = ["--objective.baseline.kind=leave_one_out", "--objective.scale.kind=none"]
    histories = []
    for name, overrides in (("own", own), ("built_in", built_in)):
        run_dir = tmp_path / name
        assert main([*arguments, *overrides, "--run.dir", str(run_dir)]) == 0
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        keys = ("reward/mean", "loss/policy", "advantage/abs_mean", "train/grad_norm")
        histories.append([[row[key] for key in keys] for row in rows])
    assert len(histories[0]) == 2
    for one, other in zip(*histories, strict=True):
        # The loss is a sum of terms near 1 that nearly cancel.
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert histories[0][0][3] > 0
