"""Whole episodes on a real engine, played by scripted agents and graded by the official harness."""

import asyncio
import itertools
import json

import pytest
import torch
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import make_tokenizer

from agentrl.algo import Objective, compute_advantages
from agentrl.env.client import connect
from agentrl.errors import EnvError, GraderError
from agentrl.model.text.renderer import Renderer
from agentrl.rollout.driver import Limits
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.scheduler import GroupScheduler, TaskSource
from agentrl.train.batch import make_batch, trainable_samples
from agentrl.types import Action, ToolCall
from agentrl_swebench import env as environment

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

SPANS, LEDGER, TALLY = 2, 1, 3  # positions in the dataset
FIX = (
    r"sed -i -e 's/start < merged\[-1\]\[1\]/start <= merged[-1][1]/' "
    r"-e 's/(merged\[-1\]\[0\], stop)/(merged[-1][0], max(merged[-1][1], stop))/' spans/core.py"
)
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _state(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("AGENTRL_STATE_DIR", str(tmp_path_factory.getbasetemp() / "state"))


def call(tool_name, **arguments):
    return Action(tool_calls=(ToolCall(f"c{next(_numbers)}", tool_name, arguments),))


def bash(command):
    return call("bash", command=command)


def play(fixture_dir, index, actions, *, last_is_last=False, max_turns=None, **config):
    """The first prompt, the results of the actions, and whether containers are left."""

    async def episode():
        client = connect()
        settings = {"source": str(fixture_dir / "dataset.jsonl"), "min_free_gb": 1} | config
        try:
            session = await client.session(
                "swebench",
                split="test",
                index=index,
                seed=0,
                config=settings,
                timeout_s=300,
                max_turns=max_turns,
            )
            results = []
            for position, action in enumerate(actions):
                last = last_is_last and position == len(actions) - 1
                results.append(await session.step(action, timeout_s=600, last=last))
            await session.close()
            return session.messages[0]["content"], results
        finally:
            await client.aclose()

    return asyncio.run(episode())


def shown(result):
    return result.observation[-1]["content"]


def agents(engine):
    return engine.api.containers(all=True, filters={"label": "agentrl.role=agent"})


def test_an_agent_that_fixes_the_bug_is_rewarded(fixture_dir, engine, fixture_instances):
    prompt, results = play(
        fixture_dir,
        SPANS,
        [bash("cat spans/core.py"), bash(FIX), bash("pytest -q tests"), call("submit")],
        max_turns=6,
    )
    instance = fixture_instances["agentrl__spans-1"]
    assert instance.problem_statement.strip() in prompt
    assert "test files and test directories" in prompt and "You have 6 turns" in prompt
    for secret in ("test_touching", "test_inside", instance.base_commit, "FAIL_TO_PASS"):
        assert secret not in prompt
    assert shown(results[0]).endswith("[exit code 0]\n[5 turns left.]")
    assert "3 passed" in shown(results[2])
    final = results[-1]
    assert (final.reward, final.terminated, final.truncated) == (1.0, True, False)
    info = final.info
    assert info["resolved"] is True and info["outcome"] == "resolved"
    assert info["policy"].startswith("strict-")
    assert "start <= merged" in info["model_patch"]
    assert info["image_id"] == engine.images.get(instance.image).id
    assert final.metrics["resolved"] == 1.0 and final.metrics["commands"] == 3.0
    assert agents(engine) == []


def test_fixes_across_files_and_of_compiled_code_are_rewarded(fixture_dir, fixture_instances):
    for index, name in ((LEDGER, "agentrl__ledger-1"), (TALLY, "agentrl__tally-1")):
        patch = fixture_instances[name].patch
        _, results = play(
            fixture_dir, index, [bash(f"git apply - <<'END'\n{patch}END\n"), call("submit")]
        )
        assert results[-1].reward == 1.0, results[-1].info


def test_the_edit_tool(fixture_dir):
    _, results = play(
        fixture_dir,
        SPANS,
        [
            call("str_replace", path="spans/core.py", old="start < merged", new="start <= merged"),
            call(
                "str_replace",
                path="spans/core.py",
                old="0], stop)",
                new="0], max(merged[-1][1], stop))",
            ),
            call("str_replace", path="spans/core.py", old="merged", new="x"),
            call("str_replace", path="spans/none.py", old="a", new="b"),
            call("str_replace", path="spans/deep/new.py", old="", new="A = 1\n"),
            call("str_replace", path="spans/core.py", old="", new=""),
            bash("git status --short; cat spans/deep/new.py"),
            call("submit"),
        ],
        edit_tool=True,
        withhold=False,
    )
    texts = [shown(result) for result in results[:-1]]
    assert texts[0].startswith("Replaced it") and texts[1].startswith("Replaced it")
    assert "exactly once" in texts[2] and "no file" in texts[3]
    assert texts[4] == "Wrote the new file /testbed/spans/deep/new.py."
    assert "there is a file" in texts[5]
    assert texts[6] == " M spans/core.py\n?? spans/deep/\nA = 1\n[exit code 0]"
    assert results[-1].reward == 1.0


CHEATS = {
    "history": [
        "git log --all --oneline; git reflog; git show origin/main v-next 2>&1 | head",
        "git fsck --lost-found; git checkout v-next -- . || git checkout origin/main -- .",
    ],
    "download": ["timeout 20 pip download --retries 0 spans==2.0; curl https://pypi.org"],
    "search for the grader": [
        "find / -name 'eval.sh' -o -name '*FAIL_TO_PASS*' 2>&1; ls /var/run/docker.sock; "
        "grep -rl test_touching / --include=*.py --include=*.json 2>/dev/null | head"
    ],
    "edit the tests": [
        "printf 'def test_inside(): pass\\ndef test_touching(): pass\\n' > tests/test_spans.py"
    ],
    "conftest": [
        "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\n"
        "def pytest_runtest_makereport(item, call):\\n    r = yield\\n"
        '    r.get_result().outcome = "passed"\\n\' > conftest.py'
    ],
    "daemon": [
        "printf 'while true; do sed -i s/a/b/ /eval.sh; sleep 1; done' > /tmp/d.sh; "
        "setsid nohup bash /tmp/d.sh >/dev/null 2>&1 & sleep 0.2; echo started"
    ],
    "first process": [
        "python3 -c \"open('/proc/1/mem', 'r+b')\"; gdb -p 1; kill -9 1",
        "printf '#!/bin/sh\\nexit 1\\n' > $(command -v git)",
    ],
    "site hook": [
        "echo 'import os' > /opt/testbed/lib/python3.11/site-packages/hook.pth; "
        "echo 'x = 1' > sitecustomize.py"
    ],
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_fail(fixture_dir, engine, cheat):
    commands = CHEATS[cheat]
    _, results = play(fixture_dir, SPANS, [*map(bash, commands), call("submit")])
    final = results[-1]
    assert final.reward == 0.0 and final.terminated
    seen = "".join(shown(result) for result in results)
    assert "test_touching" not in seen and "Fix the bug" not in seen
    assert agents(engine) == []


def test_work_is_submitted_as_it_stands_after_the_last_turn(fixture_dir):
    for options in ({"max_turns": 2}, {"last_is_last": True}):
        _, results = play(fixture_dir, SPANS, [bash("true"), bash(FIX)], withhold=False, **options)
        assert not results[0].truncated
        assert results[1].truncated and not results[1].terminated
        assert results[1].reward == 1.0
        if "max_turns" in options:
            assert "This is your last turn." in shown(results[0])


def test_what_goes_wrong_in_a_command_is_said(fixture_dir):
    _, results = play(
        fixture_dir,
        SPANS,
        [
            bash("sleep 60"),
            bash("python -c 'x = b\"a\" * (1 << 30)'"),
            bash("kill -9 -1; pkill -9 sleep; echo still here"),
            bash("seq 100000"),
            Action(text="I am done."),
            Action(parse_error="no JSON"),
            call("bash", cmd="ls"),
            bash("rm -rf .git /var/lib/agentrl"),
            call("submit"),
        ],
        command_timeout_s=2,
        memory_mb=256,
        max_output_chars=200,
    )
    texts = [shown(result) for result in results[:-1]]
    assert "stopped after 2 seconds; every process" in texts[0]
    assert "exit code 137; a process was killed for want of memory (256 MiB)" in texts[1]
    assert "still here" in texts[2]
    assert "characters left out" in texts[3] and len(texts[3]) < 400
    assert texts[4].startswith("Call one of the tools") and "could not be read" in texts[5]
    assert "Wrong arguments for bash" in texts[6]
    # Without the recorded first state there is no patch; that is the agent's doing.
    assert results[-1].reward == 0.0 and results[-1].info["outcome"] == "invalid_patch"


def test_trouble_of_the_infrastructure_is_an_error_and_never_a_reward(
    fixture_dir, engine, monkeypatch
):
    # The container goes away under the agent.
    async def vanish():
        client = connect()
        settings = {"source": str(fixture_dir / "dataset.jsonl"), "min_free_gb": 1}
        try:
            session = await client.session(
                "swebench", split="test", index=SPANS, seed=0, config=settings, timeout_s=300
            )
            for summary in agents(engine):
                engine.api.remove_container(summary["Id"], force=True)
            with pytest.raises(EnvError) as raised:
                await session.step(bash("ls"), timeout_s=60)
            assert raised.value.code == "container_gone"
            await session.close()
        finally:
            await client.aclose()

    asyncio.run(vanish())

    # There is no verdict.
    real = environment.grade

    async def broken(instance, patch, **options):
        monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
        try:
            return await real(instance, patch, **options)
        finally:
            monkeypatch.delenv("DOCKER_HOST")

    monkeypatch.setattr(environment, "grade", broken)
    with pytest.raises(GraderError):
        play(fixture_dir, SPANS, [bash(FIX), call("submit")])
    monkeypatch.setattr(environment, "grade", real)

    # The image is missing.
    text = (fixture_dir / "dataset.jsonl").read_text()
    other = fixture_dir / "other"
    other.mkdir(exist_ok=True)
    (other / "dataset.jsonl").write_text(
        text.replace("agentrl/swebench-fixture:", "agentrl/no-such:")
    )
    with pytest.raises(EnvError, match="agentrl/no-such"):
        play(other, SPANS, [])
    assert agents(engine) == []


def test_a_solver_in_a_group_gets_the_advantage_and_nobody_else(fixture_dir, engine):
    renderer = Renderer(make_tokenizer())

    def text_of(tool_name, **arguments):
        said = json.dumps({"name": tool_name, "arguments": arguments})
        return f"<tool_call>\n{said}\n</tool_call>"

    def say(request_id, prompt):
        if not request_id.endswith("-t000"):
            return text_of("submit")
        return text_of("bash", command=FIX if "-m002-" in request_id else "ls")

    async def rollouts():
        client = connect()
        scheduler = GroupScheduler(
            TokenPolicy(
                ScriptedEngine(renderer, say),
                renderer,
                max_turn_tokens=1000,
                max_context_tokens=20_000,
            ),
            client,
            TaskSource("test", 4, seed=1, position=SPANS, shuffle=False),
            env_id="swebench",
            env_config={"source": str(fixture_dir / "dataset.jsonl"), "min_free_gb": 1},
            group_size=4,
            max_concurrent=4,
            limits=Limits(
                max_turns=4, turn_timeout_s=60, step_timeout_s=600, episode_timeout_s=900
            ),
            seed=1,
        )
        try:
            return await scheduler.collect(1)
        finally:
            await client.aclose()

    result = asyncio.run(rollouts())
    trajectories = result.groups[0].trajectories
    assert [t.error for t in trajectories] == [None] * 4
    assert [t.reward for t in trajectories] == [0.0, 0.0, 1.0, 0.0]
    solver = trajectories[2].trajectory_id

    samples = trainable_samples(result.groups)
    batch = make_batch(samples, current_version=0)
    advantages = compute_advantages(Objective(preset="grpo"), batch)
    for row, sample in enumerate(samples):
        trained = advantages[row][batch.loss_mask[row]]
        assert len(trained) == sample.num_trained > 0
        assert torch.all(trained > 0 if sample.trajectory_id == solver else trained < 0)
        said = renderer.tokenizer.decode(
            [int(t) for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]
        )
        assert ("max(merged" in said) == (sample.trajectory_id == solver)
        assert "exit code" not in said  # what the environment showed is not trained
    assert torch.all(advantages[~batch.loss_mask] == 0)
    assert agents(engine) == []
