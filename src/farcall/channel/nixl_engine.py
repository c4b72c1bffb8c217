"""The transfer engine over NIXL (``pip install nixl``), by UCX: InfiniBand and the like, or TCP.

Uses NIXL's own interface, ``nixl._api``. torch 2.15 has one over it, `torch.distributed._transport`, with an endpoint
for each pair of peers. There a transfer whose peer died stays pending for good, and so do the endpoint, its threads and
its descriptors: torch takes NIXL's error about the state of a transfer for no news. Here that error ends it.

    description   agent, address, size, metadata: the agent's addresses, and the keys of this memory

Each call of NIXL is made under one lock, since an agent is not safe for threads by default. With UCX over TCP the owner
copies in a thread of the library, and does not look whether the memory is still there. So the owner must keep memory
until all transfers are over: `rpc/transfers.py` sees to that.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections import Counter
from contextlib import suppress
from importlib import import_module
from typing import Any

import msgspec
import torch

from farcall.channel.transfer_engine import Exported, OpenedMemory, Ranges, Transfer
from farcall.errors import RpcError

_UCX = ["UCX"]
_HOST = "DRAM"


class _Description(msgspec.Struct, array_like=True, frozen=True):
    agent: str
    address: int
    size_bytes: int
    metadata: bytes


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Description)


class NixlEngine:
    """NIXL's agent of one node.

    Mutable, under the lock: the agent, its transfers, what is open of each peer, and the peers to disconnect from.
    """

    def __init__(self) -> None:
        try:
            nixl = import_module("nixl._api")
        except (ImportError, OSError) as error:
            raise RpcError(f"the transfer engine 'nixl' needs `pip install nixl`: {error}") from error
        self._lock = threading.Lock()
        self._transfers: set[_Transfer] = set()
        self._opened: Counter[str] = Counter()
        self._failed: set[str] = set()  # peers to disconnect from, once no transfer with them is under way
        self._agent: Any = nixl.nixl_agent(f"farcall-{secrets.token_hex(8)}", nixl.nixl_agent_config(backends=_UCX))
        # A forked child lacks the agent's thread, and the destructor would wait for it: only `close` ends an agent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))
        if "UCX" not in self._agent.backends:
            self.close()
            raise RpcError("the transfer engine 'nixl' needs NIXL's plug-in for UCX, which this NIXL does not have")

    def export(self, tensor: torch.Tensor) -> Exported:
        """Register the memory of ``tensor`` with the agent."""
        with self._lock:
            agent = self._running()
            registered = agent.register_memory(_regions(tensor), _HOST, _UCX)
            metadata = agent.get_partial_agent_metadata(registered, True, _UCX)
            description = _Description(agent.name, tensor.data_ptr(), tensor.nbytes, metadata)
        return _Exported(self, registered, _ENCODER.encode(description))

    def open(self, description: bytes) -> OpenedMemory:
        """Make the memory known to the agent. It connects with the first transfer."""
        place = _DECODER.decode(description)
        with self._lock:
            loaded = self._running().add_remote_agent(place.metadata)
            if (loaded.decode() if isinstance(loaded, bytes) else loaded) != place.agent:
                raise RpcError("the description of exported memory names another agent than its metadata")
            self._opened[place.agent] += 1
        return _Opened(self, place)

    def close(self) -> None:
        """End the agent, with its threads and connections."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            for transfer in self._transfers:  # its handle would keep the agent
                with suppress(Exception):
                    transfer.handle.release()
                transfer.handle = None
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(agent))
            del agent

    def begin(self, place: _Description, local: torch.Tensor, ranges: Ranges, write: bool) -> _Transfer:
        """Begin one transfer."""
        if any(first < 0 or size <= 0 or first + size > place.size_bytes for first, size in ranges):
            raise ValueError(f"a range lies outside {place.size_bytes} bytes of exported memory")
        ours, theirs, at = [], [], local.data_ptr()
        for first, size in ranges:
            ours.append((at, size, 0))
            theirs.append((place.address + first, size, 0))
            at += size
        with self._lock:
            agent = self._running()
            registered = agent.register_memory(_regions(local), _HOST, _UCX)
            try:
                handle = agent.initialize_xfer(
                    "WRITE" if write else "READ",
                    agent.get_xfer_descs(ours, _HOST),
                    agent.get_xfer_descs(theirs, _HOST),
                    place.agent,
                    backends=_UCX,
                )
                state = agent.transfer(handle)
            except BaseException:
                agent.deregister_memory(registered, _UCX)
                self._forget(place.agent)
                raise
            transfer = _Transfer(self, place.agent, local, registered, handle, state)
            self._transfers.add(transfer)
        return transfer

    def look(self, transfer: _Transfer) -> bool:
        """Is a transfer done? Raises if it has failed."""
        with self._lock:
            agent = self._running()
            if transfer.handle is None:
                return True
            try:
                if transfer.state == "PROC":
                    transfer.state = agent.check_xfer_state(transfer.handle)
            except Exception:  # the peer is gone, or the library has failed
                transfer.state = "ERR"
                self._finish(transfer)
                raise
            if transfer.state == "PROC":
                return False
            self._finish(transfer)
            if transfer.state != "DONE":
                raise RpcError("NIXL reports that a transfer failed")
            return True

    def _finish(self, transfer: _Transfer) -> None:
        """Free what a transfer has used, and disconnect from its peer if it failed. Under the lock."""
        self._transfers.discard(transfer)
        handle, transfer.handle = transfer.handle, None
        with suppress(Exception):  # a handle that cannot be released now is with the agent
            handle.release()
        self._agent.deregister_memory(transfer.registered, _UCX)
        if transfer.state != "DONE" or transfer.agent in self._failed:
            self._forget(transfer.agent)

    def give_back(self, registered: Any) -> None:
        """Deregister exported memory."""
        with self._lock:
            if self._agent is not None:
                self._agent.deregister_memory(registered, _UCX)

    def shut(self, agent: str) -> None:
        """One opened memory less of that peer; after the last one the agent disconnects."""
        with self._lock:
            self._opened[agent] -= 1
            if self._opened[agent] <= 0:
                del self._opened[agent]
                self._forget(agent)

    def _forget(self, agent: str) -> None:
        """Disconnect from a peer: there is no other way to connect anew. Under the lock.

        With the last of its transfers: NIXL reports all others as failed at once, and they may go on writing to memory
        that their callers then free.
        """
        if any(transfer.agent == agent for transfer in self._transfers):
            self._failed.add(agent)
            return
        self._failed.discard(agent)
        if self._agent is not None:
            with suppress(Exception):  # it is not known: an earlier failure has had it forgotten
                self._agent.remove_remote_agent(agent)

    def _running(self) -> Any:
        if self._agent is None:
            raise RpcError("the node has ended, and its transfer engine with it")
        return self._agent


class _Transfer(Transfer):
    """One transfer. Mutable, under the engine's lock: its state, and its handle, which is None once it is over."""

    def __init__(
        self, engine: NixlEngine, agent: str, local: torch.Tensor, registered: Any, handle: Any, state: str
    ) -> None:
        self._engine = engine
        self._local = local  # the library writes to it until the transfer is over
        self.agent: str = agent
        self.registered: Any = registered
        self.handle: Any = handle
        self.state: str = state

    def query(self) -> bool:
        return self._engine.look(self)


class _Exported(Exported):
    """Registered memory."""

    def __init__(self, engine: NixlEngine, registered: Any, description: bytes) -> None:
        self._engine = engine
        self._registered = registered
        self._description = description

    @property
    def description(self) -> bytes:
        return self._description

    def close(self) -> None:
        self._engine.give_back(self._registered)


class _Opened(OpenedMemory):
    """Memory that a peer has registered."""

    def __init__(self, engine: NixlEngine, place: _Description) -> None:
        self._engine = engine
        self._place = place

    def begin(self, local: torch.Tensor, ranges: Ranges, *, write: bool) -> Transfer:
        return self._engine.begin(self._place, local, ranges, write)

    def close(self) -> None:
        self._engine.shut(self._place.agent)


def _regions(tensor: torch.Tensor) -> list[tuple[int, int, int, str]]:
    return [(tensor.data_ptr(), tensor.nbytes, 0, "")]
