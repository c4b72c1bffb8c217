"""Attempts to connect: carries out a `Dial` (`protocol/connector.py`), on a thread of its own or on its caller's.

Owns sockets that are not connected or not proven yet. Turns the results of transports and handshakes into an `Outcome`;
the machine decides what follows.

    the first of a member's addresses that answers is taken; else, of all of them,
    nobody listens within the host    NOBODY, where the lost connection was of that kind, too: a unix name may be of
                                      another network namespace; for TCP, the kernel's list of ports says so
    a host refuses a TCP port         REFUSED, where we were connected to that member through a dial of ours, or never,
                                      or where it is the host that the lost connection came from: a member that was
                                      only dialled has never tried the other's address, which may lead elsewhere from
                                      here
    no address accepts the connection, and a host leaves one unanswered    UNANSWERED
    anything else                     SILENT: a kernel accepts connections for a process that is busy or stopped

Over 400 lines: one attempt, from the address to the proof.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Final

import msgspec

from farcall.errors import HandshakeRefused
from farcall.protocol.connector import LONGEST_ATTEMPT_S, Attempt, Dial, Due, Ended, Goal, Outcome, Step, Tried
from farcall.protocol.handshake import Established, Handshake
from farcall.protocol.hello import NONCE_BYTES, Hello, Observe, RefusalReason, Refused, Side, refuse
from farcall.protocol.member import Member
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.secret import Secret
from farcall.transport.address import dial
from farcall.transport.interface import (
    DialFailed,
    DialRefused,
    DialUnanswered,
    NotEncrypted,
    TlsFailed,
    Transport,
    TransportError,
)
from farcall.transport.tcp import leads_to, port_is_open
from farcall.transport.tls import Tls

logger: logging.Logger = logging.getLogger("farcall")

BOUNDS_S = {Goal.START: (NEVER, LONGEST_ATTEMPT_S), Goal.JOIN: (1.0, 3.0)}
"""How long one address may take to connect, and to prove itself. A starting member has nothing better to do; and where
a thousand start on two cores, an attempt given up after 10 s was work in vain for both ends, again and again."""
DEFAULT_BOUNDS_S = (1.0, LONGEST_ATTEMPT_S)
FIRST_WAYS_S = 30.0
"""The longest that an address may take to prove itself, while there is another one to try."""
KNOCK_S = 0.01
HOST_LOOK_S = 1.0
HOST_SILENT_S = 3.0
"""How often to check a member's host while the member has not answered, and how long the host may be silent."""
WITHIN_THE_HOST: Final = ("unix", "memory")
_OUTCOMES = {
    RefusalReason.WRONG_PEER: Outcome.ELSEWHERE,
    RefusalReason.OTHER_CLUSTER: Outcome.ELSEWHERE,
    RefusalReason.WRONG_ADDRESS: Outcome.ELSEWHERE,
    RefusalReason.NOT_FARCALL: Outcome.FOREIGN,
    RefusalReason.CROSSED: Outcome.CROSSED,
}


def usable_ways(member: Member, allowed: Sequence[str], my_host: str) -> list[str]:
    """The addresses of ``member`` that may work from here over ``allowed`` transports, the best first.

    ``my_host``: this node's own ``host_token``, as at its start. To find it out takes a segment and two files.
    """
    same_host = is_near(member, my_host)
    ways = [address for address in member.addresses if address.partition(":")[0] != "unix" or same_host]
    ways.sort(key=lambda address: not address.startswith("unix:"))
    return [way for way in ways if way.partition(":")[0] in (*allowed, "memory")]


def is_near(member: Member, my_host: str) -> bool:
    """Does this node's kernel know all that listens in the member's network, too?"""
    return bool(member.host_token) and member.host_token == my_host


class Target(msgspec.Struct, frozen=True):
    """The member to reach. Without a name or incarnation, any member of the cluster will do."""

    name: str | None
    incarnation: int
    ways: Sequence[str]
    lost_kind: str = ""
    """The transport kind of the connection that broke."""
    lost_host: str = ""
    is_near: bool = False
    """Is it on this host, in the same network namespace?"""
    was_reached: bool = True
    """Was the lost connection, or an earlier one, dialled from here? Only then do the ways surely lead to it."""

    @classmethod
    def of(cls, member: Member, allowed: Sequence[str], my_host: str) -> Target:
        """A member that was never connected: a unix name without a listener counts only if it has no other address."""
        ways = usable_ways(member, allowed, my_host)
        only_unix = all(way.startswith("unix:") for way in ways)
        return cls(member.name, member.incarnation, ways, "unix" if only_unix else "", is_near=is_near(member, my_host))


class Found(msgspec.Struct):
    """The result of one attempt, with the connection if it made one."""

    outcome: Outcome
    why: str = ""
    transport: Transport | None = None
    established: Established | None = None
    error: HandshakeRefused | None = None

    def close(self) -> None:
        """Close the connection, if any: nobody wants it."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None


class Dialler:
    """One dial under way. Mutable: whether anybody still waits for it, and the connection being proven."""

    def __init__(
        self,
        dial: Dial,
        target: Target,
        me: Hello,
        secret: Secret,
        *,
        on_end: Callable[[Dialler, Ended, Found], None] = lambda dialler, ended, found: None,
        tls: Tls | None = None,
        is_member: Callable[[], bool] = lambda: False,
    ) -> None:
        """``me`` states the purpose. ``on_end`` is called once, on this object's thread, even after `stop`."""
        self._dial = dial
        self._target = target
        self._me = me
        self._secret = secret
        self._tls = tls
        self._on_end = on_end
        self._is_member = is_member
        self._ended = False
        self.unanswered_since: float | None = None
        """Since when the target's host has left every attempt unanswered."""
        self.host_answered: bool = False
        """Has the target's host accepted a connection, whatever became of it?"""
        self.why: str = ""
        """What became of the latest attempt."""
        self._gate = Gate()
        self._transport: Transport | None = None
        # Until it refuses us, the target may have let us in, even if we did not get its answer.
        self._proving = False
        self._has_proof = False  # the target may have our proof; an attempt that ended earlier cannot have let us in
        self._lock = threading.Lock()  # between this thread, which begins to prove itself, and `withdraw`
        self._told: set[str] = set()
        name = f"farcall-dial-{me.member.name}-{target.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Dial on this object's own thread."""
        self._thread.start()

    def hasten(self) -> None:
        """Try again now. From any thread."""
        self._gate.open()

    def stop(self) -> None:
        """Nobody waits for the result any more. From any thread; never blocks."""
        self._ended = True
        self._gate.open()
        transport = self._transport
        if transport is not None:
            transport.interrupt()

    def withdraw(self, *, even_if_proving: bool) -> bool:
        """Try no more. False: the target may have let us in, so the caller must await the outcome. From any thread.

        ``even_if_proving``: the target will not let us in. The attempt still awaits its answer: to hang up would make
        the target log a failed handshake.
        """
        with self._lock:
            if self._proving and not even_if_proving:
                return False
            self._ended = True
        self._gate.open()
        return True

    def join(self, timeout_s: float) -> None:
        """After ``stop``: wait for the thread's end."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        self._on_end(self, *self.run())

    def may_lead_to(self, incarnation: int) -> bool:
        """May this dial reach that member, as far as is known?"""
        return self._target.incarnation in (0, incarnation)

    def is_wanted(self) -> bool:
        """Does anybody still wait for the result?"""
        return not self._ended

    def run(self) -> tuple[Ended, Found]:
        """Dial until the machine has an answer, on the calling thread."""
        found = Found(Outcome.SILENT)
        while self.is_wanted():
            pause_s = (self._dial.next_deadline() or 0.0) - monotonic()
            if pause_s > 0:
                self._gate.wait(pause_s)
                if not self.is_wanted():
                    break
            (effect,) = self._dial.handle(Due(self._is_member()), monotonic())
            if isinstance(effect, Attempt):
                began_at = monotonic()
                found = self._knock() if effect.knocks else self._attempt(self._dial.goal, effect.bound_s)
                if found.outcome is Outcome.UNANSWERED and self.unanswered_since is None:
                    self.unanswered_since = began_at
                self.why = found.why
                effects = self._dial.handle(Tried(found.outcome, found.why), monotonic())
                if not effects:
                    found.close()
                    continue
                (effect,) = effects
            assert isinstance(effect, Ended)
            return effect, found
        return Ended(Step.OUT_OF_TIME, "nobody waits for it any more"), found

    def _knock(self) -> Found:
        """Check whether anybody still listens at the other end of the lost connection, within this host."""
        target = self._target
        for way in target.ways:
            if way.partition(":")[0] == target.lost_kind:
                try:
                    dial(way, KNOCK_S).close()
                except DialRefused:
                    return Found(Outcome.NOBODY, f"nobody listens at {way} any more")
                except TransportError:
                    pass  # a full backlog: somebody listens
        return Found(Outcome.LISTENS)

    def _attempt(self, goal: Goal, bound_s: float) -> Found:
        """Try every address once; the caller owns the connection in the result."""
        try:
            return self._try_ways(goal, monotonic() + bound_s)
        except Exception:
            logger.exception("dialling %s failed; please report this", self._target.name)
            return Found(Outcome.SILENT, "an error of farcall's")

    def _try_ways(self, goal: Goal, deadline: float) -> Found:
        target = self._target
        connect_s, prove_s = BOUNDS_S.get(goal, DEFAULT_BOUNDS_S)
        failure: TransportError | None = None
        refused: DialRefused | None = None
        accepted = unanswered = False
        for way in target.ways:
            kind = way.partition(":")[0]
            try:
                transport = dial(way, max(0.05, min(connect_s, deadline - monotonic())), self._tls)
            except DialRefused as error:
                if kind in WITHIN_THE_HOST:
                    if kind == target.lost_kind:
                        return Found(Outcome.NOBODY, f"nobody listens at {way} any more")
                elif target.is_near and not port_is_open(way):
                    return Found(Outcome.NOBODY, f"nobody listens at {way} any more")
                elif (goal is not Goal.REMIND and target.was_reached) or leads_to(way, target.lost_host):
                    refused = error
                else:
                    failure = error
                self._tell(way, error)
                continue
            except TransportError as error:
                failure = error
                unanswered = unanswered or (isinstance(error, DialUnanswered) and kind not in WITHIN_THE_HOST)
                self._tell(way, error)
                continue
            accepted = True
            self.unanswered_since, self.host_answered = None, True
            self._transport = transport
            found: Found | None = None
            try:
                with self._lock:
                    if self._ended:
                        return Found(Outcome.SILENT)
                    self._proving = True
                # Without a name, we know only an address, and that as the user wrote it: the target could not check it.
                me = self._me if target.name is None else self._me.dialling(way)
                patience_s = prove_s if way == target.ways[-1] else min(prove_s, FIRST_WAYS_S)
                until = min(deadline, monotonic() + patience_s)
                established = prove(transport, target.name, me, self._secret.values[0], until, self._before_proof)
                if target.incarnation and established.peer.member.incarnation != target.incarnation:
                    return Found(Outcome.ANOTHER, "another process has its address and name")
                found = Found(Outcome.PROVEN, "it lives, but did not come back", transport, established)
                return found
            except HandshakeRefused as error:
                self._proving = self._has_proof = False
                reason = error.reason if isinstance(error, Refused) else None
                outcome = Outcome.REJECTED if reason is None else _OUTCOMES.get(reason, Outcome.REJECTED)
                if reason is RefusalReason.OTHER_HOST and goal not in (Goal.START, Goal.JOIN):
                    outcome = Outcome.SILENT  # as below
                if outcome is Outcome.ELSEWHERE and (target.is_near or kind in WITHIN_THE_HOST):
                    outcome = Outcome.ANOTHER
                return Found(outcome, "" if outcome is Outcome.CROSSED else str(error), error=error)
            except TransportError as error:
                failure = error
                self._proving = self._has_proof
                if isinstance(error, TlsFailed) and goal in (Goal.START, Goal.JOIN):
                    # A wrong certificate will be wrong in a moment, too. A member that was connected may renew its own.
                    return Found(Outcome.REJECTED, str(error), error=HandshakeRefused(str(error)))
            finally:
                self._transport = None
                if found is None:
                    transport.close()
        if failure is None and refused is not None:
            return Found(Outcome.REFUSED, str(refused))
        if unanswered and not accepted:
            return Found(Outcome.UNANSWERED, str(failure))
        return Found(Outcome.SILENT, str(failure or "no address could be tried"))

    def _before_proof(self) -> None:
        self._has_proof = True

    def _tell(self, way: str, error: TransportError) -> None:
        if way not in self._told:
            self._told.add(way)
            logger.info("%s cannot be reached over %s: %s", self._target.name or "the member", way, error)


def check_name(transport: Transport, peer: Hello) -> None:
    """Raise ``HandshakeRefused`` if the certificate of a proven peer does not allow its name."""
    names = transport.peer_names
    if names is not None and peer.member.name not in names and not isinstance(peer.purpose, Observe):
        raise refuse(
            RefusalReason.NOT_ADMITTED,
            f"{peer.member.name!r} is not among the names in its certificate, {', '.join(sorted(names)) or 'none'} "
            "(TlsOptions(bind_names=True))",
        )


def prove(
    transport: Transport,
    name: str | None,
    me: Hello,
    secret: bytes,
    deadline: float,
    before_proof: Callable[[], None] = lambda: None,
) -> Established:
    """Run the dialler's side of the handshake; returns who the peer is.

    Without a ``name``, any member of the cluster will do. ``before_proof`` is called when the peer has greeted us.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    binding = partial(getattr, transport, "binding")
    handshake = Handshake(Side.DIALER, me, secret, nonce, expected_peer=name, binding=binding)
    try:
        return _prove(transport, name or "the peer", handshake, deadline, before_proof)
    except NotEncrypted as error:
        raise handshake.unencrypted(error.first_bytes) from None


def _prove(
    transport: Transport, name: str, handshake: Handshake, deadline: float, before_proof: Callable[[], None]
) -> Established:
    outgoing = handshake.start()
    buffer = bytearray(64 * 1024)
    while True:
        while outgoing:
            if not _wait(transport.wait_writable, transport, deadline):
                raise DialFailed(f"{name} does not answer while {handshake.state.value}")
            if transport.wrong_host:
                refusal = refuse(RefusalReason.OTHER_HOST, f"{name}: {transport.wrong_host}")
                transport.send((refusal.farewell,))
                raise refusal
            outgoing = outgoing[transport.send((outgoing,)) :]
        if not _wait(transport.wait_readable, transport, deadline):
            raise DialFailed(f"{name} does not answer while {handshake.state.value}")
        count = transport.receive_into(memoryview(buffer))
        if count is None:
            continue
        if count == 0:
            raise DialFailed(f"{name} closed the connection while {handshake.state.value}")
        outgoing, established = handshake.receive(memoryview(buffer)[:count])
        if outgoing:
            before_proof()
        if established is not None:
            check_name(transport, established.peer)
            return established


def _wait(wait_ready: Callable[[float], bool], transport: Transport, deadline: float) -> bool:
    """Wait for a member, which may be busy, unless its host vanishes meanwhile."""
    while not wait_ready(min(HOST_LOOK_S, max(0.0, deadline - monotonic()))):
        if monotonic() >= deadline or transport.silent_s() > HOST_SILENT_S:
            return False
    return True
