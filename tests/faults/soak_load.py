"""What the members of a soak do: call each other at random, and write down what they did.

Each process appends to files of its own, a line at a time, so that nothing of it is lost when it is killed:

    ran-<pid>      <id>                             a request was executed: by the function itself, before anything else
    calls-<pid>    begin <id> <when>                a call was begun; ``when`` is of the clock that all processes share
                   end <id> <when> <outcome>        and ended: "result", or an error (`Outcome`)
    lives-<pid>    <name> <incarnation> <when>      this process became a member

An id names one call and is never used again, so an id that ran twice is a request that was executed twice.
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

import farcall
from farcall.errors import Expelled, InitError, RpcError, UnknownWorker
from farcall.protocol.member import incarnation_text
from farcall.runtime.node import runtime_of

LARGE = 300_000
"""Elements of a tensor that goes through shared memory."""
PAUSE_S = 0.004
TIMEOUTS_S = (0.3, 8.0, 8.0, 8.0)
"""What a call may take: often enough for any verdict to come first, and sometimes not."""
THREADS = 2
SETTLING_S = 30.0


class Outcome(NamedTuple):
    """How a call ended."""

    error: str
    """The class; empty for a result."""
    delivery: str
    """What the error says: not_sent, unknown or executed; "there" if it was raised by the function at the callee."""
    incarnation: str
    """Whose death it tells of, if any."""
    text: str


class Journal:
    """The files of this process."""

    def __init__(self, directory: str) -> None:
        self._files = {
            kind: os.open(f"{directory}/{kind}-{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            for kind in ("ran", "calls", "lives")
        }

    def write(self, kind: str, *words: object) -> None:
        os.write(self._files[kind], (" ".join(map(str, words)) + "\n").encode())

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)


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


def _call(node: farcall.Node, to: str, other: str, call_id: str, kind: int, timeout_s: float) -> None:
    if kind < 5:
        assert node.rpc_sync(to, execute, (call_id,), timeout=timeout_s) == call_id
    elif kind == 5:
        assert node.rpc_sync(to, execute, (call_id, 0.05), timeout=timeout_s) == call_id
    elif kind == 6:
        assert float(node.rpc_sync(to, double, (call_id, torch.ones(LARGE)), timeout=timeout_s)[-1]) == 2.0
    elif kind == 7:
        reference = node.remote(to, double, (call_id, torch.ones(2)), timeout=timeout_s)
        assert reference.to_here(timeout=timeout_s).tolist() == [2.0, 2.0]
    else:
        assert node.rpc_sync(to, relay, (call_id, other, timeout_s), timeout=timeout_s) == f"{call_id}/relayed"


KINDS = 9


def load(node: farcall.Node, names: list[str], seed: int, number: int, stopping: Callable[[], bool]) -> None:
    """On a thread: call until the end, of the soak or of this node."""
    journal = _Here.journal
    assert journal is not None
    source = random.Random(f"{seed}/{number}")
    others = [name for name in names if name != runtime_of(node).info.name]
    count = 0
    while not stopping() and runtime_of(node).running:
        count += 1
        call_id = f"{runtime_of(node).info.name}.{os.getpid()}.{number}.{count}"
        to, other = source.choice(others), source.choice(others)
        kind, timeout_s = source.randrange(KINDS), source.choice(TIMEOUTS_S)
        journal.write("calls", "begin", call_id, monotonic(), kind, to, timeout_s)
        outcome = "result"
        try:
            _call(node, to, other, call_id, kind, timeout_s)
        except RpcError as error:
            known = "not_sent" if isinstance(error, UnknownWorker) else getattr(error, "delivery", "none")
            delivery = "there" if hasattr(error, "remote_traceback") else known
            text = str(error).partition("\n")[0]
            incarnation = getattr(error, "incarnation", "") or "-"
            outcome = f"error {type(error).__name__} {delivery} {incarnation} {text}"
        journal.write("calls", "end", call_id, monotonic(), outcome)
        sleep(source.uniform(0.0, 2 * PAUSE_S))


def start_load(node: farcall.Node, names: list[str], seed: int, stopping: Callable[[], bool]) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=load, args=(node, names, seed, number, stopping), name=f"load-{number}")
        for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    return threads


# --- a process -----------------------------------------------------------------------------------------------


def work(rank: int, url: str, names: list[str], directory: str, seed: int, options: dict[str, Any]) -> str:
    """A worker's life, to the end of the soak or to its expulsion: "stayed" or "expelled"."""
    journal(directory)
    before = remains(set())
    node = farcall.Node(names[rank], rank, options=farcall.RpcBackendOptions(init_method=url, **options))
    try:
        _live(node, names, directory, seed)
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


def _live(node: farcall.Node, names: list[str], directory: str, seed: int) -> None:
    assert _Here.journal is not None
    node.start()
    _Here.journal.write(
        "lives", runtime_of(node).info.name, incarnation_text(runtime_of(node).me.incarnation), monotonic()
    )
    stop = Path(directory, "stop")
    for thread in start_load(node, names, seed + os.getpid(), stop.exists):
        thread.join()
    Path(directory, f"idle-{os.getpid()}").touch()
    # Everybody serves until the last call of all others has ended.
    while runtime_of(node).running and not Path(directory, "leave").exists():
        sleep(0.01)
    if not runtime_of(node).running:
        runtime_of(node).peer(names[0])  # raises: it was expelled
    node.shutdown()


def check_nothing_remains(before: set[str]) -> None:
    """No thread, descriptor or mapping more than there was."""
    give_up_at = monotonic() + SETTLING_S
    while left := remains(before):
        assert monotonic() < give_up_at, f"outlived the node: {sorted(left)}"
        gc.collect()
        sleep(0.01)
