"""`agentrl doctor` against a server that is right, and one per thing that can be wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from agentrl.cli.doctor import doctor
from agentrl.cli.doctor_servers import own_addresses
from agentrl.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from contract_server import CONTEXT, ContractServer, make_model, running
from sglang_server import SGLangServer
from sglang_server import serving as serving_sglang
from web_servers import in_thread


def serving(server: ContractServer, **options):
    """In a thread: the command runs an event loop of its own."""
    return in_thread(running(server, **options))


def examine(capsys, server: ContractServer, *overrides: str, url: str = "") -> tuple[int, str]:
    arguments = [
        f"--inference.urls={url or server.url}",
        f"--rollout.max_context_tokens={CONTEXT}",
        *overrides,
    ]
    return doctor(None, arguments), capsys.readouterr().out


def test_a_server_that_can_be_trained_against(capsys):
    with serving(ContractServer(make_model())) as server:
        status, shown = examine(capsys, server)
    assert status == 0, shown
    for finding in (
        "vLLM 0.32.0",
        "serves 'policy', context 96 >= rollout.max_context_tokens 96",
        "token ids in and out at /inference/v1/generate, with weight versions",
        "log-probs are those of the sampled distribution",
        "all routes are there; its weights are 'default'",
        "control routes: not reachable from outside this host",
    ):
        assert finding in shown
    assert all(line.startswith("ok") for line in shown.splitlines() if server.url in line)


def test_the_command_takes_servers_instead_of_a_run_file(capsys):
    with serving(ContractServer(make_model())) as server:
        arguments = [f"--inference.urls={server.url}", f"--rollout.max_context_tokens={CONTEXT}"]
        assert main(["doctor", *arguments]) == 0
    assert "vLLM 0.32.0" in capsys.readouterr().out


def served_in(dtype: str, device: str, *, eager: bool, head: str | None) -> dict:
    """Returns the /server_info of such a server."""
    model = {
        "dtype": f"torch.{dtype}",
        "enforce_eager": eager,
        "hf_overrides": {"head_dtype": head} if head else {},
    }
    return {"vllm_config": {"model_config": model, "device_config": {"device": device}}}


@pytest.mark.parametrize(
    ("settings", "overrides", "mark", "finding"),
    [
        (served_in("bfloat16", "cpu", eager=True, head="float32"), [], "ok", "float32 logits"),
        (served_in("bfloat16", "cuda", eager=False, head="float32"), [], "ok", "float32 logits"),
        (served_in("bfloat16", "cuda", eager=False, head=None), [], "note", "logits are rounded"),
        ({"scale_out": False}, [], "note", "/v1/completions, which does not report which weights"),
        ({"processed_logprobs": False}, [], "note", "--logprobs-mode processed_logprobs"),
        (
            {"processed_logprobs": False},
            ["--rollout.temperature", "0.7"],
            "fix",
            "--logprobs-mode processed_logprobs",
        ),
        ({"dev_mode": False}, [], "fix", "no /init_weight_transfer_engine, /pause.*DEV_MODE=1"),
        ({"transfer_backend": None}, [], "fix", "its backend is None.*--weight-transfer-config"),
        ({}, ["--inference.transfer", "nccl"], "fix", "its backend is 'agentrl'.*needs 'nccl'"),
        ({"transfer_backend": "nccl"}, ["--inference.transfer", "nccl"], "ok", "all routes"),
        ({"paused": True}, [], "fix", "it is paused.*/resume"),
        ({"api_key": "k"}, [], "fix", "with 401"),
        ({}, ["--rollout.max_context_tokens", "97"], "note", "context is 96.*--max-model-len 97"),
        ({}, ["--inference.model", "other"], "fix", "serves policy, not 'other'"),
    ],
)
def test_what_is_wrong_with_a_server(capsys, settings, overrides, mark, finding):
    with serving(ContractServer(make_model(), **settings)) as server:
        status, shown = examine(capsys, server, *overrides)
    lines = [line for line in shown.splitlines() if re.search(finding, line)]
    assert lines and lines[0].startswith(mark), shown
    assert status == (mark == "fix")


@pytest.mark.parametrize(
    ("settings", "overrides", "mark", "finding"),
    [
        ({}, [], "ok", "weight updates: all routes are there; its weights are 'default'"),
        ({}, ["--inference.backend", "vllm"], "fix", "set --inference.backend sglang"),
        ({"mode": "retract"}, [], "fix", "paused.*/continue_generation"),
        ({"raw_logprobs": True}, ["--rollout.temperature", "0.7"], "fix", "ORIGINAL_LOGPROB"),
        ({}, ["--rollout.max_context_tokens", "5000"], "note", "--context-length 5000"),
    ],
)
def test_what_an_sglang_server_is(capsys, settings, overrides, mark, finding):
    server = SGLangServer(make_model(), **settings)
    with serving_sglang(server):
        keys = [f"--inference.urls={server.url}", "--inference.backend=sglang", *overrides]
        status = doctor(None, keys)
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if re.search(finding, line)]
    assert lines and lines[0].startswith(mark), shown
    assert status == (mark == "fix")


def test_control_routes_that_others_can_reach(capsys):
    """Bound to all interfaces, as vLLM does by default; asked at loopback and from outside."""
    addresses = [address for address in own_addresses() if "." in address]
    if not addresses:
        pytest.skip("this host has no address but loopback")
    with serving(ContractServer(make_model()), host="0.0.0.0") as server:
        loopback = server.url
        outside = loopback.replace("127.0.0.1", addresses[0])
        for url, remedy in ((loopback, "--host 127.0.0.1"), (outside, "without a token.*proxy")):
            status, shown = examine(capsys, server, url=url)
            assert status == 1
            assert re.search(f"fix .*control routes: /pause.*{remedy}", shown), shown


def test_nobody_there_and_nothing_to_check(capsys):
    status, shown = examine(capsys, ContractServer(make_model()), url="http://127.0.0.1:9")
    assert status == 1
    assert "no server answers there" in shown
    assert main(["doctor", "--rollout.temperature=1"]) == 2
    assert "give --inference.urls" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "num_gpus", "status", "said"),
    [
        ([], 1, "ok", "training leaves"),
        (["--gpu-memory-utilization", "0.2"], 1, "ok", "training leaves"),
        (["--gpu-memory-utilization=0.92"], 1, "fix", "lower --gpu-memory-utilization"),
        ([], 2, None, ""),
    ],
)
def test_a_server_on_the_gpu_that_trains_has_to_fit(tmp_path, arguments, num_gpus, status, said):
    from agentrl.cli.doctor import _memory_of_servers
    from agentrl.config import load_config
    from agentrl.train import memory

    config = load_config(Path(__file__).parents[2] / "examples" / "vllm_cpu" / "run.toml")
    inference = config.inference.model_copy(update={"args": arguments})
    config = config.model_copy(update={"inference": inference})
    needed = memory.estimate(config, device_type="cuda", num_ranks=1).total
    found = list(_memory_of_servers(config, 2 * needed, num_gpus))
    assert [each[0] for each in found] == ([status] if status else [])
    assert all(said in each[2] for each in found)
    # Where training leaves too little, taking turns is what helps.
    inference = config.inference.model_copy(update={"args": []})
    config = config.model_copy(update={"inference": inference})
    [(finding, _, detail)] = _memory_of_servers(config, int(1.2 * needed), 1)
    assert finding == "fix" and "with inference.share = 'sleep' it is 0.8" in detail, detail
    share = memory.share_for_servers(config, 2 * needed, device_type="cuda")
    assert 0.38 <= share <= 0.4  # half is training's, a tenth stays free
    # A model whose size cannot be read is said.
    unknown = config.model.model_copy(update={"path": str(tmp_path)})
    found = list(_memory_of_servers(config.model_copy(update={"model": unknown}), needed, 1))
    assert found[0][0] == "note" and str(tmp_path) in found[0][2]
