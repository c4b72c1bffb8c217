"""Getting through to a member whose connection broke: one thread per broken link, until it is back or known to be gone.

The member that dialled at first dials again and resumes the session. The other one asks (``asking``): it learns
whether the member still lives, and reminds it to dial, in case that side has not noticed the break yet.

What is found               means
nobody listens, same host   the process is gone: at once. Only where the broken connection was of that kind, too: a
                            unix name may be of another network namespace
nobody listens, TCP         gone if it is so again REFUSED_PAUSE_S later: its host answers, and says so. It must be the
                            host that we dialled, or the one that the broken connection came from: whoever was
                            dialled has never tried the other's address, which may lead elsewhere from here
refused, another process    gone, or it has given us up: at once
no answer, unreachable      nothing: tried again, with growing, jittered pauses, until ``until`` (and longer, as long as
                            ``is_trusted``: others hear from it)

Of these, the first two and another process at its address mean that the process has *vanished* (`Finding`).

Knows the handshake and addresses; what becomes of a connection, or of a verdict, is its caller's.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from time import monotonic

from farcall.errors import HandshakeRefused
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello, RefusalReason, Refused
from farcall.runtime.io.sigint import Gate
from farcall.runtime.link.listener import prove
from farcall.transport.address import dial
from farcall.transport.interface import DialRefused, Transport, TransportError
from farcall.transport.tcp import leads_to

logger: logging.Logger = logging.getLogger("farcall")

CONNECT_S = 1.0
PROVE_S = 5.0
REFUSED_PAUSE_S = 0.05
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
WITHIN_THE_HOST = ("unix", "memory")


class Finding(Enum):
    """Why there will be no connection."""

    VANISHED = "its process is not there any more"
    REFUSED = "it lives, and has given us up"
    OUT_OF_TIME = "it could not be reached in time"


class _OutOfTime(Exception):
    """``until`` has come."""


class _Vanished(Exception):
    """Its process is not there any more."""


class Redial:
    """The attempts to get through to one member."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        ways: Sequence[str],
        lost: Transport,
        me: Hello,
        secret: bytes,
        resumes: bool,
        until: float,
        pause_s: float,
        on_back: Callable[[Redial, Transport, Established], None],
        on_gone: Callable[[Redial, str, Finding], None],
        is_trusted: Callable[[], bool] = lambda: False,
    ) -> None:
        """``me`` says what is wanted; ``lost`` is the connection that broke.

        ``on_back`` gets the new one, if it ``resumes``.

        The hooks are called on this object's thread, and at most one of them.
        """
        self._name = name
        self._incarnation = incarnation
        self._ways = ways
        self._lost_kind = lost.kind
        self._lost_host = lost.peer_host
        self._me = me
        self._secret = secret
        self._resumes = resumes
        self._until = until
        self.pause_s: float = pause_s
        self._on_back = on_back
        self._on_gone = on_gone
        self._is_trusted = is_trusted
        self._ended = False
        self._gate = Gate()
        self._transport: Transport | None = None
        self._thread = threading.Thread(target=self._run, name=f"farcall-redial-{me.member.name}-{name}", daemon=True)

    def start(self) -> None:
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
        refusals = 0
        why = "it breaks again and again"
        while not self._ended:
            remaining_s = self._remaining_s()
            if self.pause_s:
                self._gate.wait(max(0.0, min(self.pause_s * random.uniform(0.5, 1.0), remaining_s)))
            self.pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s or FIRST_PAUSE_S)
            if self._was_ended():
                return
            try:
                if monotonic() >= self._until and not self._is_trusted():
                    raise _OutOfTime(f"it could not be reached again in time: {why}")
                found = self._attempt()
                if found is not None:
                    self._on_back(self, *found)
                    return
                refusals, why = 0, "it lives, but did not come back"
            except DialRefused as error:
                refusals += 1
                why = str(error)
                if refusals > 1:
                    self._gone(why, Finding.VANISHED)
                    return
                self.pause_s = REFUSED_PAUSE_S
            except (_Vanished, _OutOfTime, HandshakeRefused) as error:
                self._gone(str(error), _finding_of(error))
                return
            except TransportError as error:
                refusals, why = 0, str(error)
            except Exception:
                logger.exception("dialling %s again failed; please report this", self._name)
                refusals, why = 0, "an error of farcall's"

    def _remaining_s(self) -> float:
        """Until the end; past it, as long as it is trusted, one attempt's time."""
        remaining_s = self._until - monotonic()
        return remaining_s if remaining_s > 0 else CONNECT_S

    def _was_ended(self) -> bool:
        return self._ended

    def _gone(self, why: str, finding: Finding) -> None:
        if not self._ended:
            self._on_gone(self, why, finding)

    def _attempt(self) -> tuple[Transport, Established] | None:
        """Try every way once. None: the member lives, and that was the question."""
        failure: TransportError | None = None
        refused: DialRefused | None = None
        for way in self._ways:
            kind = way.partition(":")[0]
            try:
                transport = dial(way, max(0.01, min(CONNECT_S, self._remaining_s())))
            except DialRefused as error:
                if kind in WITHIN_THE_HOST:
                    if kind == self._lost_kind:
                        raise _Vanished(
                            f"its process or its node has ended, nobody listens at {way} any more; its own output may "
                            "say why"
                        ) from error
                elif self._resumes or leads_to(way, self._lost_host):
                    refused = error
                else:
                    failure = error
                continue
            except TransportError as error:
                failure = error
                continue
            try:
                return self._meet(transport)
            except TransportError as error:
                failure = error
        if failure is None and refused is not None:
            raise refused
        raise TransportError(str(failure or "no address could be tried"))  # not a refusal, whatever it was

    def _meet(self, transport: Transport) -> tuple[Transport, Established] | None:
        self._transport = transport
        kept = False
        try:
            if self._ended:
                return None
            until = monotonic() + min(PROVE_S, self._remaining_s())
            established = prove(transport, self._name, self._me, self._secret, until)
            if established.peer.member.incarnation != self._incarnation:
                raise _Vanished("another process has its address and name")
            if not self._resumes:
                return None
            kept = True
            return transport, established
        finally:
            self._transport = None
            if not kept:
                transport.close()


def _finding_of(error: Exception) -> Finding:
    if isinstance(error, _OutOfTime):
        return Finding.OUT_OF_TIME
    is_another = isinstance(error, Refused) and error.reason in (RefusalReason.WRONG_PEER, RefusalReason.OTHER_CLUSTER)
    return Finding.VANISHED if is_another or isinstance(error, _Vanished) else Finding.REFUSED
