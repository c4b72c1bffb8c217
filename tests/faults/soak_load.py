"""What the members of a soak do: call each other, and write down what they did (`soak_journal.py`).

A third of the calls goes around the ring of all names; the rest goes to anybody. One in ten is the root of a tree of
nested calls, and others carry large tensors, make references, or are relayed.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
from tests.conftest import remains
from tests.faults.soak_journal import REFERENCE, Journal

import farcall
from farcall.errors import Expelled, InitError, RpcError, UnknownWorker
from farcall.protocol.member import incarnation_text
from farcall.runtime.node import runtime_of

LARGE = 300_000
"""Elements of a tensor that goes through shared memory."""
LEAVES = 6
"""How many members a tree of nested calls reaches, beside its root."""
SETTLING_S = 30.0


class Load(NamedTuple):
    """How much each member calls."""

    names: list[str]
    seed: int
    threads: int = 2
    pause_s: float = 0.004
    """Between two calls of a thread, on average."""
    timeouts_s: tuple[float, ...] = (0.3, 8.0, 8.0, 8.0)
    """What a call may take: often enough for any verdict to come first, and sometimes not."""


class _Here:
    journal: Journal | None = None


def journal(directory: str) -> Journal:
    """Open this process's journal; what the functions below write goes there."""
    _Here.journal = found = Journal(directory)
    return found


def _ran(call_id: str) -> None:
    assert _Here.journal is not None
    _Here.journal.write("ran", call_id)


# --- what is called ------------------------------------------------------------------------------------------


def execute(call_id: str, seconds: float = 0.0) -> str:
    _ran(call_id)
    if seconds:
        sleep(seconds)
    return call_id


def double(call_id: str, value: torch.Tensor) -> torch.Tensor:
    _ran(call_id)
    return 2 * value


def relay(call_id: str, to: str, timeout_s: float) -> str:
    _ran(call_id)
    return farcall.rpc_sync(to, execute, (f"{call_id}/relayed",), timeout=timeout_s)


def tree(call_id: str, names: list[str], timeout_s: float) -> int:
    """How many members of a tree of calls could be reached: this one, and those under it."""
    _ran(call_id)
    half = len(names) // 2
    futures = [
        farcall.rpc_async(root, tree, (f"{call_id}/{root}", below, timeout_s), timeout=timeout_s)
        for root, *below in filter(None, (names[:half], names[half:]))
    ]
    reached = 1
    for future in futures:
        try:
            reached += future.result()
        except RpcError:
            pass
    return reached


def _call(node: farcall.Node, to: str, others: list[str], call_id: str, kind: int, timeout_s: float) -> None:
    if kind < 5:
        assert node.rpc_sync(to, execute, (call_id,), timeout=timeout_s) == call_id
    elif kind == 5:
        assert node.rpc_sync(to, execute, (call_id, 0.05), timeout=timeout_s) == call_id
    elif kind == 6:
        assert float(node.rpc_sync(to, double, (call_id, torch.ones(LARGE)), timeout=timeout_s)[-1]) == 2.0
    elif kind == REFERENCE:
        reference = node.remote(to, double, (call_id, torch.ones(2)), timeout=timeout_s)
        assert reference.to_here(timeout=timeout_s).tolist() == [2.0, 2.0]
    elif kind == 8:
        assert node.rpc_sync(to, relay, (call_id, others[0], timeout_s), timeout=timeout_s) == f"{call_id}/relayed"
    else:
        assert 1 <= node.rpc_sync(to, tree, (call_id, others, timeout_s), timeout=timeout_s) <= 1 + len(others)


KINDS = 10
DIRECT = range(8)
"""The kinds of calls that concern nobody but their two members."""


def call_until(node: farcall.Node, given: Load, number: int, stopping: Callable[[], bool]) -> None:
    """On a thread: call until the end, of the soak or of this node."""
    journal = _Here.journal
    assert journal is not None
    name = runtime_of(node).info.name
    place = given.names.index(name)
    behind = given.names[(place + 1) % len(given.names)]
    others = [other for other in given.names if other != name]
    source = random.Random(f"{given.seed}/{os.getpid()}/{name}/{number}")
    count = 0
    while not stopping() and runtime_of(node).running:
        count += 1
        call_id = f"{name}.{os.getpid()}.{number}.{count}"
        to = behind if source.random() < 1 / 3 else source.choice(others)
        beyond = source.sample(others, min(LEAVES, len(others)))
        kind, timeout_s = source.randrange(KINDS), source.choice(given.timeouts_s)
        journal.write("calls", "begin", call_id, monotonic(), kind, to, timeout_s)
        outcome = "result"
        try:
            _call(node, to, beyond, call_id, kind, timeout_s)
        except RpcError as error:
            known = "not_sent" if isinstance(error, UnknownWorker) else getattr(error, "delivery", "none")
            delivery = "there" if hasattr(error, "remote_traceback") else known
            text = str(error).partition("\n")[0]
            incarnation = getattr(error, "incarnation", "") or "-"
            outcome = f"error {type(error).__name__} {delivery} {incarnation} {text}"
        journal.write("calls", "end", call_id, monotonic(), outcome)
        sleep(source.uniform(0.0, 2 * given.pause_s))


def start_load(nodes: list[farcall.Node], given: Load, stopping: Callable[[], bool]) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=call_until, args=(node, given, number, stopping), name=f"load-{number}")
        for node in nodes
        for number in range(given.threads)
    ]
    for thread in threads:
        thread.start()
    return threads


# --- a process -----------------------------------------------------------------------------------------------


def note_life(node: farcall.Node) -> None:
    """Write down that ``node`` is a member, and the deaths that it hears of."""
    journal = _Here.journal
    assert journal is not None
    runtime = runtime_of(node)
    journal.write("lives", runtime.info.name, incarnation_text(runtime.me.incarnation), monotonic())
    node.on_member(
        lambda event: journal.write("deaths", event.incarnation, monotonic()) if event.kind == "dead" else None
    )


def work(rank: int, url: str, directory: str, given: Load, options: dict[str, Any]) -> str:
    """A worker's life, to the end of the soak or to its expulsion: "stayed" or "expelled"."""
    journal(directory)
    before = remains(set())
    node = farcall.Node(given.names[rank], rank, options=farcall.RpcBackendOptions(init_method=url, **options))
    try:
        _live(node, given, directory)
        became = "stayed"
    except Expelled:
        became = "expelled"
    except InitError as error:
        if "it did not answer" not in str(error):
            raise
        became = "expelled"  # before it knew that it had been let in
    del node
    check_nothing_remains(before)
    return became


def _live(node: farcall.Node, given: Load, directory: str) -> None:
    node.start()
    note_life(node)
    stop = Path(directory, "stop")
    for thread in start_load([node], given, stop.exists):
        thread.join()
    Path(directory, f"idle-{os.getpid()}").touch()
    # Everybody serves until the last call of all others has ended.
    while runtime_of(node).running and not Path(directory, "leave").exists():
        sleep(0.01)
    if not runtime_of(node).running:
        runtime_of(node).peer(given.names[0])  # raises: it was expelled
    node.shutdown()


def check_nothing_remains(before: set[str]) -> None:
    """No thread, descriptor or mapping more than there was."""
    give_up_at = monotonic() + SETTLING_S
    while left := remains(before):
        assert monotonic() < give_up_at, f"outlived the node: {sorted(left)}"
        gc.collect()
        sleep(0.01)
