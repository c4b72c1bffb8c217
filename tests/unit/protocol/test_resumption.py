"""A dialler that comes back: what it says, what the listener answers, and who does not get so far."""

from __future__ import annotations

import msgspec
import pytest

from farcall.protocol.handshake import (
    Established,
    Handshake,
    HandshakeState,
    Identity,
    RefusalReason,
    Refused,
    Role,
    refuse,
    resumed,
)
from farcall.protocol.resumption import Resumption, asking, resuming, resumption_of, session_id_of

SECRET = b"a secret of some length"
ADA = Identity("ada", 0, "cluster-1", 1)
BOB = Identity("bob", 1, "cluster-1", 2, {"host": "h"})


def meet(bob: Identity) -> tuple[Handshake, bytes, Established]:
    """A dialler that has yet to read the listener's proof; that proof; and what the listener knows."""
    one = Handshake(Role.DIALER, bob, SECRET, b"d" * 32, "ada")
    other = Handshake(Role.LISTENER, ADA, SECRET, b"l" * 32)
    answer, _ = other.receive(one.start())
    proof, _ = one.receive(answer)
    answer, heard = other.receive(proof)
    assert heard is not None
    return one, answer, heard


def test_both_ends_name_a_session_alike_and_never_the_same_twice() -> None:
    one, answer, heard = meet(BOB)
    _, reached = one.receive(answer)
    assert reached is not None
    assert session_id_of(reached) == session_id_of(heard)
    assert heard.session_key.hex()[:8] not in session_id_of(heard)


def test_who_comes_for_the_first_time_says_nothing_of_sessions() -> None:
    assert resumption_of(BOB) is None


def test_a_dialler_that_resumes_waits_for_the_count_behind_the_proof() -> None:
    one, answer, heard = meet(resuming(BOB, "s1", 7))
    assert resumption_of(heard.peer) == Resumption("s1", 7)
    assert heard.peer.capabilities["host"] == "h"
    assert one.receive(answer) == (b"", None)
    assert one.state is HandshakeState.AWAITING_COUNT
    count = resumed(2**40)
    assert one.receive(count[:-1]) == (b"", None)
    _, reached = one.receive(count[-1:] + b"frames")
    assert reached is not None
    assert (reached.peer_received, reached.leftover) == (2**40, b"frames")


def test_all_at_once_is_as_good() -> None:
    one, answer, _ = meet(resuming(BOB, "s1", 7))
    _, reached = one.receive(answer + resumed(3))
    assert reached is not None
    assert reached.peer_received == 3


def test_a_dialler_that_asks_needs_the_proof_alone() -> None:
    one, answer, heard = meet(asking(BOB, "s1"))
    assert resumption_of(heard.peer) == Resumption("s1", None)
    _, reached = one.receive(answer)
    assert reached is not None
    assert reached.peer_received == 0


def test_a_refusal_may_come_in_the_place_of_proof_or_count() -> None:
    one, _, _ = meet(resuming(BOB, "s1", 7))
    with pytest.raises(Refused) as caught:
        one.receive(refuse(RefusalReason.NOT_ADMITTED, "gone").farewell)
    assert caught.value.reason is RefusalReason.NOT_ADMITTED
    one, answer, _ = meet(resuming(BOB, "s1", 7))
    with pytest.raises(Refused):
        one.receive(answer + refuse(RefusalReason.NOT_ADMITTED, "gone").farewell)


def test_a_count_that_nobody_asked_for_is_no_part_of_a_handshake() -> None:
    one = Handshake(Role.DIALER, BOB, SECRET, b"d" * 32, "ada")
    with pytest.raises(Refused) as caught:
        one.receive(resumed(3))
    assert caught.value.reason is RefusalReason.MALFORMED


@pytest.mark.parametrize("count", ["", "-1", "1.5", "x", "9" * 21])
def test_a_dialler_that_counts_nonsense_is_refused(count: str) -> None:
    wrong = msgspec.structs.replace(BOB, capabilities={"session": "s1", "received": count})
    with pytest.raises(Refused):
        resumption_of(wrong)
