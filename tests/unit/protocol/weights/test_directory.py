"""What a member knows of who publishes a name."""

from __future__ import annotations

from farcall.protocol.weights.directory import Directory
from farcall.protocol.weights.messages import Claim, NameClaimed, NameClosed


def test_an_older_end_that_comes_late_does_not_open_a_closed_name() -> None:
    directory, older, newer = Directory(), Claim(1, 7), Claim(2, 8)
    directory.close(NameClosed("policy", newer, 3))
    directory.close(NameClosed("policy", older, 1))
    directory.claim(NameClaimed("policy", newer, 0))
    assert directory.find_publisher("policy") is None
