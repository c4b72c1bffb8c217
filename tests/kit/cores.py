"""Two cores joined by a connection, with workers: what `tests/core` drives."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any

import pytest
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

from farcall.core import compiled, plain
from farcall.core.contract import (
    CONTROL,
    FAILURE,
    LARGE_BYTES,
    LETTER,
    MARKED,
    REQUEST,
    RESPONSE,
    Arrived,
    Core,
    CoreError,
    Stopped,
)

HEADER = struct.Struct("<2sBBIQQIIII")
ENTRY = struct.Struct("<QQQ")
VERSION = 3


def frame(
    kind: int,
    function: bytes = b"",
    payload: bytes = b"",
    *,
    flags: int = 0,
    number: int = 0,
    notes: bytes = b"",
    buffers: Sequence[Any] = (),
) -> tuple[bytes, list[memoryview]]:
    """A frame as `Core.post` takes it. A tuple among the buffers is a ticket."""
    head = [HEADER.pack(b"fc", VERSION, kind, flags, number, len(payload), len(function), len(notes), len(buffers), 0)]
    head += [ENTRY.pack(*each) if isinstance(each, tuple) else ENTRY.pack(len(each), 0, 0) for each in buffers]
    parts = [function, notes, payload, *(each for each in buffers if not isinstance(each, tuple))]
    pieces: list[memoryview] = []
    for part in parts:
        if len(part) >= LARGE_BYTES or pieces:
            pieces.append(memoryview(part))
        else:
            head.append(bytes(part))
    return b"".join(head), pieces


def request(function: bytes = b"echo", payload: bytes = b"", **fields: Any) -> tuple[bytes, list[memoryview]]:
    return frame(REQUEST, function, payload, **fields)


def implementation(name: str) -> Callable[..., Core]:
    make: Callable[..., Core] | None = compiled() if name == "compiled" else plain.Core
    if make is None:
        pytest.skip("the compiled core was not built here")
    return make


def connected(family: str) -> tuple[int, int]:
    """The two ends of a connection, which nobody else closes."""
    if family == "unix":
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ends = socket.create_connection(listener.getsockname()), listener.accept()[0]
    for end in ends:
        end.setblocking(False)
        if family == "tcp":
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ends[0].detach(), ends[1].detach()


class Side:
    """One core, its link, its workers, and what they and its event thread were given."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.link = core.open_link()
        self.lock = threading.Condition()
        self.came: list[Any] = []
        self.news: list[Arrived] = []
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        self.gate = threading.Event()
        """Open: requests for `hold` end."""

    def start(self, run: Callable[..., object], *args: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                run(*args)
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        self.threads.append(thread)
        return thread

    def serve(self, count: int = 1, handle: Callable[[Any], None] | None = None) -> None:
        """Start workers: each does what `handle` says, else the usual."""
        for _ in range(count):
            self.start(self._work, handle or self.handle)

    def _work(self, handle: Callable[[Any], None]) -> None:
        try:
            while (arrived := self.core.next()) is not None:
                handle(arrived)
        except Stopped:
            pass

    def handle(self, arrived: Any) -> None:
        """Place it, run it, answer it."""
        with self.lock:
            self.came.append(arrived)
            self.lock.notify_all()
        if not isinstance(arrived, tuple):
            return
        came: Any = arrived
        if came.handle is not None:
            self.core.placed(came.handle)
        if came.kind in (RESPONSE, FAILURE):
            self.core.settle(came.number, ("settled", bytes(came.payload)))
        if came.kind != REQUEST:
            return
        if came.function == b"hold":
            self.gate.wait(LONG_S)
        try:
            self.answer(came)
        except CoreError:
            pass

    def answer(self, came: Any, kind: int = 0, flags: int = 0) -> None:
        """The payload and buffers of a request go back."""
        kind = kind or (FAILURE if came.function == b"fail" else RESPONSE)
        head, pieces = frame(kind, b"", came.payload, flags=flags, buffers=came.buffers)
        self.core.answer(came.link, came.number, head, pieces)

    def of_kind(self, *kinds: int) -> list[Any]:
        with self.lock:
            return [each for each in self.came if isinstance(each, tuple) and each.kind in kinds]  # type: ignore[attr-defined]

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(condition)

    def event(self, kind: int) -> Arrived:
        """Wait for news of this kind; others are kept."""
        end = monotonic() + LONG_S
        while True:
            self.news += self.core.events()
            for each in self.news:
                if each.kind == kind:
                    self.news.remove(each)
                    return each
            assert monotonic() < end, f"no news {kind}: {self.news}"
            wait_for_bell(self.core)

    def call(self, function: bytes = b"echo", payload: bytes = b"", deadline: float = inf, **fields: Any) -> Any:
        head, pieces = request(function, payload, **fields)
        return self.core.call(self.link, head, pieces, deadline)

    def post(self, function: bytes = b"echo", payload: bytes = b"", **options: Any) -> int:
        flags, buffers = options.pop("flags", 0), options.pop("buffers", ())
        head, pieces = request(function, payload, flags=flags, buffers=buffers)
        return self.core.post(self.link, head, pieces, **options)

    def letter(self, number: int, payload: bytes = b"", flags: int = MARKED, **options: Any) -> None:
        head, pieces = frame(LETTER, payload=payload, flags=flags, number=number)
        self.core.post(self.link, head, pieces, **options)

    def control(self, payload: bytes = b"", flags: int = 0, **options: Any) -> None:
        head, pieces = frame(CONTROL, payload=payload, flags=flags)
        self.core.post(self.link, head, pieces, **options)

    def end(self) -> None:
        self.gate.set()
        self.core.stop()
        for thread in self.threads:
            thread.join(LONG_S)
            assert not thread.is_alive(), "a thread did not leave the core"
        if self.errors:
            raise self.errors[0]


def wait_for_bell(core: Core) -> None:
    bell = select.poll()
    bell.register(core.fileno(), select.POLLIN)
    bell.poll(50)


class Pair:
    """``near`` calls, ``far`` serves; either may do both."""

    def __init__(self, near: Core, far: Core, family: str) -> None:
        self.near, self.far, self.family = Side(near), Side(far), family

    def admit(self) -> None:
        for side in (self.near, self.far):
            side.core.admit(side.link)

    def connect(self) -> None:
        near, far = connected(self.family)
        self.near.core.attach(self.near.link, near)
        self.far.core.attach(self.far.link, far)

    def detach(self) -> tuple[int, int]:
        """The counts of near and of far."""
        return self.near.core.detach(self.near.link), self.far.core.detach(self.far.link)

    def resume(self, replace: Callable[[bytes], bytes | None] = lambda head: None) -> int:
        """Another connection for both. Returns how many messages were lost."""
        counts = self.detach()
        lost = 0
        for side, count, end in zip((self.near, self.far), reversed(counts), connected(self.family), strict=True):
            heads = side.core.lost(side.link, count)
            lost += len(heads)
            side.core.attach(side.link, end, count, [replace(head) for head in heads])
        return lost
