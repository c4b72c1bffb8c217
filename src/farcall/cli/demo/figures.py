"""What the demo measured, as plain values: made by trainers, collected in `play`, drawn in `picture`, kept as JSON.

All times are seconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import fmean, median

__all__ = ["OPERATIONS", "Death", "Figures", "Outage", "Report", "Step", "latency_s"]

OPERATIONS = ("forward on server0", "forward on server1", "backward through both", "optimizer step on both")
"""The remote parts of a training step, in their order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one trainer."""

    trainer: str
    begun_s: float
    loss: float
    took_s: tuple[float, ...]
    """How long each of `OPERATIONS` took."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A trainer's step failed, and it had to find the server anew."""

    trainer: str
    begun_s: float
    ended_s: float
    error: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a trainer did in a round."""

    steps: list[Step]
    outages: list[Outage]


@dataclass(slots=True)
class Death:
    """Of the server that is killed; each moment is zero until it has come."""

    worker: str
    after_steps: int = 0
    saved_steps: int = 0
    """How many steps its checkpoint knew of."""
    killed_s: float = 0.0
    noticed_s: float = 0.0
    back_s: float = 0.0


@dataclass(slots=True)
class Figures:
    """Of a whole run."""

    begun_s: float
    death: Death
    steps: list[Step] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    accuracy: float = 0.0
    """The share of points held out that are put on the right spiral."""
    grid: list[list[float]] = field(default_factory=list)
    """What the model says of the square, row by row from the top: how probably each place is on the second spiral."""
    missing_in_trace: dict[str, str] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        self.steps += report.steps
        self.outages += report.outages

    def loss_at_first(self) -> float:
        return self._mean_loss(slice(None, self._tenth()))

    def loss_at_last(self) -> float:
        return self._mean_loss(slice(-self._tenth(), None))

    def _tenth(self) -> int:
        return max(1, len(self.steps) // 10)

    def _mean_loss(self, which: slice) -> float:
        return fmean(step.loss for step in sorted(self.steps, key=lambda step: step.begun_s)[which])

    def as_json(self) -> str:
        return json.dumps({"operations": OPERATIONS, **asdict(self)}, indent=1) + "\n"


def latency_s(steps: list[Step], operation: int) -> tuple[float, float]:
    """Median and 99th percentile of one of `OPERATIONS`."""
    ordered = sorted(step.took_s[operation] for step in steps)
    return median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
