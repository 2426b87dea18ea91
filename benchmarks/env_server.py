"""CPU time of the environment server per step, beside the least that an ASGI application can do.

    python benchmarks/env_server.py [--steps 20000] [--sessions 1 64 250]

Every session is a keep-alive connection that posts its next step once the last one is answered; a
step is one tool call of an environment that answers at once. The floor, in the same run, is an
ASGI application under the same uvicorn (uvloop, httptools) that reads a body of the same size and
answers prepared bytes of the same size. Both serve from processes of their own, which report their
own CPU time, all threads together; the client's is not counted. Best of `--repeats`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec
import uvicorn

from agentrl.env import Environment, Task, tool
from agentrl.env.server import KEEP_ALIVE_S, listen, make_app, serve
from agentrl.env.session import DEFAULT_LEASE_S

_STEP_BODY = (
    b'{"step":%d,"action":{"text":"","tool_calls":'
    b'[{"id":"t0","name":"look","arguments":{"word":"w"}}]},"timeout_s":60.0}'
)


class Bench(Environment):
    """Answers `look` calls without end."""

    id = "bench"
    max_sessions = 4096

    def splits(self):
        return {"train": None}

    def get(self, split, index):
        return Task(str(index), f"Question {index}: what is it?")

    @tool
    async def look(self, word: str) -> str:
        return f"found {word}, and then some words that a search would find as well"


def run_agentrl(pipe: Connection) -> None:
    _report_cpu_time(pipe)
    serve(make_app([Bench]), port=0, ready=pipe.send)


def run_bare(pipe: Connection, answer: bytes) -> None:
    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    _report_cpu_time(pipe)
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
        date_header=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
    )
    pipe.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(uvicorn.Server(config).serve(sockets=[listener]))


def _report_cpu_time(pipe: Connection) -> None:
    def answer() -> None:
        while True:
            pipe.recv()
            pipe.send(time.process_time())

    threading.Thread(target=answer, daemon=True).start()


@contextmanager
def process(target, *arguments) -> Iterator[tuple[int, Connection]]:
    """A server in a process of its own: its port, and the pipe that asks for its CPU time."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *arguments))
    server.start()
    try:
        yield int(ours.recv().rsplit(":", 1)[1]), ours
    finally:
        server.kill()
        server.join()


class Poster(asyncio.Protocol):
    """Posts the steps of one session, each when the one before was answered."""

    def __init__(self, path: str, first_step: int, num_steps: int) -> None:
        self.head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: " % path.encode()
        self.next, self.end = first_step, first_step + num_steps
        self.received = b""
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.post()

    def post(self) -> None:
        body = _STEP_BODY % self.next
        self.next += 1
        self.transport.write(b"%s%d\r\n\r\n%s" % (self.head, len(body), body))

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head[head.index(b"content-length: ") + 16 :].split(b"\r", 1)[0])
        if len(body) < length:
            return
        assert head.startswith(b"HTTP/1.1 200"), self.received
        self.received = b""
        if self.next < self.end:
            self.post()
        else:
            self.transport.close()
            self.done.set_result(body)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))


async def post_steps(port: int, paths: list[str], first_step: int, num_steps: int) -> bytes:
    """Post `num_steps` steps to each path, all paths at once; returns the last answer of one."""
    connect = asyncio.get_running_loop().create_connection
    posters = [
        (await connect(lambda path=path: Poster(path, first_step, num_steps), "127.0.0.1", port))[1]
        for path in paths
    ]
    return (await asyncio.gather(*(poster.done for poster in posters)))[0]


async def open_sessions(port: int, count: int) -> list[str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"env":"bench","task":{"split":"train","index":0},"count":%d}' % count
    writer.write(
        b"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    reply = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    return [f"/v1/sessions/{each['id']}/step" for each in msgspec.json.decode(reply)["sessions"]]


def measure(port: int, pipe: Connection, paths: list[str], first_step: int, num_steps: int):
    """CPU time of the server and wall time per step, in microseconds."""
    per_session = max(num_steps // len(paths), 1)
    pipe.send(None)
    cpu, started = pipe.recv(), time.perf_counter()
    asyncio.run(post_steps(port, paths, first_step, per_session))
    wall = time.perf_counter() - started
    pipe.send(None)
    total = per_session * len(paths) / 1e6
    return (pipe.recv() - cpu) / total, wall / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="of all sessions together")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 64, 250])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with process(run_agentrl) as (port, pipe):
        (path,) = asyncio.run(open_sessions(port, 1))
        answer = asyncio.run(post_steps(port, [path], 0, 200))  # a warm-up, too
        with process(run_bare, answer) as (bare_port, bare_pipe):
            print(f"answers of {len(answer)} bytes; leases of {DEFAULT_LEASE_S:g} s")
            print("sessions   server CPU us/step   bare ASGI us   ratio   steps/s   bare steps/s")
            for sessions in options.sessions:
                ours, bare = [], []
                for _ in range(options.repeats):
                    paths = asyncio.run(open_sessions(port, sessions))
                    ours.append(measure(port, pipe, paths, 0, options.steps))
                    bare_paths = ["/"] * sessions
                    bare.append(measure(bare_port, bare_pipe, bare_paths, 0, options.steps))
                (cpu, wall), (bare_cpu, bare_wall) = min(ours), min(bare)
                print(
                    f"{sessions:8d}   {cpu:18.1f}   {bare_cpu:12.1f}   {cpu / bare_cpu:5.2f}"
                    f"   {1e6 / wall:7.0f}   {1e6 / bare_wall:12.0f}"
                )


if __name__ == "__main__":
    main()
