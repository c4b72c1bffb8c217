"""Links on demand under load: pairs part all the time, connections are cut, a member dies, and every call ends once.

All members are nodes of this process, in a ring: each has two neighbours, and other pairs are joined and part. Threads
call from any to any, small and large, while another one cuts connections at random moments. A failure prints its
seed; run it with ``FARCALL_SEED=...``, and with more members and for longer with ``FARCALL_SOAK=full``.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from dataclasses import replace
from time import sleep

import pytest
import torch
from tests.kit.ports import tcp_url
from tests.kit.team import together
from tests.kit.times import LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import AnswerLost, Delivery, RpcError
from farcall.protocol.membership import neighbours
from farcall.runtime.link import parting

FULL = os.environ.get("FARCALL_SOAK") == "full"
SEED = int(os.environ.get("FARCALL_SEED", "3"))
SIZE, CALLERS, TURNS = (22, 12, 250) if FULL else (7, 6, 40)

served: Counter[object] = Counter()


def note(what: object) -> object:
    served[what] += 1
    return what


def note_large(what: object, tensor: torch.Tensor) -> int:
    served[what] += 1
    return tensor.numel()


def is_of_large(error: RpcError) -> bool:
    """Is that the truth about a large message whose connection was cut?"""
    return isinstance(error, AnswerLost) or getattr(error, "delivery", None) is Delivery.NOT_SENT


class Load:
    """The members, who of them is alive, and what was called."""

    def __init__(self, nodes: list[farcall.Node]) -> None:
        self.nodes = nodes
        self.alive = list(range(len(nodes)))
        self.certain: list[object] = []
        self.failed: list[object] = []
        self.wrong: list[object] = []
        self.ended = threading.Event()

    def call(self, caller: int, cuts: bool) -> None:
        """One thread's calls."""
        chance = random.Random(f"{SEED}-{caller}")
        for turn in range(TURNS):
            source, target = chance.sample(list(self.alive), 2)  # a copy: another thread takes one out
            what = (caller, turn)
            try:
                if chance.random() < 0.8:
                    certain = self.nodes[source].rpc_sync(f"w{target}", note, args=(what,)) == what
                else:
                    size = chance.choice([10, 20_000, 400_000])
                    tensor = torch.ones(size)
                    certain = self.nodes[source].rpc_sync(f"w{target}", note_large, args=(what, tensor)) == size
                (self.certain if certain else self.wrong).append(what)
            except RpcError as error:
                # A large message whose connection was cut is not sent again; nor is anything to or from the dead.
                both_live = {source, target} <= set(self.alive)
                if both_live and not (cuts and is_of_large(error)):
                    self.wrong.append((what, repr(error)))
                self.failed.append(what)
            sleep(chance.random() * 0.01)

    def cut(self) -> None:
        """Connections break, now and then in the middle of a parting; each carries a frame before, or nothing moves."""
        chance = random.Random(f"{SEED}-cuts")
        received: dict[object, int] = {}
        while not self.ended.wait(chance.random() * 0.02):
            node = self.nodes[chance.choice(list(self.alive))]
            peers = [
                peer
                for peer in node._runtime.others()
                if peer.linked and peer.link.up and peer.link.traffic.frames > received.get(peer, 0)
            ]
            if peers:
                peer = chance.choice(peers)
                received[peer] = peer.link.traffic.frames
                peer.link.interrupt("the test cuts it")

    def end_one(self) -> None:
        """Half-way through, the last member ends without a word to those that it is not connected to."""
        wait_until(lambda: len(self.certain) > CALLERS * TURNS // 2, "half of the calls")
        last = self.alive.pop()
        self.nodes[last].shutdown(graceful=False)


@pytest.mark.parametrize("cuts", [False, True] if FULL else [True])
@pytest.mark.parametrize("way", ["unix", "tcp", "unencrypted"])
def test_nothing_is_lost_or_done_twice(
    way: str, cuts: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    print("seed", SEED)
    served.clear()
    monkeypatch.setattr(neighbours, "ORDERS", 1)
    monkeypatch.setattr(parting, "PART_AFTER_S", 0.02)
    options = farcall.RpcBackendOptions(
        init_method=tcp_url(),
        transports=["unix" if way == "unix" else "tcp"],
        encryption="off" if way == "unencrypted" else "on",
        membership=replace(PATIENT, full_mesh=3),
        rpc_timeout=2 * LONG_S,
    )
    nodes = [farcall.Node(f"w{rank}", rank, SIZE, options) for rank in range(SIZE)]
    load = Load(nodes)
    cutter = threading.Thread(target=load.cut)
    try:
        together([node.start for node in nodes])
        if cuts:
            cutter.start()
        actions = [lambda caller=caller: load.call(caller, cuts) for caller in range(CALLERS)]
        together([*actions, load.end_one])  # type: ignore[list-item]
        load.ended.set()
        left = [nodes[rank] for rank in load.alive]
        assert not load.wrong
        assert all(served[what] == 1 for what in load.certain)
        assert not [what for what, times in served.items() if times > 1]
        assert len(load.certain) + len(load.failed) == CALLERS * TURNS
        wait_until(lambda: all(any(peer.broken for peer in node._runtime.others()) for node in left), "the news")
        assert sum(node._runtime.connector.parted for node in left) > SIZE
        for node in left:
            gone = [peer.info.id for peer in node._runtime.others() if peer.broken]
            assert gone == [SIZE - 1], f"w{node._rank} holds {gone} for gone"
        together([node.shutdown for node in left])
    finally:
        load.ended.set()
        for node in nodes:
            node.shutdown(graceful=False)
        if cuts:
            cutter.join(LONG_S)
