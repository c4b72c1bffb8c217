"""An error about code by value names the function, and what in it cannot be sent."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kit.values import encode

import farcall
from farcall.errors import NotPicklable
from farcall.serialize import code

pytest.importorskip("cloudpickle")

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def code_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "is_available", lambda: True)


def with_a_global() -> Any:
    names: dict[str, Any] = {"__name__": "__main__", "LOCK": LOCK, "torch": torch, "weight": torch.ones(2)}
    exec("def train():\n    with LOCK:\n        return torch.add(weight, 1)", names)
    return names["train"]


def with_a_callee() -> Any:
    names: dict[str, Any] = {"__name__": "__main__", "LOCK": LOCK}
    exec("def guard():\n    return LOCK\ndef train(again=True):\n    return guard() or train(False)", names)
    return names["train"]


def with_a_closure() -> Any:
    lock, number = threading.Lock(), 3

    def train() -> Any:
        return lock, number

    return train


def with_defaults() -> Any:
    def train(x: int, *, lock: Any = LOCK) -> Any:
        return lock

    return train


def with_an_attribute() -> Any:
    def train() -> None: ...

    train.lock = LOCK  # type: ignore[attr-defined]
    return train


def with_a_class() -> Any:
    class Model:
        lock = LOCK

    return Model


def with_a_method() -> Any:
    names: dict[str, Any] = {"__name__": "__main__", "LOCK": LOCK}
    exec("class Model:\n    def train(self):\n        return LOCK", names)
    return names["Model"]


def with_a_batch() -> Any:
    names: dict[str, Any] = {"__name__": "__main__", "LOCK": LOCK, "batched": farcall.batched()}
    exec("@batched\ndef train(xs):\n    return LOCK", names)
    return names["train"]


def with_a_batched_method() -> Any:
    names: dict[str, Any] = {"__name__": "__main__", "LOCK": LOCK, "batched": farcall.batched()}
    exec("class Model:\n    @batched\n    def train(self, xs):\n        return LOCK", names)
    return names["Model"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (with_a_global, "train() by value: its global LOCK, a _thread.lock,"),
        (with_a_callee, "train() by value: the global LOCK of guard(), a _thread.lock,"),
        (with_a_closure, "train() by value: its closure's variable lock, a _thread.lock,"),
        (with_defaults, "train() by value: its default lock, a _thread.lock,"),
        (with_an_attribute, "train() by value: its attribute lock, a _thread.lock,"),
        (with_a_class, "Model by value: its attribute lock, a _thread.lock,"),
        (with_a_batch, "train() by value: its global LOCK, a _thread.lock,"),
        (with_a_batched_method, "the class Model by value: the global LOCK of Model.train(), a _thread.lock,"),
        (with_a_method, "the class Model by value: the global LOCK of Model.train(), a _thread.lock,"),
    ],
)
@pytest.mark.parametrize("place", [lambda value: value, lambda value: {"key": [value]}])
def test_an_error_names_the_part(make: Callable[[], Any], told: str, place: Callable[[Any], Any]) -> None:
    with pytest.raises(NotPicklable, match=re.escape(told) + r" cannot be pickled .*put it into a module") as raised:
        encode(place(make()))
    assert str(raised.value).startswith("cannot send ")
