"""Joining an existing group: a node asks a member to let it in. In a group without a fixed size, it may found one.

Owns the search for a member that answers (`Search`) and this node's entry in the list of contacts
(`DynamicRendezvous`). A group of fixed size admits a node only in place of a dead member, and only while nobody has
left it. `contacts.py` explains the list in the store; the members decide about admission (`protocol/membership`). Runs
on the threads that start and end the node, unless a docstring says otherwise.

    at a contact's addresses answers                   then
    a member                                           ask it to let us in; if it goes away meanwhile, try again
    a newcomer like us                                 the first on the list founds, the others wait for it
    a newcomer that somebody may let in any moment     try it again: nobody founds meanwhile
    nobody, or another process                         the contact is gone
    nothing in time                                    try it again
    a member of a group of fixed size that is over     the contact is gone: the rest of its group will meet anew

Over 400 lines: one search, from the first contact to the admission.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from random import SystemRandom
from time import monotonic
from typing import NamedTuple, Protocol

from farcall.errors import BadRank, DuplicateName, InitError, MissingPeers, RpcError, WrongSecret
from farcall.options import RpcBackendOptions
from farcall.protocol.backoff import Backoff
from farcall.protocol.connector import Dial, Ended, Goal, Step
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello, Listen, RefusalReason, refuse
from farcall.protocol.member import Member
from farcall.protocol.membership.messages import JoinRefusal
from farcall.runtime.io.bounded_call import Unanswered, in_bounded_time
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.sigint import Gate
from farcall.runtime.link.dialler import Dialler, Found, Target
from farcall.runtime.link.listener import PeerListener
from farcall.runtime.peers.peer import RemotePeer
from farcall.runtime.peers.table import PeerTable
from farcall.runtime.rendezvous.agreement import Membership
from farcall.runtime.rendezvous.contacts import Contacts, Group, Upkeep
from farcall.runtime.rendezvous.meeting_place import MeetingPlace
from farcall.runtime.rendezvous.records import Proofs, Records, secret_of
from farcall.runtime.rendezvous.store import STORE_ERRORS, KeyStore, StoreLost, is_served, open_store
from farcall.secret import Secret
from farcall.transport.interface import Transport
from farcall.transport.tls import tls_for

logger: logging.Logger = logging.getLogger("farcall")

FIRST_CONNECTIONS_S = 5.0
"""How long a newcomer waits for its connections to the others. A bound suffices: calls wait for them in any case."""
STORE_S = 2.0
RENEWAL_S = 2.0
"""How long members may take to prove their list with a secret that came into its file just now."""
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25
_RANDOM = SystemRandom()  # never draw from the global generator, which programs seed for themselves


class Meeting(NamedTuple):
    """Where a newcomer looks for members, and its credentials."""

    place: MeetingPlace
    contacts: Contacts | None
    """The list in the store; None without a store."""
    store: KeyStore | None
    cluster_id: str
    """Empty if only an address is known: the first member that proves itself supplies it."""
    secret: Secret
    members: tuple[Member, ...] = ()
    """Members known from before: the newcomer asks only these, and founds no group."""
    size: int = 0
    """The size of a group of fixed size; else 0."""
    cancelled: threading.Event | None = None
    """Set when the node does not want to join any more."""


class GroupIsOver(InitError):
    """No member is left of the group ``cluster_id`` that may let this node in."""

    def __init__(self, text: str, cluster_id: str) -> None:
        super().__init__(text)
        self.cluster_id: str = cluster_id


def meet(place: MeetingPlace, me: Member, options: RpcBackendOptions, deadline: float) -> Meeting:
    """Find out where to ask; if there is a store, put ``me`` on its list."""
    secret = secret_of(options)
    proofs = Proofs(secret, options.has_secret, place.name)
    if place.contacts:
        return Meeting(place, None, None, "", secret, size=max(0, place.world_size))

    def enter(cancelled: threading.Event) -> tuple[KeyStore, Contacts, Group]:
        renewed = min(deadline, monotonic() + RENEWAL_S)
        while True:
            try:
                store = open_store(place, deadline, cancelled)
                contacts = Contacts(Records(store, proofs), place.attempt)
                return store, contacts, contacts.enter(me)
            except WrongSecret:
                if not secret.path or monotonic() >= renewed:
                    raise
            except (StoreLost, *STORE_ERRORS) as error:
                if isinstance(error, RpcError):
                    raise
                if monotonic() + _LONGEST_PAUSE_S >= deadline:
                    raise InitError(f"cannot use the store at {place.name}: {error}") from error
                # The server of the store ended; it may be restarting.
            cancelled.wait(_LONGEST_PAUSE_S)

    store, contacts, group = in_bounded_time(enter, deadline - monotonic(), place.name)
    return Meeting(place, contacts, store, group.cluster_id, secret)


SPONSOR_S = 5.0
"""How long to wait for one sponsor: if it is busy, another member can let this node in."""


class Candidate(Protocol):
    """The node that wants to join, as a `Search` drives it."""

    def ask_if_connected(self, incarnation: int, deadline: float) -> bool | None:
        """If the member ``incarnation`` has dialled us, ask it, as `ask` does; else None."""

    def dial(self, dialler: Dialler) -> tuple[Ended, Found]:
        """Run ``dialler``; the member may dial us at the same time. A connection goes to `ask` or to `drop`."""

    def drop(self, found: Found) -> None:
        """Close the connection that `dial` has made: this node does not ask over it."""

    def ask(self, dialler: Dialler, transport: Transport, established: Established, deadline: float) -> bool:
        """Ask the member that ``dialler`` has found; False: it went away. Raises if it refuses us."""

    def found(self, deadline: float) -> None:
        """No member exists: become the first one, unless this node has been let in meanwhile."""


class Search:
    """The search of one newcomer for a member that lets it in.

    Mutable: the list as last read, the incarnations found to be gone, and by name why others did not answer.
    """

    def __init__(self, meeting: Meeting, me: Member, options: RpcBackendOptions, candidate: Candidate) -> None:
        self._meeting = meeting
        self._me = me
        self._allowed = options.allowed_transports
        self._tls = tls_for(options)
        self._candidate = candidate
        self._group: Group | None = None
        self._why: dict[str, str] = {}
        self._gone: set[int] = set()

    def run(self, deadline: float) -> None:
        """Return when this node is a member; raises ``InitError``."""
        pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, factor=1.5, jitter=_RANDOM)
        cancelled = self._meeting.cancelled or threading.Event()
        while not self._try(deadline):
            pause_s = pauses.next_s()
            if monotonic() + pause_s >= deadline or cancelled.is_set():
                raise self._missing()
            Gate().wait(pause_s)
        if self._meeting.contacts is not None and self._gone:
            self._strike_off(self._meeting.contacts, deadline)

    def _try(self, deadline: float) -> bool:
        """Try every contact once; True: this node is a member."""
        contacts = self._meeting.contacts
        if self._meeting.members:
            return self._try_known(self._meeting.members, deadline)
        if contacts is None:
            ways = self._meeting.place.contacts
            return any(self._look(Target(None, 0, [way]), deadline) is True for way in ways)
        group, is_current = self._read_list(contacts, deadline)
        before_me = True
        may_found = False
        others = []
        for contact in group.contacts:
            if contact.incarnation == self._me.incarnation:
                before_me, may_found = False, is_current
            else:
                others.append((before_me, contact))
        _RANDOM.shuffle(others)  # so that many newcomers do not all ask the same member
        for is_before, contact in others:
            if contact.incarnation in self._gone:
                continue
            outcome = self._look(Target.of(contact, self._allowed, self._me.host_token), deadline)
            if outcome is True:
                return True
            if outcome is None:
                self._gone.add(contact.incarnation)
            elif is_before or contact.name in self._why:
                may_found = False
        is_nobody_left = self._gone.issuperset(contact.incarnation for _, contact in others)
        if is_current and not may_found and is_nobody_left:
            # The list was full of dead contacts, so that we got no place on it: make room, then try again.
            self._strike_off(contacts, deadline)
            return False
        if not is_current and is_nobody_left and not is_served(self._meeting.place):
            raise self._missing()  # now: this store does not come back, as its client does not connect again
        if may_found:
            self._candidate.found(deadline)
        return may_found

    def _try_known(self, members: Sequence[Member], deadline: float) -> bool:
        """Try all former members in the given order, so that nodes which were cut off together meet at one member."""
        left = [member for member in members if member.incarnation not in self._gone]
        if not left:
            whys = "".join(f"; {name}: {why}" for name, why in self._why.items())
            raise GroupIsOver(
                f"{self._me.name} was not let in: no member of the group is left{whys}", self._meeting.cluster_id
            )
        cancelled = self._meeting.cancelled
        for member in left:
            if monotonic() >= deadline or (cancelled is not None and cancelled.is_set()):
                break
            outcome = self._look(Target.of(member, self._allowed, self._me.host_token), deadline)
            if outcome is True:
                return True
            if outcome is None:
                self._gone.add(member.incarnation)
        return False

    def _read_list(self, contacts: Contacts, deadline: float) -> tuple[Group, bool]:
        """The list, and whether it is current. If the store is gone, contacts of the last list may still let us in."""
        place = self._meeting.place
        try:
            self._group = in_bounded_time(lambda _: contacts.enter(self._me), deadline - monotonic(), place.name)
        except STORE_ERRORS as error:
            if isinstance(error, RpcError):
                raise
            self._why[place.name] = f"the store is gone: {error}"
            if self._group is None:
                raise self._missing() from error
            return self._group, False
        return self._group, True

    def _strike_off(self, contacts: Contacts, deadline: float) -> None:
        """Remove the contacts that are gone from the list, if the store allows; a failure does no harm."""
        left_s = deadline - monotonic()
        try:
            in_bounded_time(
                lambda _: contacts.refresh([self._me], self._gone.__contains__), left_s, self._meeting.place.name
            )
        except Exception as error:
            logger.info("%s: the list of contacts stays as it was: %s", self._me.name, error)

    def _look(self, target: Target, deadline: float) -> bool | None:
        """Ask ``target`` to let us in, if it is a member. True: we are in. None: it is gone. False: not yet."""
        meeting, name = self._meeting, target.name or ""
        self._why.pop(name, None)
        asked = self._candidate.ask_if_connected(target.incarnation, deadline)
        if asked is not None:
            return asked or self._not_answered(name)
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        dial = Dial(Goal.JOIN, until=deadline, now=monotonic(), backoff=backoff)
        me = Hello(self._me, meeting.cluster_id)
        dialler = Dialler(dial, target, me, meeting.secret, tls=self._tls)
        ended, found = self._candidate.dial(dialler)
        if ended.step is Step.VANISHED:
            if found.error is not None:
                self._why[name or target.ways[0]] = ended.why
            return None
        if ended.step is Step.GIVEN_UP and meeting.members:
            self._why[name] = ended.why
            return None
        if ended.step is Step.GIVEN_UP:
            raise InitError(f"{self._me.name} was not let in by {name or target.ways[0]}: {ended.why}") from found.error
        if found.transport is None or found.established is None:
            if target.ways:
                self._why[name] = ended.why
            return False
        purpose = found.established.peer.purpose
        if not isinstance(purpose, Listen) or not purpose.admits:
            self._candidate.drop(found)
            return False
        if purpose.size != meeting.size:
            self._candidate.drop(found)
            raise BadRank(
                f"{self._me.name} was given {_size_text(meeting.size)}, and {found.established.peer.member.name} "
                f"{_size_text(purpose.size)}: give every process the same world_size, or none"
            )
        asked = self._candidate.ask(dialler, found.transport, found.established, deadline)
        return asked or self._not_answered(name)

    def _not_answered(self, name: str) -> bool:
        """A member was asked, and went away: it may have let others in, so this is no time to found a group."""
        self._why[name] = "it has not answered, or went away"
        return False

    def _missing(self) -> MissingPeers:
        place = self._meeting.place
        known = "; ".join(f"{name or place.url}: {why}" for name, why in self._why.items())
        return MissingPeers(
            f"{self._me.name} (rank {self._me.rank}) found no member that let it in, at {place.name}"
            + (f": {known}" if known else ""),
            list(self._why),
        )


def _size_text(size: int) -> str:
    return f"world_size={size}" if size else "no world_size"


class _Looker:
    """A candidate that only wants to know whether a member exists."""

    def ask_if_connected(self, incarnation: int, deadline: float) -> bool | None:
        return None

    def dial(self, dialler: Dialler) -> tuple[Ended, Found]:
        return dialler.run()

    def drop(self, found: Found) -> None:
        found.close()

    def ask(self, dialler: Dialler, transport: Transport, established: Established, deadline: float) -> bool:
        transport.close()
        return True

    def found(self, deadline: float) -> None:
        raise AssertionError("members that are known are asked, and nobody founds")


def is_there(meeting: Meeting, me: Member, options: RpcBackendOptions, deadline: float) -> bool:
    """Is a member left, of the group that ``meeting`` names, that would let ``me`` in?

    No answer in time counts as no: a name lookup, which has no timeout, must not hold up a group that meets anew.
    """

    def look(cancelled: threading.Event) -> None:
        Search(meeting._replace(cancelled=cancelled), me, options, _Looker()).run(deadline)

    try:
        in_bounded_time(look, deadline - monotonic(), meeting.place.name)
    except (GroupIsOver, MissingPeers, Unanswered):
        return False
    return True


class DynamicRendezvous:
    """A node's joining, and its entry in the list of contacts while it is a member."""

    def __init__(self, meeting: Meeting, me: Member, options: RpcBackendOptions, deadline: float) -> None:
        """``me`` is on the list already, if there is one."""
        self._meeting = meeting
        self._options = options
        self._deadline = deadline
        self.contacts = self._meeting.contacts  # None once this node leaves
        self._upkeep: Upkeep | None = None  # set while this node is a member
        self.membership: Membership = Membership(
            me, [me], meeting.cluster_id, meeting.secret, meeting.size, store=meeting.store
        )

    def enter(self, listener: PeerListener, loop: Loop, peers: PeerTable) -> None:
        """Return when this node is a member, admitted or as the first one; raises ``InitError``."""
        membership, watch = self.membership, peers.watch
        newcomer = _Newcomer(self._meeting, membership, listener, loop, peers)

        def why_not(hello: Hello) -> str | None:
            # Let everybody else connect: membership messages must get through, and the members decide the rest.
            if hello.is_newcomer and newcomer.may_be_let_in():
                raise refuse(RefusalReason.CROSSED, f"{membership.me.name} is about to become a member: ask it again")
            return peers.why_closed(hello.member.incarnation)

        listener.open(
            Hello(membership.me, membership.cluster_id, Listen()),
            membership.secret,
            why_not=why_not,
            on_member=newcomer.on_connected,
            returning=peers.connector,
            tls=tls_for(self._options),
        )
        Search(self._meeting, membership.me, self._options, newcomer).run(self._deadline)
        if self.contacts is not None:
            self._upkeep = Upkeep(self.contacts, peers, self._meeting.place, membership.secret)
            if self._meeting.members or membership.secret.path:
                # Others may have entered the list while this node was no member; and the secret may change.
                self._upkeep.poke()
        me = watch.me
        listener.become(Hello(me, membership.cluster_id, Listen(admits=True, size=membership.size)))
        newcomer.admits = True
        # Wait until all neighbours know this node: otherwise a third member could name it to them before it connects.
        bound_s = min(FIRST_CONNECTIONS_S, max(0.0, self._deadline - monotonic()))
        neighbours: list[frozenset[int]] = []
        loop.call_soon(lambda: neighbours.append(watch.neighbours()))
        wait_until(lambda: bool(neighbours) and all(map(peers.knows_us, neighbours[0])), bound_s)
        peers.connector.starting = False

    def on_change(self) -> None:
        """A member joined or ended, so the list may be out of date. On the I/O thread."""
        if self._upkeep is not None:
            self._upkeep.poke()

    def withdraw(self) -> None:
        """Remove this node from the list, if the store still answers."""
        contacts, me, place = self.contacts, self.membership.me, self._meeting.place
        self.close()
        if contacts is not None:

            def leave(cancelled: threading.Event) -> None:
                if is_served(place):
                    contacts.leave(me)

            try:
                in_bounded_time(leave, STORE_S, place.name)
            except Exception as error:
                logger.info("%s: the store does not answer any more: %s", me.name, error)

    def close(self) -> None:
        """Drop the list and the store."""
        self.contacts = None
        self._meeting = self._meeting._replace(contacts=None, store=None)
        if self._upkeep is not None:
            self._upkeep.stop(STORE_S)
            self._upkeep = None


class _Newcomer:
    """The candidate that really joins: it works on this node's peer table and listener."""

    def __init__(
        self, meeting: Meeting, membership: Membership, listener: PeerListener, loop: Loop, peers: PeerTable
    ) -> None:
        self._former = meeting.members
        self._cancelled = meeting.cancelled or threading.Event()
        self._membership = membership
        self._listener = listener
        self._loop = loop
        self._peers = peers
        # Mutable: those who were asked to let us in, and whether the listener says that this node does so itself.
        self._asked: list[RemotePeer] = []
        self.admits: bool = False

    def may_be_let_in(self) -> bool:
        """May this node be a member already, or any moment, though it does not tell those who dial it?

        Then it lets newcomers wait: one that took it for a newcomer might found a group beside the one that it joins.
        """
        return not self.admits and (self._peers.watch.belongs or any(peer.link.up for peer in self._asked))

    def on_connected(self, transport: Transport, established: Established) -> None:
        """Somebody has dialled this node. On the I/O thread."""
        if established.peer.is_newcomer and not self.admits:
            # It has read that this node lets nobody in, and hangs up, too. Kept until then, its connection could be
            # taken for a sponsor's; or for its link as a member, if this node hears first that it was let in.
            transport.close()
        else:
            self._peers.connected(transport, established, False)

    def ask_if_connected(self, incarnation: int, deadline: float) -> bool | None:
        stranger = self._peers.stranger(incarnation)
        return None if stranger is None else self._ask(stranger, deadline)

    def dial(self, dialler: Dialler) -> tuple[Ended, Found]:
        connector = self._peers.connector
        connector.joining = dialler
        ended, found = dialler.run()
        if found.transport is None:
            connector.joining = None
        return ended, found

    def drop(self, found: Found) -> None:
        # First: the listener refuses the dialled node while this dial counts as being let in by it, which would be for
        # good if this node becomes a member without another dial.
        self._peers.connector.joining = None
        found.close()

    def ask(self, dialler: Dialler, transport: Transport, established: Established, deadline: float) -> bool:
        peers, membership = self._peers, self._membership
        if not membership.cluster_id:  # set it before this member can tell others of us, who then dial us
            membership.cluster_id = established.peer.cluster_id
            self._listener.become(Hello(membership.me, membership.cluster_id, Listen()))
        strangers: list[RemotePeer | None] = []

        def connect() -> None:
            peers.connector.joining = None
            if dialler.is_wanted():
                strangers.append(peers.connected(transport, established, True))
            else:
                transport.close()  # the member has dialled us meanwhile: `ask_if_connected` uses that connection
                strangers.append(None)

        self._loop.call_soon(connect)
        if not wait_until(lambda: bool(strangers), deadline - monotonic()):
            raise InitError(f"{peers.watch.me.name}: the I/O thread does not answer")
        stranger = strangers[0]
        return stranger is not None and self._ask(stranger, deadline)

    def _ask(self, stranger: RemotePeer, deadline: float) -> bool:
        watch, link, is_lost = self._peers.watch, stranger.link, self._cancelled.is_set
        self._asked.append(stranger)
        patience_s = min(SPONSOR_S, deadline - monotonic())
        if watch.join_through(stranger.incarnation, self._former, patience_s, lambda: is_lost() or not link.up):
            return True
        refused = watch.refused
        if refused is None:
            return False
        told = f"{watch.me.name} was not let in: {refused.why}"
        match refused.kind:
            case JoinRefusal.GROUP_OVER:
                raise GroupIsOver(told, self._membership.cluster_id)
            case JoinRefusal.NAME_TAKEN:
                raise DuplicateName(told)
            case JoinRefusal.RANK_TAKEN:
                raise BadRank(told)
        raise InitError(told)

    def found(self, deadline: float) -> None:
        founded = threading.Event()

        def found() -> None:
            if not self._peers.watch.belongs:  # by an answer that came late
                self._peers.watch.found()
            founded.set()

        self._loop.call_soon(found)
        if not wait_until(founded.is_set, deadline - monotonic()):
            raise InitError(f"{self._peers.watch.me.name}: the I/O thread does not answer")


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until ``condition`` holds; False after ``timeout_s``."""
    deadline = monotonic() + timeout_s
    pauses = Backoff(0.001, 0.02, factor=1.5)
    gate = Gate()
    while not condition():
        if monotonic() >= deadline:
            return False
        gate.wait(pauses.next_s())
    return True
