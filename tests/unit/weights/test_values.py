"""Values that are no tensors: read when they are asked for, under the rules of `farcall.allow`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from farcall.errors import NotAllowed, NotPicklable
from farcall.protocol.weights.messages import Claim, Key
from farcall.serialize import Allowance, restrict
from farcall.weights.layout import take_apart
from farcall.weights.manifest import Layout, Manifest, decode_manifest, encode_manifest
from farcall.weights.publication import _encode_values
from farcall.weights.version import HeldVersion

MADE: list[str] = []


class Config:
    def __setstate__(self, state: object) -> None:
        MADE.append("made")

    def __getstate__(self) -> object:
        return {"x": 1}


@pytest.fixture
def restricted() -> Iterator[None]:
    restrict(Allowance([torch.add], []))
    yield
    restrict(None)


def version(values: dict[str, object]) -> HeldVersion:
    leaves = take_apart(values)
    layout = Layout([], [], list(leaves.containers.items()), list(leaves.values))
    data = encode_manifest(Manifest([], layout, [], *_encode_values(leaves)))
    return HeldVersion(Key(Claim(1, 1), 1), decode_manifest(data))


@pytest.mark.usefixtures("restricted")
def test_plain_values_need_no_allowance() -> None:
    values = {"step": 3, "name": "policy", "sizes": [1, 2.5, None], "nested": {"flag": True}}
    assert version(values).nested([]) == values


@pytest.mark.usefixtures("restricted")
def test_others_are_refused_unless_the_program_names_them() -> None:
    MADE.clear()
    with pytest.raises(NotAllowed):
        version({"config": Config()}).nested([])
    assert MADE == []


def test_nothing_is_read_before_it_is_asked_for() -> None:
    MADE.clear()
    held = version({"config": Config()})
    assert MADE == []
    assert isinstance(held.nested([])["config"], Config)
    assert MADE == ["made"]


def test_a_program_that_changes_what_it_got_changes_no_version() -> None:
    values = {"sizes": [1, 2], "pairs": ((1, [2]),), "step": 3}
    held = version(values)
    got = held.nested([])
    got["sizes"].append(3)
    got["pairs"][0][1].clear()
    assert held.nested([]) == values


def test_values_that_nobody_can_change_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"step": 3, "places": ((4, 5), (0, 0)), "name": "policy"}
    held = version(values)
    assert held.nested([]) == values
    monkeypatch.setattr("farcall.weights.version.read_value", None)
    assert held.nested([]) == values


def test_one_that_cannot_be_pickled_is_named_by_its_path() -> None:
    leaves = take_apart({"step": 3, "a": {"b": threading.Lock()}, "t": torch.ones(1)})
    with pytest.raises(NotPicklable, match=r"^cannot publish a\.b: cannot send the value, a _thread\.lock: TypeError"):
        _encode_values(leaves)
