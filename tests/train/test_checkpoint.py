import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from agentrl.errors import CheckpointError
from agentrl.train.checkpoint import (
    CheckpointNotSaved,
    check_fingerprint,
    clean_leftovers,
    latest_checkpoint,
    load_checkpoint,
    load_latest,
    resume,
    save_checkpoint,
)
from agentrl.train.state import TrainState, capture_rng, capture_state, restore_rng, restore_state

ENV = {"id": "math", "config": {"split": "train"}}
FINGERPRINT = {"model": "tiny", "group_size": 8, "env": ENV}


class TinyPolicy(torch.nn.Module):
    """Embedding tied to the output layer, dropout, and a buffer: the shapes of a real policy."""

    scale: torch.Tensor

    def __init__(self, vocabulary: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.hidden = torch.nn.Linear(width, width)
        self.dropout = torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.5, 1.5]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.hidden(self.embedding(ids))))) * self.scale[1]


class Unmixed:
    """The optimizer updates the model's own parameters: there are no others."""

    masters = {}  # noqa: RUF012

    def cast(self) -> None:
        pass


class Run(Unmixed):
    """A training run in miniature whose every step draws from all three random generators."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = TinyPolicy()
        decayed = [self.model.embedding.weight]
        others = [p for p in self.model.parameters() if p is not self.model.embedding.weight]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-2,
            betas=(0.8, 0.97),
        )
        self.losses: list[float] = []

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            ids = torch.from_numpy(np.random.randint(0, 11, (4, 5)))
            shift = random.randint(1, 3) + int(random.gauss(0, 1) > 0)
            logits = self.model(ids)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), ((ids + shift) % 11).flatten()
            )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9
            self.losses.append(loss.item())

    def state(self, step: int) -> TrainState:
        return capture_state(
            step=step,
            fingerprint=FINGERPRINT,
            policy=self,
            data_position={"epoch": 1, "index": 3 * step},
            extra={"kl_coefficient": 0.1 + 0.2},
        )

    def restore(self, state: TrainState) -> None:
        restore_state(state, policy=self)


class Parts(Unmixed):
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def everything(run: Run) -> dict[str, bytes | str]:
    """All that must be equal for two runs to be the same run, as bytes."""
    state: dict[str, bytes | str] = {k: bits(v) for k, v in run.model.state_dict().items()}
    for name, parameter in run.model.named_parameters():
        for key, value in run.optimizer.state[parameter].items():
            state[f"{name}/{key}"] = bits(value)
    state["groups"] = repr(
        [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
    )
    state["rng"] = json.dumps(capture_rng())
    return state


def save_steps(run_dir: Path, *steps: int, keep: int = 10) -> Run:
    run = Run()
    done = 0
    for step in steps:
        run.train(step - done)
        done = step
        save_checkpoint(run_dir, run.state(step), keep=keep)
    return run


def test_five_plus_five_steps_equal_ten_bit_for_bit(tmp_path):
    whole = Run()
    whole.train(10)
    expected = everything(whole)

    first = Run()
    first.train(5)
    save_checkpoint(tmp_path, first.state(5))
    first.train(2)  # work that a kill throws away

    second = Run(seed=99)
    second.train(1)  # state that the restore must overwrite, optimizer moments included
    state = resume(tmp_path, fingerprint=FINGERPRINT, policy=second)
    second.losses.clear()
    second.train(5)

    assert second.losses == whole.losses[5:]
    assert everything(second) == expected
    assert state.step == 5
    assert state.data_position == {"epoch": 1, "index": 15}
    assert state.extra == {"kl_coefficient": 0.1 + 0.2}


@pytest.mark.parametrize("omitted", ["rng", "moments", "options"])
def test_each_part_of_the_state_is_needed(tmp_path, omitted):
    """The test above could pass with a part left out if the tiny run did not depend on it."""
    whole = Run()
    whole.train(10)
    first = Run()
    first.train(5)
    save_checkpoint(tmp_path, first.state(5))
    second = Run(seed=99)
    second.restore(load_latest(tmp_path))
    if omitted == "rng":
        torch.manual_seed(99)
    elif omitted == "moments":
        second.optimizer.state.clear()
    else:
        second.optimizer.param_groups[0]["lr"] = 1e-2
    second.train(5)
    assert everything(second) != everything(whole)


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path):
    path = save_checkpoint(tmp_path, save_steps(tmp_path / "other", 1).state(1))
    saved = load_file(path / "model.safetensors")
    assert "embedding.weight" in saved
    assert "head.weight" not in saved
    run = Run(seed=5)
    run.restore(load_checkpoint(path))
    assert run.model.head.weight is run.model.embedding.weight


def test_odd_dtypes_and_values_survive(tmp_path):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(
        torch.tensor([float("nan"), -0.0, float("inf"), 1e-41], dtype=torch.float32)
    )
    model.sixteen = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16).t())
    model.register_buffer("count", torch.tensor(2**60))
    shared = torch.randn(10)
    model.register_buffer("left", shared[:4])
    model.register_buffer("right", shared[4:])
    state = capture_state(step=0, fingerprint={}, policy=Parts(model))
    loaded = load_file(save_checkpoint(tmp_path, state) / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        as_bytes = [
            t.contiguous().view(torch.uint8) if t.dim() else t for t in (loaded[name], tensor)
        ]
        assert torch.equal(*as_bytes)


def test_critic_and_its_optimizer_come_back(tmp_path):
    policy, critic = Run(), Run(seed=1)
    critic.train(3)
    rng = {"rng": ""}  # both networks draw from one
    expected = everything(critic) | rng
    state = capture_state(step=3, fingerprint={}, policy=policy, critic=critic)
    loaded = load_checkpoint(save_checkpoint(tmp_path, state))
    fresh_policy, fresh_critic = Run(seed=2), Run(seed=3)
    restore_state(loaded, policy=fresh_policy, critic=fresh_critic)
    assert everything(fresh_critic) | rng == expected


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), draws=st.integers(0, 700))
def test_random_states_continue_the_same_stream(seed, draws):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    for _ in range(draws % 7):
        random.gauss(0, 1)
        np.random.standard_normal()
    torch.randn(draws)
    saved = json.loads(json.dumps(capture_rng()))

    def draw() -> tuple:
        return (
            torch.randn(17).tolist(),
            torch.randint(100, (5,)).tolist(),
            np.random.standard_normal(3).tolist(),
            random.gauss(0, 1),
            random.random(),
        )

    expected = draw()
    restore_rng(saved)
    assert draw() == expected


def test_a_state_without_an_exact_json_form_is_refused_by_name():
    run = Run()
    with pytest.raises(TypeError, match=r"extra\.when\[1\] is a set"):
        capture_state(step=0, fingerprint={}, policy=run, extra={"when": [1, {2}]})  # type: ignore
    with pytest.raises(TypeError, match="milestones has the key 3"):
        capture_state(step=0, fingerprint={"milestones": {3: 1}}, policy=run)  # type: ignore


def test_transformers_loads_the_folder(tmp_path):
    from families import save_tiny_model, tiny_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_model("qwen3", tie_word_embeddings=True).to(torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path / "tiny", "qwen3"))
    state = capture_state(step=7, fingerprint={}, policy=Parts(model), tokenizer=tokenizer)
    path = save_checkpoint(tmp_path, state)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert type(loaded) is type(model)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert json.loads((path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    again = AutoTokenizer.from_pretrained(path)
    assert again.chat_template == tokenizer.chat_template
    assert again("w3 w4")["input_ids"] == tokenizer("w3 w4")["input_ids"]
    assert model.config.architectures is None, "saving must not change the live model"


def test_manifest_lists_every_file_with_its_hash(tmp_path):
    save_steps(tmp_path, 3)
    path = latest_checkpoint(tmp_path)
    assert path is not None and path.name == "step_000003"
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert set(files) | {"manifest.json"} == {p.name for p in path.iterdir()}
    for name, entry in files.items():
        data = (path / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def test_only_the_newest_are_kept(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert names(tmp_path) == ["step_000003", "step_000004"]


def test_no_checkpoint_is_none_and_steps_sort_by_number(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    for name in ("step_999999", "step_1000000", "step_000002", "step_12", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    latest = latest_checkpoint(tmp_path)
    assert latest is not None and latest.name == "step_1000000"


def test_saving_a_step_again_replaces_it(tmp_path):
    run = save_steps(tmp_path, 2)
    run.train(1)
    save_checkpoint(tmp_path, run.state(2))
    assert names(tmp_path) == ["step_000002"]
    fresh = Run(seed=4)
    fresh.restore(load_latest(tmp_path))
    assert everything(fresh) == everything(run)


def test_checkpoints_of_an_abandoned_timeline_are_set_aside(tmp_path):
    save_steps(tmp_path, 2, 4)
    again = Run()
    again.restore(load_checkpoint(tmp_path / "checkpoints" / "step_000002"))
    again.train(1)
    save_checkpoint(tmp_path, again.state(3), keep=2)
    assert names(tmp_path) == ["step_000002", "step_000003", "step_000004.abandoned"]
    assert load_latest(tmp_path).step == 3


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "emptied", "missing", "flipped"])
def test_a_damaged_newest_falls_back_loudly(tmp_path, caplog, file, damage):
    save_steps(tmp_path, 2, 4)
    path = tmp_path / "checkpoints" / "step_000004" / file
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
    else:
        path.write_bytes(b"" if damage == "emptied" else data[:-1])
    # A flip in the manifest reads as damage of the file whose line it hit.
    named = "damaged" if (file, damage) == ("manifest.json", "flipped") else file
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(path.parent)
    with caplog.at_level("WARNING"):
        assert load_latest(tmp_path).step == 2
    assert str(path) in caplog.text or file == "manifest.json"
    assert "DAMAGED" in caplog.text


@pytest.fixture(scope="module")
def good_checkpoint(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("good")
    save_steps(run_dir, 1)
    return run_dir / "checkpoints" / "step_000001"


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), data=st.data())
def test_no_single_flipped_bit_goes_unseen(good_checkpoint, where, bit, data):
    name = data.draw(st.sampled_from(sorted(p.name for p in good_checkpoint.iterdir())))
    path = good_checkpoint / name
    original = path.read_bytes()
    content = bytearray(original)
    content[int(where * len(content))] ^= 1 << bit
    path.write_bytes(content)
    try:
        # A flip in the manifest's white space is harmless; every other one is an error.
        harmless = name == "manifest.json" and parses_alike(original, bytes(content))
        if harmless:
            load_checkpoint(good_checkpoint)
        else:
            with pytest.raises(CheckpointError):
                load_checkpoint(good_checkpoint)
    finally:
        path.write_bytes(original)


def parses_alike(left: bytes, right: bytes) -> bool:
    try:
        return json.loads(left) == json.loads(right)
    except ValueError:
        return False


def test_nothing_loadable_is_an_error_and_never_a_fresh_start(tmp_path):
    run = Run()
    with pytest.raises(CheckpointError, match="no checkpoint under"):
        load_latest(tmp_path)
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        file = tmp_path / "checkpoints" / f"step_{step:06d}" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-7])
    before = everything(Run())
    run = Run()
    with pytest.raises(
        CheckpointError, match=r"none of the 2 checkpoints .*step_000002.*step_000001"
    ):
        resume(tmp_path, fingerprint=FINGERPRINT, policy=run)
    assert everything(run) == before


def test_another_model_is_refused_by_tensor_name(tmp_path):
    save_steps(tmp_path, 1)
    state = load_latest(tmp_path)
    for other, reason in (
        (TinyPolicy(width=7), r"model.safetensors: embedding.weight is .*\(11, 6\)"),
        (torch.nn.Linear(2, 2), "does not fit the model: 2 tensors missing"),
        (TinyPolicy().half(), "float16"),
        (TinyPolicy(), "parameter groups"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            restore_state(state, policy=Parts(other))


@pytest.fixture
def folder(tmp_path) -> Path:
    save_steps(tmp_path, 1)
    return tmp_path / "checkpoints" / "step_000001"


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def rewrite_with_manifest(folder: Path, name: str, content: bytes) -> None:
    """Replace a file and make the manifest agree, as an attacker would."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def crafted(kind: str, target: Path) -> bytes:
    if kind == "pickle":
        return pickle.dumps(Payload(target))
    if kind == "torch.save":
        file = target.with_suffix(".pt")
        torch.save({"weight": torch.zeros(2), "payload": Payload(target)}, file)
        return file.read_bytes()
    if kind == "header bomb":
        return (2**62).to_bytes(8, "little") + b"{}"
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * 4


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "header bomb", "shape bomb"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_crafted_tensor_file_is_refused_and_runs_nothing(folder, tmp_path, kind, name):
    target = tmp_path / "payload-ran"
    rewrite_with_manifest(folder, name, crafted(kind, target))
    with pytest.raises(CheckpointError, match=f"{name} is not a safetensors file"):
        load_checkpoint(folder)
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [b"[" * 200_000, b"[]", b"{}", b'{"format_version": 99}', b"\xff\xfe", b'{"format_version":1}'],
)
def test_a_crafted_state_file_is_refused(folder, content):
    rewrite_with_manifest(folder, "state.json", content)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "a/../../secret"])
def test_a_manifest_cannot_reach_out_of_its_folder(folder, name):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": "", "size": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="bad entry"):
        load_checkpoint(folder)


def test_damaged_random_states_are_an_error():
    good = capture_rng()
    python = [3, [1, 2], None]
    for key, value in (("torch", "AAAA"), ("python", python), ("numpy", {}), ("torch", 5)):
        with pytest.raises(CheckpointError, match="random states"):
            restore_rng(good | {key: value})
    restore_rng(good)


def test_every_difference_is_listed_with_both_values_and_the_remedy(caplog):
    env = {"id": "math", "config": {"split": "test"}}
    now = FINGERPRINT | {"group_size": 16, "env": env, "seed": 1}
    with pytest.raises(CheckpointError) as caught:
        check_fingerprint(FINGERPRINT, now)
    line = str(caught.value)
    assert "group_size: checkpoint 8, now 16" in line
    assert 'env.config.split: checkpoint "train", now "test"' in line
    assert "seed: checkpoint (absent), now 1" in line
    assert "--run.resume force" in line
    assert "model" not in line.split(":", 1)[1]
    assert "\n" not in line
    with caplog.at_level("WARNING"):
        check_fingerprint(FINGERPRINT, now, force=True)
    assert "group_size: checkpoint 8, now 16" in caplog.text


def test_a_key_that_a_checkpoint_does_not_know_had_its_default():
    check_fingerprint(FINGERPRINT, FINGERPRINT | {"rollout": {"top_p": 1.0}})
    with pytest.raises(CheckpointError, match=r"rollout\.top_p: checkpoint 1\.0, now 0\.9"):
        check_fingerprint(FINGERPRINT, FINGERPRINT | {"rollout": {"top_p": 0.9}})


def test_equal_fingerprints_pass_through_json():
    current = {"sizes": (1, 2), "rate": 1e-6, "nested": {"a": {"b": None}}, "empty": {}}
    check_fingerprint(json.loads(json.dumps(current)), current)
    with pytest.raises(CheckpointError):
        check_fingerprint({"flag": 1}, {"flag": True})


KILLED_SAVE = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_checkpoint import Run
from agentrl.train.checkpoint import save_checkpoint

root = Path({root!r})
run = Run()
run.train(2)
save_checkpoint(root / "template", run.state(2))
run.train(2)
state = run.state(4)
total = None
point = 0
while total is None or point < total:
    run_dir = root / f"killed-{{point:03d}}"
    shutil.copytree(root / "template", run_dir)
    child = os.fork()
    if child == 0:
        calls = 0
        def count_down():
            global calls
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
        def hook(module, name):
            real = getattr(module, name)
            def hooked(*arguments, **keywords):
                count_down()
                return real(*arguments, **keywords)
            setattr(module, name, hooked)
        # Every change of the file system goes through one of these.
        import agentrl.train.checkpoint as checkpoint
        for module, name in [(os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "unlink"),
                             (os, "rmdir"), (checkpoint, "save_file"), (Path, "write_text"),
                             (Path, "rename")]:
            hook(module, name)
        save_checkpoint(run_dir, state, keep=1)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 7, status
        total = point
    point += 1
print(total)
"""


@pytest.mark.slow
def test_a_kill_at_any_point_of_a_save_leaves_a_good_checkpoint(tmp_path):
    expected = {}
    run = Run()
    for step in (2, 4):
        run.train(2)
        expected[step] = everything(run)
    script = KILLED_SAVE.format(tests=str(Path(__file__).parent), root=str(tmp_path))
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr
    num_points = int(finished.stdout)
    # 4 files and the folder written, forced to disk, renamed; then the old folder pruned.
    assert num_points >= 15
    steps_found = []
    for point in range(num_points):
        run_dir = tmp_path / f"killed-{point:03d}"
        leftovers = [n for n in names(run_dir) if n.startswith(".")]
        fresh = Run(seed=9)
        state = resume(run_dir, fingerprint=FINGERPRINT, policy=fresh)
        assert everything(fresh) == expected[state.step], (point, leftovers)
        assert not [n for n in names(run_dir) if n.startswith(".")], (point, leftovers)
        steps_found.append(state.step)
        shutil.rmtree(run_dir)
    # The old one until the rename, the new one from then on.
    assert steps_found == sorted(steps_found) and {2, 4} == set(steps_found)


def test_an_older_folder_of_the_same_step_survives_a_kill_between_the_renames(tmp_path):
    save_steps(tmp_path, 2)
    folder = tmp_path / "checkpoints" / "step_000002"
    folder.rename(folder.with_name(".old-step_000002"))
    (tmp_path / "checkpoints" / ".tmp-step_000002").mkdir()
    assert clean_leftovers(tmp_path) == [".tmp-step_000002"]
    assert load_latest(tmp_path).step == 2


def test_cleaning_touches_nothing_else(tmp_path):
    assert clean_leftovers(tmp_path) == []
    save_steps(tmp_path, 1)
    for name in (".tmp-notes", "step_000009.abandoned", ".keep"):
        (tmp_path / "checkpoints" / name).mkdir()
    before = names(tmp_path)
    assert clean_leftovers(tmp_path) == []
    assert names(tmp_path) == before


def failing_after(real, num_calls: int, error: OSError):
    calls = 0

    def wrapped(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls > num_calls:
            raise error
        return real(*arguments, **keywords)

    return wrapped


@pytest.mark.parametrize("num_calls", range(6))
@pytest.mark.parametrize("function", ["fsync", "write_text", "rename"])
def test_a_failing_disk_leaves_the_old_checkpoint_and_no_partial(
    tmp_path, monkeypatch, function, num_calls
):
    run = save_steps(tmp_path, 2)
    run.train(1)
    error = OSError(28, "No space left on device")
    owner = os if function == "fsync" else Path
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, failing_after(getattr(owner, function), num_calls, error))
        try:
            save_checkpoint(tmp_path, run.state(3))
            failed = False
        except CheckpointNotSaved as caught:
            failed = True
            assert "No space left on device" in str(caught) and "step 3" in str(caught)
    assert failed or num_calls >= {"fsync": 6, "write_text": 2, "rename": 1}[function]
    assert not [n for n in names(tmp_path) if n.startswith(".")]
    assert load_checkpoint(tmp_path / "checkpoints" / "step_000002").step == 2
    # And the next save, with space again, works.
    save_checkpoint(tmp_path, run.state(3))
    assert load_latest(tmp_path).step == 3


def test_a_failing_rename_over_the_same_step_puts_the_old_one_back(tmp_path, monkeypatch):
    run = save_steps(tmp_path, 2)
    real = Path.rename
    calls = []

    def second_fails(self, target):
        calls.append(self.name)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(CheckpointNotSaved):
        save_checkpoint(tmp_path, run.state(2))
    assert calls[1] == ".tmp-step_000002"
    assert names(tmp_path) == ["step_000002"]
    assert load_latest(tmp_path).step == 2
