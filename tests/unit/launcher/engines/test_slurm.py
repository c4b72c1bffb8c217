"""Workers that wait for nodes, where Slurm refuses them, or does not say which they are."""

from __future__ import annotations

import os
from pathlib import Path
from queue import SimpleQueue

import pytest
from tests.kit.times import LONG_S

from farcall.launcher.engine import EngineError, ProcessState, WorkerSpec
from farcall.launcher.engines.slurm import SlurmEngine

ASKED = 'echo asked >> "$FOLDER/asked"'
REFUSES = f'{ASKED}; echo "salloc: error: Invalid partition"; exit 1'
GRANTS = f'{ASKED}; touch "$GRANTED/now"; echo "salloc: Granted job allocation 7"; cat; echo back >> "$FOLDER/back"'


class Watching:
    """Keeps the ends of workers."""

    def __init__(self) -> None:
        self._ends: SimpleQueue[str] = SimpleQueue()

    def on_state(self, spec: WorkerSpec, state: ProcessState) -> None:
        if state.phase == "ended":
            self._ends.put(str(state))

    def on_output(self, spec: WorkerSpec, data: bytes) -> None:
        pass

    def end(self) -> str:
        return self._ends.get(timeout=LONG_S)


def spec(rank: int) -> WorkerSpec:
    return WorkerSpec(name=f"worker{rank}", rank=rank, secret="deep", meet="farcall://driver:1")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs in the place of Slurm's; nothing answers questions."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write(tmp_path, "srun", "exit 1")
    write(tmp_path, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def times(folder: Path, what: str) -> int:
    return len((folder / what).read_text().split()) if (folder / what).exists() else 0


def test_after_a_refusal_the_next_worker_asks_again(programs: Path) -> None:
    write(programs, "salloc", REFUSES)
    engine, watching = SlurmEngine(), Watching()
    try:
        for rank in range(2):
            engine.start([spec(rank)], watching)
            assert watching.end() == "ended with exit code 1 (salloc: error: Invalid partition)"
    finally:
        engine.close()
    assert times(programs, "asked") == 2


def test_nodes_whose_names_nobody_tells_are_given_back(programs: Path) -> None:
    write(programs, "salloc", GRANTS)
    engine, watching = SlurmEngine(), Watching()
    try:
        for rank in range(2):
            engine.start([spec(rank)], watching)
            assert "Unable to contact slurm controller" in watching.end()
            assert times(programs, "back") == rank + 1
    finally:
        engine.close()


def test_a_closed_engine_asks_for_nothing(programs: Path) -> None:
    write(programs, "salloc", REFUSES)
    engine = SlurmEngine()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.start([spec(0)], Watching())
    assert times(programs, "asked") == 0
