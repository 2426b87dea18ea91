"""Small OpenAI-compatible chat servers: over a real model, and scripted."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer
from web_servers import in_thread, listening


@contextmanager
def chat_server(
    model_path: str, *, parse_tool_calls: bool, bodies: list[dict] | None = None
) -> Iterator[str]:
    """Serve `/v1/chat/completions` on a free port; yields the base URL.

    With `parse_tool_calls` the calls come as OpenAI's `tool_calls`, as from a server with a tool
    parser; otherwise they stay in the text. Requests are appended to `bodies`.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    def complete(body: dict) -> dict:
        for message in body["messages"]:
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True, tokenize=False
        )
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        sampled = body.get("temperature", 1.0) > 0
        if bodies is not None:
            bodies.append(body)
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=body["max_tokens"], do_sample=sampled)
        new = out[0, ids.shape[1] :].tolist()
        stopped = new[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(new[:-1] if stopped else new)
        message: dict = {"role": "assistant", "content": text}
        if parse_tool_calls and text.startswith("<tool_call>") and text.endswith("</tool_call>"):
            call = json.loads(text[len("<tool_call>") : -len("</tool_call>")])
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            message["content"] = None
            message["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
        return _answer(body, message, "stop" if stopped else "length", ids.shape[1], len(new))

    with _serving(complete) as url:
        yield url


@contextmanager
def scripted_chat(say: Callable[[dict], dict], bodies: list[dict]) -> Iterator[str]:
    """Serve what `say` makes of a request's body, an assistant's content and calls; yields the base
    URL. Requests are appended to `bodies`."""

    def complete(body: dict) -> dict:
        bodies.append(body)
        message = {"role": "assistant", **say(body)}
        return _answer(body, message, "tool_calls" if "tool_calls" in message else "stop", 5, 9)

    with _serving(complete) as url:
        yield url


def _answer(body: dict, message: dict, finish: str, prompt_tokens: int, new_tokens: int) -> dict:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": usage | {"total_tokens": prompt_tokens + new_tokens},
    }


@contextmanager
def _serving(complete: Callable[[dict], dict]) -> Iterator[str]:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(complete, await request.json()))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    with in_thread(listening(app)) as url:
        yield url
