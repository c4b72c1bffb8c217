"""Descriptors that a forked child must close.

A child inherits every descriptor of its parent, but none of the threads that use them. While it holds a copy, a peer
never sees the end of the parent's connection. So each object with descriptors registers here once, and closes its
copies in the child: without sending anything to the peer, and so that no destructor uses the same number later, when
it may belong to another file.

References are weak, and nothing unregisters: ``close_after_fork`` must tolerate a call after ``close``.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class HoldsDescriptors(Protocol):
    """An object with descriptors of its own."""

    def close_after_fork(self) -> None:
        """In a forked child: close the descriptors, and leave connections and files to the parent."""


_holders: weakref.WeakSet[HoldsDescriptors] = weakref.WeakSet()


def close_in_children(holder: HoldsDescriptors) -> None:
    """Make ``holder`` close its descriptors in each child that this process forks from now on."""
    _holders.add(holder)


def _after_fork() -> None:
    failures = []
    for holder in list(_holders):
        try:
            holder.close_after_fork()
        except Exception as error:  # one failing holder must not keep the other holders' descriptors open
            failures.append(error)
    _holders.clear()
    if failures:
        raise ExceptionGroup(
            "a forked child could not close all descriptors of its parent; please report this", failures
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
