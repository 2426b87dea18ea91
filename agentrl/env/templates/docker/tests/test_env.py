import pytest

from agentrl.env import make


@pytest.mark.agentrl_env("my_env.env:MyEnv")
def test_conformance(env_check):
    env_check()


def test_an_episode():
    env = make("my_env.env:MyEnv").sync
    env.reset("test", 41)
    env.call("bash", command="echo 42 > /tmp/answer")
    assert env.call("submit").reward == 1.0
    env.close()
