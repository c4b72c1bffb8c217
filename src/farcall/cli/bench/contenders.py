"""The contenders: farcall and stock ``torch.distributed.rpc`` behind one interface, and the floor.

A contender lives in a member process of its own team. Cases see a `CallSystem` and no difference between farcall and
stock; a feature of only one of them (a tensor made in shared memory) falls back to the nearest thing of the other.

The floor is what this machine allows a Python program without any system of calls: two processes, one socket,
fixed-size headers and no dispatch. Large memory goes through a shared segment that is kept and warm (``memfd``, mapped
by both; one thread copies), or, over TCP, into a buffer that is kept and warm.

    header: kind (1 byte), padding, size in bytes (u64)     16 bytes each way

A kind says what the other side does before it answers with the same header.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import struct
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, ClassVar, Literal

import torch

from farcall.cli.bench.measure import Operation, work

Route = Literal["local", "tcp", "encrypted", "dynamic"]
"""The way between members; "dynamic" is "local" in a group without a fixed size, "encrypted" TCP with what a system has
for that: nothing, but for farcall."""
RPC_TIMEOUT_S = 120.0

_HEADER = struct.Struct("<c7xQ")
_PING = b"p"  # nothing
_BULK = b"b"  # receive that many bytes from the socket
_COPY_BACK = b"c"  # copy that many bytes from the first half of the segment to the second
_WORK = b"w"  # work for so many us
_HALF_BYTES = 256 << 20
_CONNECT_TIMEOUT_S = 60.0


class Contender(ABC):
    """One system, in one member of its team."""

    name: ClassVar[str]
    spins_when_idle: ClassVar[bool] = False
    """Does it keep its cores busy while nobody calls? Then its team is frozen when it is not its turn."""

    @abstractmethod
    def start(self, rank: int, size: int, directory: str, route: Route) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...


class CallSystem(Contender):
    """A system of remote calls: member 0 calls, the others are called."""

    here: ClassVar[CallSystem | None] = None
    """That of this process."""
    own_name: str
    init_method: str
    """Where the members met."""
    peers: list[str]
    rpc_sync: Callable[..., Any]
    rpc_async: Callable[..., Any]
    owned: Callable[[], int]
    """To be called on a peer: the number of its values that others refer to."""
    remote: Callable[..., Any]
    autograd: Any
    """The module of contexts and backward passes."""
    optimizer: Callable[..., Any]
    """The class of distributed optimizers."""

    def start(self, rank: int, size: int, directory: str, route: Route) -> None:
        names = [f"member{index}" for index in range(size)]
        self.own_name = names[rank]
        self.peers = names[:rank] + names[rank + 1 :]
        self.init_method = f"file://{directory}/rendezvous"
        CallSystem.here = self  # before others can call
        self.join(rank, size, self.init_method, route)

    @abstractmethod
    def join(self, rank: int, size: int, init_method: str, route: Route) -> None: ...

    def used_s(self) -> float:
        """The processor time that this member and its first peer have used so far."""
        there: float = self.rpc_sync(self.peers[0], time.process_time)
        return time.process_time() + there

    @abstractmethod
    def shared_empty(self, size_bytes: int) -> torch.Tensor:
        """A tensor where the system would like to have it."""


class Stock(CallSystem):
    """torch.distributed.rpc, as it comes."""

    name = "stock"
    spins_when_idle = True

    def join(self, rank: int, size: int, init_method: str, route: Route) -> None:
        # It warns of its own deprecation, in other words with each release of torch.
        warnings.simplefilter("ignore")
        import torch.distributed.autograd
        import torch.distributed.rpc as rpc
        from torch.distributed.optim import DistributedOptimizer

        over_tcp = route in ("tcp", "encrypted")
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
        self.remote: Callable[..., Any] = rpc.remote
        self.owned: Callable[[], int] = _owned_by_stock
        self.autograd: Any = torch.distributed.autograd
        self.optimizer: Callable[..., Any] = DistributedOptimizer

    def stop(self) -> None:
        import torch.distributed.rpc as rpc

        rpc.shutdown()

    def shared_empty(self, size_bytes: int) -> torch.Tensor:
        # Stock has no shared tensors and copies every tensor on its way.
        return torch.zeros(size_bytes, dtype=torch.uint8)


def _owned_by_stock() -> int:
    from torch.distributed import rpc

    info: dict[str, str] = rpc._rref_context_get_debug_info()  # type: ignore[attr-defined]
    return int(info["num_owner_rrefs"])


class Farcall(CallSystem):
    """This package."""

    name = "farcall"

    def join(self, rank: int, size: int, init_method: str, route: Route) -> None:
        import farcall

        options = farcall.RpcBackendOptions(
            init_method=init_method,
            rpc_timeout=RPC_TIMEOUT_S,
            transports=["tcp"] if route in ("tcp", "encrypted") else None,
            encryption="off" if route == "tcp" else "on",
        )
        world_size = None if route == "dynamic" else size
        if route == "dynamic":
            logging.getLogger("farcall").setLevel(logging.ERROR)  # members die there, and on purpose
        farcall.init_rpc(self.own_name, rank=rank, world_size=world_size, rpc_backend_options=options)
        while len(farcall.members()) < size:
            time.sleep(0.01)  # the driver bounds this
        self.rpc_sync: Callable[..., Any] = farcall.rpc_sync
        self.rpc_async: Callable[..., Any] = farcall.rpc_async
        self.remote: Callable[..., Any] = farcall.remote
        self.owned: Callable[[], int] = _owned_by_farcall
        self.autograd: Any = farcall.autograd
        self.optimizer: Callable[..., Any] = farcall.optim.DistributedOptimizer

    def stop(self) -> None:
        import farcall

        farcall.shutdown()

    def shared_empty(self, size_bytes: int) -> torch.Tensor:
        import farcall

        return farcall.shared_empty(size_bytes, dtype=torch.uint8).zero_()


def _owned_by_farcall() -> int:
    import farcall

    return int(farcall._rref_context_get_debug_info()["num_owner_rrefs"])


class Floor(Contender):
    """Bare sockets and bare copies."""

    name = "floor"

    def start(self, rank: int, size: int, directory: str, route: Route) -> None:
        self._rank = rank
        # With torch's default of one thread a core, in either process, many operations took 8.0 ms whatever their size
        # (64 KiB to 16 MiB, two cores); with one thread in both, none did. The cause is unknown. The price: where
        # nothing stalls, two threads copy 1 MiB and more 1.4 to 2.7 times quicker.
        torch.set_num_threads(1)
        if rank == 0:
            self._socket = _connect(directory, route)
            self._descriptor = -1
            if route == "local":
                self._descriptor = os.memfd_create("farcall-bench-floor")
                os.ftruncate(self._descriptor, 2 * _HALF_BYTES)
                socket.send_fds(self._socket, [b"f"], [self._descriptor])
                self._segment = _map(self._descriptor)
                self._segment.zero_()  # the first touch of a page must not be measured
        else:
            self._server = threading.Thread(target=_serve, args=(directory, route), daemon=True)
            self._server.start()

    def stop(self) -> None:
        if self._rank != 0:
            self._server.join()
            return
        self._socket.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def ping_pong(self) -> Operation:
        """A small message there and back."""
        return lambda: self._round_trip(_PING, 0)

    def work(self, lengths_us: Sequence[int]) -> Operation:
        """As `ping_pong`; the other side works before it answers, for one length after the other."""
        lengths = cycle(lengths_us)

        def operation() -> int:
            length_us = next(lengths)
            self._round_trip(_WORK, length_us)
            return length_us

        return operation

    def copy_in(self, size_bytes: int) -> Operation:
        """A copy into the warm segment, and a small message to tell of it."""
        source, target = torch.ones(size_bytes, dtype=torch.uint8), self._segment[:size_bytes]

        def operation() -> None:
            target.copy_(source)
            self._round_trip(_PING, 0)

        return operation

    def copy_into_fresh_memory(self, size_bytes: int) -> Operation:
        """A copy into memory that nobody has touched; into the same, the next time."""
        source, target = torch.ones(size_bytes, dtype=torch.uint8), torch.empty(size_bytes, dtype=torch.uint8)
        return partial(target.copy_, source)

    def copy_there_and_back(self, size_bytes: int) -> Operation:
        """As `copy_in`; the other side copies the bytes to a second place for the answer."""
        source, target = torch.ones(size_bytes, dtype=torch.uint8), self._segment[:size_bytes]

        def operation() -> None:
            target.copy_(source)
            self._round_trip(_COPY_BACK, size_bytes)

        return operation

    def stream(self, size_bytes: int) -> Operation:
        """Bytes through the socket, into a buffer that is kept."""
        source = memoryview(bytearray(b"\x01") * size_bytes)

        def operation() -> None:
            self._socket.sendall(_HEADER.pack(_BULK, size_bytes))
            self._socket.sendall(source)
            _receive(self._socket, memoryview(bytearray(_HEADER.size)))

        return operation

    def _round_trip(self, kind: bytes, size_bytes: int) -> None:
        self._socket.sendall(_HEADER.pack(kind, size_bytes))
        if len(self._socket.recv(_HEADER.size)) != _HEADER.size:
            raise ConnectionError("the other side of the floor is gone")


def _serve(directory: str, route: Route) -> None:
    connection = _accept(directory, route)
    segment = torch.empty(0, dtype=torch.uint8)
    if route == "local":
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        segment = _map(descriptors[0])
        os.close(descriptors[0])
    received = memoryview(bytearray(0))
    with connection:
        while header := connection.recv(_HEADER.size):
            kind, size_bytes = _HEADER.unpack(header)
            if kind == _BULK:
                if len(received) < size_bytes:
                    received = memoryview(bytearray(size_bytes))
                _receive(connection, received[:size_bytes])
            elif kind == _WORK:
                work(size_bytes)
            elif kind == _COPY_BACK:
                segment[_HALF_BYTES : _HALF_BYTES + size_bytes].copy_(segment[:size_bytes])
            connection.sendall(header)


def _receive(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target)
        if count == 0:
            raise ConnectionError("the other side of the floor is gone")
        target = target[count:]


def _map(descriptor: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 2 * _HALF_BYTES), dtype=torch.uint8)


def _accept(directory: str, route: Route) -> socket.socket:
    place = os.path.join(directory, "floor")
    if route == "local":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(place + ".new")
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        with open(place + ".new", "w") as file:
            file.write(str(listener.getsockname()[1]))
    listener.listen(1)
    # Only now can the place be found: a finder can connect at once.
    os.rename(place + ".new", place)
    with listener:
        connection, _ = listener.accept()
    if route == "tcp":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _connect(directory: str, route: Route) -> socket.socket:
    place = os.path.join(directory, "floor")
    give_up_at = time.monotonic() + _CONNECT_TIMEOUT_S
    while not os.path.exists(place):
        if time.monotonic() > give_up_at:
            raise TimeoutError("the other process of the baseline did not start")
        time.sleep(0.01)
    if route == "local":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(place)
        return connection
    with open(place) as file:
        connection = socket.create_connection(("127.0.0.1", int(file.read())))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


CONTENDERS: dict[str, type[Contender]] = {kind.name: kind for kind in (Floor, Stock, Farcall)}
