"""Asking for what a reference stands for: at its owner, or here, where this node is the owner.

Owns how a question to an owner is sent and what its failure means: an owner that is gone makes the reference lost, and
a creation that failed is why there is no value. What is asked are the functions of `owner_methods.py`. Questions
that change nothing are asked again where they were refused or their answer was lost.

On any thread of the program; `ask` is the hot path of methods called through references.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from farcall.errors import AnswerLost, NetworkError, Overloaded, ReferenceLost, RpcError, RpcTimeout
from farcall.protocol.frames import Frame
from farcall.rpc.call import UNSET_TIMEOUT, check_timeout, plain_request, read_answer, send
from farcall.rpc.creation import Creation
from farcall.rpc.future import Future
from farcall.rpc.owned_value import Owned
from farcall.runtime.calls.pending import PendingCall, SyncCall
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Node
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.runtime.peers.peer import Peer
from farcall.serialize import withdraw

if TYPE_CHECKING:
    from farcall.rpc.rref import RRef

__all__ = ["ask", "ask_async", "ask_patiently", "wait_for_value"]

_MOST_ASKED = 8
_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.25
"""How long to wait, at first and at most, before a question that an overloaded owner refused is asked again."""


def ask(rref: RRef[Any], what: Callable[..., Any], frame: Frame, timeout_s: float) -> Any:
    """Call a function of `owner_methods.py` at the owner by the request ``frame``, and return its result."""
    node = rref._references.node
    peer = rref._peer()
    call = SyncCall(peer, what, node.timeout_s if timeout_s == UNSET_TIMEOUT else check_timeout(timeout_s))
    creation = rref._creation
    if creation is not None and not (creation.arrived and creation.error is None):
        _follow(creation, call, frame)
    profile = PROFILING.begin_call(node, peer, "sync", what, None) if is_profiled() or PROFILING.everywhere else None
    if profile is not None:
        call.profile = profile
    try:
        answer = node.calls.exchange(call, frame)
    except NetworkError as error:
        raise _lost(rref, error) from error
    try:
        return read_answer(answer, peer)
    except (Overloaded, ReferenceLost):
        # The creation was refused a moment ago, while this followed behind it.
        if creation is not None and creation.error is not None:
            raise copy.copy(creation.error) from None
        raise


def ask_async(rref: RRef[Any], what: Callable[..., Any], frame: Frame, timeout_s: float) -> Future[Any]:
    """The same, without waiting for the answer."""
    node = rref._references.node
    peer = rref._peer()
    future = _Answer(node, peer, what, node.timeout_s if timeout_s == UNSET_TIMEOUT else check_timeout(timeout_s), rref)
    creation = rref._creation
    if creation is not None and not (creation.arrived and creation.error is None):
        _follow(creation, future, frame)
    if is_profiled() or PROFILING.everywhere:
        future.profile = PROFILING.begin_call(node, peer, "async", what, None)
    send(node.calls, future, frame)
    return future


def ask_patiently(rref: RRef[Any], what: Callable[..., Any], function: bytes, payload: bytes, timeout_s: float) -> Any:
    """`ask`, again where a large answer was lost on its way or the owner refused: for what changes nothing there."""
    node = rref._references.node
    began = monotonic()
    bound_s = node.timeout_s if timeout_s == UNSET_TIMEOUT else timeout_s
    lost = refused = 0
    while True:
        try:
            return ask(rref, what, plain_request(rref._peer(), function, payload), timeout_s)
        except AnswerLost:
            lost += 1
            if lost > _MOST_ASKED:
                raise
        except Overloaded as error:
            if _refused_for_good(rref, error):
                raise
            pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2**refused) * random.uniform(0.5, 1.0)
            refused += 1
            if bound_s and monotonic() + pause_s > began + bound_s:
                raise
            with node.calls.waiting():
                Gate().wait(pause_s)
        if bound_s:
            timeout_s = max(1e-3, began + bound_s - monotonic())


def _refused_for_good(rref: RRef[Any], error: Overloaded) -> bool:
    """Was the creation refused, or a call that its function made? Not the question for the value, then."""
    creation = rref._creation
    return hasattr(error, "remote_traceback") or (creation is not None and creation.error is not None)


def _lost(rref: RRef[Any], error: NetworkError) -> RpcError:
    ended = rref._references.node.why_ended
    if ended is not None:
        return ended  # it is not the owner that is gone
    if isinstance(error, ReferenceLost | Overloaded):
        return error
    return ReferenceLost(f"the owner of {rref!r} is gone: {error}", error.delivery)


def _follow(creation: Creation, call: PendingCall, frame: Frame) -> None:
    """``call`` is to go out behind ``creation``, and makes no sense without it."""
    try:
        creation.attach(call)
    except BaseException:
        withdraw(frame)
        raise


class _Answer(Future[Any]):
    """The future of a call to a reference's owner; it holds the reference until the answer is there."""

    def __init__(self, node: Node, peer: Peer, what: Callable[..., Any], timeout_s: float, rref: RRef[Any]) -> None:
        super().__init__(node, peer, what, timeout_s)
        self._rref: RRef[Any] | None = rref
        self._creation = rref._creation

    def on_answer(self, frame: Frame) -> None:
        self._rref = None
        super().on_answer(frame)

    def on_failure(self, error: RpcError) -> None:
        rref, self._rref = self._rref, None
        if rref is not None and isinstance(error, NetworkError):
            error = _lost(rref, error)
        super().on_failure(error)

    def fail(self, error: BaseException) -> None:
        creation, self._creation = self._creation, None
        if creation is not None and creation.error is not None and isinstance(error, Overloaded | ReferenceLost):
            error = copy.copy(creation.error)  # as in `ask`
        super().fail(error)


# ---------------------------------------------------------------------- at the owner


def wait_for_value(rref: RRef[Any], owned: Owned, timeout_s: float) -> Any:
    """The value itself, once it is there."""
    if timeout_s != UNSET_TIMEOUT:
        check_timeout(timeout_s)
    if rref._creation is not None and rref._creation.error is not None:
        raise copy.copy(rref._creation.error)  # as for a value elsewhere, even if it is there by now
    if not owned.ready:
        _wait_until_ready(rref, owned, timeout_s)
    return owned.get()


def _wait_until_ready(rref: RRef[Any], owned: Owned, timeout_s: float) -> None:
    node = rref._references.node
    if timeout_s == UNSET_TIMEOUT:
        timeout_s = node.timeout_s
    deadline = monotonic() + timeout_s if timeout_s else NEVER
    creation = rref._creation
    with node.calls.waiting():
        while not owned.ready:
            now = monotonic()
            until = deadline
            if creation is not None:
                if creation.error is not None:
                    raise copy.copy(creation.error)
                # Its failure is the I/O thread's doing, a moment after its deadline.
                until = min(deadline, max(creation.deadline, now) + 0.01)
            if now >= deadline:
                raise RpcTimeout(f"the value of {rref!r} was not there after {timeout_s:g} s")
            owned.wait(min(until - now, 3600.0))
