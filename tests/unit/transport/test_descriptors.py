"""A forked child closes the descriptors of its parent, and the parent's connections stand."""

from __future__ import annotations

import os
import socket
import weakref

import pytest

from farcall.transport.descriptors import close_in_children
from farcall.transport.interface import TransportClosed
from farcall.transport.unix import UnixTransport

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def exit_code_of_child(check: object) -> int:
    child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)  # type: ignore[operator]
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_closes_its_copies_and_the_parent_keeps_its_own() -> None:
    one, other = map(UnixTransport, socket.socketpair(socket.AF_UNIX))

    def is_closed() -> bool:
        try:
            one.send((b"from the child",))
        except TransportClosed:
            return one.fileno() == -1 == other.fileno()
        return False

    assert exit_code_of_child(is_closed) == 0
    assert one.send((b"x",)) == 1
    assert other.receive_into(memoryview(bytearray(20))) == 1
    one.close()
    assert other.receive_into(memoryview(bytearray(20))) == 0
    other.close()


def test_each_holder_is_asked_once_in_each_child_and_not_in_the_parent() -> None:
    class Holder:
        closed = 0

        def close_after_fork(self) -> None:
            self.closed += 1

    holder = Holder()
    close_in_children(holder)
    close_in_children(holder)
    assert exit_code_of_child(lambda: holder.closed == 1) == 0
    assert exit_code_of_child(lambda: exit_code_of_child(lambda: holder.closed == 1) == 0) == 0
    assert holder.closed == 0


def test_a_holder_that_fails_keeps_no_other_from_closing() -> None:
    class Holder:
        closed = False

        def close_after_fork(self) -> None:
            self.closed = True
            raise ValueError("closed before")

    holders = [Holder() for _ in range(3)]
    for holder in holders:
        close_in_children(holder)
    assert exit_code_of_child(lambda: all(holder.closed for holder in holders)) == 0


def test_nobody_is_kept_for_it() -> None:
    class Holder:
        def close_after_fork(self) -> None: ...

    holder = Holder()
    close_in_children(holder)
    alive = weakref.ref(holder)
    del holder
    assert alive() is None
