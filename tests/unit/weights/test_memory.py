"""Blocks at those who read them."""

from __future__ import annotations

import os

import pytest

from farcall.weights.memory import Block, BorrowedBlock


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_maps_no_other_file() -> None:
    block = Block(1, 4096, is_shared=True)
    borrowed = BorrowedBlock(os.dup(block.descriptor), 4096)
    child = os.fork()
    if not child:
        # Descriptors were closed after the fork; this file may get the number of one.
        other = os.memfd_create("other")
        os.truncate(other, 4096)
        try:
            borrowed.private_view()
        except OSError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bytes(borrowed.private_view()) == bytes(4096)
    block.close()
