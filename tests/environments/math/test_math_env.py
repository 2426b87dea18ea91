"""The math environment: tasks, prompts, episodes with and without a calculator, and its errors."""

import json
import os
import subprocess
import sys
import types
from typing import Any

import pytest
from env_servers import running
from rows_for_tests import write_rows

from agentrl.cli.main import main
from agentrl.env import client as env_client
from agentrl.env import make
from agentrl.errors import ConfigError, DataError, EnvError, GraderError
from agentrl.types import Action, Task, ToolCall
from agentrl_math import MathEnvironment
from agentrl_math.env import DEFAULT_INSTRUCTION, MathConfig, equivalence_of
from agentrl_math.tasks import SAMPLE_FILE, is_test_problem
from agentrl_rewards import math_pool

ROWS = [
    {"question": "What is 1 + 1?", "answer": "It is\n#### 2", "extra": {"level": 1}},
    {"question": "What is the square root of 8?", "answer": "2\\sqrt{2}", "extra": '{"level": 2}'},
]


def source_of(**config: Any) -> MathEnvironment:
    """The instance that answers `splits` and `get` for a configuration."""
    return MathEnvironment(config)


def play(actions: list[str | Action], *, task: Task | None = None, **config: Any):
    """The first prompt and the results of an episode, through the in-process client."""

    env = make("math", **config).sync
    try:
        messages = env.reset(task=task) if task else env.reset("train", 0)
        return messages, [env.step(action) for action in actions]
    finally:
        env.close()


def calculator(*expressions: str) -> Action:
    return Action(
        tool_calls=tuple(
            ToolCall(f"call-{i}", "calculator", {"expression": expression})
            for i, expression in enumerate(expressions)
        )
    )


ADDITION = Task("sum", "17+25=?", reference="42")


# --- tasks ---------------------------------------------------------------------------------------


def test_arithmetic_tasks_follow_from_seed_split_and_index():
    one, same, other = source_of(seed=1), source_of(seed=1), source_of(seed=2)
    tasks = [one.get("train", index) for index in range(50)]
    assert [same.get("train", index) for index in reversed(range(50))] == tasks[::-1]
    assert [other.get("train", index).prompt for index in range(50)] != [t.prompt for t in tasks]
    assert one.get("test", 0).prompt != one.get("train", 0).prompt
    # pinned, because a changed generator silently changes every run's data
    assert [task.prompt for task in tasks[:3]] == ["25+3=?", "62-76=?", "7*2=?"]


def test_arithmetic_references_are_right():
    env = source_of(digits=6, operators="+-*")
    operators = set()
    for index in range(300):
        task = env.get("train", index)
        assert isinstance(task.prompt, str)
        problem = task.prompt.removesuffix("=?")
        operator = str(task.metadata["operator"])
        left, right = map(int, problem.split(operator))
        expected = {"+": left + right, "-": left - right, "*": left * right}[operator]
        assert task.reference == str(expected)
        operators.add(operator)
    assert operators == set("+-*")


@pytest.mark.parametrize("operators", ["+", "-", "*", "+-*"])
@pytest.mark.parametrize(("min_digits", "digits"), [(1, 1), (1, 2), (3, 3)])
def test_train_and_test_share_no_problem(operators, min_digits, digits):
    problems = {}
    for seed in (0, 7):
        env = source_of(operators=operators, min_digits=min_digits, digits=digits, seed=seed)
        for split in ("train", "test"):
            for index in range(300):
                task = env.get(split, index)
                operator = str(task.metadata["operator"])
                left, right = map(int, str(task.prompt).removesuffix("=?").split(operator))
                assert len(str(left)) >= min_digits and len(str(left)) <= digits
                ends = sorted((left, right)) if operator in "+*" else (left, right)
                problem = (operator, *ends)
                assert problems.setdefault(problem, split) == split
    assert set(problems.values()) == {"train", "test"}


def test_one_problem_in_ten_is_for_testing():
    share = sum(is_test_problem(a, "-", b) for a in range(100) for b in range(100)) / 10_000
    assert 0.09 < share < 0.11
    assert is_test_problem(3, "*", 5) == is_test_problem(5, "*", 3)


def test_arithmetic_split_sizes():
    assert source_of().splits() == {"train": None, "test": 200}
    assert source_of(num_tasks=10, num_test_tasks=5).splits() == {"train": 10, "test": 5}


def test_rows_of_a_jsonl_file(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    path.write_text(path.read_text().replace("\n", "\n\n"))  # empty lines do not count
    env = source_of(source=str(path), metadata_key="extra")
    assert env.splits() == {"train": 2}
    assert env.get("train", 0) == Task("train/0", ROWS[0]["question"], "2", {"level": 1})
    assert env.get("train", 1) == Task("train/1", ROWS[1]["question"], "2\\sqrt{2}", {"level": 2})
    shown = source_of(source=str(path), public_keys=["extra"]).get("train", 0)
    assert shown.public == {"extra": ROWS[0]["extra"]} and shown.metadata == {}
    with pytest.raises(ConfigError, match=r"public_keys names 'answer'.*leave it out"):
        source_of(source=str(path), public_keys=["answer"]).splits()


def test_rows_of_a_parquet_file_equal_those_of_jsonl(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"question": row["question"], "answer": row["answer"]} for row in ROWS]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    write_rows(tmp_path / "rows.jsonl", rows)
    sets = [source_of(source=f"{tmp_path}/rows.{suffix}") for suffix in ("parquet", "jsonl")]
    for index in range(2):
        one, other = (each.get("train", index) for each in sets)
        assert one == other


def test_a_folder_has_one_split_per_file(tmp_path):
    write_rows(tmp_path / "train.jsonl", ROWS * 3)
    write_rows(tmp_path / "test-00000-of-00002.jsonl", ROWS)
    write_rows(tmp_path / "test-00001-of-00002.jsonl", ROWS)
    (tmp_path / "README.md").write_text("not a task file")
    env = source_of(source=str(tmp_path))
    assert env.splits() == {"test": 4, "train": 6}
    assert [env.get("test", index).id for index in range(4)] == [f"test/{i}" for i in range(4)]


def test_a_split_must_have_one_format(tmp_path):
    write_rows(tmp_path / "train-00000-of-00002.jsonl", ROWS)
    (tmp_path / "train-00001-of-00002.parquet").write_text("")
    with pytest.raises(DataError, match=r"'train' as \.jsonl and as \.parquet"):
        source_of(source=str(tmp_path)).splits()


def test_a_table_names_the_file_of_each_split(tmp_path):
    source = {
        "easy": str(write_rows(tmp_path / "a.jsonl", ROWS[:1])),
        "hard": str(write_rows(tmp_path / "b.jsonl", ROWS[1:])),
    }
    assert source_of(source=source).splits() == {"easy": 1, "hard": 1}


def test_a_hugging_face_name_is_loaded_with_datasets(monkeypatch):
    asked = []

    def load_dataset(name, subset):
        asked.append((name, subset))
        return {"train": ROWS, "test": ROWS[:1]}

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    fake.config = types.SimpleNamespace(HF_HUB_OFFLINE=True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert source_of(source="openai/gsm8k").splits() == {"train": 2, "test": 1}
    assert source_of(source="owner/other", subset="hard").get("test", 0).reference == "2"
    assert asked == [("openai/gsm8k", "main"), ("owner/other", "hard")]


@pytest.mark.slow
def test_a_hugging_face_name_without_a_network_says_what_to_do():
    pytest.importorskip("datasets", reason="Hugging Face names need datasets")
    code = (
        "from agentrl_math import MathEnvironment\n"
        "from agentrl.errors import DataError\n"
        "try: MathEnvironment({'source': 'openai/gsm8k'}).splits()\n"
        "except DataError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert "openai/gsm8k is not on this machine" in done.stdout
    assert "run `agentrl data get gsm8k --from DIR`" in done.stdout


def test_prompts_may_be_chat_messages(tmp_path):
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1?"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": chat, "label": 2}])
    messages, (result,) = play(
        ["#### 2"],
        source=str(path),
        input_key="prompt",
        label_key="label",
        instruction="Now.",
        system_prompt="not added to a chat that has one",
    )
    assert messages == [chat[0], {"role": "user", "content": "1+1?\n\nNow."}]
    assert result.reward == 1.0


def test_the_sample_is_solved_by_its_own_answers():
    rows = [json.loads(line) for line in SAMPLE_FILE.read_text().splitlines()]
    env = source_of(source="sample")
    assert env.splits() == {"train": len(rows)} == {"train": 10}
    for index, row in enumerate(rows):
        task = env.get("train", index)
        messages, (result,) = play([row["answer"]], task=task, source="sample")
        assert row["question"] in messages[0]["content"]
        assert result.reward == 1.0
        wrong = row["answer"] + "1"
        assert play([wrong], task=task, source="sample")[1][0].reward == 0.0


def test_gsm8k_is_loaded_whole(data_dir):
    env = source_of(source=str(data_dir / "gsm8k"), equivalence="numeric")
    assert env.splits() == {"test": 1319, "train": 7473}
    assert env.get("test", 0).reference == "18"


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sauce": "arithmetic"}, "sauce"),
        ({"operators": "+/"}, r"operators.*one or more of \+ - \*"),
        ({"operators": ""}, "operators"),
        ({"digits": 0}, "digits"),
        ({"digits": 2, "min_digits": 3}, "min_digits = 3 is larger than digits = 2"),
        ({"equivalence": "loose"}, "equivalence"),
        ({"format_weight": 2.0}, "format_weight"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
    ],
)
def test_a_wrong_configuration_names_its_key(config, message):
    with pytest.raises(ConfigError, match=message):
        MathEnvironment(config)


@pytest.mark.parametrize("source", ["gsm8k", "arithmatic", "data/set/with/parts", ""])
def test_an_unknown_source_lists_what_there_is(source):
    with pytest.raises(ConfigError, match="neither 'arithmetic' nor 'sample'"):
        source_of(source=source).splits()


GOOD = {"question": "x", "answer": "1"}
OF_M = {"metadata_key": "m"}


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        ('{"question": "q", "answer": "1"}\n{oops', {}, r"line 2: not JSON"),
        ("[1]", {}, r"line 1: a list; every line has to be a JSON object"),
        ("", {}, "contains no tasks"),
        ("\n ", {}, "contains no tasks"),
        ('{"q": "x", "answer": "1"}', {}, "line 1: there is no column 'question'.*input_key.*q"),
        ('{"question": "x", "a": "1"}', {}, "no column 'answer'; set label_key to one of: quest"),
        ({"question": None}, {}, "column 'question' is empty"),
        ({"question": " "}, {}, "column 'question' has to be a string"),
        ({"question": [1]}, {}, "column 'question' has to be a string, or chat"),
        ({"answer": [1]}, {}, "column 'answer' has to be a string or a number"),
        ({"answer": True}, {}, "column 'answer' has to be a string or a number"),
        ({"answer": " "}, {}, "column 'answer' has to contain a final answer"),
        ({"m": "{"}, OF_M, "column 'm' is a string but not valid JSON"),
        ({"m": 5}, OF_M, "column 'm' has to be an object"),
        ({}, OF_M, "no column 'm'; set metadata_key"),
        ({}, {"public_keys": ["m"]}, "no column 'm'; public_keys may name: question, answer"),
    ],
)
def test_a_broken_file_is_named_with_line_and_remedy(tmp_path, content, config, message):
    """The content, or what changes a good row."""
    path = tmp_path / "rows.jsonl"
    path.write_text(content if isinstance(content, str) else json.dumps(GOOD | content))
    with pytest.raises(DataError, match=message) as caught:
        source_of(source=str(path), **config).splits()
    assert str(path) in str(caught.value)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl does not exist"):
        source_of(source=str(tmp_path / "rows.jsonl")).splits()
    with pytest.raises(DataError, match=r"no \.jsonl or \.parquet file"):
        source_of(source=str(tmp_path)).splits()
    (tmp_path / "bad.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        source_of(source=str(tmp_path / "bad.parquet")).splits()
    with pytest.raises(DataError, match=r"neither .jsonl nor .parquet"):
        (tmp_path / "rows.csv").write_text("a")
        source_of(source={"train": str(tmp_path / "rows.csv")}).splits()


def test_symbolic_grading_without_math_verify_says_how_to_get_it(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl-gym\[math\]'"):
        source_of(source=str(path)).splits()
    assert source_of(source=str(path), equivalence="numeric").splits() == {"train": 2}


@pytest.mark.parametrize("reference", [None, True, ["1"]])
def test_a_task_without_a_usable_reference_is_refused(reference):
    with pytest.raises(EnvError, match="the reference has to be"):
        play([], task=Task("inline", "1+1=?", reference=reference))


@pytest.mark.parametrize("remote", [False, True])
async def test_splits_are_those_of_the_configured_source(tmp_path, remote, serve_math):
    write_rows(tmp_path / "train.jsonl", ROWS)
    write_rows(tmp_path / "test.jsonl", ROWS[:1])
    config = {"source": str(tmp_path)}
    async with env_client.connect(serve_math if remote else None) as client:
        assert (await client.info("math")).splits == {"train": None, "test": 200}
        assert (await client.info("math", config)).splits == {"test": 1, "train": 2}
        session = await client.session("math", split="test", index=0, config=config)
        assert session.messages[0]["content"].splitlines()[0] == ROWS[0]["question"]


@pytest.fixture
def serve_math():
    with running(["math"]) as (url, _):
        yield url


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"digitz": 3}, "there is no key 'digitz'; did you mean digits?"),
        ({"digits": 0}, "digits: Input should be greater than or equal to 1"),
        ({"source": "rows.jsonl", "input_key": "quest"}, "line 1: there is no column 'quest'"),
        ({"source": "empty.jsonl"}, "contains no tasks"),
        ({"source": "missing.jsonl"}, "missing.jsonl does not exist"),
    ],
)
def test_wrong_configuration_and_data_end_a_command_with_one_line(
    config, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    write_rows(tmp_path / "empty.jsonl", [])
    options = [part for key, value in config.items() for part in ("--config", f"{key}={value}")]
    assert main(["env", "info", "math", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("agentrl: error: ") and says in error and len(error.splitlines()) == 1


# --- single-turn episodes ------------------------------------------------------------------------


def test_a_right_answer_in_one_turn():
    messages, (result,) = play(["17+25 is\n#### 42"], task=ADDITION)
    assert messages == [{"role": "user", "content": f"17+25=?\n\n{DEFAULT_INSTRUCTION}"}]
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
    assert result.reward_components == {"correct": 1.0, "format": 1.0}
    assert result.info == {"extracted": "42", "method": "exact"}
    assert result.observation == []


@pytest.mark.parametrize(
    ("text", "config", "reward"),
    [
        ("#### 41", {}, 0.0),
        ("42", {}, 0.0),
        ("", {}, 0.0),
        ("#### 17+25", {}, 0.0),  # the question is no answer
        ("#### 17+25", {"equivalence": "numeric"}, 0.0),
        ("#### 17+25", {"equivalence": "symbolic"}, 1.0),
        ("42", {"require_marker": False}, 1.0),
        ("41", {"require_marker": False}, 0.0),
        ("#### 42", {"format_weight": 0.25}, 1.25),
        ("#### 41", {"format_weight": 0.25}, 0.25),
        ("41", {"format_weight": 0.25}, 0.0),
        ("42", {"format_weight": 0.25, "require_marker": False}, 1.0),
    ],
)
def test_rewards(text, config, reward):
    _, (result,) = play([text], task=ADDITION, **config)
    assert result.reward == reward
    assert result.terminated


def test_the_prompt_may_be_the_bare_question():
    messages, _ = play([], task=ADDITION, instruction="")
    assert messages == [{"role": "user", "content": "17+25=?"}]


def test_a_system_prompt_comes_first():
    messages, _ = play([], task=ADDITION, instruction="", system_prompt="You can count.")
    assert messages[0] == {"role": "system", "content": "You can count."}
    assert messages[1]["content"] == "17+25=?"


def test_without_tools_a_tool_call_is_no_answer():
    _, (result,) = play([calculator("17+25")], task=ADDITION)
    assert (result.reward, result.terminated) == (0.0, True)


def test_an_episode_of_the_generated_set_is_the_same_twice():
    first, second = (play(["#### 1"], seed=3, digits=4) for _ in range(2))
    assert first == second


def test_a_grader_that_fails_is_an_error_not_a_reward(monkeypatch):
    async def fail(*args: object) -> bool:
        raise GraderError("the comparison crashed")

    monkeypatch.setattr(math_pool.MathPool, "check_async", fail)
    with pytest.raises(GraderError, match="crashed"):
        play([r"\boxed{\sqrt{9}}"], task=Task("t", "?", reference="3"), equivalence="symbolic")


def test_symbolic_answers_in_an_episode():
    _, (result,) = play(
        [r"\boxed{\sqrt{8}}"], task=Task("t", "?", reference=r"2\sqrt{2}"), equivalence="symbolic"
    )
    assert (result.reward, result.info["method"]) == (1.0, "symbolic")


def test_the_default_equivalence_follows_the_source():
    assert equivalence_of(MathConfig()) == "literal"
    assert equivalence_of(MathConfig(source="sample")) == "numeric"
    assert equivalence_of(MathConfig(source="openai/gsm8k")) == "numeric"
    assert equivalence_of(MathConfig(source="x.jsonl")) == "symbolic"
    assert equivalence_of(MathConfig(source="x.jsonl", equivalence="literal")) == "literal"


# --- episodes with the calculator ----------------------------------------------------------------


@pytest.mark.parametrize(("config", "names"), [({}, []), ({"tools": True}, ["calculator"])])
async def test_the_calculator_is_offered_only_when_asked_for(config, names):
    async with env_client.connect() as client:
        session = await client.session("math", task=ADDITION, config=config)
        info = await client.info("math", config)
    for tools in (session.tools, info.tools):
        assert [tool["function"]["name"] for tool in tools] == names


def test_a_calculation_and_an_answer():
    _, (first, last) = play([calculator("17+25"), "#### 42"], task=ADDITION, tools=True)
    assert first.observation == [
        {"role": "tool", "tool_call_id": "call-0", "name": "calculator", "content": "42"}
    ]
    assert (first.reward, first.terminated) == (0.0, False)
    assert (last.reward, last.terminated) == (1.0, True)
    assert last.metrics["tool_calls"] == 1.0


async def test_an_episode_cut_at_a_calculation_has_no_right_answer():
    env = make("math", tools=True, format_weight=0.5)
    await env.reset(task=ADDITION)
    cut = await env.step(calculator("17+25"), last=True)
    await env.reset(task=ADDITION)
    answered = await env.step("#### 42", last=True)
    await env.close()
    assert (cut.terminated, cut.truncated, cut.reward) == (False, True, 0.0)
    assert cut.reward_components == {"correct": 0.0, "format": 0.0}
    assert (answered.terminated, answered.truncated, answered.reward) == (True, False, 1.5)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (calculator("1/0"), "division by zero"),
        (calculator("9^9^9^9"), "too large"),
        (calculator("__import__('os')"), "not arithmetic"),
        (Action(tool_calls=(ToolCall("c", "calculator", {}),)), "expression"),
        (Action(tool_calls=(ToolCall("c", "search", {"query": "42"}),)), "no tool 'search'"),
        (Action(parse_error="unbalanced braces"), "unbalanced braces"),
    ],
)
def test_mistakes_with_the_calculator_are_explained(action, message):
    _, (first, last) = play([action, "#### 42"], task=ADDITION, tools=True)
    assert message in first.observation[0]["content"]
    assert not first.terminated
    assert last.reward == 1.0


def test_calls_beyond_the_limit_are_answered_by_a_request():
    calls = [calculator("1+1"), calculator("2+2", "3+3"), calculator("4+4")]
    actions = [*calls, Action(parse_error="x"), "#### 42"]
    _, results = play(actions, task=ADDITION, tools=True, max_tool_calls=2)
    contents = [[message["content"] for message in result.observation] for result in results]
    request = "Not run: all 2 tool calls are used up. Reply with the final answer."
    assert contents == [["2"], ["4", request], [request], [request], []]
    assert results[-1].reward == 1.0
    assert results[-1].metrics["tool_calls"] == 2.0


def test_references_never_reach_an_observation():
    task = Task("canary", "Guess.", reference="731846552")
    for tools in (False, True):
        actions = ([calculator("1/0"), Action(parse_error="?")] if tools else []) + ["#### 1"]
        messages, results = play(actions, task=task, tools=tools)
        shown = json.dumps([messages, [result.observation for result in results]])
        assert "731846552" not in shown
