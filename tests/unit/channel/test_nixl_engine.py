"""The engine over NIXL, with an agent that only keeps a record: when it disconnects from a peer."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farcall.channel.nixl_engine import NixlEngine
from farcall.channel.transfer_engine import OpenedMemory, Transfer
from farcall.errors import RpcError


class Handle:
    def __init__(self) -> None:
        self.state = "PROC"
        self.is_released = False

    def release(self) -> None:
        self.is_released = True


class Agent:
    """NIXL's agent. A test sets the states of ``handles``."""

    backends = ("UCX",)

    def __init__(self, name: str, config: Any) -> None:
        self.name = name
        self.handles: list[Handle] = []
        self.known: set[str] = set()
        self.registered: list[Any] = []

    def register_memory(self, regions: Any, kind: str, backends: Any) -> object:
        registered = object()
        self.registered.append(registered)
        return registered

    def deregister_memory(self, registered: Any, backends: Any) -> None:
        self.registered.remove(registered)

    def get_partial_agent_metadata(self, registered: Any, connections: bool, backends: Any) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.known.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, ranges: Any, kind: str) -> Any:
        return ranges

    def initialize_xfer(self, way: str, ours: Any, theirs: Any, agent: str, backends: Any) -> Handle:
        if agent not in self.known:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.handles.append(Handle())
        return self.handles[-1]

    def transfer(self, handle: Handle) -> str:
        return handle.state

    def check_xfer_state(self, handle: Handle) -> str:
        if handle.state == "ERR":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return handle.state


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> tuple[NixlEngine, NixlEngine]:
    api = SimpleNamespace(nixl_agent=Agent, nixl_agent_config=lambda backends: None)
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_api=api))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    return NixlEngine(), NixlEngine()


def begin(memory: OpenedMemory) -> Transfer:
    return memory.begin(torch.zeros(4), [(0, 16)], write=False)


@pytest.mark.parametrize("last", ["DONE", "ERR"])
def test_a_failed_transfer_ends_no_other_one_with_its_peer(engines: tuple[NixlEngine, NixlEngine], last: str) -> None:
    owner, reader = engines
    description = owner.export(torch.zeros(4)).description
    agent: Agent = reader._agent
    memory = reader.open(description)
    failing, other = begin(memory), begin(memory)
    agent.handles[0].state = "ERR"
    with pytest.raises(RuntimeError, match="DISCONNECT"):
        failing.query()
    assert agent.known, "the other one is under way"
    assert not other.query()
    agent.handles[1].state = last
    if last == "DONE":
        assert other.query()
    else:
        with pytest.raises(RuntimeError, match="DISCONNECT"):
            other.query()
    assert not agent.known, "there is no other way to connect anew"
    assert not agent.registered
    assert all(handle.is_released for handle in agent.handles)
    with pytest.raises(RuntimeError, match="NOT_FOUND"):
        begin(memory)
    assert begin(reader.open(description))


def test_it_disconnects_with_the_last_memory_of_a_peer(engines: tuple[NixlEngine, NixlEngine]) -> None:
    owner, reader = engines
    description = owner.export(torch.zeros(4)).description
    memories = [reader.open(description) for _ in range(2)]
    memories[0].close()
    assert reader._agent.known
    memories[1].close()
    assert not reader._agent.known
    reader.close()
    with pytest.raises(RpcError, match="has ended"):
        begin(memories[0])
