import asyncio
import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import CHATML, DROPS_THINKING, make_tokenizer

from agentrl.atif import to_atif
from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.evaluate.episodes import EpisodeLog, read_evaluation
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.recorder import Recorder
from agentrl.rollout.log import TrajectoryLog
from agentrl.rollout.policy import TokenPolicy
from agentrl.types import StopReason, TokenRow, Trajectory, TrajectoryError, Turn

VENV = Path(os.environ.get("AGENTRL_HARBOR_VENV", "~/.cache/agentrl/harbor/venv")).expanduser()
HARBOR_READS = """
import json, sys
from pathlib import Path
from harbor.models.trajectories import Trajectory
from harbor.utils.traces_utils import extract_conversations_from_trajectory
from harbor.utils.trajectory_utils import compute_model_usage
from harbor.utils.trajectory_validator import TrajectoryValidator

told = dict.fromkeys(("agent_name", "model_name", "model_provider", "start_time", "run_id"), "x")
found = {}
for path in sorted(Path(sys.argv[1]).iterdir()):
    assert TrajectoryValidator().validate(path)
    read = Trajectory.model_validate_json(path.read_text())
    whole = [read, *(read.subagent_trajectories or [])]
    calls = [step.metrics for each in whole for step in each.steps if step.metrics]
    usage = compute_model_usage(read).get("a/model")
    spoken = extract_conversations_from_trajectory(path, told)
    found[read.trajectory_id] = {
        "completions": sorted(call.completion_token_ids or [] for call in calls),
        "logprobs": sorted(call.logprobs or [] for call in calls),
        "usage": [usage.n_input_tokens, usage.n_output_tokens] if usage else None,
        "conversations": [[m["role"] for m in each["conversations"]] for each in spoken],
    }
print(json.dumps(found))
"""


def call(name: str, arguments, **ids) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}} | ids


def two_turns(trajectory_id: str = "test/0-0") -> Trajectory:
    """One row: a prompt of 3 tokens, a call of 2, an observation of 2, an answer of 1."""
    row = TokenRow()
    row.append_context([1, 2, 3], 0)
    row.append_sampled([4, 5], [-0.5, -0.25], [7, 7], 0)
    row.append_context([6, 7], 1)
    row.append_sampled([8], [-1.0], [8], 1)
    row.messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "17*3"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "I ask.",
            "tool_calls": [call("times", {"a": 17}, id="c1")],
        },
        {"role": "tool", "content": "51", "tool_call_id": "c1"},
        {"role": "assistant", "content": "51"},
    ]
    turns = [
        Turn(0, 3, 2, "stop", "tool_calls", message=2),
        Turn(0, 7, 1, "stop", "text", message=4, parent=0, reward=1.0),
    ]
    return Trajectory(
        trajectory_id,
        group_id="g",
        env_id="math",
        task_id="test/0",
        seed=3,
        branches=[row],
        turns=turns,
        reward=1.0,
        info={"reference": "51"},
        stop_reason=StopReason.TERMINATED,
    )


def several_dialogues() -> Trajectory:
    """The first turn is answered twice: in its own row, and in one with a rewritten history; and
    another dialogue begins with an example that nobody sampled."""
    played = two_turns("test/1-0")
    forked = TokenRow(branch_of=0, fork_at=2)
    forked.append_context([1, 2, 9], 2)
    forked.append_sampled([10], [-2.0], [8], 2)
    forked.messages = [*played.messages[:3], {"role": "user", "content": "Go on."}]
    forked.messages.append({"role": "assistant", "content": "50"})
    other = TokenRow()
    other.append_context([20], 3)
    other.append_sampled([21, 22], [-3.0, -4.0], [8, 8], 3)
    example = {"role": "assistant", "content": "", "tool_calls": [call("look", '{"at": 1}')]}
    other.messages = [example, {"role": "tool", "content": "seen"}]
    other.messages.append({"role": "assistant", "content": "Well."})
    played.branches += [forked, other]
    played.turns.append(Turn(1, 3, 1, "stop", "text", message=4, parent=0))
    played.turns.append(Turn(2, 1, 2, "length", "text", message=2))
    return played


def failed() -> Trajectory:
    error = TrajectoryError("reset", "env_error", "it broke")
    return Trajectory("../../up", "g2", "math", "up", 0, error=error, stop_reason=StopReason.ERROR)


def test_a_call_carries_the_ids_that_it_read_and_sampled():
    document = to_atif(two_turns(), "a/model")
    assert document["agent"]["model_name"] == "a/model"
    assert [step["step_id"] for step in document["steps"]] == [1, 2, 3, 4]
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent"]
    called, answered = document["steps"][2:]
    assert called["tool_calls"] == [
        {"tool_call_id": "c1", "function_name": "times", "arguments": {"a": 17}}
    ]
    assert called["observation"] == {"results": [{"content": "51", "source_call_id": "c1"}]}
    assert called["reasoning_content"] == "I ask."
    assert called["metrics"]["prompt_token_ids"] == [1, 2, 3]
    assert called["metrics"]["completion_token_ids"] == [4, 5]
    assert called["metrics"]["logprobs"] == [-0.5, -0.25]
    assert answered["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert answered["metrics"]["completion_token_ids"] == [8]
    assert answered["metrics"]["extra"] == {"policy_versions": [8]}
    assert (answered["extra"]["reward"], document["extra"]["reward"]) == (1.0, 1.0)
    assert document["final_metrics"]["total_prompt_tokens"] == 10
    assert document["final_metrics"]["total_completion_tokens"] == 3
    assert "subagent_trajectories" not in document


def test_each_sampled_token_stands_in_one_of_the_dialogues():
    played = several_dialogues()
    document = to_atif(played, "a/model")
    newest, forked, first = document, *document["subagent_trajectories"]
    # The turn that two dialogues share is in that of the newer end, and a copy in the older.
    completions = [
        [step["metrics"]["completion_token_ids"] for step in each["steps"] if "metrics" in step]
        for each in (newest, forked, first)
    ]
    assert completions == [[[21, 22]], [[4, 5], [10]], [[8]]]
    copied = [
        [step["step_id"] for step in each["steps"] if step.get("is_copied_context")]
        for each in (newest, forked, first)
    ]
    assert copied == [[1], [], [1, 2, 3]]
    assert forked["steps"][-1]["metrics"]["prompt_token_ids"] == [1, 2, 9]
    assert newest["steps"][0]["tool_calls"][0]["arguments"] == {"at": 1}
    assert newest["steps"][0]["observation"]["results"][0]["source_call_id"] is None
    assert len({each["trajectory_id"] for each in (newest, forked, first)}) == 3


@pytest.mark.parametrize("template", [CHATML, DROPS_THINKING])
def test_every_call_of_an_agent_is_written_once(template):
    """Tries conversations that continue, go back or begin again, with and without forked rows."""
    renderer = Renderer(make_tokenizer(template))
    told = random.Random(5)
    said = ("done", "<think>\nhm\n</think>\n\nso be it")
    engine = ScriptedEngine(renderer, lambda *_: told.choice(said))
    num_dialogues = 0
    for _ in range(12):
        engine.reserve(1)
        policy = TokenPolicy(engine, renderer, 200, 100_000)
        played, prompts = Trajectory("t", "g", "e", "k", 0), []
        recorder = Recorder(played, policy)
        histories: list[list] = [[{"role": "user", "content": "q"}]]
        for number in range(told.randint(2, 6)):
            history = told.choice(histories)
            if told.random() < 0.4:
                kept = told.choice([0, 2])
                history = [*history[:kept], {"role": "user", "content": f"q{number}"}]
                histories.append(history)
            place = recorder.place(history, [])
            recorder.take(place)
            prompts.append(place.prompt.token_ids)
            recorder.write(place, asyncio.run(policy.sample(place.request_id, prompts[-1])))
            turn = played.turns[-1]
            history.append(played.branches[turn.branch].messages[turn.message])
            history.append({"role": "user", "content": "Go on."})
        document = to_atif(played, "m")
        dialogues = [document, *document.get("subagent_trajectories", [])]
        num_dialogues += len(dialogues)
        steps = [step for each in dialogues for step in each["steps"] if step["source"] == "agent"]
        assert all(("metrics" in step) != ("is_copied_context" in step) for step in steps)
        written = [step["metrics"] for step in steps if "metrics" in step]
        assert sorted(
            (m["prompt_token_ids"], m["completion_token_ids"]) for m in written
        ) == sorted(
            (prompt, played.branches[t.branch].token_ids[t.start : t.start + t.num_tokens])
            for prompt, t in zip(prompts, played.turns, strict=True)
        )
    assert num_dialogues > 12


def test_a_server_of_text_has_no_tokens_and_its_own_count():
    played = two_turns()
    played.branches = [TokenRow(messages=played.messages)]
    played.turns[0].start = played.turns[1].start = 0
    played.info["prompt_tokens"] = 30
    document = to_atif(played, "gpt")
    assert document["steps"][2]["metrics"] == {"completion_tokens": 2}
    assert document["final_metrics"]["total_prompt_tokens"] == 30


@pytest.fixture
def folder(tmp_path) -> Path:
    config = load_config({"env": {"id": "math"}, "model": {"path": "a/model"}})
    played = [two_turns(), several_dialogues(), failed()]
    played[0].reward_components["odd"] = float("nan")
    EpisodeLog(tmp_path / "kept", config).finish(played)
    return tmp_path / "kept"


def test_a_folder_becomes_a_file_for_each_trajectory(folder, capsys):
    out = folder.with_name("out.atif")
    assert main(["convert", str(folder), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 3 trajectories\n"
    assert sorted(path.name for path in out.iterdir()) == [
        *("..%2F..%2Fup.json", "test%2F0-0.json", "test%2F1-0.json")
    ]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["kept", "out.atif"]
    up = json.loads((out / "..%2F..%2Fup.json").read_text())
    assert up["steps"] == [{"step_id": 1, "source": "system", "message": "it broke"}]
    assert up["extra"]["error"]["code"] == "env_error" and up["extra"]["reward"] is None
    assert main(["convert", str(folder), str(out)]) == 2, "nothing is overwritten"
    log = folder.with_name("log.eval")
    assert main(["convert", str(folder), str(log)]) == 0
    assert main(["convert", str(log), str(folder.with_name("again.atif"))]) == 0
    assert len(list(folder.with_name("again.atif").iterdir())) == 3


def test_a_training_run_is_read_step_by_step(folder, capsys):
    log = TrajectoryLog(folder, resume_step=0)
    log.append(1, [two_turns("test/0-1")])
    untold = two_turns("test/0-2")
    untold.turns[1].message = -1
    log.append(2, [untold])
    out = folder.with_name("out.atif")
    assert main(["convert", str(folder), str(out)]) == 0
    printed = capsys.readouterr()
    assert "5 trajectories" in printed.out and "1 turns have no message" in printed.err
    (folder / "trajectories" / "step_000000.msgpack.zst").unlink()
    for step in (1, 2):
        (folder / "trajectories" / f"step_{step:06d}.msgpack.zst").unlink()
    empty = folder.with_name("empty.atif")
    assert main(["convert", str(folder), str(empty)]) == 2
    assert "no trajectory" in capsys.readouterr().err and not empty.exists()


@pytest.mark.slow
@pytest.mark.skipif(not (VENV / "bin" / "harbor").exists(), reason=f"no harbor in {VENV}")
def test_harbor_reads_the_files_with_the_same_tokens(folder):
    out = folder.with_name("out.atif")
    assert main(["convert", str(folder), str(out)]) == 0
    environment = os.environ | {"HARBOR_TELEMETRY": "off", "DO_NOT_TRACK": "1"}
    command = [str(VENV / "bin" / "python"), "-c", HARBOR_READS, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    _, played = read_evaluation(folder)
    assert set(found) == {each.trajectory_id for each in played}
    for each in played:
        read = found[each.trajectory_id]
        ends = [(each.branches[t.branch], t.start, t.start + t.num_tokens) for t in each.turns]
        assert read["completions"] == sorted(row.token_ids[a:b] for row, a, b in ends)
        assert read["logprobs"] == sorted(row.rollout_logprobs[a:b] for row, a, b in ends)
    assert found["test/0-0"]["usage"] == [10, 3]
    assert found["test/0-0"]["conversations"] == [
        ["user", "user", "assistant"],
        ["user", "user", "assistant", "user", "assistant"],
    ]
    assert found["../../up"]["usage"] is None
