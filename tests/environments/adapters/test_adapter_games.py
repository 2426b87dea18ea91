"""Turn-taking games of PettingZoo and TextArena."""

import re

import pytest

pytest.importorskip("pettingzoo", reason="needs pettingzoo: see `make test-adapters`")
pytest.importorskip("textarena", reason="needs textarena: see `make test-adapters`")

from agentrl.env.registry import resolve
from agentrl.errors import ConfigError

CLASSIC = "pettingzoo:pettingzoo.classic."
OPPONENT = r"""
import re

def first(shown, legal):
    free = re.findall(r"'\[(\d+)\]'", shown)
    return f"[{free[0]}]"

def first_legal(shown, legal):
    return legal[0]
"""


def play(env, choose, turns=300):
    messages, moves = env.reset("train", play.index), 0
    text = messages[-1]["content"]
    while True:
        result = env.step(choose(text))
        moves += 1
        if result.terminated or moves == turns:
            return result, moves
        text = result.observation[-1]["content"]


def legal(text):
    return re.search(r"one of (.*) as", text)[1].split(", ")


@pytest.mark.parametrize("game", ["tictactoe_v3", "connect_four_v3", "leduc_holdem_v4", "rps_v2"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_game_is_played_to_its_end_from_every_seat(opened, game, index):
    play.index = index
    env = opened(CLASSIC + game)
    result, _ = play(env, lambda text: f"I take <action>{legal(text)[0]}</action>")
    assert result.terminated and result.info == {"seat": index}


def test_a_seed_repeats_the_opponent(opened):
    play.index = 4
    first, again = (
        play(opened(CLASSIC + "connect_four_v3"), lambda text: legal(text)[-1]) for _ in range(2)
    )
    assert (first[0].reward, first[1]) == (again[0].reward, again[1])


def test_the_reward_is_the_seat_s(opened, tmp_path):
    (tmp_path / "mine.py").write_text(OPPONENT)
    play.index = 0
    env = opened(
        CLASSIC + "connect_four_v3", opponent=f"{tmp_path}/mine.py:first_legal", seat=0
    )  # who fills one column alone wins
    assert play(env, lambda text: legal(text)[-1])[0].reward == 1.0
    env = opened(CLASSIC + "connect_four_v3", opponent=f"{tmp_path}/mine.py:first_legal", seat=1)
    spread = iter("6152")
    assert play(env, lambda text: next(spread))[0].reward == -1.0


def test_an_illegal_move_is_answered_and_counted(opened):
    env = opened(CLASSIC + "tictactoe_v3", seat=0)
    env.reset("train", 0)
    result = env.step("<action>9</action>")
    assert "not legal" in result.observation[0]["content"] and not result.terminated
    assert result.metrics["invalid_calls"] == 1


def test_a_game_for_one(opened):
    env = opened("textarena:GuessTheNumber-v0", num_players=1)
    text = env.reset("train", 3)[-1]["content"]
    low, high = map(int, re.search(r"between (\d+) and (\d+)", text).groups())
    while True:
        result = env.step(f"I guess [{(low + high) // 2}]")
        if result.terminated:
            break
        said = result.observation[-1]["content"]
        middle, is_higher = (low + high) // 2, said.rfind("higher") > said.rfind("lower")
        low, high = (middle + 1, high) if is_higher else (low, middle - 1)
    assert result.reward > 0.5


def test_a_game_for_two_against_a_function(opened, tmp_path):
    (tmp_path / "mine.py").write_text(OPPONENT)
    env = opened("textarena:TicTacToe-v0", opponent=f"{tmp_path}/mine.py:first", seat=1)
    text = env.reset("train", 0)[-1]["content"]
    assert "Player 1" in text
    for _ in range(5):
        free = re.findall(r"'\[(\d+)\]'", text)
        result = env.step(f"[{free[-1]}]")
        if result.terminated:
            break
        text = result.observation[-1]["content"]
    assert result.terminated and result.reward in (-1.0, 0.0, 1.0)


def test_random_moves_of_textarena_are_refused():
    environment = resolve("textarena:TicTacToe-v0")
    with pytest.raises(ConfigError, match="opponent"):
        environment.load_shared(environment.Config())
