"""What nested calls inherit from the call that their function serves: deadline, metadata, cancellation.

Owns the rules; knows nothing of frames, links or threads. A request at its callee:

    state     event             becomes    with
    queued    a thread runs it  running    `CURRENT` is the request
    queued    cancelled         dropped    its function never begins
    running   cancelled         running    watchers are called (a coroutine is cancelled, a stream closed), and the
                                           function's nested calls are cancelled
    running   its function ends answered   no answer is sent if the request was cancelled: no caller waits for it

The caller's message (after a timeout, `Future.cancel`, Ctrl-C, or its own cancellation) or its death cancels a request.
A nested call gets:

    its timeout            deadline                                       cancelled with the function's call
    none given, or t s     the earlier of its own and the function's     yes
    None                   none                                           no: it is shielded

Metadata are sent in all three cases. A deadline is sent if the program chose it; the default timeout is not, because
its end arrives as a cancellation anyway, and so ordinary calls carry no notes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from time import monotonic
from typing import Any, Protocol
from weakref import WeakSet

from farcall.errors import Cancelled, Delivery, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.notes import Inherited
from farcall.runtime.io.timers import NEVER

NOTHING: Mapping[str, str] = {}
GRACE_S = 0.5
"""How much later than inherited a deadline is enforced here. Usually the cancellation arrives first; until then the
outermost caller, whose timeout it is, can ask what each callee does. The local deadline is for a lost connection."""


class Served(Protocol):
    """A request, as the calls that its function makes see it."""

    cancelled: bool
    function_name: str
    dependents: Dependents | None

    @property
    def caller(self) -> WorkerInfo: ...

    @property
    def deadline(self) -> float: ...

    @property
    def metadata(self) -> Mapping[str, str]: ...

    def watch(self, on_cancel: Callable[[], None]) -> None:
        """Have a worker call ``on_cancel`` once the request is cancelled."""


class Scope(Protocol):
    """What a call made in the current context inherits."""

    @property
    def deadline(self) -> float: ...

    @property
    def metadata(self) -> Mapping[str, str]: ...

    @property
    def served(self) -> Served | None: ...


CURRENT: ContextVar[Scope | None] = ContextVar("farcall_scope", default=None)
"""The request whose function runs in this context, or a `Labelled` around it."""


class Labelled:
    """A scope with more metadata than the one around it."""

    __slots__ = ("deadline", "metadata", "served")

    def __init__(self, outer: Scope | None, metadata: Mapping[str, str]) -> None:
        self.deadline: float = NEVER if outer is None else outer.deadline
        self.metadata: Mapping[str, str] = metadata if outer is None else {**outer.metadata, **metadata}
        self.served: Served | None = None if outer is None else outer.served


class Nested(Protocol):
    """A call that is about to be sent."""

    deadline: float
    timeout_s: float
    parent: Served | None


def inherit(call: Nested, scope: Scope | None, default_s: float) -> Inherited | None:
    """Bound ``call`` by the scope that it is made in; returns what to send along with it, or None."""
    chosen = call.timeout_s not in (default_s, NEVER)
    metadata = NOTHING
    if scope is not None:
        metadata = scope.metadata
        if call.timeout_s != NEVER:
            served = call.parent = scope.served
            if served is not None and not Dependents.add(served, call):
                raise Cancelled(f"the call that {served.function_name}() serves was cancelled", Delivery.NOT_SENT)
            if scope.deadline < call.deadline:
                left_s = scope.deadline - monotonic()
                if left_s <= 0:
                    raise RpcTimeout("the deadline of the call that this function serves has passed", Delivery.NOT_SENT)
                call.deadline = scope.deadline + GRACE_S
                call.timeout_s = left_s + GRACE_S
                return Inherited(left_s, metadata)
    if not chosen and not metadata:
        return None
    return Inherited(max(1e-3, call.deadline - monotonic()) if chosen and call.deadline != NEVER else 0.0, metadata)


class Dependents:
    """What a cancelled request takes with it: the calls that its function made, and the watchers to call.

    Made for the first of them; the lock guards every request's ``dependents``.
    """

    __slots__ = ("calls", "watchers")

    # One lock for all requests, held for an instant. Re-entrant: a garbage collection inside may run user code.
    _lock = threading.RLock()

    def __init__(self) -> None:
        # Weak: a call that has ended must be freed, and a function may make millions.
        self.calls: WeakSet[Any] = WeakSet()
        self.watchers: list[Callable[[], None]] = []

    @staticmethod
    def watch(request: Served, tell: Callable[[], None]) -> None:
        """Call ``tell``, which must not block, when ``request`` is cancelled; at once if it already is."""
        with Dependents._lock:
            if not request.cancelled:
                Dependents._of(request).watchers.append(tell)
                return
        tell()

    @staticmethod
    def add(request: Served, call: Nested) -> bool:
        """Have ``call`` cancelled with ``request``; False: ``request`` is cancelled already."""
        with Dependents._lock:
            if not request.cancelled:
                Dependents._of(request).calls.add(call)
            return not request.cancelled

    @staticmethod
    def _of(request: Served) -> Dependents:
        if request.dependents is None:
            request.dependents = Dependents()
        return request.dependents

    @staticmethod
    def cancel(request: Served) -> list[Any]:
        """Mark ``request`` as cancelled and call its watchers; returns the nested calls to cancel."""
        with Dependents._lock:
            request.cancelled = True
            found, request.dependents = request.dependents, None
            calls = [] if found is None else list(found.calls)
        for tell in () if found is None else found.watchers:
            tell()  # outside the lock: a watcher may take locks of its own
        return calls


class CurrentCall:
    """The call that a function serves, as the function sees it; `farcall.current_call` returns it."""

    __slots__ = ("_scope", "_served")

    def __init__(self, scope: Scope | None) -> None:
        self._scope = scope
        self._served = None if scope is None else scope.served

    def __repr__(self) -> str:
        if self._served is None:
            return "<no call>"
        left = "" if self.time_left_s is None else f", {self.time_left_s:.3g} s left"
        cancelled = ", cancelled" if self.cancelled else ""
        return f"<call of {self.function}() by {self._served.caller.name!r}{left}{cancelled}>"

    @property
    def caller(self) -> WorkerInfo | None:
        """The worker that called; None outside of any call."""
        return None if self._served is None else self._served.caller

    @property
    def function(self) -> str:
        """The name of the function that was called."""
        return "" if self._served is None else self._served.function_name

    @property
    def deadline(self) -> float | None:
        """When the caller stops waiting, by this process's ``time.monotonic()``; None: the caller set no deadline."""
        return None if self._scope is None or self._scope.deadline == NEVER else self._scope.deadline

    @property
    def time_left_s(self) -> float | None:
        """How long the caller goes on waiting; None: the caller set no deadline."""
        return None if self.deadline is None else self.deadline - monotonic()

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata that the caller and its own callers sent along."""
        return NOTHING if self._scope is None else self._scope.metadata

    @property
    def cancelled(self) -> bool:
        """Has the caller given up, or died? Then the result goes nowhere."""
        return self._served is not None and self._served.cancelled

    def check(self) -> None:
        """Raise `Cancelled` if the call was cancelled: for use in long loops."""
        if self.cancelled:
            raise Cancelled(f"the caller of {self.function}() no longer waits for it", Delivery.UNKNOWN)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Have a worker thread call ``callback`` when the call is cancelled; soon if it already is."""
        if self._served is not None:
            self._served.watch(callback)


def current_call() -> CurrentCall:
    """The call that the calling function serves; outside of any call, a dummy that is never cancelled."""
    return CurrentCall(CURRENT.get())
