"""Teachers: a server with vLLM's prompt log-probs, and the checks before a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web
from samples_for_tests import sample_of
from transformers import AutoTokenizer, PreTrainedModel
from web_servers import in_thread, listening

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, InferenceError
from agentrl.inference.token_api import COMPLETIONS
from agentrl.model.load import load_model
from agentrl.model.logprobs import sample_logprobs
from agentrl.model.rows import pack
from agentrl.train.teacher import TeacherServer, make_teacher

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


@dataclass
class PromptServer:
    """Answers as vLLM does to `prompt_logprobs: 0`, from plain forward passes of a real model."""

    model: PreTrainedModel
    tokenizer: object
    faults: list[str] = field(default_factory=list)
    """Each is consumed by one request."""
    bodies: list[dict] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    """Of answers to SGLang's question, each used once."""

    async def model_info(self, request: web.Request) -> web.Response:
        return web.Response(status=self.statuses.pop(0) if self.statuses else 404)

    async def tokenize(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        ids = self.tokenizer.encode(
            body["prompt"], add_special_tokens=body.get("add_special_tokens", True)
        )
        return web.json_response({"count": len(ids), "max_model_len": 4096, "tokens": ids})

    async def complete(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        fault = self.faults.pop(0) if self.faults else None
        if fault in ("429", "500", "400"):
            return web.json_response({"error": {"message": "no room"}}, status=int(fault))
        if fault == "reset":
            request.transport.abort()
            return web.Response()
        ids = body["prompt"]
        with torch.no_grad():
            table = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        entries: list[dict | None] = [None]
        for position in range(1, len(ids)):
            token, logprob = ids[position], float(table[position - 1, ids[position]])
            entries.append({str(token): {"logprob": logprob, "rank": 1, "decoded_token": "x"}})
        if fault == "short":
            entries.pop()
        if fault == "other":
            entries[-1] = {"0": {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}
        choice = {"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": entries}
        if fault == "none":
            choice["prompt_logprobs"] = None
        return web.json_response({"id": "cmpl", "choices": [choice]})


@contextmanager
def running(server: PromptServer) -> Iterator[str]:
    """Serve in a thread of its own, because the client blocks; yields the address."""
    app = web.Application()
    app.router.add_post("/tokenize", server.tokenize)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/model_info", server.model_info)
    with in_thread(listening(app)) as url:
        yield url


@pytest.fixture(scope="module")
def model():
    return load_model(str(MODEL), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


SAMPLES = [sample_of([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 0, 1]), sample_of([11, 12, 13], [0, 0, 1])]


def test_a_server_gives_what_the_local_model_would(model, tokenizer):
    server = PromptServer(model, tokenizer, faults=["429", "500", "reset"])
    with running(server) as url:
        teacher = TeacherServer(url + "/", model="big", token="secret")
        asyncio.run(teacher.require_tokenizer(tokenizer))
        logprobs = teacher.logprobs(SAMPLES)
    local, _ = sample_logprobs(model, pack(SAMPLES, [0, 1]), temperature=1.0)
    local = local.detach()
    expected = torch.tensor([[*local[:3]], [local[3], 0, 0]])
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    assert not server.faults
    assert set(server.keys) == {"Bearer secret"}
    for body in server.bodies:
        assert body["model"] == "big" and body["prompt_logprobs"] == 0 and body["max_tokens"] == 1
        assert body["prompt"] in [sample.token_ids.tolist() for sample in SAMPLES]


def test_a_server_that_is_still_loading_is_asked_again_which_it_is(model, tokenizer):
    server = PromptServer(model, tokenizer, statuses=[503, 404])
    with running(server) as url:
        teacher = TeacherServer(url, model="big")
        for known in (None, COMPLETIONS):
            teacher.logprobs(SAMPLES[:1])
            assert teacher._endpoint == known


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (["400"], "status 400: .*no room"),
        (["short"], "6 prompt tokens came back with log-probabilities of 5"),
        (["none"], "log-probabilities of 0; is it a vLLM or SGLang server"),
        (["other"], "no log-probability of token 10 at position 5"),
        (["500"] * 5, "status 500.*tried 5 times"),
    ],
)
def test_answers_that_break_the_contract_are_errors(model, tokenizer, faults, reason, monkeypatch):
    monkeypatch.setattr("agentrl.train.teacher.FIRST_PAUSE_S", 0.001)
    server = PromptServer(model, tokenizer, faults=list(faults))
    with running(server) as url, pytest.raises(InferenceError, match=reason):
        TeacherServer(url, model="big").logprobs(SAMPLES[:1])
    assert len(server.bodies) == len(faults)


async def made(tokenizer, **section):
    config = RunConfig.model_validate(
        {
            "model": {"path": str(MODEL), "device": "cpu"},
            "teacher": section,
            "objective": {"preset": "opd"},
        }
    )
    return await make_teacher(config, tokenizer)


async def test_another_tokenizer_is_refused_before_the_run(model, tokenizer, tmp_path):
    other = AutoTokenizer.from_pretrained(MODEL)
    other.add_tokens(["don't"])
    with (
        running(PromptServer(model, other)) as url,
        pytest.raises(ConfigError, match="another tokenizer than the policy"),
    ):
        await made(tokenizer, url=url)
    model.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"teacher.path = .* has another tokenizer"):
        await made(tokenizer, path=str(tmp_path))


async def test_a_server_that_is_not_there_is_a_configuration_error(tokenizer, monkeypatch):
    monkeypatch.setattr("agentrl.train.teacher.FIRST_PAUSE_S", 0.001)
    with pytest.raises(ConfigError, match=r"teacher.url does not answer .*127.0.0.1:9/tokenize"):
        await made(tokenizer, url="http://127.0.0.1:9")


async def test_a_local_teacher_is_frozen(tokenizer):
    teacher = await made(tokenizer, path=str(MODEL))
    assert isinstance(teacher, PreTrainedModel)
    assert not any(p.requires_grad for p in teacher.parameters())


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"objective": {"preset": "opd"}}, "set teacher.path to a model with the policy's tok"),
        ({"objective": {"preset": "opd"}, "teacher": {"path": "a", "url": "b"}},
         "teacher.url to a server with such a model, not both"),
        ({"teacher": {"path": "a"}}, "teacher.path is set, but the objective does not use"),
        ({"objective": {"preset": "opd"}, "teacher": {"url": "b"}, "rollout": {"temperature": 0.7}},
         "rollout.temperature = 0.7; set it to 1, or load the teacher"),
    ],
)  # fmt: skip
def test_a_run_file_that_cannot_work_is_refused(sections, reason):
    with pytest.raises(ValueError, match=reason):
        RunConfig.model_validate({"model": {"path": "m"}} | sections)


def test_the_token_is_not_written_out():
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "objective": {"preset": "opd"},
            "teacher": {"url": "http://t", "token": "s3cret"},
        }
    )
    assert "s3cret" not in config.to_toml() + repr(config) + json.dumps(config.to_json())


def test_rows_without_a_trained_token_at_the_end_stay_aligned(model, tokenizer):
    sample = sample_of([5, 6, 7, 8], [0, 1, 0, 0])
    with running(PromptServer(model, tokenizer)) as url:
        logprobs = TeacherServer(url, model="m").logprobs([sample])
    local, _ = sample_logprobs(model, pack([sample], [0]), temperature=1.0)
    np.testing.assert_allclose(logprobs.numpy(), local.detach().numpy()[None], atol=1e-5)
