"""A driver and its workers, for tests of engines."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.waiting import wait_until

import farcall
from farcall.launcher.engine import Engine, ProcessState, WorkerSpec
from farcall.launcher.worker import DRIVER
from farcall.runtime.node import runtime_of

ROOT = Path(__file__).parents[2]
START_S = 300.0
"""Workers load torch, perhaps all at once on a busy machine."""


class Watching:
    """Everything that an engine told."""

    def __init__(self) -> None:
        self.states: dict[WorkerSpec, list[ProcessState]] = defaultdict(list)
        self.output: dict[WorkerSpec, bytes] = defaultdict(bytes)

    def on_state(self, spec: WorkerSpec, state: ProcessState) -> None:
        self.states[spec].append(state)

    def on_output(self, spec: WorkerSpec, data: bytes) -> None:
        self.output[spec] += data

    def is_over(self, spec: WorkerSpec) -> bool:
        return bool(self.states[spec]) and self.states[spec][-1].phase == "ended"

    def told(self) -> str:
        """For the message of a test that waits in vain."""
        return "\n".join(
            f"{spec}: {[str(state) for state in self.states[spec]]} {self.output[spec].decode(errors='replace')}"
            for spec in self.states
        )


class Driver:
    """A member that waits for workers."""

    def __init__(self, node: farcall.Node, secret: str) -> None:
        self.node = node
        self.secret = secret
        self.watching = Watching()

    def spec(self, rank: int, **changes: Any) -> WorkerSpec:
        tcp = next(address for address in runtime_of(self.node).addresses if address.startswith("tcp:"))
        meet = f"farcall://{tcp.removeprefix('tcp://')}"
        changes.setdefault("start_timeout_s", START_S)
        return WorkerSpec(name=f"worker{rank}", rank=rank, secret=self.secret, meet=meet, **changes)

    def start(self, engine: Engine, size: int, **changes: Any) -> list[WorkerSpec]:
        """Start workers, and return when they have joined."""
        specs = [self.spec(rank, **changes) for rank in range(size)]
        engine.start(specs, self.watching)
        self.wait_joined(specs)
        return specs

    def wait_joined(self, specs: list[WorkerSpec]) -> None:
        def joined() -> bool:
            assert not any(self.watching.is_over(spec) for spec in specs), self.watching.told()
            return {spec.name for spec in specs} <= {member.name for member in self.node.members()}

        try:
            wait_until(joined, "all have joined", START_S)
        except AssertionError as failure:
            raise AssertionError(f"{failure}\n{self.watching.told()}") from None

    def wait_ended(self, spec: WorkerSpec) -> ProcessState:
        """Until its engine says so, and it is no member any more."""
        wait_until(lambda: self.watching.is_over(spec), f"{spec} has ended", START_S)
        wait_until(lambda: spec.name not in {member.name for member in self.node.members()}, f"{spec} has gone")
        return self.watching.states[spec][-1]

    def process_ids(self, specs: list[WorkerSpec]) -> list[int]:
        return [self.node[spec.name].call(os.getpid) for spec in specs]


@contextmanager
def driver(folder: Path) -> Iterator[Driver]:
    """The driver's node, in this process."""
    secret = secrets.token_hex(32)
    options = farcall.RpcBackendOptions(init_method=f"file://{folder}/store", secret=secret, advertise="127.0.0.1")
    with farcall.Node(DRIVER, rank=1_000_000, options=options) as node:
        yield Driver(node, secret)


def runs(process_id: int) -> bool:
    """Is there such a process, and more than its entry?"""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


def wait_gone(process_ids: list[int]) -> None:
    wait_until(lambda: not any(map(runs, process_ids)), f"processes {process_ids} have ended")


DRIVER_PROGRAM = """
import sys
import tempfile
import time
from pathlib import Path

from tests.kit.launching import driver
{imports}

with tempfile.TemporaryDirectory() as folder, driver(Path(folder)) as launched:
    engine = {engine}
    specs = launched.start(engine, {size})
    print("workers", *launched.process_ids(specs), flush=True)
    time.sleep(600)
"""


def check_killed_driver(imports: str, engine: str, size: int = 2, environment: Mapping[str, str] = os.environ) -> None:
    """A driver of its own process starts workers and is killed: none of them is left."""
    program = DRIVER_PROGRAM.format(imports=imports, engine=engine, size=size)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            said = next((line for line in process.stdout if line.startswith("workers ")), "")
            workers = [int(word) for word in said.split()[1:]]
            assert len(workers) == size, process.stderr.read()
            assert all(map(runs, workers))
        finally:
            process.send_signal(signal.SIGKILL)
        wait_gone(workers)
