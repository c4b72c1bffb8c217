"""The place where members meet, from arguments, url and environment."""

from __future__ import annotations

from typing import Any

import pytest

from farcall.errors import BadRank
from farcall.runtime.rendezvous.meeting_place import find_meeting_place

ENV = {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}


def test_the_environment_gives_all() -> None:
    place = find_meeting_place(-1, None, "env://", ENV)
    assert (place.rank, place.world_size, place.host, place.port) == (1, 4, "host", 29500)
    assert not place.hosted_by_agent
    assert place.name == "host:29500"


def test_arguments_win_over_the_environment() -> None:
    place = find_meeting_place(2, 3, "env://", ENV)
    assert (place.rank, place.world_size) == (2, 3)


def test_torchrun_hosts_the_store_and_counts_restarts() -> None:
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    place = find_meeting_place(-1, None, "env://", {**ENV, **elastic})
    assert place.hosted_by_agent
    assert place.attempt == "2"


def test_one_that_is_alone_needs_no_place() -> None:
    place = find_meeting_place(-1, 1, "env://", {})
    assert (place.rank, place.world_size, place.host) == (0, 1, "127.0.0.1")


@pytest.mark.parametrize(
    ("url", "size", "hosts"),
    [
        ("tcp://a:1", 2, ["a"]),
        ("tcp://a:1", 1, []),
        ("file:///a", 2, []),
        ("farcall://a:1,b:2", None, ["a", "b"]),
        ("farcall://a:1?unix=/b", None, []),
    ],
)
def test_the_hosts_that_have_to_be_reached(url: str, size: int | None, hosts: list[str]) -> None:
    assert find_meeting_place(0, size, url, {}).hosts == hosts


def test_the_url_gives_all() -> None:
    place = find_meeting_place(-1, None, "tcp://[::1]:1234?rank=0&world_size=2", {})
    assert (place.rank, place.world_size, place.host, place.port) == (0, 2, "::1", 1234)
    assert place.name == "[::1]:1234"
    assert find_meeting_place(0, 2, "tcp://h:1?rank=0", {}).rank == 0
    place = find_meeting_place(1, 2, "file:///tmp/there", {})
    assert (place.host, place.path) == (None, "/tmp/there")


@pytest.mark.parametrize(
    ("rank", "size", "url", "environ", "error", "text"),
    [
        (-1, None, "env://", {}, BadRank, "environment variable RANK expected"),
        (0, None, "env://", {}, ValueError, "MASTER_ADDR"),
        (0, 2, "env://", {}, ValueError, "MASTER_ADDR expected: set it .*or start with `farcall run --workers N"),
        (0, 1, "env://", {"MASTER_ADDR": "h"}, ValueError, "MASTER_PORT"),
        (0, 1, "env://", {"MASTER_ADDR": "h", "MASTER_PORT": "x"}, ValueError, "from 1 to 65535"),
        (0, 1, "env://", {"MASTER_ADDR": "h", "MASTER_PORT": "70000"}, ValueError, "from 1 to 65535"),
        (-1, 1, "env://", {**ENV, "RANK": "one"}, BadRank, "whole number"),
        (-1, 2, "tcp://h:1", ENV, BadRank, "rank parameter missing"),
        (2, 2, "farcall://h:1", {}, BadRank, "from 0 to 1"),
        (0, None, "farcall://h", {}, ValueError, "lacks a host or a port"),
        (0, None, "farcall://", {}, ValueError, "names no member"),
        (0, 2, "tcp://h:1?rank=1", {}, BadRank, "give it once"),
        (0, 3, "tcp://h:1?world_size=2", {}, BadRank, "give it once"),
        (2, 2, "tcp://h:1", {}, BadRank, "from 0 to 1"),
        (-2, 2, "tcp://h:1", {}, BadRank, "negative"),
        (0, 0, "tcp://h:1", {}, BadRank, "at least 1"),
        ("0", 1, "tcp://h:1", {}, BadRank, "must be an int"),
    ],
)
def test_nonsense_says_what_to_set(
    rank: Any, size: Any, url: str, environ: dict[str, str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        find_meeting_place(rank, size, url, environ)
