"""The functions that the benchmark calls remotely.

Some do next to nothing, so that the call is what is measured; others work, and return fresh tensors. The nursery is
different: a member of the team that, as long as it is told to, forks guests which join a group and are killed, one
after the other, while calls are measured between two other members.

Guests need the processor, too, and on a small machine that alone is felt. So there is a control: the same processes,
each in a group of its own. The loss of the measured calls there is no cost of the membership protocol.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import tempfile
import threading
import time
import warnings
from typing import Any

import torch

from farcall.cli.bench.contenders import CallSystem
from farcall.cli.bench.measure import Statistics, flood
from farcall.cli.team import die_with_parent

WAIT_S = 0.05
INTERVAL_S = 0.5
"""Every so often a guest joins, and dies half that time later."""
JOIN_S = 30.0


def noop() -> None:
    """Take nothing, do nothing, return nothing."""


def discard(tensor: torch.Tensor) -> None:
    """Take a tensor and return nothing."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that came."""
    return tensor


@functools.cache
def _weight(width: int) -> torch.Tensor:
    return torch.randn(width, width) / width


def layer(x: torch.Tensor) -> torch.Tensor:
    """Pass ``x`` through a layer of this worker."""
    return torch.tanh(x @ _weight(x.shape[1]))


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    """The first of `scripted`."""
    return tensor + 1


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The second of `scripted`: it takes 50 ms, and no processor time."""
    result: torch.Tensor = torch.ops.farcall_bench.wait(tensor)
    return result


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    time.sleep(WAIT_S)
    return tensor.clone()


@functools.cache
def scripted() -> tuple[Any, Any]:
    """`add_one` and `wait` as TorchScript functions, compiled at the first use."""
    torch.library.custom_op("farcall_bench::wait", _wait, mutates_args=())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and says so
        return torch.jit.script(add_one), torch.jit.script(wait)


def compile_scripts() -> None:
    """Compile `scripted` here: its functions are called by name."""
    scripted()


class Layer:
    """A weight on its worker."""

    def __init__(self, width: int) -> None:
        self.weight: torch.nn.Parameter = torch.nn.Parameter(torch.eye(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass ``x`` through the weight."""
        return x @ self.weight


def weight_of(layer: Any) -> torch.nn.Parameter:
    """The weight behind a reference to a layer of this worker."""
    weight: torch.nn.Parameter = layer.local_value().weight
    return weight


class Service:
    """An object for references to refer to."""

    def noop(self) -> None:
        """Take nothing, do nothing, return nothing."""


def call_back(to: str, function: Any, arguments: tuple[Any, ...], in_flight: int, budget_s: float) -> Statistics:
    """At one of several callers: keep calls of ``function`` on ``to`` under way."""
    system = CallSystem.here
    assert system is not None, "members start before they are called"
    return flood(functools.partial(system.rpc_async, to, function, args=arguments), budget_s, in_flight)


class _Nursery:
    """A thread that forks guests."""

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

    die_with_parent()
    try:
        options = farcall.RpcBackendOptions(init_method=init_method)
        farcall.Node(f"guest{number}", 1000 + number, options=options).start()
        os.write(joined, b"!")
        threading.Event().wait()
    finally:
        os._exit(1)


def begin_churn(init_method: str) -> None:
    """At the nursery: let guests come and go, at ``init_method`` or, if empty, each in a group of its own."""
    _Nursery.current = _Nursery(init_method)


def end_churn() -> None:
    """At the nursery: no more guests."""
    nursery, _Nursery.current = _Nursery.current, None
    if nursery is not None:
        nursery.end()
