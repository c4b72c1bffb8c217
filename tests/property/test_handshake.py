"""The handshake against every split, every altered byte, and any garbage."""

from __future__ import annotations

import itertools
import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from farcall.errors import HandshakeRefused
from farcall.protocol.handshake import Established, Handshake, HandshakeState
from farcall.protocol.hello import MAX_MESSAGE_BYTES, Hello, Side
from farcall.protocol.member import Member

SECRET = b"a secret of some length"
ADA = Hello(Member("ada", 0, 1, host_token="host-1"), "cluster-1")
BOB = Hello(Member("bob", 1, 2, host_token="host-2"), "cluster-1")
HEADER_BYTES = 16


def pair() -> tuple[Handshake, Handshake]:
    return (
        Handshake(Side.DIALER, BOB, SECRET, b"d" * 32, "ada"),
        Handshake(Side.LISTENER, ADA, SECRET, b"l" * 32),
    )


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` in pieces, cut at these places (taken modulo its length)."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


def feed(machine: Handshake, pieces: list[bytes]) -> tuple[bytes, Established | None, list[bytes]]:
    """Hand pieces in until the handshake ends; also return the pieces it never saw."""
    sent = b""
    for index, piece in enumerate(pieces):
        answer, result = machine.receive(piece)
        sent += answer
        assert len(machine._buffer) < MAX_MESSAGE_BYTES
        if result is not None:
            return sent, result, pieces[index + 1 :]
    return sent, None, []


def recorded() -> list[bytes]:
    """The four messages of a good handshake, in order."""
    dialer, listener = pair()
    hello = dialer.start()
    answer, _ = listener.receive(hello)
    proof, _ = dialer.receive(answer)
    last, _ = listener.receive(proof)
    return [hello, answer, proof, last]


MESSAGES = recorded()
WIRE_BYTES = sum(map(len, MESSAGES))
cuts = st.lists(st.integers(0, 1 << 16), max_size=30)


@given(cuts, cuts, st.binary(max_size=100))
def test_any_split_gives_the_same_end(dialer_cuts: list[int], listener_cuts: list[int], frames: bytes) -> None:
    dialer, listener = pair()
    answer, _, _ = feed(listener, split(dialer.start(), listener_cuts))
    proof, _, _ = feed(dialer, split(answer, dialer_cuts))
    last, heard, unseen = feed(listener, split(proof + frames, listener_cuts))
    assert heard is not None
    assert (heard.peer, heard.leftover + b"".join(unseen)) == (BOB, frames)
    _, reached, unseen = feed(dialer, split(last + frames, dialer_cuts))
    assert reached is not None
    assert (reached.peer, reached.leftover + b"".join(unseen)) == (ADA, frames)
    assert reached.session_key == heard.session_key


@settings(max_examples=30)
@given(st.integers(1, 255))
def test_an_altered_byte_is_noticed_wherever_it_is(difference: int) -> None:
    """Somebody between the two alters one byte: one end refuses, and none believes the alteration."""
    for position in range(WIRE_BYTES):
        alter_one_byte(position, difference)


def alter_one_byte(position: int, difference: int) -> None:
    dialer, listener = pair()
    data, results, refused = dialer.start(), [], False
    passed = 0
    for receiver, believes in ((listener, BOB), (dialer, ADA), (listener, BOB), (dialer, ADA)):
        altered = bytearray(data)
        if passed <= position < passed + len(data):
            altered[position - passed] ^= difference
        passed += len(data)
        try:
            data, result = receiver.receive(bytes(altered))
        except HandshakeRefused:
            refused = True
            break
        if result is not None:
            assert result.peer == believes
            results.append(result)
        if not data:
            break
    # A length made longer leaves the receiver waiting for bytes that never come: a deadline ends it.
    waiting = receiver.state in (HandshakeState.AWAITING_GREETING, HandshakeState.AWAITING_PROOF)
    assert refused or (waiting and not data)
    assert len(results) < 2


@given(st.sampled_from(Side), st.lists(st.binary(max_size=300), max_size=20))
def test_garbage_raises_nothing_but_a_refusal(role: Side, pieces: list[bytes]) -> None:
    machine = pair()[role is Side.LISTENER]
    try:
        _, result, _ = feed(machine, pieces)
    except HandshakeRefused:
        assert machine.state is HandshakeState.REFUSED
        assert not machine._buffer
    else:
        assert result is None


headers = st.builds(
    lambda kind, body, length: struct.pack(">8sHHI", b"\x89farcall", 1, kind, length or len(body)) + body,
    st.integers(0, 6),
    st.binary(max_size=400),
    st.one_of(st.none(), st.integers(0, 2**32 - 1)),
)
mangled = st.builds(
    lambda message, start, junk: message[: HEADER_BYTES + start] + junk + message[HEADER_BYTES + start :],
    st.sampled_from(MESSAGES[:2]),
    st.integers(0, 80),
    st.binary(min_size=1, max_size=5),
)


@given(
    st.sampled_from(Side),
    st.lists(st.one_of(headers, mangled, st.sampled_from(MESSAGES[:2])), max_size=6),
    cuts,
)
def test_well_dressed_garbage_never_gets_in(role: Side, messages: list[bytes], places: list[int]) -> None:
    """Right magic, wrong insides: real greetings among it, but never a proof."""
    machine = pair()[role is Side.LISTENER]
    try:
        _, result, _ = feed(machine, split(b"".join(messages), places))
    except HandshakeRefused:
        result = None
    assert result is None


@given(st.binary(min_size=1, max_size=64), st.binary(min_size=1, max_size=64))
def test_only_equal_secrets_meet(one_secret: bytes, other_secret: bytes) -> None:
    dialer = Handshake(Side.DIALER, BOB, one_secret, b"d" * 32)
    listener = Handshake(Side.LISTENER, ADA, other_secret, b"l" * 32)
    proof, _ = dialer.receive(listener.receive(dialer.start())[0])
    try:
        _, result = listener.receive(proof)
    except HandshakeRefused:
        result = None
    assert (result is not None) == (one_secret == other_secret)
