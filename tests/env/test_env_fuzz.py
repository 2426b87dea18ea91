"""Fuzz of a real server process by its own OpenAPI document.

What must never happen: a 5xx, an answer that the document does not declare, no answer at all.
"""

from collections import Counter
from pathlib import Path

import httpx
import pytest
import schemathesis
from env_servers import in_process_of_its_own
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
)
TOKEN = "fuzz-token"
TIMEOUT_S = 15.0
QUIET = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}


@pytest.fixture(scope="module")
def server():
    """URL of the process, which must live to the end."""
    program = str(Path(__file__).with_name("fuzz_server.py"))
    with in_process_of_its_own(program, TOKEN) as (process, url):
        yield url
        assert process.poll() is None, "the server died"


@pytest.fixture(scope="module")
def session(server):
    """A session that is there, so that calls get further than `not_found`."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    body = {"env": "steady", "task": {"split": "train", "index": 0}, "lease_s": 3600}
    return httpx.post(f"{server}/v1/sessions", json=body, headers=headers).json()["sessions"][0]


# HTTP


def fill_in(case, session):
    """Put in what is there, which chance would not find, so that calls get further than 404."""
    there = {"session_id": session["id"], "env_id": "steady"}
    if case.method != "DELETE":
        for name in case.path_parameters.keys() & there.keys():
            case.path_parameters[name] = there[name]
    if isinstance(case.body, dict) and isinstance(case.body.get("timeout_s"), int | float):
        case.body["timeout_s"] = 10.0  # less may pass, and 504 is the right answer then
    if case.path == "/v1/envs/{env_id}/tasks" and case.query:
        case.query["split"] = "test"
    if isinstance(case.body, dict) and case.path == "/v1/sessions":
        case.body |= {"env": "steady", "task": {"split": "train", "index": 0}}
        case.body |= {"config": {}, "count": 1}
    elif isinstance(case.body, dict) and case.path == "/reset":
        case.body |= {"env": "steady", "split": "train", "index": 0, "task": None, "config": {}}
    elif isinstance(case.body, dict) and case.path == "/step":
        case.body["session"] = session["id"]


def attack(server, session, num_examples):
    """Call every operation of the document with good and bad data; the answers by status."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    schema = schemathesis.openapi.from_url(f"{server}/openapi.json", headers=headers)
    schema.config.update(base_url=server)
    statuses: Counter[int] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        can_be_wrong = operation.body or operation.query  # any text is an id in a path
        for mode in schemathesis.GenerationMode:
            if mode.is_negative and not can_be_wrong:
                continue
            # Chance alone would open no session in some of few draws.
            opens = mode.is_positive and operation.path == "/v1/sessions"
            knows = st.just(True) if opens else st.booleans()

            @settings(max_examples=num_examples, **QUIET)
            @given(case=operation.as_strategy(generation_mode=mode), known=knows)
            def call(case, known):
                if known:
                    fill_in(case, session)
                response = case.call(headers=headers, timeout=TIMEOUT_S)
                statuses[response.status_code] += 1
                case.validate_response(response, checks=CHECKS)

            call()
    assert httpx.get(f"{server}/healthz").status_code == 200
    return statuses


def test_http_as_the_document_describes_it(server, session):
    statuses = attack(server, session, 8)
    assert statuses[200] > 20 and statuses[201] and statuses[422] > 20, statuses


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_http_as_the_document_describes_it_for_long(server, session):
    print(dict(attack(server, session, 40)))
