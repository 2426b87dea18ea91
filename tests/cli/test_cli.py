import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import add_plugins, app, main

RUN = str(Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml")
COMMANDS = [
    *([], ["train"], ["eval"], ["sft"], ["view"], ["doctor"], ["env"], ["env", "list"]),
    *(
        ["env", "info"],
        ["env", "serve"],
        ["env", "build"],
        ["env", "run"],
        ["data"],
        ["data", "get"],
        ["swebench", "pull"],
    ),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command, capsys):
    assert main([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(" ".join(["Usage: agentrl", *command]))
    assert len(shown) > 100


def test_no_command_shows_the_commands(capsys):
    assert main([]) == 2
    assert "Train a policy" in capsys.readouterr().err
    assert main(["env"]) == 2
    assert "Play an episode" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_train_help_lists_the_first_keys_or_every_key(option, capsys):
    from agentrl.config.load import FIRST_KEYS, valid_keys

    assert main(["train", option]) == 0
    shown = re.findall(r"^  --([a-z_]+\.[\w.]+)", capsys.readouterr().out, re.MULTILINE)
    assert shown == list(FIRST_KEYS if option == "--help" else valid_keys())


@pytest.mark.parametrize("words", [["--help"], ["env", "--help"]])
def test_help_loads_no_torch_and_no_servers(words):
    code = (
        f"import sys; sys.argv = ['agentrl', *{words}]\n"
        "from agentrl.cli.main import main\n"
        "main()\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'aiohttp', 'pydantic', 'numpy'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_script_of_the_shell_s_completion_is_one_and_knows_every_command():
    add_plugins(app)
    script = app.generate_completion(shell="bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "swebench" in script and "--print-servers" in script


def test_dry_run_prints_a_configuration_that_loads(tmp_path, capsys):
    assert main(["train", RUN, "--dry-run", "--run.seed", "9"]) == 0
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(capsys.readouterr().out)
    assert main(["train", str(resolved), "--dry-run"]) == 0
    assert capsys.readouterr().out == resolved.read_text()
    assert "seed = 9" in resolved.read_text()


def test_a_dry_run_names_the_dialect_and_refuses_one_that_does_not_fit(capsys):
    assert main(["train", RUN, "--dry-run"]) == 0
    assert "\n# rollout.dialect: hermes, found to read the calls" in capsys.readouterr().out
    for name, said in (("glm4", "it does not read the calls"), ("hermez", "is unknown")):
        assert main(["train", RUN, "--dry-run", "--rollout.dialect", name]) == 2
        out, error = capsys.readouterr()
        assert not out and f"rollout.dialect = '{name}'" in error and said in error
    chat = ["--inference.backend", "openai", "--inference.urls", "http://127.0.0.1:9"]
    assert main(["eval", RUN, "--dry-run", *chat, "--rollout.dialect", "mistral"]) == 0
    assert "# rollout.dialect: mistral, where the server" in capsys.readouterr().out


def test_unknown_arguments_of_other_commands_are_refused(capsys):
    assert main(["view", "x", "--run.seed", "1"]) == 2
    assert "Unknown option: --run.seed" in capsys.readouterr().err


def test_doctor(capsys):
    assert main(["doctor", RUN]) == 0
    shown = capsys.readouterr().out
    for part in ("python", "torch", "environment math", "chat template"):
        assert part in shown
    assert main(["doctor", RUN, "--model.path", "/none"]) == 1
    assert "fix" in capsys.readouterr().out


def test_doctor_refuses_a_template_that_hides_the_tools_as_a_run_does(tmp_path, capsys):
    whole = (Path(RUN).parent / "model" / "chat_template.jinja").read_text()
    shown = re.compile(r"\{% if tools %\}.*?\{% endif %\}", re.DOTALL)
    (tmp_path / "hides.jinja").write_text(shown.sub("", whole, count=1))
    command = ["doctor", RUN, "--model.chat_template", str(tmp_path / "hides.jinja")]
    assert main(command) == 1
    assert "fix  environment math: " in capsys.readouterr().out
    assert main([*command, "--env.config.tools", "false"]) == 0


def test_examples_are_copied_once_and_run(tmp_path, capsys):
    out = tmp_path / "examples"
    assert main(["examples", "--out", str(out)]) == 0
    assert f"agentrl train {out / 'quickstart' / 'run.toml'}" in capsys.readouterr().out
    assert main(["train", str(out / "quickstart" / "run.toml"), "--dry-run"]) == 0
    assert f'path = "{out / "quickstart" / "model"}"' in capsys.readouterr().out
    assert main(["examples", "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
