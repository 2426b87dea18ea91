"""The client's side of the WebSocket, against a server that does what each test wants of it."""

import asyncio
import logging
import time
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import WSMsgType, web

from agentrl.env import Action, connect
from agentrl.env import client as client_module
from agentrl.env.protocol import PROTOCOL_HEADER
from agentrl.env.transport import websocket as transport_websocket
from agentrl.errors import EnvError, EnvUnavailable

SESSION = {"task_id": "t", "lease_expires_at": 0.0, "lease_s": 50.0, "observation": [], "tools": []}
STEP = {
    "observation": [],
    "reward": 0.0,
    "terminated": False,
    "truncated": False,
    "reward_components": {},
    "info": {},
    "metrics": {},
}


class FrameServer:
    """Speaks frames. `answer(frame)` returns a reply, or None to say nothing."""

    def __init__(self, workers=1, websocket=True, max_body_bytes=2**20):
        self.workers, self.websocket, self.max_body_bytes = workers, websocket, max_body_bytes
        self.messages, self.frames, self.handshakes, self.sockets = [], [], [], []
        self.num_sessions = 0

    def answer(self, frame, worker):
        if frame["op"] == "create":
            sessions = []
            for _ in range(frame.get("count", 1)):
                sessions.append({**SESSION, "id": f"{worker}-{self.num_sessions}", "step": 0})
                self.num_sessions += 1
            return {"id": frame["id"], "ok": {"sessions": sessions}}
        if frame["op"] == "step":
            return {"id": frame["id"], "ok": {**STEP, "step": frame["step"] + 1}}
        return {"id": frame["id"], "ok": {}}

    async def send(self, socket, replies):
        await socket.send_bytes(msgspec.json.encode(replies))

    async def server_info(self, request):
        info = {
            "protocol_versions": [1],
            "environments": ["e"],
            "workers": self.workers,
            "max_frames": 1024,
            "max_body_bytes": self.max_body_bytes,
        }
        return web.json_response(info, headers={PROTOCOL_HEADER: "1"})

    async def handle(self, request):
        self.handshakes.append(request)
        if not self.websocket:
            return web.Response(status=404)
        socket = web.WebSocketResponse(protocols=("agentrl.v1",))
        await socket.prepare(request)
        self.sockets.append(socket)
        async for message in socket:
            if message.type != WSMsgType.TEXT:
                continue
            frames = msgspec.json.decode(message.data)
            frames = frames if isinstance(frames, list) else [frames]
            self.messages.append(frames)
            self.frames += frames
            worker = int(request.query["worker"])
            replies = [self.answer(frame, worker) for frame in frames]
            if replies := [reply for reply in replies if reply is not None]:
                await self.send(socket, replies)
        return socket

    async def create(self, request):  # over HTTP
        reply = {"sessions": [{**SESSION, "id": "http", "step": 0}]}
        return web.json_response(reply, headers={PROTOCOL_HEADER: "1"}, status=201)

    async def delete(self, request):
        return web.Response(status=204, headers={PROTOCOL_HEADER: "1"})

    @asynccontextmanager
    async def client(self, **options):
        application = web.Application()
        application.router.add_get("/v1/server", self.server_info)
        application.router.add_get("/v1/ws", self.handle)
        application.router.add_post("/v1/sessions", self.create)
        application.router.add_delete("/v1/sessions/{id}", self.delete)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        async with connect(url, **options) as client:
            yield client
        await runner.cleanup()

    def steps(self):
        return [frame for frame in self.frames if frame["op"] == "step"]


def step(session, timeout_s=5.0):
    return session.step(Action(text="x"), timeout_s=timeout_s)


def test_calls_of_one_tick_are_one_message_and_replies_come_in_any_order():
    class Reversed(FrameServer):
        async def send(self, socket, replies):
            for reply in reversed(replies):
                await super().send(socket, reply)
                await super().send(socket, [reply])  # once more: nobody minds

    async def main():
        server = Reversed()
        async with server.client() as client:
            group = await client.group("e", 50, split="s", index=0)
            for _ in range(3):
                await asyncio.gather(*(step(session) for session in group))
            steps = [frames for frames in server.messages if frames[0]["op"] == "step"]
            assert [len(frames) for frames in steps] == [50] * 3
            assert {frame["sid"] for frame in steps[0]} == {session.id for session in group}
            assert [frame["step"] for frame in steps[2]] == [2] * 50
            assert len({frame["id"] for frame in server.frames}) == len(server.frames)
            assert len(server.sockets) == 1

    asyncio.run(main())


def test_the_handshake_carries_token_version_and_subprotocol():
    async def main():
        server = FrameServer()
        async with server.client(token="t0k") as client:
            await client.session("e", split="s", index=0)
        (handshake,) = server.handshakes
        assert handshake.headers["Authorization"] == "Bearer t0k"
        assert handshake.headers[PROTOCOL_HEADER] == "1"
        assert handshake.headers["Sec-WebSocket-Protocol"] == "agentrl.v1"

    asyncio.run(main())


def test_a_frame_that_is_not_answered_is_sent_again(monkeypatch):
    monkeypatch.setattr(transport_websocket, "PATIENCE_S", 0.05)

    class Forgetful(FrameServer):
        def answer(self, frame, worker):
            if frame["op"] == "step" and len(self.steps()) < 3:
                return None
            return super().answer(frame, worker)

    async def main():
        server = Forgetful()
        async with server.client() as client:
            session = await client.session("e", split="s", index=0)
            await step(session)
            first, *again = server.steps()
            assert again == [first] * 2 and len(server.sockets) == 1
            await step(session)
            assert server.steps()[-1]["step"] == 1

    asyncio.run(main())


def test_a_lost_socket_loses_no_session():
    class Cutting(FrameServer):
        def answer(self, frame, worker):
            if frame["op"] == "step" and len(self.sockets) < 3:
                self.sockets[-1]._req.transport.abort()
            return super().answer(frame, worker)

    async def main():
        server = Cutting()
        async with server.client() as client:
            group = await client.group("e", 20, split="s", index=0)
            await asyncio.gather(*(step(session) for session in group))
            assert len(server.sockets) == 3
            taken = {(frame["sid"], frame["step"]) for frame in server.steps()}
            assert taken == {(session.id, 0) for session in group}

    asyncio.run(main())


@pytest.mark.parametrize("heard", [True, False])
def test_a_network_that_cuts_every_connection_is_no_silent_server(monkeypatch, heard):
    """Sessions share a connection: a call may lose it many times over while others are answered."""
    for name in ("UNREACHABLE_S", "SILENT_S"):
        monkeypatch.setattr(client_module, name, 0.0)

    class Cutting(FrameServer):
        num_cuts = 0

        async def send(self, socket, replies):
            if self.steps() and self.num_cuts < 12:
                self.num_cuts += 1
                if heard:
                    await super().send(socket, [{"id": 10**6, "ok": {}}])
                await socket.close()
            else:
                await super().send(socket, replies)

    async def main():
        server = Cutting()
        async with server.client() as client:
            session = await client.session("e", split="train", index=0)
            if heard:
                await step(session, timeout_s=60.0)
                assert [frame["step"] for frame in server.steps()] == [0] * 13
            else:
                with pytest.raises(EnvUnavailable, match="was lost"):
                    await step(session, timeout_s=60.0)
                assert server.num_cuts < 5

    asyncio.run(main())


def test_a_connection_that_leads_nowhere_is_left(monkeypatch):
    monkeypatch.setattr(transport_websocket, "PATIENCE_S", 0.05)
    monkeypatch.setattr(transport_websocket, "CONNECT_S", 0.2)

    class Silent(FrameServer):
        def answer(self, frame, worker):
            if frame["op"] != "create" and len(self.sockets) == 1:
                return None
            return super().answer(frame, worker)

    async def main():
        server = Silent()
        async with server.client() as client:
            session = await client.session("e", split="s", index=0)
            await step(session)
            assert len(server.sockets) == 2
            # A server that is merely slow answers the ping, and keeps its connection.
            server.answer = lambda frame, worker: (
                None if frame["op"] == "step" else {"id": frame["id"], "ok": {}}
            )
            with pytest.raises(EnvUnavailable, match="did not answer"):
                await client._servers[0].transport.step(
                    session.id, client_module.StepRequest(1, client_module.protocol.WireAction()), 1
                )
            assert len(server.sockets) == 2

    asyncio.run(main())


def test_sessions_stay_with_the_worker_that_holds_them():
    async def main():
        server = FrameServer(workers=3)
        async with server.client() as client:
            sessions = [await client.session("e", split="s", index=n) for n in range(24)]
            workers = {session.id.split("-")[0] for session in sessions}
            assert workers == {"0", "1", "2"}
            server.messages.clear()
            await asyncio.gather(*(step(session) for session in sessions))
            for frames in server.messages:
                assert len({frame["sid"].split("-")[0] for frame in frames}) == 1
            assert len(server.messages) == len(server.sockets) == 3

    asyncio.run(main())


def test_a_repeated_create_meets_the_worker_that_has_its_key():
    class Cutting(FrameServer):
        def answer(self, frame, worker):
            self.creates.append((worker, frame["key"]))
            if len(self.creates) < 4:
                self.sockets[-1]._req.transport.abort()
            return super().answer(frame, worker)

    async def main():
        server = Cutting(workers=4)
        server.creates = []
        async with server.client() as client:
            await client.session("e", split="s", index=0)
            assert len(set(server.creates)) == 1 and len(server.creates) == 4
            await client.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("reason", ["no route", "another subprotocol", "no handshake"])
def test_a_server_without_websockets_is_used_over_http_and_a_line_says_so(
    monkeypatch, caplog, reason
):
    monkeypatch.setattr(transport_websocket, "CONNECT_S", 0.2)

    class Other(FrameServer):
        async def handle(self, request):
            if reason == "another subprotocol":
                socket = web.WebSocketResponse(protocols=("chat",))
                await socket.prepare(request)
                return socket
            await asyncio.sleep(1)

    async def main():
        server = FrameServer(websocket=False) if reason == "no route" else Other()
        async with server.client() as client:
            for number in range(2):
                session = await client.session("e", split="s", index=number)
                assert session.id == "http"

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    lines = [record.message for record in caplog.records if "speaks no WebSocket" in record.message]
    assert len(lines) == 1


def test_calls_have_deadlines_and_a_bounded_number_is_under_way(monkeypatch):
    monkeypatch.setattr(transport_websocket, "MAX_UNANSWERED", 2)
    monkeypatch.setattr(client_module, "GRACE_S", 0.1)

    class Mute(FrameServer):
        def answer(self, frame, worker):
            return None if frame["op"] == "step" else super().answer(frame, worker)

    async def main():
        server = Mute()
        async with server.client() as client:
            group = await client.group("e", 3, split="s", index=0)
            started = time.monotonic()
            errors = await asyncio.gather(
                *(step(session, 0.3) for session in group), return_exceptions=True
            )
            assert time.monotonic() - started < 2
            assert [type(error) for error in errors] == [EnvUnavailable] * 3
            assert len(server.steps()) == 2, "the third waited for room"
            server.answer = lambda frame, worker: FrameServer.answer(server, frame, worker)
            await asyncio.gather(*(step(session) for session in group))

    asyncio.run(main())


def test_a_frame_beyond_the_servers_limit_costs_nobody_the_socket():
    async def main():
        server = FrameServer(max_body_bytes=2000)
        async with server.client() as client:
            session = await client.session("e", split="s", index=0)
            with pytest.raises(EnvError) as caught:
                await session.step(Action(text="x" * 2000), timeout_s=5)
            assert caught.value.code == "payload_too_large"
            many = [session.step(Action(text="x" * 900), timeout_s=5) for _ in range(4)]
            await asyncio.gather(*many)
            assert len(server.sockets) == 1
            assert max(len(msgspec.json.encode(frames)) for frames in server.messages) <= 2000

    asyncio.run(main())
