"""The nodes of this process: the one that a thread works for, and those that a forked child must let go of.

Which node is "the current one" for a thread that works for none is decided by `farcall.api`, through `Current`. Each
thread sets and reads its own entry; the set of started nodes is changed by the threads that start and end nodes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from farcall.errors import NotInitialized

if TYPE_CHECKING:
    from farcall.runtime.node.node import Node

__all__ = ["STARTED", "Current", "current_node", "node_of_thread", "work_for"]

_thread = threading.local()
STARTED: weakref.WeakSet[Node] = weakref.WeakSet()
"""Nodes that hold descriptors: a forked child must let go of its copies of those."""


class Current:
    """Where functions that are given no node find one; `farcall.api`, which keeps the current node, fills this in."""

    find: ClassVar[Callable[[], Node] | None] = None


def current_node() -> Node:
    """The node whose function the calling thread runs, or the one that `init_rpc` made."""
    if Current.find is not None:
        return Current.find()
    node = node_of_thread()
    if node is None:
        raise NotInitialized("RPC has not been initialized. Call farcall.init_rpc first.")
    return node


def node_of_thread() -> Node | None:
    """The node whose function the calling thread runs, if it runs one."""
    return getattr(_thread, "node", None)


def work_for(node: Node | None) -> None:
    """The calling thread is one of this node's from now on; None: nobody's."""
    _thread.node = node


def _after_fork() -> None:
    """In a forked child: whatever nodes there were, they are the parent's."""
    work_for(None)
    for node in list(STARTED):
        node.close_after_fork()
    STARTED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
