import json
from pathlib import Path

import pytest
from rows_for_tests import write_rows
from tokenizers_for_tests import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.cli.main import main
from agentrl.errors import ConfigError, DataError
from agentrl.model.text.renderer import Renderer
from agentrl.rollout import read_trajectories
from agentrl.train.sft import Dialogue, dialogue_to_sample, read_demonstrations, sft

MODEL = str(Path(__file__).parents[2] / "examples" / "quickstart" / "model")
LOOK = {"name": "look", "arguments": {"word": "w"}}
CALL = {"id": "c", "type": "function", "function": LOOK}
DIALOGUE = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "found", "tool_call_id": "c"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "thanks"},
]


def test_only_assistant_turns_are_trained_and_their_ids_are_a_rollouts():
    renderer = Renderer(make_tokenizer())
    sample = dialogue_to_sample(renderer, Dialogue(DIALOGUE, []), "d")
    tokenizer = renderer.tokenizer
    trained = tokenizer.decode(
        sample.token_ids[sample.loss_mask == 1].tolist(), skip_special_tokens=False
    )
    assert trained == (
        '<tool_call>\n{"name": "look", "arguments": {"word": "w"}}\n</tool_call><|im_end|>'
        "done<|im_end|>"
    )
    first_prompt = renderer.prompt(DIALOGUE[:1], [])
    assert sample.token_ids[: len(first_prompt)].tolist() == first_prompt
    assert sample.turn_ids.tolist() == sorted(sample.turn_ids.tolist())
    assert "thanks" not in tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=False)


def test_a_demonstration_of_what_was_played_has_the_rollouts_ids(tmp_path):
    """Play, write the dialogue down, tokenise it as a demonstration: the same row."""
    run = str(Path(MODEL).parent / "run.toml")
    assert main(["eval", run, "--eval.num_tasks", "6", "--out", str(tmp_path)]) == 0
    renderer = Renderer(AutoTokenizer.from_pretrained(MODEL))
    compared = 0
    for _, trajectory in read_trajectories(tmp_path):
        if any(turn.parse_status == "malformed" for turn in trajectory.turns):
            continue
        calculator = {"name": "calculator", "parameters": {"properties": {"expression": {}}}}
        tools = [{"type": "function", "function": calculator}]
        sample = dialogue_to_sample(renderer, Dialogue(trajectory.messages, tools), "d")
        (row,) = trajectory.branches
        assert sample.token_ids.tolist() == row.token_ids
        assert sample.loss_mask.tolist() == row.loss_mask
        compared += 1
    assert compared >= 4


def test_tuning_lowers_the_loss_and_the_result_loads(tmp_path):
    demonstrations = tmp_path / "demos.jsonl"
    with demonstrations.open("w") as file:
        for n in range(10, 42):
            asked = {"role": "user", "content": f"{n}+1=?"}
            said = {"role": "assistant", "content": f"#### {n + 1}"}
            file.write(json.dumps({"messages": [asked, said]}) + "\n")
    out = tmp_path / "tuned"
    settings = {"num_epochs": 6, "batch_size": 8, "learning_rate": 1e-3, "warmup_steps": 2}
    result = sft(demonstrations, model_path=MODEL, out=out, save_dtype="bfloat16", **settings)
    assert result.num_updates == 24
    assert result.last_loss < 0.8 * result.first_loss
    model = AutoModelForCausalLM.from_pretrained(out)
    assert str(model.dtype) == "torch.bfloat16"
    again = sft(demonstrations, model_path=MODEL, out=tmp_path / "again", **settings)
    assert (again.first_loss, again.last_loss) == (result.first_loss, result.last_loss)
    with pytest.raises(ConfigError, match="not empty"):
        sft(demonstrations, model_path=MODEL, out=out)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("{nope", r"demos.jsonl:1: not valid JSON"),
        ('{"prompt": "x"}', r'demos.jsonl:1: no "messages"'),
        ('{"messages": [{"content": "x"}]}', r"messages\[0\]: a role is one of"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": {}}', '"tools" is a list'),
        ('{"messages": [{"role": "user", "content": "x"}]}', "at least one assistant"),
    ],
)
def test_bad_demonstrations_name_file_and_line(tmp_path, text, message):
    path = tmp_path / "demos.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_demonstrations(path)
    with pytest.raises(DataError, match="no such file"):
        read_demonstrations(tmp_path / "none.jsonl")


USER = {"role": "user", "content": "go"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "word": {"type": "string"},
        "city": {"type": ["string", "null"]},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "day": {"type": "string", "nullable": True},
        "hour": {"enum": ["noon", None]},
        "size": {"enum": ["big"]},
    },
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]


def assistant(**message):
    return {"role": "assistant", **message}


def calls(arguments):
    return [{"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}]


def trained_texts(tmp_path, messages, tools=TOOLS):
    path = write_rows(tmp_path / "demos.jsonl", [{"messages": messages, "tools": tools}])
    renderer = Renderer(make_tokenizer())
    (dialogue,) = read_demonstrations(path)
    sample = dialogue_to_sample(renderer, dialogue, "d")
    ids = sample.token_ids[sample.loss_mask == 1].tolist()
    return renderer.tokenizer.decode(ids, skip_special_tokens=False).split("<|im_end|>")[:-1]


LOOKED = '<tool_call>\n{"name": "look", "arguments": {"word": "w"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (assistant(content=None, tool_calls=calls('{"word": "w"}')), LOOKED),
        (assistant(content=None, tool_calls=calls({"word": "w"})), LOOKED),
        (assistant(tool_calls=calls({"word": "w", "size": None, "town": None})), LOOKED),
        (assistant(function_call={"name": "look", "arguments": '{"word": "w"}'}), LOOKED),
        (assistant(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "ab"),
        (assistant(content=None, refusal="I cannot"), "I cannot"),
        (assistant(content="yes", tool_calls=None, name=None), "yes"),
    ],
)
def test_rows_in_the_form_of_openai_are_trained_as_they_mean(tmp_path, message, expected):
    assert trained_texts(tmp_path, [USER, message]) == [expected]
    assert trained_texts(tmp_path, [USER, message], json.dumps(TOOLS)) == [expected], "as text"


@pytest.mark.parametrize("name", ["city", "unit", "day", "hour"])
def test_an_argument_that_may_be_null_stays(tmp_path, name):
    (text,) = trained_texts(tmp_path, [USER, assistant(tool_calls=calls({name: None}))])
    assert json.loads(text.splitlines()[1])["arguments"] == {name: None}


def test_an_answer_of_weight_0_is_read_and_not_trained(tmp_path):
    messages = [USER, assistant(content="bad", weight=0), USER, assistant(content="good", weight=1)]
    assert trained_texts(tmp_path, messages) == ["good"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": None, "content": "x"}, "a role is one of"),
        ({"role": "human", "content": "x"}, "a role is one of"),
        (assistant(content=None), "says nothing"),
        (assistant(content="x", weight=0.5), "weight is 0 or 1"),
        (assistant(content={"text": "x"}), "a list of parts, not dict"),
        (assistant(tool_calls=calls("[1]")), "no JSON object"),
        (assistant(tool_calls=[{"name": "look"}]), "a function with a name"),
        ({"role": "tool", "content": "x"}, "no message before it calls one"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(tmp_path, message, expected):
    with pytest.raises(DataError, match=f"demos.jsonl:1: .*{expected}"):
        trained_texts(tmp_path, [USER, message, assistant(content="y")])


def test_keys_without_a_meaning_are_reported_once(tmp_path, caplog):
    messages = [USER | {"mood": "good"}, assistant(content="y", score=1), USER | {"mood": None}]
    trained_texts(tmp_path, messages)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "these keys of messages are not read: mood, score"
    ]


def test_dialogues_that_are_all_too_long_are_an_error(tmp_path):
    path = write_rows(tmp_path / "demos.jsonl", [{"messages": DIALOGUE}])
    with pytest.raises(DataError, match="raise it"):
        sft(path, model_path=MODEL, out=tmp_path / "out", max_tokens=3)


def test_the_command_says_what_it_did_and_what_it_left_out(tmp_path, capsys):
    long = [*DIALOGUE, {"role": "assistant", "content": "so " * 300}]
    path = write_rows(tmp_path / "demos.jsonl", [{"messages": each} for each in (DIALOGUE, long)])
    out = tmp_path / "tuned"
    words = ["sft", str(path), "--model", MODEL, "--out", str(out), "--max-tokens", "200"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "1 updates, loss " in printed and f"the model is in {out}" in printed
    assert "1 dialogues were longer than --max-tokens 200 and left out" in printed


def test_an_adapter_is_added_into_the_weights_and_the_template_comes_along(tmp_path, capfd):
    path, template = tmp_path / "demos.jsonl", tmp_path / "own.jinja"
    path.write_text(json.dumps({"messages": DIALOGUE[:2] + DIALOGUE[3:4]}) + "\n")
    own = AutoTokenizer.from_pretrained(MODEL).chat_template + "{# own #}"
    template.write_text(own)
    settings = {"learning_rate": 1e-2, "warmup_steps": 0, "chat_template": str(template)}
    sft(path, model_path=MODEL, out=tmp_path / "tuned", lora_rank=4, num_epochs=3, **settings)
    assert "Writing model shards" not in capfd.readouterr().err
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned").chat_template == own
    tuned = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").named_parameters())
    before = dict(AutoModelForCausalLM.from_pretrained(MODEL).named_parameters())
    changed = {name for name in before if not before[name].equal(tuned[name])}
    assert tuned.keys() == before.keys() and changed
    assert all(name.endswith("_proj.weight") for name in changed), changed
