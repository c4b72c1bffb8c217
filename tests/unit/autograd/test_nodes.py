"""Single nodes called outside the engine behave as inside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farcall.autograd.functions import Edge, hooks_of
from farcall.autograd.leaves import call_end_hooks
from farcall.autograd.nodes import Gradients, Roots, run_node


def no_inner(roots: Roots, inputs: Any) -> Gradients:
    raise AssertionError("nothing is recomputed here")


def call(node: Any, *gradients: torch.Tensor | None) -> dict[Edge, torch.Tensor]:
    return dict(run_node(node, list(gradients), no_inner))


class Pair(torch.autograd.Function):
    """Two outputs, an argument that is no tensor, and a tensor that needs no gradient."""

    @staticmethod
    def forward(
        ctx: Any, first: torch.Tensor, factor: float, constant: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.factor = factor
        return first * factor, second + constant

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return one * ctx.factor, None, None, two.clone()


def test_a_builtin_node() -> None:
    first, second = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True)
    node: Any = (first * second).grad_fn
    found = call(node, torch.ones(2))
    assert [edge[0].variable for edge in found] == [first, second]
    torch.testing.assert_close(list(found.values()), [second.detach(), first.detach()])
    assert not any(gradient.requires_grad for gradient in found.values())


def test_a_python_function_gets_zeros_and_its_results_meet_their_edges() -> None:
    first, second = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True)
    outputs = Pair.apply(first, 3.0, torch.ones(2), second)
    found = call(outputs[0].grad_fn, torch.ones(2), None)
    found = {edge[0].variable: gradient.tolist() for edge, gradient in found.items()}
    assert found == {first: [3.0, 3.0], second: [0.0, 0.0]}


def test_hooks_before_and_after_run_and_may_replace() -> None:
    leaf = torch.rand(2, requires_grad=True)
    node: Any = leaf.sin().grad_fn
    node.register_prehook(lambda gradients: (gradients[0] * 2,))
    node.register_hook(lambda results, gradients: (results[0] * gradients[0] * 5,))
    (gradient,) = call(node, torch.ones(2)).values()
    torch.testing.assert_close(gradient, leaf.detach().cos() * 20)
    assert len(hooks_of(node.register_hook)) == 1


def test_hooks_of_an_accumulator_run_around_it_and_the_first_may_replace() -> None:
    leaf = torch.rand(2, requires_grad=True)
    node: Any = leaf.sin().grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    seen: list[Any] = []
    node.register_prehook(lambda gradients: (gradients[0] * 2,))
    node.register_prehook(lambda gradients: None)
    node.register_hook(lambda results, gradients: seen.append((results, gradients[0].tolist())))
    found = call_end_hooks(node, {0: torch.ones(2)})[0]
    assert found is not None
    assert found.tolist() == [2.0, 2.0]
    assert seen == [((), [2.0, 2.0])]


def test_anomaly_mode_finds_nan_and_says_where_the_node_was_made() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        node = leaf.sqrt().grad_fn
        with pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan") as told:
            call(node, torch.zeros(2))
    assert "leaf.sqrt()" in told.value.__notes__[0]


def test_what_leaves_has_the_dtype_and_shape_of_its_tensor() -> None:
    class Loose(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return torch.ones(4, 2, dtype=torch.float64)

    output = Loose.apply(torch.rand(2, requires_grad=True))
    (gradient,) = call(output.grad_fn, torch.ones(2)).values()
    assert gradient.dtype is torch.float32
    assert gradient.tolist() == [4.0, 4.0]
