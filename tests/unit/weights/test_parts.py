"""Subscriptions to weights in parts: what is loaded is whole, and what has arrived is not waited for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from farcall.weights.parts import PartsSubscription
from farcall.weights.version import Version


class Source:
    """A part whose versions the test pushes; ``on_look`` runs after somebody has looked at its newest one."""

    def __init__(self, tensors: dict[str, torch.Tensor], layout: dict[str, Any]) -> None:
        self.value = {"tensors": tensors, "layout": layout, "values": {}}
        self.versions: list[Version] = []
        self.on_look: list[Callable[[], None]] = []

    @property
    def version(self) -> Version | None:
        found = self.versions[-1] if self.versions else None
        if self.on_look:
            self.on_look.pop()()
        return found

    def push(self) -> None:
        self.versions.append(Version(1, len(self.versions) + 1))

    def get(self, version: Version) -> Any:
        return self.value

    def _reading(self, version: Version) -> AbstractContextManager[Any]:
        """A version in memory that nobody shares."""
        return nullcontext(SimpleNamespace(blocks=[], tensors=lambda views: None, nested=lambda tensors: self.value))

    _twins: ClassVar[None] = None  # all is on the host

    def wait(self, newer_than: Version | None, timeout: float | None) -> Version:
        assert self.versions, "it would wait"
        assert newer_than is None or self.versions[-1] > newer_than, f"it would wait for one newer than {newer_than}"
        return self.versions[-1]

    def _deadline(self, timeout: float) -> tuple[float, float]:
        return float("inf"), timeout


def rows(start: int, stop: int, of: int = 10, dtype: torch.dtype = torch.float32) -> Source:
    return Source({"x": torch.arange(start, stop, dtype=dtype)}, {"x": ((of,), (start,))})


def subscription(*parts: Source) -> PartsSubscription:
    return PartsSubscription("policy", parts)  # type: ignore[arg-type]


def test_a_part_that_arrives_between_two_looks_is_not_waited_for() -> None:
    first, second = rows(0, 5), rows(5, 10)
    first.push()
    second.on_look.append(second.push)  # its newest version was looked at, and then there is another one
    assert subscription(first, second).wait(timeout=5.0) == Version(1, 1)


def test_parts_that_overlap_and_leave_a_hole_are_not_loaded() -> None:
    parts = [rows(0, 6), rows(4, 8)]  # ten elements, two of them twice; the last two are nowhere
    for part in parts:
        part.push()
    target = {"x": torch.full((10,), -1.0)}
    with pytest.raises(ValueError, match="some of them twice; nothing was loaded"):
        subscription(*parts).load_into(target)
    assert target["x"].eq(-1).all()


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (torch.full((10,), -1, dtype=torch.int64), "is of torch.float32"),
        (torch.full((1,), -1.0).expand(10), "is expanded"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(target: torch.Tensor, why: str) -> None:
    part = rows(0, 10)
    part.push()
    with pytest.raises(ValueError, match=f"nothing was loaded: x {why}|nothing was loaded: x of the target {why}"):
        subscription(part).load_into({"x": target})
    assert target.eq(-1).all()


def test_tensors_of_both_kinds_are_loaded() -> None:
    parts = [rows(0, 5), rows(5, 10)]
    for part in parts:
        part.push()
    with torch.inference_mode():
        target = torch.zeros(10)
    subscription(*parts).load_into({"x": target})
    assert target.tolist() == list(range(10))
