"""Attempts to connect: carries out a `Dial` (`protocol/connector.py`), on a thread of its own or on its caller's.

Owns sockets that are not connected or not proven yet. Turns what the transports and the handshake say into an
`Outcome`; what follows from it, the machine says.

    the first of a member's addresses that answers is taken; else, of all of them,
    nobody listens within the host    NOBODY, where the lost connection was of that kind, too: a unix name may be of
                                      another network namespace
    a host refuses a TCP port         REFUSED, where it is the host that we dialled, or that the lost connection came
                                      from: a member that was dialled has never tried the other's address, which may
                                      lead elsewhere from here
    no address accepts the connection, and a host leaves one unanswered    UNANSWERED
    anything else                     SILENT: a kernel accepts connections for a process that is busy or stopped
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from time import monotonic
from typing import Final

import msgspec

from farcall.channel.segments import host_token
from farcall.errors import HandshakeRefused
from farcall.options import RpcBackendOptions, TlsOptions
from farcall.protocol.connector import Attempt, Dial, Due, Ended, Goal, Outcome, Step, Tried
from farcall.protocol.handshake import Established, Handshake
from farcall.protocol.hello import (
    NONCE_BYTES,
    Hello,
    Observe,
    RefusalReason,
    Refused,
    Side,
    observer_key,
    refuse,
    tls_key,
)
from farcall.protocol.member import Member
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.secret import Secret
from farcall.transport.address import dial
from farcall.transport.interface import DialFailed, DialRefused, DialUnanswered, Transport, TransportError
from farcall.transport.poly1305 import AVAILABLE
from farcall.transport.sealed import SealedTransport
from farcall.transport.tcp import leads_to
from farcall.transport.tls import Tls, TlsFailed

logger: logging.Logger = logging.getLogger("farcall")

BOUNDS_S = {Goal.START: (NEVER, 10.0), Goal.JOIN: (1.0, 3.0)}
"""How long one address may take to connect, and to prove itself: a starting member has nothing better to do."""
DEFAULT_BOUNDS_S = (1.0, 30.0)
"""Members may be busy for long: a connection that waits to be accepted is as good as a new one."""
KNOCK_S = 0.01
HOST_LOOK_S = 1.0
HOST_SILENT_S = 3.0
"""How often, while a member proves nothing, its host is looked for, and how long that may be silent."""
WITHIN_THE_HOST: Final = ("unix", "memory")
_OUTCOMES = {
    RefusalReason.WRONG_PEER: Outcome.ANOTHER,
    RefusalReason.OTHER_CLUSTER: Outcome.ANOTHER,
    RefusalReason.WRONG_ADDRESS: Outcome.ANOTHER,
    RefusalReason.NOT_FARCALL: Outcome.FOREIGN,
}


def usable_ways(member: Member, allowed: Sequence[str]) -> list[str]:
    """The addresses of ``member`` that may work from here over ``allowed`` transports, the best first."""
    same_host = bool(member.host_token) and member.host_token == host_token()
    ways = [address for address in member.addresses if address.partition(":")[0] != "unix" or same_host]
    ways.sort(key=lambda address: not address.startswith("unix:"))
    return [way for way in ways if way.partition(":")[0] in (*allowed, "memory")]


class Target(msgspec.Struct, frozen=True):
    """The member to get through to. Without a name or incarnation, any member of the cluster will do."""

    name: str | None
    incarnation: int
    ways: Sequence[str]
    lost_kind: str = ""
    """The kind of the connection that broke."""
    lost_host: str = ""

    @classmethod
    def of(cls, member: Member, allowed: Sequence[str]) -> Target:
        """A member that there was no connection to: a unix name tells only where there is no other way."""
        ways = usable_ways(member, allowed)
        only_unix = all(way.startswith("unix:") for way in ways)
        return cls(member.name, member.incarnation, ways, "unix" if only_unix else "")


class Found(msgspec.Struct):
    """What one attempt came to, with the connection if there is one."""

    outcome: Outcome
    why: str = ""
    transport: Transport | None = None
    established: Established | None = None
    error: HandshakeRefused | None = None

    def close(self) -> None:
        """Nobody wants the connection."""
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
        """``me`` says what is wanted. ``on_end`` is called once, on this object's thread, also where it was stopped."""
        self._dial = dial
        self._target = target
        self._me = me
        self._secret = secret
        self._tls = tls
        self._on_end = on_end
        self._is_member = is_member
        self._ended = False
        self.unanswered_since: float | None = None
        """Since when its host has left every attempt unanswered."""
        self.host_answered: bool = False
        """Has its host accepted a connection, whatever became of that?"""
        self._gate = Gate()
        self._transport: Transport | None = None
        self._told: set[str] = set()
        name = f"farcall-dial-{me.member.name}-{target.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Dial on a thread."""
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

    def join(self, timeout_s: float) -> None:
        """After ``stop``: wait for the thread's end."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        self._on_end(self, *self.run())

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
                effects = self._dial.handle(Tried(found.outcome, found.why), monotonic())
                if not effects:
                    found.close()
                    continue
                (effect,) = effects
            assert isinstance(effect, Ended)
            return effect, found
        return Ended(Step.OUT_OF_TIME, "nobody waits for it any more"), found

    def _knock(self) -> Found:
        """Look whether anybody listens where the lost connection led, within this host."""
        target = self._target
        for way in target.ways:
            if way.partition(":")[0] == target.lost_kind:
                try:
                    dial(way, KNOCK_S).close()
                except DialRefused:
                    return Found(Outcome.NOBODY, _nobody(way))
                except TransportError:
                    pass  # its backlog is full: somebody listens
        return Found(Outcome.LISTENS)

    def _attempt(self, goal: Goal, bound_s: float) -> Found:
        """Try every address once; a connection that is found is the caller's."""
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
                        return Found(Outcome.NOBODY, _nobody(way))
                elif goal is not Goal.REMIND or leads_to(way, target.lost_host):
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
                if self._ended:
                    return Found(Outcome.SILENT)
                # Without a name, all that is known of the target is an address, by whatever name its user knows it.
                me = self._me if target.name is None else self._me.dialling(way)
                until = min(deadline, monotonic() + prove_s)
                way_in, established = prove(transport, target.name, me, self._secret.values[0], until)
                if target.incarnation and established.peer.member.incarnation != target.incarnation:
                    return Found(Outcome.ANOTHER, "another process has its address and name")
                found = Found(Outcome.PROVEN, "it lives, but did not come back", way_in, established)
                return found
            except HandshakeRefused as error:
                reason = error.reason if isinstance(error, Refused) else None
                outcome = Outcome.REJECTED if reason is None else _OUTCOMES.get(reason, Outcome.REJECTED)
                return Found(outcome, str(error), error=error)
            except TransportError as error:
                failure = error
                if isinstance(error, TlsFailed) and goal in (Goal.START, Goal.JOIN):
                    # Certificates that do not do now will not in a moment; one that was connected may have renewed its.
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

    def _tell(self, way: str, error: TransportError) -> None:
        if way not in self._told:
            self._told.add(way)
            logger.info("%s cannot be reached over %s: %s", self._target.name or "the member", way, error)


def _nobody(way: str) -> str:
    return f"its process or its node has ended, nobody listens at {way} any more; its own output may say why"


def tls_for(options: RpcBackendOptions, secret: Secret) -> Tls | None:
    """What connections of a member over a network are protected by, if its options say so."""
    return None if options.tls is None else _tls_for(options.tls, secret)


@lru_cache(maxsize=16)
def _tls_for(options: TlsOptions, secret: Secret) -> Tls:
    """The same object for all parts of a node: reading certificates takes a while."""
    return Tls(options, lambda: [tls_key(observer_key(value)) for value in secret.values])


def check_name(transport: Transport, peer: Hello) -> None:
    """Raise ``HandshakeRefused`` where a proven peer has a name that its certificate does not allow."""
    names = transport.peer_names
    if names is not None and peer.member.name not in names and not isinstance(peer.purpose, Observe):
        raise refuse(
            RefusalReason.NOT_ADMITTED,
            f"{peer.member.name!r} is not among the names in its certificate, {', '.join(sorted(names)) or 'none'} "
            "(TlsOptions(bind_names=True))",
        )


def sealed(transport: Transport, established: Established, side: Side) -> tuple[Transport, Established]:
    """What to speak over from now on: where others may write to the connection, everything is proved."""
    if not transport.needs_sealing:
        return transport, established
    sealing = SealedTransport(
        transport,
        send_key=established.frame_key(side),
        receive_key=established.frame_key(side.other),
        quick=established.quick_seals,
        first_bytes=established.leftover,
    )
    return sealing, established._replace(leftover=b"")


def prove(
    transport: Transport, name: str | None, me: Hello, secret: bytes, deadline: float
) -> tuple[Transport, Established]:
    """Run the dialler's side of the handshake; what to speak over from then on, and with whom.

    Without a ``name``, any member of the cluster will do.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    binding = partial(getattr, transport, "binding")
    handshake = Handshake(Side.DIALER, me, secret, nonce, expected_peer=name, binding=binding, quick_seals=AVAILABLE)
    name = name or "the peer"
    outgoing = handshake.start()
    buffer = bytearray(64 * 1024)
    while True:
        while outgoing:
            taken = transport.send((outgoing,))
            outgoing = outgoing[taken:]
            if not taken and not transport.wait_writable(max(0.0, deadline - monotonic())):
                raise DialFailed(f"{name} does not read while {handshake.state.value}")
        if not _wait_readable(transport, deadline):
            raise DialFailed(f"{name} does not answer while {handshake.state.value}")
        count = transport.receive_into(memoryview(buffer))
        if count is None:
            continue
        if count == 0:
            raise DialFailed(f"{name} closed the connection while {handshake.state.value}")
        outgoing, established = handshake.receive(memoryview(buffer)[:count])
        if established is not None:
            check_name(transport, established.peer)
            return sealed(transport, established, Side.DIALER)


def _wait_readable(transport: Transport, deadline: float) -> bool:
    """Wait for a member that may be busy; not for one whose host has vanished meanwhile."""
    while not transport.wait_readable(min(HOST_LOOK_S, max(0.0, deadline - monotonic()))):
        if monotonic() >= deadline or transport.silent_s() > HOST_SILENT_S:
            return False
    return True
