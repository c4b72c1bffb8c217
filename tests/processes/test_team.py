"""Teams of processes: answers, failures, freezing, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from farcall.cli.team import Answer, MemberLost, Team, TeamError

TIMEOUT_S = 30.0


@contextmanager
def obedient(rank: int, size: int, directory: str) -> Iterator[Answer]:
    def answer(request: str) -> Any:
        if request == "fail":
            raise ValueError("as you wish")
        if request == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"who": (rank, size), "pid": os.getpid(), "directory": directory}[request]

    yield answer


@contextmanager
def unwilling(rank: int, size: int, directory: str) -> Iterator[Answer]:
    if rank == 1:
        raise ValueError("not me")
    yield lambda request: request


def state(process_id: int) -> str:
    return Path(f"/proc/{process_id}/stat").read_text().rsplit(") ", 1)[1].split()[0]


def test_members_answer_and_end() -> None:
    team = Team(obedient, 3)
    directory = team.ask(0, "directory", TIMEOUT_S)
    assert [team.ask(rank, "who", TIMEOUT_S) for rank in range(3)] == [(0, 3), (1, 3), (2, 3)]
    team.stop()
    assert not os.path.exists(directory)


def test_failure_reaches_the_driver_and_the_member_lives_on() -> None:
    team = Team(obedient, 1)
    with pytest.raises(TeamError, match="ValueError: as you wish"):
        team.ask(0, "fail", TIMEOUT_S)
    assert team.ask(0, "who", TIMEOUT_S) == (0, 1)
    team.stop()


def test_dead_member_is_noticed() -> None:
    team = Team(obedient, 2)
    with pytest.raises(MemberLost, match="member 1"):
        team.ask(1, "die", TIMEOUT_S)
    with pytest.raises(TeamError, match="member 1"):
        team.stop()


def test_a_member_that_was_killed_is_started_again() -> None:
    team = Team(obedient, 2, names=["first", "second"])
    directory = team.ask(1, "directory", TIMEOUT_S)
    before = team.process_id(1)
    with pytest.raises(MemberLost, match="second has not ended"):
        team.restart(1, 0.01)
    os.kill(before, signal.SIGKILL)
    team.restart(1, TIMEOUT_S)
    assert team.process_id(1) != before
    assert team.ask(1, "who", TIMEOUT_S) == (1, 2)
    assert team.ask(1, "directory", TIMEOUT_S) == directory
    assert team.how_it_ended(1) == "is running"
    with pytest.raises(MemberLost, match="first was ended by SIGKILL"):
        team.ask(0, "die", TIMEOUT_S)
    team.kill()


def test_frozen_members_take_no_cpu_until_thawed() -> None:
    team = Team(obedient, 1)
    process_id = team.ask(0, "pid", TIMEOUT_S)
    team.freeze()
    with pytest.raises(MemberLost, match="did not answer"):
        team.ask(0, "who", 0.1)
    assert state(process_id) == "T"
    team.thaw()
    team.stop()


def test_team_that_does_not_start_is_cleared_away() -> None:
    with pytest.raises(TeamError, match="ValueError: not me"):
        Team(unwilling, 3)
