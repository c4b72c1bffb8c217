"""What becomes of backward passes and contexts when something breaks: an error soon, nothing left, nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, ClassVar

import pytest
import torch
from tests.kit.autograd_callees import counts, known, onward, released_everywhere, through_weight
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
import farcall.autograd as autograd
from farcall.errors import PeerDead, RpcError, RpcTimeout
from farcall.testing.cluster import finish, run_cluster, start_cluster

SOON_S = 2 * LONG_S


class Trap(torch.autograd.Function):
    """Its backward does something bad, at the worker where its forward ran."""

    gate: ClassVar[threading.Event] = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, deed: str) -> torch.Tensor:
        ctx.deed = deed
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.deed == "raise":
            raise ValueError("broken on purpose")
        if ctx.deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.deed == "stall":
            Trap.gate.wait(SOON_S)
        if ctx.deed == "misshape":
            return gradient.new_ones(7, 7), None
        return gradient, None

    @classmethod
    def open(cls) -> None:
        cls.gate.set()


def trapped(deed: str, route: list[str], x: torch.Tensor) -> torch.Tensor:
    """Through a trap here, then through the others of the route, the trap being the first to run backwards if last."""
    y = Trap.apply(through_weight(x), deed)
    return farcall.rpc_sync(route[0], onward, (route[1:], y)) if route else y


def on_the_way(deed: str, route: list[str], x: torch.Tensor) -> torch.Tensor:
    """The trap is at the first of the route."""
    return farcall.rpc_sync(route[0], trapped, (deed, route[1:], x))


def all_quiet(names: list[str]) -> None:
    for name in names:
        wait_until(
            lambda name=name: (
                farcall.rpc_sync(name, counts) == {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}
            ),
            f"quiet on {name}",
        )


def failing_function(rank: int) -> None:
    if rank:
        return
    x = torch.rand(2, 3, requires_grad=True)
    everyone = ["w0", "w1", "w2"]
    ways: list[Any] = [
        lambda deed: farcall.rpc_sync("w1", trapped, (deed, [], x)),
        lambda deed: farcall.rpc_sync("w1", trapped, (deed, ["w2", "w0"], x)),
        lambda deed: farcall.rpc_sync("w1", on_the_way, (deed, ["w2", "w1"], x)),
        lambda deed: Trap.apply(farcall.rpc_sync("w1", onward, (["w2"], x)), deed),
        lambda deed: farcall.rpc_sync("w1", onward, (["w2"], Trap.apply(x * 1.0, deed))),
    ]
    for way in ways:
        for deed, text in (("raise", "broken on purpose"), ("misshape", "shape|size")):
            with autograd.context() as context_id:
                loss = way(deed).sum()
                with pytest.raises(RpcError, match=rf"Error on Node \d: .*({text})"):
                    autograd.backward(context_id, [loss])
                # The failed pass left no gradient behind, and another one is right.
                assert not autograd.get_gradients(context_id)
                other = farcall.rpc_sync("w1", onward, (["w2"], x)).sum()
                autograd.backward(context_id, [other])
                assert x in autograd.get_gradients(context_id)
            released_everywhere(context_id, everyone)
    all_quiet(everyone)


def test_a_failing_backward_function_anywhere() -> None:
    run_cluster(3, failing_function)


def lose_one(rank: int, route: list[str]) -> str:
    names = ["w0", "w1", "w2", "w3"]
    if rank:
        if rank != 2:
            wait_until(lambda: Ended.here, "the end")
        else:
            threading.Event().wait()
        return ""
    x = torch.rand(2, 3, requires_grad=True)
    with autograd.context() as context_id:
        loss = farcall.rpc_sync(route[0], on_the_way, ("die", route[1:], x)).sum()
        with pytest.raises(RpcError) as caught:
            autograd.backward(context_id, [loss])
        # The others know the context still, and calls in it go on.
        assert farcall.rpc_sync("w3", known, (context_id,))
        y = farcall.rpc_sync("w1", onward, (["w3"], x)).sum()
        with pytest.raises(RpcError, match=r"w2|gone"):
            autograd.backward(context_id, [y])  # recorded in a context of which a part is lost
    alive = [name for name in names if name != "w2"]
    released_everywhere(context_id, alive)
    all_quiet(alive)
    with autograd.context() as context_id:
        y = farcall.rpc_sync("w1", onward, (["w3", "w0"], x)).sum()
        autograd.backward(context_id, [y])
        assert x in autograd.get_gradients(context_id)
    all_quiet(alive)
    for name in ("w1", "w3"):
        farcall.rpc_sync(name, Ended.set)
    return str(caught.value)


class Ended:
    here: ClassVar[bool] = False

    @classmethod
    def set(cls) -> None:
        cls.here = True


@pytest.mark.parametrize("route", [["w1", "w2", "w3"], ["w2", "w2", "w3"], ["w3", "w2", "w1"]])
def test_a_worker_that_dies_in_the_middle_of_a_pass(route: list[str]) -> None:
    (text, *_) = finish(start_cluster(4, lose_one, route), may_fail=[2])
    assert "w2" in text or "gone" in text


def lose_the_origin(rank: int) -> None:
    if rank == 0:
        autograd._new_context()
        x = torch.rand(2, 3, requires_grad=True)
        farcall.rpc_sync("w1", onward, (["w2"], x))
        for name in ("w1", "w2"):
            wait_until(lambda name=name: farcall.rpc_sync(name, _has_seen), f"the context at {name}")  # type: ignore[misc]
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: _seen_and_gone(), "the release")


def _seen_and_gone() -> bool:
    if counts()["num_autograd_contexts"] == "1":
        Seen.it = True
    return Seen.it and counts()["num_autograd_contexts"] == "0"


class Seen:
    it: ClassVar[bool] = False


def _has_seen() -> bool:
    return Seen.it


def test_contexts_of_a_dead_worker_are_released() -> None:
    finish(start_cluster(3, lose_the_origin), may_fail=[0])


def too_slow(rank: int) -> None:
    if rank:
        return
    x = torch.rand(2, 3, requires_grad=True)
    with autograd.context() as context_id:
        loss = farcall.rpc_sync("w1", trapped, ("stall", ["w2"], x)).sum()
        farcall._set_rpc_timeout(0.5)
        with pytest.raises(RpcTimeout, match="timed out"):
            autograd.backward(context_id, [loss])
        farcall._set_rpc_timeout(SOON_S)
    released_everywhere(context_id, ["w0", "w1", "w2"])
    farcall.rpc_sync("w1", Trap.open)
    all_quiet(["w0", "w1", "w2"])


def test_a_pass_that_takes_too_long() -> None:
    run_cluster(3, too_slow)


def late_answer(rank: int) -> None:
    """An answer that comes after its call timed out is nobody's, and a pass does not wait for its gradient."""
    if rank:
        return
    x = torch.rand(2, 3, requires_grad=True)
    with autograd.context() as context_id:
        with pytest.raises(RpcTimeout):
            farcall.rpc_sync("w1", wait_then_through, (x,), timeout=0.1)
        y = farcall.rpc_sync("w1", through_weight, (x,))
        farcall.rpc_sync("w1", Trap.open)
        autograd.backward(context_id, [y.sum()])
        assert x in autograd.get_gradients(context_id)
    all_quiet(["w0", "w1"])


def wait_then_through(x: torch.Tensor) -> torch.Tensor:
    Trap.gate.wait(SOON_S)
    return through_weight(x)


def test_an_answer_that_comes_too_late() -> None:
    run_cluster(2, late_answer)


class Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not to be read")


def with_unreadable(x: torch.Tensor) -> Any:
    return x * 2, Unreadable()


def unreadable(rank: int) -> None:
    if rank:
        return
    x = torch.rand(2, 3, requires_grad=True)
    with autograd.context() as context_id:
        for call in (
            lambda: farcall.rpc_sync("w1", through_weight, (x, Unreadable())),
            lambda: farcall.rpc_sync("w1", with_unreadable, (x,)),
            lambda: farcall.rpc_async("w1", with_unreadable, (x,)).wait(),
            lambda: farcall.rpc_sync("w1", with_unreadable, (x, 1, 2)),
        ):
            with pytest.raises((RpcError, TypeError)):
                call()
        y = farcall.rpc_sync("w1", through_weight, (x,))
        autograd.backward(context_id, [y.sum()])
        assert x in autograd.get_gradients(context_id)
    all_quiet(["w0", "w1"])


def test_messages_that_cannot_be_read() -> None:
    run_cluster(2, unreadable)


def unreachable(rank: int) -> None:
    if rank == 1:
        threading.Event().wait()
    with pytest.raises(PeerDead):
        farcall.rpc_sync("w1", _die)
    x = torch.rand(2, 3, requires_grad=True)
    with autograd.context() as context_id:
        wait_until(lambda: _is_dead("w1", x), "the death of w1")
        y = farcall.rpc_sync("w0", through_weight, (x,)).sum()
        with pytest.raises(RpcError, match=r"w1|gone|link"):
            autograd.backward(context_id, [y])
    assert not autograd._is_valid_context(context_id)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _is_dead(name: str, x: torch.Tensor) -> bool:
    try:
        farcall.rpc_sync(name, through_weight, (x,))
    except PeerDead:
        return True
    return False


def test_calls_to_the_dead_fail_the_pass_and_do_not_hang_it() -> None:
    finish(start_cluster(2, unreachable), may_fail=[1])
