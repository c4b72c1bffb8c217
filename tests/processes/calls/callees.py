"""What the tests of calls run on the workers, and how they wait."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch

import farcall

PATIENCE_S = 30.0


def whoami() -> str:
    return farcall.get_worker_info().name


def add(left: Any, right: Any = 100) -> Any:
    return left + right


def fail() -> None:
    raise ValueError("as you wish")


class Gate:
    """Opened by one call, waited for by another: a wait that the runtime cannot see."""

    events: ClassVar[dict[str, threading.Event]] = {}
    lock = threading.Lock()

    @classmethod
    def event(cls, name: str) -> threading.Event:
        with cls.lock:
            return cls.events.setdefault(name, threading.Event())

    @classmethod
    def open(cls, name: str) -> None:
        cls.event(name).set()

    @classmethod
    def wait(cls, name: str) -> str:
        assert cls.event(name).wait(PATIENCE_S), f"nobody opened {name}"
        return name

    @classmethod
    def wait_and_return(cls, name: str, count: int) -> torch.Tensor:
        cls.wait(name)
        return torch.ones(count)


def live_bytes() -> int:
    pool = farcall.api.current_runtime().pool
    return 0 if pool is None else pool.live_bytes


def descend(depth: int) -> int:
    """Back and forth between the two workers."""
    if depth == 0:
        return 0
    other = 1 - farcall.get_worker_info().id
    return 1 + farcall.rpc_sync(other, descend, (depth - 1,))
