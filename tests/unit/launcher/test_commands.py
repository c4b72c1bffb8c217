"""What an engine of commands does where its threads and processes are quicker than expected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.kit.launching import Watching
from tests.kit.waiting import wait_until

from farcall.launcher.commands import CommandEngine
from farcall.launcher.engine import ProcessState, WorkerSpec, how_it_ended


def test_waking_a_thread_that_has_just_ended() -> None:
    engine = CommandEngine()
    reading, engine._wake_write = os.pipe()
    os.close(reading)
    try:
        engine._wake()
    finally:
        os.close(engine._wake_write)


class Slow(Watching):
    """Takes its time to hear that a process runs: the process ends meanwhile."""

    def on_state(self, spec: WorkerSpec, state: ProcessState) -> None:
        if state.phase == "running":
            with pytest.raises(AssertionError):
                wait_until(lambda: bool(self.states[spec]), "its end is told", 1.0)
        super().on_state(spec, state)


class Quick(CommandEngine):
    def command(self, spec: WorkerSpec) -> list[str]:
        return ["true"]


def test_a_process_runs_before_it_has_ended() -> None:
    engine, watching = Quick(), Slow()
    spec = WorkerSpec(name="worker0", rank=0, secret="", meet="")
    another = WorkerSpec(name="worker1", rank=1, secret="", meet="")
    try:
        engine.start([another], Watching())  # so that the thread is awake
        engine.start([spec], watching)
        wait_until(lambda: watching.is_over(spec))
    finally:
        engine.close()
    assert [state.phase for state in watching.states[spec]] == ["running", "ended"]


def test_signals_without_a_name() -> None:
    assert how_it_ended(-signal.SIGKILL) == "was ended by SIGKILL"
    assert how_it_ended(-40) == "was ended by signal 40"
    assert how_it_ended(3) == "ended with exit code 3"


def test_workers_do_not_import_from_where_they_happen_to_begin() -> None:
    spec = WorkerSpec(name="worker0", rank=0, secret="", meet="")
    assert spec.command[1:] == ("-P", "-m", "farcall.launcher.worker")


def test_the_server_that_forks_starts_before_torch_is_loaded() -> None:
    program = "import sys, farcall.launcher.launch, farcall.launcher.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0
