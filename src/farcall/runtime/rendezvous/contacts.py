"""The list of contacts in the store of a group without a fixed size: members that may let newcomers in.

One key holds all of it, so it changes as a whole (compare and set):

    members    {cluster_id, contacts: [{name, addresses, host_token, incarnation}, ...]}, proved (`records.py`)

The store only yields addresses. The members themselves decide who belongs to the group, and once a group exists the
store may die: then ``farcall://host:port`` names a member instead.

A newcomer enters the list before it asks. It may found the group only if all entries before its own are gone and no
entry is a member, or about to become one: all newcomers see the list in one order, so only one of them founds. A member
stays on the list as long as it lets newcomers in: else one that it lets in could look like any other newcomer to the
next, which would found a second group. The member of the lowest rank keeps the list up to date (`Upkeep`), so that
newcomers find a living member, and proved with today's secrets, so that they can read it. Knows nothing of links or the
membership machine; every method of `Contacts` talks to the store, and may block as long as that does.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence

import msgspec

from farcall.errors import InitError
from farcall.protocol.member import Member
from farcall.runtime.peers.table import PeerTable
from farcall.runtime.rendezvous.agreement import as_text
from farcall.runtime.rendezvous.meeting_place import MeetingPlace
from farcall.runtime.rendezvous.records import Records
from farcall.runtime.rendezvous.store import StoreLost, is_served
from farcall.secret import Secret

logger: logging.Logger = logging.getLogger("farcall")

MAX_CONTACTS = 16
COLLECT_S = 0.2
"""How long `Upkeep` collects changes before it writes: they come in bursts."""
MIXED = "RPC group mixes statically and dynamically initialized members which is not supported."


class Group(msgspec.Struct, frozen=True):
    """The group as a newcomer reads it in the store."""

    cluster_id: str
    contacts: tuple[Member, ...]


_read_group = msgspec.json.Decoder(Group).decode


def members_key(attempt: str) -> str:
    return f"farcall/{attempt}/members"


class Contacts:
    """One member's access to the list."""

    def __init__(self, records: Records, attempt: str) -> None:
        self._records = records
        self._key = members_key(attempt)
        self._proved = b""  # the list as this process last proved or wrote it, with its proofs
        self._static_keys = (f"farcall/{attempt}/generation", f"farcall/{attempt}/0/slot/0")

    def enter(self, me: Member) -> Group:
        """Append ``me`` to the list, unless the list is full or contains ``me``; return the list."""
        if any(self._records.store.check([key]) for key in self._static_keys):
            raise InitError(f"{MIXED} This process gave no world_size, and others here did.")
        return self.refresh([me])

    def check_nobody(self, name: str, world_size: int) -> None:
        """Raise if the list has entries: those processes gave no world_size, so ``name`` waits for them in vain."""
        found = self._records.read(self._key)
        names = ", ".join(contact.name for contact in _read_group(found).contacts) if found else ""
        if names:
            raise InitError(
                f"{MIXED} {name} gave world_size {world_size}, and {names} gave none: give it to all, or to none."
            )

    def leave(self, me: Member) -> None:
        """Remove ``me`` from the list."""
        self.refresh([], lambda incarnation: incarnation == me.incarnation)

    def refresh(
        self,
        members: Sequence[Member],
        is_over: Callable[[int], bool] = lambda incarnation: False,
        renews_proofs: bool = False,
    ) -> Group:
        """Remove contacts whose incarnation ``is_over``, fill the list up with ``members``, and return it.

        ``renews_proofs``: write it even if only the secrets have changed.
        """
        key, records = self._key, self._records
        before = records.read_sealed(key) or b""
        while True:  # until no other process changed the list between our read and our write
            text_before = self._open(before) if before else b""
            group = _read_group(text_before) if before else Group(secrets.token_hex(8), ())
            contacts = [contact for contact in group.contacts if not is_over(contact.incarnation)]
            known = {contact.incarnation for contact in contacts}
            contacts += [member for member in members if member.incarnation not in known]
            group = msgspec.structs.replace(group, contacts=tuple(contacts[: max(MAX_CONTACTS, len(known))]))
            text = as_text(group)
            sealed = records.proofs.seal(key, text).encode()
            if sealed == before or (text.encode() == text_before and not renews_proofs):
                return group
            found = records.store.compare_set(key, before.decode(), sealed.decode())
            if found == sealed:
                self._proved = sealed
                return group
            before = b"" if found == before else found  # a store tells so that it has been deleted

    def _open(self, data: bytes) -> bytes:
        """The text of the list. What was proved here once stays so: the secret may have changed twice since."""
        if data != self._proved:
            self._records.proofs.open(self._key, data)
            self._proved = data
        return data.partition(b"\n")[2]


class Upkeep:
    """Updates the list after members joined or ended: removes the ended, and fills the list up with others.

    Proves it anew once the file of the secret has changed: else who starts with the new one could not read it.
    Runs on a thread of its own, since a store may block. The first error ends it: the store is dead, and the group goes
    on without one.
    """

    def __init__(self, contacts: Contacts, peers: PeerTable, place: MeetingPlace, secret: Secret) -> None:
        self._contacts = contacts
        self._secret = secret
        self._place = place
        self._peers = peers
        # Mutable, under the lock: the thread, while it runs, and whether it has to look again.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False
        self._stopped = threading.Event()

    def poke(self) -> None:
        """A member joined or ended: update the list soon. Never waits."""
        if not self._peers.watch.is_lowest:
            return
        with self._lock:
            self._again = True
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="farcall-upkeep", daemon=True)
                self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Begin no further update, and wait up to ``timeout_s`` for the update under way."""
        with self._lock:  # so that no concurrent `poke` starts a thread that is not joined here
            self._stopped.set()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        proved: tuple[bytes, ...] = ()
        while not self._stopped.wait(COLLECT_S):
            with self._lock:
                if not self._again and not self._secret.path:
                    self._thread = None
                    return
                has_news, self._again = self._again, False
            known = self._secret.values
            if not has_news and known == proved:
                continue
            proved = known
            try:
                if not is_served(self._place):
                    raise StoreLost(f"{self._place.name} is no longer served")
                self._contacts.refresh(self._peers.watch.members(), self._peers.is_over, renews_proofs=True)
            except Exception as error:
                logger.info("no longer updating the list of contacts: %s", error)
                self._stopped.set()
