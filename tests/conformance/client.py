"""Tests of the suite, run by suite servers: one server for each part, started when it is first needed.

Everything asked for is queued at once, so that a server keeps the cores busy while results are looked at in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from tests.conformance.suite import PARTS, SAMPLE, part_of

ROOT = Path(__file__).parents[2]
BOUND_S = 120.0
JOBS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    test: str
    outcome: str
    seconds: float
    codes: list[int]
    detail: str


class SuiteServer:
    """One server process and what it has said so far."""

    def __init__(self, part: str, tests: list[str], *, stock: bool, jobs: int, bound_s: float) -> None:
        command = [sys.executable, "-m", "tests.conformance.server", "--part", part, "--jobs", str(jobs)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._process = subprocess.Popen(
            [*command, "--stock"] if stock else command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._results: dict[str, Result] = {}
        self._dead: str | None = None
        self.installed: list[str] = json.loads(self._line())["tests"]
        self._queued = set(tests) & set(self.installed)
        assert self._process.stdin is not None
        for test in tests:
            if test in self._queued:
                self._process.stdin.write(json.dumps({"test": test, "bound_s": bound_s}).encode() + b"\n")
        self._process.stdin.flush()

    def result(self, test: str) -> Result:
        if test not in self._queued:
            return Result(test, "missing", 0.0, [], "the suite of the installed torch has no such test")
        while test not in self._results:
            result = Result(**json.loads(self._line()))
            self._results[result.test] = result
        return self._results[test]

    def close(self) -> None:
        """Once or twice; whatever still runs over there is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A server that is dead has left its input unread.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = b"" if self._dead else self._process.stdout.readline()
        if not line:
            if self._dead is None:
                code = self._process.wait()
                self._log.seek(0)
                self._dead = f"a suite server has ended with {code}:\n{self._log.read().decode(errors='replace')}"
                self.close()
            raise RuntimeError(self._dead)
        return line


class SuiteRun:
    """A set of tests on its way through the servers. A context manager that leaves no process behind."""

    def __init__(
        self, tests: Iterable[str], *, stock: bool = False, jobs: int = JOBS, bound_s: float = BOUND_S
    ) -> None:
        self._tests: dict[str, list[str]] = {part: [] for part in (*PARTS, SAMPLE)}
        for test in tests:
            self._tests[part_of(test)].append(test)
        self._stock = stock
        self._jobs = jobs
        self._bound_s = bound_s
        self._servers: dict[str, SuiteServer] = {}

    def __enter__(self) -> SuiteRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers.values():
            server.close()

    def result(self, test: str) -> Result:
        return self._server(part_of(test)).result(test)

    def installed(self) -> list[str]:
        """Every test that the installed torch's suite has."""
        return [test for part in PARTS for test in self._server(part).installed]

    def _server(self, part: str) -> SuiteServer:
        if part not in self._servers:
            self._servers[part] = SuiteServer(
                part, self._tests[part], stock=self._stock, jobs=self._jobs, bound_s=self._bound_s
            )
        return self._servers[part]
