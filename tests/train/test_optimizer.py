import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.config import TrainSection
from agentrl.errors import CheckpointError, ConfigError, TrainingError
from agentrl.train.checkpoint import load_checkpoint, load_latest, save_checkpoint
from agentrl.train.movement import relative_update
from agentrl.train.optimizer import Learner, learning_rate
from agentrl.train.state import capture_state, restore_state


def make_learner(**settings) -> Learner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    config = TrainSection(**{"learning_rate": 0.1, **settings})
    return Learner(model, config, total_updates=10)


def backward(learner: Learner, scale: float = 1.0) -> None:
    (learner.model(torch.ones(2, 4)).sum() * scale).backward()


def test_schedules():
    config = TrainSection(learning_rate=1.0, warmup_steps=3, lr_schedule="linear")
    rates = [learning_rate(config, update, 13) for update in range(15)]
    assert rates[:3] == [0.25, 0.5, 0.75]
    assert rates[3] == 1.0 and rates[8] == pytest.approx(0.5) and rates[13:] == [0.0, 0.0]
    cosine = config.model_copy(update={"lr_schedule": "cosine"})
    assert learning_rate(cosine, 8, 13) == pytest.approx(0.5)
    assert learning_rate(cosine, 5, 13) > learning_rate(config, 5, 13)
    constant = config.model_copy(update={"lr_schedule": "constant"})
    assert learning_rate(constant, 99, 13) == 1.0


def test_weights_decay_and_biases_do_not():
    learner = make_learner(weight_decay=0.5, learning_rate=0.1)
    before = [parameter.clone() for parameter in learner.model.parameters()]
    for parameter in learner.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner.step()
    for old, new in zip(before, learner.model.parameters(), strict=True):
        shrunk = 1 - 0.1 * 0.5 if old.ndim >= 2 else 1.0
        torch.testing.assert_close(new, old * shrunk)


def test_a_gradient_that_is_not_finite_changes_nothing():
    learner, twin = make_learner(), make_learner()
    backward(learner)
    backward(twin)
    learner.step()
    twin.step()
    backward(learner, scale=float("nan"))
    update = learner.step()
    assert not update.applied and learner.num_skipped == 1 and learner.num_updates == 1
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    for learner_ in (learner, twin):
        backward(learner_)
        learner_.step()
    for ours, its in zip(learner.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(ours, its)
    assert learner.num_skipped_in_a_row == 0


def test_too_many_in_a_row_stop_the_run():
    learner = make_learner()
    for _ in range(4):
        backward(learner, scale=float("inf"))
        learner.step()
    backward(learner, scale=float("inf"))
    with pytest.raises(TrainingError, match="5 gradients in a row"):
        learner.step()


def test_gradients_are_scaled_down_to_the_largest_norm(monkeypatch):
    learner = make_learner(max_grad_norm=0.5)
    seen = []

    def spy() -> None:
        seen.append(nn.utils.get_total_norm([p.grad for p in learner.model.parameters()]))

    monkeypatch.setattr(learner.optimizer, "step", spy)
    backward(learner, scale=1000.0)
    assert learner.step().grad_norm > 100, "reported before clipping"
    assert float(seen[0]) == pytest.approx(0.5, rel=1e-3)


def in_bfloat16(weights: nn.Module | None = None, **settings) -> Learner:
    """The learner of `make_learner`, whose model computes in bfloat16."""
    model = make_learner().model.to(torch.bfloat16)
    config = TrainSection(**{"learning_rate": 0.1, **settings})
    return Learner(model, config, total_updates=10, weights=weights)


def test_updates_too_small_for_bfloat16_add_up_in_float32():
    """20 steps of 1e-6: every one is below half a unit in the last place of nearly all weights."""
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        exact = nn.Linear(64, 64)
        computing = copy.deepcopy(exact).to(dtype)
        config = TrainSection(learning_rate=1e-6)
        weights = exact if dtype == torch.bfloat16 else None
        learner = Learner(computing, config, total_updates=20, weights=weights)
        before = [learner.masters.get(p, p).detach().clone() for p in computing.parameters()]
        for _ in range(20):
            computing(torch.ones(2, 64, dtype=dtype)).float().square().sum().backward()
            learner.step()
        after = [learner.masters.get(p, p).detach() for p in computing.parameters()]
        assert all(p.dtype == torch.float32 for p in after)
        pairs = list(zip(before, after, strict=True))
        moved[dtype] = sum(float((b - a).abs().sum()) for b, a in pairs)
        for parameter, master in zip(computing.parameters(), after, strict=True):
            assert torch.equal(parameter, master.to(dtype)), "computes with the cast of its masters"
    assert moved[torch.bfloat16] == pytest.approx(moved[torch.float32], rel=0.1)
    assert moved[torch.float32] > 0


def test_masters_begin_at_the_float32_weights_and_not_at_their_cast():
    exact = make_learner().model
    expected = [parameter.detach().clone() for parameter in exact.parameters()]
    learner = in_bfloat16(weights=exact)
    masters = [learner.masters[p] for p in learner.model.parameters()]
    assert all(torch.equal(m, e) for m, e in zip(masters, expected, strict=True))
    assert not torch.equal(masters[0].bfloat16().float(), masters[0])
    assert all(p.dtype == torch.bfloat16 for p in learner.model.parameters())


def test_micro_batches_add_up_in_float32():
    """1 + 64 * 2^-9: in bfloat16 each addition alone would be rounded away."""
    learner = in_bfloat16()
    (weight, *_), small = learner.model.parameters(), 2.0**-9
    for size in [1.0] + [small] * 64:
        (weight * size).sum().backward()
        assert weight.grad is None, "it would be added up in bfloat16"
    gradient = learner.masters[weight].grad
    assert gradient is not None and gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full_like(gradient, 1 + 64 * small))


def test_a_checkpoint_of_bfloat16_weights_without_masters_is_refused_in_one_line(tmp_path):
    """As runs wrote them when the weights themselves were in bfloat16."""
    older = make_learner()
    older.model.to(torch.bfloat16)
    older.optimizer = torch.optim.AdamW(older.model.parameters())
    state = capture_state(step=1, fingerprint={}, policy=older, data_position={})
    save_checkpoint(tmp_path, state, keep=1)
    with pytest.raises(CheckpointError) as raised:
        restore_state(load_latest(tmp_path), policy=in_bfloat16())
    assert "\n" not in str(raised.value)
    assert "torch.bfloat16" in str(raised.value) and "trains torch.float32" in str(raised.value)
    assert "start a new run with its folder as model.path" in str(raised.value)


def test_decay_and_the_guard_work_on_the_masters():
    learner = in_bfloat16(weight_decay=1e-3, learning_rate=1e-3)
    before = {p: m.detach().clone() for p, m in learner.masters.items()}
    for scale in (float("inf"), 0.0):
        (sum(p.sum() for p in learner.model.parameters()) * scale).backward()
        update = learner.step()
        assert update.applied == (scale == 0)
        for parameter, master in learner.masters.items():
            decay = 1 - 1e-6 if scale == 0 and parameter.ndim >= 2 else 1.0
            torch.testing.assert_close(master, before[parameter] * decay, rtol=1e-7, atol=0)
            assert master.grad is None and parameter.grad is None
    assert any(not torch.equal(m, before[p]) for p, m in learner.masters.items())


def test_it_is_the_mixed_precision_of_fsdp(tmp_path):
    """Bit for bit: tied embeddings, several micro-batches, decay and clipping."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    exact = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, **shape, **heads))
    computing, sharded = copy.deepcopy(exact), copy.deepcopy(exact)
    for parameter in computing.parameters():
        parameter.data = parameter.data.bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for part in (*sharded.model.layers, sharded):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        config = TrainSection(learning_rate=1e-3, weight_decay=0.1)
        ours = Learner(computing, config, total_updates=9, weights=copy.deepcopy(exact))
        theirs = Learner(sharded, config, total_updates=9)
        assert not theirs.masters, "its parameters are float32 themselves"
        for step in range(3):
            for micro in range(3):
                generator = torch.Generator().manual_seed(10 * step + micro)
                ids = torch.randint(0, 64, (2, 9), generator=generator)
                for learner in (ours, theirs):
                    learner.model(ids, labels=ids, use_cache=False).loss.backward()
            assert ours.step().grad_norm == theirs.step().grad_norm
        for mine, its in zip(computing.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(ours.masters[mine], its.full_tensor())  # type: ignore
    finally:
        torch.distributed.destroy_process_group()


def test_moments_in_8_bit(tmp_path):
    """2 bytes per weight, close to AdamW, and a restored run goes on bit for bit."""
    pytest.importorskip("bitsandbytes", reason="needs agentrl-gym[8bit]")

    def make(optimizer: str) -> Learner:
        torch.manual_seed(0)
        config = TrainSection(learning_rate=1e-3, optimizer=optimizer)
        model = nn.Linear(128, 64).to(torch.bfloat16)
        return Learner(model, config, total_updates=10)

    def train(learner: Learner, *steps: int) -> None:
        for step in steps:
            inputs = torch.randn(4, 128, generator=torch.Generator().manual_seed(step))
            learner.model(inputs.bfloat16()).float().square().sum().backward()
            learner.step()

    exact, small = make("adamw"), make("adamw_8bit")
    begun = [m.detach().clone() for m in small.masters.values()]
    for learner in (exact, small):
        train(learner, 1, 2, 3)
    moments = [
        value
        for state in small.optimizer.state.values()
        for name, value in state.items()
        if name in ("state1", "state2") and value.numel() >= 4096
    ]
    assert [moment.dtype for moment in moments] == [torch.uint8] * 2
    for theirs, ours, begin in zip(
        exact.masters.values(), small.masters.values(), begun, strict=True
    ):
        assert (ours - theirs).abs().mean() < 0.1 * (theirs - begin).abs().mean()

    state = capture_state(step=3, fingerprint={}, policy=small)
    folder = save_checkpoint(tmp_path, state)
    resumed = make("adamw_8bit")
    restore_state(load_checkpoint(folder), policy=resumed)
    for learner in (small, resumed):
        train(learner, 4, 5)
    for ours, theirs in zip(small.masters.values(), resumed.masters.values(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(CheckpointError, match=r"AdamW8bit.*set train\.optimizer as it was"):
        restore_state(load_checkpoint(folder), policy=make("adamw"))


def test_without_its_package_8_bit_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl-gym\[8bit\]'"):
        make_learner(optimizer="adamw_8bit")
    make_learner(optimizer="adamw_cpu")


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"betas": (0.9, 0.95)}])
def test_how_far_an_update_moves_the_weights_is_measured(settings):
    learner = make_learner(learning_rate=0.01, **settings)
    for scale in (1.0, -0.3, 2.0):
        before = torch.cat([p.detach().flatten().clone() for p in learner.model.parameters()])
        backward(learner, scale)
        update = learner.step()
        after = torch.cat([p.detach().flatten() for p in learner.model.parameters()])
        assert update.moved == pytest.approx(float((after - before).norm() / after.norm()), 1e-3)


def test_of_a_large_tensor_every_so_many_entries_are_looked_at(monkeypatch):
    learner = make_learner()
    backward(learner)
    whole = learner.step().moved
    monkeypatch.setattr("agentrl.train.movement.SAMPLE", 3)
    assert relative_update(learner.optimizer) == pytest.approx(whole, rel=0.5)
    learner.optimizer.state[learner.optimizer.param_groups[0]["params"][0]].pop("exp_avg")
    assert relative_update(learner.optimizer) is None
