"""The handshake, one rule at a time: two machines joined by hand, no sockets."""

from __future__ import annotations

import pickle
import struct

import msgspec
import pytest

from farcall.errors import Delivery, HandshakeRefused
from farcall.protocol import handshake, hello
from farcall.protocol.handshake import Established, Handshake, HandshakeState
from farcall.protocol.hello import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    TLS_NAME,
    TLS_RECORD,
    Connect,
    Hello,
    Inspect,
    RefusalReason,
    Refused,
    Remind,
    Resume,
    Side,
    refuse,
)
from farcall.protocol.member import Member

SECRET = b"a secret of some length"
ADA = Hello(Member("ada", 0, 1, host_token="host-1"), "cluster-1")
BOB = Hello(Member("bob", 1, 2), "cluster-1")


def dialer(
    me: Hello = BOB, secret: bytes = SECRET, nonce: bytes = b"d" * 32, expected_peer: str | None = "ada"
) -> Handshake:
    return Handshake(Side.DIALER, me, secret, nonce, expected_peer)


def listener(
    me: Hello = ADA, secret: bytes = SECRET, nonce: bytes = b"l" * 32, expected_peer: str | None = None
) -> Handshake:
    return Handshake(Side.LISTENER, me, secret, nonce, expected_peer)


def message(kind: int, body: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    return struct.pack(">8sHHI", b"\x89farcall", version, kind, len(body)) + body


def refusal(machine: Handshake, data: bytes) -> Refused:
    with pytest.raises(HandshakeRefused) as caught:
        machine.receive(data)
    assert isinstance(caught.value, Refused)
    assert machine.state is HandshakeState.REFUSED
    return caught.value


def shake(one: Handshake, other: Handshake) -> tuple[Established, Established]:
    """Let a dialer and a listener talk until both are through."""
    answer, _ = other.receive(one.start())
    proof, _ = one.receive(answer)
    answer, heard = other.receive(proof)
    nothing, reached = one.receive(answer)
    assert nothing == b""
    assert heard is not None
    assert reached is not None
    return reached, heard


# --- the dialled address ---------------------------------------------------------------------------------

KNOWN = Hello(Member("ada", 0, 1, addresses=("unix:@here", "tcp://10.0.0.1:7")), "cluster-1")


@pytest.mark.parametrize("address", KNOWN.member.addresses)
def test_who_dials_an_advertised_address_is_let_in(address: str) -> None:
    shake(dialer(me=BOB.dialling(address)), listener(me=KNOWN))


@pytest.mark.parametrize("address", ["tcp://10.0.0.66:7", "tcp://10.0.0.1:8", ""])
@pytest.mark.parametrize("purpose", [Connect(), Resume("session", 0), Remind("session")])
def test_whoever_relays_from_another_address_is_found_out(address: str, purpose: Connect | Resume | Remind) -> None:
    """The dialer was told the relay's address, by whatever means; it cannot be taken out of what the dialer proves."""
    caught = refusal(listener(me=KNOWN), dialer(me=BOB.wanting(purpose).dialling(address)).start())
    assert caught.reason is RefusalReason.WRONG_ADDRESS


@pytest.mark.parametrize("hello", [Hello(BOB.member, ""), Hello(BOB.member, "cluster-1", Inspect({}))])
def test_who_knows_an_address_from_its_user_only_names_none(hello: Hello) -> None:
    shake(dialer(me=hello), listener(me=KNOWN))


# --- the good way --------------------------------------------------------------------------------------


def test_both_learn_who_the_other_is_and_share_a_key() -> None:
    reached, heard = shake(dialer(), listener())
    assert (reached.peer, heard.peer) == (ADA, BOB)
    assert reached.session_key == heard.session_key
    assert len(reached.session_key) == 32


def test_the_session_key_is_new_for_each_connection() -> None:
    first, _ = shake(dialer(), listener())
    second, _ = shake(dialer(nonce=b"e" * 32), listener())
    third, _ = shake(dialer(), listener(nonce=b"m" * 32))
    assert len({first.session_key, second.session_key, third.session_key}) == 3


def test_states_say_what_is_awaited() -> None:
    one, other = dialer(), listener()
    assert other.start() == b""
    assert other.state is HandshakeState.AWAITING_GREETING
    answer, _ = other.receive(one.start())
    assert other.state is HandshakeState.AWAITING_PROOF
    assert other.peer_claim == BOB
    one.receive(answer)
    assert one.state is HandshakeState.AWAITING_PROOF


def test_frames_right_behind_the_proof_are_handed_back() -> None:
    one, other = dialer(), listener()
    proof, _ = one.receive(other.receive(one.start())[0])
    answer, heard = other.receive(proof + b"early")
    _, reached = one.receive(answer + b"first frames")
    assert heard is not None
    assert heard.leftover == b"early"
    assert reached is not None
    assert reached.leftover == b"first frames"
    assert one.state is other.state is HandshakeState.ESTABLISHED


def test_bytes_after_the_end_are_the_drivers_mistake() -> None:
    one = dialer()
    shake(one, listener())
    with pytest.raises(RuntimeError, match="over"):
        one.receive(b"x")


def test_the_listener_may_expect_somebody_too() -> None:
    shake(dialer(), listener(expected_peer="bob"))
    assert refusal(listener(expected_peer="eve"), dialer().start()).reason is RefusalReason.WRONG_PEER


# --- strangers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
        (b"HTTP/1.1 400 Bad Request\r\n", "HTTP"),
        (b"\x16\x03\x01\0\6\1\0\0\2\3\3", "TLS"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH"),
        (b"\x00", "does not speak farcall"),
        (b"\x89PNG\r\n", "does not speak farcall"),
    ],
)
def test_strangers_are_known_by_their_first_bytes_and_told_nothing(data: bytes, name: str) -> None:
    caught = refusal(listener(), data)
    assert caught.reason is RefusalReason.NOT_FARCALL
    assert name in str(caught)
    assert caught.farewell == b""
    assert caught.delivery is Delivery.NOT_SENT


def test_one_end_that_encrypts_and_one_that_does_not_tell_each_other() -> None:
    # A dialer in the clear, to a listener that waits for TLS.
    encrypting, plain = listener(), dialer()
    caught = encrypting.unencrypted(plain.start())
    assert caught.reason is RefusalReason.ENCRYPTION
    assert encrypting.peer_claim is not None
    assert "FARCALL_ENCRYPTION=off" in str(refusal(plain, caught.farewell))
    # A dialer of farcall's with TLS, to a listener in the clear: it answers that one, and no other.
    hello = TLS_RECORD + b"\1\0\xe4" + bytes(200) + TLS_NAME + bytes(20)
    caught = refusal(listener(), hello)
    assert caught.reason is RefusalReason.ENCRYPTION
    slow = listener()
    for byte in hello[:-1]:
        assert slow.receive(bytes([byte])) == (b"", None)  # one packet may not hold all of it
    assert refusal(slow, hello[-1:]).reason is RefusalReason.ENCRYPTION
    told = dialer().unencrypted(caught.farewell)
    assert told.reason is RefusalReason.ENCRYPTION
    assert "FARCALL_ENCRYPTION=off" in str(told)
    assert told.farewell == b""


@pytest.mark.parametrize(
    ("said", "reason", "word"),
    [
        (b"GET / HTTP/1.1\r\n", RefusalReason.NOT_FARCALL, "HTTP"),
        (b"\0", RefusalReason.NOT_FARCALL, "does not speak farcall"),
        (b"\x89farcall\0\1\0\1", RefusalReason.VERSION_MISMATCH, "version 1"),
        (b"\x89far", RefusalReason.ENCRYPTION, "does not encrypt"),
        (b"\x89farcall\0\2\0\1\0\0\0\3\xc1\xc1\xc1", RefusalReason.ENCRYPTION, "does not encrypt"),
    ],
)
def test_what_came_instead_of_tls_is_named(said: bytes, reason: RefusalReason, word: str) -> None:
    caught = listener().unencrypted(said)
    assert caught.reason is reason
    assert word in str(caught)


def test_another_version_is_refused_before_anything_else_of_it_is_read() -> None:
    caught = refusal(listener(), message(kind=77, body=b"", version=9)[:10])
    assert caught.reason is RefusalReason.VERSION_MISMATCH
    assert "version 9" in str(caught)
    assert f"this node {PROTOCOL_VERSION}" in str(caught)


def test_the_refused_version_learns_ours_from_the_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    farewell = refusal(listener(), message(1, b"", version=9)).farewell
    for module in (handshake, hello):
        monkeypatch.setattr(module, "PROTOCOL_VERSION", 9)
    caught = refusal(dialer(), farewell)
    assert caught.reason is RefusalReason.VERSION_MISMATCH
    assert f"version {PROTOCOL_VERSION}" in str(caught)


@pytest.mark.parametrize("body_bytes", [MAX_MESSAGE_BYTES, 2**32 - 1])
def test_a_huge_length_is_refused_on_sight(body_bytes: int) -> None:
    header = struct.pack(">8sHHI", b"\x89farcall", PROTOCOL_VERSION, 1, body_bytes)
    assert refusal(listener(), header).reason is RefusalReason.TOO_LARGE


def test_a_message_of_the_wrong_kind_or_size() -> None:
    for wrong in (message(2, b""), message(3, bytes(32)), message(0, b""), message(5, bytes(65))):
        assert refusal(listener(), wrong).reason is RefusalReason.MALFORMED
    other = listener()
    other.receive(dialer().start())
    assert refusal(other, message(3, bytes(31))).reason is RefusalReason.MALFORMED


def test_unreadable_greetings() -> None:
    def greeting(said: object, nonce: bytes = bytes(32)) -> bytes:
        return message(1, msgspec.msgpack.encode([said, nonce]))

    def said(
        name: object = "bob", rank: object = 1, cluster: str = "cluster-1", purpose: object = (0,)
    ) -> list[object]:
        return [[name, rank, 3], cluster, purpose]

    good = said()
    listener().receive(greeting(good))
    for body in (
        greeting(good, nonce=bytes(31)),
        greeting(said(rank=-1)),
        greeting(said(name="bob\nfake log line")),
        greeting(said(cluster="x" * 257)),
        greeting(said(purpose=(99,))),
        greeting(said(purpose=(4, {str(n): "" for n in range(65)}))),
        greeting([*good, "x" * 257]),
        greeting([*good, "address", "more"]),
        message(1, b""),
        message(1, b"\x92\x95\xa1\xff"),
        message(1, b"\x91" * 60_000),
    ):
        assert refusal(listener(), body).reason is RefusalReason.MALFORMED


# --- members that do not belong here -------------------------------------------------------------------


def test_another_cluster() -> None:
    caught = refusal(listener(), dialer(me=Hello(Member("bob", 1, 3), "cluster-2")).start())
    assert caught.reason is RefusalReason.OTHER_CLUSTER
    assert "cluster-1" in str(caught)
    assert "cluster-2" in str(caught)


def test_the_dialer_proves_nothing_to_somebody_it_did_not_want() -> None:
    one = dialer(expected_peer="eve")
    answer, _ = listener().receive(one.start())
    caught = refusal(one, answer)
    assert caught.reason is RefusalReason.WRONG_PEER
    assert "'eve'" in str(caught)
    assert "'ada'" in str(caught)


def test_a_dialer_with_the_wrong_secret_gets_no_proof_and_is_told_why() -> None:
    one, other = dialer(secret=b"wrong"), listener()
    proof, _ = one.receive(other.receive(one.start())[0])
    caught = refusal(other, proof)
    assert caught.reason is RefusalReason.WRONG_SECRET
    assert "'bob'" in str(caught)
    told = refusal(one, caught.farewell)
    assert told.reason is RefusalReason.WRONG_SECRET
    assert "FARCALL_SECRET" in str(told)


def test_a_listener_that_cannot_prove_the_secret() -> None:
    one = dialer()
    one.receive(listener().receive(one.start())[0])
    assert refusal(one, message(4, bytes(32))).reason is RefusalReason.WRONG_SECRET


def test_nobodys_own_proof_can_be_played_back() -> None:
    one, other = dialer(), listener()
    proof, _ = one.receive(other.receive(one.start())[0])
    assert refusal(one, message(4, proof[-32:])).reason is RefusalReason.WRONG_SECRET


def test_a_greeting_cannot_be_reflected() -> None:
    one = dialer(expected_peer=None)
    assert refusal(one, one.start()).reason is RefusalReason.MALFORMED


def test_a_recorded_dialer_cannot_be_replayed() -> None:
    one, other = dialer(), listener()
    hello = one.start()
    proof, _ = one.receive(other.receive(hello)[0])
    later = listener(nonce=b"n" * 32)
    later.receive(hello)
    assert refusal(later, proof).reason is RefusalReason.WRONG_SECRET


def test_a_refusal_repeats_no_text_of_an_unproven_peer() -> None:
    caught = refusal(dialer(), message(5, b"\x1b[2Jgotcha"))
    assert caught.reason is RefusalReason.MALFORMED
    assert "gotcha" not in str(caught)
    assert caught.farewell == b""


def test_a_listener_may_turn_a_proven_peer_away_instead_of_proving_itself() -> None:
    one, other = dialer(), listener()
    one.receive(other.receive(one.start())[0])
    caught = refusal(one, refuse(RefusalReason.NOT_ADMITTED, "rank 1 is taken").farewell)
    assert caught.reason is RefusalReason.NOT_ADMITTED
    assert "taken" not in str(caught)


def test_refused_is_refused_for_good() -> None:
    other = listener()
    first = refusal(other, b"x")
    assert refusal(other, dialer().start()) is first


def test_a_refusal_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(refusal(listener(), b"x")))
    assert again.reason is RefusalReason.NOT_FARCALL


# --- what the caller may get wrong ---------------------------------------------------------------------


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="secret"):
        dialer(secret=b"")
    with pytest.raises(ValueError, match="nonce"):
        dialer(nonce=b"short")
    with pytest.raises(ValueError, match="not valid"):
        dialer(me=Hello(Member("no spaces", 0, 3), "c"))
    with pytest.raises(ValueError, match="length"):
        dialer(me=Hello(Member("bob", 0, 3), "c" * 257))


def test_key_derivation_is_rfc_5869() -> None:
    """Its first test case, cut to the 32 bytes of one block."""
    key = hello.hkdf_extract(bytes(range(13)), b"\x0b" * 22)
    assert key.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    block = hello.hkdf_expand(key, bytes(range(0xF0, 0xFA)))
    assert block.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
