"""Peers: offers of shared segments, each with its own descriptor."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from typing import Any

import pytest
from tests.kit.cores import connected
from tests.kit.times import LONG_S
from tests.kit.unlinked import UnlinkedPeer, quiet_core

from farcall.channel.segment_map import SegmentMap
from farcall.channel.shared_memory import SegmentPool
from farcall.errors import Delivery, PeerDead
from farcall.ids import WorkerInfo
from farcall.protocol import messages
from farcall.protocol.frames import HEADER, LETTER, REQUEST, RESPONSE, Frame
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.resend import instead_of
from farcall.runtime.peers.peer import WORTH_RELEASING_BYTES, RemotePeer

SIZE_BYTES = 4096


class Link:
    broken = None

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def post(self, head: bytes, **_: object) -> None:
        self.sent.append(head)

    @property
    def messages(self) -> list[messages.Message]:
        return [messages.decode_message(head[HEADER.size :]) for head in self.sent]


def memory_file() -> int:
    import fcntl

    descriptor = os.memfd_create("farcall-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0x0002)
    return descriptor


def peer_with(segments: SegmentMap | None) -> tuple[RemotePeer, Link]:
    unused: Any = None
    peer = RemotePeer(WorkerInfo("other", 1), 0x1F, 1, unused, unused, lambda peer: None)
    if segments is not None:
        peer.share(SegmentPool(1 << 20), segments)
    link = Link()
    peer.link = link  # type: ignore[assignment]
    return peer, link


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files on this system")
def test_offered_segments_are_mapped_with_their_descriptors() -> None:
    descriptors = [memory_file(), memory_file(), memory_file()]
    segments = SegmentMap(lambda urgent: None)
    peer, link = peer_with(segments)
    for number in (1, 2):
        peer.on_segment_offered(messages.SegmentOffered(number, SIZE_BYTES), descriptors[number - 1])
    assert link.messages == [messages.SegmentAccepted(1), messages.SegmentAccepted(2)]
    # One that is smaller than announced is closed at once.
    peer.on_segment_offered(messages.SegmentOffered(3, SIZE_BYTES * 100), descriptors[2])
    assert isinstance(link.messages[-1], messages.SegmentRefused)
    peer.close()
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files on this system")
def test_refused_offer_costs_no_descriptor() -> None:
    descriptor = memory_file()
    peer, link = peer_with(None)
    peer.on_segment_offered(messages.SegmentOffered(1, SIZE_BYTES), descriptor)
    assert isinstance(link.messages[0], messages.SegmentRefused)
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_offer_without_descriptor_is_refused() -> None:
    peer, link = peer_with(SegmentMap(lambda urgent: None))
    peer.on_segment_offered(messages.SegmentOffered(1, SIZE_BYTES), None)
    assert isinstance(link.messages[0], messages.SegmentRefused)
    peer.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files on this system")
def test_any_message_takes_along_what_is_owed_to_its_receiver() -> None:
    segments = SegmentMap(lambda urgent: None)
    peer, link = peer_with(segments)
    segments.owe(1, 0, WORTH_RELEASING_BYTES - 1)
    peer.control(messages.Ping(1))
    assert link.messages == [messages.Ping(1)]
    segments.owe(1, 4096, 1)
    peer.control(messages.Ping(2))
    assert link.messages[1:] == [messages.BlocksReleased([(1, 0), (1, 4096)]), messages.Ping(2)]
    peer.close()


class LostDevices:
    """A peer's devices, asked only to take back."""

    is_worth_releasing = False

    def __init__(self) -> None:
        self.taken_back: list[object] = []

    def take_back(self, ticket: object) -> None:
        self.taken_back.append(ticket)


@pytest.mark.parametrize("kind", [REQUEST, RESPONSE])
def test_device_memory_lent_for_a_message_that_a_break_has_lost_is_free_again(kind: int) -> None:
    peer, _ = peer_with(None)
    peer.devices = devices = LostDevices()
    ticket = (0, 7, 512, 100, (), b"event")
    table = pickle.dumps([("cuda:0", [(0, False, 0, ticket), (100, False, 2, b"bytes")])], 5)
    payload = b"any" + table + len(table).to_bytes(4, "little") + b"D"
    head, pieces = peer.encode(Frame(kind, 0, 1, b"f", payload=payload, buffers=[memoryview(bytes(1 << 20))]), NEVER)
    assert pieces
    assert devices.taken_back == []
    instead_of(WorkerInfo("me", 0), peer, head)
    assert devices.taken_back == [ticket]


def test_a_large_letter_is_not_lost_with_its_connection() -> None:
    """Nothing could go in its place: the core keeps all of it until the peer has it."""
    core = quiet_core()
    try:
        peer = UnlinkedPeer(core)
        near, far = connected("unix")
        with socket.socket(fileno=far) as end:
            end.settimeout(LONG_S)
            core.attach(peer.way, near)
            letter = Frame(LETTER, 0, 1, buffers=[memoryview(bytes(1 << 20))])
            sending = threading.Thread(target=peer.send, args=(letter,))
            sending.start()
            came = 0
            while came < 1 << 20:
                came += len(end.recv(1 << 20))
            sending.join(LONG_S)
            core.detach(peer.way)
            assert core.lost(peer.way, 0) == []
    finally:
        core.stop()


FATES = {
    Delivery.NOT_SENT: "; the call was not sent",
    Delivery.UNKNOWN: "; whether the call ran there is unknown",
}


@pytest.mark.parametrize("delivery", FATES)
def test_a_call_that_finds_the_link_of_a_leaving_peer_closed_is_told_how_it_left(delivery: Delivery) -> None:
    """Its Goodbye came after the call had looked whether the peer leaves."""
    peer, _ = peer_with(None)
    peer.leaving, peer.farewell = True, messages.GoodbyeReason.FORGOT_SHUTDOWN.text
    error = peer.lost(delivery)
    assert isinstance(error, PeerDead)
    assert str(error).startswith("other ended without shutdown()")
    assert str(error).endswith(FATES[delivery])
    assert (error.worker, error.delivery) == (peer.info, delivery)
