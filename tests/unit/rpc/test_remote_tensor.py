"""The timeout of a read or write of a shared tensor, with an owner that takes its time, and a clock to turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farcall.errors import RpcTimeout
from farcall.rpc import remote_tensor as module
from farcall.rpc.remote_tensor import RemoteTensor
from farcall.rpc.shared_tensor import lend, read
from farcall.rpc.timeouts import UNSET_TIMEOUT
from farcall.rpc.transfers import Transfers
from farcall.runtime.peers.peer import RemotePeer

DEFAULT_S = 60.0


class Owner(RemotePeer):
    """An owner that offers its memory again and again, and takes ``pause_s`` for each answer."""

    def __init__(self) -> None:
        self.segments: Any = object()
        self.devices = None


class Rig:
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, pause_s: float, *, mappable: bool, exported: Any = None
    ) -> None:
        self.now = 1000.0
        self.pause_s = pause_s
        self.asked: list[tuple[Any, float | None]] = []
        self.transfers = SimpleNamespace(name="engine", open=lambda description: None)
        monkeypatch.setattr(module, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "encode_request", lambda *_: None)
        monkeypatch.setattr(module, "ask", self.ask)
        node = SimpleNamespace(timeout_s=DEFAULT_S, part={Transfers: self.transfers}.__getitem__)
        references = SimpleNamespace(node=node, peer=lambda fork: owner, in_use={})
        owner = Owner()
        fork = SimpleNamespace(ref=SimpleNamespace(created_on=0, local_id=0), fork_id=0)
        rref: Any = SimpleNamespace(_references=references, _fork=fork, is_owner=lambda: False)
        shape = (1024, 1024)
        self.tensor = RemoteTensor(
            rref, shape, dtype=torch.float32, writable=True, mappable=mappable, exported=exported
        )

    def ask(self, rref: Any, peer: Any, function: Any, frame: Any, timeout: float | None) -> Any:
        self.asked.append((function, timeout))
        limit_s = DEFAULT_S if timeout == UNSET_TIMEOUT else timeout or float("inf")
        if self.pause_s > limit_s:
            self.now += limit_s
            raise RpcTimeout("too late")
        self.now += self.pause_s
        return True if function is lend else torch.zeros(1024, 1024)

    def read(self, timeout: float | None) -> None:
        self.tensor.read_into(torch.empty(1024, 1024), timeout=timeout)


@pytest.mark.parametrize(("timeout", "seconds"), [(10.0, 10.0), (UNSET_TIMEOUT, DEFAULT_S)])
def test_all_steps_of_a_read_together_keep_its_timeout(
    monkeypatch: pytest.MonkeyPatch, timeout: float, seconds: float
) -> None:
    rig = Rig(monkeypatch, 0.4 * seconds, mappable=True)
    with pytest.raises(RpcTimeout):
        rig.read(timeout)
    assert rig.now == pytest.approx(1000.0 + seconds)
    assert rig.asked[0] == (lend, timeout), "the first call has the timeout that errors tell"


def test_without_a_limit_no_step_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 1000.0, mappable=True)
    rig.read(None)
    assert {given for _, given in rig.asked} == {None}


def test_a_call_after_a_failed_transfer_has_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.0, mappable=False, exported=("engine", b""))
    opened = object.__new__(module.OpenedTensor)
    opened._transfers = SimpleNamespace(close_soon=lambda memory: None)  # type: ignore[assignment]
    opened.memory = None  # type: ignore[assignment]

    def copy(*_: Any, deadline: float, **__: Any) -> bool:
        assert deadline == 1010.0
        rig.now += 7.0
        return False

    rig.transfers.open, rig.transfers.copy = lambda description: opened, copy
    rig.read(10.0)
    assert rig.asked == [(read, pytest.approx(3.0))]
