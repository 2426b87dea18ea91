"""`agentrl import --prove`: TRL's own trainer and ours on one recorded batch."""

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs trl: see `make test-adapters`")

from agentrl.cli.examples import example_file
from agentrl.cli.importing import config_of, import_file
from agentrl.cli.main import main
from agentrl.train.prove import TOLERANCE, prove

SAME = {
    "grpo": 'loss_type="grpo"',
    "dapo": 'loss_type="dapo", epsilon_high=0.28',
    "dr_grpo": 'loss_type="dr_grpo", scale_rewards=False, max_completion_length=48',
    "gspo": 'loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-2',
    "cispo": 'loss_type="cispo", epsilon_high=1.3',
    "bnpo": 'loss_type="bnpo", per_device_train_batch_size=4',
    "sapo": 'loss_type="sapo", sapo_temperature_neg=1.1',
    "vespo": 'loss_type="vespo"',
    "two-sided": 'loss_type="grpo", delta=1.5, num_generations=4, temperature=0.8',
    "batch": 'scale_rewards="batch", mask_truncated_completions=True',
    "kl": "beta=0.04",
    "naive kl": "beta=0.04, use_bias_correction_kl=False",
    "vllm": "use_vllm=True",
    "vllm, by token": 'use_vllm=True, vllm_importance_sampling_mode="token_truncate"',
    "vllm, not corrected": "use_vllm=True, vllm_importance_sampling_correction=False",
}
DIFFERS = {
    "not taken": 'loss_type="luspo"',
    "an entry of a list": "top_entropy_quantile=0.2",
    "a KL by the sequence": 'beta=0.5, importance_sampling_level="sequence"',
}


def script(tmp_path, settings):
    path = tmp_path / "grpo.py"
    path.write_text(f'from trl import GRPOConfig\nGRPOConfig("out", {settings})\n')
    return path


def certificate(path):
    found = import_file(path)
    shape = example_file("quickstart/model/config.json").parent
    return prove(found.trainer, found.given, config_of(found), shape)


@pytest.mark.parametrize("settings", SAME.values(), ids=SAME)
def test_an_imported_objective_computes_what_trl_does(tmp_path, settings):
    proved = certificate(script(tmp_path, settings))
    assert proved.holds, str(proved)
    assert max(proved.differences.values()) <= TOLERANCE
    assert proved.theirs.gradient_norm > 0.01 and abs(proved.theirs.loss) > 1e-4


@pytest.mark.parametrize("settings", DIFFERS.values(), ids=DIFFERS)
def test_a_setting_that_is_not_taken_shows(tmp_path, settings):
    path = script(tmp_path, settings)
    assert not certificate(path).holds
    assert import_file(path).left


def test_the_run_file_holds_the_certificate(tmp_path, capsys):
    out = tmp_path / "run.toml"
    arguments = ["import", str(script(tmp_path, SAME["dapo"])), "--prove"]
    assert main([*arguments, "--out", str(out)]) == 0
    assert "# Certificate:" in out.read_text()
    assert "largest difference" in capsys.readouterr().out
    assert main(["import", str(script(tmp_path, DIFFERS["not taken"])), "--prove"]) == 1


def test_the_script_of_the_page_is_taken_whole(tmp_path):
    page = Path(__file__).parents[3] / "docs" / "switching_from_trl.md"
    path = tmp_path / "grpo.py"
    path.write_text(page.read_text().partition("```python\n")[2].partition("```")[0])
    found = import_file(path)
    assert not found.left
    assert found.keys["env.id"][0] == f"trl:{path}:Calculator"
    assert found.keys["rollout.max_turns"][0] == 3
    assert certificate(path).holds
