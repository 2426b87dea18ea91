"""Tests what an environment's author can rely on, without a session."""

import asyncio
import re
import threading

import pytest
from sample_envs import FreeForm, Hello, Locks, Workshop

from agentrl.env import Action, Environment, Task, ToolCall, reward, tool
from agentrl.env.base import load_config
from agentrl.env.client import in_process
from agentrl.env.episode import start_episode, take_turn, tools_before_reset
from agentrl.errors import ConfigError, DataError, EnvError, GraderError


def play(environment, *actions, task=None, seed=0):
    """Play actions against a bare instance; strings are texts, tuples are (tool, arguments)."""

    async def main():
        chosen = task or environment.get("train", 3)
        prompt = await start_episode(environment, chosen, seed)
        return prompt, [await take_turn(environment, to_action(each)) for each in actions]

    return asyncio.run(main())


def to_action(each):
    if isinstance(each, str):
        return Action(text=each)
    if isinstance(each, Action):
        return each
    calls = each if isinstance(each, list) else [each]
    return Action(
        tool_calls=tuple(ToolCall(f"c{n}", name, args) for n, (name, args) in enumerate(calls))
    )


def content(result):
    return [message["content"] for message in result.observation]


def test_hello_world_gives_its_reward():
    prompt, (result,) = play(Hello(), ("answer", {"text": "4"}))
    assert prompt == [{"role": "user", "content": "What is 3 + 1?"}]
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
    assert content(result) == [""]  # the reward is not shown
    assert play(Hello(), ("answer", {"text": "5"}))[1][0].reward == 0.0


def test_text_reminds_of_a_terminal_tool_and_otherwise_ends():
    _, (reminded,) = play(Hello(), "four")
    assert not reminded.terminated and "answer" in content(reminded)[0]

    class Plain(Environment):
        @reward
        def right(self, episode):
            return float(episode.last_text == episode.task.reference)

    _, (ended,) = play(Plain(), "four", task=Task("t", "2+2?", "four"))
    assert ended.terminated and ended.reward == 1.0 and ended.reward_components == {"right": 1.0}


def test_system_prompt_and_messages_of_reset():
    prompt, _ = play(Workshop())
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert prompt[0]["content"] == "Use the tools."


def test_random_numbers_follow_from_the_seed():
    first, _ = play(Workshop(), seed=5)
    assert play(Workshop(), seed=5)[0] == first
    assert play(Workshop(), seed=6)[0] != first


def test_calls_run_in_order_and_answer_each_id():
    _, (result,) = play(Workshop(), [("add", {"number": 2}), ("add", {}), ("greet", {})])
    assert content(result) == ['{"count":2}', '{"count":3}', "hello"]
    assert [message["tool_call_id"] for message in result.observation] == ["c0", "c1", "c2"]
    assert all(message["role"] == "tool" for message in result.observation)


def test_calls_after_the_end_do_not_run():
    environment = Workshop()
    _, (result,) = play(environment, [("submit", {"value": 1}), ("add", {}), ("submit", {})])
    assert environment.count == 0 and result.terminated
    assert content(result)[1:] == ["Not run: the episode had ended."] * 2


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (Action(parse_error="not valid JSON"), "not valid JSON"),
        (("fly", {}), "There is no tool 'fly'"),
        (("add", {"number": 1000}), "number: Input should be less than or equal to 100"),
        (("add", {"number": "many"}), "number: Input should be a valid integer"),
        (("add", {"n": 1}), "n: there is no such argument"),
        (("submit", {}), "value: this argument is required"),
    ],
)
def test_what_the_agent_did_wrong_is_an_observation(action, says):
    environment = Workshop()
    _, (result,) = play(environment, action)
    assert says in content(result)[0]
    assert not result.terminated and result.metrics == {"invalid_calls": 1.0}
    assert environment.count == 0


def test_an_unreadable_turn_runs_nothing():
    environment = Workshop()
    call = ToolCall("c", "add", {})
    play(environment, Action(tool_calls=(call,), parse_error="second call is broken"))
    assert environment.count == 0


def test_arguments_are_converted_as_the_signature_says():
    _, (result,) = play(Workshop(), ("add", {"number": "7"}))
    assert content(result) == ['{"count":7}']


def test_an_exception_of_a_tool_is_told_to_the_agent_without_the_reference():
    _, (result,) = play(Workshop(), ("fail", {"message": "expected the secret here"}))
    assert content(result) == ["fail failed: ValueError: expected [reference] here"]
    assert result.metrics == {"tool_calls": 1.0, "tool_errors": 1.0}


def test_def_methods_run_in_a_thread():
    _, (result,) = play(Workshop(), ("thread_name", {}))
    assert content(result) != [threading.current_thread().name]
    assert content(result)[0].startswith("agentrl-env-worker")


def test_a_tool_that_runs_out_of_its_time():
    _, results = play(Workshop(), ("impatient", {"seconds": 5}), ("add", {}))
    assert content(results[0]) == ["impatient ran out of time (0.05 s)."]
    assert results[1].metrics == {"tool_calls": 2.0, "tool_errors": 1.0}


def test_a_thread_that_runs_out_of_its_time_ends_the_session():
    with pytest.raises(EnvError, match="continues in its thread") as caught:
        play(Workshop(), ("impatient_thread", {}))
    assert caught.value.code == "step_timeout"
    Workshop.release.set()
    Workshop.release.clear()


def test_reward_components_are_weighted_and_reported_one_by_one():
    _, results = play(Workshop(), ("add", {}), ("submit", {"value": 2.0}))
    assert results[0].reward_components == {}
    assert results[1].reward_components == {"turns": 2.0, "is_grading_fine": 1.0}
    assert results[1].reward == 2.0 + 0.5 * 2.0


def test_a_reward_method_that_raises_is_a_grader_error():
    with pytest.raises(GraderError, match=r"Workshop\.is_grading_fine raised ZeroDivisionError"):
        play(Workshop(), ("add", {"number": 13}), ("submit", {"value": 1}))


def test_a_reward_method_that_runs_out_of_time_is_a_grader_error():
    class Slow(Environment):
        @reward(timeout_s=0.02)
        async def slow(self, episode):
            await asyncio.sleep(5)

    with pytest.raises(GraderError, match="TimeoutError"):
        play(Slow(), "done", task=Task("t", "p"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "one", None])
def test_a_component_must_be_a_finite_number(value):
    class Odd(Environment):
        @reward
        def odd(self, episode):
            return value

    with pytest.raises(EnvError, match=r"reward Odd\.odd (is|must be)"):
        play(Odd(), "done", task=Task("t", "p"))


def test_free_form_results_pass_through():
    _, results = play(FreeForm(), "1.5", "-2", "stop")
    assert [result.reward for result in results] == [1.5, -2.0, 0.0]
    assert results[1].metrics == {"largest": 1.5}
    assert [result.terminated for result in results] == [False, False, True]


def test_finish_can_truncate():
    _, (result,) = play(FreeForm(), "cut")
    assert (result.terminated, result.truncated, result.reward) == (False, True, 0.25)
    assert result.info == {"why": "cut"} and content(result) == ["too long"]


@pytest.mark.parametrize(("text", "says"), [("nan", "is nan"), ("inf", "is inf"), ("wrong", "7")])
def test_what_a_step_returns_is_checked(text, says):
    with pytest.raises(EnvError, match=says):
        play(FreeForm(), text)


def test_a_failed_turn_leaves_no_trace_in_the_episode():
    environment = FreeForm()
    with pytest.raises(EnvError):
        play(environment, "1", "nan")
    assert [action.text for action in environment.episode.actions] == ["1"]
    assert [message["role"] for message in environment.episode.messages] == [
        "user",
        "assistant",
        "user",
    ]


def test_configuration_is_checked_and_the_error_names_the_key():
    assert Workshop({"greeting": "hi"}).config.greeting == "hi"
    with pytest.raises(ConfigError, match=r"workshop: there is no key 'greting'; did you mean gre"):
        Workshop({"greting": "hi"})
    with pytest.raises(ConfigError, match="no key 'zzz'; the keys are greeting, slow_reset_s"):
        Workshop({"zzz": 1})
    with pytest.raises(ConfigError, match="slow_reset_s"):
        load_config(Workshop, {"slow_reset_s": "soon"})
    described = Workshop.Config.model_json_schema()["properties"]["greeting"]
    assert described["description"] == "What `greet` says."


def test_an_instance_made_by_hand_loads_what_is_shared():
    _, (result,) = play(Workshop({"greeting": "hi"}), ("greet", {}))
    assert content(result) == ["hi"]


def test_a_subclass_inherits_and_overrides_tools():
    class More(Hello):
        @tool(terminal=True)
        def answer(self, text: str) -> float:
            return 7.0

        @tool
        def hint(self) -> str:
            return "count"

    _, results = play(More(), ("hint", {}), ("answer", {"text": "?"}))
    assert content(results[0]) == ["count"] and results[1].reward == 7.0


def described(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Remote(Environment):
    """Tools of some other server, found out when the configuration is loaded."""

    @classmethod
    def load_shared(cls, config):
        return [
            described("look", where={"type": "string"}),
            described("add", number={"minimum": 1}),
        ]

    def offered_tools(self):
        return [*self.shared, "leave"]

    async def on_call(self, name, arguments):
        if name == "look" and "where" not in arguments:
            raise ValueError("where?")
        return {"name": name, **arguments}

    @tool(terminal=True)
    def leave(self) -> float:
        return 1.0

    @tool
    def add(self, number: int) -> int:
        return number + 1


def test_tools_that_are_known_only_at_run_time():
    environment = Remote()
    calls = [("look", {"where": "up"}), ("look", {}), ("add", {"number": 2}), ("leave", {})]
    _, (result,) = play(environment, calls, task=Task("t", "Look around."))
    assert content(result) == [
        '{"name":"look","where":"up"}',
        "look failed: ValueError: where?",
        "3",
        "",
    ]
    assert result.reward == 1.0 and result.terminated
    assert environment.metrics == {"tool_calls": 4.0, "tool_errors": 1.0}
    specs = [each.spec for each in environment._tools.values()]
    assert specs[:2] == environment.shared  # `add` is described as its method is not
    assert [spec["function"]["name"] for spec in specs] == ["look", "add", "leave"]


@pytest.mark.parametrize("wrong", [{"name": "look"}, {"function": {}}, 3])
def test_a_tool_described_otherwise_is_a_configuration_error(wrong):
    class Wrong(Remote):
        def offered_tools(self):
            return [wrong]

    with pytest.raises(
        ConfigError, match=r"Wrong.offered_tools\(\) lists .*; list the names of @tool"
    ):
        play(Wrong(), ("look", {}), task=Task("t", "Look around."))


def test_a_described_tool_that_nothing_runs_is_not_the_agents_fault():
    class Forgotten(Hello):
        def offered_tools(self):
            return [described("look")]

    with pytest.raises(ConfigError, match=r"describes 'look'.*define on_call"):
        play(Forgotten(), ("look", {}))


def test_an_error_of_the_data_is_not_told_to_the_agent():
    class Broken(Hello):
        @tool
        def read(self) -> str:
            raise DataError("rows.jsonl, line 3: no column 'answer'")

    with pytest.raises(DataError, match="line 3"):
        play(Broken(), ("read", {}))


def test_offered_tools_may_look_at_the_task_and_at_what_was_done():
    environment = Locks()
    assert [each["function"]["name"] for each in tools_before_reset(environment)] == [
        "turn",
        "open",
    ]
    task = Task("t", "Open it.", metadata={"keys": 1})
    _, (refused, _, opened) = play(environment, ("open", {}), ("turn", {}), ("open", {}), task=task)
    assert content(refused) == ["There is no tool 'open'. The tools are: turn."]
    assert opened.reward == 1.0


def test_a_message_must_have_a_role_and_a_text():
    class Odd(Environment):
        def reset(self, task, *, seed):
            return [task.metadata]

    for wrong in ({"role": "user"}, {"role": "robot", "content": "x"}, {"content": "x"}, 3):
        with pytest.raises(EnvError, match=r"reset\(\) must return a str, a list of messages"):
            play(Odd(), task=Task("t", "p", metadata=wrong))


def test_a_class_that_cannot_be_made_or_asked_is_refused_with_the_method():
    with pytest.raises(ConfigError, match=r"Own.__init__ .* remove it"):

        class Own(Environment):
            def __init__(self):
                self.count = 0

    with pytest.raises(ConfigError, match=r"Waits.get is `async def`: make it `def`"):

        class Waits(Environment):
            async def get(self, split, index):
                return Task("0", "What?")

    class PassesOn(Environment):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.count = 0

    assert PassesOn({}).count == 0


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"reset": lambda self, task: ""}, "write def reset(self, task, *, seed)"),
        ({"reset": lambda self, seed=None: ""}, "write def reset(self, task, *, seed)"),
        ({"get": lambda self, index: None}, "write def get(self, split, index)"),
        ({"step": lambda self, action, more: ""}, "write def step(self, action)"),
        ({"right": reward(lambda self: 1.0)}, "write def right(self, episode)"),
        ({"load_shared": lambda self, config: 1}, "write `@classmethod` above"),
        ({"Config": type("Config", (), {})}, "write class Config(EnvConfig)"),
        ({"finish": tool(lambda self: "")}, "would replace Environment.finish"),
        ({"step": reward(lambda self, episode: 1)}, "would replace Environment.step"),
    ],
)
def test_a_definition_that_cannot_work_is_refused_with_what_to_write(members, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        type("Wrong", (Environment,), members)


INFINITE = {"deep": [{"x": float("inf")}]}


@pytest.mark.parametrize(
    ("members", "action", "says"),
    [
        ({"on_text": lambda self, text: 1.0}, "x", "on_text() must return a str"),
        ({"on_text": lambda self, text: 1.0}, "x", "give a reward with self.finish(reward)"),
        ({"step": lambda self, action: ("x", 1.0, True, False, {})}, "x", "return a StepResult"),
        ({"say": tool(terminal=True)(lambda self: "yes")}, ("say", {}), "terminal tool say"),
        ({"on_text": lambda self, text: [self.finish(1), self.finish(2)]}, "x", "called twice"),
        ({"on_text": lambda self, text: self.finish(1, INFINITE)}, "x", "info.deep[0].x is inf"),
        ({"reset": lambda self, task, *, seed: self.finish(1)}, "x", "reset() called self.finish"),
        ({"reset": lambda self, task, *, seed: None}, "x", "returned no first prompt"),
    ],
)
def test_an_answer_that_cannot_be_used_says_what_to_return(members, action, says):
    with pytest.raises(EnvError, match=re.escape(says)):
        play(type("Wrong", (Environment,), members)(), action, task=Task("t", "?"))


def test_the_id_of_a_task_must_be_a_text():
    with pytest.raises(EnvError, match=r"Hello.get\(\) returned a task whose id is 5"):
        play(Hello(), task=Task(5, "?"))


def test_an_instance_made_by_hand_says_that_it_cannot_await():
    class Async(Environment):
        @classmethod
        async def load_shared(cls, config):
            return 1

    with pytest.raises(ConfigError, match=r"shared=await Async.load_shared\(config\)"):
        Async().shared  # noqa: B018


class Ungraded(Environment):
    def on_text(self, text):
        self.finish(None)


class GradedElsewhere(Ungraded):
    @reward
    def graded(self, episode) -> float:
        return 0.5


async def test_no_reward_is_no_reward_of_zero():
    async def play(environment):
        async with in_process(environment) as client:
            session = await client.session("x", task=Task("t", "go"))
            return (await session.step(Action(text="done"), timeout_s=5)).reward

    with pytest.raises(GraderError):
        await play(Ungraded)
    assert await play(GradedElsewhere) == 0.5
