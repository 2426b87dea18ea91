"""Weights over NCCL: the calls of the real library, through one that works on host memory.

What that cannot show, CUDA streams and NCCL's own transports, is in `test_on_two_gpus`.
"""

import asyncio
import contextlib
import multiprocessing
import time

import pytest
import torch
from control_server import failing, perturb, syncing, tiny_model
from nccl_stand_in import NCCLServer, Worker, build

from agentrl.errors import ConfigError, WeightSyncError
from agentrl.inference.weights.control import ServerUnreachable
from agentrl.inference.weights.nccl import Communicator, Library, NCCLError, NCCLTransfer


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = build(tmp_path_factory.mktemp("nccl"))
    if path is None:
        pytest.skip("no C compiler to build the stand-in of NCCL with")
    return Library(str(path))


@contextlib.asynccontextmanager
async def syncing_over(library, *servers, **settings):
    async with syncing(NCCLTransfer(library), *servers, **settings) as sync:
        yield sync
    for server in servers:
        server.release()


def holds(server, model):
    state = server.model.state_dict()
    return all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_every_version_reaches_every_server(library, dtype):
    model = tiny_model().to(dtype)
    servers = NCCLServer(library), NCCLServer(library, num_workers=3)
    for server in servers:
        server.model.to(dtype)
    async with syncing_over(library, *servers, tolerance=0.1) as sync:
        for version in (1, 2, 3):
            metrics = await sync.push(model, version)
            for server in servers:
                assert holds(server, model) and server.version == str(version)
                assert not server.paused
            assert metrics["sync/probe_logprob_diff_max"] < 0.1
            perturb(model, seed=version)
        assert [server.num_joined for server in servers] == [1, 1]


async def test_a_restarted_server_gets_what_was_pushed(library, monkeypatch):
    """Between two updates, while the trainer's weights go on changing."""
    sent = set()
    broadcast = Communicator.broadcast

    def noted(self, tensors):
        sent.update(tensor.data_ptr() for tensor in tensors)
        broadcast(self, tensors)

    monkeypatch.setattr(Communicator, "broadcast", noted)
    model, pushed = tiny_model(), tiny_model()
    own = {parameter.data_ptr() for parameter in model.parameters()}
    server = NCCLServer(library)
    async with syncing_over(library, server) as sync:
        await sync.push(model, 7)
        assert sent == own, "the device holds no copy of them"
        sent.clear()
        perturb(model, seed=1)
        server.restart()
        await sync.push_to(server.url)
        assert not sent & own
        assert holds(server, pushed) and server.version == "7" and server.num_joined == 2
        await sync.push(model, 8)
        assert holds(server, model) and server.num_joined == 2
        server.restart()
        await sync.push(model, 9)  # unnoticed until now
        assert holds(server, model) and server.num_joined == 3


async def test_a_trainer_that_was_killed_in_the_middle_of_an_update_starts_again(library):
    server, model = NCCLServer(library), tiny_model(seed=3)
    server.paused = server.open_update = True
    async with syncing_over(library, server) as sync:
        await sync.push(model, 4)
        assert holds(server, model) and server.version == "4" and not server.paused


@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", "/update_weights"])
async def test_a_refusal_is_told_at_once(library, route):
    """The library would wait for the server's ranks for ever."""
    server = NCCLServer(library)
    async with syncing_over(library, server) as sync:
        server.answer[route] = failing(500, "no module or parameter named 'surplus'")
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match=f"{route} answered 500: no module"):
            await sync.push(tiny_model(), 1)
        assert time.monotonic() - started < 4 and not server.paused
        del server.answer[route]
        model = tiny_model(seed=3)
        await sync.push(model, 2)
        assert holds(server, model)


async def test_a_rank_that_is_lost_in_the_middle(library):
    server = NCCLServer(library)

    def die(number):
        if number == 5:
            server.workers[0].close()

    async with syncing_over(library, server) as sync:
        await sync.push(tiny_model(), 1)
        server.on_tensor = die
        with pytest.raises(WeightSyncError, match=r"/update_weights answered 500.*remote"):
            await sync.push(tiny_model(seed=1), 2)
        server.on_tensor = lambda number: None
        model = tiny_model(seed=2)
        await sync.push(model, 3)
        assert holds(server, model) and server.num_joined == 2


async def test_a_server_that_hangs_is_left_at_its_deadline(library):
    server = NCCLServer(library)
    async with syncing_over(library, server, timeout_s=0.5) as sync:
        await sync.push(tiny_model(), 1)
        server.on_tensor = lambda number: time.sleep(3 if number == 2 else 0)
        with pytest.raises(WeightSyncError, match=r"did not answer within 0\.5 s"):
            await sync.push(tiny_model(seed=1), 2)


async def test_one_dead_server_does_not_hold_up_the_other(library):
    live, dead = NCCLServer(library), NCCLServer(library)
    missed = []
    async with syncing_over(library, live, dead, on_missed=missed.append) as sync:
        await sync.push(tiny_model(), 1)

        async def gone():
            dead.release()
            raise asyncio.CancelledError  # the connection breaks

        for route in ("/update_weights", "/weight_info", "/resume", "/health"):
            dead.answer[route] = gone
        model = tiny_model(seed=1)
        await sync.push(model, 2)
        assert holds(live, model) and missed == [dead.url]
        with pytest.raises(ServerUnreachable):
            await sync.push_to(dead.url)
        dead.answer.clear()
        dead.restart()
        await sync.push_to(dead.url)
        assert holds(dead, model)


async def test_a_cancelled_push_leaves_no_server_paused(library):
    server = NCCLServer(library)
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(number):
        if number == 2:
            loop.call_soon_threadsafe(reached.set)
            time.sleep(0.5)

    async with syncing_over(library, server) as sync:
        await sync.push(tiny_model(), 1)
        server.on_tensor = slow
        push = asyncio.create_task(sync.push(tiny_model(seed=1), 2))
        await reached.wait()
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        assert not server.paused
        server.on_tensor = lambda number: None
        model = tiny_model(seed=2)
        await sync.push(model, 3)
        assert holds(server, model)


async def test_ranks_that_disagree_are_an_error(library):
    """Checks the stand-in itself: it must notice what NCCL would hang on."""
    unique_id = library.unique_id()
    worker, trainer = await asyncio.gather(
        asyncio.to_thread(Worker, library, unique_id, 1, 2),
        asyncio.to_thread(Communicator, library, unique_id, 2, torch.device("cpu")),
    )
    results = await asyncio.gather(
        asyncio.to_thread(worker.receive, [4], torch.float32),
        asyncio.to_thread(trainer.broadcast, [torch.zeros(5)]),
        return_exceptions=True,
    )
    assert all(isinstance(each, NCCLError) and "ncclBroadcast" in str(each) for each in results)


def test_without_a_library_the_remedy_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"inference\.transfer = 'file'"):
        Library(str(tmp_path / "libnccl.so.2"))


def _receive_on_second_gpu(connection) -> None:
    """A worker process on the second GPU, through torch's own NCCL library."""
    import ctypes

    from agentrl.inference.weights.broadcast import DTYPES
    from agentrl.inference.weights.nccl import _UniqueID

    torch.cuda.set_device(1)
    library = Library()
    handle = ctypes.c_void_p()
    unique_id = _UniqueID.from_buffer_copy(connection.recv_bytes())
    library.call("ncclCommInitRank", ctypes.byref(handle), 2, unique_id, 1)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    one = torch.ones(1, device="cuda")
    place = ctypes.c_void_p(one.data_ptr())
    library.call("ncclAllReduce", place, place, 1, 7, 0, handle, stream)
    total = 0.0
    for shape, dtype in connection.recv():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
        place = ctypes.c_void_p(tensor.data_ptr())
        number = DTYPES[tensor.dtype]
        library.call("ncclBroadcast", place, place, tensor.numel(), number, 0, handle, stream)
        total += tensor.double().sum().item()
    connection.send(total)


@pytest.mark.gpu
def test_on_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL takes no two ranks on one")
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_receive_on_second_gpu, args=(theirs,))
    process.start()
    library, device = Library(), torch.device("cuda", 0)
    unique_id = library.unique_id()
    ours.send_bytes(unique_id)
    communicator = Communicator(library, unique_id, 2, device)
    model = tiny_model().to(device)
    tensors = [each.detach() for each in model.state_dict().values()]
    ours.send([(list(each.shape), str(each.dtype).removeprefix("torch.")) for each in tensors])
    communicator.broadcast(tensors)
    wanted = sum(each.double().sum().item() for each in tensors)
    assert ours.poll(60) and ours.recv() == pytest.approx(wanted)
    communicator.abort()
    process.join(60)
    assert process.exitcode == 0
