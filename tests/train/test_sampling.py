"""Evaluations take their sampling numbers from the right source."""

import json

import pytest

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.inference.base import SamplingParams
from agentrl.model.adapter_files import CONFIG_FILE
from agentrl.train.sampling import evaluation_sampling, training_sampling

AUTHORS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 99, "min_p": 0.0}


def config_of(**evaluation) -> RunConfig:
    sections = {"model": {"path": "m"}, "rollout": {"max_turn_tokens": 7}, "eval": evaluation}
    return RunConfig.model_validate(sections)


def test_the_run_file_goes_before_the_model_and_the_model_before_the_rest(tmp_path):
    assert evaluation_sampling(config_of(), str(tmp_path)) == (SamplingParams(7), None)
    (tmp_path / "generation_config.json").write_text(json.dumps(AUTHORS))
    sampling, said = evaluation_sampling(config_of(top_p=0.5, seed=4), str(tmp_path))
    assert sampling == SamplingParams(99, 0.6, top_p=0.5, top_k=20, seed=4)
    assert said is not None and "temperature 0.6, top_k 20, max_tokens 99, as" in said
    every = {"temperature": 0, "top_p": 1, "top_k": -1, "max_tokens": 3}
    assert evaluation_sampling(config_of(**every), str(tmp_path)) == (SamplingParams(3, 0), None)
    assert training_sampling(config_of()) == SamplingParams(7), "training goes by the run file"


def test_an_adapter_samples_as_its_base_does(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "generation_config.json").write_text(json.dumps({"top_k": 0, "repetition_penalty": 2}))
    (adapter / CONFIG_FILE).write_text(json.dumps({"base_model_name_or_path": str(base)}))
    sampling, _ = evaluation_sampling(config_of(), str(adapter))
    assert sampling == SamplingParams(7, repetition_penalty=2.0)


@pytest.mark.parametrize("text", ["[1]", "{", '{"top_p": "much"}'])
def test_a_file_that_is_no_configuration_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json of .* cannot be used"):
        evaluation_sampling(config_of(), str(tmp_path))
