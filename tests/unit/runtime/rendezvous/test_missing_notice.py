"""What a worker that waits for others advises its user to do."""

from __future__ import annotations

import logging

import pytest

from farcall.runtime.rendezvous import missing_notice
from farcall.runtime.rendezvous.missing_notice import MissingNotice

RUN = "On one machine, `farcall run --workers 4 PROGRAM` starts them"
ITS_LAUNCHER = "What started this one should have: see what it says of the others"
TOO_FEW = "What started this one has started 2, and the program asks for 4: make both the same"


@pytest.mark.parametrize(
    ("environment", "launched", "advice"),
    [
        ({}, False, RUN),
        ({"WORLD_SIZE": "2"}, False, RUN),
        ({}, True, ITS_LAUNCHER),
        ({"WORLD_SIZE": "4", "FARCALL_RESTARTS": "0"}, True, ITS_LAUNCHER),
        ({"WORLD_SIZE": "2", "FARCALL_RESTARTS": "0"}, True, TOO_FEW),
        ({"WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, False, ITS_LAUNCHER),  # mpirun farcall run PROGRAM
        ({"WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"}, False, ITS_LAUNCHER),  # srun farcall run PROGRAM
    ],
)
def test_the_advice_fits_what_started_the_worker(
    environment: dict[str, str],
    launched: bool,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("WORLD_SIZE", *missing_notice._LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(missing_notice, "SPEAK_AFTER_S", -1.0)
    with caplog.at_level(logging.WARNING, "farcall"):
        MissingNotice("here:1", rank=1, size=4, deadline=0.0, launched=launched).look(lambda: [3])
    assert caplog.messages == [f"rank 1 of 4 waits at here:1 for rank 3, 0 s more. Are all workers started? {advice}"]
