"""Doors over the in-memory transport: who is let in, who is not, and what strangers may cost."""

from __future__ import annotations

import errno
import logging
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from tests.kit.clock import Clock
from tests.kit.memory_transport import FRESH, MemoryTransport
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

from farcall.errors import HandshakeRefused
from farcall.protocol.handshake import Established, Handshake
from farcall.protocol.hello import MAGIC, MAX_MESSAGE_BYTES, NONCE_BYTES, Connect, Hello, Inspect, Listen, Refused, Side
from farcall.protocol.member import Member
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link import listener as doors
from farcall.runtime.link.listener import HANDSHAKE_S, MAX_GUESTS, MAX_TOLD, PeerListener
from farcall.secret import Secret
from farcall.transport import tls as tls_module
from farcall.transport.address import dial
from farcall.transport.interface import AcceptPostponed, ListenFailed, Transport
from farcall.transport.tls import Tls

SECRET = b"a secret of enough bytes to be used as it is"


def hello(name: str, rank: int, cluster: str = "cluster") -> Hello:
    return Hello(Member(name, rank, 1), cluster)


class StillLoop:
    """A loop that runs what it was given when it is told to."""

    def __init__(self) -> None:
        self.soon: deque[Callable[[], object]] = deque()
        self.clock = Clock()
        self.timer = self.clock.timer

    def call_soon(self, function: Callable[[], object]) -> None:
        self.soon.append(function)

    def forget(self, descriptor: int) -> None:
        raise AssertionError("nothing here has a descriptor")

    def run(self) -> None:
        while self.soon:
            self.soon.popleft()()


class Hall:
    """A door with its loop, and who came in."""

    def __init__(self, refuse: str | None = None, tls: Tls | None = None) -> None:
        self.loop = StillLoop()
        self.door = PeerListener([FRESH], self.loop)  # type: ignore[arg-type]
        self.members: list[tuple[Transport, Established]] = []
        self.door.open(
            hello("host", 0),
            Secret(SECRET),
            why_not=lambda peer: refuse,
            on_member=lambda *member: self.members.append(member),
            tls=tls,
        )

    def dial(self) -> Transport:
        transport = dial(self.door.addresses[0], 1.0)
        self.loop.run()
        return transport

    def close(self) -> None:
        self.door.close()


@pytest.fixture
def hall() -> Any:
    found = Hall()
    yield found
    found.close()


def exchange(hall: Hall, transport: Transport, handshake: Handshake) -> Established | None:
    """Run the dialler's side until it is through; raises what it raises."""
    outgoing: bytes = handshake.start()
    buffer = bytearray(MAX_MESSAGE_BYTES)
    while True:
        transport.send((outgoing,))
        hall.loop.run()
        count = transport.receive_into(memoryview(buffer))
        if not count:
            return None
        outgoing, established = handshake.receive(buffer[:count])
        if established is not None:
            return established


def dialler(secret: bytes = SECRET, cluster: str = "cluster", expected: str | None = "host") -> Handshake:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return Handshake(Side.DIALER, hello("guest", 1, cluster), secret, nonce, expected_peer=expected)


def is_closed(transport: Transport) -> bool:
    return transport.receive_into(memoryview(bytearray(1))) == 0


def test_member_with_the_secret_comes_in(hall: Hall) -> None:
    established = exchange(hall, hall.dial(), dialler())
    assert established is not None
    assert established.peer.member.name == "host"
    assert [member.peer.member.name for _, member in hall.members] == ["guest"]
    assert not hall.door._guests


def test_out_of_descriptors_the_door_does_not_look_out_without_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection stays in the queue, so the poller would tell of it again and again: the I/O thread at 100 %."""
    monkeypatch.setattr(doors, "POSTPONED_S", 0.02)
    loop = Loop("test")
    door = PeerListener(["tcp://127.0.0.1:0"], loop)
    (outside,) = door._listeners
    accept, tries = outside.accept, [0]

    def out_of_descriptors() -> Transport | None:
        tries[0] += 1
        if tries[0] < 5:
            raise AcceptPostponed("Too many open files")
        return accept()

    monkeypatch.setattr(type(outside), "accept", lambda self: out_of_descriptors())
    door.open(hello("host", 0), Secret(SECRET), why_not=lambda peer: None, on_member=lambda *member: None)
    loop.start()
    guest = dial(door.addresses[0], LONG_S)
    wait_until(lambda: len(door._guests) == 1)
    assert tries[0] <= 6  # four refusals, the guest, and nobody behind it
    assert sum("new connections wait" in record.message for record in caplog.records) == 1
    guest.close()
    loop.stop()
    door.close()


def test_bytes_behind_the_proof_are_handed_over(hall: Hall) -> None:
    transport = hall.dial()
    handshake = dialler()
    buffer = bytearray(MAX_MESSAGE_BYTES)
    transport.send((handshake.start(),))
    hall.loop.run()
    count = transport.receive_into(memoryview(buffer))
    proof, _ = handshake.receive(buffer[: count or 0])
    transport.send((proof + b"first frame",))
    hall.loop.run()
    assert hall.members[0][1].leftover == b"first frame"


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP"),
        (b"SSH-2.0-scanner\r\n", "SSH"),
        (b"\x16\x03\x01\0\x05hello", "TLS"),
        (bytes(range(256)), "does not speak farcall"),
        (b"\x89farcall" + b"\x00\x02\x00\x01" + b"\xff\xff\xff\xff", "the limit before proof"),
        (b"\x89farcall" + b"\x00\x63", "version 99"),
    ],
)
def test_strangers_are_shown_out(hall: Hall, caplog: pytest.LogCaptureFixture, what: bytes, reason: str) -> None:
    for _ in range(3):
        stranger = hall.dial()
        stranger.send((what,))
        hall.loop.run()
        while (stranger.receive_into(memoryview(bytearray(100)))) not in (0, None):
            pass  # a farewell
        assert is_closed(stranger)
    assert not hall.members
    assert not hall.door._guests
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1  # once, however often it is tried
    assert reason in told[0].getMessage()


def test_who_does_not_encrypt_is_told_so_once_for_each_reason_and_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever port it dials from. What is missing in the error of those who wait: the name, or else the host."""
    monkeypatch.setattr(MemoryTransport, "needs_encryption", True)
    hall = Hall(tls=Tls(None))
    for host in ("10.0.0.1", "10.0.0.2"):
        monkeypatch.setattr(MemoryTransport, "peer_host", host)
        for said in (dialler().start(), b"GET / HTTP/1.1\r\n", dialler().start()):
            guest = hall.dial()
            guest.send((said,))
            hall.loop.run()
            farewell = bytearray(1000)
            count = guest.receive_into(memoryview(farewell))
            assert bool(count) is said.startswith(MAGIC)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 4
    assert sum("from 10.0.0.1: " in line for line in told) == 2
    assert sum("FARCALL_ENCRYPTION=off" in line for line in told) == 2
    assert "FARCALL_ENCRYPTION=off" in hall.door.refusals["guest"]
    assert hall.door.refused_hosts.keys() == {"10.0.0.1", "10.0.0.2"}
    assert not hall.door._guests
    hall.close()


def test_out_of_descriptors_there_is_no_certificate_and_the_door_opens_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MemoryTransport, "needs_encryption", True)

    def fail(process: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    hall = Hall(tls=Tls(None))
    with monkeypatch.context() as short:
        short.setattr(tls_module, "_ephemeral", fail)
        assert all(is_closed(hall.dial()) for _ in range(3))
    [told] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Too many open files" in told
    assert not is_closed(hall.dial())
    assert len(hall.door._guests) == 1
    hall.close()


def test_a_greeting_that_is_longer_than_one_look_comes_through_an_encrypted_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No poll reports what is decrypted already."""
    monkeypatch.setattr(MemoryTransport, "needs_encryption", True)
    tls = Tls(None)
    hall = Hall(tls=tls)
    way = tls.dialled(hall.dial(), "host")
    facts = {f"{number} {'x' * 250}": "x" * 256 for number in range(60)}
    me = hello("guest", 1).wanting(Inspect(facts))
    handshake = Handshake(
        Side.DIALER, me, SECRET, secrets.token_bytes(NONCE_BYTES), expected_peer="host", binding=lambda: way.binding
    )
    greeting = handshake.start()
    assert len(greeting) > 16 * 1024
    view = memoryview(bytearray(MAX_MESSAGE_BYTES))
    left = memoryview(greeting)
    for _ in range(100):
        left = left[way.send((left,)) :] if left else left
        hall.loop.run()
        if count := way.receive_into(view):
            proof, _ = handshake.receive(view[:count])
            left = memoryview(proof)
    assert len(hall.members) == 1
    hall.close()


def test_wrong_secret_is_refused_and_remembered_for_the_error(hall: Hall) -> None:
    with pytest.raises(HandshakeRefused, match="secret"):
        exchange(hall, hall.dial(), dialler(secret=b"another secret, just as long"))
    assert not hall.members
    assert "FARCALL_SECRET" in hall.door.refusals["guest"]


def test_other_cluster_is_refused(hall: Hall) -> None:
    with pytest.raises(HandshakeRefused, match="other cluster"):
        exchange(hall, hall.dial(), dialler(cluster="elsewhere"))
    assert not hall.members


def test_proven_peer_that_is_not_wanted_is_refused_with_the_reason() -> None:
    hall = Hall(refuse="guest is connected already")
    assert exchange(hall, hall.dial(), dialler()) is None
    assert not hall.members
    assert hall.door.refusals["guest"] == "guest is connected already"
    hall.close()


@pytest.mark.parametrize("is_newcomer", [True, False])
def test_a_newcomer_that_was_greeted_before_this_node_became_a_member_is_to_come_again(
    hall: Hall, is_newcomer: bool
) -> None:
    """It has read that this node is no member, and might found a group beside that of this node."""
    transport = hall.dial()
    hall.door.become(hello("host", 0).wanting(Listen(admits=True)))
    guest = hello("guest", 1) if is_newcomer else hello("guest", 1).wanting(Connect(is_first=True))
    handshake = Handshake(Side.DIALER, guest, SECRET, secrets.token_bytes(NONCE_BYTES), expected_peer="host")
    if is_newcomer:
        with pytest.raises(Refused, match="crossed"):
            exchange(hall, transport, handshake)
    else:
        assert exchange(hall, transport, handshake) is not None
    assert bool(hall.members) is not is_newcomer


def test_half_open_connection_is_shown_out_in_time(hall: Hall) -> None:
    silent = hall.dial()
    assert len(hall.door._guests) == 1
    deadline = next(iter(hall.door._guests)).deadline
    assert hall.loop.clock.due <= deadline  # the loop will look in
    hall.loop.clock.turn_to(deadline - 1.0)
    assert hall.loop.clock.due == deadline
    assert not is_closed(silent) if silent.receive_into(memoryview(bytearray(1))) == 0 else True
    hall.loop.clock.turn_to(deadline)
    assert hall.loop.clock.due == NEVER
    assert is_closed(silent)
    assert not hall.door._guests
    assert HANDSHAKE_S <= 10.0


def test_crowd_of_silent_strangers_is_bounded(hall: Hall) -> None:
    crowd = [hall.dial() for _ in range(MAX_GUESTS + 50)]
    assert len(hall.door._guests) == MAX_GUESTS
    assert all(is_closed(stranger) for stranger in crowd[:50])  # the longest silent


def greet(hall: Hall) -> Transport:
    """A guest that proves nothing yet."""
    transport = hall.dial()
    transport.send((dialler().start(),))
    hall.loop.run()
    return transport


def test_silent_strangers_keep_no_member_out(hall: Hall) -> None:
    greeted = greet(hall)
    for _ in range(MAX_GUESTS):
        hall.dial()
    assert exchange(hall, hall.dial(), dialler()) is not None
    assert greeted.receive_into(memoryview(bytearray(1000)))  # it has greeted, and keeps its place
    assert greeted.receive_into(memoryview(bytearray(1))) is None


def test_one_host_keeps_no_other_out(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    greeted = [greet(hall) for _ in range(MAX_GUESTS)]
    assert is_closed(hall.dial())  # no place for one more of that host: those who have greeted may be about to prove
    crowd = [guest.transport for guest in hall.door._guests]
    of_host = property(lambda self: "192.0.2.1" if self in crowd else "192.0.2.2")
    monkeypatch.setattr(type(crowd[0]), "peer_host", of_host, raising=False)
    assert exchange(hall, hall.dial(), dialler()) is not None
    assert greeted[0].receive_into(memoryview(bytearray(1000)))
    assert is_closed(greeted[0])


def test_strangers_with_ever_new_words_take_no_memory(hall: Hall) -> None:
    for number in range(MAX_TOLD * 3):
        stranger = hall.dial()
        stranger.send((b"\x89farcall" + (1000 + number).to_bytes(2, "big"),))
        hall.loop.run()
    for number in range(MAX_TOLD * 2):
        handshake = Handshake(
            Side.DIALER, hello(f"guest{number}", 1), b"another secret", secrets.token_bytes(NONCE_BYTES)
        )
        with pytest.raises(HandshakeRefused):
            exchange(hall, hall.dial(), handshake)
    assert len(hall.door._told) <= MAX_TOLD
    assert len(hall.door.refusals) <= MAX_TOLD
    assert not hall.door._guests


def test_stranger_that_hangs_up_is_forgotten(hall: Hall) -> None:
    stranger = hall.dial()
    stranger.close()
    hall.loop.run()
    assert not hall.door._guests


def test_closed_door_leaves_nobody_waiting() -> None:
    hall = Hall()
    stranger = hall.dial()
    hall.close()
    assert is_closed(stranger)


def test_one_way_that_cannot_be_set_up_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    really_listen = doors.listen

    def listen(address: str) -> Any:
        if address == "unix:":
            raise ListenFailed("not in this sandbox")
        return really_listen(address)

    monkeypatch.setattr(doors, "listen", listen)
    door = PeerListener(["unix:", FRESH], StillLoop())  # type: ignore[arg-type]
    assert [address.partition(":")[0] for address in door.addresses] == ["memory"]
    door.close()
    with pytest.raises(ListenFailed, match="not in this sandbox"):
        PeerListener(["unix:"], StillLoop())  # type: ignore[arg-type]
