"""An asyncio program: calls are awaited, functions are coroutines, and no thread waits for anything.

    python examples/asyncio_program.py

A front end takes requests, each a coroutine of its own, and asks the worker that has the model. The worker's method is
``async def``, too, and batched: callers pass one input, and it runs once for all that come together. So a hundred
requests cost a few runs of the model.
"""

from __future__ import annotations

import asyncio
import os
import tempfile

import torch
import torch.multiprocessing
from torch import nn

import farcall

REQUESTS = 100
LARGEST_BATCH = 32


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


class Model:
    """At its own worker."""

    def __init__(self) -> None:
        self.model = make_model()
        self.runs = 0

    @farcall.batched(max_size=LARGEST_BATCH, within_s=0.005)
    async def predict(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Called for one input, and run once for all that come together."""
        self.runs += 1
        with torch.no_grad():
            return list(self.model(torch.stack(inputs)))

    def count_runs(self) -> int:
        return self.runs


async def front_end() -> None:
    inputs = torch.rand(REQUESTS, 16, generator=torch.Generator().manual_seed(1))
    model = farcall.worker("model").create(Model)

    async def handle(x: torch.Tensor) -> torch.Tensor:
        async with asyncio.timeout(30):
            return await model.start(Model.predict, x)

    outputs = await asyncio.gather(*(handle(x) for x in inputs))
    runs = await model.start(Model.count_runs)
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(outputs), make_model()(inputs))
    print(f"{REQUESTS} requests, every answer right, {runs} runs of the model", flush=True)
    assert runs < REQUESTS / 2

    # An error is raised where it is awaited, as what it is.
    try:
        await handle(torch.rand(3))
    except RuntimeError as error:
        print(f"a request of the wrong shape: {type(error).__name__}", flush=True)


def run(rank: int, init_method: str) -> None:
    """One worker, from start to end."""
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
