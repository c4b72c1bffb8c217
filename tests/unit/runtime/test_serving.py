"""Which functions may run on the I/O thread."""

from __future__ import annotations

from typing import Any

import pytest

from farcall.ids import WorkerInfo
from farcall.runtime.calls import serving
from farcall.runtime.calls.serving import MOST_PARDON_RUNS, PARDON_RUNS, Server


@pytest.fixture
def server() -> Server:
    unused: Any = None
    return Server(WorkerInfo("w0", 0), unused)


def runs_until_pardoned(server: Server) -> int:
    runs = 0
    while b"f" in server._banned:
        server._was_quick(b"f")
        runs += 1
    return runs


def test_a_function_that_is_slow_there_again_and_again_stays_away_for_longer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(serving, "perf_counter", lambda: now)
    found = []
    for _ in range(5):
        server._ban(b"f")
        found.append(runs_until_pardoned(server))
    assert found == [4 * PARDON_RUNS, 16 * PARDON_RUNS, *[MOST_PARDON_RUNS] * 3]


def test_what_was_long_ago_is_forgotten(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(serving, "perf_counter", lambda: now)
    for _ in range(5):
        server._ban(b"f")
    runs_until_pardoned(server)
    now += serving.FORGOTTEN_S
    server._ban(b"f")
    assert runs_until_pardoned(server) == 4 * PARDON_RUNS
