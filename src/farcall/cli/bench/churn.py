"""Others that die and join while calls are measured.

One member of the team, the nursery, forks processes that become members and are killed, one after the other, as long as
it is told to. Calls are measured between two other members, who have nothing to do with that but to learn of it.

Processes that come and go need the processor, too, and on a small machine that alone is felt. So there is a control:
the same processes, each in a group of its own. What the live members' calls lose there, no membership protocol costs.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from farcall.cli.bench.contenders import CallSystem
from farcall.cli.bench.functions import noop
from farcall.cli.bench.measure import Operation, Statistics, latency_us

__all__ = ["amid", "latency_amid_us"]

INTERVAL_S = 0.5
"""Every so often one joins, and dies half that time later."""
LONGER = 10
"""How many times the usual time is measured: a few have to come and go meanwhile."""
JOIN_S = 30.0
_PR_SET_PDEATHSIG = 1


class Amid:
    """A call to measure, and how to begin and to end what goes on around it."""

    def __init__(self, call: Operation, begin: Operation, end: Operation) -> None:
        self.call = call
        self.begin = begin
        self.end = end

    def __call__(self) -> Any:
        return self.call()


def amid(where: str | None) -> Callable[[CallSystem], Operation]:
    """A no-op while others come and go: "here", in this very group; "elsewhere"; None: while nobody does."""

    def setup(system: CallSystem) -> Operation:
        callee, nursery = system.peers[0], system.peers[1]

        def call() -> Any:
            return system.rpc_sync(callee, noop)

        if where is None:
            return Amid(call, lambda: None, lambda: None)
        init_method = system.init_method if where == "here" else ""
        return Amid(
            call,
            lambda: system.rpc_sync(nursery, begin_churn, args=(init_method,)),
            lambda: system.rpc_sync(nursery, end_churn),
        )

    return setup


def latency_amid_us(operation: Operation, budget_s: float) -> Statistics:
    """p50 and p99 of a call, while something goes on around it."""
    assert isinstance(operation, Amid)
    operation.begin()
    try:
        return latency_us(operation.call, LONGER * budget_s)
    finally:
        operation.end()


# --- at the nursery --------------------------------------------------------------------------------------------


class _Nursery:
    """Forks guests on a thread of its own."""

    current: _Nursery | None = None
    guests = 0

    def __init__(self, init_method: str) -> None:
        self._init_method = init_method
        self._ending = threading.Event()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="nursery", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join(2 * JOIN_S)
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _run(self) -> None:
        while not self._ending.is_set() and self._failure is None:
            _Nursery.guests += 1
            with tempfile.TemporaryDirectory(prefix="farcall-bench-") as directory:
                self._raise_one(self._init_method or f"file://{directory}/store", _Nursery.guests)

    def _raise_one(self, init_method: str, number: int) -> None:
        has_joined, joined = os.pipe()
        guest = os.fork()
        if guest == 0:
            _be_a_guest(init_method, number, joined)
        os.close(joined)
        try:
            if not select.select([has_joined], [], [], JOIN_S)[0] or not os.read(has_joined, 1):
                self._failure = f"guest{number} did not join"
            self._ending.wait(INTERVAL_S / 2)
        finally:
            os.kill(guest, signal.SIGKILL)
            os.waitpid(guest, 0)
            os.close(has_joined)
        self._ending.wait(INTERVAL_S / 2)


def _be_a_guest(init_method: str, number: int, joined: int) -> None:
    """In the forked process: join, say so, and wait for the end."""
    import farcall

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        options = farcall.RpcBackendOptions(init_method=init_method)
        farcall.Node(f"guest{number}", 1000 + number, options=options).start()
        os.write(joined, b"!")
        threading.Event().wait()
    finally:
        os._exit(1)


def begin_churn(init_method: str) -> None:
    """At the nursery: have guests come and go, at ``init_method`` or each in a group of its own."""
    _Nursery.current = _Nursery(init_method)


def end_churn() -> None:
    """At the nursery: no more guests."""
    nursery, _Nursery.current = _Nursery.current, None
    if nursery is not None:
        nursery.end()
