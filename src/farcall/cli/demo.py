"""``farcall demo``: four workers on this machine call each other, all to all, until the time is up.

Each worker makes small calls, calls that go once around the ring of workers (nested), and calls that echo a
tensor of 1 MiB, and checks every answer. This process only asks the workers for their counts and shows them:
as a live table in a terminal, as a line each second elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

import farcall
from farcall.cli.team import Answer, Team

WORKERS = 4
SMALL_CALLS_A_TURN = 20
TENSOR_BYTES = 1 << 20
MEBIBYTE = 1 << 20
KEPT_LATENCIES = 500
REFRESH_S = 0.25
ANSWER_TIMEOUT_S = 30.0


def add(left: int, right: int) -> int:
    """The small call."""
    return left + right


def relay(path: list[str], hops: int) -> int:
    """Call the first worker of ``path`` with the rest of it; return how many hops it took."""
    if not path:
        return hops
    return int(farcall.rpc_sync(path[0], relay, args=(path[1:], hops + 1)))


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """The large call."""
    return tensor


@dataclass(slots=True)
class Traffic:
    """What one worker did with one peer."""

    calls: int = 0
    tensor_bytes: int = 0
    small_us: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES))
    nested_us: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES))


@dataclass(frozen=True, slots=True)
class Count:
    """A snapshot of ``Traffic``, small enough to be asked for several times a second."""

    calls: int
    tensor_bytes: int
    small_us: float
    nested_us: float


Counts = dict[tuple[str, str], Count]


class Worker:
    """One of the four: calls its peers from a thread of its own until it is told to stop."""

    def __init__(self, name: str, peers: list[str]) -> None:
        self._name = name
        self._peers = peers
        self._traffic = {peer: Traffic() for peer in peers}
        self._tensor = torch.arange(TENSOR_BYTES, dtype=torch.uint8)
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="demo traffic")

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._stopping.set()
        self._thread.join()

    def counts(self) -> Counts:
        if self._failure is not None:
            raise self._failure
        return {
            (self._name, peer): Count(
                traffic.calls,
                traffic.tensor_bytes,
                median(traffic.small_us.copy() or [0.0]),
                median(traffic.nested_us.copy() or [0.0]),
            )
            for peer, traffic in self._traffic.items()
        }

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for peer in self._peers:
                    self._call(peer)
        except Exception as error:
            self._failure = error

    def _call(self, peer: str) -> None:
        traffic = self._traffic[peer]
        for number in range(SMALL_CALLS_A_TURN):
            traffic.small_us.append(_expect(number + 1, peer, add, number, 1))
        # Around the ring: over the peer, the two others and back here, each inside the one before.
        path = [other for other in self._peers if other != peer] + [self._name]
        traffic.nested_us.append(_expect(len(path), peer, relay, path, 0))
        answer = farcall.rpc_sync(peer, echo, args=(self._tensor,))
        if not torch.equal(answer, self._tensor):
            raise AssertionError(f"{peer} sent back another tensor")
        traffic.calls += SMALL_CALLS_A_TURN + 1 + len(path) + 1
        traffic.tensor_bytes += 2 * TENSOR_BYTES


def _expect(expected: int, peer: str, function: Callable[..., int], *arguments: Any) -> float:
    """Call, check the answer, and return the time it took in microseconds."""
    begun = time.perf_counter()
    answer = farcall.rpc_sync(peer, function, args=arguments)
    elapsed_us = (time.perf_counter() - begun) * 1e6
    if answer != expected:
        raise AssertionError(f"{peer} answered {answer}, not {expected}")
    return elapsed_us


@contextmanager
def _member(rank: int, size: int, directory: str) -> Iterator[Answer]:
    names = [f"worker{index}" for index in range(size)]
    options = farcall.RpcBackendOptions(init_method=f"file://{directory}/rendezvous")
    farcall.init_rpc(names[rank], rank=rank, world_size=size, rpc_backend_options=options)
    worker = Worker(names[rank], names[rank + 1 :] + names[:rank])
    yield lambda request: getattr(worker, request)()
    farcall.shutdown()


def run(console: Console, seconds: float) -> None:
    """Start the workers, show what they do, and end them."""
    console.print(f"starting {WORKERS} workers; they call each other for {seconds:g} s")
    team = Team(_member, WORKERS)
    try:
        counts = _watch(team, console, seconds)
        team.stop()
    except BaseException:
        team.kill()
        raise
    total = sum(count.calls for count in counts.values())
    console.print(f"{total:,} calls, every answer right; all workers ended in good order")


def _ask_all(team: Team, request: str) -> list[Any]:
    return [team.ask(rank, request, ANSWER_TIMEOUT_S) for rank in range(WORKERS)]


def _watch(team: Team, console: Console, seconds: float) -> Counts:
    _ask_all(team, "begin")
    begun = time.monotonic()
    counts: Counts = {}
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    next_line_s = 1.0
    if live is not None:
        live.start()
    try:
        while (elapsed_s := time.monotonic() - begun) < seconds:
            time.sleep(min(REFRESH_S, seconds - elapsed_s))
            counts = {pair: count for answer in _ask_all(team, "counts") for pair, count in answer.items()}
            elapsed_s = time.monotonic() - begun
            if live is not None:
                live.update(_table(counts, elapsed_s), refresh=True)
            elif elapsed_s >= next_line_s:
                console.print(_line(counts, elapsed_s), highlight=False)
                next_line_s += 1.0
    finally:
        if live is not None:
            live.stop()
    # All stop calling before anyone shuts down: a shutdown waits for calls, not for loops that make them.
    _ask_all(team, "end")
    if live is None:
        console.print(_table(counts, elapsed_s))
    return counts


def _table(counts: Counts, elapsed_s: float) -> Table:
    table = Table(title=f"{elapsed_s:.1f} s", title_justify="left")
    table.add_column("from")
    table.add_column("to")
    for heading in ("calls", "calls/s", "small call p50 us", "nested call p50 us", "tensors MiB/s"):
        table.add_column(heading, justify="right")
    caller_before = None
    for (caller, callee), count in sorted(counts.items()):
        if caller_before not in (None, caller):
            table.add_section()
        table.add_row(caller if caller != caller_before else "", callee, *_cells([count], elapsed_s))
        caller_before = caller
    table.add_section()
    table.add_row("all", "all", *_cells(list(counts.values()), elapsed_s), style="bold")
    return table


def _line(counts: Counts, elapsed_s: float) -> str:
    calls, calls_per_s, small_us, nested_us, mebibytes_per_s = _cells(list(counts.values()), elapsed_s)
    return (
        f"{elapsed_s:5.1f} s  {calls} calls  {calls_per_s} calls/s  small call p50 {small_us} us  "
        f"nested call p50 {nested_us} us  tensors {mebibytes_per_s} MiB/s"
    )


def _cells(counts: list[Count], elapsed_s: float) -> tuple[str, ...]:
    calls = sum(count.calls for count in counts)
    return (
        f"{calls:,}",
        f"{calls / elapsed_s:,.0f}",
        f"{median(count.small_us for count in counts):,.0f}",
        f"{median(count.nested_us for count in counts):,.0f}",
        f"{sum(count.tensor_bytes for count in counts) / MEBIBYTE / elapsed_s:,.0f}",
    )
