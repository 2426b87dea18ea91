import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from attacks import ATTACKS
from planted import plant

from agentrl.cli.main import main
from agentrl.errors import DataError
from agentrl.rollout import TrajectoryLog
from agentrl.types import StopReason, TokenRow, Trajectory, TrajectoryError, Turn
from agentrl.view.report import first_sentence, report_run
from agentrl.view.runs import RunFiles
from agentrl.view.tracking import MetricsWriter


class Tags(HTMLParser):
    """Collects the tags that a browser would act on."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, list[str]]] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, sorted(name for name, _ in attrs)))


def report_of(run_dir: Path) -> tuple[str, dict]:
    """The page, and the answers that it holds."""
    source = report_run(run_dir).read_text(encoding="utf-8")
    (stored,) = re.findall('id="stored">(.*?)</script>', source, re.DOTALL)
    return source, json.loads(stored)


def hostile(run_dir: Path, attack: str) -> Path:
    """A run whose task, dialogue, error, metric, component and configuration are `attack`."""
    row = TokenRow(messages=[{"role": attack, "content": attack, "name": attack}])
    row.append_context([1], 0)
    row.append_sampled([2], [-0.5], [0], 0)
    said = attack.encode("utf-8", "replace").decode()  # the log holds no lone surrogate
    row.messages = [{"role": said, "content": said, "tool_calls": [{said: [said]}]}]
    made = Trajectory(
        *("a", "g", said, said, 0, [row], [Turn(0, 1, 1, "stop", "text", message=0)]),
        reward=0.5,
        reward_components={said: 1.0},
        stop_reason=StopReason.ERROR,
        error=TrajectoryError("step", said, said),
    )
    TrajectoryLog(run_dir).append(1, [made])
    with MetricsWriter(run_dir) as writer:
        writer.write(1, {"reward/mean": 1.0, attack: 0.5})
    (run_dir / "config.toml").write_text(f"# {said}", encoding="utf-8")
    return run_dir


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_text_adds_no_tag_no_attribute_and_no_raw_control_character(tmp_path, attack):
    source, stored = report_of(hostile(tmp_path / "hostile", attack))
    plain, _ = report_of(hostile(tmp_path / "plain", "plain"))
    assert Tags(source).found == Tags(plain).found
    (key,) = stored[f"api/runs/{stored['run']}/metrics"]["series"].keys() - {"reward/mean"}
    assert key == attack, "it is there, as text"
    unsafe = set("\x00\x07\x1b\x9b\u202a\u202e\u2066\u2069\u200b\u200f\ufeff\U000e0041")
    assert not unsafe & set(re.sub('id="stored">.*?</script>', "", source)) - set("\n")
    assert stored and "</script" not in json.dumps(stored).replace("<", "\\u003c")


def test_its_policy_allows_its_own_script_and_style_only(tmp_path):
    source, _ = report_of(plant(tmp_path / "run"))
    (policy,) = re.findall('Content-Security-Policy" content="(.*?)"', source)
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", source, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    for _, attributes in Tags(source).found:
        assert not {"style", "src", "href"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]


def test_every_link_that_it_keeps_has_an_answer(tmp_path):
    run_dir = plant(tmp_path / "run", "malformed_calls")
    _, stored = report_of(run_dir)
    base = f"api/runs/{RunFiles(run_dir).id}"
    names = [name for name, _ in stored["groups"]]
    assert names == ["first step", "last step", "worst", "best", "not so: Tool calls can be read"]
    for _, query in stored["groups"]:
        asked = "&".join(f"{key}={value}" for key, value in query.items())
        groups = stored[f"{base}/groups?{asked}"]["groups"]
        for member in [m for group in groups[:2] for m in group["members"]]:
            path = f"{base}/trajectories/{member['step']}/{member['offset']}"
            assert stored[path]["trajectory_id"] == member["trajectory_id"]
            tokens = stored[f"{path}/tokens?row=0&start=0&count=1024"]
            assert len(tokens["ids"]) == len(tokens["logprobs"]) == tokens["num_tokens"]
            assert stored[f"{path}/messages?row=0"]["messages"]


def test_writing_is_atomic_and_needs_a_run(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"is .* a run directory"):
        report_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    path = report_run(tmp_path)
    before = path.read_bytes()

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError):
        report_run(tmp_path)
    assert path.read_bytes() == before


def test_long_messages_and_rows_are_kept_in_part(tmp_path):
    row = TokenRow(messages=[{"role": "user", "content": "x" * 50_000}])
    row.append_context([1] * 200_000, 0)
    row.append_sampled([2], [-0.5], [0], 0)
    made = Trajectory("a", "g", "e", "t", 0, [row], stop_reason=StopReason.TERMINATED)
    TrajectoryLog(tmp_path).append(1, [made])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    source, stored = report_of(tmp_path)
    path = f"api/runs/{stored['run']}/trajectories/1/0"
    (message,) = stored[f"{path}/messages?row=0"]["messages"]
    assert len(message["content"]) == len(message["content_end"]) == 10_000
    assert message["content_left_out"] == 30_000
    assert stored[f"{path}/tokens?row=0&start=0&count=1024"]["num_tokens"] == 200_001
    assert len(source) < 300_000


def test_the_terminal_gets_the_first_sentence_and_the_findings_in_order(tmp_path, capsys):
    run_dir = plant(tmp_path / "run", "too_far")
    assert main(["view", str(run_dir), "--report"]) == 0
    path, first, *others = capsys.readouterr().out.splitlines()
    assert path == str(run_dir / "report.html")
    assert first == first_sentence(run_dir) and "lower train.learning_rate" in first
    titles = [line for line in others if line.startswith("* not so: ")]
    assert titles[0].startswith("* not so: The policy moves in small steps.")
    assert any("since the reward fell" in line for line in titles[2:])
    assert (run_dir / "report.html").exists()
