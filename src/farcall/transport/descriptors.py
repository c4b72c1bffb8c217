"""Descriptors that a forked child must let go of.

A child inherits every descriptor of its parent, and none of the threads that would use them. While it holds a copy, a
peer that looks for the end of the parent's connection never sees it. So each object that holds descriptors registers
here once, and closes its copies in the child: without a word to the other side, and so that nothing (a destructor, say)
writes to the same number later, when it may be somebody else's.

Held weakly: closing is no reason to unregister, and ``close_after_fork`` must bear being called after ``close``.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class HoldsDescriptors(Protocol):
    """An object with descriptors of its own."""

    def close_after_fork(self) -> None:
        """In a forked child: close them, and leave what they stand for to the parent."""


_holders: weakref.WeakSet[HoldsDescriptors] = weakref.WeakSet()


def close_in_children(holder: HoldsDescriptors) -> None:
    """Have ``holder`` close its descriptors in each child that this process forks from now on."""
    _holders.add(holder)


def _after_fork() -> None:
    failures = []
    for holder in list(_holders):
        try:
            holder.close_after_fork()
        except Exception as error:  # one holder's fault must not leave the descriptors of all others open
            failures.append(error)
    _holders.clear()
    if failures:
        raise ExceptionGroup(
            "a forked child could not close all descriptors of its parent; please report this", failures
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
