"""What a person sees who prints a node or a future in a debugger."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

import farcall

GATE = threading.Event()


def wait_for_gate() -> list[int]:
    GATE.wait()
    return [1]


def test_a_node_and_its_futures(tmp_path: Path) -> None:
    options = farcall.RpcBackendOptions(init_method=f"file://{tmp_path}/store", rpc_timeout=None)
    node = farcall.Node("w0", rank=0, world_size=1, options=options)
    assert repr(node) == "<Node 'w0': new>"
    with node:
        assert repr(node) == "<Node 'w0': rank 0 of 1, running>"
        assert "<th>members</th><td>w0</td>" in node._repr_html_()
        assert "<th>w0</th><td>0</td><td>yes</td>" in node.members()._repr_html_()  # type: ignore[attr-defined]
        reference = node.remote("w0", list)
        assert repr(reference) == "<RRef 0:0 to a value of 'w0'>"
        assert "w0 (rank 0)" in reference._repr_html_()
        assert re.fullmatch(r"<Metrics of 'w0': running, up \d+ s, \d+ calls made, \d+ served>", repr(node.metrics()))
        assert "<td>list</td>" in node.metrics()._repr_html_()
        del reference
        GATE.clear()
        future = node.rpc_async("w0", wait_for_gate)
        assert repr(future) == "<Future of wait_for_gate() on 'w0': pending>"
        bounded = node.rpc_async("w0", wait_for_gate, timeout=500)
        assert repr(bounded).startswith("<Future of wait_for_gate() on 'w0': pending, ")
        assert repr(bounded).endswith(" s left>")
        both = farcall.gather(future, bounded)
        assert repr(both) == "<Gathered of 2 futures: pending>"
        GATE.set()
        assert future.wait() == bounded.wait() == [1]
        assert both.wait() == ([1], [1])
        assert repr(both) == "<Gathered of 2 futures: done, tuple>"
        assert repr(future.then(int)).startswith("<DerivedFuture: ")
        assert repr(future) == "<Future of wait_for_gate() on 'w0': done, list>"
        failed = node.rpc_async("w0", int, args=("x",))
        with pytest.raises(ValueError):
            failed.wait()
        assert repr(failed) == (
            "<Future of int() on 'w0': failed, ValueError: invalid literal for int() with base 10: 'x'>"
        )
    assert repr(node) == "<Node 'w0': ended>"
