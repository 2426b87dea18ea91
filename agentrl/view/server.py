"""`agentrl view`: a small application that reads run directories and writes nothing.

With `--play` it also plays on from a token of a trajectory, which runs the environments and loads
the models that the run directories name.

Pages are files beside this module, which request their data as JSON. Everything that a model or
an environment wrote is untrusted: it travels as JSON, is shown as text only, and the content
security policy allows nothing but this origin's own files.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from fastapi import FastAPI, Query, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse

from agentrl import runtime
from agentrl.env.server.access import names_loopback
from agentrl.env.server.serve import is_loopback, running
from agentrl.errors import AgentRLError, ConfigError, DataError
from agentrl.images import IMAGES_FOLDER, ImageStore
from agentrl.view import diagnosis, evaluations, groups, trajectory
from agentrl.view.forking import ForkRequest, Plays
from agentrl.view.runs import RunFiles, Runs

logger = logging.getLogger(__name__)

PAGES = Path(__file__).with_name("pages")
SCRIPTS = (
    "dom.js",
    "plot.js",
    "markdown.js",
    "runs.js",
    "run.js",
    "groups.js",
    "fork.js",
    "trajectory.js",
    "evaluations.js",
    "main.js",
)
"""In the order in which they are loaded."""
STYLE = "style.css"
COOKIE = "agentrl_view"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(
    paths: Sequence[Path], *, token: str | None = None, plays: Plays | None = None
) -> FastAPI:
    """Makes the application for the runs under `paths`.

    Args:
        token: the token that a browser must send once, as `/?token=...`; without one (None or
            empty) the application answers requests for loopback hosts only.
        plays: plays forks; without it every request that is no reading is refused.
    """
    token = token or None
    app = FastAPI(title="agentrl view", openapi_url=None)
    runs, cache = Runs(paths), trajectory.Cache()

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        response = _refused(request, token, plays is not None) or await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(DataError)
    def no_data(request: Request, error: DataError) -> Response:
        return _json({"error": str(error)}, 404)

    @app.exception_handler(Exception)
    def a_bug(request: Request, error: Exception) -> Response:
        logger.error("%s", request.url, exc_info=error)
        return _json({"error": f"{type(error).__name__}; see the output of `agentrl view`"}, 500)

    @app.get("/")
    def page() -> Response:
        return Response(page_html(), media_type="text/html")

    @app.get("/pages/{name}")
    def file(name: str) -> Response:
        if name not in (*SCRIPTS, STYLE):
            raise DataError("no such file")
        kind = "text/css" if name == STYLE else "text/javascript"
        return Response((PAGES / name).read_bytes(), media_type=kind)

    @app.get("/api/runs")
    def list_runs() -> Response:
        return _json([_summary(run) for run in runs.all()])

    @app.get("/api/runs/{run}")
    def details(run: str) -> Response:
        return _json(runs.get(run).details())

    @app.get("/api/runs/{run}/metrics")
    def metrics(run: str, after: groups.Count = 0) -> Response:
        return _json(runs.get(run).curves(after))

    @app.get("/api/runs/{run}/diagnosis")
    def diagnose(run: str) -> Response:
        return _json(diagnosis.diagnose(runs.get(run)))

    @app.get("/api/runs/{run}/meanings")
    def meanings(run: str) -> Response:
        return _json(runs.get(run).meanings())

    @app.get("/api/tasks")
    def compare_tasks(first: str, second: str) -> Response:
        return _json(groups.compare_tasks(runs.get(first), runs.get(second)))

    @app.get("/api/evaluations")
    def list_evaluations() -> Response:
        return _json(evaluations.list_evaluations(runs.all()))

    @app.get("/api/evaluations/tasks")
    def matrix(
        asked: Annotated[str, Query(alias="runs")], show: str = "all", offset: groups.Count = 0
    ):
        chosen = [runs.get(each) for each in asked.split(",") if each]
        return _json(evaluations.matrix(chosen, show, offset))

    @app.get("/api/runs/{run}/groups")
    def find(run: str, query: Annotated[groups.Query, Query()]) -> Response:
        return _json(groups.find_groups(runs.get(run), query))

    @app.get("/api/runs/{run}/export")
    def export(run: str, query: Annotated[groups.Query, Query()]) -> Response:
        files = runs.get(run)
        query.picked()
        groups.find_groups(files, query)  # a wrong question is refused before the answer begins
        lines = trajectory.exported(files, groups.wanted_entries(files, query))
        named = {"Content-Disposition": "attachment; filename=trajectories.jsonl"}
        return StreamingResponse(lines, media_type="application/jsonl", headers=named)

    @app.get("/api/runs/{run}/trajectories/{step}/{offset}")
    def one(run: str, step: int, offset: int) -> Response:
        files = runs.get(run)
        held = cache.get(files, step, offset)
        newest = max((int(row["policy_versions"].max(initial=0)) for row in held.rows), default=0)
        players = plays.players(files.path, newest) if plays else []
        described = trajectory.describe(files, held, step, offset)
        return _json(described | {"players": players, "version": newest})

    @app.post("/api/runs/{run}/trajectories/{step}/{offset}/fork")
    async def fork(run: str, step: int, offset: int, asked: ForkRequest) -> Response:
        assert plays is not None, "refused above"
        try:
            return _json(await plays.play(runs.get(run).path, step, offset, asked))
        except AgentRLError as error:
            return _json({"error": str(error)}, 409)

    @app.get("/api/runs/{run}/trajectories/{step}/{offset}/messages")
    def messages(
        run: str, step: int, offset: int, row: int = 0, start: groups.Count = 0, whole: bool = False
    ) -> Response:
        held = cache.get(runs.get(run), step, offset)
        return _json(trajectory.messages(held, row, start, whole=whole))

    @app.get("/api/runs/{run}/trajectories/{step}/{offset}/tokens")
    def tokens(
        run: str,
        step: int,
        offset: int,
        row: int = 0,
        start: groups.Count = 0,
        count: groups.Count = 1024,
    ) -> Response:
        files = runs.get(run)
        held = cache.get(files, step, offset)
        return _json(trajectory.tokens(held, files.decode(), row, start, count))

    @app.get("/api/runs/{run}/steps/{step}/players")
    def players_of(run: str, step: int) -> Response:
        return _json(plays.players(runs.get(run).path, step) if plays else [])

    @app.post("/api/runs/{run}/steps/{step}/taught")
    async def taught(run: str, step: int, before: str, after: str) -> Response:
        assert plays is not None, "refused above"
        try:
            return _json(await plays.taught(runs.get(run).path, step, before, after))
        except AgentRLError as error:
            return _json({"error": str(error)}, 409)

    @app.get("/api/runs/{run}/images/{sha256}")
    def image(run: str, sha256: str) -> Response:
        data, media_type = ImageStore(runs.get(run).path / IMAGES_FOLDER).read(sha256)
        return Response(data, media_type=media_type)

    return app


def page_html() -> str:
    """Returns the only page; its scripts draw the view that the address names after `#`."""
    scripts = "".join(f'<script src="pages/{name}" defer></script>' for name in SCRIPTS)
    return skeleton(f'<link rel="stylesheet" href="pages/{STYLE}">{scripts}')


def skeleton(head: str, *, title: str = "agentrl view", body: str = "") -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n{head}\n</head>\n<body>{body}</body>\n</html>\n"
    )


def view_command(
    paths: Sequence[Path],
    *,
    host: str,
    port: int,
    token: str | None,
    plays: Plays | None = None,
) -> int:
    """Serves until interrupted, and returns the exit status.

    Raises:
        ConfigError: a path does not hold a run, the address is in use, or it is not on loopback
            and there is no token.
    """
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such directory; name a run directory, or one of several")
    if not token and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and a run shows everything it saw: give "
            f"--token (for example {secrets.token_urlsafe(12)}), or bind --host 127.0.0.1"
        )
    if not Runs(paths).all():
        print(f"no run under {', '.join(map(str, paths))} yet; one that begins will appear")

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with running(make_app(paths, token=token, plays=plays), host, port) as url:
            asked = f"?token={quote(token, '', errors='replace')}" if token else ""
            print(f"{url}/{asked}  (Ctrl-C stops it)", flush=True)
            await stop.wait()

    runtime.run(main())
    return 0


def _summary(run: RunFiles) -> dict[str, Any]:
    """Returns a run's row in the table; a damaged run gets a row with its error."""
    try:
        return run.summary()
    except DataError as error:
        unknown = dict.fromkeys(
            ("time", "num_steps", "env", "model", "preset", "reward", "held_out", "written")
        )
        about = {"id": run.id, "name": run.path.name, "path": str(run.path), "state": "damaged"}
        return unknown | about | {"message": str(error), "step": 0, "rewards": [], "tokens": 0}


def _refused(request: Request, token: str | None, plays: bool) -> Response | None:
    """Returns the error response to a request without access; None for all others.

    Refuses requests under another host's name (a page elsewhere may point its name here) and, if
    there is a token, requests without it. A request to play has to come from a page of this server;
    browsers send a header with the page's origin, which no script can set."""
    if request.method not in ("GET", "HEAD"):
        if not (plays and request.method == "POST"):
            return PlainTextResponse("this server only reads (agentrl view --play)", 405)
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return PlainTextResponse("only this server's own pages may play", 403)
    if token is None:
        if names_loopback(request.headers.get("host", "")):
            return None
        return PlainTextResponse("this server answers on localhost only", 403)
    if _equal(request.query_params.get("token"), token) and request.url.path == "/":
        # Out of the address bar, so that it is in no history and no screenshot.
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, _digest(token), httponly=True, samesite="strict")
        return answer
    if _equal(request.cookies.get(COOKIE), _digest(token)):
        return None
    return PlainTextResponse("open the address with ?token=... that `agentrl view` printed", 401)


def _digest(token: str) -> str:
    """Returns the cookie's value for a token, which itself may contain characters that cookies
    cannot."""
    return hashlib.sha256(_encoded(token)).hexdigest()


def _equal(given: str | None, expected: str) -> bool:
    return given is not None and hmac.compare_digest(_encoded(given), _encoded(expected))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _json(data: object, status: int = 200) -> Response:
    # Escaped to ASCII: a lone surrogate, which a model's JSON may hold, has no other encoding.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")
