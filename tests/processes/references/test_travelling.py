"""References between real processes: sent around, also by messages that fail and by picklers of others."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from tests.processes.calls.callees import Gate
from tests.processes.references.callees import fetch, identity, keep, kept, nothing_is_left, whoami

import farcall
from farcall.errors import (
    RpcError,
    RpcTimeout,
    SerializationError,
)
from farcall.serialize import TablePickler
from farcall.testing.cluster import (
    run_cluster,
)


def reference_to(value: Any) -> farcall.RRef[Any]:
    return farcall.RRef(value)


def pass_on(rref: farcall.RRef[Any], workers: list[str]) -> list[str]:
    """Send the reference along a chain of workers; who had it, and what they saw."""
    seen = [f"{whoami()}:{rref.to_here()}"]
    return seen + (farcall.rpc_sync(workers[0], pass_on, (rref, workers[1:])) if workers else [])


def give(name: str) -> Any:
    return kept[name]


def forget(name: str) -> None:
    kept.pop(name, None)


class Box:
    """An object that holds a reference in an attribute."""

    def __init__(self, rref: farcall.RRef[Any]) -> None:
        self.rref = rref


def travel(rank: int) -> None:
    if rank != 0:
        return
    workers = ["w0", "w1", "w2"]
    for owner in workers:
        rref = farcall.RRef("value") if owner == "w0" else farcall.remote(owner, identity, ("value",))
        for to in workers:
            assert farcall.rpc_sync(to, fetch, (rref,)) == (to, to == owner, "value")
            assert farcall.rpc_async(to, fetch, (rref,)).wait() == (to, to == owner, "value")
            assert farcall.remote(to, fetch, (rref,)).to_here() == (to, to == owner, "value")
            back = farcall.rpc_sync(to, identity, (rref,))
            assert back.owner_name() == owner
            assert back.to_here() == "value"
            box = farcall.rpc_sync(to, identity, ({"deep": [(Box(rref), rref, rref)]},))
            held, one, other = box["deep"][0]
            assert one is other
            assert held.rref is one
            assert one.to_here() == "value"
            # A reference to a reference.
            assert farcall.remote(to, identity, (rref,)).to_here().to_here() == "value"
        assert farcall.rpc_sync("w1", pass_on, (rref, ["w2", "w1", "w0", "w2", "w0"])) == [
            f"{name}:value" for name in ("w1", "w2", "w1", "w0", "w2", "w0")
        ]
        # Kept there, given up here, used from a third.
        farcall.rpc_sync("w1", keep, ("it", rref))
        del rref, back, box, held, one, other
        assert farcall.rpc_sync("w2", fetch, (farcall.rpc_sync("w1", give, ("it",)),))[2] == "value"
        farcall.rpc_sync("w1", forget, ("it",))
        nothing_is_left(workers)
    # Made by the callee.
    made = farcall.rpc_sync("w1", reference_to, (torch.ones(2),))
    assert made.owner_name() == "w1"
    assert made.to_here().sum() == 2
    # A result kept at its owner may be a reference to a third worker's value.
    nested = farcall.remote("w1", farcall.remote, ("w2", identity, (5,)))
    assert nested.to_here().to_here() == 5
    assert nested.rpc_sync().to_here() == 5
    del made, nested
    nothing_is_left(workers)


def test_references_travel_anywhere_and_everything_dropped_is_freed() -> None:
    run_cluster(3, travel)


def juggle(rank: int, size: int, turns: int) -> None:
    """Everybody sends everybody references, from several threads, and drops them at any moment."""
    farcall.rpc_sync(rank, keep, ("hand", []))
    farcall.barrier([f"w{index}" for index in range(size)])

    def play(seed: int) -> None:
        state = seed
        for turn in range(turns):
            state = (state * 1103515245 + 12345) % (1 << 31)
            to, owner = (state >> 8) % size, (state >> 16) % size
            rref = farcall.remote(owner, identity, ((rank, turn),))
            other = farcall.RRef((rank, turn))
            if state % 3:
                assert farcall.rpc_sync(to, take, (rref, other)) == [(rank, turn), (rank, turn)]
            else:
                future = farcall.rpc_async(to, swap, (rref,))
                del rref
                got = future.wait()
                if got is not None:
                    got.to_here()

    threads = [threading.Thread(target=play, args=(rank * 7 + number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    farcall.barrier([f"w{index}" for index in range(size)])
    farcall.rpc_sync(rank, keep, ("hand", []))
    farcall.barrier([f"w{index}" for index in range(size)])
    if rank == 0:
        nothing_is_left([f"w{index}" for index in range(size)])


def take(*rrefs: farcall.RRef[Any]) -> list[Any]:
    return [rref.to_here() for rref in rrefs]


def swap(rref: farcall.RRef[Any]) -> Any:
    hand: list[Any] = kept["hand"]
    hand.append(rref)
    return hand.pop(0) if len(hand) > 3 else None


def test_nothing_is_lost_or_left_when_everybody_juggles() -> None:
    run_cluster(3, juggle, 3, 60)


def fail_on_the_way(rank: int) -> None:
    if rank != 0:
        return
    for owner in ("w0", "w1", "w2"):
        rref = farcall.RRef(1) if owner == "w0" else farcall.remote(owner, identity, (1,))
        # The message cannot be written, after the reference was.
        with pytest.raises(SerializationError):
            farcall.rpc_sync("w1", identity, ((rref, threading.Lock()),))
        with pytest.raises(SerializationError):
            farcall.remote("w1", identity, ((rref, threading.Lock()),))
        with pytest.raises(SerializationError):
            farcall.rpc_sync("w1", with_lock, (rref,))
        # It cannot be read, before the reference was.
        with pytest.raises(RpcError, match="cannot be read here"):
            farcall.rpc_sync("w1", identity, ((Unreadable(), rref),))
        # Nobody waits for the answer any more.
        with pytest.raises(RpcTimeout):
            farcall.rpc_sync("w1", answer_late, (rref, owner), timeout=0.05)
        with pytest.raises(RpcTimeout):
            farcall.rpc_async("w1", answer_late, (rref, owner), timeout=0.05).wait()
        farcall.rpc_sync("w1", Gate.open, (owner,))
        # The answer is an exception that holds one.
        with pytest.raises(Carrier) as caught:
            farcall.rpc_sync("w1", raise_carrier, (rref,))
        assert caught.value.rref.to_here() == 1
        del rref, caught
        nothing_is_left(["w0", "w1", "w2"])


def with_lock(rref: farcall.RRef[Any]) -> Any:
    return rref, threading.Lock()


def answer_late(rref: farcall.RRef[Any], opened: str) -> list[farcall.RRef[Any]]:
    Gate.wait(opened)
    return [rref, farcall.RRef("mine")]


class Carrier(Exception):
    def __init__(self, rref: farcall.RRef[Any]) -> None:
        super().__init__("carries")
        self.rref = rref


def raise_carrier(rref: farcall.RRef[Any]) -> None:
    raise Carrier(rref)


def _unreadable() -> None:
    raise RuntimeError("cannot be read here")


class Unreadable:
    def __reduce__(self) -> Any:
        return _unreadable, ()


def test_a_message_that_fails_takes_no_reference_with_it() -> None:
    run_cluster(3, fail_on_the_way)


def send_by_other_picklers(rank: int) -> None:
    if rank != 0:
        return
    rref = farcall.remote("w1", identity, ("value",))
    with farcall._use_rpc_pickler(TablePickler()):
        assert farcall.rpc_sync("w2", fetch, (rref,))[2] == "value"
        assert farcall.rpc_sync("w2", identity, ([rref, torch.ones(2)],))[0].to_here() == "value"
        assert rref.rpc_sync().upper() == "VALUE"
        assert farcall.remote("w2", fetch, (rref,)).to_here()[2] == "value"
    with farcall._use_rpc_pickler(PlainPickler()):
        assert farcall.rpc_sync("w2", fetch, (rref,))[2] == "value"
    for write in (pickle.dumps, copy.copy, copy.deepcopy, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(SerializationError, match="pickle rref"):
            write(rref)
        if write is not copy.copy:
            with pytest.raises(SerializationError, match="pickle rref"):
                write([farcall.RRef(1)])
    del rref
    nothing_is_left(["w0", "w1", "w2"])


class PlainPickler:
    """A user's pickler that knows nothing of farcall."""

    def serialize(self, value: Any) -> tuple[bytes, list[torch.Tensor]]:
        return pickle.dumps(value), []

    def deserialize(self, data: bytes, tensors: Any) -> Any:
        return pickle.loads(data)


def test_only_calls_carry_references_whatever_their_pickler() -> None:
    run_cluster(3, send_by_other_picklers)
