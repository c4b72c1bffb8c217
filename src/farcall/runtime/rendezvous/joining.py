"""How a node becomes a member of a group without a fixed size: it asks one that is, or founds the group.

Runs on the thread that starts the node. Owns the search for a member that answers; what the list in the store means is
told in `contacts.py`, who is let in is settled by the members (`protocol/membership/joining.py`).

    what is found at a contact's addresses             then
    a member                                           asked to let us in; if it goes away meanwhile, another one
    a newcomer like us                                 the first on the list founds, the others wait for it
    nobody, or another process                         gone
    no answer                                          looked for again
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple, Protocol

from farcall.errors import BadRank, DuplicateName, HandshakeRefused, InitError, MissingPeers, RpcError
from farcall.options import RpcBackendOptions
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello, Listen, RefusalReason, Refused
from farcall.protocol.member import Member
from farcall.runtime.io.bounded_call import in_bounded_time
from farcall.runtime.io.sigint import Gate
from farcall.runtime.link.listener import prove
from farcall.runtime.link.mesh import usable_ways
from farcall.runtime.rendezvous.contacts import Contacts, Group, cluster_of
from farcall.runtime.rendezvous.store import KeyStore, MeetingPlace, StoreLost, open_store
from farcall.transport.address import dial
from farcall.transport.interface import DialRefused, Transport, TransportError

logger: logging.Logger = logging.getLogger("farcall")

__all__ = ["Candidate", "Joining", "found_group"]

CONNECT_S = 1.0
PROVE_S = 3.0
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25
_GONE = (RefusalReason.WRONG_PEER, RefusalReason.OTHER_CLUSTER, RefusalReason.NOT_FARCALL)


class Found(NamedTuple):
    """Where a newcomer is to ask."""

    contacts: Contacts | None
    """The list in the store; None where there is no store."""
    store: KeyStore | None
    cluster_id: str
    secret: bytes


class Candidate(Protocol):
    """The node that wants in."""

    def ask(self, transport: Transport, established: Established, deadline: float) -> bool:
        """Ask who was proven at the other end; False: it went away. Raises where we are refused."""

    def found(self) -> None:
        """There is nobody: be the first member."""


def found_group(place: MeetingPlace, me: Member, options: RpcBackendOptions, deadline: float) -> Found:
    """Find out where to ask; with a store, ``me`` is on its list afterwards."""
    given = options.secret_bytes
    if place.contacts:
        if given is None:
            raise InitError(
                f"who joins through {place.url} needs the group's secret: give every process the same one "
                "(option `secret` or FARCALL_SECRET)"
            )
        return Found(None, None, cluster_of(given), given)

    def enter(cancelled: threading.Event) -> tuple[KeyStore, Contacts, Group]:
        while True:
            try:
                store = open_store(place, deadline, cancelled)
                contacts = Contacts(store, place.attempt, given)
                return store, contacts, contacts.enter(me)
            except (StoreLost, RuntimeError) as error:
                if isinstance(error, RpcError) or monotonic() + _LONGEST_PAUSE_S >= deadline:
                    raise
                cancelled.wait(_LONGEST_PAUSE_S)  # its host went away; perhaps it starts anew

    store, contacts, group = in_bounded_time(enter, deadline - monotonic(), place.name)
    return Found(contacts, store, group.cluster_id, given if given is not None else bytes.fromhex(group.secret))


class Joining:
    """One node's way in."""

    def __init__(
        self,
        place: MeetingPlace,
        me: Member,
        options: RpcBackendOptions,
        contacts: Contacts | None,
        secret: bytes,
        hello: Hello,
        candidate: Candidate,
    ) -> None:
        self._place = place
        self._me = me
        self._options = options
        self._contacts = contacts
        self._secret = secret
        self._hello = hello
        self._candidate = candidate
        self._group: Group | None = None
        self._why: dict[str, str] = {}
        self._gone: set[int] = set()

    def run(self, deadline: float) -> None:
        """Return when this node is a member; raises ``InitError``."""
        pause_s = _FIRST_PAUSE_S
        while not self._try(deadline):
            if monotonic() + pause_s >= deadline:
                raise self._missing()
            Gate().wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
        if self._contacts is not None and self._gone:
            self._strike_off(self._contacts, deadline)

    def _try(self, deadline: float) -> bool:
        """Look at everybody once."""
        contacts = self._contacts
        if contacts is None:
            return any(self._look("", [way], deadline) is True for way in self._place.contacts)
        group, is_current = self._read_list(contacts, deadline)
        before_me = True
        may_found = False
        others = []
        for contact in group.contacts:
            if contact.incarnation == self._me.incarnation:
                before_me, may_found = False, is_current
            else:
                others.append((before_me, contact))
        random.shuffle(others)  # so that many newcomers do not ask the same one
        for is_before, contact in others:
            if contact.incarnation in self._gone:
                continue
            ways = usable_ways(contact.addresses, contact.host_token, self._options.allowed_transports)
            outcome = self._look(contact.name, ways, deadline, contact.incarnation)
            if outcome is True:
                return True
            if outcome is None:
                self._gone.add(contact.incarnation)
            elif is_before or contact.name in self._why:
                may_found = False
        if is_current and not may_found and self._gone.issuperset(contact.incarnation for _, contact in others):
            # The list was full of the dead.
            self._strike_off(contacts, deadline)
            return False
        if may_found:
            self._candidate.found()
        return may_found

    def _read_list(self, contacts: Contacts, deadline: float) -> tuple[Group, bool]:
        """The list, and whether it is what the store says now: where that is gone, those read last may let us in."""
        try:
            self._group = in_bounded_time(lambda _: contacts.enter(self._me), deadline - monotonic(), self._place.name)
        except RuntimeError as error:  # what torch's stores raise
            if isinstance(error, RpcError):
                raise
            self._why[self._place.name] = f"the store is gone: {error}"
            if self._group is None:
                raise self._missing() from error
            return self._group, False
        return self._group, True

    def _strike_off(self, contacts: Contacts, deadline: float) -> None:
        """Take those who are gone off the list, if that can be done."""
        try:
            in_bounded_time(lambda _: contacts.replace(self._me, self._gone), deadline - monotonic(), self._place.name)
        except Exception as error:
            logger.info("%s: the list of contacts stays as it was: %s", self._me.name, error)

    def _look(self, name: str, ways: Sequence[str], deadline: float, incarnation: int = 0) -> bool | None:
        """Ask the one at these addresses, if it is a member. True: we are in. None: nobody is there. False: not yet."""
        refused = bool(ways)
        self._why.pop(name, None)
        for way in ways:
            try:
                transport = dial(way, max(0.05, min(CONNECT_S, deadline - monotonic())))
            except DialRefused:
                continue
            except TransportError as error:
                refused = False
                self._why[name] = str(error)
                continue
            handed_over = False
            try:
                until = min(deadline, monotonic() + PROVE_S)
                established = prove(transport, name or None, self._hello, self._secret, until)
                if incarnation and established.peer.member.incarnation != incarnation:
                    return None
                if established.peer.purpose != Listen(admits=True):
                    return False
                handed_over = True
                return self._candidate.ask(transport, established, deadline)
            except HandshakeRefused as error:
                if isinstance(error, Refused) and error.reason in _GONE:
                    self._why[name or way] = str(error)
                    return None
                raise InitError(f"{self._me.name} was not let in by {name or way}: {error}") from error
            except TransportError as error:
                refused = False
                self._why[name] = str(error)
            finally:
                if not handed_over:
                    transport.close()
        return None if refused else False

    def _missing(self) -> MissingPeers:
        known = "; ".join(f"{name or self._place.url}: {why}" for name, why in self._why.items())
        return MissingPeers(
            f"{self._me.name} (rank {self._me.rank}) found no member that let it in, at {self._place.name}"
            + (f": {known}" if known else ""),
            list(self._why),
        )


def refusal(name: str, why: str) -> InitError:
    """The error for one that was not let in."""
    kind = DuplicateName if why.startswith("the name") else BadRank if why.startswith("rank") else InitError
    return kind(f"{name} was not let in: {why}")


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for ``condition``, looking often; False after ``timeout_s``."""
    deadline = monotonic() + timeout_s
    pause_s = 0.001
    gate = Gate()
    while not condition():
        if monotonic() >= deadline:
            return False
        gate.wait(pause_s)
        pause_s = min(0.02, 1.5 * pause_s)
    return True
