"""Whom to ask to be let in: the list of members in the store of a group without a fixed size.

One key holds all of it, so it changes as a whole (compare and set):

    members    {cluster_id, secret, contacts: [{name, addresses, host_token, incarnation}, ...]}

The store only yields addresses. Who belongs to the group the members settle among themselves, and once there
is a group the store may die: then ``farcall://host:port`` names a member instead.

A newcomer is on the list before it asks. It may found the group only if all before it on the list are gone, and
nobody on it is a member: the list is an order that all agree on, so of several newcomers one founds. Knows nothing of
links or the membership machine; every method talks to the store, and may block as long as that does.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Sequence

import msgspec

from farcall.errors import InitError
from farcall.protocol.member import Member
from farcall.runtime.rendezvous.records import as_text
from farcall.runtime.rendezvous.store import KeyStore

logger: logging.Logger = logging.getLogger("farcall")

__all__ = ["Contacts", "Group", "cluster_of", "members_key"]

MAX_CONTACTS = 16
MIXED = "RPC group mixes statically and dynamically initialized members which is not supported."


class Group(msgspec.Struct, frozen=True):
    """What the store tells a newcomer."""

    cluster_id: str
    secret: str
    """Empty where every member was given one."""
    contacts: tuple[Member, ...]


_read_group = msgspec.json.Decoder(Group).decode


def members_key(attempt: str) -> str:
    return f"farcall/{attempt}/members"


def cluster_of(secret: bytes) -> str:
    """The id of the group of all who were given ``secret``: so it can be joined where no store tells."""
    return hashlib.sha256(b"farcall group" + secret).hexdigest()[:16]


class Contacts:
    """The list, as one member sees and changes it."""

    def __init__(self, store: KeyStore, attempt: str, secret: bytes | None) -> None:
        self._store = store
        self._key = members_key(attempt)
        self._static_key = f"farcall/{attempt}/generation"
        self._secret = secret

    def enter(self, me: Member) -> Group:
        """Put ``me`` on the list, at its end, unless it is full or ``me`` is on it; the list."""
        if self._store.check([self._static_key]):
            raise InitError(f"{MIXED} This process gave no world_size, and others here did.")
        return self._change(lambda group: _entered(group, me))

    def replace(self, me: Member, gone: Collection[int]) -> Group:
        """Take those incarnations off the list, and see that ``me`` is on it."""

        def change(group: Group) -> Group:
            kept = tuple(contact for contact in group.contacts if contact.incarnation not in gone)
            return _entered(msgspec.structs.replace(group, contacts=kept), me)

        return self._change(change)

    def refresh(self, members: Sequence[Member], is_over: Callable[[int], bool]) -> None:
        """Take those whose incarnation ``is_over`` off the list, and fill it up with ``members``."""

        def change(group: Group) -> Group:
            kept = tuple(contact for contact in group.contacts if not is_over(contact.incarnation))
            group = msgspec.structs.replace(group, contacts=kept)
            for member in members:
                group = _entered(group, member)
            return group

        self._change(change)

    def leave(self, me: Member) -> None:
        """Take ``me`` off the list."""

        def change(group: Group) -> Group:
            kept = tuple(contact for contact in group.contacts if contact.incarnation != me.incarnation)
            return msgspec.structs.replace(group, contacts=kept)

        self._change(change)

    def _change(self, change: Callable[[Group], Group]) -> Group:
        """Change the list whatever others do to it meanwhile."""
        before = self._store.get(self._key).decode() if self._store.check([self._key]) else ""
        while True:
            group = change(_read_group(before) if before else self._new())
            self._check_secret(group)
            text = as_text(group)
            if text == before:
                return group
            found = self._store.compare_set(self._key, before, text).decode()
            if found == text:
                return group
            before = found

    def _new(self) -> Group:
        if self._secret is not None:
            return Group(cluster_of(self._secret), "", ())
        return Group(secrets.token_hex(8), secrets.token_hex(32), ())

    def _check_secret(self, group: Group) -> None:
        if bool(group.secret) == (self._secret is not None):
            mine, theirs = ("a secret", "none") if self._secret is not None else ("no secret", "one")
            raise InitError(
                f"this process was given {mine}, and the members of this group {theirs}: give every process the same "
                "secret (option or FARCALL_SECRET), or none"
            )


def _entered(group: Group, me: Member) -> Group:
    if len(group.contacts) >= MAX_CONTACTS or any(c.incarnation == me.incarnation for c in group.contacts):
        return group
    return msgspec.structs.replace(group, contacts=(*group.contacts, me))
