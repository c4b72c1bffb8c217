"""Scripts that need the extension are refused when they are called; others run, and torch's classes come back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.rpc import RRef

from farcall.errors import RpcError
from farcall.torchscript import need

pytestmark = pytest.mark.skipif(not hasattr(torch._C, "_rpc_init"), reason="this torch compiles no RPC")


def add(x, y: int):  # type: ignore[no-untyped-def]
    return x + y


def issue(x):  # type: ignore[no-untyped-def]
    return rpc.rpc_sync("other", add, (x, 1))


def issue_deep_inside(x):  # type: ignore[no-untyped-def]
    return issue(x) + 1


def issue_on_another_thread(x):  # type: ignore[no-untyped-def]
    return torch.jit._wait(torch.jit._fork(issue_deep_inside, x))


def fetch(rref: RRef[Tensor]) -> Tensor:
    return rref.to_here()


def talk_about_it(x):  # type: ignore[no-untyped-def]
    if bool(x.sum() > 5):
        raise RuntimeError('no "RRef[Tensor]", nor prim::rpc_sync')
    return x


class Issuing(torch.nn.Module):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return issue(x)

    @torch.jit.export
    def harmless(self, x):  # type: ignore[no-untyped-def]
        return x


def script(what: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and says so
        return torch.jit.script(what)


@pytest.fixture
def refused() -> Iterator[None]:
    need.refuse("there is no compiler")
    yield
    need.stop_refusing()


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("function", [issue, issue_deep_inside, issue_on_another_thread, fetch])
def test_what_needs_the_extension_is_refused(function: Any) -> None:
    compiled = script(function)
    for _ in range(2):
        with pytest.raises(RpcError, match="there is no compiler"):
            compiled(torch.ones(1))


@pytest.mark.usefixtures("refused")
def test_what_does_not_need_it_runs() -> None:
    for _ in range(2):
        assert script(add)(torch.ones(1), 2).item() == 3
        assert script(talk_about_it)(torch.ones(1)).item() == 1


@pytest.mark.usefixtures("refused")
def test_of_a_module_only_the_method_that_needs_it_is_refused() -> None:
    module = script(Issuing())
    for _ in range(2):
        assert module.harmless(torch.ones(1)).item() == 1
        with pytest.raises(RpcError, match="there is no compiler"):
            module(torch.ones(1))


def test_torchs_classes_come_back(refused: None) -> None:
    need.stop_refusing()
    with pytest.raises(RuntimeError) as raised:
        script(issue)(torch.ones(1))
    assert not isinstance(raised.value, RpcError)
