"""An observer's messages, and its way through the door."""

from __future__ import annotations

import pytest

from farcall.protocol.handshake import Established, Handshake
from farcall.protocol.hello import Hello, Observe, RefusalReason, Refused, Remind, Side, observer_key
from farcall.protocol.member import Member
from farcall.protocol.observing import Ask, MessageDecoder, ObservingError, Told, encode_framed

SECRET = b"a secret of the cluster"
MEMBER = Hello(Member("w0", 0, 1), "cluster")


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_messages_come_out_whatever_the_split(step: int) -> None:
    sent = [Ask(1, "snapshot", b"x", True), Told(1, "w0", b"y" * 50)]
    data = b"".join(map(encode_framed, sent))
    decoder = MessageDecoder(1000)
    found = [message for begin in range(0, len(data), step) for message in decoder.receive(data[begin : begin + step])]
    assert found == sent


def test_a_long_message_is_refused_when_its_length_is_read() -> None:
    with pytest.raises(ObservingError, match="limit is 100"):
        MessageDecoder(100).receive((101).to_bytes(4, "big"))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ObservingError, match="unreadable"):
        MessageDecoder(100).receive(b"\0\0\0\x03abc")


def meet(dialer: Handshake, listener: Handshake) -> tuple[Established, Established]:
    """Both ends' results, or the refusal of the one that refused first."""
    to_listener, at_dialer, at_listener = dialer.start(), None, None
    while at_dialer is None:
        reply, at_listener = listener.receive(to_listener)
        to_listener, at_dialer = dialer.receive(reply)
    assert at_listener is not None
    return at_dialer, at_listener


def listener() -> Handshake:
    return Handshake(Side.LISTENER, MEMBER, SECRET, b"l" * 32)


@pytest.mark.parametrize("cluster_id", ["cluster", ""])
def test_an_observer_is_let_in_with_its_key(cluster_id: str) -> None:
    me = Hello(Member("observer", 0, 1), cluster_id, Observe())
    at_dialer, at_listener = meet(Handshake(Side.DIALER, me, observer_key(SECRET), b"d" * 32), listener())
    assert at_dialer.peer == MEMBER
    assert at_listener.peer == me
    assert at_dialer.session_key == at_listener.session_key


def test_who_has_only_the_observers_key_becomes_no_member() -> None:
    me = Hello(Member("w1", 1, 1), "cluster")
    with pytest.raises(Refused) as refused:
        meet(Handshake(Side.DIALER, me, observer_key(SECRET), b"d" * 32), listener())
    assert refused.value.reason is RefusalReason.WRONG_SECRET


def test_the_secret_itself_is_not_the_observers_key() -> None:
    me = Hello(Member("observer", 0, 1), "cluster", Observe())
    with pytest.raises(Refused) as refused:
        meet(Handshake(Side.DIALER, me, SECRET, b"d" * 32), listener())
    assert refused.value.reason is RefusalReason.WRONG_SECRET


def test_an_observer_of_another_cluster_is_refused() -> None:
    me = Hello(Member("observer", 0, 1), "other", Observe())
    with pytest.raises(Refused) as refused:
        meet(Handshake(Side.DIALER, me, observer_key(SECRET), b"d" * 32), listener())
    assert refused.value.reason is RefusalReason.OTHER_CLUSTER


def test_only_who_looks_on_or_wants_in_may_leave_the_cluster_out() -> None:
    me = Hello(Member("w1", 1, 1), "")
    at_dialer, _ = meet(Handshake(Side.DIALER, me, SECRET, b"d" * 32), listener())
    assert at_dialer.peer.cluster_id == "cluster"
    with pytest.raises(Refused) as refused:
        meet(Handshake(Side.DIALER, me.wanting(Remind("session")), SECRET, b"d" * 32), listener())
    assert refused.value.reason is RefusalReason.OTHER_CLUSTER


def test_a_member_does_not_take_a_listener_for_one_of_its_own_because_it_says_it_observes() -> None:
    impostor = Handshake(Side.LISTENER, Hello(Member("w0", 0, 1), "", Observe()), observer_key(SECRET), b"l" * 32)
    with pytest.raises(Refused):
        meet(Handshake(Side.DIALER, Hello(Member("w1", 1, 1), "cluster"), SECRET, b"d" * 32), impostor)
