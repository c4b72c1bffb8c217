"""The compiled core alone: two processes over a socket pair, functions named by one byte, nothing else of farcall.

    python benchmarks/core.py [--workers 16] [--seconds 0.5] [--plain] [measure ...]

Times are in us; `cpu` is the processor time of both processes for a call, less disturbed by other work.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from farcall.core import compiled, plain
from farcall.core.contract import REQUEST, RESPONSE

HEADER = struct.Struct("<2sBBIQQIIII")


def frame(kind: int, function: bytes = b"", payload: bytes = b"") -> bytes:
    return HEADER.pack(b"fc", 3, kind, 0, 0, len(payload), len(function), 0, 0, 0) + function + payload


class Node:
    """One core with one link for each of its sockets."""

    def __init__(self, core: Any, sockets: list[socket.socket]) -> None:
        self.core = core
        self.links = [core.open_link() for _ in sockets]
        for link, each in zip(self.links, sockets, strict=True):
            core.admit(link)
            core.attach(link, each.detach())

    def call(self, body: bytes) -> bytes:
        return bytes(self.core.call(self.links[0], frame(REQUEST, body[:1], body[1:])).payload)

    def post(self, body: bytes) -> int:
        return int(self.core.post(self.links[0], frame(REQUEST, body[:1], body[1:])))

    def wait(self, number: int) -> None:
        self.core.wait(number)

    def serve(self) -> None:
        core = self.core
        while (came := core.next()) is not None:
            if came.kind != REQUEST:  # an answer that lay for too long
                core.settle(came.number, came)
            else:
                core.answer(came.link, came.number, frame(RESPONSE, b"", run(self, came.function + came.payload)))

    def start_workers(self, count: int) -> None:
        for _ in range(count):
            threading.Thread(target=self.serve, daemon=True).start()


computing = threading.Event()


def compute() -> None:
    while computing.is_set():
        pass


def run(node: Node, body: bytes) -> bytes:
    """What a request asks for: n nothing, s sleep, d call back to a depth, c compute beside, u what was used."""
    match body[:1]:
        case b"s":
            time.sleep(int(body[1:]) * 1e-6)
        case b"d" if int(body[1:]) > 0:
            node.call(b"d%d" % (int(body[1:]) - 1))
        case b"c":
            computing.set() if body[1:] == b"1" else computing.clear()
            threading.Thread(target=compute, daemon=True).start()
        case b"u":
            used = resource.getrusage(resource.RUSAGE_SELF)
            return repr((used.ru_utime + used.ru_stime, used.ru_nvcsw)).encode()
    return b""


def used(node: Node) -> list[float]:
    """Processor time in seconds and switches of context: here, there."""
    return [*eval(run(node, b"u")), *eval(node.call(b"u"))]


def measure(node: Node, once: Callable[[], object], seconds: float, calls: int = 1) -> str:
    for _ in range(20):
        once()
    times: list[float] = []
    before, end = used(node), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        once()
        times.append(time.perf_counter() - start)
    after = used(node)
    times.sort()
    cpu = (after[0] - before[0] + after[2] - before[2]) / len(times) / calls
    middle, late = times[len(times) // 2] / calls, times[int(len(times) * 0.99)] / calls
    return f"p50 {middle * 1e6:8.1f}  p99 {late * 1e6:8.1f}  cpu {cpu * 1e6:7.2f}"


def window(node: Node, size: int) -> None:
    for number in [node.post(b"n") for _ in range(size)]:
        node.wait(number)


def beside_a_sleeper(node: Node, seconds: float) -> str:
    number = node.post(b"s%d" % (2e6 * seconds))
    line = measure(node, lambda: node.call(b"n"), seconds)
    node.wait(number)
    return line


def beside_a_computer(node: Node, seconds: float) -> str:
    node.call(b"c1")
    one = measure(node, lambda: node.call(b"n"), seconds)
    many = measure(node, lambda: window(node, 64), seconds, 64)
    node.call(b"c0")
    return f"{one} | 64: {many}"


def idle(node: Node, seconds: float) -> str:
    node.call(b"n")
    time.sleep(0.1)
    before = used(node)
    time.sleep(4 * seconds)
    after = used(node)
    return f"switches of context here {after[1] - before[1]:.0f}, there {after[3] - before[3]:.0f}"


MEASURES: dict[str, Callable[[Node, float], str]] = {
    "no-op": lambda node, seconds: measure(node, lambda: node.call(b"n"), seconds),
    "64 in flight": lambda node, seconds: measure(node, lambda: window(node, 64), seconds, 64),
    "nested to 5": lambda node, seconds: measure(node, lambda: node.call(b"d5"), seconds),
    "beside a sleeper": beside_a_sleeper,
    "beside a thread that computes": beside_a_computer,
    "idle": idle,
}


def pair(make: Callable[[list[socket.socket]], Any], workers: int, callers: int = 1) -> tuple[Any, int]:
    """This process's ends of ``callers`` sockets, and the process that serves the others."""
    ends = [socket.socketpair() for _ in range(callers)]
    if pid := os.fork():
        return [near for near, _ in ends], pid
    make([far for _, far in ends]).start_workers(workers)
    threading.Event().wait()
    raise AssertionError


def eight(make: Callable[[list[socket.socket]], Any], workers: int, seconds: float, callers: int = 8) -> str:
    """Processes that call one, each with 8 in flight: calls a second, and the callee's processor time."""
    near, served = pair(make, workers, callers)
    ends = []
    for each in near:
        out, into = os.pipe()
        if not os.fork():
            node = make([each])
            window(node, 8)
            before, made, start = used(node), 0, time.perf_counter()
            while time.perf_counter() < start + seconds:
                window(node, 8)
                made += 8
            took, after = time.perf_counter() - start, used(node)
            os.write(into, repr((made / took, made, after[0] - before[0], after[2] - before[2])).encode())
            os._exit(0)
        ends.append(out)
    told = [eval(os.read(each, 4096)) for each in ends]
    os.kill(served, 9)
    made = sum(each[1] for each in told)
    here, there = sum(each[2] for each in told) / made * 1e6, max(each[3] for each in told) / made * 1e6
    return f"{sum(each[0] for each in told):8.0f} calls/s  cpu caller {here:.2f} callee {there:.2f}"


def main(make: Callable[[list[socket.socket]], Any], options: argparse.Namespace) -> None:
    for name in options.measures or [*MEASURES, "8 callers"]:
        if name == "8 callers":
            line = eight(make, options.workers, options.seconds)
        else:
            near, pid = pair(make, options.workers)
            node = make(near)
            if name == "nested to 5":
                node.start_workers(options.workers)
            line = MEASURES[name](node, options.seconds)
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        print(f"{name:30} {line}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--plain", action="store_true", help="the one in Python")
    parser.add_argument("measures", nargs="*", help="some of them: " + ", ".join([*MEASURES, "8 callers"]))
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    library = plain.Core if options.plain else compiled()
    main(lambda sockets: Node(library(), sockets), options)
