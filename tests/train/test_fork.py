"""Forks of a real run: the ids before the fork, the edit, the samples behind it, the refusals."""

import asyncio
import os
import sys
from pathlib import Path

import httpx
import pytest
import torch

from agentrl.api import load_config, train
from agentrl.env import Environment, StepResult, Task
from agentrl.errors import AgentRLError
from agentrl.model.load import load_model
from agentrl.rollout import read_trajectories
from agentrl.rollout.index import TrajectoryIndex
from agentrl.train.fork import SERVERS, Forks
from agentrl.view.forking import ForkRequest
from agentrl.view.runs import RunFiles
from agentrl.view.server import make_app

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from contract_server import CONTEXT, ContractServer, running

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart/run.toml"
STEPS = 2


class Forgetful(Environment):
    """Answers the same action differently each time."""

    def splits(self):
        return {"train": 20, "test": 3}

    def get(self, split, index):
        return Task(f"{split}/{index}", f"{index}+{index}=?")

    def step(self, action):
        number = int.from_bytes(os.urandom(4), "big")
        return StepResult([{"role": "user", "content": f"{number}"}], reward=number % 2)


def played(folder: Path, *keys: str) -> Path:
    config = load_config(
        QUICKSTART, [f"--run.dir={folder}", f"--run.num_steps={STEPS}", "--run.save_every=1", *keys]
    )
    return train(config, quiet=True).run_dir


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return played(tmp_path_factory.mktemp("fork") / "run")


def entry(run: Path, turns: int, step: int = STEPS):
    return next(
        each
        for each in TrajectoryIndex(run).refresh()
        if each.step == step and each.turns == turns and each.error is None
    )


def trajectory(run: Path, found):
    return next(
        each
        for step, each in read_trajectories(run)
        if step == found.step and each.trajectory_id == found.trajectory_id
    )


def fork(run: Path, found, **request):
    async def ask():
        forks = Forks([], "vllm")
        try:
            asked = {"row": 0, "player": forks.players(run, found.newest_version)[0]["name"]}
            return await forks.play(run, found.step, found.offset, ForkRequest(**asked | request))
        finally:
            await forks.aclose()

    return asyncio.run(ask())


def test_the_checkpoint_of_the_step_plays(run):
    players = Forks([], "vllm").players(run, STEPS - 1)
    assert players[0] == {"name": f"step_{STEPS - 1:06d}", "version": STEPS - 1}
    assert {"name": "start", "version": 0} in players


@pytest.mark.parametrize("turn", [0, 1])
def test_branches_begin_with_the_edited_ids_and_are_of_the_group(run, turn):
    found = entry(run, turns=2)
    recorded = trajectory(run, found)
    start = recorded.turns[turn].start
    new = recorded.branches[0].token_ids[start + 2]
    got = fork(run, found, position=start + 1, ids=[new], count=3)
    assert len(got["branches"]) == 3
    for branch in got["branches"]:
        assert branch["error"] is None
        assert branch["ids"][0] == new
        assert branch["sampled"][0]
        assert branch["reward"] in (0.0, 1.0)
    # The members and the branches have one baseline: their advantages add up to nothing.
    assert len(got["members"]) == 8 + 3
    assert sum(got["members"].values()) == pytest.approx(0, abs=1e-4)


async def test_a_server_plays_on(run):
    found = entry(run, turns=1)
    start = trajectory(run, found).turns[0].start
    model = load_model(
        str(run / "checkpoints" / f"step_{STEPS:06d}"),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_tokens=CONTEXT,
    )

    async with running(ContractServer(model.eval())) as server:
        forks = Forks([server.url], "vllm")
        assert forks.players(run, STEPS)[0]["name"] == SERVERS
        request = ForkRequest(player=SERVERS, row=0, position=start, count=2)
        got = await forks.play(run, found.step, found.offset, request)
        await forks.aclose()
        got, bodies = got, server.bodies
    assert [each["error"] for each in got["branches"]] == [None, None]
    recorded = trajectory(run, found).branches[0].token_ids[:start]
    assert any(body.get("token_ids", body.get("prompt")) == recorded for body in bodies)


def test_a_seed_repeats_its_branches(run):
    found = entry(run, turns=1)
    start = trajectory(run, found).turns[0].start
    first, same, other = (
        [each["ids"] for each in fork(run, found, position=start, seed=seed)["branches"]]
        for seed in (1, 1, 2)
    )
    assert first == same
    assert first != other


def test_an_edited_message_is_read_in_place_of_the_recorded_one(run):
    found = entry(run, turns=2)
    second = trajectory(run, found).turns[1]
    got = fork(run, found, message=second.message - 1, text="777", position=second.start)
    assert [each["error"] for each in got["branches"]] == [None] * 4
    assert all("777" in "".join(each["texts"]) for each in got["branches"])


def test_what_the_policy_did_not_write_is_no_token_to_fork_at(run):
    found = entry(run, turns=1)
    with pytest.raises(AgentRLError):
        fork(run, found, position=0)
    with pytest.raises(AgentRLError):
        fork(run, found, message=1, text="mine")  # the policy's own


def test_an_environment_that_does_not_repeat_itself_fails_the_branches(tmp_path):
    run = played(tmp_path / "run", f"--env.id={Path(__file__)}:Forgetful", "--env.config={}")
    found = entry(run, turns=3)
    turn = trajectory(run, found).turns[1]
    got = fork(run, found, position=turn.start)
    assert all("cannot be forked" in each["error"] for each in got["branches"])


def test_equal_weights_teach_nothing_and_others_are_compared_task_by_task(run):
    async def ask(*players: str):
        forks = Forks([], "vllm")
        try:
            return await forks.taught(run, STEPS, *players)
        finally:
            await forks.aclose()

    same = asyncio.run(ask("start", "start"))
    assert (same["count"], same["changed"], same["gained"], same["lost"]) == (64, 0, [], [])
    assert all(before == after for _, before, after in same["rows"])
    learned = asyncio.run(ask("start", f"step_{STEPS:06d}"))
    for column in (1, 2):
        first = [row[column] for row in learned["rows"] if row[0].startswith("first turn: ")]
        assert sum(first) == pytest.approx(1)


def test_only_a_page_of_a_viewer_that_plays_may_ask(run):
    found, id_ = entry(run, turns=1), RunFiles(run).id
    path = f"/api/runs/{id_}/trajectories/{found.step}/{found.offset}"
    start = trajectory(run, found).turns[0].start
    asked = {"player": "start", "row": 0, "position": start, "count": 1}
    forks = Forks([], "vllm")

    async def ask(app, base="http://127.0.0.1:8600", **headers) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            assert (await client.get(path)).json()["players"] == (
                forks.players(run, STEPS - 1) if app is plays else []
            )
            return (await client.post(f"{path}/fork", json=asked, headers=headers)).status_code

    async def all_() -> list[int]:
        found = [
            await ask(reads),
            await ask(plays, origin="http://elsewhere.org"),
            await ask(plays, origin="http://127.0.0.1:8600"),
        ]
        await forks.aclose()
        return found

    reads, plays = make_app([run]), make_app([run], plays=forks)
    assert asyncio.run(all_()) == [405, 403, 200]
