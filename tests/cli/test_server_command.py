"""`agentrl launch --print-servers`: servers elsewhere are started as a run starts its own."""

import shlex
import subprocess
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.inference.program import server_environment
from agentrl.inference.vllm_command import VLLM, server_command
from agentrl.train.serving import server_settings

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
RUN = ROOT / "examples" / "vllm_cpu" / "run.toml"


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command_is_that_of_a_run_s_own_servers(tmp_path, capsys, platform, dtype):
    plugin = tmp_path / "plugin"
    words = ["launch", str(RUN), "--print-servers", "--plugin-dir", str(plugin)]
    words += ["--platform", platform]
    words += ["--port", "8123", "--host", "10.0.0.7", "--model.dtype", dtype]
    assert main([*words, "--inference.python", "vllm-env/bin/python"]) == 0
    env, *printed = shlex.split(capsys.readouterr().out)
    variables = dict(word.split("=", 1) for word in printed if word.split("=")[0].isupper())
    command = printed[len(variables) :]
    config = load_config(RUN, ["--model.dtype", dtype])
    settings = server_settings(
        config, config.model.path, log_dir=tmp_path, plugin_dir=plugin, python="vllm-env/bin/python"
    )
    assert env == "env"
    assert command == server_command(settings, 8123, platform, host="10.0.0.7")
    own = server_environment(VLLM, settings, platform)
    assert variables == {name: own[name] for name in variables}
    assert variables["VLLM_SERVER_DEV_MODE"] == "1" and "VLLM_CPU_KVCACHE_SPACE" in variables
    assert Path(variables["PYTHONPATH"], "agentrl_vllm_plugin", "files.py").is_file()


def test_an_adapter_s_server_is_refused_in_words(tmp_path, capsys):
    words = ["launch", str(RUN), "--print-servers", "--plugin-dir", str(tmp_path / "plugin")]
    assert main([*words, "--model.lora.rank", "8"]) == 2
    assert "adapter's folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["slurm.sbatch", "jobset.yaml", "skypilot.yaml"])
def test_files_for_clusters_ask_for_the_command(name):
    text = (CLUSTER / name).read_text()
    assert "agentrl launch" in text and "--print-servers" in text
    assert "--inference.backend vllm" in text and "--inference.weights_dir" in text
    for written_by_hand in ("--served-model-name", "--logprobs-mode", "VLLM_SERVER_DEV_MODE"):
        assert written_by_hand not in text


def test_the_job_script_is_bash():
    subprocess.run(["bash", "-n", CLUSTER / "slurm.sbatch"], check=True)
