"""A process that has the suite loaded, and forks the ranks of each test that it is asked for.

Loading torch and the suite takes seconds, a fork takes milliseconds. The server itself starts no thread and never
initializes RPC, so what it forks is as good as new. Requests and results are lines of JSON on its standard input
and output; when the input ends, whatever still runs is killed.

A test passes when every rank has ended with 0. It is skipped when every rank says so. As soon as one rank
fails, the others get a moment to fail by themselves, then they show their stacks and die; the same happens
at the bound.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import io
import json
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.conformance import suite
from tests.conformance.rank import SHOW_STACKS_AND_DIE, Rank, ShortEnd, skip_reasons, world_size

# A rank that waits for one that has failed mostly fails by itself, with an error worth reading; it may even be the
# cause, and say so last. It gets as long as the first one took, since the machine may be slow, and at least this.
AFTER_FAILURE_S = 10.0
# To write the stacks of all threads; then SIGKILL.
TO_DIE_S = 5.0
LOG_TAIL = 6_000


class Running:
    """The ranks of one test, from the forks to the result."""

    def __init__(self, test: str, kind: Any, method: str, folder: Path, bound_s: float) -> None:
        self.test = test
        self.folder = folder
        self.started = time.monotonic()
        self.deadline = self.started + bound_s
        self.bound_s = bound_s
        self.asked_to_die = False
        self.late: list[int] = []
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        meeting_file = folder / "meeting"
        meeting_file.touch()
        self.ranks = [
            Rank(kind, method, number, str(meeting_file), folder / f"rank{number}.log", bound_s)
            for number in range(world_size(kind, method))
        ]

    def fork(self) -> Rank | None:
        """Start every rank. Returns that rank in a fork, and None in the server."""
        for rank in self.ranks:
            pid = os.fork()
            if pid == 0:
                rank.enter()
                return rank
            self.pids[rank.rank] = pid
        return None

    def ended(self, rank: int, status: int) -> None:
        self.codes[rank] = os.waitstatus_to_exitcode(status)
        if self._failed() and not self.asked_to_die:
            now = time.monotonic()
            self.deadline = min(self.deadline, now + max(AFTER_FAILURE_S, now - self.started))

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.pids if rank not in self.codes]

    def on_deadline(self) -> None:
        if not self.asked_to_die:
            self.asked_to_die = True
            self.late = self.alive
            self.deadline = time.monotonic() + TO_DIE_S
            self.kill(SHOW_STACKS_AND_DIE)
        else:
            self.deadline = float("inf")
            self.kill(signal.SIGKILL)

    def kill(self, number: signal.Signals) -> None:
        for rank in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def _failed(self) -> bool:
        return any(code != 0 and code not in skip_reasons() for code in self.codes.values())

    def result(self) -> dict[str, Any]:
        seconds = time.monotonic() - self.started
        reasons = skip_reasons()
        codes = [self.codes[rank] for rank in sorted(self.codes)]
        if all(code == 0 for code in codes):
            return self._say("passed", seconds, codes, "")
        if all(code in reasons for code in codes):
            return self._say("skipped", seconds, codes, "; ".join(sorted({reasons[code] for code in codes})))
        return self._say("failed", seconds, codes, self._story())

    def _say(self, outcome: str, seconds: float, codes: list[int], detail: str) -> dict[str, Any]:
        return {"test": self.test, "outcome": outcome, "seconds": round(seconds, 2), "codes": codes, "detail": detail}

    def _story(self) -> str:
        lines = []
        if set(self.late) == set(self.codes):
            lines.append(f"no rank has ended within {self.bound_s:g} s; the stacks show where they were")
        for rank in self.codes:  # in the order of their ends
            how = "was still running, shown is where" if rank in self.late else f"ended with {self.codes[rank]}"
            text = (self.folder / f"rank{rank}.log").read_text(errors="replace").strip()
            lines.append(f"----- rank {rank} {how}")
            lines.append(text if len(text) <= LOG_TAIL else "[...]\n" + text[-LOG_TAIL:])
        return "\n".join(lines)


class Server:
    def __init__(self, classes: dict[str, Any], jobs: int, results: io.RawIOBase) -> None:
        self._results = results
        self._classes = classes
        self._jobs = jobs
        self._waiting: collections.deque[tuple[str, float]] = collections.deque()
        self._running: list[Running] = []
        self._poll = selectors.DefaultSelector()
        self._poll.register(0, selectors.EVENT_READ)
        self._read = b""
        self._open = True
        self._folder = tempfile.mkdtemp(prefix="farcall-conformance-")

    def serve(self) -> Rank | None:
        """Serve until the input ends. Returns a rank to be run in each fork, and None in the server."""
        while self._open:
            while self._waiting and len(self._running) < self._jobs:
                rank = self._start(*self._waiting.popleft())
                if rank is not None:
                    return rank
            now = time.monotonic()
            for running in self._running:
                if running.deadline <= now:
                    running.on_deadline()
            nearest = min((running.deadline for running in self._running), default=float("inf"))
            wait_s = None if nearest == float("inf") else max(0.0, nearest - now)
            for key, _ in self._poll.select(wait_s):
                if key.fd == 0:
                    self._on_input()
                else:
                    self._on_end(key.fd, *key.data)
        self._stop()
        return None

    def _start(self, test: str, bound_s: float) -> Rank | None:
        name, _, method = test.partition(".")
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        running = Running(test, self._classes[name], method, folder, bound_s)
        rank = running.fork()
        if rank is not None:
            self._poll.close()
            self._results.close()
            return rank
        self._running.append(running)
        for number, pid in running.pids.items():
            self._poll.register(os.pidfd_open(pid), selectors.EVENT_READ, (running, number))
        return None

    def _on_end(self, pid_file: int, running: Running, rank: int) -> None:
        pid = running.pids[rank]
        # Whatever the rank itself has started and left behind. The number is nobody else's until it is waited for.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._poll.unregister(pid_file)
        os.close(pid_file)
        running.ended(rank, status)
        if not running.alive:
            self._running.remove(running)
            self.say(running.result())

    def _on_input(self) -> None:
        chunk = os.read(0, 1 << 16)
        self._open = bool(chunk)
        *lines, self._read = (self._read + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            self._waiting.append((request["test"], float(request["bound_s"])))

    def say(self, message: dict[str, Any]) -> None:
        try:
            self._results.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            self._open = False  # whoever asked is gone

    def _stop(self) -> None:
        for running in self._running:
            running.kill(signal.SIGKILL)
            for rank in running.alive:
                os.waitpid(running.pids[rank], 0)
        shutil.rmtree(self._folder)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=(*suite.PARTS, suite.SAMPLE), required=True)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--jobs", type=int, required=True)
    asked = parser.parse_args()
    short_end = ShortEnd()  # before torch is loaded and has exit hooks of its own
    # Results have a descriptor of their own: what the suite prints while it is loaded goes to the log.
    results = open(os.dup(1), "wb", buffering=0)  # noqa: SIM115  (a fork closes it by itself)
    os.dup2(2, 1)
    # Some of the suite's programs call each other as soon as *they* have made their process group, and use that of the
    # callee. With this torch lets nobody go on before everybody has one; whose RPC is quick enough needs it.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    # Asking whether there is a device must not touch it: a process that has forked after that cannot use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if not asked.stock:
        suite.put_farcall_in_place()
    classes = suite.load(asked.part)
    short_end.spare_finalizers()
    # Collecting in a fork would touch, and so copy, every object of torch and the suite: 0.8 s a rank instead of 0.2.
    gc.collect()
    gc.freeze()
    server = Server(classes, asked.jobs, results)
    server.say({"tests": suite.names(classes)})
    rank = server.serve()
    if rank is None:
        return 0
    code = rank.run()
    if code in skip_reasons() or not rank.goes_to_the_very_end:
        short_end.leave_with(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
