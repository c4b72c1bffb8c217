"""Teams of processes: answers, failures, freezing, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tests.kit.stopping import stop
from tests.kit.waiting import wait_until

from farcall.cli import team as team_module
from farcall.cli.demo import play as play_module
from farcall.cli.demo.play import DemoFailed, Play
from farcall.cli.demo.training import SERVERS, TRAINERS
from farcall.cli.team import Answer, MemberLost, Team, TeamError
from farcall.errors import PeerDead

TIMEOUT_S = 120.0


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


def process_of(team: Team, rank: int) -> int:
    """The id of a member's current process."""
    number = team._members[rank].process.pid
    assert number is not None, "it was started"
    return number


def is_there(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


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
    before = process_of(team, 1)
    with pytest.raises(MemberLost, match="cannot restart second: it has not ended"):
        team.restart(1, 0.01)
    os.kill(before, signal.SIGKILL)
    team.restart(1, TIMEOUT_S)
    assert process_of(team, 1) != before
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
    wait_until(lambda: state(process_id) == "T")
    with pytest.raises(MemberLost, match="did not answer"):
        team.ask(0, "who", 0.1)
    team.thaw()
    team.stop()


def test_team_that_does_not_start_is_cleared_away() -> None:
    with pytest.raises(TeamError, match="ValueError: not me"):
        Team(unwilling, 3)


def test_members_started_before_one_that_could_not_be_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    start = Team._start

    def start_one(team: Team, rank: int) -> Any:
        if rank == 1:
            raise BlockingIOError("no more processes")
        member = start(team, rank)
        begun.append(member.process.pid or 0)
        return member

    monkeypatch.setattr(Team, "_start", start_one)
    with pytest.raises(BlockingIOError, match="no more processes"):
        Team(obedient, 2)
    assert len(begun) == 1
    assert not is_there(begun[0])


def test_a_team_is_ended_after_a_member_could_not_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(obedient, 2)
    processes = [process_of(team, rank) for rank in range(2)]
    os.kill(processes[0], signal.SIGKILL)

    def start(self: Team, rank: int) -> Any:
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(Team, "_start", start)
        with pytest.raises(BlockingIOError):
            team.restart(0, TIMEOUT_S)
    team.kill()
    assert not any(is_there(process) for process in processes)


def test_a_team_that_is_ended_while_a_member_is_started_again_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the demo a thread starts the server again, and Ctrl-C in the main thread ends the team."""
    team = Team(obedient, 2)
    os.kill(process_of(team, 1), signal.SIGKILL)
    failures: list[BaseException] = []
    kills = threading.Event()

    def kill() -> None:
        kills.set()
        try:
            team.kill()
        except BaseException as error:
            failures.append(error)

    killer = threading.Thread(target=kill)
    start = Team._start

    def start_meanwhile(self: Team, rank: int) -> Any:
        killer.start()
        assert kills.wait(TIMEOUT_S)
        return start(self, rank)

    with monkeypatch.context() as patch:
        patch.setattr(Team, "_start", start_meanwhile)
        with suppress(MemberLost):  # or it ran before it was ended
            team.restart(1, TIMEOUT_S)
    killer.join(TIMEOUT_S)
    assert not killer.is_alive()
    assert failures == []
    assert not any(is_there(process_of(team, rank)) for rank in range(2))


def test_nobody_is_started_again_once_the_team_was_ended() -> None:
    team = Team(obedient, 1)
    before = process_of(team, 0)
    team.kill()
    with pytest.raises(MemberLost, match="cannot restart member 0"):
        team.restart(0, TIMEOUT_S)
    assert process_of(team, 0) == before
    assert team.how_it_ended(0) == "was ended by SIGKILL"


def test_the_news_of_an_end_is_waited_for() -> None:
    """The connections of a killed member may be gone for a while before its parent tells how it ended."""
    team = Team(obedient, 1)
    process_id, parent = process_of(team, 0), forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    stop(parent)
    go_on = threading.Timer(0.1, os.kill, (parent, signal.SIGCONT))
    try:
        os.kill(process_id, signal.SIGKILL)
        wait_until(lambda: state(process_id) == "Z", "it is dead")
        assert team.how_it_ended(0) == "is running"
    finally:
        go_on.start()
    assert team.how_it_ended(0, TIMEOUT_S) == "was ended by SIGKILL"
    go_on.join()
    team.kill()


def test_two_threads_may_ask_at_once_how_a_member_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(obedient, 1)
    told: list[str] = []
    other = threading.Thread(target=lambda: told.append(team.how_it_ended(0, TIMEOUT_S)))
    read = forkserver.read_signed  # type: ignore[attr-defined]

    def read_slowly(descriptor: int) -> int:
        code: int = read(descriptor)
        other.start()
        other.join(0.3)  # it asks between the read and its result, or waits until that is known
        return code

    monkeypatch.setattr(forkserver, "read_signed", read_slowly)
    os.kill(process_of(team, 0), signal.SIGKILL)
    told.append(team.how_it_ended(0, TIMEOUT_S))
    other.join(TIMEOUT_S)
    assert told == ["was ended by SIGKILL"] * 2
    team.kill()


def test_who_does_not_end_when_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may keep a process that waits for a device; it must not keep us."""
    team = Team(obedient, 2, names=["first", "second"])
    with monkeypatch.context() as patch:
        patch.setattr(BaseProcess, "kill", lambda process: None)
        patch.setattr(team_module, "KILL_TIMEOUT_S", 0.05)
        with pytest.raises(MemberLost, match="first, second"):
            team.kill()
    assert not os.path.exists(team.directory)
    team.kill()


class Silent:
    def on_event(self, text: str) -> None: ...

    def on_steps(self, done: int, loss: float) -> None: ...


def test_a_demo_names_the_death_that_a_call_failed_of_before_it_was_news(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    team = Team(obedient, len(SERVERS) + len(TRAINERS))
    monkeypatch.setattr(play_module, "Team", lambda *_, **__: team)

    def fail() -> None:
        os.kill(process_of(team, 0), signal.SIGKILL)
        raise PeerDead("server0 is gone, says trainer0")

    play = Play(Silent(), 100, tmp_path / "trace.json")
    monkeypatch.setattr(play, "_play", fail)
    with pytest.raises(DemoFailed, match="server0 died, and the demo did not kill it: it was ended by SIGKILL"):
        play.run()


def test_a_demo_that_gives_up_ends_the_trainers_that_are_left(tmp_path: Path) -> None:
    play = Play(Silent(), 100, tmp_path / "trace.json")
    play._team = team = Team(obedient, len(SERVERS) + len(TRAINERS))
    trainers = [process_of(team, len(SERVERS) + number) for number in range(len(TRAINERS))]
    os.kill(trainers[0], signal.SIGKILL)
    wait_until(lambda: not is_there(trainers[0]), "the first trainer is gone without a trace")
    play._give_up("trainer0 died")
    wait_until(lambda: not is_there(trainers[1]), "the second trainer is ended")
    team.kill()
