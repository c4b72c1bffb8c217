"""Requests at their callee, without sockets: every one of them is answered."""

from __future__ import annotations

import math
from typing import Any

import pytest

from farcall.ids import WorkerInfo
from farcall.protocol.frames import FAILURE, REQUEST, RESPONSE, Frame
from farcall.runtime.calls.executor import Executor
from farcall.runtime.calls.serving import Server
from farcall.runtime.observing.event_log import EventLog
from farcall.runtime.peers.peer import Peer
from farcall.serialize import decode_failure, encode_function, write_call


class FakePeer(Peer):
    """The caller; memory is short while the first answers are sent to it."""

    def __init__(self, shortages: int = 0, handed_over: bool = False) -> None:
        unused: Any = None
        super().__init__(WorkerInfo("w1", 1), 0x1F, 1, unused, unused)
        self.shortages = shortages
        self.hands_over = handed_over
        self.sent: list[Frame] = []

    def send(self, frame: Frame, *_: Any, **__: Any) -> None:
        if self.shortages:
            self.shortages -= 1
            frame.handed_over = self.hands_over
            raise MemoryError("no room for a copy")
        self.sent.append(frame)


@pytest.fixture
def server() -> Server:
    unused: Any = None
    return Server(WorkerInfo("w0", 0), Executor("w0", 1, unused), log=EventLog())


def accept(server: Server, peer: Peer) -> Any:
    function = encode_function(math.factorial)
    assert function is not None
    frame = Frame(REQUEST, 0, 7, function)
    write_call(frame, ((5,), None), peer)
    server.accept(peer, frame)
    [request] = server.active
    return request


def test_a_request_is_answered(server: Server) -> None:
    peer = FakePeer()
    accept(server, peer).run(False)
    assert [(frame.kind, frame.call_id) for frame in peer.sent] == [(RESPONSE, 7)]
    assert not server.active


def test_an_answer_that_cannot_be_sent_is_replaced_by_its_error(server: Server) -> None:
    peer = FakePeer(shortages=1)
    accept(server, peer).run(False)
    [failure] = peer.sent
    assert (failure.kind, failure.call_id) == (FAILURE, 7)
    assert isinstance(decode_failure(failure, peer), MemoryError)
    assert not server.active


@pytest.mark.parametrize(("shortages", "handed_over"), [(2, False), (1, True)])
def test_a_request_is_not_answered_twice_nor_again_and_again(server: Server, shortages: int, handed_over: bool) -> None:
    peer = FakePeer(shortages, handed_over)
    with pytest.raises(MemoryError):
        accept(server, peer).run(False)
    assert peer.sent == []
    assert not server.active
