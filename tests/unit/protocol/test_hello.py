"""A dialler that comes back: what it says, what the listener answers, and who does not get so far."""

from __future__ import annotations

import msgspec
import pytest

from farcall.protocol.handshake import Established, Handshake, HandshakeState
from farcall.protocol.hello import (
    Connect,
    Hello,
    RefusalReason,
    Refused,
    Remind,
    Resume,
    Side,
    read_greeting,
    refuse,
)
from farcall.protocol.member import Member

SECRET = b"a secret of some length"
ADA = Hello(Member("ada", 0, 1), "cluster-1")
BOB = Hello(Member("bob", 1, 2, host_token="h"), "cluster-1")


def meet(bob: Hello) -> tuple[Handshake, bytes, Established, Handshake]:
    """A dialler that has yet to read the listener's proof; that proof; what the listener knows; and the listener."""
    one = Handshake(Side.DIALER, bob, SECRET, b"d" * 32, "ada")
    other = Handshake(Side.LISTENER, ADA, SECRET, b"l" * 32)
    answer, _ = other.receive(one.start())
    proof, _ = one.receive(answer)
    answer, heard = other.receive(proof)
    assert heard is not None
    return one, answer, heard, other


def test_both_ends_name_a_session_alike_and_never_the_same_twice() -> None:
    one, answer, heard, _ = meet(BOB)
    _, reached = one.receive(answer)
    assert reached is not None
    assert reached.session_id == heard.session_id
    assert heard.session_key.hex()[:8] not in heard.session_id


def test_who_comes_for_the_first_time_says_nothing_of_sessions() -> None:
    _, _, heard, _ = meet(BOB)
    assert heard.peer.purpose == Connect()


def test_a_dialler_that_resumes_waits_for_the_count_behind_the_proof() -> None:
    one, answer, heard, other = meet(BOB.wanting(Resume("s1", 7)))
    assert heard.peer.purpose == Resume("s1", 7)
    assert heard.peer.member.host_token == "h"
    assert one.receive(answer) == (b"", None)
    assert one.state is HandshakeState.AWAITING_COUNT
    count = other.resumed(2**40)
    assert one.receive(count[:-1]) == (b"", None)
    _, reached = one.receive(count[-1:] + b"frames")
    assert reached is not None
    assert (reached.peer_received, reached.leftover) == (2**40, b"frames")


def test_all_at_once_is_as_good() -> None:
    one, answer, _, other = meet(BOB.wanting(Resume("s1", 7)))
    _, reached = one.receive(answer + other.resumed(3))
    assert reached is not None
    assert reached.peer_received == 3


def test_a_dialler_that_asks_needs_the_proof_alone() -> None:
    one, answer, heard, _ = meet(BOB.wanting(Remind("s1")))
    assert heard.peer.purpose == Remind("s1")
    _, reached = one.receive(answer)
    assert reached is not None
    assert reached.peer_received == 0


def test_a_refusal_may_come_in_the_place_of_proof_or_count() -> None:
    one, _, _, _ = meet(BOB.wanting(Resume("s1", 7)))
    with pytest.raises(Refused) as caught:
        one.receive(refuse(RefusalReason.NOT_ADMITTED, "gone").farewell)
    assert caught.value.reason is RefusalReason.NOT_ADMITTED
    one, answer, _, _ = meet(BOB.wanting(Resume("s1", 7)))
    with pytest.raises(Refused):
        one.receive(answer + refuse(RefusalReason.NOT_ADMITTED, "gone").farewell)


def test_a_count_that_nobody_asked_for_is_no_part_of_a_handshake() -> None:
    _, _, _, other = meet(BOB.wanting(Resume("s1", 7)))
    one = Handshake(Side.DIALER, BOB, SECRET, b"d" * 32, "ada")
    with pytest.raises(Refused) as caught:
        one.receive(other.resumed(3))
    assert caught.value.reason is RefusalReason.MALFORMED


def test_a_count_that_somebody_changed_on_its_way_is_refused() -> None:
    one, answer, _, other = meet(BOB.wanting(Resume("s1", 7)))
    count = bytearray(other.resumed(3))
    count[-33] ^= 1  # the last byte of the number, before its proof
    with pytest.raises(Refused, match="did not send"):
        one.receive(answer + bytes(count))


@pytest.mark.parametrize("count", ["", -1, 1.5, "x", 2**64 - 1])
def test_a_dialler_that_counts_nonsense_is_refused(count: object) -> None:
    member = ["bob", 1, 2, [], "h", 0]
    body = msgspec.msgpack.encode([[member, "cluster-1", [1, "s1", 7]], bytes(32)])
    assert read_greeting(body).hello == BOB.wanting(Resume("s1", 7))
    with pytest.raises(ValueError, match="int"):
        read_greeting(msgspec.msgpack.encode([[member, "cluster-1", [1, "s1", count]], bytes(32)]))
