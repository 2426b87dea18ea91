"""Commands answer wrong input with one clear line and no traceback, and write nothing."""

import os
from pathlib import Path

import pytest

from agentrl.cli.main import main

RUN = str(Path(__file__).parents[1] / "examples" / "quickstart" / "run.toml")

FILES = {
    "tran.toml": "[model]\npath = 'm'\n[tran]\nlearning_rate = 1\n",
    "model.toml": "[run]\nseed = 1\n",
    "broken.toml": "[model\n",
    "true.toml": "[model]\npath = 'm'\n[run]\nnum_steps = true\n",
    "urls.toml": "[model]\npath = 'm'\n[inference]\nurls = ['http://127.0.0.1:9']\n",
    "table.toml": "[model]\npath = 'm'\n[env]\nconfig = 5\n",
    "sums.py": "class Sums:\n    pass\n",
    "raises.py": "raise RuntimeError('on import')\n",
    "bare/config.json": '{"model_type": "qwen3"}',
    "empty.jsonl": "",
    "words.jsonl": "words\n",
    "file": "a file, where a directory is wanted\n",
}

OVERRIDES = [
    ("--env.config garbage", "--env.config: 'garbage' is not a table", "--env.config.name 1"),
    ("--env.config 5", "--env.config: '5' is not a table", "such as --env.config '{"),
    ('--env.config {"digits"', "is not a table", "JSON or TOML"),
    ("--env.config [1]", "is not a table", "JSON or TOML"),
    ('--env.config {"digitz":3}', "no key 'digitz'", "did you mean digits?"),
    ('--env.config {"digits":"many"}', "environment math", "digits"),
    ("--env.config.digitz 3", "no key 'digitz'", "did you mean digits?"),
    ("--env.id mathh", "no environment 'mathh'", "math"),
    ("--env.id none.py:Sums", "there is no file", "none.py"),
    ("--env.id sums.py:Other", "sums.py", "Other"),
    ("--env.id sums.py:Sums", "Sums", "not an Environment class"),
    ("--env.id raises.py:Sums", "raises.py", "on import"),
    ("--objective.trust 5", "--objective.trust", "is not a list"),
    ('--objective.trust [{"kind":"vetoo"}]', "--objective.trust", "vetoo"),
    ("--objective.preset grop", "grop", "grpo"),
    ("--objective 5", "is not a table", "--objective.preset"),
    ("--reward.options 5", "--reward.options: '5' is not a table", "--reward.options '{"),
    ('--reward.options {"f1":{}}', "reward.options has f1", "reward.functions"),
    ("--rollout.template x", "--rollout.template: 'x' is not a table", "--rollout.template '{"),
    ("--rollout.stop_strings 5", "--rollout.stop_strings", '\'["a", "b"]\''),
    ("--train.router_replay true --model.compile true", "train.router_replay", "model.compile"),
    (
        "--train.router_replay true --rollout.replay_share 0.5 --objective.ratio.anchor rollout",
        "lacks the routes",
        "set one of them to its default",
    ),
    ("--model.reference_every 2", "uses no reference policy", "objective.kl.where"),
    (
        "--model.reference_every 2 --model.lora.rank 4",
        "model.reference_every",
        "leave model.reference_every out",
    ),
    ("--rollout.repetition_penalty 1.2", "rollout.repetition_penalty", "eval.repetition_penalty"),
    ("--rollout.drop_zero_variance true", "rollout.drop_zero_variance", "rollout.keep"),
    ("--rollout.stop_token_ids [-1]", "rollout.stop_token_ids", "greater than or equal to 0"),
    ("--model.freeze x --model.lora.rank 4", "model.freeze", "model.lora.targets"),
    ("--rollout 5", "--rollout: '5' is not a table", "--rollout.groups_per_step"),
    ('--rollout {"group_sise":4}', "--rollout.group_sise", "did you mean rollout.group_size?"),
    ("--rollout.group_size 1", "group_size = 1", "2 or more"),
    ("--rollout.max_context_tokens 8", "max_context_tokens = 8", "max_turn_tokens"),
    ("--rollout.dialect hermez", "hermez", "unknown"),
    ("--rollout.temperature inf", "--rollout.temperature", "finite"),
    ("--tran.learning_rate 1", "--tran.learning_rate", "did you mean [train]?"),
    ("--learning_rate 1", "--learning_rate", "did you mean train.learning_rate?"),
    ("--train.learning_rate nan", "--train.learning_rate", "finite"),
    ("--train.learning_rate -1", "--train.learning_rate", "greater than 0"),
    ("--train.learning_rate fast", "--train.learning_rate", "number"),
    ("--train.learning_rate", "--train.learning_rate needs a value", "such as"),
    ("--run.num_steps", "--run.num_steps needs a value", "--run.num_steps 10"),
    ("--run.num_steps true", "--run.num_steps", "true is not a number"),
    ("--run.num_steps 1.5", "--run.num_steps", "1.5"),
    ("--run.num_steps 0", "--run.num_steps", "greater than or equal to 1"),
    ("--run.name=", "--run.name", "not a valid folder name"),
    ("--run.name ../../etc", "--run.name", "not a valid folder name"),
    ("--run.name /etc", "--run.name", "not a valid folder name"),
    ("--run.name .", "--run.name", "not a valid folder name"),
    ("--run.name a//b", "--run.name", "not a valid folder name"),
    (f"--run.name {'a' * 300}", "--run.name", "200 bytes"),
    ("--run.dir=", "--run.dir", "empty"),
    ("--inference.urls http://127.0.0.1:9", "inference.urls", "inference.backend = 'vllm'"),
    ("--eval.pass_k 8", "pass_k", "samples_per_task"),
    ("--model.lora 5", "--model.lora: '5' is not a table", "--model.lora.rank"),
    ("seed 2", "unexpected argument 'seed'", "--run.seed 2"),
    ("seed=2", "unexpected argument 'seed=2'", "--run.seed 2"),
    ("run.sed=2", "--run.sed", "did you mean run.seed?"),
    ("--. 2", "unexpected argument '--.'", "--run.seed 2"),
]

COMMANDS = [
    ("train .", ". is a directory", "run.toml"),
    ("train none.toml", "none.toml", "no such file"),
    ("compare none other", "no folder none", ""),
    ("compare . .", "no config.toml", "run directory"),
    ("train model.toml", "model", "missing"),
    ("train broken.toml", "broken.toml", "not valid TOML"),
    ("train tran.toml", "tran.toml: tran", "did you mean [train]?"),
    ("train true.toml", "true.toml: run.num_steps", "true is not a number"),
    ("train urls.toml", "urls.toml: inference", "inference.backend = 'vllm'"),
    ("train table.toml", "table.toml: env.config", "5 is not a table"),
    ("train bare.toml", "bare.toml", "no such file"),
    pytest.param(
        f"train {RUN} --model.path bare",
        "model directory bare has no tokenizer",
        "save_pretrained",
        marks=pytest.mark.slow,
    ),
    (f"train {RUN} --model.path none/at/all", "none/at/all", "does not exist"),
    pytest.param(
        f"train {RUN} --run.dir file/run",
        "file/run cannot be written",
        "--run.dir",
        marks=pytest.mark.slow,
    ),
    (f"eval {RUN} --checkpoint none", "none", "no such directory"),
    (f"eval {RUN} --out file/out", "file/out", "Not a directory"),
    (f"rollout {RUN} --out file/out", "file/out", "Not a directory"),
    (f"proxy {RUN} --out file/out", "file/out", "Not a directory"),
    ("sft none.jsonl --model m --out out", "none.jsonl", "no such file"),
    ("sft words.jsonl --model m --out out", "words.jsonl", "1"),
    ("view . --report", "metrics.jsonl does not exist", "a run directory?"),
    ("view none --report", "metrics.jsonl does not exist", "a run directory?"),
    ("view none", "none: no such directory", "name a run directory"),
    ("view . --port 99999", "99999", "0 to 65535"),
    ("view . --host 0.0.0.0", "0.0.0.0 can be reached", "give --token"),
    ("view . --host 0.0.0.0 --token=", "0.0.0.0 can be reached", "give --token"),
    ("view . --token t --host no.such.host.invalid", "no.such.host.invalid", "cannot listen"),
    ("examples --out file", "file exists already", "--out"),
    ("examples --out file/examples", "file/examples", "Not a directory"),
    ("export none --out out", "none", "checkpoint"),
    ("export . --out out", "manifest.json", "RUN/checkpoints"),
    ("data get nothing", "nothing", "use one of"),
    ("trian run.toml", "trian", "train"),
    (f"train {RUN} --profil 3", "--profil", "--profile"),
    ("view none --prot 3", "--prot", "--port"),
    ("env chek math", "chek", "check"),
    ("env info mathh", "no environment 'mathh'", "math"),
    ("env serve math --port 99999", "99999", "0 to 65535"),
    ("doctor --run.seed 2", "without a run file", "--inference.urls"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path) -> set[str]:
    return {
        os.path.relpath(path, folder)
        for path in folder.rglob("*")
        if "__pycache__" not in str(path)
    }


def refused(arguments: list[str], folder: Path, capsys) -> str:
    """The one line that a command says; and nothing else happened."""
    before = written(folder)
    assert main(arguments) in (1, 2)
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("agentrl: error: ")]
    assert len(lines) == 1 and "Traceback" not in error, error
    assert written(folder) == before
    return lines[0]


@pytest.mark.parametrize(("typed", "problem", "remedy"), OVERRIDES, ids=lambda text: text[:40])
def test_an_override_that_cannot_be_is_refused_in_a_line(folder, capsys, typed, problem, remedy):
    line = refused(["train", RUN, "--dry-run", *typed.split()], folder, capsys)
    assert problem in line and remedy in line, line


@pytest.mark.parametrize(("typed", "problem", "remedy"), COMMANDS, ids=lambda text: text[-40:])
def test_a_command_refuses_what_cannot_be_in_a_line(folder, capsys, typed, problem, remedy):
    line = refused(typed.split(), folder, capsys)
    assert problem in line and remedy in line, line


def test_a_full_disk_is_a_line(folder, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentrl.cli.examples.copy_examples", full)
    assert "No space left on device" in refused(["examples", "--out", "out"], folder, capsys)


@pytest.mark.parametrize(
    "typed",
    [
        ("--env.config", '{"digits": 4}'),
        ("--env.config", "{digits = 4}"),
        ("--env.config.digits", "4"),
        ("env.config.digits=4",),
        ("--env", '{"config": {"digits": 4}}'),
    ],
    ids=" ".join,
)
def test_a_table_is_json_or_toml_and_sets_its_keys(folder, capsys, typed):
    assert main(["train", RUN, "--dry-run", *typed]) == 0
    shown = capsys.readouterr().out
    assert "digits = 4\n" in shown and 'operators = "+-*"' in shown
    assert "# env: math takes this configuration" in shown


def test_lists_tables_and_names_are_read_as_what_the_key_holds(folder, capsys):
    typed = ["--objective.trust", '[{"kind": "veto"}]', "--rollout.stop_strings", "</s>"]
    typed += ["--run.name", "2026-01-01", "--rollout.template", '{"enable_thinking": false}']
    assert main(["train", RUN, "--dry-run", *typed]) == 0
    shown = capsys.readouterr().out
    assert 'kind = "veto"' in shown and 'stop_strings = ["</s>"]' in shown
    assert 'name = "2026-01-01"' in shown and "enable_thinking = false" in shown


def test_an_environment_that_nobody_named_is_announced(folder, capsys):
    (folder / "alone.toml").write_text("[model]\npath = 'm'\n")
    assert main(["train", "alone.toml", "--dry-run"]) == 0
    assert "names no environment, so it is env.id = 'math'" in capsys.readouterr().err
    assert main(["train", "alone.toml", "--dry-run", "--env.id", "math"]) == 0
    assert capsys.readouterr().err == ""
