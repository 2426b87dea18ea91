"""Reward models and judges behind HTTP: batches, retries, caches, and failures that are typed."""

import asyncio
import json

import pytest
from aiohttp import web

from agentrl.errors import ConfigError, GraderError
from agentrl_rewards import judge
from agentrl_rewards.judge import llm_judge, rubric
from agentrl_rewards.remote import remote_rm


def serve(handler, use):
    """Run `use(url)` against a real server that answers POST with `handler(body, number)`."""
    bodies = []

    async def handle(request):
        bodies.append(await request.json())
        answer = handler(bodies[-1], len(bodies))
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    async def main():
        app = web.Application()
        app.router.add_post("/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            return await use(f"http://127.0.0.1:{port}")
        finally:
            await runner.cleanup()

    return asyncio.run(main()), bodies


@pytest.mark.parametrize("answer", [0.5, {"reward": 0.5}])
def test_one_at_a_time(answer):
    result, bodies = serve(
        lambda body, n: answer, lambda url: remote_rm("text", ["gold"], url=url, prompt="ask")
    )
    assert result == 0.5
    assert bodies == [{"prompt": "ask", "response": "text", "label": ["gold"]}]


@pytest.mark.parametrize("wrap", [list, lambda rewards: {"rewards": rewards}])
def test_calls_that_come_together_travel_together(wrap):
    async def use(url):
        return await asyncio.gather(*(remote_rm("x" * n, url=url, batch_size=4) for n in range(10)))

    result, bodies = serve(lambda body, n: wrap([len(i["response"]) for i in body]), use)
    assert result == list(range(10))
    assert [len(body) for body in bodies] == [4, 4, 2]


def test_retries_end_in_an_answer_or_a_grader_error():
    busy = lambda: web.Response(status=503, headers={"Retry-After": "0"})  # noqa: E731
    result, bodies = serve(
        lambda body, n: busy() if n < 3 else 1.0, lambda url: remote_rm("t", url=url)
    )
    assert result == 1.0 and len(bodies) == 3

    async def fails(url):
        with pytest.raises(GraderError, match="HTTP 503"):
            await remote_rm("t", url=url, num_attempts=2)

    assert len(serve(lambda body, n: busy(), fails)[1]) == 2

    async def refused(url):
        with pytest.raises(GraderError, match="HTTP 400"):
            await remote_rm("t", url=url)

    assert len(serve(lambda body, n: web.Response(status=400), refused)[1]) == 1

    async def unreachable():
        with pytest.raises(GraderError, match="is the server up"):
            await remote_rm("t", url="http://127.0.0.1:1", num_attempts=1)

    asyncio.run(unreachable())


def test_a_server_that_never_answers():
    async def use(url):
        with pytest.raises(GraderError, match=r"no answer within 0\.2 s"):
            await remote_rm("t", url=url, timeout_s=0.2, num_attempts=1)

    async def main():
        async def ignore(reader, writer):
            await reader.read()
            writer.close()

        server = await asyncio.start_server(ignore, "127.0.0.1", 0)
        async with server:
            await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    asyncio.run(main())


@pytest.mark.parametrize("answer", [None, True, "1", {"score": 1}, [1], "nan"])
def test_nonsense_is_a_grader_error(answer):
    async def use(url):
        with pytest.raises(GraderError):
            await remote_rm("t", url=url)
        with pytest.raises(GraderError):
            await asyncio.gather(*(remote_rm("t", url=url, batch_size=2) for _ in range(2)))

    serve(lambda body, n: answer, use)


def test_one_bad_value_of_a_batch_fails_alone():
    async def use(url):
        return await asyncio.gather(
            *(remote_rm("t", url=url, batch_size=3) for _ in range(3)), return_exceptions=True
        )

    result, _ = serve(lambda body, n: [1.0, None, 0.5], use)
    assert (result[0], result[2]) == (1.0, 0.5) and isinstance(result[1], GraderError)


def completion(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_judge_is_asked_once(on_disk, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "key")
    judge._memory.clear()
    options = {"model": "m", "prompt": "ask {x}", "api_key_variable": "JUDGE_KEY"}
    options["cache_dir"] = tmp_path if on_disk else None

    async def use(url):
        first = await llm_judge("text {y}", "gold", url=f"{url}/v1", **options)
        again = await llm_judge("text {y}", "gold", url=f"{url}/v1", **options)
        other = await llm_judge("other", "gold", url=f"{url}/v1", **options)
        return first, again, other

    result, bodies = serve(lambda body, n: completion(f"Score: 10 no\n**Score:** {n}"), use)
    assert result == (0.1, 0.1, 0.2)
    assert len(bodies) == 2
    question = bodies[0]["messages"][1]["content"]
    assert "ask {x}" in question and "gold" in question and "text {y}" in question
    fence = question.split("<answer-")[1].split(">")[0]
    assert f"</answer-{fence}>" in bodies[0]["messages"][0]["content"]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2 * on_disk
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
def test_the_judge_reads_a_chat_as_text(prompt, shown):
    async def use(url):
        return await llm_judge("text", "gold", url=url, model="m", prompt=prompt)

    result, bodies = serve(lambda body, n: completion("Score: 5"), use)
    assert result == 0.5
    assert bodies[0]["messages"][1]["content"].startswith(shown)


UNREADABLE = ["Score: 1e999", "Score: 1x", "Score: 3 or 9", "Score: 5/7", "Score:", "Score: NaN"]


@pytest.mark.parametrize("reply", [*UNREADABLE, "no score", "Score: 11", "Score: -1", "", None])
def test_a_judge_without_a_score_is_no_zero_and_not_cached(reply, tmp_path):
    async def use(url):
        for _ in range(2):
            with pytest.raises(GraderError):
                await llm_judge("text", "gold", url=url, model="m", cache_dir=tmp_path)

    assert len(serve(lambda body, n: completion(reply), use)[1]) == 2


@pytest.mark.parametrize(
    ("reply", "score"),
    [("Score: 7", 0.7), ("Score: 7/10", 0.7), ("**Score: 7.**", 0.7), ("`Score: 7.5`", 0.75)],
)
def test_how_a_score_may_be_written(reply, score):
    async def use(url):
        return await llm_judge(f"text {reply}", url=url, model="m")

    assert serve(lambda body, n: completion(reply), use)[0] == score


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_a_reply_that_was_cut_short_has_no_score(reason):
    reply = {"choices": [{"message": {"content": "Score: 1"}, "finish_reason": reason}]}

    async def use(url):
        with pytest.raises(GraderError, match=reason):
            await llm_judge("text", f"cut by {reason}", url=url, model="m")

    serve(lambda body, n: reply, use)


ITEMS = {"right": {"criterion": "The result is right.", "weight": 3}, "brief": "It is brief."}


def test_a_rubric_is_judged_in_one_call():
    async def use(url):
        options = {"items": ITEMS, "url": url, "model": "m"}
        return await rubric("text", "gold", **options), await rubric("text", "gold", **options)

    judge._memory.clear()
    reply = "right: 3? no.\n- **right**: 10\nbrief: 5/10"
    result, bodies = serve(lambda body, n: completion(reply), use)
    assert result == ({"score": 0.875, "right": 1.0, "brief": 0.5},) * 2
    assert len(bodies) == 1
    system = bodies[0]["messages"][0]["content"]
    assert "right: The result is right.\nbrief: It is brief.\n" in system and "{" not in system


@pytest.mark.parametrize("reply", ["right: 10", "right: 10\nbrief: 11", "right: 1e9\nbrief: 1"])
def test_a_rubric_with_a_missing_item_is_no_zero(reply):
    async def use(url):
        with pytest.raises(GraderError):
            await rubric(f"text {reply}", items=ITEMS, url=url, model="m")

    serve(lambda body, n: completion(reply), use)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({}, "items is empty"),
        ({"two words": "x"}, "one word"),
        ({"score": "x"}, "`score`"),
        ({"a": {"weight": 1}}, "needs a string `criterion`"),
        ({"a": {"criterion": "x", "wieght": 1}}, "no other key"),
        ({"a": {"criterion": "x", "weight": 0}}, "positive number"),
        ({"a": {"criterion": "x", "weight": "2"}}, "positive number"),
    ],
)
def test_a_wrong_rubric_is_named(items, message):
    with pytest.raises(ConfigError, match=message):
        asyncio.run(rubric("t", items=items, url="http://127.0.0.1:1", model="m"))


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        asyncio.run(
            llm_judge("t", url="http://127.0.0.1:1", model="m", api_key_variable="NO_SUCH_KEY")
        )


@pytest.mark.parametrize("bad", ["\ud800", 10**25])
def test_an_item_that_cannot_be_sent_fails_alone(bad):
    async def use(url):
        references = ["gold"] * 3 + [bad] + ["gold"] * 4
        calls = [remote_rm("x", gold, url=url, batch_size=8) for gold in references]
        return await asyncio.gather(*calls, return_exceptions=True)

    result, bodies = serve(lambda body, n: [1.0] * len(body), use)
    assert [r for r in result if not isinstance(r, GraderError)] == [1.0] * 7
    assert isinstance(result[3], GraderError) and "can't be sent" in str(result[3])
    assert [len(body) for body in bodies] == [7]


@pytest.mark.parametrize("left", [b"", b"cut sh", b"\xff\xfe"])
def test_a_broken_cache_file_is_asked_for_again(tmp_path, left):
    async def use(url):
        options = {"url": url, "model": "m", "cache_dir": tmp_path}
        first = await llm_judge("text", "gold", **options)
        (path,) = tmp_path.glob("*/*")
        path.write_bytes(left)
        return [first, await llm_judge("text", "gold", **options)]

    reply = {"choices": [{"message": {"content": "Score: 5"}}]}
    result, bodies = serve(lambda body, n: reply, use)
    assert result == [0.5, 0.5] and len(bodies) == 2
