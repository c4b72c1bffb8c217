"""Plain tensors on a GPU beside a flat payload: which ones take it, what both writers write, and what arrives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.callees import CUDA, MAPS, MEBIBYTE, echo, share

import farcall
from farcall.options import MemoryOptions
from farcall.serialize import flat
from farcall.testing.cluster import run_cluster

PLAIN = {
    "a scalar": lambda: torch.tensor(3.5, device=CUDA),
    "small": lambda: torch.arange(10, device=CUDA, dtype=torch.int16),
    "large": lambda: torch.randn(MEBIBYTE, device=CUDA).bfloat16(),
    "empty": lambda: torch.empty(0, 3, device=CUDA),
    "rows amid others": lambda: torch.arange(4096.0, device=CUDA).view(64, 64)[3:7],
    "that requires a gradient": lambda: torch.randn(9, device=CUDA, requires_grad=True),
    "complex": lambda: torch.randn(300, dtype=torch.complex64, device=CUDA),
}
OTHERS = {
    "a column": lambda: torch.arange(4096.0, device=CUDA).view(64, 64)[:, 5],
    "transposed": lambda: torch.arange(4096.0, device=CUDA).view(64, 64).t(),
    "expanded": lambda: torch.ones(3, 1, device=CUDA).expand(3, 1000),
    "conjugate": lambda: torch.randn(300, dtype=torch.complex64, device=CUDA).conj(),
    "sparse": lambda: torch.eye(50, device=CUDA).to_sparse(),
    "a parameter": lambda: torch.nn.Parameter(torch.randn(7, device=CUDA)),
    "two views": lambda: list(torch.arange(64.0, device=CUDA).split(32)),
    "shrunk": lambda: _shrunk(),
}
WRITERS = [
    pytest.param(flat.write_in_python, id="python"),
    pytest.param(flat.write_flat, id="compiled", marks=pytest.mark.skipif(bool(flat.speedups), reason=flat.speedups)),
]


def _shrunk() -> torch.Tensor:
    tensor = torch.ones(100, device=CUDA)
    tensor.untyped_storage().resize_(8)
    return tensor


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_plain_tensors_are_flat(name: str, write: Any) -> None:
    value = (PLAIN.get(name) or OTHERS[name])()
    met: list[torch.Tensor] = []
    on_devices: list[torch.Tensor] = []
    written = write((value, 7), met, 65536, None, None, on_devices)
    if name in OTHERS:
        assert written is None
        return
    assert written == (flat.write_in_python((value, 7), None, 65536, None, None, [])[0], ())
    assert [id(tensor) for tensor in met] == [id(tensor) for tensor in on_devices] == [id(value)]
    assert write((value, 7), None, 65536) is None
    made = torch.zeros_like(value)
    assert flat.read_flat(written[0], (), None, (), lambda *_: made)[0] is made


def each_kind(rank: int, shared: bool) -> None:
    if rank:
        return
    if shared:
        share("w1")
    for _ in range(2):
        for name, make in {**PLAIN, **OTHERS}.items():
            if name == "shrunk":
                continue
            value = make()
            (back,) = farcall.rpc_sync("w1", echo, (value,))
            pairs = zip(value, back, strict=True) if isinstance(value, list) else [(value, back)]
            for sent, received in pairs:
                assert type(received) is type(sent), name
                assert (received.device, received.dtype, received.shape) == (sent.device, sent.dtype, sent.shape), name
                assert received.requires_grad == sent.requires_grad, name
                assert torch.equal(received.to_dense(), sent.to_dense()), name


@pytest.mark.parametrize("shared", [True, False])
def test_each_kind_arrives(shared: bool) -> None:
    run_cluster(2, each_kind, shared, memory=MemoryOptions(device_sharing=shared), **MAPS)


def mixed(rank: int) -> None:
    if rank:
        return
    share("w1")
    x, on_cpu = torch.randn(1000, device=CUDA), torch.randn(50_000)
    large = torch.randn(MEBIBYTE, device=CUDA)
    reference = farcall.remote("w1", torch.ones, (3,))
    value = {"x": x, "again": [x, (x, 5)], "cpu": on_cpu, "large": large, "reference": reference, "text": "t"}
    (back,) = farcall.rpc_sync("w1", echo, (value,))
    assert back["again"][0] is back["x"]
    assert back["again"][1] == (back["x"], 5)
    assert torch.equal(back["x"], x)
    assert torch.equal(back["cpu"], on_cpu)
    assert torch.equal(back["large"], large)
    assert torch.equal(back["reference"].to_here(), torch.ones(3))
    back["x"].zero_()
    assert x.any(), "a received tensor is the receiver's own"


def test_beside_cpu_tensors_and_references() -> None:
    run_cluster(2, mixed, **MAPS)
