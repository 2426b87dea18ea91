"""Checks run files made from other trainers' scripts and configurations."""

import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl.algo.objective import deep_merge
from agentrl.cli.importing import import_file, run_file
from agentrl.config.load import load_config, valid_keys
from agentrl.config.peers import peers
from agentrl.config.toml_text import toml_value
from agentrl.errors import ConfigError, DataError

OF_A_KIND = ("env.config.", "reward.options.", "objective.surrogate.", "objective.credit.")
"""Tables whose keys depend on what stands in them."""


def imported(tmp_path: Path, name: str, text: str, trainer: str | None = None):
    (tmp_path / name).write_text(text)
    return import_file(tmp_path / name, trainer)


def values(found) -> dict:
    return {key: value for key, (value, _) in found.keys.items()}


@pytest.mark.parametrize("peer", peers().values(), ids=peers())
def test_every_key_of_the_table_exists(peer):
    keys = valid_keys()
    of_rows = [row.to for row in peer.rows.values() if row.to] + [
        key for row in peer.rows.values() for key in row.also
    ]
    of_values = [key for row in peer.rows.values() for mine in row.values.values() for key in mine]
    for key in [*of_rows, *of_values, *peer.defaults]:
        assert key in keys or key.startswith(OF_A_KIND), key
    assert {*peer.asked} <= peer.rows.keys()
    assert {row.needs for row in peer.rows.values() if row.needs} <= peer.rows.keys()


@pytest.mark.parametrize(
    ("peer", "mine"),
    [
        pytest.param(peer, mine, id=f"{peer.name}: {row.theirs}")
        for peer in peers().values()
        for row in peer.rows.values()
        for mine in row.values.values()
        if mine
    ],
)
def test_every_value_of_the_table_is_one(peer, mine):
    around = ["--model.path=m", "--inference.backend=vllm", f"--objective.preset={peer.preset}"]
    if "model.quantization" in mine:
        around += ["--model.lora.rank=4"]
    if mine.get("objective.reward.combine") == "normalize_then_sum":
        around += ["--objective.reward.weights.a=1"]
    if "objective.whiten.leave_one_out" in mine:
        around += ["--objective.whiten.mean=group"]
    if mine.get("objective.baseline.kind") == "none":
        around += ["--objective.scale.kind=none"]
    if any(key.startswith("objective.kl.") for key in mine):
        around += ["--objective.kl.where=loss", "--objective.kl.coef=0.1"]
    if "objective.trust" in mine:
        around += ["--rollout.max_staleness=1"]
    if mine.get("objective.preset") == "opd":
        around += ["--teacher.path=t"]
    if mine.get("objective.aggregate.kind") == "constant":
        around += ["--objective.aggregate.max_tokens=512"]
    if mine.get("objective.off_policy.level", "none") != "none":
        around += ["--objective.off_policy.high=2"]
    load_config({}, [*around, *(f"{key}={toml_value(value)}" for key, value in mine.items())])


TRL = """
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig

NAME = "Qwen/Qwen2.5-0.5B-Instruct"
raise SystemExit("a script is read, not run")


def correct(completions, answer, **kwargs):
    return [float(a in c[0]["content"]) for c, a in zip(completions, answer)]


args = GRPOConfig(
    output_dir="out", learning_rate=2e-6, num_generations=4, per_device_train_batch_size=8,
    gradient_accumulation_steps=2, steps_per_generation=4, beta=0.04, loss_type="grpo",
    scale_rewards=False, max_steps=100, num_iterations=1, epsilon=0.1, new_key=1, top_k=0,
)
trainer = GRPOTrainer(
    model=NAME, reward_funcs=correct, args=args, train_dataset=load(),
    peft_config=LoraConfig(r=16, target_modules=["q_proj"]),
)
"""


def test_a_script_of_trl(tmp_path):
    found = imported(tmp_path, "grpo.py", TRL)
    mine = values(found)
    assert mine["model.path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert mine["model.lora.rank"] == 16 and mine["model.lora.targets"] == ["q_proj"]
    # 8 x 4 completions are played at once, and trained in two updates.
    assert mine["rollout.groups_per_step"] == 8 and mine["train.num_minibatches"] == 2
    assert mine["run.num_steps"] == 50
    assert mine["objective.kl.coef"] == 0.04 and mine["objective.kl.gradient"] == "unbiased"
    assert mine["objective.scale.kind"] == "none" and mine["rollout.top_k"] == -1
    assert mine["objective.surrogate.low"] == mine["objective.surrogate.high"] == 0.1
    assert mine["train.lr_schedule"] == "linear", "TRL's default, not ours"
    assert mine["reward.functions"] == [f"{tmp_path / 'grpo.py'}:correct"]
    todo = "\n".join(found.left.values())
    assert "unknown here: new_key = 1" in todo and "load()" in todo and "__main__" in todo


@pytest.mark.parametrize(
    ("arguments", "expected", "gone"),
    [
        ("loss_type='cispo', epsilon_high=5.0", {"objective.surrogate.high": 5.0}, "low"),
        ("loss_type='cispo', epsilon=0.3", {"objective.surrogate.high": 0.3}, "low"),
        ("loss_type='sapo', epsilon=0.3, delta=2.0", {"objective.surrogate.kind": "sapo"}, "cap"),
        ("loss_type='dr_grpo'", {"objective.aggregate.max_tokens": 512}, "low"),
        ("epsilon_high=0.28", {"objective.surrogate.high": 0.28}, "low"),
        ("scale_rewards='batch'", {"objective.scale.level": "batch"}, "low"),
        ("importance_sampling_level='sequence'", {"objective.ratio.level": "sequence"}, "low"),
    ],
)
def test_what_a_loss_of_trl_means(arguments, expected, gone, tmp_path):
    found = imported(tmp_path, "a.py", f"trl.GRPOConfig(learning_rate=1e-6, {arguments})\n")
    assert expected.items() <= values(found).items()
    assert f"objective.surrogate.{gone}" not in values(found)
    load_config(
        deep_merge(tomllib.loads(run_file(found, tmp_path / "a.py")), {"model": {"path": "m"}})
    )


def test_a_script_of_verl(tmp_path):
    text = (
        "N=${N:-5}\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\\n"
        "  data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=1024 \\\n"
        "  actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=$N \\\n"
        "  actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.name=vllm \\\n"
        "  algorithm.kl_ctrl.kl_coef=0.01 actor_rollout_ref.actor.kl_loss_coef=0.5 \\\n"
        "  actor_rollout_ref.actor.optim.lr=1e-6 trainer.save_freq=-1 data.x=$HOME/y $@\n"
    )
    found = imported(tmp_path, "run.sh", text)
    mine = values(found)
    assert mine["rollout.group_size"] == 5 and mine["train.num_minibatches"] == 4
    assert mine["rollout.max_context_tokens"] == 1536 and mine["train.learning_rate"] == 1e-6
    assert not any(key.startswith("objective.kl") for key in mine), "both KLs are off in verl"
    assert mine["objective.aggregate.kind"] == "token" and mine["objective.surrogate.cap"] == 3.0
    assert "run.save_every" not in mine and "data.x" in "\n".join(found.left.values())


def test_a_script_of_slime(tmp_path):
    text = (
        "ARGS=(\n  --hf-checkpoint /m  # the model\n  #--hf-checkpoint /other\n"
        "  --rollout-batch-size 32 --n-samples-per-prompt 8\n  --global-batch-size 128\n"
        "  --use-kl-loss\n  --kl-loss-coef 0.001\n  --rollout-stop a b\n"
        "  --rollout-max-response-len 8192\n)\npython3 train.py ${ARGS[@]} --strange 3\n"
    )
    found = imported(tmp_path, "run.sh", text)
    mine = values(found)
    assert mine["model.path"] == "/m" and mine["train.num_minibatches"] == 2
    assert mine["objective.kl.where"] == "loss" and mine["objective.kl.coef"] == 0.001
    assert mine["rollout.stop_strings"] == ["a", "b"]
    assert mine["rollout.max_context_tokens"] == 8192 + 4096
    todo = "\n".join(found.left.values())
    assert "--strange = 3" in todo and "--lr: not given; set train.learning_rate" in todo


def test_a_yaml_of_areal(tmp_path):
    text = (
        "gconfig: {n_samples: 4, max_new_tokens: 1024}\nseed: ${env:SEED}\n"
        "actor:\n  path: m\n  optimizer: {lr: 1e-5, beta1: 0.8, beta2: 0.9}\n  eps_clip: 0.4\n"
        "  kl_ctl: 0.0\n  reward_norm: {mean_level: group, std_level: null}\n"
        "ref: {path: '${actor.path}'}\nrollout: {max_head_offpolicyness: 2}\n"
    )
    found = imported(tmp_path, "grpo.yaml", text)
    mine = values(found)
    assert mine["train.learning_rate"] == 1e-5 and mine["train.betas"] == [0.8, 0.9]
    assert mine["rollout.max_staleness"] == 2 and mine["objective.scale.kind"] == "none"
    assert "ref.path = m" in "\n".join(found.left.values()) and "SEED" in "\n".join(
        found.left.values()
    )


def test_a_toml_of_prime_rl(tmp_path):
    text = (
        'max_steps = 20\n[model]\nname = "m"\n[orchestrator]\nbatch_size = 128\ngroup_size = 8\n'
        '[[orchestrator.train.env]]\nname = "a"\n'
    )
    mine = values(imported(tmp_path, "rl.toml", text))
    assert mine["rollout.groups_per_step"] == 16 and mine["rollout.group_size"] == 8


@pytest.mark.parametrize("name", ["grpo.py", "run.toml"])
def test_what_is_written_is_a_run_file(name, tmp_path):
    text = TRL if name == "grpo.py" else 'max_steps = 20\n[model]\nname = "m"\n[orchestrator]\n'
    found = imported(tmp_path, name, text + ("batch_size = 12\n" if name == "run.toml" else ""))
    written = run_file(found, tmp_path / name)
    loaded = load_config(tomllib.loads(written))
    assert loaded.model.path == found.keys["model.path"][0]
    assert "# num_generations = 4" in written or name == "run.toml"
    if name == "run.toml":
        assert "orchestrator.batch_size / group_size = 1.5" in "\n".join(found.left.values())


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.py", "def (", DataError),
        ("a.yaml", "- 1\n", DataError),
        ("a.yaml", "a: [1\n", DataError),
        ("a.py", "x = \0\n", DataError),
        ("a.py", "x = " + "(" * 500 + ")" * 500, DataError),
        ("a.toml", "x =", DataError),
        ("a.sh", "echo hello\n", ConfigError),
        ("a.py", "print(1)\n", ConfigError),
    ],
)
def test_what_is_no_such_file(name, text, error, tmp_path):
    with pytest.raises(error, match=str(tmp_path / name)):
        imported(tmp_path, name, text)


def test_an_unknown_key_that_another_trainer_has_is_named():
    with pytest.raises(ConfigError, match=r"rollout\.group_size"):
        load_config({}, ["--model.path=m", "--rollout.num_generations=8"])


def test_a_trl_script_with_its_own_class_and_rows_needs_nothing_more(tmp_path):
    found = imported(
        tmp_path,
        "grpo.py",
        "from trl import GRPOConfig, GRPOTrainer\n"
        "class Game:\n    def reset(self, **row): ...\n"
        "def right(completions, **kwargs): return [1.0 for _ in completions]\n"
        "if __name__ == '__main__':\n"
        "    GRPOTrainer(model='m', args=GRPOConfig('out', max_tool_calling_iterations=2),\n"
        "        train_dataset=load_dataset('json', data_files='rows.jsonl', split='train'),\n"
        "        environment_factory=Game, reward_funcs=right)\n",
    )
    mine = values(found)
    assert mine["env.id"] == f"trl:{tmp_path}/grpo.py:Game"
    assert mine["env.config.tasks"] == "rows.jsonl" and mine["rollout.max_turns"] == 3
    assert found.left == {}


def test_what_places_a_run_on_machines_is_counted_apart(tmp_path):
    found = imported(
        tmp_path,
        "rl.toml",
        '[orchestrator]\nbatch_size = 64\ngroup_size = 8\n[slurm]\njob_name = "a"\n'
        "[inference.vllm]\ntensor_parallel_size = 2\n[odd]\nkey = 1\n",
    )
    (placed,) = [line for line in found.nothing if "machines" in line]
    assert placed.startswith("2 settings")
    assert any("odd.key" in line for line in found.left.values())


@pytest.mark.parametrize("trainer", sorted(peers().keys() - {"trl"}))
def test_there_is_a_certificate_for_trl_alone(tmp_path, trainer):
    from agentrl.train.prove import prove

    with pytest.raises(ConfigError, match=trainer):
        prove(trainer, {}, load_config({"model": {"path": "m"}}), tmp_path)


@pytest.mark.skipif(find_spec("trl") is not None, reason="TRL is installed here")
def test_the_proof_asks_for_trl(tmp_path):
    from agentrl.train.prove import prove

    with pytest.raises(ConfigError, match="pip install trl"):
        prove("trl", {}, load_config({"model": {"path": "m"}}), tmp_path)
