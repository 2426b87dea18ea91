"""Gymnasium's own environments, and some made here, played as agentrl environments."""

import asyncio
import json
import string
import threading
from functools import partial
from typing import ClassVar

import numpy
import pytest

gymnasium = pytest.importorskip(
    "gymnasium", reason="needs gymnasium: pip install 'agentrl-gym[gymnasium]'"
)

from agentrl.env import Action, Task, ToolCall, connect  # noqa: E402
from agentrl.errors import ConfigError, EnvError  # noqa: E402
from agentrl.images import content_images, content_text  # noqa: E402
from agentrl_adapters.gymnasium_env import GymnasiumEnvironment, read_actions  # noqa: E402


class Echo(gymnasium.Env):
    """Repeats the text it is given; the word `stop` ends it, at the fifth step time is up."""

    action_space = gymnasium.spaces.Text(20, charset="abcdefghijklmnopqrstuvwxyz ")
    observation_space = gymnasium.spaces.Text(100, charset=string.printable)
    closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return f"seed {seed} options {options}", {}

    def step(self, action):
        self.count += 1
        info = {"count": self.count, "odd": float("nan")}
        return f"you said {action}", 0.5, action == "stop", self.count == 5, info

    def close(self):
        type(self).closed += 1


class Vector(gymnasium.Env):
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    observation_space = gymnasium.spaces.Dict(
        {"position": gymnasium.spaces.Box(-9.0, 9.0, (2,)), "gear": gymnasium.spaces.Discrete(3)}
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.random(2).astype("float32")
        return {"position": self.position, "gear": 1}, {}

    def step(self, action):
        self.position = self.position + action
        return {"position": self.position, "gear": 2}, 0.0, False, False, {}


gymnasium.register("agentrl-Echo-v0", Echo)
gymnasium.register("agentrl-Vector-v0", Vector)


def act(*actions):
    calls = (ToolCall(f"c{i}", "act", {"action": action}) for i, action in enumerate(actions))
    return Action(tool_calls=tuple(calls))


@pytest.fixture
def play(opened):
    return partial(opened, GymnasiumEnvironment)


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"])
def test_an_episode_is_gymnasiums_own(play, env_id):
    task = Task("mine", "Go.", metadata={"seed": 7})
    env = play(id=env_id)
    messages = env.reset(task=task)
    raw = gymnasium.make(env_id)
    first, _ = raw.reset(seed=7)
    space = raw.action_space
    space.seed(3)
    assert messages == [{"role": "user", "content": f"Go.\n\n{_text(first)}"}]
    for _ in range(30):
        action = int(space.sample())
        observation, reward, terminated, truncated, _ = raw.step(space.dtype.type(action))
        result = env.step(act(action))
        assert [message["content"] for message in result.observation] == [_text(observation)]
        ours = result.reward, result.terminated, result.truncated
        assert ours == (reward, terminated, truncated)
        if terminated or truncated:
            break
    raw.close()


def _text(observation):
    return json.dumps(numpy.asarray(observation).tolist()).replace(" ", "")


def test_the_map_is_drawn_and_actions_have_names(play):
    names = ["left", "down", "right", "up"]
    config = {"kwargs": {"is_slippery": False}, "observe": "render", "action_names": names}
    env = play(id="FrozenLake-v1", **config)
    (first,) = env.reset("train", 0)
    assert first["content"].startswith("Act by calling the tool act with one of left, down, right")
    assert "FFF" in first["content"]
    (spec,) = env.info().tools
    assert spec["function"]["parameters"]["properties"]["action"]["enum"] == names
    result = env.step(act("down", "down", "right", "right", "down", "right"))
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
    assert len(result.observation) == 6


def test_calls_after_the_end_are_not_run(play):
    env = play(id="agentrl-Echo-v0")
    env.reset(task=Task("t", "Speak.", metadata={"seed": 1, "options": {"a": 1}}))
    result = env.step(act("hello", "stop", "again"))
    assert [message["content"] for message in result.observation] == [
        "you said hello",
        "you said stop",
        "Not run: the episode had ended.",
    ]
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
    assert result.info == {"count": 2, "odd": None}


def test_ends_are_kept_apart(play):
    env = play(id="agentrl-Echo-v0")
    env.reset()
    result = env.step(act("a", "b", "c", "d", "e"))
    assert (result.terminated, result.truncated) == (False, True)
    env.reset()
    result = env.step(act("a", "b", "c", "d", "stop"))
    assert (result.terminated, result.truncated) == (True, True)
    limited = play(id="agentrl-Echo-v0", max_steps=2)
    limited.reset()
    assert not limited.step(act("a")).truncated
    result = limited.step(act("a"))
    assert (result.terminated, result.truncated) == (False, True)


@pytest.mark.parametrize("action", [4, -1, 1.5, True, "left", [0], "", 10**30])
def test_an_action_outside_the_space_is_answered(play, action):
    env = play(id="FrozenLake-v1")
    env.reset()
    result = env.step(act(action))
    assert result.metrics["invalid_calls"] == 1
    assert not (result.terminated or result.truncated)
    assert "whole number from 0 to 3" in result.observation[0]["content"]


def test_text_actions(play):
    env = play(id="agentrl-Echo-v0", actions="text")
    (first,) = env.reset(seed=3)
    assert "<action>" in first["content"] and env.info().tools == []
    result = env.step("I think <action>no</action> or rather <action>hello</action>.")
    assert result.observation == [{"role": "user", "content": "you said hello"}]
    assert "between <action>" in env.step("hello").observation[0]["content"]
    result = env.step("<action>NO CAPITALS</action>")
    assert "is no action" in result.observation[0]["content"]
    assert result.metrics["invalid_calls"] == 2
    bare = play(id="agentrl-Echo-v0", actions="text", action_tag=None)
    bare.reset()
    assert bare.step("stop").terminated


def test_arrays(play):
    env = play(id="agentrl-Vector-v0")
    (first,) = env.reset(seed=1)
    shown = json.loads(first["content"].rpartition("\n")[2])
    result = env.step(act([0.5, -0.5]))
    moved = json.loads(result.observation[0]["content"])
    assert moved["position"] == pytest.approx(
        [shown["position"][0] + 0.5, shown["position"][1] - 0.5]
    )
    assert moved["gear"] == 2
    assert "is no action" in env.step(act([5, 5])).observation[0]["content"]


def test_seeds_make_worlds(play):
    env = play(id="agentrl-Vector-v0")
    train, again = env.reset("train", 3, seed=1), env.reset("train", 3, seed=1)
    others = [env.reset("train", 4, seed=1), env.reset("test", 3, seed=1), env.reset("train", 3)]
    assert train == again and train not in others


def test_instances_are_closed(play):
    Echo.closed = 0
    env = play(id="agentrl-Echo-v0")
    env.reset()
    env.reset()
    env.step(act("stop"))
    env.close()
    assert Echo.closed == 3  # one for the action space, two episodes


@pytest.mark.parametrize(
    "config, problem",
    [
        ({"id": "Nope-v0"}, "Nope"),
        ({"id": "FrozenLake-v1", "kwargs": {"wings": 2}}, "wings"),
        ({"id": "FrozenLake-v1", "action_names": ["left"]}, "action_names has 1"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_a_wrong_configuration_is_named(config, problem):
    with pytest.raises((EnvError, ConfigError), match=problem):
        async with connect() as client:
            await client.session("gymnasium", split="train", index=0, config=config)


async def test_many_sessions_at_a_real_server(serve_environments):
    """Sessions interleave on one server; each is the episode that it would be alone."""

    async def episode(client, index):
        session = await client.session(
            "gymnasium",
            split="train",
            index=index,
            seed=5,
            config={"id": "FrozenLake-v1", "observe": "render"},
        )
        seen = [session.messages]
        for step in range(8):
            result = await session.step(act((step + index) % 4), timeout_s=20)
            seen.append((result.observation, result.reward, result.terminated, result.truncated))
            if result.terminated or result.truncated:
                break
        await session.close()
        return seen

    with serve_environments([GymnasiumEnvironment]) as (url, _):
        async with connect(url) as there, connect() as here:
            remote = await asyncio.gather(*(episode(there, index) for index in range(12)))
            remote, local = remote, [await episode(here, index) for index in range(12)]
    assert remote == local
    assert threading.active_count() < 60


class Screen(gymnasium.Env):
    """Shows one colour, which an action brightens."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 1}
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None, channels=3):
        shape = (6, 8, channels) if channels else (6, 8)
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, numpy.uint8)
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.level = 10
        return self._pixels(), {}

    def step(self, action):
        self.level += 100
        return self._pixels(), 1.0, False, False, {}

    def _pixels(self):
        return numpy.full(self.observation_space.shape, self.level, numpy.uint8)

    def render(self):
        return numpy.full((4, 4, 3), self.level, numpy.uint8)


gymnasium.register("Screen-v0", Screen)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"observe": "pixels"}, (8, 6)),
        ({"observe": "pixels", "kwargs": {"channels": 1}}, (8, 6)),
        ({"observe": "pixels", "kwargs": {"channels": 0}}, (8, 6)),
        ({"observe": "picture"}, (4, 4)),
        ({"observe": "picture", "actions": "text", "action_tag": None}, (4, 4)),
    ],
)
def test_pixels_are_shown_as_images(opened, config, size):
    env = opened("gymnasium", id="Screen-v0", **config)
    (asked,) = env.reset("train", 0)
    acted = env.step("1") if "actions" in config else env.call("act", action=1)
    for message, level in ((asked, 10), (acted.observation[0], 110)):
        (image,) = content_images(message["content"])
        assert (image.media_type, image.width, image.height) == ("image/png", *size)
        assert image.picture.getpixel((0, 0)) == (level, level, level)
    assert "Act by" in content_text(asked["content"]) or "actions" in config
    assert acted.reward == 1.0


def test_observations_that_are_not_pixels_are_refused(opened):
    with pytest.raises(EnvError, match="instead of uint8"):
        opened("gymnasium", id="FrozenLake-v1", observe="pixels").reset("train", 0)


SPACES = {
    "box": gymnasium.spaces.Box(-1.0, 1.0, (2,)),
    "scalar": gymnasium.spaces.Box(-2.0, 2.0, (1,)),
    "bits": gymnasium.spaces.MultiBinary(3),
    "counts": gymnasium.spaces.MultiDiscrete([3, 4]),
    "bytes": gymnasium.spaces.Box(0, 255, (2,), numpy.uint8),
}


@pytest.mark.parametrize("name", SPACES)
def test_members_of_array_spaces_are_read_as_json_text_and_as_values(name):
    space = SPACES[name]
    space.seed(1)
    actions = read_actions(space, [])
    for _ in range(20):
        member = space.sample()
        for written in (member.tolist(), json.dumps(member.tolist())):
            read = actions.read(written)
            assert read.dtype == space.dtype and (read == member).all()


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("counts", [1.7, 2]),
        ("counts", "[1.7, 2]"),
        ("counts", [1, 9]),
        ("bits", [0, 1]),
        ("bytes", [300, 1]),
        ("bytes", [-1, 1]),
        ("box", "[0.1, "),
        ("box", ["0.1", "0.2"]),
        ("box", [True, False]),
        ("box", {"x": 1}),
        ("box", "NaN"),
    ],
)
def test_what_is_no_member_is_refused(name, written):
    with pytest.raises(ValueError, match="is no action"):
        read_actions(SPACES[name], []).read(written)


def test_a_drawing_that_the_environment_does_not_make_is_a_config_error():
    with pytest.raises(ConfigError):
        GymnasiumEnvironment.load_shared(
            GymnasiumEnvironment.Config(id="CartPole-v1", observe="render")
        )
