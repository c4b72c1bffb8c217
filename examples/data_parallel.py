"""Data parallel and a parameter server at once: dense layers are replicated, a large embedding lives on a server.

    python examples/data_parallel.py

Each trainer wraps its dense layers in torch's DistributedDataParallel, as ever; the embedding is a RemoteModule.
Inside one distributed autograd context, the backward pass averages the dense gradients among the trainers and sends
the embedding's to the server, where each trainer's step is a step of its own. So the trainers take turns there, the
run is the same each time, and the program compares it with one process.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farcall

TRAINERS = ("trainer0", "trainer1")
STEPS = 20
WORDS = 40


def make_embedding() -> nn.Module:
    torch.manual_seed(0)
    return nn.EmbeddingBag(WORDS, 8, mode="mean")


def make_dense() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(trainer: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * trainer + step % 4)
    words = torch.randint(WORDS, (16, 3), generator=generator)
    return words, (words.float().mean(1, keepdim=True) > WORDS / 2).float()


_embedding = make_embedding()


def get_embedding() -> farcall.RRef[nn.Module]:
    """At the server: a reference to the one embedding that all trainers share."""
    return farcall.RRef(_embedding)


def train(trainer: int, group: dist.ProcessGroup) -> list[float]:
    embedding = farcall.nn.RemoteModule.init_from_module_rref("server", farcall.worker("server").call(get_embedding))
    dense = DistributedDataParallel(make_dense(), process_group=group)
    parameters = [farcall.RRef(parameter) for parameter in dense.parameters()]
    local = farcall.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5)
    distant = farcall.optim.DistributedOptimizer(torch.optim.SGD, embedding.remote_parameters(), lr=2.0)
    losses = []
    for step in range(STEPS):
        words, wanted = batch(trainer, step)
        with farcall.autograd.context() as context_id:
            loss = nn.functional.binary_cross_entropy_with_logits(dense(embedding(words)), wanted)
            farcall.autograd.backward(context_id, [loss])  # in here the trainers average their dense gradients
            local.step(context_id)
            for turn in range(len(TRAINERS)):
                if turn == trainer:
                    distant.step(context_id)
                dist.barrier(group)
        losses.append(loss.item())
    return losses


def train_alone() -> list[list[float]]:
    """The twin, in one process: the losses of each trainer."""
    embedding, dense = make_embedding(), make_dense()
    local = torch.optim.SGD(dense.parameters(), lr=0.5)
    distant = torch.optim.SGD(embedding.parameters(), lr=2.0)
    losses: list[list[float]] = [[] for _ in TRAINERS]
    for step in range(STEPS):
        local.zero_grad()
        gradients = []
        for trainer in range(len(TRAINERS)):
            words, wanted = batch(trainer, step)
            distant.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(dense(embedding(words)), wanted)
            (loss / len(TRAINERS)).backward()
            gradients.append([parameter.grad * len(TRAINERS) for parameter in embedding.parameters()])  # type: ignore[operator]
            losses[trainer].append(loss.item())
        local.step()
        for gradient in gradients:
            for parameter, part in zip(embedding.parameters(), gradient, strict=True):
                parameter.grad = part
            distant.step()
    return losses


def run(rank: int, init_method: str, init_method_of_group: str) -> None:
    """One worker, from start to end."""
    torch.set_num_threads(1)  # the workers share this machine
    names = ("server", *TRAINERS)
    options = farcall.RpcBackendOptions(init_method=init_method)
    farcall.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    # What DistributedDataParallel averages over: a process group of the trainers alone.
    dist.init_process_group("gloo", init_method=init_method_of_group, rank=rank, world_size=len(names))
    group = dist.new_group([1 + trainer for trainer in range(len(TRAINERS))])
    if rank > 0:
        losses = train(rank - 1, group)
        alone = train_alone()[rank - 1]
        print(f"{names[rank]}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last", flush=True)
        assert max(abs(got - wanted) for got, wanted in zip(losses, alone, strict=True)) < 1e-5
        assert losses[-1] < losses[0]
        print(f"{names[rank]}: the same, to within rounding, as in one process", flush=True)
    farcall.shutdown()  # the server serves in here until all trainers are done
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun, `farcall run` or Slurm: be that worker
        run(int(os.environ["RANK"]), "env://", "env://")
    else:  # started alone: be all workers, on this machine
        with tempfile.TemporaryDirectory() as directory:
            places = (f"file://{directory}/workers", f"file://{directory}/group")
            torch.multiprocessing.spawn(run, args=places, nprocs=1 + len(TRAINERS))


if __name__ == "__main__":
    main()
