"""What is sent keeps the graph that it came from, whatever torch's nodes do of themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farcall.autograd import functions
from farcall.autograd.functions import SendFunction


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.parametrize("nodes_live_alone", [functions._NODES_LIVE_ALONE, False])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_graph_of_a_python_function_outlives_its_tensors(
    monkeypatch: pytest.MonkeyPatch, nodes_live_alone: bool, sparse: bool
) -> None:
    monkeypatch.setattr(functions, "_NODES_LIVE_ALONE", nodes_live_alone)
    leaf = torch.eye(2).to_sparse().requires_grad_() if sparse else torch.eye(2, requires_grad=True)
    send = SendFunction(1, 1, [Twice.apply(leaf), leaf * 2, leaf])  # type: ignore[no-untyped-call]
    nodes = [node for node, _ in send.next_functions]
    assert nodes[2] is nodes[0].next_functions[0][0] is nodes[1].next_functions[0][0]
    if not nodes_live_alone:
        # As long as something of torch's own leads to it, a node lives in every version.
        [above, product, _] = send._owners
        assert not isinstance(above, torch._C._FunctionBase)
        assert above.next_functions[0][0] is nodes[0]
        assert product is nodes[1]
