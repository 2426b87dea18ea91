"""Reward models and judges behind HTTP: retries, a cache, and failures that are typed."""

import asyncio
import contextlib
import json

import pytest
from aiohttp import web
from web_servers import listening

from agentrl.errors import ConfigError, GraderError
from agentrl_rewards.judge import llm_judge, rubric
from agentrl_rewards.remote import remote_rm


@contextlib.asynccontextmanager
async def serving(handler):
    """Yields the address of a real server that answers POST with `handler(body, number)`, and the
    bodies that it was sent."""
    bodies = []

    async def handle(request):
        bodies.append(await request.json())
        answer = handler(bodies[-1], len(bodies))
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    async with listening(app) as url:
        yield url, bodies


@pytest.mark.parametrize("answer", [0.5, {"reward": 0.5}])
async def test_one_at_a_time(answer):
    async with serving(lambda body, n: answer) as (url, bodies):
        assert await remote_rm("text", ["gold"], url=url, prompt="ask") == 0.5
    assert bodies == [{"prompt": "ask", "response": "text", "label": ["gold"]}]


def busy(body, number):
    return web.Response(status=503, headers={"Retry-After": "0"})


async def test_retries_end_in_an_answer_or_a_grader_error():
    async with serving(lambda body, n: busy(body, n) if n < 3 else 1.0) as (url, bodies):
        assert await remote_rm("t", url=url) == 1.0 and len(bodies) == 3
    async with serving(busy) as (url, bodies):
        with pytest.raises(GraderError):
            await remote_rm("t", url=url, num_attempts=2)
    assert len(bodies) == 2
    async with serving(lambda body, n: web.Response(status=400)) as (url, bodies):
        with pytest.raises(GraderError):
            await remote_rm("t", url=url)
    assert len(bodies) == 1
    with pytest.raises(GraderError):
        await remote_rm("t", url="http://127.0.0.1:1", num_attempts=1)


async def test_a_server_that_never_answers():
    async def ignore(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        with pytest.raises(GraderError):
            await remote_rm("t", url=url, timeout_s=0.2, num_attempts=1)


@pytest.mark.parametrize("answer", [None, True, "1", {"score": 1}, [1], "nan"])
async def test_nonsense_is_a_grader_error(answer):
    async with serving(lambda body, n: answer) as (url, _):
        with pytest.raises(GraderError):
            await remote_rm("t", url=url)


def saying(text, **choice):
    """A judge that says this whatever it is asked."""
    message = {"role": "assistant", "content": text}
    return serving(lambda body, n: {"choices": [{"message": message, **choice}]})


async def test_the_judge_is_asked_once(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "key")
    options = {"model": "m", "prompt": "ask {x}", "api_key_variable": "JUDGE_KEY"}
    async with saying("Score: 10 no\n**Score:** 1") as (url, bodies):
        for text in ("text {y}", "text {y}", "other"):
            assert await llm_judge(text, "gold", url=f"{url}/v1", **options) == 0.1
    assert len(bodies) == 2
    question = bodies[0]["messages"][1]["content"]
    assert "ask {x}" in question and "gold" in question and "text {y}" in question
    fence = question.split("<answer-")[1].split(">")[0]
    assert f"</answer-{fence}>" in bodies[0]["messages"][0]["content"]
    assert "key" not in json.dumps(bodies).replace("JUDGE_KEY", "")


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ([{"role": "user", "content": "why?"}], "Question:\nwhy?\n"),
        (
            [{"role": "system", "content": "be short"}, {"role": "user", "content": "why?"}],
            "Question:\n[system]\nbe short\n\n[user]\nwhy?\n",
        ),
    ],
)
async def test_the_judge_reads_a_chat_as_text(prompt, shown):
    async with saying("Score: 5") as (url, bodies):
        assert await llm_judge("text", "gold", url=url, model="m", prompt=prompt) == 0.5
    assert bodies[0]["messages"][1]["content"].startswith(shown)


UNREADABLE = ["Score: 1e999", "Score: 1x", "Score: 3 or 9", "Score: 5/7", "Score:", "Score: NaN"]


@pytest.mark.parametrize("reply", [*UNREADABLE, "no score", "Score: 11", "Score: -1", "", None])
async def test_a_judge_without_a_score_is_no_zero_and_not_cached(reply):
    async with saying(reply) as (url, bodies):
        for _ in range(2):
            with pytest.raises(GraderError):
                await llm_judge("text", "gold", url=url, model="m")
    assert len(bodies) == 2


@pytest.mark.parametrize(
    ("reply", "score"),
    [("Score: 7", 0.7), ("Score: 7/10", 0.7), ("**Score: 7.**", 0.7), ("`Score: 7.5`", 0.75)],
)
async def test_how_a_score_may_be_written(reply, score):
    async with saying(reply) as (url, _):
        assert await llm_judge(f"text {reply}", url=url, model="m") == score


@pytest.mark.parametrize("reason", ["length", "content_filter"])
async def test_a_reply_that_was_cut_short_has_no_score(reason):
    async with saying("Score: 1", finish_reason=reason) as (url, _):
        with pytest.raises(GraderError):
            await llm_judge("text", f"cut by {reason}", url=url, model="m")


ITEMS = {"right": {"criterion": "The result is right.", "weight": 3}, "brief": "It is brief."}


async def test_a_rubric_is_judged_in_one_call():
    async with saying("right: 3? no.\n- **right**: 10\nbrief: 5/10") as (url, bodies):
        for _ in range(2):
            result = await rubric("text", "gold", items=ITEMS, url=url, model="m")
            assert result == {"score": 0.875, "right": 1.0, "brief": 0.5}
    assert len(bodies) == 1
    system = bodies[0]["messages"][0]["content"]
    assert "right: The result is right.\nbrief: It is brief.\n" in system and "{" not in system


@pytest.mark.parametrize("reply", ["right: 10", "right: 10\nbrief: 11", "right: 1e9\nbrief: 1"])
async def test_a_rubric_with_a_missing_item_is_no_zero(reply):
    async with saying(reply) as (url, _):
        with pytest.raises(GraderError):
            await rubric(f"text {reply}", items=ITEMS, url=url, model="m")


@pytest.mark.parametrize(
    "items",
    [
        {},
        {"two words": "x"},
        {"score": "x"},
        {"a": {"weight": 1}},
        {"a": {"criterion": "x", "wieght": 1}},
        {"a": {"criterion": "x", "weight": 0}},
        {"a": {"criterion": "x", "weight": "2"}},
    ],
)
async def test_a_wrong_rubric_is_refused(items):
    with pytest.raises(ConfigError, match="rubric"):
        await rubric("t", items=items, url="http://127.0.0.1:1", model="m")


async def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        await llm_judge("t", url="http://127.0.0.1:1", model="m", api_key_variable="NO_SUCH_KEY")


@pytest.mark.parametrize("bad", ["\ud800", 10**25])
async def test_an_item_that_cannot_be_sent_is_named(bad):
    with pytest.raises(GraderError):
        await remote_rm("x", bad, url="http://127.0.0.1:1")
