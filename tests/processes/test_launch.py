"""Workers from one program: called, watched, replaced and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.kit.launching import runs
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import LaunchFailed, NetworkError, UnknownWorker
from farcall.launcher.engine import ProcessState
from farcall.launcher.local import LocalEngine

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


def test_calls_names_growth_and_the_end(capsys, tmp_path):
    with farcall.launch(2, environment={"COLOUR": "blue"}) as cluster:
        assert [worker.name for worker in cluster.workers] == ["worker0", "worker1"]
        assert cluster["worker1"].call(os.getenv, "RANK") == cluster[1].call(os.getenv, "RANK") == "1"
        assert cluster["worker0"].call(os.getenv, "COLOUR") == "blue"
        assert cluster["worker0"].call(os.getcwd) == os.getcwd()
        assert [member.name for member in farcall.members()] == ["worker0", "worker1", "driver"]
        with pytest.raises(UnknownWorker, match="there are worker0, worker1"):
            cluster["worker7"]
        cluster["worker0"].call(print, "written there")
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
        with pytest.raises(LaunchFailed, match=r"(?s)1 of 2 workers do not run.*worker0 "):
            cluster.wait(timeout=250)


def test_a_start_that_fails_says_what_the_worker_said(tmp_path):
    with pytest.raises(LaunchFailed) as raised:
        farcall.launch(1, directory="/nowhere", quiet=True, logs=tmp_path)
    assert "worker0 ended with exit code 82" in str(raised.value)
    assert "Traceback (most recent call last)" in str(raised.value)
    assert "no working directory /nowhere" in raised.value.missing["worker0"]
    farcall_again_is_possible = farcall.launch(1, quiet=True, logs=tmp_path)
    farcall_again_is_possible.shutdown()


def test_what_on_start_raises_is_the_cause(tmp_path):
    def refuse(worker):
        raise ValueError(f"{worker.name} is not welcome")

    with pytest.raises(LaunchFailed, match="ValueError: worker0 is not welcome") as raised:
        farcall.launch(1, on_start=refuse, quiet=True, logs=tmp_path)
    assert isinstance(raised.value.__cause__, ValueError)


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
        with pytest.raises(LaunchFailed, match=r"1 of 2 workers do not run within 0\.01 s:\nworker1 queued: Priority"):
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


PROGRAM = """
import os, sys, time
import farcall
import torch

def forever():  # without letting anybody else have the interpreter
    x = 3 ** 100_000
    while True:
        x ** 200

class Doubler:
    def __init__(self, factor):
        self.factor = factor
    def double(self, x):
        return self.factor * x

if __name__ == "__main__":
    with farcall.launch(2) as cluster:
        assert cluster["worker0"].create(Doubler, 2).rpc_sync().double(21) == 42  # of __main__: by value
        print("PIDS", *(worker.call(os.getpid) for worker in cluster), flush=True)
        cluster["worker0"].start(forever)
        exec(sys.argv[1])
"""


@pytest.mark.parametrize("end", ["signal.SIGKILL", "signal.SIGINT", "raise ValueError('mine')", "os._exit(3)"])
def test_no_worker_outlives_its_driver(end, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    number = getattr(signal, end.removeprefix("signal."), None)
    driver = subprocess.Popen(
        [sys.executable, "program.py", end if number is None else "time.sleep(600)"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout is not None
        line = ""
        while not line.startswith("PIDS"):
            line = driver.stdout.readline()
            assert line, driver.communicate()
        processes = [int(text) for text in line.split()[1:]]
        if number is not None:
            driver.send_signal(number)
        said = driver.communicate(timeout=250)[1]
    assert driver.returncode != 0
    if end.startswith("raise"):
        assert said.rstrip().endswith("ValueError: mine")
    wait_until(lambda: not any(runs(process) for process in processes), "the end of the workers")


SHIPPED = """
import os
import farcall
import mine

with farcall.launch(2, ship=True) as cluster:
    for worker in cluster:
        assert worker.call(mine.where) == worker.call(os.getcwd) + "/mine.py" != mine.where(), worker.call(mine.where)
        assert sorted(worker.call(os.listdir)) == [".gitignore", "data", "mine.py", "program.py"]
    assert cluster[0].call(os.getcwd) == cluster[1].call(os.getcwd)
    print(cluster[0].call(os.getcwd))
"""


@pytest.mark.timeout(600)
def test_the_working_directory_is_shipped_once(tmp_path):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "data").mkdir(parents=True)
    elsewhere.mkdir()
    (project / "data" / "table.txt").write_text("1 2 3")
    (project / "program.py").write_text(SHIPPED)
    (project / "mine.py").write_text("def where():\n    return __file__\n")
    (project / ".gitignore").write_text("*.large\n__pycache__\n")
    (project / "weights.large").write_text("not sent")

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=project,
            env={**os.environ, "XDG_RUNTIME_DIR": str(elsewhere), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split()[0]

    first = Path(run())
    assert first.parent == elsewhere / "farcall" / "parcels"
    assert first.parent.stat().st_mode & 0o077 == 0
    made = (first / "mine.py").stat()
    assert Path(run()) == first
    assert (first / "mine.py").stat() == made  # it was there: not sent again


def test_a_second_launch_in_one_program_is_refused_while_the_first_lives(tmp_path):
    refused = pytest.raises(farcall.errors.RpcError, match="already initialized")
    with farcall.launch(1, quiet=True, logs=tmp_path), refused:
        farcall.launch(1)
