"""The forest of an episode: whatever an agent sends again, in whatever words, is found."""

import asyncio
import copy
import json
import random

import pytest
from agent_play import require_exact
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_scripted import ScriptedEngine
from tokenizers_for_tests import CHATML, DROPS_THINKING, make_tokenizer

from agentrl.model.text.renderer import Renderer
from agentrl.rollout.agent.recorder import Recorder, identity
from agentrl.rollout.agent.wire import Answer, Call, ChatCompletions
from agentrl.rollout.messages import read_messages
from agentrl.rollout.policy import TokenPolicy
from agentrl.types import Trajectory

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
SAID = (
    "done",
    "  spaces around \n",
    "<think>\nhm\n</think>\n\nso be it",
    '<tool_call>\n{"name": "look", "arguments": {"word": "w", "n": 2.0, "deep": [{"a": null}]}}'
    "\n</tool_call>",
    '<think>a</think>Look:<tool_call>{"name":"look","arguments":{}}</tool_call>'
    '<tool_call>{"name":"look","arguments":{"word":"ü"}}</tool_call>',
    "<tool_call>{oops</tool_call>",
)
RENDERERS = {
    name: Renderer(make_tokenizer(template))
    for name, template in (("append_only", CHATML), ("fork", DROPS_THINKING))
}


class Played:
    """A recorder behind the chat completions wire, without HTTP."""

    def __init__(self, mode="append_only", say=None):
        self.renderer = RENDERERS[mode]
        self.engine = ScriptedEngine(self.renderer, say or (lambda *_: "done"))
        self.engine.reserve(1)
        self.policy = TokenPolicy(self.engine, self.renderer, 200, 100_000)
        self.trajectory = Trajectory("t", "g", "e", "k", 0)
        self.recorder = Recorder(self.trajectory, self.policy)
        self.prompts: list[list[int]] = []

    def ask(self, messages, tools=()):
        """The assistant's message, as it comes over the wire."""
        place = self.recorder.place(read_messages(messages), list(tools))
        ids = place.prompt.token_ids
        self.recorder.take(place)
        generation = asyncio.run(self.policy.sample(place.request_id, ids))
        action = self.recorder.write(place, generation)
        self.prompts.append(ids)
        call = Call(place.prompt.messages, list(tools), "m")
        reply = ChatCompletions().reply(call, Answer("x", action, False, 1, 1))
        return json.loads(json.dumps(reply["choices"][0]["message"]))

    def shape(self):
        """(branch, parent) of each turn, and what each row branches off from."""
        turns = [(turn.branch, turn.parent) for turn in self.trajectory.turns]
        return turns, [row.branch_of for row in self.trajectory.branches]


def user(text):
    return {"role": "user", "content": text}


def answers(message):
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"found {index}"}
        for index, call in enumerate(message.get("tool_calls") or [])
    ] or [user("go on")]


# What frameworks make of an assistant's message before they send it again.


def verbatim(message):
    return message


def bare(message):
    """Without reasoning, empty text as None, other ids, further keys."""
    kept = {"role": "assistant", "content": (message["content"] or "").strip() or None, "x": 1}
    if "tool_calls" in message:
        kept["tool_calls"] = message["tool_calls"]
    return kept


def parts(message):
    return {**bare(message), "content": [{"type": "text", "text": message["content"] or ""}]}


def respaced(message):
    message = copy.deepcopy(message)
    for call in message.get("tool_calls") or []:
        arguments = json.loads(call["function"]["arguments"])
        arguments = {key: arguments[key] for key in reversed(arguments)}
        text = json.dumps(arguments, indent=1, ensure_ascii=True).replace("2.0", "2")
        call["function"]["arguments"] = text
    return {**message, "refusal": None, "annotations": []}


def without_text_beside_calls(message):
    """CrewAI and Semantic Kernel."""
    return {**message, "content": None} if message.get("tool_calls") else message


def thought_in_text(message):
    text = f"<think>\n{message.get('reasoning', '')}\n</think>\n{message['content'] or ''}"
    return {**bare(message), "content": text}


RETELLINGS = (verbatim, bare, parts, respaced, thought_in_text, without_text_beside_calls)


@pytest.mark.parametrize("retell", RETELLINGS)
@pytest.mark.parametrize("said", SAID)
def test_a_message_is_known_in_the_words_of_every_framework(retell, said):
    played = Played(say=lambda *_: said)
    history = [user("q")]
    for _ in range(3):
        message = played.ask(history, [LOOK])
        history += [retell(message), *answers(message)]
    assert played.shape() == ([(0, None), (0, 0), (0, 1)], [None])
    require_exact(played.trajectory, played.prompts)


def test_an_empty_text_is_the_one_sampled_only_beside_its_own_calls():
    played = Played(say=lambda *_: SAID[4])
    first = played.ask([user("q")], [LOOK])
    calls = [{**call, "id": f"other-{call['id']}"} for call in first["tool_calls"]]
    other = {**first, "content": None, "tool_calls": calls}
    played.ask([user("q"), other, *answers(other)], [LOOK])
    assert played.shape()[0] == [(0, None), (1, None)]


def in_pieces(message, found):
    """As many answers as calls: each call in a message of its own, in front of its answer."""
    for index, (call, answer) in enumerate(zip(message["tool_calls"], found, strict=True)):
        text = message["content"] if index == 0 else None
        yield {"role": "assistant", "content": text, "tool_calls": [call]}
        yield answer


def calls_first(message, found):
    for call in message["tool_calls"]:
        yield {"role": "assistant", "content": None, "tool_calls": [call]}
    yield from found


def reordered(message, found):
    yield {**message, "tool_calls": message["tool_calls"][::-1]}
    yield from found[::-1]


def interleaved(message, found):
    one, two = message["tool_calls"]
    yield {**message, "tool_calls": [two]}
    yield found[1]
    yield {"role": "assistant", "content": "", "tool_calls": [one]}
    yield found[0]


@pytest.mark.parametrize("retell", [in_pieces, calls_first, reordered, interleaved])
def test_parallel_calls_that_come_back_in_pieces_are_the_turn_that_made_them(retell):
    prompts = []
    for tell in (lambda message, found: [message, *found], retell):
        played = Played(say=lambda *_: SAID[4])
        history = [user("q")]
        for _ in range(3):
            message = played.ask(history, [LOOK])
            history += tell(message, answers(message))
        assert played.shape() == ([(0, None), (0, 0), (0, 1)], [None])
        require_exact(played.trajectory, played.prompts)
        prompts.append(played.prompts)
    assert prompts[0] == prompts[1], (
        "the policy reads what it reads from an agent that sends it whole"
    )


def test_calls_of_two_turns_are_not_gathered_into_one():
    """One turn after the other called once; some dialects number calls from 0 in each."""
    played = Played(say=lambda *_: SAID[3])
    history = [user("q")]
    for _ in range(3):
        message = played.ask(history, [LOOK])
        history += [message, *answers(message)]
    assert played.shape() == ([(0, None), (0, 0), (0, 1)], [None])
    assert len(read_messages(history)) == len(
        played.recorder._as_sampled(read_messages(history))[0]
    )


@settings(max_examples=60)
@given(st.data(), st.sampled_from(sorted(RENDERERS)))
def test_any_program_gives_a_forest_in_which_each_token_is_trained_once(data, mode):
    """Goes on where it was, further back, elsewhere, with other tools, with foreign turns."""
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    played = Played(mode, say=lambda *_: chance.choice(SAID))
    histories = []  # by turn: the messages that it ends, as they were first sent, and the tools
    for number in range(data.draw(st.integers(1, 12))):
        tools = [chance.choice((LOOK, FIND))]
        parent = None
        if not histories or chance.random() < 0.2:
            messages = [user(f"task {number}")]
        else:
            parent = chance.randrange(max(0, number - 4), number)
            messages, tools_before = histories[parent]
            tools = tools if chance.random() < 0.2 else tools_before
            calls = messages[-1].get("tool_calls") or []
            messages = messages + [
                {"role": "tool", "tool_call_id": call["id"], "content": f"f{number}"}
                for call in calls
            ]
            if not calls:
                messages.append(user(f"more {number}"))
            if chance.random() < 0.15:
                messages += [{"role": "assistant", "content": "not sampled"}, user("and?")]
        before = [len(row) for row in played.trajectory.branches]
        retold = [chance.choice(RETELLINGS)(m) if m["role"] == "assistant" else m for m in messages]
        message = played.ask(retold, tools)
        turn = played.trajectory.turns[-1]
        histories.append(([*messages, message], tools))
        assert (parent is None) == (turn.parent is None)
        if parent is not None and tools == tools_before:
            # Another turn that said the same after the same is as good.
            one, other = (read_messages(histories[each][0]) for each in (parent, turn.parent))
            assert [*map(identity, one)] == [*map(identity, other)]
        if parent is not None and tools == tools_before and mode == "append_only":
            above = played.trajectory.turns[turn.parent]
            was_free = before[above.branch] == above.start + above.num_tokens
            assert (turn.branch == above.branch) == was_free
            row = played.trajectory.branches[above.branch]
            end = above.start + above.num_tokens
            assert played.prompts[-1][:end] == row.token_ids[:end], "continued by its ids"
    require_exact(played.trajectory, played.prompts)
    requests = list(played.engine.prompts)
    assert len(requests) == len(set(requests)) == len(played.trajectory.turns)


def test_sub_agents_and_a_compacted_history_are_the_forest_of_the_docs():
    played = Played(say=lambda *_: "said")
    main = [user("task")]
    main += [played.ask(main), user("results of A and B")]
    for name, num_turns in (("A", 2), ("B", 1)):
        sub = [{"role": "system", "content": "a sub-agent"}, user(f"sub-task {name}")]
        for _ in range(num_turns):
            sub += [played.ask(sub), user("go on")]
    played.ask(main)
    played.ask([user("summary of all that"), user("finish")])
    assert played.shape() == (
        [(0, None), (1, None), (1, 1), (2, None), (0, 0), (3, None)],
        [None] * 4,
    )
    require_exact(played.trajectory, played.prompts)


def test_two_calls_at_once_from_one_end_share_it_and_take_rows_of_their_own():
    """Placed before either is written, as parallel calls are."""
    played = Played()
    first = played.ask([user("q")])
    recorder, policy = played.recorder, played.policy
    places = [
        recorder.place(read_messages([user("q"), first, user(text)]), []) for text in ("a", "b")
    ]
    for place in places:
        ids = place.prompt.token_ids
        generation = asyncio.run(policy.sample(place.request_id, ids))
        recorder.write(place, generation)
        played.prompts.append(ids)
    assert played.shape() == ([(0, None), (0, 0), (1, 0)], [None, 0])
    end = played.trajectory.turns[0].num_tokens + played.trajectory.turns[0].start
    assert played.trajectory.branches[1].fork_at == end
    require_exact(played.trajectory, played.prompts)


def test_equal_requests_are_numbered_and_one_that_failed_gives_its_number_back():
    played = Played()
    place = lambda: played.recorder.place(read_messages([user("q")]), [])  # noqa: E731
    first = place()
    played.recorder.take(first)
    second = place()
    assert second.request_id == first.request_id[:-1] + "1"
    played.recorder.take(second)
    played.recorder.give_back(second)
    assert place().request_id == second.request_id
    again = Played().recorder.place(read_messages([user("q")]), [])
    assert again.request_id == first.request_id, "a function of what was asked"


def test_of_two_that_said_the_same_the_one_with_these_call_ids_goes_on():
    call = SAID[3]
    played = Played(say=lambda *_: call)
    one, two = (played.ask([user("q")], [LOOK]) for _ in range(2))
    assert one["tool_calls"][0]["id"] != two["tool_calls"][0]["id"]
    played.ask([user("q"), two, *answers(two)], [LOOK])
    played.ask([user("q"), one, *answers(one)], [LOOK])
    assert played.shape()[0] == [(0, None), (1, None), (1, 1), (0, 0)]


def test_what_differs_in_more_than_words_is_another_message():
    said = {"role": "assistant", "content": "yes"}
    assert identity(said) != identity({**said, "content": "no"})
    assert identity(user("yes")) != identity(said)
    assert identity(user(" yes")) != identity(user("yes"))
    calls = read_messages(
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
            }
            for arguments in ('{"a": 1}', '{"a": 2}', '{"a": "1"}', "")
        ]
    )
    assert len({repr(identity(message)) for message in calls}) == 4
