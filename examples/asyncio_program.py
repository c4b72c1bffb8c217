"""An asyncio program: calls are awaited, functions are coroutines, and no thread waits for anything.

    python examples/asyncio_program.py

A front end takes requests, each a coroutine of its own, and asks the worker that has the model. The worker's function
is ``async def``, too: it puts the request into a queue and awaits the result, while one task takes all that is in the
queue and runs the model once for all of them. So a hundred requests that come together cost a few runs of the model.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence

import torch
import torch.multiprocessing
from torch import nn

import farcall

REQUESTS = 100
LARGEST_BATCH = 32


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


class BatchingModel:
    """At the model's worker: gathers the requests that come together. All of it runs on farcall's event loop."""

    def __init__(self) -> None:
        self.model = make_model()
        self.waiting: list[tuple[torch.Tensor, asyncio.Future[torch.Tensor]]] = []
        self.runs = 0

    async def predict(self, x: torch.Tensor) -> torch.Tensor:
        result: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self.waiting.append((x, result))
        if len(self.waiting) == 1:  # the first of a batch sees to it; the others come while it lets them
            await asyncio.sleep(0.005)
            self.run_batch()
        return await result

    def run_batch(self) -> None:
        while self.waiting:
            batch, self.waiting = self.waiting[:LARGEST_BATCH], self.waiting[LARGEST_BATCH:]
            self.runs += 1
            with torch.no_grad():
                outputs = self.model(torch.stack([x for x, _ in batch]))
            for (_, result), output in zip(batch, outputs, strict=True):
                result.set_result(output)


_served: BatchingModel | None = None


async def predict(x: torch.Tensor) -> torch.Tensor:
    """What the front end calls."""
    assert _served is not None
    return await _served.predict(x)


def count_runs() -> int:
    assert _served is not None
    return _served.runs


async def front_end() -> None:
    inputs = torch.rand(REQUESTS, 16, generator=torch.Generator().manual_seed(1))

    async def handle(x: torch.Tensor) -> torch.Tensor:
        async with asyncio.timeout(30):
            return await farcall.rpc_async("model", predict, args=(x,))

    outputs: Sequence[torch.Tensor] = await asyncio.gather(*(handle(x) for x in inputs))
    runs = await farcall.rpc_async("model", count_runs)
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(list(outputs)), make_model()(inputs))
    print(f"{REQUESTS} requests, every answer right, {runs} runs of the model", flush=True)
    assert runs < REQUESTS / 2

    # An error is raised where it is awaited, as what it is.
    try:
        await handle(torch.rand(3))
    except RuntimeError as error:
        print(f"a request of the wrong shape: {type(error).__name__}", flush=True)


def run(rank: int, init_method: str) -> None:
    """One worker, from start to end."""
    global _served
    if rank == 1:
        _served = BatchingModel()
    options = farcall.RpcBackendOptions(init_method=init_method)
    farcall.init_rpc(("front", "model")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        asyncio.run(front_end())
    farcall.shutdown()  # the model's worker serves in here until the front end is done


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun, `farcall run` or Slurm: be that worker
        run(int(os.environ["RANK"]), "env://")
    else:  # started alone: be all workers, on this machine
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(run, args=(f"file://{directory}/meeting",), nprocs=2)


if __name__ == "__main__":
    main()
