"""First connections, made in the background: to members that wait for us to dial, and to those that only need a word.

One `Redial` (and its thread) per incarnation, until it is connected, or nobody wants it any more. Who is found not to
be there is reported, and looked for again as long as it is a member. Runs on the I/O thread, but for what says
otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello
from farcall.protocol.member import Member
from farcall.protocol.membership.messages import Message
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.mesh import usable_ways
from farcall.runtime.link.redial import Finding, Redial
from farcall.transport.interface import Absent, Transport

__all__ = ["Dialling"]

MAX_WAITING_NEWS = 8
RETRY_S = 0.5
STOP_S = 1.5
"""How long `stop` waits for a thread that may be inside a connect."""


class _Dial:
    """A first connection on its way, and what to say over it."""

    __slots__ = ("news", "redial")

    def __init__(self) -> None:
        self.redial: Redial | None = None
        self.news: list[Message] = []


class Dialling:
    """All that one node is dialling for the first time."""

    def __init__(
        self,
        allowed: Sequence[str],
        secret: bytes,
        loop: Loop,
        hello: Callable[[], Hello],
        on_dialled: Callable[[Transport, Established, Sequence[Message]], None],
        on_vanished: Callable[[int], None],
        is_wanted: Callable[[int], bool],
    ) -> None:
        """``allowed`` transports; ``hello``: what to say first.

        ``on_dialled`` gets the connection, and what to say over it; ``on_vanished(incarnation)`` is told who is
        not there; ``is_wanted(incarnation)``: is that one to be looked for again?
        """
        self._allowed = allowed
        self._secret = secret
        self._loop = loop
        self._hello = hello
        self._on_dialled = on_dialled
        self._on_vanished = on_vanished
        self._is_wanted = is_wanted
        self._dials: dict[int, _Dial] = {}
        self._arriving: dict[Redial, Transport] = {}  # dialled, and not taken yet
        self._stopped = False
        self._lock = threading.Lock()  # between beginning, arriving and stopping

    def dial(self, member: Member, message: Message | None = None) -> None:
        """Connect to ``member``; ``message`` is to be said then, or is lost."""
        incarnation = member.incarnation
        dial = self._dials.get(incarnation)
        if dial is None:
            with self._lock:
                if self._stopped:
                    return
                dial = self._dials[incarnation] = _Dial()
                self._begin(dial, member, 0.0)
        if message is not None and len(dial.news) < MAX_WAITING_NEWS:
            dial.news.append(message)

    def is_dialling(self, incarnation: int) -> bool:
        """Is that one being connected to?"""
        return incarnation in self._dials

    def _begin(self, dial: _Dial, member: Member, pause_s: float) -> None:
        """Under the lock, so that `stop` finds whatever has begun."""
        ways = usable_ways(member.addresses, member.host_token, self._allowed)
        dial.redial = Redial(
            member.name,
            member.incarnation,
            ways,
            # A unix name may be of another network namespace: where there is another way, that one tells.
            Absent("absent" if any(not way.startswith("unix:") for way in ways) else "unix"),
            self._hello(),
            self._secret,
            True,
            NEVER,
            pause_s,
            lambda redial, transport, established: self._connected(dial, redial, transport, established),
            lambda redial, why, finding: self._loop.call_soon(lambda: self._failed(dial, redial, member, finding)),
        )
        dial.redial.start()

    def _connected(self, dial: _Dial, redial: Redial, transport: Transport, established: Established) -> None:
        """On the dial's thread."""
        with self._lock:
            if self._stopped:
                transport.close()
                return
            self._arriving[redial] = transport
        self._loop.call_soon(lambda: self._arrive(dial, redial, established))

    def _arrive(self, dial: _Dial, redial: Redial, established: Established) -> None:
        with self._lock:
            transport = self._arriving.pop(redial, None)
        if transport is None:
            return  # stopped meanwhile
        incarnation = established.peer.member.incarnation
        if self._dials.get(incarnation) is not dial:
            transport.close()
            return
        del self._dials[incarnation]
        self._on_dialled(transport, established, dial.news)

    def _failed(self, dial: _Dial, redial: Redial, member: Member, finding: Finding) -> None:
        incarnation = member.incarnation
        if self._dials.get(incarnation) is not dial or dial.redial is not redial:
            return
        if finding is Finding.VANISHED:
            self._on_vanished(incarnation)
        with self._lock:
            if self._dials.get(incarnation) is not dial:
                return  # that was the end of it
            if self._is_wanted(incarnation):
                self._begin(dial, member, RETRY_S)
            else:
                del self._dials[incarnation]

    def give_up(self, incarnation: int) -> None:
        """Nobody wants that one any more."""
        dial = self._dials.pop(incarnation, None)
        if dial is not None and dial.redial is not None:
            dial.redial.stop()

    def stop(self) -> None:
        """The node ends. From any thread but the I/O thread."""
        with self._lock:
            self._stopped = True
            dials, self._dials = list(self._dials.values()), {}
            for transport in self._arriving.values():
                transport.close()
            self._arriving.clear()
        redials = [dial.redial for dial in dials if dial.redial is not None]
        for redial in redials:
            redial.stop()
        until = monotonic() + STOP_S
        for redial in redials:
            redial.join(max(0.0, until - monotonic()))
