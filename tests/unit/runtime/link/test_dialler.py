"""Diallers over the in-memory transport: when somebody is back, when gone, and when nothing is known yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Queue
from time import monotonic
from typing import Any

import pytest
from tests.kit.memory_transport import FRESH, MemoryTransport, memory_pair
from tests.kit.waiting import wait_until

from farcall.protocol.backoff import Backoff
from farcall.protocol.connector import Dial, Ended, Goal, Step
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello, RefusalReason, Remind, Resume, refuse
from farcall.protocol.member import Member
from farcall.runtime.io.loop import Loop
from farcall.runtime.link import dialler as dialling
from farcall.runtime.link.dialler import Dialler, Found, Target
from farcall.runtime.link.listener import PeerListener
from farcall.secret import Secret
from farcall.transport.interface import DialFailed, DialRefused, DialUnanswered, Transport
from farcall.transport.tls import Tls

PATIENCE_S = 60.0
SECRET = Secret(b"a secret of enough bytes")
TOKEN = 0x5F
ME = Hello(Member("me", 1, 1), "cluster")


class Host:
    """A member with its door."""

    def __init__(self, token: int = TOKEN, refuses: bool = False) -> None:
        self.loop = Loop("host")
        self.loop.start()
        self.door = PeerListener([FRESH], self.loop)
        self.refuses = refuses
        self.came: Queue[tuple[Transport, Established]] = Queue()
        host = Hello(Member("host", 0, token), "cluster")
        self.door.open(host, SECRET, why_not=lambda peer: "nobody", on_member=lambda *member: None, returning=self)

    def admit(self, peer: Hello, arrived_at: float) -> int | None:
        if self.refuses:
            raise refuse(RefusalReason.NOT_ADMITTED, "not you")
        return peer.purpose.received + 1 if isinstance(peer.purpose, Resume) else None

    def on_resumed(self, transport: Transport, established: Established) -> None:
        self.came.put((transport, established))

    def close(self) -> None:
        self.door.close()
        self.loop.stop()
        while not self.came.empty():
            self.came.get()[0].close()


@pytest.fixture
def host() -> Iterator[Host]:
    found = Host()
    yield found
    found.close()


class Attempts:
    """A dial, and what came of it."""

    def __init__(
        self,
        ways: list[str],
        resumes: bool = True,
        incarnation: int = TOKEN,
        lost_kind: str = "memory",
        lost_host: str = "",
        was_reached: bool = True,
        is_near: bool = False,
        seconds: float = PATIENCE_S,
    ) -> None:
        self.back: Queue[tuple[Transport, Established]] = Queue()
        self.gone: Queue[tuple[str, Step]] = Queue()
        now = monotonic()
        goal = Goal.RESUME if resumes else Goal.REMIND
        dial = Dial(goal, until=now + seconds, now=now, backoff=Backoff(0.05, 1.0))
        target = Target("host", incarnation, ways, lost_kind, lost_host, is_near, was_reached)
        me = ME.wanting(Resume("s1", 7) if resumes else Remind("s1"))
        self.dialler = Dialler(dial, target, me, SECRET, on_end=self.on_end)
        self.dialler.start()

    def on_end(self, dialler: Dialler, ended: Ended, found: Found) -> None:
        if found.transport is not None and found.established is not None:
            self.back.put((found.transport, found.established))
        elif dialler.is_wanted():
            self.gone.put((ended.why, ended.step))

    def why_gone(self) -> str:
        why, self.step = self.gone.get(timeout=PATIENCE_S)
        self.dialler.join(PATIENCE_S)
        assert self.back.empty()
        return why


def test_who_resumes_gets_the_connection_and_the_count(host: Host) -> None:
    attempts = Attempts(host.door.addresses)
    transport, established = attempts.back.get(timeout=PATIENCE_S)
    assert established.peer_received == 8
    assert attempts.gone.empty()
    transport.close()


def test_who_asks_goes_on_asking_while_the_other_lives(host: Host) -> None:
    attempts = Attempts(host.door.addresses, resumes=False)
    for _ in range(3):
        _, heard = host.came.get(timeout=PATIENCE_S)
        assert isinstance(heard.peer.purpose, Remind)
        attempts.dialler.hasten()
    assert attempts.gone.empty()
    attempts.dialler.stop()
    attempts.dialler.join(PATIENCE_S)
    assert attempts.gone.empty()
    assert attempts.back.empty()


def test_nobody_there_within_the_host_is_an_end_at_once() -> None:
    assert "nobody listens" in Attempts(["memory:nobody"]).why_gone()


def test_nobody_there_is_no_end_where_the_connection_was_of_another_kind(host: Host) -> None:
    """A unix name may be of another network namespace: the member may live, and be reached over TCP."""
    attempts = Attempts(["memory:nobody", *host.door.addresses], lost_kind="tcp")
    attempts.back.get(timeout=PATIENCE_S)[0].close()


def test_another_incarnation_is_an_end(host: Host) -> None:
    assert "another process" in Attempts(host.door.addresses, incarnation=TOKEN - 1).why_gone()


def test_a_refusal_is_an_end(host: Host) -> None:
    host.refuses = True
    assert "not admitted" in Attempts(host.door.addresses).why_gone()
    assert "not admitted" in Attempts(host.door.addresses, resumes=False).why_gone()


def dial_that(*outcomes: Exception) -> Callable[[str, float], Transport]:
    """Dials that fail in these ways, and then in the last one."""
    left = list(outcomes)

    def dial(address: str, timeout_s: float, tls: object = None) -> Transport:
        raise left.pop(0) if len(left) > 1 else left[0]

    return dial


@pytest.mark.parametrize(
    ("is_near", "is_open", "step"),
    [(True, False, Step.VANISHED), (True, True, Step.REFUSED), (False, False, Step.REFUSED)],
)
def test_only_the_kernel_of_this_host_knows_that_nobody_listens_at_a_port(
    monkeypatch: pytest.MonkeyPatch, is_near: bool, is_open: bool, step: Step
) -> None:
    monkeypatch.setattr(dialling, "dial", dial_that(DialFailed("timeout"), DialRefused("refused")))
    monkeypatch.setattr(dialling, "port_is_open", lambda way: is_open)
    attempts = Attempts(["tcp://192.0.2.1:9"], lost_kind="tcp", is_near=is_near)
    attempts.why_gone()
    assert attempts.step is step


def test_who_was_dialled_believes_only_the_host_that_the_connection_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "dial", dial_that(DialRefused("nobody listens")))
    same = Attempts(["tcp://192.0.2.1:9"], resumes=False, lost_kind="tcp", lost_host="192.0.2.1")
    assert same.why_gone() == "nobody listens"
    other = Attempts(["tcp://192.0.2.1:9"], resumes=False, lost_kind="tcp", lost_host="192.0.2.2", seconds=1.0)
    other.why_gone()
    assert other.step is Step.OUT_OF_TIME


def test_nor_does_who_was_only_ever_dialled_and_dials_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """After both parted, either end dials: that the way from here is barred is no death."""
    monkeypatch.setattr(dialling, "dial", dial_that(DialRefused("a firewall")))
    options = {"lost_kind": "tcp", "was_reached": False}
    same = Attempts(["tcp://192.0.2.1:9"], lost_host="192.0.2.1", **options)  # type: ignore[arg-type]
    assert same.why_gone() == "a firewall"
    other = Attempts(["tcp://192.0.2.1:9"], lost_host="192.0.2.2", seconds=1.0, **options)  # type: ignore[arg-type]
    other.why_gone()
    assert other.step is Step.OUT_OF_TIME


def test_who_is_unreachable_is_tried_until_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "dial", dial_that(DialFailed("no answer")))
    began = monotonic()
    attempts = Attempts(["tcp://192.0.2.1:9"], seconds=1.0)
    assert "no answer" in attempts.why_gone()
    assert attempts.step is Step.OUT_OF_TIME
    assert monotonic() - began >= 1.0


def test_a_dial_that_may_have_been_let_in_is_not_withdrawn_before_it_was_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end may use a connection whose proof it has, although its answer did not come here in time."""
    left: list[Exception] = [DialFailed("no answer"), refuse(RefusalReason.CROSSED, "it dials, too")]
    again, go_on = threading.Event(), threading.Event()
    dial = dialling.dial

    def dial_slowly(*args: Any) -> Transport:
        if len(left) == 1:
            again.set()
            go_on.wait(PATIENCE_S)
        return dial(*args)

    def prove(*args: Any) -> Any:
        args[-1]()  # it has greeted us, and gets our proof
        raise left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(dialling, "dial", dial_slowly)
    monkeypatch.setattr(dialling, "prove", prove)
    dialler = Attempts(host.door.addresses).dialler
    assert again.wait(PATIENCE_S)
    assert not dialler.withdraw(even_if_proving=False)
    go_on.set()
    wait_until(lambda: dialler.withdraw(even_if_proving=False), "the refusal")
    dialler.join(PATIENCE_S)


def test_a_dial_that_was_not_even_greeted_is_withdrawn_before_the_next_attempt(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who cannot get through would refuse the other end for ever, which can."""
    again, go_on = threading.Event(), threading.Event()
    dial = dialling.dial
    tried: list[object] = []

    def dial_slowly(*args: Any) -> Transport:
        tried.append(args)
        if len(tried) > 1:
            again.set()
            go_on.wait(PATIENCE_S)
        return dial(*args)

    def prove(*args: Any) -> Any:
        raise DialFailed("it does not answer while awaiting greeting")

    monkeypatch.setattr(dialling, "dial", dial_slowly)
    monkeypatch.setattr(dialling, "prove", prove)
    dialler = Attempts(host.door.addresses).dialler
    assert again.wait(PATIENCE_S)
    assert dialler.withdraw(even_if_proving=False)
    go_on.set()
    dialler.join(PATIENCE_S)


def test_a_host_that_vanishes_before_it_answers_is_waited_for_no_longer_if_the_connection_is_encrypted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An attempt may take ten minutes: a member may be busy."""
    monkeypatch.setattr(MemoryTransport, "silent_s", lambda self: dialling.HOST_SILENT_S + 1)
    deadline = monotonic() + PATIENCE_S
    with pytest.raises(DialFailed, match="does not answer"):
        dialling.prove(Tls(None).dialled(memory_pair()[0], "host"), "host", ME, SECRET.values[0], deadline)
    assert monotonic() < deadline


def test_a_member_that_was_connected_is_dialled_on_though_its_certificate_names_another_host(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be about to get a better one."""
    wrongs = ["its certificate names another", ""]
    monkeypatch.setattr(MemoryTransport, "wrong_host", property(lambda self: wrongs.pop(0) if wrongs[1:] else ""))
    Attempts(host.door.addresses).back.get(timeout=PATIENCE_S)[0].close()
    assert wrongs == [""]


def test_the_target_is_told_to_have_our_proof_once_it_has_greeted_us(host: Host) -> None:
    attempts = Attempts(host.door.addresses)
    attempts.back.get(timeout=PATIENCE_S)[0].close()
    assert attempts.dialler._has_proof


def test_a_host_is_silent_until_it_accepts_a_connection_whatever_becomes_of_that(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own trouble (no descriptor, no name server) says nothing of it either."""
    monkeypatch.setattr(dialling, "dial", dial_that(DialUnanswered("no answer")))
    silent = Attempts(["tcp://192.0.2.1:9"], lost_kind="tcp", seconds=1.0)
    silent.why_gone()
    assert silent.dialler.unanswered_since is not None
    assert not silent.dialler.host_answered
    monkeypatch.setattr(dialling, "dial", dial_that(DialFailed("cannot resolve")))
    ours = Attempts(["tcp://192.0.2.1:9"], lost_kind="tcp", seconds=1.0)
    ours.why_gone()
    assert ours.dialler.unanswered_since is None
    monkeypatch.undo()
    host.refuses = True
    busy = Attempts(host.door.addresses)
    busy.why_gone()
    assert busy.dialler.host_answered


def test_a_stop_ends_a_pause_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: Queue[Any] = Queue()

    def dial(address: str, timeout_s: float, tls: object = None) -> Transport:
        tried.put(address)
        raise DialFailed("no answer")

    monkeypatch.setattr(dialling, "dial", dial)
    attempts = Attempts(["tcp://192.0.2.1:9"])
    tried.get(timeout=PATIENCE_S)
    attempts.dialler.stop()
    attempts.dialler.join(PATIENCE_S)
    assert not attempts.dialler._thread.is_alive()
    assert attempts.gone.empty()
