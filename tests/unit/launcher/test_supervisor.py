"""The supervisor over an engine and a crew of the test: what is heard, and what is done about it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.kit.waiting import wait_until

from farcall.errors import RpcError
from farcall.ids import WorkerInfo
from farcall.launcher import supervisor
from farcall.launcher.engine import EngineError, ProcessState, Watcher, WorkerSpec
from farcall.launcher.lives import Restarts
from farcall.launcher.supervisor import Supervisor
from farcall.runtime.membership.events import MemberEvent


class FakeEngine:
    """Starts nothing; keeps what it was asked for."""

    driver_host: str | None = None

    def __init__(self) -> None:
        self.started: list[WorkerSpec] = []
        self.ended: list[WorkerSpec] = []
        self.closed = False
        self.refuses = False
        self.interrupts = 0

    def start(self, specs: Sequence[WorkerSpec], watcher: Watcher) -> None:
        if self.refuses:
            raise EngineError("no room")
        self.started += specs

    def end(self, specs: Sequence[WorkerSpec]) -> None:
        self.ended += specs

    def close(self) -> None:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.closed = True


class FakeCrew:
    """A cluster without members."""

    def __init__(self) -> None:
        self.dismissed: list[str] = []
        self.buried: list[str] = []
        self.shown: list[tuple[str, bytes]] = []
        self.fails = False
        self.is_blind = False
        self.before_dismissal: Callable[[], object] = lambda: None

    def make_spec(self, name: str, rank: int, life: int) -> WorkerSpec:
        return WorkerSpec(name=name, rank=rank, life=life, secret="", meet="")

    def prepare(self, name: str) -> None:
        if self.fails:
            raise ValueError("its state is lost")

    def bury(self, incarnation: str) -> None:
        self.buried.append(incarnation)

    def dismiss(self, name: str) -> None:
        self.before_dismissal()
        self.dismissed.append(name)

    def show(self, spec: WorkerSpec, data: bytes) -> None:
        if self.is_blind:
            raise BrokenPipeError("nobody looks")
        self.shown.append((spec.name, data))

    def tick(self) -> None:
        if self.is_blind:
            raise BrokenPipeError("nobody looks")


class Scene:
    """One worker under a supervisor."""

    def __init__(self, restarts: Restarts) -> None:
        self.engine, self.crew = FakeEngine(), FakeCrew()
        self.supervisor = Supervisor(self.engine, self.crew, restarts=restarts, start_timeout_s=1000.0)

    def add(self) -> None:
        (self.worker,) = self.supervisor.add([("worker0", 0)])

    def started(self, lives: int) -> WorkerSpec:
        wait_until(lambda: len(self.engine.started) >= lives)
        return self.engine.started[lives - 1]

    def member(self, kind: str, incarnation: str, why: str = "") -> None:
        self.supervisor.on_member(MemberEvent(kind, WorkerInfo("worker0", 0), incarnation, why))

    def is_in(self, state: str) -> None:
        assert self.supervisor.wait(lambda: self.worker.state == state, 30.0), self.worker.state


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene(Restarts(most=1))
    yield made
    made.supervisor.close(patient=False)
    assert made.engine.closed
    wait_until(lambda: not any(thread.name == "farcall-supervisor" for thread in threading.enumerate()))


def test_it_joins_runs_dies_and_comes_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "EXIT_S", 0.0)  # its host is gone, and nobody tells how its process ended
    scene.add()
    first = scene.started(1)
    scene.member("joined", "a")
    scene.is_in("running")
    scene.supervisor.on_output(first, b"half a ")
    scene.supervisor.on_output(first, b"line\nlast words\n")
    assert scene.worker.last_lines.texts() == ["half a line", "last words"]
    scene.member("dead", "a", "its process has ended")
    second = scene.started(2)
    assert scene.worker.life.why == "was lost: its process has ended"
    assert (second.name, second.rank, second.life) == ("worker0", 0, 1)
    assert scene.crew.buried == ["a"]  # before it has a successor, which has its name
    wait_until(lambda: scene.engine.ended == [first])  # whatever is left of it
    scene.supervisor.on_state(first, ProcessState("ended", "", -9))  # late news of the first change nothing
    scene.member("joined", "b")
    scene.is_in("running")
    scene.member("dead", "a", "news that come late")  # nor do they of its membership
    scene.supervisor.on_state(second, ProcessState("ended", "", 3))
    scene.is_in("dead")
    assert scene.worker.account() == "ended with exit code 3"


def test_how_its_process_ended_is_told_though_the_membership_knew_first(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.add()
    for life in (1, 2):
        spec = scene.started(life)
        scene.member("joined", str(life))
        scene.is_in("running")
        scene.member("dead", str(life), "nobody listens there")
        scene.supervisor.on_state(spec, ProcessState("ended", "", -9))
    scene.is_in("dead")
    assert scene.worker.account() == "was ended by SIGKILL"
    assert scene.engine.ended == []
    assert caplog.messages == [
        "driver: worker0 was ended by SIGKILL; restarting it (1 of 1)",
        "driver: worker0 was ended by SIGKILL; it is not restarted again (max_restarts=1)",
    ]


def test_a_dead_member_with_exit_code_zero_has_finished(scene: Scene) -> None:
    scene.add()
    spec = scene.started(1)
    scene.member("joined", "a")
    scene.is_in("running")
    scene.member("dead", "a", "nobody listens there")
    scene.supervisor.on_state(spec, ProcessState("ended", "", 0))  # os._exit(0): without a goodbye
    scene.is_in("ended")


def test_a_stranger_that_dies_is_told_of(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.supervisor.on_member(MemberEvent("dead", WorkerInfo("visitor", 7), "v", "nobody listens there"))
    wait_until(lambda: caplog.messages == ["driver: lost visitor: nobody listens there"])


def test_an_end_with_zero_is_no_failure(scene: Scene) -> None:
    scene.add()
    spec = scene.started(1)
    scene.member("joined", "a")
    scene.is_in("running")
    scene.member("left", "a")
    scene.supervisor.on_state(spec, ProcessState("ended", "", None))  # of an engine that knows no exit codes
    scene.is_in("ended")
    assert len(scene.engine.started) == 1


def test_a_first_start_that_fails_is_told_with_its_last_lines(scene: Scene) -> None:
    scene.add()
    spec = scene.started(1)
    scene.supervisor.on_output(spec, b"Traceback\nValueError: no\n")
    scene.supervisor.on_state(spec, ProcessState("ended", "", 1))
    scene.is_in("dead")
    assert scene.worker.account() == "ended with exit code 1; its last lines:\nTraceback\nValueError: no"


@pytest.mark.parametrize("is_late", [True, False])
def test_a_first_start_that_fails_is_logged_where_a_quorum_of_others_was_enough(
    scene: Scene, caplog: pytest.LogCaptureFixture, is_late: bool
) -> None:
    scene.add()
    spec = scene.started(1)
    if is_late:
        scene.supervisor.stop_waiting([scene.worker])
    scene.supervisor.on_state(spec, ProcessState("ended", "", 1))
    scene.is_in("dead")
    if not is_late:
        assert not caplog.messages
        scene.supervisor.stop_waiting([scene.worker])
    assert caplog.messages == ["driver: worker0 ended with exit code 1; it is not restarted: it has never run"]


def test_an_engine_that_refuses(scene: Scene) -> None:
    scene.engine.refuses = True
    scene.add()
    scene.is_in("dead")
    assert scene.worker.account() == "ended (no room)"


def test_what_preparing_raises_is_kept_and_the_process_ended(scene: Scene) -> None:
    scene.crew.fails = True
    scene.add()
    spec = scene.started(1)
    scene.member("joined", "a")
    scene.is_in("dead")
    assert isinstance(scene.worker.error, ValueError)
    wait_until(lambda: scene.engine.ended == [spec])


def test_who_is_removed_is_asked_first(scene: Scene) -> None:
    scene.add()
    spec = scene.started(1)
    scene.member("joined", "a")
    scene.is_in("running")
    scene.supervisor.remove(["worker0"])
    scene.is_in("ended")
    assert scene.crew.dismissed == ["worker0"]
    scene.supervisor.on_state(spec, ProcessState("ended", "", 0))
    assert scene.supervisor.wait(lambda: not scene.worker.has_process, 30.0)


def test_output_is_read_while_a_worker_is_asked_to_end(scene: Scene) -> None:
    """Asking it may wait for room in a connection, and the worker for somebody to read what it writes."""
    scene.add()
    spec = scene.started(1)
    scene.member("joined", "a")
    scene.is_in("running")
    reading = threading.Thread(target=scene.supervisor.on_output, args=(spec, b"more\n"), daemon=True)

    def ask() -> None:
        reading.start()
        reading.join(30.0)

    scene.crew.before_dismissal = ask
    scene.supervisor.remove(["worker0"])
    assert scene.worker.last_lines.texts() == ["more"]


def test_a_dead_worker_can_be_removed(scene: Scene) -> None:
    scene.add()
    scene.supervisor.on_state(scene.started(1), ProcessState("ended", "", 1))
    scene.is_in("dead")
    scene.supervisor.remove(["worker0"])
    assert scene.worker.state == "ended"
    assert scene.crew.dismissed == []


def test_an_end_that_is_interrupted_can_be_repeated(scene: Scene) -> None:
    scene.add()
    scene.started(1)
    scene.member("joined", "a")
    scene.is_in("running")
    scene.engine.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        scene.supervisor.close(patient=False)
    assert scene.crew.dismissed == []  # there was no time to ask
    scene.supervisor.close(patient=False)
    assert scene.engine.closed


def test_nobody_is_started_after_the_end(scene: Scene) -> None:
    scene.supervisor.close(patient=True)
    with pytest.raises(RpcError, match=r"start another one with farcall\.launch"):
        scene.add()


def test_a_screen_that_went_away_ends_nothing(scene: Scene) -> None:
    scene.crew.is_blind = True
    scene.add()
    spec = scene.started(1)
    scene.supervisor.on_output(spec, b"nobody sees this\n")
    scene.member("joined", "a")
    scene.is_in("running")
