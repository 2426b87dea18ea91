"""Writes `report.html`: the pages of `agentrl view` with part of a run, in one file that opens
anywhere, offline.

It contains the server's answers for the links that it keeps: curves, diagnosis, and groups of the
first and the last step, the best, the worst, and each finding's examples. Its content security
policy allows exactly its one script and one style sheet, by their hashes, and no network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from agentrl.errors import DataError
from agentrl.images import IMAGES_FOLDER, ImageStore
from agentrl.runtime import write_whole
from agentrl.view import trajectory
from agentrl.view.diagnosis import diagnose
from agentrl.view.escape import plain
from agentrl.view.groups import Query, find_groups
from agentrl.view.runs import RunFiles
from agentrl.view.server import PAGES, SCRIPTS, STYLE, skeleton

GROUPS_OF_LINK = 6
WHOLE_GROUPS_OF_LINK = 2
"""Of these all trajectories are kept."""
MAX_BYTES = 4_000_000
"""Of kept trajectories, and again of their images; what comes later is left to `agentrl view`."""
TOKENS_IN_WINDOW = 1024
"""What trajectory.js asks for first."""


def report_run(run_dir: str | Path) -> Path:
    """Writes `run_dir/report.html` from the files of the run, atomically.

    Raises:
        DataError: there are no metrics, or a file is damaged.
    """
    folder = Path(run_dir)
    path = folder / "report.html"
    write_whole(path, report_html(_run(folder)).encode())
    return path


def report_text(run_dir: str | Path) -> str:
    """Returns the diagnosis for a terminal: its first sentence, then the findings in order.

    Raises:
        DataError: there are no metrics, or a file is damaged.
    """
    diagnosis = diagnose(_run(run_dir))
    lines = [diagnosis["sentence"]]
    for rule in diagnosis["rules"]:
        if rule["state"] == "found":
            since = " (since the reward fell)" if rule["follows"] else ""
            lines.append(f"* not so: {rule['title']}{since}. {_capital(rule['text'])}.")
            lines.append(f"  {_capital(rule['fix'])}. {rule['why']}")
    counts = Counter(rule["state"] for rule in diagnosis["rules"])
    lines.append(f"{counts['clear']} rules hold, {counts['unknown']} cannot be told")
    return plain("\n".join(lines))


def first_sentence(run_dir: str | Path) -> str:
    """Returns the first sentence of the diagnosis.

    Raises:
        DataError: a file is damaged.
    """
    return plain(diagnose(RunFiles(Path(run_dir)))["sentence"])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _run(run_dir: str | Path) -> RunFiles:
    folder = Path(run_dir)
    if not (folder / "metrics.jsonl").exists():
        raise DataError(f"{folder}/metrics.jsonl does not exist: is {folder} a run directory?")
    return RunFiles(folder)


def report_html(run: RunFiles) -> str:
    """Returns the page with all the answers that its scripts can request."""
    style = (PAGES / STYLE).read_text(encoding="utf-8")
    script = "".join((PAGES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = (
        f"default-src 'none'; style-src '{_csp_hash(style)}'; script-src '{_csp_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # No "<" that could end the element; a lone surrogate has no encoding but its escape.
    stored = json.dumps(_answers(run), allow_nan=False, separators=(",", ":"))
    stored = stored.replace("<", "\\u003c")
    return skeleton(
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="referrer" content="no-referrer"><style>{style}</style>',
        title=html.escape(plain(run.path.name)),
        body=f'<script type="application/json" id="stored">{stored}</script>'
        f"<script>{script}</script>",
    )


def _answers(run: RunFiles) -> dict[str, Any]:
    """Returns the answers to the pages' requests, by URL."""
    base = f"api/runs/{run.id}"
    diagnosis = diagnose(run)
    links = _links(run, diagnosis)
    stored: dict[str, Any] = {
        "run": run.id,
        "groups": [[text, query] for text, query in links if query],
        "api/runs": [run.summary()],
        base: run.details(),
        f"{base}/metrics": run.curves(),
        f"{base}/meanings": run.meanings(),
        f"{base}/diagnosis": diagnosis,
    }
    decode, cache, kept = run.decode(), trajectory.Cache(), 0
    images: dict[str, None] = {}
    for _, query in links:
        found = find_groups(run, Query(**query, limit=GROUPS_OF_LINK))
        stored[f"{base}/groups{_asked(query)}"] = found
        members = [m for group in found["groups"][:WHOLE_GROUPS_OF_LINK] for m in group["members"]]
        for member in members:
            step, offset = member["step"], member["offset"]
            path = f"{base}/trajectories/{step}/{offset}"
            if path in stored or kept > MAX_BYTES:
                continue
            held = cache.get(run, step, offset)
            answers = {path: trajectory.describe(run, held, step, offset)}
            for row in range(len(held.rows)):
                said = trajectory.messages(held, row, 0)
                images |= dict.fromkeys(each for m in said["messages"] for each in m["images"])
                window = {"row": row, "start": 0, "count": TOKENS_IN_WINDOW}
                answers[f"{path}/messages?row={row}"] = said
                answers[f"{path}/tokens{_asked(window)}"] = trajectory.tokens(
                    held, decode, row, 0, TOKENS_IN_WINDOW
                )
            kept += len(json.dumps(answers))
            stored |= answers
    return stored | _urls(run, base, images)


def _urls(run: RunFiles, base: str, hashes: Iterable[str]) -> dict[str, str]:
    """Returns data URLs of images, by URL, as many as fit."""
    store, urls, kept = ImageStore(run.path / IMAGES_FOLDER), {}, 0
    for sha256 in hashes:
        try:
            data, media_type = store.read(sha256)
        except DataError:  # the page says that it is not here
            continue
        if kept + len(data) <= MAX_BYTES:
            kept += len(data)
            url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
            urls[f"{base}/images/{sha256}"] = url
    return urls


def _links(run: RunFiles, diagnosis: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns (title, query) for each page of groups that the report keeps."""
    links: list[tuple[str, dict[str, Any]]] = [("largest advantage", {})]
    steps = [entry.step for entry in run.entries()]
    if steps:
        links += [("first step", {"step": min(steps)}), ("last step", {"step": max(steps)})]
        links += [("worst", {"sort": "worst"}), ("best", {"sort": "best"})]
    found = [rule for rule in diagnosis["rules"] if rule["query"]]
    links += [(f"not so: {rule['title']}", rule["query"]) for rule in found]
    return links


def _asked(query: dict[str, Any]) -> str:
    return f"?{urlencode(query)}" if query else ""


def _csp_hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
