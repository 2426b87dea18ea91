"""A small OpenAI-compatible chat server over a real model, for tests of evaluation by chat."""

import asyncio
import json
from collections.abc import Iterator
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
        choice = {"index": 0, "message": message}
        choice["finish_reason"] = "stop" if stopped else "length"
        return {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
            "usage": {
                "prompt_tokens": ids.shape[1],
                "completion_tokens": len(new),
                "total_tokens": ids.shape[1] + len(new),
            },
        }

    async def handle(request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(complete, await request.json()))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    with in_thread(listening(app)) as url:
        yield url
