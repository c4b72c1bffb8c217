"""Workers from one program: called, watched, replaced and ended."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.kit.launching import runs
from tests.kit.rigs.programs import free_ports
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import LaunchFailed, NetworkError, UnknownWorker
from farcall.launcher import cluster
from farcall.launcher.engine import EngineError, ProcessState
from farcall.launcher.local import LocalEngine
from farcall.observe.presence import find_nodes
from farcall.options import ObservingOptions
from farcall.runtime.node import current_runtime
from farcall.serialize.code import MAIN

_state: dict[str, object] = {}


def put(key, value):
    _state[key] = value


def get(key):
    return _state.get(key)


def square_or_die(item):
    """The first process that meets a marked item dies of it."""
    number, marker = item
    if marker is not None:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def loaded_by_the_server():
    program = "from farcall.launcher import fork_server; fork_server._load(); import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=250)
    return set(done.stdout.split())


def test_calls_names_growth_and_the_end(capsys, tmp_path):
    with farcall.launch(2, environment={"COLOUR": "blue"}) as cluster:
        assert [worker.name for worker in cluster.workers] == ["worker0", "worker1"]
        assert cluster["worker1"].call(os.getenv, "RANK") == cluster[1].call(os.getenv, "RANK") == "1"
        assert cluster["worker0"].call(os.getenv, "COLOUR") == "blue"
        assert cluster["worker0"].call(os.getcwd) == os.getcwd()
        assert [member.name for member in farcall.members()] == ["worker0", "worker1", "driver"]
        with pytest.raises(UnknownWorker, match="its workers are worker0, worker1"):
            cluster["worker7"]
        cluster["worker0"].call(print, "written there")
        there = cluster["worker1"].call(eval, "list(__import__('sys').modules)")
        assert {name for name in there if name.startswith("farcall")} <= loaded_by_the_server()  # none loads them again
        processes = [worker.call(os.getpid) for worker in cluster]

        assert cluster["worker0"].call(lambda x: x + 1, 1) == 2  # code by value
        assert list(cluster.map(square_or_die, [(n, None) for n in range(10)])) == [n * n for n in range(10)]

        (added,) = cluster.grow()
        assert added.name == "worker2"
        processes.append(added.call(os.getpid))
        cluster.shrink(["worker0"])
        assert not runs(processes[0])
        assert cluster.states() == {"worker0": "ended", "worker1": "running", "worker2": "running"}
        assert [worker.name for worker in cluster] == ["worker1", "worker2"]
        cluster.wait(timeout=1.0)
        assert repr(cluster) == "<Cluster: 1 ended, 2 running>"
    assert not any(runs(process) for process in processes)
    assert "worker0 | written there\n" in capsys.readouterr().out
    with pytest.raises(farcall.errors.NotInitialized):
        farcall.members()


def test_a_worker_that_dies_comes_back_with_its_state(tmp_path):
    started = []

    def restore(worker):
        started.append(worker.name)
        worker.call(put, "weights", 7)

    with farcall.launch(
        2, restart="on-failure", max_restarts=2, backoff_s=0.0, on_start=restore, quiet=True, logs=tmp_path
    ) as cluster:
        before = cluster["worker1"].call(os.getpid)
        under_way = cluster["worker1"].start(time.sleep, 600)
        cluster["worker1"].call(print, "first life")
        os.kill(before, signal.SIGKILL)
        with pytest.raises(NetworkError):
            under_way.result(timeout=250)
        wait_until(lambda: cluster.states()["worker1"] != "running" or cluster._supervisor.workers()[1].life.number)
        cluster.wait(timeout=250)
        assert cluster["worker1"].call(os.getpid) != before
        assert cluster["worker1"].call(os.getenv, "RANK") == "1"
        assert cluster["worker1"].call(os.getenv, "FARCALL_RESTARTS") == "1"
        assert cluster["worker1"].call(get, "weights") == 7
        assert sorted(started) == ["worker0", "worker1", "worker1"]

        # Items of a worker that dies are done again; the map goes on with those that are there, and that come back.
        items = [(number, str(tmp_path / "met") if number == 3 else None) for number in range(40)]
        assert sorted(cluster.map(square_or_die, items, ordered=False)) == [n * n for n in range(40)]
    assert (tmp_path / "worker1.log").read_text().startswith("first life\n")


def test_a_map_waits_for_its_only_worker_to_come_back(tmp_path):
    with farcall.launch(1, restart="on-failure", backoff_s=0.0, quiet=True, logs=tmp_path) as cluster:
        items = [(number, str(tmp_path / "met") if number == 0 else None) for number in range(4)]
        assert list(cluster.map(square_or_die, items)) == [0, 1, 4, 9]


def test_without_restarts_the_dead_stay_dead(tmp_path):
    with farcall.launch(2, quiet=True, logs=tmp_path) as cluster:
        os.kill(cluster["worker0"].call(os.getpid), signal.SIGKILL)
        items = [(number, None) for number in range(6)]
        assert list(cluster.map(square_or_die, items)) == [0, 1, 4, 9, 16, 25]
        wait_until(lambda: cluster.states()["worker0"] == "dead")
        assert [worker.name for worker in cluster.workers] == ["worker1"]
        with pytest.raises(LaunchFailed, match=r"(?s)1 of 2 workers are not running.*worker0 "):
            cluster.wait(timeout=250)


def test_a_start_that_fails_says_what_the_worker_said(tmp_path):
    with pytest.raises(LaunchFailed) as raised:
        farcall.launch(1, directory="/nowhere", quiet=True, logs=tmp_path)
    assert "worker0 ended with exit code 82" in str(raised.value)
    assert "Traceback (most recent call last)" in str(raised.value)
    assert "finds no directory /nowhere" in raised.value.missing["worker0"]
    farcall_again_is_possible = farcall.launch(1, quiet=True, logs=tmp_path)
    farcall_again_is_possible.shutdown()


def test_what_on_start_raises_is_the_cause(tmp_path):
    def refuse(worker):
        raise ValueError(f"{worker.name} is not welcome")

    with pytest.raises(LaunchFailed, match="ValueError: worker0 is not welcome") as raised:
        farcall.launch(1, on_start=refuse, quiet=True, logs=tmp_path)
    assert isinstance(raised.value.__cause__, ValueError)


def test_commands_find_the_workers_and_the_driver_as_one_cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["trial.py"])  # that of a pytest worker names no program
    options = farcall.RpcBackendOptions(observing=ObservingOptions(runtime_directory=str(tmp_path / "run")))
    with farcall.launch(2, options=options, quiet=True, logs=tmp_path):
        # A worker leaves its file when it meets the driver, which may have met it a moment before.
        wait_until(lambda: len(find_nodes(tmp_path / "run")) == 3)
        found = find_nodes(tmp_path / "run")
        assert len({node.cluster_id for node in found}) == 1
        assert {node.name: node.program for node in found} == {"driver": "trial.py", "worker0": "", "worker1": ""}


def test_what_fails_before_the_start_leaves_nothing(tmp_path):
    options = farcall.RpcBackendOptions(transports=["unix"])
    with pytest.raises(LaunchFailed, match='add "tcp" to the transports'):
        farcall.launch(1, options=options, quiet=True, logs=tmp_path)
    with pytest.raises(TypeError, match="neither launch nor its engine 'local' has an argument host"):
        farcall.launch(1, host="here")
    with pytest.raises(farcall.errors.NotInitialized):
        farcall.members()
    assert not MAIN.is_alone


class OnlyTheFirst(LocalEngine):
    def start(self, specs, watcher):
        if any(spec.rank for spec in specs):
            raise EngineError("the machine is full")
        super().start(specs, watcher)


def test_a_growth_that_fails_leaves_the_cluster_as_it_was(tmp_path):
    with farcall.launch(1, on=OnlyTheFirst(), quiet=True, logs=tmp_path) as cluster:
        with pytest.raises(LaunchFailed, match="the machine is full"):
            cluster.grow(2)
        assert cluster.states() == {"worker0": "running", "worker1": "ended", "worker2": "ended"}
        cluster.wait(timeout=LONG_S)
        with pytest.raises(ValueError, match="at least one worker"):
            cluster.grow(0)
        with pytest.raises(ValueError, match="quorum must be from 1 to 1"):
            cluster.grow(1, quorum=2)
        cluster.shrink(0)
        assert cluster.states()["worker0"] == "ended"
    with pytest.raises(farcall.errors.RpcError, match="start another one"):
        cluster.grow()


def test_a_port_that_was_chosen(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(farcall.errors.RpcError, match=r"cannot listen on port .*: is it taken"),
    ):
        farcall.launch(1, port=taken.getsockname()[1], quiet=True, logs=tmp_path)
    port = free_ports(1)
    with farcall.launch(1, port=port, quiet=True, logs=tmp_path) as cluster:
        assert f"tcp://127.0.0.1:{port}" in current_runtime().addresses
        assert cluster[0].call(os.getenv, "LOCAL_RANK") == "0"


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True

    def shown(self):
        return self.buffer.getvalue()


BAR = b"\x1b[K[....................] 0 of 2 workers run; worker0: pending in the queue: Priority\r"


class Queue:
    """An engine whose queue does not move; somebody sees that, and cancels what waits."""

    driver_host = "127.0.0.1"

    def __init__(self, screen):
        self._screen = screen

    def start(self, specs, watcher):
        for spec in specs:
            watcher.on_state(spec, ProcessState("queued", "pending in the queue:\n Priority"))
        self._person = threading.Thread(target=self._look, args=(specs, watcher))
        self._person.start()

    def _look(self, specs, watcher):
        wait_until(lambda: BAR in self._screen.shown())
        for spec in specs:
            watcher.on_state(spec, ProcessState("ended", "cancelled"))

    def end(self, specs):
        pass

    def close(self):
        self._person.join()


def test_a_start_that_takes_long_shows_who_is_missing(monkeypatch):
    screen = Terminal(io.BytesIO(), write_through=True)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.0)
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(LaunchFailed, match=r"2 of 2 workers are not running:\nworker0 ended \(cancelled\)\nworker1 "):
        farcall.launch(2, on=Queue(screen))
    assert screen.shown().endswith(b"\r\x1b[K\r")  # nothing of it is left


class HalfAnEngine:
    """Starts those of even rank only; says of the others that they wait in a queue."""

    driver_host = "127.0.0.1"

    def __init__(self):
        self._inner = LocalEngine()

    def start(self, specs, watcher):
        self._inner.start([spec for spec in specs if spec.rank % 2 == 0], watcher)
        for spec in specs:
            if spec.rank % 2:
                watcher.on_state(spec, ProcessState("queued", "queued: Priority"))

    def end(self, specs):
        self._inner.end(specs)

    def close(self):
        self._inner.close()


def test_a_quorum_is_enough_and_late_ones_are_told_of(tmp_path):
    with farcall.launch(2, on=HalfAnEngine(), quorum=1, quiet=True, logs=tmp_path) as cluster:
        assert cluster["worker0"].call(os.getenv, "RANK") == "0"
        assert cluster.states() == {"worker0": "running", "worker1": "starting"}
        with pytest.raises(
            LaunchFailed, match=r"1 of 2 workers are not running within 0\.01 s:\nworker1 queued: Priority"
        ):
            cluster.wait(timeout=0.01)


def test_wrong_arguments_are_refused():
    for arguments, text in (
        ({"workers": 0}, "at least one"),
        ({"workers": 2, "quorum": 3}, "quorum must be from 1 to 2"),
        ({"workers": 1, "restart": "always"}, "restart must be"),
        ({"workers": 1, "on": "abacus"}, "on must be one of 'local'"),
    ):
        with pytest.raises(ValueError, match=text):
            farcall.launch(**arguments)


def test_a_second_launch_in_one_program_is_refused_while_the_first_lives(tmp_path):
    with farcall.launch(1, quiet=True, logs=tmp_path) as first:
        with pytest.raises(
            farcall.errors.RpcError, match="already initialized in this process, as 'driver': call shut"
        ):
            farcall.launch(1)
        with pytest.raises(farcall.errors.RpcError, match="already initialized in this process, as 'worker0'"):
            first[0].call(farcall.launch, 1)


def test_the_thread_that_launched_may_end(tmp_path):
    with ThreadPoolExecutor(1) as elsewhere:
        launched = elsewhere.submit(farcall.launch, 1, quiet=True, logs=tmp_path).result()
    with launched:
        assert launched[0].call(len, "four") == 4
