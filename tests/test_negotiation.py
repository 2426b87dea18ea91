"""examples/negotiation: one seat is trained, the other is a server's, over real HTTP."""

import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_play import play
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import make_tokenizer

from agentrl.config import load_config
from agentrl.model.text.renderer import Renderer

EXAMPLE = Path(__file__).parents[1] / "examples" / "negotiation"


@pytest.fixture
def buyer(monkeypatch):
    """The module of the scripted buyer."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "scripted_buyer", raising=False)
    import scripted_buyer

    return scripted_buyer


@contextmanager
def serving(module):
    server = module.serve()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def played(url, says):
    """One episode of a seller that says these texts, one per turn."""
    renderer = Renderer(make_tokenizer())
    engine = ScriptedEngine(
        renderer, lambda _, prompt: says[prompt.count("<|im_start|>assistant\n") - 1]
    )
    batch = play(
        engine,
        renderer,
        None,
        env_id=f"{EXAMPLE / 'bargain.py'}:Bargain",
        env_config={"buyer_url": url},
        split_size=5,
        max_turn_tokens=400,
    )
    return batch.trajectories[0], engine


def test_a_deal_pays_its_share_and_only_the_seller_is_trained(buyer, monkeypatch):
    asked = []

    def answer(messages):
        asked.append(messages)
        return rule(messages)

    rule = buyer.answer
    monkeypatch.setattr(buyer, "answer", answer)
    with serving(buyer) as url:
        trajectory, engine = played(url, ["It is $500.", "Then $200?", "For you $60."])
    assert trajectory.error is None and 0 < trajectory.reward <= 1
    assert trajectory.info["price"] == 60 and len(trajectory.turns) == 3
    assert [m["role"] for m in asked[2]] == ["system"] + 3 * ["assistant", "user"]
    assert asked[2][-1]["content"] == "For you $60." and "I would give" in asked[2][-2]["content"]
    (row,) = trajectory.branches
    trained = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert engine.renderer.tokenizer.decode(trained) == (
        "It is $500.<|im_end|>Then $200?<|im_end|>For you $60.<|im_end|>"
    )
    assert "can pay at most" not in engine.renderer.tokenizer.decode(row.token_ids)


@pytest.mark.parametrize("price", [1, 900])
def test_what_the_simulated_buyer_must_not_take_pays_nothing(price, buyer, monkeypatch):
    monkeypatch.setattr(buyer, "answer", lambda messages: "DEAL")
    with serving(buyer) as url:
        trajectory, _ = played(url, [f"I ask for ${price}."])
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert trajectory.metrics["unfair_deals"] == 1.0


@pytest.mark.parametrize("how", ["leaves", "never agrees"])
def test_without_a_deal_the_episode_ends_and_pays_nothing(how, buyer, monkeypatch):
    says = "LEAVE" if how == "leaves" else "No."
    monkeypatch.setattr(buyer, "answer", lambda messages: says)
    with serving(buyer) as url:
        trajectory, _ = played(url, ["$900"] * 6)
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert len(trajectory.turns) == (1 if how == "leaves" else 6)


def test_a_buyer_that_is_not_there_fails_the_episode_in_its_step():
    trajectory, _ = played("http://127.0.0.1:1/v1", ["$50"])
    assert trajectory.error.stage == "step" and not trajectory.trainable


def test_the_run_file_is_valid():
    config = load_config(EXAMPLE / "run.toml", [])
    assert config.env.config["buyer_model"] == "buyer"
