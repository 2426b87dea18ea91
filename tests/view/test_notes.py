import json

import pytest
from planted import plant
from test_server import Client

from agentrl.errors import DataError
from agentrl.view.notes import NOTES_FILE, Notes, read_notes, write_notes
from agentrl.view.tracking import METRICS_FILE

JSON = {"content-type": "application/json"}


def test_what_is_written_is_read_and_a_run_without_notes_has_none(tmp_path):
    assert read_notes(tmp_path) == Notes()
    kept = write_notes(tmp_path, Notes([" slow ", "baseline", "", "slow"], " \n<b>Why?</b>\n"))
    assert kept == read_notes(tmp_path) == Notes(["baseline", "slow"], "<b>Why?</b>")
    assert [path.name for path in tmp_path.iterdir()] == [NOTES_FILE], "no file beside it"


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        (Notes(["x" * 41]), "up to 40 characters"),
        (Notes([str(i) for i in range(21)]), "takes 20 tags"),
        (Notes(note="x" * 20_001), "not 20001"),
        (Notes(note="\ud800"), "cannot be written"),
    ],
)
def test_what_is_too_long_or_has_no_encoding_is_refused(tmp_path, notes, said):
    with pytest.raises(DataError, match=said):
        write_notes(tmp_path, notes)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_named_and_not_written_over(tmp_path):
    run_dir = plant(tmp_path / "run", steps=2)
    (run_dir / NOTES_FILE).write_text('{"tags": "none"}')
    client = Client(tmp_path)
    (run,) = client.get("/api/runs")
    assert run["state"] == "finished" and run["tags"] == []
    (lack, *_) = client.get(f"/api/runs/{run['id']}")["lacks"]
    assert NOTES_FILE in lack and "correct it, or delete it" in lack
    answer = client.response(
        f"/api/runs/{run['id']}/notes", "PUT", headers=JSON, content='{"tags": ["a"]}'
    )
    assert answer.status_code == 404 and "cannot be read" in answer.json()["error"]
    assert (run_dir / NOTES_FILE).read_text() == '{"tags": "none"}'


def test_a_page_writes_tags_and_nothing_else_and_no_other_origin_does(tmp_path):
    run_dir = plant(tmp_path / "run", steps=2)
    before = (run_dir / METRICS_FILE).read_bytes()
    client = Client(tmp_path)
    path = f"/api/runs/{client.get('/api/runs')[0]['id']}/notes"
    sent = json.dumps({"tags": ["good"], "note": "as hoped"})
    plain = {"content-type": "text/plain"}
    for headers in (plain, {}, JSON | {"sec-fetch-site": "cross-site"}, JSON | {"host": "evil"}):
        assert client.response(path, "PUT", headers=headers, content=sent).status_code == 403
    long = json.dumps({"note": "x" * 300_000})
    assert client.response(path, "PUT", headers=JSON, content=long).status_code == 413
    for wrong in ("", "[1]", '{"tags": 3}', '{"note": null}'):
        answer = client.response(path, "PUT", headers=JSON, content=wrong)
        assert answer.status_code in (404, 413), wrong
    assert not (run_dir / NOTES_FILE).exists()
    answer = client.response(path, "PUT", headers=JSON, content=sent)
    assert answer.json() == {"tags": ["good"], "note": "as hoped"}
    (run,) = client.get("/api/runs")
    assert (run["tags"], run["note"]) == (["good"], "as hoped")
    assert (run_dir / METRICS_FILE).read_bytes() == before
    assert client.response("/api/runs", "PUT", headers=JSON, content=sent).status_code == 405
    locked = Client(tmp_path, token="sesame")
    assert locked.response(path, "PUT", headers=JSON, content=sent).status_code == 401
