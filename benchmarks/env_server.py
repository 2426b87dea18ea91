"""Measures what a step costs our environment server and client, OpenEnv's, and a bare server.

    python benchmarks/env_server.py [--openenv-python /path/to/venv/bin/python]

The server runs on one core, the client on another; a step is one call that the environment answers
at once, so what is measured is the way there and back. Rows:

    def, async           our server and client; the environment's tool is a plain or an async method
    OpenEnv def, async   `openenv-core` and its own client: a WebSocket for each session
    bare                 our HTTP server and an application that reads a body and sends ready bytes

CPU time is the whole process's, all threads, from /proc; the best of `--repeats` by server CPU.
The repeats of all rows take turns, so that a noisy machine is noisy for all of them.
OpenEnv's rows need a Python that has `openenv-core` (in a virtual environment of its own).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from env_server_client import report, steps_of

HERE = Path(__file__)
OPENENV = str(HERE.with_name("env_server_openenv.py"))
SERVER_CORE, CLIENT_CORE = 0, 1
TICKS = os.sysconf("SC_CLK_TCK")
BARE_BODY = (
    b'{"step":7,"action":{"text":"","tool_calls":'
    b'[{"id":"t0","name":"look","arguments":{"word":"w"}}]},"timeout_s":60.0}'
)
BARE_ANSWER = (
    b'{"step":8,"observation":[{"role":"tool","tool_call_id":"t0","name":"look","content":'
    b'"found w, and then some words that a search would find as well"}],"reward":0.0,'
    b'"terminated":false,"truncated":false,"reward_components":{},"info":{},'
    b'"metrics":{"tool_calls":8.0},"replayed":false}'
)


# The servers


def serve_agentrl(style: str) -> None:
    from agentrl.env import Environment, Task, tool
    from agentrl.env.server.app import make_app
    from agentrl.env.server.serve import serve

    class Bench(Environment):
        """Answers `look` calls without end."""

        id = "bench"
        max_sessions = 4096

        def splits(self):
            return {"train": None}

        def get(self, split, index):
            return Task(str(index), f"Question {index}: what is it?")

        @tool
        def look(self, word: str) -> str:
            return f"found {word}, and then some words that a search would find as well"

    class AsyncBench(Bench):
        id = "bench"

        @tool
        async def look(self, word: str) -> str:
            return f"found {word}, and then some words that a search would find as well"

    app = make_app([AsyncBench if style == "async" else Bench])
    serve(app, port=0, ready=lambda url: print(url, flush=True))


def serve_bare() -> None:
    from agentrl import runtime
    from agentrl.env.server.serve import running

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        length = (b"content-length", b"%d" % len(BARE_ANSWER))
        headers = [(b"content-type", b"application/json"), length]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": BARE_ANSWER})

    async def main():
        async with running(app) as url:
            print(url, flush=True)
            await asyncio.Event().wait()

    runtime.run(main())


# The clients


async def play_agentrl(url: str, num_sessions: int, num_steps: int) -> None:
    from agentrl.env import Action, ToolCall, connect

    action = Action(tool_calls=(ToolCall("t0", "look", {"word": "w"}),))

    async def one(session, count: int, latencies: list[float]) -> None:
        for _ in range(count):
            started = time.perf_counter()
            await session.step(action, timeout_s=60.0)
            latencies.append(time.perf_counter() - started)

    async with connect(url) as client:
        opening = (client.session("bench", split="train", index=0) for _ in range(num_sessions))
        sessions = await asyncio.gather(*opening)

        async def steps(count: int) -> list[float]:
            latencies: list[float] = []
            await asyncio.gather(*(one(session, count, latencies) for session in sessions))
            return latencies

        await report(steps, steps_of(num_sessions, num_steps))


class Poster(asyncio.Protocol):
    """Posts bodies on one connection, each when the one before was answered."""

    def __init__(self) -> None:
        self.request = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%s" % (
            len(BARE_BODY),
            BARE_BODY,
        )
        self.num_bytes = 0

    def connection_made(self, transport) -> None:
        self.transport = transport

    def post(self, count: int, latencies: list[float]) -> asyncio.Future[None]:
        self.left, self.latencies = count, latencies
        self.done = asyncio.get_running_loop().create_future()
        self.write()
        return self.done

    def write(self) -> None:
        self.started = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if not data.endswith(BARE_ANSWER[-20:]):
            return
        self.latencies.append(time.perf_counter() - self.started)
        self.left -= 1
        if self.left:
            self.write()
        else:
            self.done.set_result(None)


async def play_bare(url: str, num_sessions: int, num_steps: int) -> None:
    loop, port = asyncio.get_running_loop(), int(url.rpartition(":")[2])
    posters = [
        (await loop.create_connection(Poster, "127.0.0.1", port))[1] for _ in range(num_sessions)
    ]

    async def steps(count: int) -> list[float]:
        latencies: list[float] = []
        await asyncio.gather(*(poster.post(count, latencies) for poster in posters))
        return latencies

    await report(steps, steps_of(num_sessions, num_steps))


# The measurement


@contextmanager
def process(core: int, *command: str) -> Iterator[subprocess.Popen]:
    started = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if OPENENV in command else None,  # it writes traces of each close
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def size(pid: int) -> tuple[int, int]:
    """Resident MiB and threads."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values["VmRSS"].split()[0]) // 1024, int(values["Threads"])


def measure(server: subprocess.Popen, url: str, client: list[str], sessions: int, steps: int):
    """Server CPU us per step and the rest of a row's figures."""
    command = [*client, url, str(sessions), str(steps)]
    with process(CLIENT_CORE, *command) as playing:
        assert playing.stdin and playing.stdout
        if playing.stdout.readline() != "ready\n":
            raise SystemExit(f"{' '.join(command)} failed")
        before = cpu_seconds(server.pid)
        playing.stdin.write("go\n")
        playing.stdin.flush()
        result = json.loads(playing.stdout.readline())
        cpu = cpu_seconds(server.pid) - before
        memory, threads = size(server.pid)
        playing.stdin.write("done\n")
        playing.stdin.flush()
        playing.wait(60)
    per_step = 1e6 / result["steps"]
    return (
        cpu * per_step,
        result["client_cpu"] * per_step,
        result["steps"] / result["seconds"],
        result["p50"] * 1e3,
        result["p99"] * 1e3,
        memory,
        threads,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="of all sessions together")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--openenv-python", help="a Python that has openenv-core")
    options = parser.parse_args()
    us = [sys.executable, str(HERE)]
    rows = [
        ("def", [*us, "serve", "def"], [*us, "play"]),
        ("async", [*us, "serve", "async"], [*us, "play"]),
        ("bare", [*us, "serve-bare"], [*us, "play-bare"]),
    ]
    if options.openenv_python:
        them = [options.openenv_python, OPENENV]
        rows += [
            ("OpenEnv def", [*them, "serve", "sync"], [*them, "play"]),
            ("OpenEnv async", [*them, "serve", "async"], [*them, "play"]),
        ]
    else:
        print("rows of OpenEnv skipped: give --openenv-python")
    print(
        f"server on core {SERVER_CORE}, client on core {CLIENT_CORE}; {options.steps} steps, best "
        f"of {options.repeats}\n"
        "                    sessions  server us/step  client us/step  steps/s   p50 ms   p99 ms"
        "   MiB  threads"
    )
    for sessions in options.sessions:
        steps = options.steps if sessions > 1 else options.steps // 4
        runs: dict[str, list] = {name: [] for name, _, _ in rows}
        for _ in range(options.repeats):
            for name, server_command, client_command in rows:
                with process(SERVER_CORE, *server_command) as server:
                    assert server.stdout
                    url = server.stdout.readline().strip()
                    runs[name].append(measure(server, url, client_command, sessions, steps))
        for name, figures in runs.items():
            cpu, client_cpu, rate, p50, p99, memory, threads = min(figures)
            print(
                f"{name:20s}{sessions:8d}  {cpu:14.1f}  {client_cpu:14.1f}  {rate:7.0f}  "
                f"{p50:7.2f}  {p99:7.2f}  {memory:4d}  {threads:7d}",
                flush=True,
            )


if __name__ == "__main__":
    role, *arguments = sys.argv[1:] or [""]
    if role == "serve":
        serve_agentrl(*arguments)
    elif role == "serve-bare":
        serve_bare()
    elif role in ("play", "play-bare"):
        where, count, total = arguments
        play = play_agentrl if role == "play" else play_bare
        asyncio.run(play(where, int(count), int(total)))
    else:
        main()
