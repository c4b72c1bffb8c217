"""Bytes of strangers: to the handshake, at both ends, and to the store."""

from __future__ import annotations

import pytest
from tests.fuzz.mutations import FULL, mutate, pieces, rounds

from farcall.errors import HandshakeRefused, WrongSecret
from farcall.protocol.handshake import Established, Handshake
from farcall.protocol.hello import MAX_MESSAGE_BYTES, Connect, Hello, Inspect, Listen, Observe, Resume, Side
from farcall.protocol.member import Member
from farcall.runtime.rendezvous.records import Proofs
from farcall.secret import Secret

SECRET = b"a secret of enough bytes"
ADA = Hello(Member("ada", 0, 1, ("tcp://10.0.0.1:7",), "host-1"), "cluster-1", Listen())
PURPOSES = (Connect(), Connect(is_first=True), Resume("00" * 16, 7), Inspect({"a": "b"}))


def dialer(purpose: Connect | Resume | Inspect | Observe = PURPOSES[0], nonce: bytes = b"d" * 32) -> Handshake:
    me = Hello(Member("bob", 1, 2, ("tcp://10.0.0.2:7",)), "cluster-1", purpose).dialling("tcp://10.0.0.1:7")
    return Handshake(Side.DIALER, me, SECRET, nonce, expected_peer="ada")


def listener(nonce: bytes = b"l" * 32) -> Handshake:
    return Handshake(Side.LISTENER, ADA, SECRET, nonce)


def transcript(purpose: Connect | Resume | Inspect | Observe) -> tuple[list[bytes], list[bytes]]:
    """What the dialer and the listener say to each other."""
    one, other = dialer(purpose), listener()
    said = [one.start()]
    answers = [other.receive(said[0])[0]]
    said.append(one.receive(answers[0])[0])
    answers.append(other.receive(said[1])[0])
    if isinstance(purpose, Resume):
        answers.append(other.resumed(3))
    return said, answers


SAID, ANSWERS = zip(*map(transcript, PURPOSES), strict=True)
CORPUS = [message for session in (*SAID, *ANSWERS) for message in session]


def hear(machine: Handshake, seed: int, data: bytes, chance: object) -> Established | None:
    """Feed ``data`` in pieces; None: refused, or not enough."""
    try:
        for piece in pieces(chance, data):  # type: ignore[arg-type]
            _, established = machine.receive(piece)
            if established is not None:
                return established
    except HandshakeRefused as refusal:
        if not str(refusal).isprintable():
            raise AssertionError(f"seed {seed}: {refusal!r} goes into logs") from refusal
    assert len(machine._buffer) <= MAX_MESSAGE_BYTES, seed
    return None


def test_no_altered_byte_gets_past_the_handshake() -> None:
    """Replayed, reflected, cut, joined, lengthened: nobody is let in at either end, and only refusals are raised."""
    for seed, chance in rounds(8000):
        which = chance.randrange(len(PURPOSES))
        if chance.random() < 0.5:
            machine, whole = listener(), b"".join(SAID[which])
        else:
            machine, whole = dialer(PURPOSES[which]), b"".join(ANSWERS[which])
            machine.start()
        altered = mutate(chance, whole, CORPUS)
        if altered.startswith(whole):
            continue  # what follows is for the frames' decoder
        established = hear(machine, seed, altered, chance)
        # Only what came before the alteration was enough: the rest is for the frames' decoder.
        assert established is None or altered.startswith(whole), seed


def test_a_recorded_session_proves_nothing_to_anybody_else() -> None:
    for seed, chance in rounds(500):
        fresh = listener(chance.randbytes(32))
        assert hear(fresh, seed, b"".join(chance.choice(SAID)), chance) is None, seed
        caller = dialer(nonce=chance.randbytes(32))
        caller.start()
        assert hear(caller, seed, b"".join(chance.choice(ANSWERS)), chance) is None, seed
        reflected = dialer(nonce=chance.randbytes(32))
        assert hear(reflected, seed, reflected.start(), chance) is None, seed


def test_no_altered_record_is_read_from_a_store() -> None:
    proofs = Proofs(Secret(SECRET), True, "here")
    keys = ["farcall/0/generation", "farcall/0/0/slot/1", "farcall/0/0/outcome"]
    records = [
        proofs.seal(key, text).encode() for key, text in zip(keys, ("7", '{"member":["b",1]}', "{}"), strict=True)
    ]
    for seed, chance in rounds(5000):
        which = chance.randrange(3)
        altered = mutate(chance, records[which], records)
        key = chance.choice(keys)
        if altered == records[which] and key == keys[which]:
            continue
        with pytest.raises(WrongSecret) as caught:
            proofs.open(key, altered)
        assert str(caught.value).isprintable(), seed


@pytest.mark.skipif(FULL, reason="the corpus is for the quick run")
@pytest.mark.parametrize(
    "found",
    [
        b"\x89farcall\x00\x02\x00\x01" + (2**32 - 1).to_bytes(4, "big"),
        b"\x89farcall\x00\x02\x00\x01" + (1000).to_bytes(4, "big") + b"\xdd\xff\xff\xff\xff" + bytes(995),
        b"\x89farcall\x00\x02\x00\x01" + (60_000).to_bytes(4, "big") + b"\x91" * 60_000,
        b"\x80\x04\x95cposix\nsystem\n(S'touch /tmp/farcall-owned'\ntR.",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_was_found_once(found: bytes) -> None:
    with pytest.raises(HandshakeRefused):
        listener().receive(found)
