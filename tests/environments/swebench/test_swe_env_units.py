"""The environment's parts that need no engine."""

import pytest

from agentrl.errors import ConfigError, DataError
from agentrl_swebench.env import SWEBenchEnvironment


def test_wrong_configuration_is_named():
    with pytest.raises(ConfigError, match="did you mean policy"):
        SWEBenchEnvironment({"polcy": "strict"})
    with pytest.raises(ConfigError, match="policy"):
        SWEBenchEnvironment({"policy": "lenient"})
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        SWEBenchEnvironment.load_shared(SWEBenchEnvironment.Config(source="nowhere.jsonl"))
