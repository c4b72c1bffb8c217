"""An HTTP service in front of workers: batched inference, deadlines, and a worker that is killed under load.

    python examples/http_service.py

The front end is an asyncio program. Each request has a deadline, which the worker inherits, and asks one worker; if
that one is gone, another. The workers run the model once for all requests that come together. Here the client is part
of the program, too: it sends requests over real connections, and kills a worker halfway. Every request gets an answer,
or a 503 within its deadline. (A few lines of HTTP stand for aiohttp or FastAPI: a handler there looks like `predict`.)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import tempfile
from collections import Counter

import torch
from torch import nn

import farcall
from farcall.errors import Cancelled, NetworkError, RpcTimeout, UnknownWorker

WORKERS = ["model0", "model1", "model2"]
REQUESTS = 300
AT_A_TIME = 20
DEADLINE_S = 5.0


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))


model = make_model()


@farcall.batched(max_size=32, within_s=0.002)
def infer(inputs: list[torch.Tensor]) -> list[float]:
    with torch.no_grad():
        return [float(output) for output in model(torch.stack(inputs))]


class Service:
    """The front end: HTTP on one side, workers on the other."""

    def __init__(self, node: farcall.Node) -> None:
        self.workers = [node[name].options(timeout=DEADLINE_S) for name in WORKERS]
        self.next_worker = itertools.count().__next__

    async def predict(self, body: bytes) -> tuple[int, dict[str, object]]:
        """The answer to one request: its status, and what goes into it."""
        inputs = torch.tensor(json.loads(body))
        first = self.next_worker()
        why = ""
        try:
            async with asyncio.timeout(DEADLINE_S):
                for turn in range(len(self.workers)):
                    worker = self.workers[(first + turn) % len(self.workers)]
                    try:
                        return 200, {"output": await worker.start(infer, inputs), "by": worker.name}
                    except (NetworkError, UnknownWorker) as error:
                        why = str(error)  # that worker is gone: the model may run twice, so ask another one
        except (TimeoutError, RpcTimeout, Cancelled) as error:
            why = str(error) or f"no answer within {DEADLINE_S:g} s"
        return 503, {"error": why}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, with one request."""
        length = 0
        while (line := await reader.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        status, answer = await self.predict(await reader.readexactly(length))
        body = json.dumps(answer).encode()
        writer.write(b"HTTP/1.1 %d\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def ask(port: int, inputs: list[float]) -> tuple[int, dict[str, object]]:
    """A client's request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(inputs).encode()
    writer.write(b"POST /predict HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), json.loads(answer)


async def front_end(meeting: str, processes: list[multiprocessing.Process]) -> None:
    options = farcall.RpcBackendOptions(init_method=meeting)
    async with farcall.Node("front", rank=0, world_size=1 + len(WORKERS), options=options) as node:
        server = await asyncio.start_server(Service(node).handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        at_a_time = asyncio.Semaphore(AT_A_TIME)
        answered: Counter[object] = Counter()

        async def client(number: int) -> None:
            inputs = [float(number), 1.0, 2.0, 3.0]
            async with at_a_time, asyncio.timeout(2 * DEADLINE_S):  # nobody waits for good
                status, answer = await ask(port, inputs)
            answered[answer.get("by", status)] += 1
            if status == 200:
                with torch.no_grad():
                    assert abs(float(model(torch.tensor(inputs))) - float(str(answer["output"]))) < 1e-4
            if sum(answered.values()) == REQUESTS // 2:
                processes[-1].kill()

        await asyncio.gather(*(client(number) for number in range(REQUESTS)))
        server.close()
        assert sum(answered.values()) == REQUESTS
        refused = answered.pop(503, 0)
        print(f"{REQUESTS} requests, {sum(answered.values())} answered, {refused} refused: nobody waits", flush=True)
        assert all(answered[name] for name in WORKERS)


def work(rank: int, meeting: str) -> None:
    """One worker, until the front end leaves."""
    options = farcall.RpcBackendOptions(init_method=meeting)
    with farcall.Node(WORKERS[rank - 1], rank=rank, world_size=1 + len(WORKERS), options=options):
        pass  # it serves until all others leave, too


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        meeting = f"file://{directory}/meeting"
        start = multiprocessing.get_context("spawn").Process
        processes = [start(target=work, args=(rank, meeting)) for rank in range(1, 1 + len(WORKERS))]
        for process in processes:
            process.start()
        asyncio.run(front_end(meeting, processes))  # type: ignore[arg-type]
        for process in processes:
            process.join(30)


if __name__ == "__main__":
    main()
