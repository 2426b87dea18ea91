"""`agentrl train` and what goes with it on one pretended GPU and on two: nothing raises."""

import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
from launch import QUICKSTART, ends_well, train
from launch import agentrl as command
from pretended import waits_counted

# Imported once, for all that is forked.
import agentrl.train.loop
import agentrl.train.sft  # noqa: F401
from agentrl.algo.presets import PRESET_DATA
from agentrl.inference.weights import nccl
from agentrl.model.load import load_model
from agentrl.train import signals, update
from agentrl.view.tracking import read_metrics

MODEL = QUICKSTART / "model"
BFLOAT16 = ("--model.dtype", "bfloat16")
TEACHER = ("--objective.preset", "opd", "--teacher.path", MODEL)
LORA = ("--model.lora.rank", "4")
KL = ("--objective.preset", "search_r1")
CRITIC = ("--objective.preset", "ppo", "--train.num_minibatches", "2")
ADAPTER_WITH_KL = (*BFLOAT16, *LORA, *KL)
IN_HOST_MEMORY = (*BFLOAT16, "--train.optimizer", "adamw_cpu")
CASES = {
    "float32": ("--model.dtype", "float32"),
    "adapter": (*BFLOAT16, *LORA),
    "checkpointing": (*BFLOAT16, "--model.gradient_checkpointing", "true"),
    "saved beside the work": (*BFLOAT16, "--run.async_save", "true"),
    "epochs": (*BFLOAT16, "--train.num_epochs", "2"),
    "truncated": (
        *(*BFLOAT16, "--rollout.top_p", "0.9", "--rollout.truncated_sampling", "correct"),
    ),
    "evaluated": (*BFLOAT16, "--run.eval_every", "1", "--eval.num_tasks", "2"),
}
"""Others are among those that are resumed, or whose waits are counted."""
ON_TWO = {
    "float32": CASES["float32"],
    "KL": (*BFLOAT16, *KL),
    "critic": (*BFLOAT16, *CRITIC),
    "teacher": (*BFLOAT16, *TEACHER),
    "checkpointing": CASES["checkpointing"],
    "moments in host memory": IN_HOST_MEMORY,
    "saved beside the work": CASES["saved beside the work"],
    "shared rows": (*BFLOAT16, "--train.parallel.context", "2"),
}


def require_trained(run_dir: Path, step: int = 1) -> None:
    """An update was made, and signals of it were written."""
    assert read_metrics(run_dir)[-1]["step"] == step
    assert read_metrics(run_dir)[-1]["train/updates"] >= 1
    assert list((run_dir / "signals").glob("step_*"))


@pytest.mark.parametrize("case", [BFLOAT16, IN_HOST_MEMORY], ids=str)
def test_ranks_train_that_somebody_else_brought_together(case, tmp_path):
    """Ray Train does, and its group knows tensors of the device alone."""

    def work() -> int:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
        return train(tmp_path / "run", *case)()

    ends_well(work, tmp_path / "log", num_ranks=2)
    require_trained(tmp_path / "run")


def preset_arguments(preset: str) -> tuple:
    return (*BFLOAT16, *(TEACHER if preset == "opd" else ("--objective.preset", preset)))


@pytest.mark.parametrize("preset", PRESET_DATA)
def test_every_preset_trains(preset, tmp_path):
    ends_well(train(tmp_path / "run", *preset_arguments(preset)), tmp_path / "log")
    require_trained(tmp_path / "run")


@pytest.mark.parametrize("case", CASES)
def test_one_gpu_trains(case, tmp_path):
    ends_well(train(tmp_path / "run", *CASES[case]), tmp_path / "log")
    require_trained(tmp_path / "run")


@pytest.mark.parametrize("case", ON_TWO)
def test_two_gpus_train(case, tmp_path):
    ends_well(train(tmp_path / "run", *ON_TWO[case]), tmp_path / "log", num_ranks=2)
    require_trained(tmp_path / "run")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", [BFLOAT16, ADAPTER_WITH_KL, CRITIC], ids=str)
def test_a_run_is_resumed(case, num_ranks, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    ends_well(train(run_dir, *case), log, num_ranks=num_ranks)
    again = train(run_dir, *case, "--run.num_steps", "2", "--resume")
    ends_well(again, log, num_ranks=num_ranks)
    require_trained(run_dir, step=2)


def test_demonstrations_are_learned_and_a_policy_is_measured(tmp_path):
    demonstrations = tmp_path / "demonstrations.jsonl"
    messages = [{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "4"}]
    demonstrations.write_text(json.dumps({"messages": messages}) + "\n")
    tuned = command(
        *("sft", demonstrations, "--model", MODEL, "--out", tmp_path / "tuned", "--device", "cuda")
    )
    ends_well(tuned, tmp_path / "log")
    measured = command(
        *("eval", QUICKSTART / "run.toml", "--model.path", tmp_path / "tuned", "--eval.num_tasks"),
        *("2", "--model.device", "cuda", *BFLOAT16),
    )
    ends_well(measured, tmp_path / "log")


def test_shards_are_put_together(tmp_path):
    ends_well(train(tmp_path / "run", *BFLOAT16), tmp_path / "log", num_ranks=2)
    folder = tmp_path / "run/checkpoints/step_000001"
    ends_well(command("export", folder, "--out", tmp_path / "whole"), tmp_path / "log")
    assert (tmp_path / "whole/model.safetensors").is_file()


OUTSIDE = (
    *("_for_all_rows", "compute_advantages", "gather", "merge_metrics", "reduce_metrics", "step"),
    "to_floats",
)
"""What waits before the first micro-batch or after the last one of an update."""
KNOWN = "transformers/masking_utils.py"
"""Once per forward pass it looks whether position ids are those of several rows."""
WAITS = {
    "plain": (*BFLOAT16, "--train.token_budget", "256"),
    "critic": (*BFLOAT16, *CRITIC),
    "KL": (*BFLOAT16, *KL),
    "adapter with KL": ADAPTER_WITH_KL,
    "prefixes not shared": (*BFLOAT16, "--train.share_prefixes", "false"),
    "moments in host memory": IN_HOST_MEMORY,
}


@pytest.mark.parametrize("case", WAITS)
def test_the_host_waits_nowhere_between_micro_batches(case, tmp_path):
    """The device has always work queued: what it waits for is shown at the update alone."""

    def counted() -> int:
        with waits_counted(("update.py", "update_policy"), outside=OUTSIDE) as found:
            status = train(tmp_path / "run", *WAITS[case])()
        (tmp_path / "waits.json").write_text(json.dumps(found))
        return status

    ends_well(counted, tmp_path / "log")
    require_trained(tmp_path / "run")
    waits = json.loads((tmp_path / "waits.json").read_text())
    assert [place for place in waits if KNOWN not in place] == []


def test_a_push_over_nccl_is_queued_and_leaves_no_copy_on_the_device(tmp_path):
    """Weights on the way from host memory, as those of shards are, wait for nothing in between."""

    def push() -> None:
        model = load_model(str(MODEL), dtype=torch.bfloat16, device=torch.device("cuda"))
        # The stubs, under the name by which ctypes finds NCCL.
        library = nccl.Library(os.environ["LD_PRELOAD"])
        transfer = nccl.NCCLTransfer(library)
        asyncio.run(transfer.take(model, 1))
        own = {parameter.data_ptr() for parameter in model.parameters()}
        assert {tensor.data_ptr() for tensor in transfer._live.values()} == own
        assert all(tensor.is_pinned() for tensor in transfer._weights.values())
        group = nccl.Communicator(library, library.unique_id(), 2, torch.device("cuda"))
        with waits_counted(("nccl.py", "broadcast")) as found:
            group.broadcast(transfer._weights.values())
        assert list(found.values()) == [1], found  # at the end

    ends_well(push, tmp_path / "log")


# That the tier can fail -----------------------------------------------------------------------


def test_values_of_the_device_in_a_matrix_of_the_host_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "_to_host", dict)
    with pytest.raises(AssertionError, match="two devices, cuda:0 and cpu"):
        ends_well(train(tmp_path / "run", *BFLOAT16), tmp_path / "log")


def test_a_wait_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(
        signals, "_to_host", lambda tensors: {name: each.cpu() for name, each in tensors.items()}
    )
    with pytest.raises(AssertionError, match=r"train/signals\.py"):
        test_the_host_waits_nowhere_between_micro_batches("plain", tmp_path)


def test_a_gradient_of_another_dtype_is_found(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def frozen(model):
        from peft.tuners.tuners_utils import BaseTunerLayer  # which looks for GPUs

        adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        for module in adapted:
            module.enable_adapters(False)
        yield
        for module in adapted:
            module.enable_adapters(True)

    monkeypatch.setattr(update, "without_adapter", frozen)
    with pytest.raises(AssertionError, match=r"dtype .*BFloat16"):
        ends_well(train(tmp_path / "run", *ADAPTER_WITH_KL), tmp_path / "log", num_ranks=2)
