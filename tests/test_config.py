import tomllib

import pytest

from agentrl.config import RunConfig, apply_overrides, load_config, valid_keys
from agentrl.errors import ConfigError

MINIMAL = '[model]\npath = "some/model"\n'


def _write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_defaults_and_round_trip_through_toml(tmp_path):
    config = load_config(
        _write(
            tmp_path,
            MINIMAL + '[env.config]\nsource = "a \\"quoted\\" é"\n[objective]\npreset = "dapo"\n',
        ),
        [],
    )
    again = load_config(_write(tmp_path, config.to_toml()), [])
    assert again == config
    assert again.objective.surrogate.high == pytest.approx(0.28)


@pytest.mark.parametrize("agent", ['run = "play.py:solve"', 'command = ["solve", "{prompt}"]'])
def test_a_run_with_an_agent_loads_what_it_wrote(agent, tmp_path):
    config = load_config(_write(tmp_path, f'[model]\npath = "m"\n[agent]\n{agent}\n'), [])
    assert load_config(_write(tmp_path, config.to_toml()), []) == config


def test_overrides_are_typed_like_toml_and_win_over_the_file(tmp_path):
    path = _write(tmp_path, MINIMAL + "[run]\nseed = 5\n")
    config = load_config(
        path,
        [
            *(
                "--run.seed",
                "7",
                "--train.learning_rate=3e-4",
                "--env.url",
                "http://a:1,http://b:2",
            ),
            *("--env.config.digits", "3", "--eval.pass-k", "[1,4]", "--eval.samples_per_task", "4"),
            *("--rollout.keep", "zero_variance", "--run.name", "x y"),
            *("--run.profile", "3", "--rollout.sampler_stages", "100,300"),
            *("--rollout.sampler", "staged"),
        ],
    )
    assert config.run.seed == 7
    assert config.train.learning_rate == 3e-4
    assert config.env.url == ["http://a:1", "http://b:2"]
    assert config.env.config == {"digits": 3}
    assert config.eval.pass_k == [1, 4]
    assert (config.run.profile, config.rollout.sampler_stages) == ([3], [100, 300])
    assert config.rollout.keep == ["zero_variance"]
    assert config.run.name == "x y"


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("[rollout]\ngroup_sise = 4\n", [], ["run.toml: rollout.group_sise", "rollout.group_size"]),
        ("[rolout]\ngroup_size = 4\n", [], ["rolout", "did you mean [rollout]?"]),
        ("", ["--train.learningrate", "1"], ["--train.learningrate", "train.learning_rate"]),
        ("", ["--train.lr", "1"], ["--train.lr", "did you mean train.learning_rate?"]),
        ("", ["--steps", "3"], ["--steps", "did you mean run.num_steps?"]),
        ("[train]\nseed = 1\n", [], ["run.toml: train.seed", "did you mean run.seed?"]),
        ("[rollout]\nnum_generations = 8\n", [],
         ["TRL's num_generations is rollout.group_size here"]),
        ("", ["--run.seed", "abc"], ["--run.seed", "integer"]),
        ("[rollout]\ntop_p = 0.9\n", [], ["top_p", "temperature", "truncated_sampling"]),
        ("[rollout]\nmin_p = 0.1\n", [], ["min_p", "truncated_sampling = 'correct'"]),
        ("[inference]\nbackend = 'openai'\n", [], ["inference.urls"]),
        ("[rollout]\nmax_staleness = 1\n", [], ["max_staleness", "vllm"]),
        ("[rollout]\nmin_group_size = 2\n", [], ["rollout.stragglers ="]),
        ("[rollout]\nstragglers = [9, 5]\n", [], ["rollout.group_size = 8"]),
        ("[inference]\ntransfer = 'nccl'\n", [], ["inference.transfer", "vllm"]),
        ("[inference]\nbackend = 'sglang'\n[rollout]\non_update = 'wait'\n", [],
         ["rollout.on_update", "set 'keep' or 'abort'"]),
        ("[inference]\nbackend = 'vllm'\ntransfer = 'nccl'\n", ["--model.lora.rank", "8"],
         ["inference.transfer = 'file'", "adapter"]),
        ("[objective]\npreset = 'grop'\n", [], ["run.toml: objective", "grop", "grpo"]),
        ("", ["--objective.preset", "grop"], ["run.toml with --objective.preset", "grop"]),
        ("", ["--run.profile", "true"], ["--run.profile", "list"]),
        ("", ["--run.profile", "9", "--run.num_steps", "8"], ["beyond num_steps = 8"]),
        ("[rollout]\nsampler_stages = [9]\n", [], ["set rollout.sampler = 'staged'"]),
    ],
)  # fmt: skip
def test_errors_name_the_place_and_the_remedy(tmp_path, text, overrides, expected):
    with pytest.raises(ConfigError) as error:
        load_config(_write(tmp_path, MINIMAL + text), overrides)
    for part in expected:
        assert part in str(error.value)


def test_broken_and_missing_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.toml", [])
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(_write(tmp_path, "[run"), [])
    with pytest.raises(ConfigError, match=r"model\.path: missing"):
        load_config(_write(tmp_path, "[run]\nseed = 1\n"), [])


def test_a_bare_word_is_no_override():
    with pytest.raises(ConfigError, match="unexpected argument 'seed'"):
        apply_overrides({}, ["seed", "2"])
    with pytest.raises(ConfigError, match="run is not a section"):
        apply_overrides({"run": 3}, ["--run.seed", "2"])


def test_what_is_named_beside_the_run_file(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "own.py").touch()
    text = '[model]\npath = "model"\n[reward]\nfunctions = ["math", "own.py:short"]\n'
    config = load_config(_write(tmp_path, text), [])
    assert config.model.path == str(tmp_path / "model")
    assert config.reward.functions == ["math", f"{tmp_path / 'own.py'}:short"]
    env = text + '[env]\nid = "own.py:Own"\n'
    assert load_config(_write(tmp_path, env), []).env.id == f"{tmp_path / 'own.py'}:Own"
    served = load_config(_write(tmp_path, env), ["--env.url", "http://127.0.0.1:1"])
    assert served.env.id == "own.py:Own"


def test_every_key_is_described():
    undescribed = [
        key
        for key, (_, meaning) in valid_keys().items()
        if not meaning and not key.startswith("objective.") and key != "train.weight_decay"
    ]
    assert undescribed == []


def test_tokens_are_not_written_out():
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "env": {"token": "s3cret"}, "inference": {"token": "s3cret"}}
    )
    assert "s3cret" not in config.to_toml() + repr(config)
    assert tomllib.loads(config.to_toml())["env"]["id"] == "math"


@pytest.mark.parametrize(
    ("objective", "anchor", "level"),
    [
        ("", "rollout", "none"),
        ("[objective]\npreset = 'dapo'\n", "rollout", "none"),
        ("[objective]\npreset = 'grpo'\nratio = {anchor = 'old'}\n", "old", "none"),
        ("[objective]\npreset = 'grpo'\noff_policy = {level = 'token'}\n", "old", "token"),
        ("[objective]\nsurrogate = {kind = 'logprob'}\n", "old", "token"),
    ],
)
def test_stale_samples_are_corrected_unless_the_run_file_chooses(
    tmp_path, objective, anchor, level
):
    text = MINIMAL + "[inference]\nbackend = 'vllm'\n[rollout]\nmax_staleness = 2\n" + objective
    config = load_config(_write(tmp_path, text), [])
    assert config.objective.ratio.anchor == anchor
    assert config.objective.off_policy.level == level
    synchronous = load_config(_write(tmp_path, text), ["--rollout.max_staleness", "0"])
    assert synchronous.objective.ratio.anchor == "old"


def test_a_preset_that_is_a_whole_recipe_gives_way_to_the_run_file():
    plain = load_config({"model": {"path": "m"}}, ["--objective.preset", "swe_grpo"])
    assert (plain.train.betas, plain.train.weight_decay) == ((0.9, 0.98), 0.1)
    own = {"model": {"path": "m"}, "train": {"weight_decay": 0.0}}
    config = load_config(own, ["--objective.preset=swe_grpo", "--train.learning_rate", "1e-5"])
    assert (config.train.betas, config.train.weight_decay) == ((0.9, 0.98), 0.0)
    assert config.train.learning_rate == 1e-5
    assert load_config(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize(
    ("override", "decides"),
    [
        *((key, True) for key in ("run.seed=7", "rollout.group_size=2", "rollout.min_p=0.1")),
        *(
            (key, True)
            for key in ("objective.surrogate.low=0.1", "train.num_epochs=2", "env.split=x")
        ),
        *((key, True) for key in ("train.betas=[0.9,0.95]", "model.lora.rank=2", "env.config.a=1")),
        *((key, False) for key in ("run.num_steps=7", "run.name=x", "rollout.max_concurrent=2")),
        *((key, False) for key in ("rollout.turn_timeout_s=2", "train.token_budget=100")),
        *((key, False) for key in ("inference.max_batch_tokens=99", "env.url=http://a:1")),
        *((key, False) for key in ("eval.num_tasks=3", "track.signals=0.5")),
    ],
)
def test_what_a_resumed_run_must_share_is_marked_on_the_key(override, decides):
    words = ["--model.path=m", "--rollout.truncated_sampling=correct"]
    plain, other = load_config({}, words), load_config({}, [*words, f"--{override}"])
    assert (plain.decisive() != other.decisive()) == decides


def test_each_environment_of_a_mixture_decides_by_its_name():
    tables = [{"id": "math", "name": "a"}, {"id": "math", "name": "b", "weight": 2.0}]
    config = load_config({"model": {"path": "m"}, "env": tables})
    env = config.decisive()["env"]
    assert isinstance(env, dict) and env.keys() == {"a", "b"}
    assert env["b"]["weight"] == 2.0 and "url" not in env["b"]
