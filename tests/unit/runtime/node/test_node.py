"""A node before it has met anybody."""

from __future__ import annotations

import pytest

from farcall.node import Node
from farcall.options import RpcBackendOptions
from farcall.runtime.io import sigint
from farcall.runtime.node import current, resources


def test_a_start_without_descriptors_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loop(*_: object) -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(resources, "Loop", no_loop)
    started = set(current.STARTED)
    node = Node("w0", 0, 1, RpcBackendOptions(init_method="tcp://127.0.0.1:1"))
    users = sigint._users
    with pytest.raises(OSError, match="too many"):
        node.start()
    assert sigint.here.guard.sealed == 0, "Ctrl-C would be held back for good"
    assert sigint._users == users
    assert set(current.STARTED) == started, "a forked child would close what there is not"
    assert repr(node) == "<Node 'w0': ended>"
    node.shutdown()
