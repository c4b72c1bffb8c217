"""The compiled core alone: two processes over a socket pair, functions named by one byte, nothing else of farcall.

    python benchmarks/core.py [measure ...]

Times are in us; `cpu` is the processor time of both processes for a call, less disturbed by other work.
"""

import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from farcall.core import compiled
from farcall.core.contract import REQUEST, RESPONSE

HEADER = struct.Struct("<2sBBIQQIIII")
WORKERS, SECONDS = 16, 0.3


def frame(kind: int, function: bytes = b"", payload: bytes = b"") -> bytes:
    return HEADER.pack(b"fc", 3, kind, 0, 0, len(payload), len(function), 0, 0, 0) + function + payload


class Node:
    """One core with a link for each of its sockets; calls go over the first."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self.core: Any = compiled()()
        for each in sockets:
            self.link = self.core.open_link()
            self.core.admit(self.link)
            self.core.attach(self.link, each.detach())

    def call(self, body: bytes) -> bytes:
        return bytes(self.core.call(self.link, frame(REQUEST, body[:1], body[1:])).payload)

    def post(self, body: bytes) -> int:
        return int(self.core.post(self.link, frame(REQUEST, body[:1], body[1:])))

    def serve(self) -> None:
        while (came := self.core.next()) is not None:
            answer = run(self, came.function + came.payload)
            self.core.answer(came.link, came.number, frame(RESPONSE, b"", answer))

    def start_workers(self) -> None:
        for _ in range(WORKERS):
            threading.Thread(target=self.serve, daemon=True).start()


def run(node: Node, body: bytes) -> bytes:
    """What a request asks for: n nothing, s sleep, d call back to a depth, c compute beside, u what was used."""
    match body[:1]:
        case b"s":
            time.sleep(int(body[1:]) * 1e-6)
        case b"d" if int(body[1:]) > 0:
            node.call(b"d%d" % (int(body[1:]) - 1))
        case b"c":
            threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
        case b"u":
            used = resource.getrusage(resource.RUSAGE_SELF)
            return b"%r %d" % (used.ru_utime + used.ru_stime, used.ru_nvcsw)
    return b""


def used(node: Node) -> list[float]:
    """Processor time in seconds and switches of context: here, there."""
    return [float(each) for each in (run(node, b"u") + b" " + node.call(b"u")).split()]


def window(node: Node, size: int) -> None:
    for number in [node.post(b"n") for _ in range(size)]:
        node.core.wait(number)


def timed(node: Node, once: Callable[[], object], calls: int = 1) -> str:
    for _ in range(20):
        once()
    times: list[float] = []
    before, end = used(node), time.perf_counter() + SECONDS
    while (start := time.perf_counter()) < end:
        once()
        times.append((time.perf_counter() - start) / calls * 1e6)
    after = used(node)
    times.sort()
    cpu = (after[0] - before[0] + after[2] - before[2]) / len(times) / calls * 1e6
    return f"p50 {times[len(times) // 2]:8.1f}  p99 {times[int(len(times) * 0.99)]:8.1f}  cpu {cpu:7.2f}"


def measured(name: str) -> str:
    near, pid = pair()
    node = Node(near)
    if name == "beside a sleeper":
        node.post(b"s%d" % (4e6 * SECONDS))
    elif name.startswith("beside a thread"):
        node.call(b"c")
    if name == "idle":
        time.sleep(SECONDS)  # its threads begin
        before, _, after = used(node), time.sleep(4 * SECONDS), used(node)
        line = f"switches of context here {after[1] - before[1]:.0f}, there {after[3] - before[3]:.0f}"
    elif name == "nested to 5":
        node.start_workers()
        line = timed(node, lambda: node.call(b"d5"))
    elif name.endswith("64 in flight"):
        line = timed(node, lambda: window(node, 64), 64)
    else:
        line = timed(node, lambda: node.call(b"n"))
    os.kill(pid, 9)
    return line


def pair(callers: int = 1) -> tuple[list[socket.socket], int]:
    """This process's ends of ``callers`` sockets, and the process that serves the others."""
    ends = [socket.socketpair() for _ in range(callers)]
    if not (pid := os.fork()):
        Node([far for _, far in ends]).start_workers()
        threading.Event().wait()
    return [near for near, _ in ends], pid


def eight() -> str:
    """Processes that call one, each with 8 in flight."""
    near, pid = pair(8)
    out, into = os.pipe()
    callers = []
    for each in near:
        callers.append(os.fork())
        if not callers[-1]:
            node = Node([each])
            before, end, made = used(node), time.perf_counter() + SECONDS, 0
            while time.perf_counter() < end:
                window(node, 8)
                made += 8
            after = used(node)
            os.write(into, b"%d %r %r\n" % (made, after[0] - before[0], after[2] - before[2]))
            os._exit(0)
    for caller in callers:
        os.waitpid(caller, 0)
    os.kill(pid, 9)
    told = [[float(each) for each in line.split()] for line in os.read(out, 4096).splitlines()]
    made, here, there = sum(each[0] for each in told), sum(each[1] for each in told), max(each[2] for each in told)
    return f"{made / SECONDS:8.0f} calls/s  cpu caller {here / made * 1e6:.2f} callee {there / made * 1e6:.2f}"


ALL = (
    "no-op",
    "64 in flight",
    "nested to 5",
    "beside a sleeper",
    "beside a thread",
    "beside a thread, 64 in flight",
    "idle",
)

if __name__ == "__main__":
    for name in sys.argv[1:] or [*ALL, "8 callers"]:
        print(f"{name:30} {eight() if name == '8 callers' else measured(name)}", flush=True)
