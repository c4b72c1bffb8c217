"""Who is measured: farcall and stock ``torch.distributed.rpc``, behind one interface.

A contender lives in a member process of its own team. Cases see a ``CallSystem`` and no difference between
the two; what only one of them has (a tensor made in shared memory) falls back to the nearest thing on the
other.
"""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import sleep
from typing import Any, ClassVar, Literal

import torch

from farcall.cli.bench.functions import owned_by_farcall, owned_by_stock

Transport = Literal["local", "tcp", "dynamic"]
"""How members reach each other; "dynamic" is "local" in a group without a fixed size."""
RPC_TIMEOUT_S = 120.0


class Contender(ABC):
    """One system, in one member of its team."""

    name: ClassVar[str]
    spins_when_idle: ClassVar[bool] = False
    """Whether it keeps its cores busy while nobody calls; then its team is frozen when it is not its turn."""

    @abstractmethod
    def start(self, rank: int, size: int, directory: str, transport: Transport) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...


class CallSystem(Contender):
    """A system of remote calls: member 0 calls, the others are called."""

    own_name: str
    init_method: str
    """Where the members met."""
    peers: list[str]
    rpc_sync: Callable[..., Any]
    rpc_async: Callable[..., Any]
    owned: Callable[[], int]
    """To be called on a peer: how many of its values others refer to."""
    remote: Callable[..., Any]
    autograd: Any
    """The module of contexts and backward passes."""
    optimizer: Callable[..., Any]
    """The class of distributed optimizers."""

    def start(self, rank: int, size: int, directory: str, transport: Transport) -> None:
        names = [f"member{index}" for index in range(size)]
        self.own_name = names[rank]
        self.peers = names[:rank] + names[rank + 1 :]
        self.init_method = f"file://{directory}/rendezvous"
        self.join(rank, size, self.init_method, transport)

    @abstractmethod
    def join(self, rank: int, size: int, init_method: str, transport: Transport) -> None: ...

    @abstractmethod
    def shared_empty(self, size_bytes: int) -> torch.Tensor:
        """A tensor where the system would like to have it."""


class Stock(CallSystem):
    """torch.distributed.rpc, as it comes."""

    name = "stock"
    spins_when_idle = True

    def join(self, rank: int, size: int, init_method: str, transport: Transport) -> None:
        # It warns of its own deprecation, from one release of torch to the next in other words.
        warnings.simplefilter("ignore")
        import torch.distributed.autograd
        import torch.distributed.rpc as rpc
        from torch.distributed.optim import DistributedOptimizer

        over_tcp = transport == "tcp"
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=init_method,
            rpc_timeout=RPC_TIMEOUT_S,
            _transports=["uv"] if over_tcp else None,
            _channels=["basic"] if over_tcp else None,
        )
        init_rpc: Any = rpc.init_rpc  # it has no annotations
        init_rpc(self.own_name, rank=rank, world_size=size, rpc_backend_options=options)
        self.rpc_sync: Callable[..., Any] = rpc.rpc_sync
        self.rpc_async: Callable[..., Any] = rpc.rpc_async
        self.owned = owned_by_stock
        self.remote: Callable[..., Any] = rpc.remote
        self.autograd: Any = torch.distributed.autograd
        self.optimizer: Any = DistributedOptimizer

    def stop(self) -> None:
        import torch.distributed.rpc as rpc

        rpc.shutdown()

    def shared_empty(self, size_bytes: int) -> torch.Tensor:
        # Stock has no such thing and copies every tensor on its way.
        return torch.zeros(size_bytes, dtype=torch.uint8)


class Farcall(CallSystem):
    """This package."""

    name = "farcall"

    def join(self, rank: int, size: int, init_method: str, transport: Transport) -> None:
        import farcall

        options = farcall.RpcBackendOptions(
            init_method=init_method,
            rpc_timeout=RPC_TIMEOUT_S,
            transports=["tcp"] if transport == "tcp" else None,
        )
        world_size = None if transport == "dynamic" else size
        if transport == "dynamic":
            logging.getLogger("farcall").setLevel(logging.ERROR)  # members die there, and on purpose
        farcall.init_rpc(self.own_name, rank=rank, world_size=world_size, rpc_backend_options=options)
        while len(farcall.members()) < size:
            sleep(0.01)  # the driver bounds this
        self.rpc_sync: Callable[..., Any] = farcall.rpc_sync
        self.rpc_async: Callable[..., Any] = farcall.rpc_async
        self.owned = owned_by_farcall
        self.remote: Callable[..., Any] = farcall.remote
        self.autograd: Any = farcall.autograd
        self.optimizer: Any = farcall.optim.DistributedOptimizer

    def stop(self) -> None:
        import farcall

        farcall.shutdown()

    def shared_empty(self, size_bytes: int) -> torch.Tensor:
        import farcall

        return farcall.shared_empty(size_bytes, dtype=torch.uint8).zero_()
