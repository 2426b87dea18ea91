"""Whole runs, small: the quickstart's model, a few steps, in this process and over HTTP."""

import hashlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import tiny_model
from safetensors.torch import load_file
from test_teacher import PromptServer, running
from transformers import AutoModelForCausalLM

from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.errors import CheckpointError, ConfigError, TrainingError
from agentrl.model.load import load_model, load_tokenizer
from agentrl.rollout import read_trajectories
from agentrl.train import loop
from agentrl.train.batch import _warn_of_unknown_ids
from agentrl.train.loop import train
from agentrl.train.serving import _other_gpus
from agentrl.train.update import update_policy
from agentrl.view.display import Display
from agentrl.view.tracking import read_metrics, read_status

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.toml"
MODEL = str(QUICKSTART.parent / "model")
SMALL = [
    *("--rollout.groups_per_step", "3", "--rollout.group_size", "4"),
    *("--run.num_steps", "3", "--run.save_every", "1"),
]
REQUIRED_METRICS = {
    *("reward/mean", "reward/std", "rollout/tokens", "rollout/turns", "loss/policy", "loss/kl"),
    *("policy/ratio_max", "policy/rollout_train_logprob_diff_max", "time/rollout_s"),
    *("time/train_s", "train/tokens_per_s"),
}


def run(run_dir: Path, *overrides: str) -> Path:
    config = load_config(QUICKSTART, [*SMALL, "--run.dir", str(run_dir), *overrides])
    return train(config, quiet=True)


def untimed(metrics: list[dict]) -> list[dict]:
    """Everything but how long it took."""
    return [
        {k: v for k, v in row.items() if not k.startswith("time/") and not k.endswith("_per_s")}
        for row in metrics
    ]


def contents(run_dir: Path) -> list[tuple]:
    """Returns what was played, bit for bit, without durations."""
    return [
        (
            *(step, t.trajectory_id, t.task_id, t.messages, t.reward, str(t.stop_reason)),
            [{name: array.tobytes() for name, array in r.arrays().items()} for r in t.branches],
        )
        for step, t in read_trajectories(run_dir)
    ]


def tensors_of(run_dir: Path, step: int) -> dict[str, str]:
    """Returns a digest of each file of tensors of a checkpoint."""
    files = (run_dir / "checkpoints" / f"step_{step:06d}").glob("*.safetensors")
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert found
    return found


def require_same(run_dir: Path, other: Path, step: int) -> None:
    """Two runs have the same metrics, played the same and ended in the same tensors."""
    assert tensors_of(run_dir, step) == tensors_of(other, step)
    assert untimed(read_metrics(run_dir)) == untimed(read_metrics(other))
    assert contents(run_dir) == contents(other)


def resumed(folder: Path, *settings: str, at: int, steps: int = 3) -> Path:
    """A run that is the same whether it stops on its way, after so many steps, or not."""
    whole = run(folder / "whole", *settings, "--run.num_steps", str(steps))
    parted = run(folder / "parted", *settings, "--run.num_steps", str(at))
    run(parted, *settings, "--run.num_steps", str(steps), "--run.resume")
    require_same(parted, whole, steps)
    return whole


def save_mixture(folder: Path) -> str:
    """Saves a mixture of experts with the quickstart's tokenizer."""
    tokenizer = load_tokenizer(MODEL)
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    tiny_model("qwen3_moe", eos_token_id=tokenizer.eos_token_id, **shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "finished")


def test_a_run_directory_holds_what_it_promises(finished):
    assert (finished / "report.html").stat().st_size > 10_000
    assert load_config(finished / "config.toml", []).run.num_steps == 3
    assert {p.name for p in (finished / "checkpoints").iterdir()} == {"step_000002", "step_000003"}
    metrics = read_metrics(finished)
    assert [row["step"] for row in metrics] == [1, 2, 3]
    for row in metrics:
        assert row.keys() >= REQUIRED_METRICS
        assert row["policy/rollout_train_logprob_diff_max"] < 1e-4
        assert row["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert row["policy/update_logprob_diff_max"] == 0
        assert row["rollout/trajectories"] == 12
    assert len(contents(finished)) == 36


def test_a_run_is_exported_without_what_only_training_needs(finished, tmp_path):
    assert main(["export", str(finished), "--out", str(tmp_path / "model")]) == 0
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    assert not names & {"optimizer.safetensors", "state.json", "manifest.json"}
    newest = finished / "checkpoints" / "step_000003" / "model.safetensors"
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == newest.read_bytes()
    assert main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "again")]) == 2


@pytest.fixture
def small_disk(tmp_path) -> Path:
    """32 MB; a checkpoint takes 4."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(["mount", *options]).returncode:
        pytest.skip("a tmpfs cannot be mounted here (needs root)")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def leave_free(disk: Path, num_bytes: int) -> None:
    (disk / "filler").write_bytes(b"\0" * (shutil.disk_usage(disk).free - num_bytes))


@contextmanager
def after_steps(do: Callable[[int], None]) -> Iterator[None]:
    """Does something after each step of the runs in the block."""
    write = Display.step

    def written(self, step, metrics):
        write(self, step, metrics)
        do(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Display, "step", written)
        yield


@pytest.mark.slow
def test_a_run_whose_weights_a_full_disk_refused_has_failed(small_disk, tmp_path, caplog):
    run_dir = small_disk / "run"

    def fill_up(step):
        if step == 2:
            leave_free(small_disk, 1_000_000)

    refused = pytest.raises(TrainingError, match=r"step 4 are NOT saved.* newest .* step 1;")
    with after_steps(fill_up), refused:
        run(run_dir, "--run.num_steps", "4", "--run.save_every", "1")
    refused = [record for record in caplog.records if "not saved" in record.message]
    assert [re.search(r"step (\d)", record.message)[1] for record in refused] == ["2", "3", "4"]
    (small_disk / "filler").unlink()
    run(run_dir, "--run.num_steps", "4", "--run.save_every", "1", "--run.resume", "true")
    assert [row["step"] for row in read_metrics(run_dir)] == [1, 2, 3, 4]


@pytest.mark.parametrize("async_save", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_refused_checkpoint_is_tried_again_after_the_next_step(small_disk, async_save, caplog):
    def fill_up(step):
        if step == 2:
            leave_free(small_disk, 1_000_000)
        if step == 3:
            while async_save == "true" and "step 2 not saved" not in caplog.text:
                time.sleep(0.01)  # it is not before the next save is due that the disk has room
            (small_disk / "filler").unlink()

    settings = ["--run.num_steps", "4", "--run.save_every", "2", "--run.async_save", async_save]
    with after_steps(fill_up):
        done = run(small_disk / "run", *settings)
    saved = {path.name for path in (done / "checkpoints").iterdir()}
    assert saved == {"step_000003", "step_000004"}


def test_a_run_that_cannot_save_does_not_start(small_disk):
    leave_free(small_disk, 500_000)
    with pytest.raises(TrainingError, match="no checkpoint can be written"):
        run(small_disk / "run")


def test_movement_within_a_step_is_not_taken_for_disagreement_with_the_engine(tmp_path):
    """Several updates per batch: the engines agree, and the policy moves away from both."""
    several = [
        *("--rollout.groups_per_step", "4", "--run.num_steps", "2"),
        *("--train.num_minibatches", "4", "--train.num_epochs", "2"),
        *("--train.learning_rate", "1e-3", "--train.warmup_steps", "0"),
    ]
    for row in read_metrics(run(tmp_path / "run", *several)):
        assert row["policy/rollout_train_logprob_diff_max"] < 1e-4
        assert row["policy/ess"] > 0.999
        assert row["policy/update_logprob_diff_max"] > 0.1
        assert 0 < row["policy/update_logprob_diff_mean"] < row["policy/update_logprob_diff_max"]


TRUNCATED = [
    *("--rollout.top_p", "0.9", "--rollout.top_k", "5", "--rollout.min_p", "0.02"),
    *("--rollout.truncated_sampling", "correct"),
]


def test_a_truncated_distribution_is_computed_again_from_what_was_kept(tmp_path):
    """The trainer recomputes the sampler's log-prob of every token from the kept tokens;
    the test below shows that the whole distribution would give another."""
    for row in read_metrics(run(tmp_path / "run", *TRUNCATED)):
        assert row["policy/rollout_train_logprob_diff_max"] < 1e-4
        assert row["policy/entropy"] < math.log(5)
        assert row["train/updates"] >= 1


def test_without_what_was_kept_the_old_logprobs_are_the_trainers_own(tmp_path, monkeypatch, caplog):
    _warn_of_unknown_ids.cache_clear()
    known = loop.training_sampling
    seen = []

    def silent(config, temperature=None):
        return replace(known(config, temperature), report_kept=False)

    def update(learner, samples, batch, *args, **kwargs):
        before = batch.rollout_logprobs
        metrics = update_policy(learner, samples, batch, *args, **kwargs)
        seen.append((before - batch.rollout_logprobs).abs().max().item())
        return metrics

    monkeypatch.setattr("agentrl.train.run.training_sampling", silent)
    monkeypatch.setattr("agentrl.train.trainer.update_policy", update)
    metrics = read_metrics(run(tmp_path / "run", *TRUNCATED))
    assert max(seen) > 0.01, "the engine's own are of another distribution"
    for row in metrics:
        assert row["policy/rollout_train_logprob_diff_max"] < 1e-4
        assert row["policy/ess"] > 0.999
    assert caplog.text.count("the engine does not say which ids it kept") == 1


def test_the_same_seed_repeats_and_another_does_not(finished, tmp_path):
    again = run(tmp_path / "again")
    assert contents(again) == contents(finished)
    assert untimed(read_metrics(again)) == untimed(read_metrics(finished))
    other = run(tmp_path / "other", "--run.seed", "2", "--run.num_steps", "1")
    assert contents(other) != contents(finished)[:12]


def test_the_environment_over_http_gives_identical_trajectories(finished, tmp_path):
    server = subprocess.Popen(
        [sys.executable, "-m", "agentrl", "env", "serve", "math", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        url = None
        while url is None:
            line = server.stdout.readline()
            assert line, "the server ended before it said where it listens"
            found = re.search(r"http://[\d.]+:\d+", line)
            url = found and found[0]
        remote = run(tmp_path / "remote", "--env.url", url)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)
    assert contents(remote) == contents(finished)
    assert untimed(read_metrics(remote)) == untimed(read_metrics(finished))


def test_resuming_equals_never_having_stopped(finished, tmp_path):
    run_dir = run(tmp_path / "resumed", "--run.num_steps", "2")
    run(run_dir, "--run.resume")
    require_same(run_dir, finished, 3)


@pytest.mark.slow
def test_what_is_frozen_stays_and_resumes(tmp_path):
    """With a token that ends turns besides the template's own."""
    (end,) = load_tokenizer(MODEL).encode("7", add_special_tokens=False)
    settings = ["--model.freeze", '["*.embed_tokens.*", "model.layers.0.*"]']
    settings += ["--rollout.stop_token_ids", f"[{end}]"]
    whole = resumed(tmp_path, *settings, at=1, steps=2)
    before = load_file(QUICKSTART.parent / "model" / "model.safetensors")
    after = load_file(whole / "checkpoints/step_000002/model.safetensors")
    moved = {name for name, each in before.items() if not torch.equal(each, after[name])}
    assert moved and not any("embed_tokens" in each or "layers.0." in each for each in moved)
    found = 0
    for _, trajectory in read_trajectories(whole):
        for row in trajectory.branches:
            following = [*row.loss_mask[1:], 0]
            for token, mask, after_it in zip(row.token_ids, row.loss_mask, following, strict=True):
                if mask and token == end:
                    found += 1
                    assert not after_it
    assert found


@pytest.mark.slow
def test_in_bfloat16_a_run_learns_resumes_and_agrees_with_its_sampler(tmp_path):
    """At the usual rate of 1e-6, which weights kept in bfloat16 round away."""
    settings = [
        *("--model.dtype", "bfloat16", "--train.learning_rate", "1e-6"),
        *("--objective.preset", "ppo", "--train.warmup_steps", "0"),
        *("--rollout.groups_per_step", "2", "--rollout.group_size", "2"),
    ]
    whole = resumed(tmp_path, *settings, at=1, steps=2)
    assert {"critic.safetensors", "critic_optimizer.safetensors"} < tensors_of(whole, 2).keys()
    for row in read_metrics(whole):
        # Both compute with the same bfloat16 weights and round between other sums.
        assert row["policy/rollout_train_logprob_diff_mean"] < 0.02
    saved = str(whole / "checkpoints" / "step_000002")
    begun = load_model(MODEL, dtype=torch.float32, device="cpu")
    ended = load_model(saved, dtype=torch.float32, device="cpu")
    pairs = zip(begun.parameters(), ended.parameters(), strict=True)
    moved = torch.cat([(e - b).detach().flatten() for b, e in pairs])
    assert (moved != 0).double().mean() > 0.95 and 1e-7 < moved.abs().mean() < 1e-5
    # As it says of itself it is the policy that was sampled from.
    sampled = AutoModelForCausalLM.from_pretrained(saved)
    for cast, master in zip(sampled.parameters(), ended.parameters(), strict=True):
        assert torch.equal(cast, master.bfloat16())


@pytest.mark.slow
def test_resuming_brings_back_critic_reference_and_kl_coefficient(tmp_path):
    """PPO with everything that has a state: two optimizers, an adaptive KL, a warm-up."""
    settings = [
        *("--objective.preset", "ppo", "--critic.learning_rate", "1e-3"),
        *("--critic.warmup_steps", "1", "--train.num_minibatches", "2"),
        *("--objective.kl.where", "reward", "--objective.kl.kind", "k1"),
        *("--objective.kl.coef", "0.1", "--objective.kl.target", "0.01"),
        *("--objective.kl.horizon", "12"),
    ]
    metrics = read_metrics(resumed(tmp_path, *settings, at=2))
    first, second, third = metrics
    assert first["train/updates"] == 0 and first["critic/updates"] == 2
    assert "train/grad_norm" not in first and second["train/grad_norm"] > 0
    # The policy is its reference, so the divergence is below its target and the penalty shrinks.
    assert second["policy/kl_coef"] == 0.1
    assert third["policy/kl_coef"] == pytest.approx(0.08)
    assert {"loss/value", "critic/value_mean", "critic/explained_variance"} <= third.keys()


@pytest.mark.slow
def test_a_mixture_learns_with_the_routes_that_it_was_sampled_with(tmp_path):
    settings = ["--model.path", save_mixture(tmp_path / "mixture"), "--model.dtype", "bfloat16"]
    settings += ["--run.preflight", "false"]  # a random model has no rewards
    chosen = read_metrics(run(tmp_path / "chosen", *settings))
    whole = resumed(tmp_path, *settings, "--train.router_replay", "true", at=2)
    key = "policy/rollout_train_logprob_diff_mean"
    for replayed, other in zip(read_metrics(whole), chosen, strict=True):
        assert replayed[key] < other[key] and replayed["train/unrouted"] == 0


@pytest.mark.slow
def test_another_reference_that_becomes_the_policy_resumes(finished, tmp_path):
    reference = finished / "checkpoints" / "step_000003"
    settings = ["--objective.kl.where", "loss", "--objective.kl.coef", "0.1"]
    settings += ["--model.reference", str(reference), "--model.reference_every", "2"]
    whole = resumed(tmp_path, *settings, at=3, steps=4)
    last = whole / "checkpoints" / "step_000004"
    now, then = (load_file(each / "model.safetensors") for each in (last, reference))
    became = load_file(last / "reference.safetensors")
    assert all(torch.equal(became[name], now[name]) for name in became)
    first, _, third, fourth = (each["policy/kl_ref"] for each in read_metrics(whole))
    assert first > 1e-4 and third == pytest.approx(0, abs=1e-9) and fourth > 1e-9
    assert any(not torch.equal(became[name], then[name]) for name in became)
    with pytest.raises(CheckpointError, match=r"model\.reference_every: checkpoint 2, now 3"):
        run(whole, *settings[:-1], "3", "--run.num_steps", "5", "--run.resume")


def test_a_greedy_answer_to_each_task_is_a_baseline(tmp_path):
    settings = ["--objective.baseline.kind", "given", "--objective.scale.kind", "none"]
    settings += ["--run.num_steps", "2"]
    one = run(tmp_path / "one", *settings)
    metrics = read_metrics(one)
    for row in metrics:
        assert row["reward/greedy_mean"] in {0.0, 1 / 3, 2 / 3, 1.0}
        assert row["group/dropped/no_greedy_answer"] == 0
        # The greedy answers are no samples: they are neither trained on nor logged.
        assert row["rollout/trajectories"] == row["train/samples"] == 12
    assert not any(name.startswith("greedy") for _, name, *_ in contents(one))
    assert untimed(read_metrics(run(tmp_path / "other", *settings))) == untimed(metrics)


def test_a_teacher_beside_the_policy_equals_one_on_a_server(tmp_path):
    model = load_model(MODEL, dtype=torch.float32, device="cpu")
    settings = ["--objective.preset", "opd", "--run.num_steps", "2"]
    local = run(tmp_path / "local", *settings, "--teacher.path", MODEL)
    with running(PromptServer(model, load_tokenizer(MODEL))) as url:
        remote = run(tmp_path / "remote", *settings, "--teacher.url", url)
    ours, its = untimed(read_metrics(remote)), untimed(read_metrics(local))
    for mine, other in zip(ours, its, strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert mine[key] == pytest.approx(value, rel=1e-2, abs=1e-4), key


def test_states_of_the_environment_reach_gigpo(tmp_path):
    settings = ["--objective.credit.kind", "gigpo", "--run.num_steps", "1"]
    metrics = read_metrics(run(tmp_path / "run", *settings))
    assert metrics[0]["train/updates"] == 1 and metrics[0]["advantage/abs_mean"] > 0


def test_a_resumed_run_never_starts_afresh_and_names_what_changed(finished, tmp_path):
    with pytest.raises(ConfigError, match="no run under"):
        run(tmp_path / "nothing", "--run.resume")
    with pytest.raises(CheckpointError, match="group_size: checkpoint 4, now 2"):
        run(finished, "--run.resume", "--rollout.group_size", "2")
    with pytest.raises(CheckpointError, match="digits"):
        run(finished, "--run.resume", "--env.config.digits", "4")
    with pytest.raises(ConfigError, match="already holds a run"):
        run(finished)


FAILING = """
from agentrl.env import Environment, Task

class Failing(Environment):
    episodes = 0

    def splits(self):
        return {"train": 8, "test": 8}

    def get(self, split, index):
        return Task(str(index), "What is 1 + 1?")

    def step(self, action):
        Failing.episodes += 1
        self.finish(1.0 if Failing.episodes % 12 == 0 else "good")
"""


@pytest.mark.slow
def test_a_run_whose_episodes_fail_for_one_cause_says_so_and_stops(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    env = ["--env.id", f"{tmp_path / 'failing.py'}:Failing", "--run.num_steps", "5"]
    with pytest.raises(TrainingError) as stopped:
        run(tmp_path / "run", *env)
    for part in ("11 of the 12 trajectories of step 3", "finish(reward=)", "3 steps in a row"):
        assert part in str(stopped.value)
    assert read_status(tmp_path / "run")["state"] == "failed"
    assert len(read_metrics(tmp_path / "run")) == 2


def test_wrong_input_is_one_line_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.delenv("AGENTRL_VLLM_PYTHON", raising=False)
    teacher = ["--objective.preset", "opd", "--teacher.path", str(tmp_path / "none")]
    short = ["--rollout.max_context_tokens", "8", "--rollout.max_turn_tokens", "8"]
    cases = [
        (["--env.split", "nope"], ConfigError, "no split 'nope'"),
        (["--objective.preset", "opd"], ConfigError, "set teacher.path"),
        (teacher, ConfigError, "does not exist"),
        (["--objective.reward.weights.speed", "1"], ConfigError, "components are correct"),
        (short, TrainingError, "rollout.max_context_tokens"),
        (["--inference.backend", "openai", "--inference.urls", "x"], ConfigError, "embedded"),
        (["--inference.backend", "vllm"], ConfigError, "inference.python"),
        (["--rollout.max_staleness", "1"], ConfigError, "inference.backend"),
    ]
    for number, (overrides, error, text) in enumerate(cases):
        with pytest.raises(error) as caught:
            run(tmp_path / f"run{number}", *overrides)
        assert text in str(caught.value), overrides


def test_gradients_that_are_not_finite_are_skipped_counted_and_stop_the_run(tmp_path, monkeypatch):
    """Poison the loss of every step: five skipped updates, then a stop with the batch saved."""

    def poisoned(learner, samples, batch, *args, **kwargs):
        batch.rewards = torch.full_like(batch.rewards, 1e38) * torch.arange(len(batch.rewards))
        return update_policy(learner, samples, batch, *args, **kwargs)

    monkeypatch.setattr("agentrl.train.trainer.update_policy", poisoned)
    with pytest.raises(TrainingError, match="5 gradients in a row"):
        run(tmp_path / "run", "--run.num_steps", "9", "--objective.scale.kind", "none")
    metrics = read_metrics(tmp_path / "run")
    assert [row["train/skipped_updates_in_all"] for row in metrics] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "failed_batch.safetensors").stat().st_size > 0
    assert json.loads((tmp_path / "run" / "failed_batch.json").read_text()) == {"step": 5}


def test_nccl_between_a_cpu_and_servers_is_refused(tmp_path, monkeypatch):
    # Nothing is started.
    monkeypatch.setattr("agentrl.inference.launcher.ServerLauncher.start", None)
    settings = ["--inference.backend", "vllm", "--inference.transfer", "nccl"]
    with pytest.raises(ConfigError, match=r"model is on the cpu; set model\.device = 'cuda'"):
        run(tmp_path / "run", *settings, "--model.device", "cpu")


@pytest.mark.parametrize(
    ("visible", "number", "left"),
    [("4,7,5", 0, "7,5"), ("4,7,5", 2, "4,7"), ("GPU-a,GPU-b", None, "GPU-b"), ("3", 0, None)],
)
def test_servers_over_nccl_get_the_other_gpus(monkeypatch, visible, number, left):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device = torch.device("cuda") if number is None else torch.device("cuda", number)
    if left is None:
        with pytest.raises(ConfigError, match=r"besides the trainer's.*inference\.urls.*'file'"):
            _other_gpus(device)
    else:
        assert _other_gpus(device) == {"CUDA_VISIBLE_DEVICES": left}
