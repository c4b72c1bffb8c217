"""An engine that runs one command per worker: here, or through a program that runs it elsewhere.

Owns the processes of this machine that run those commands, from start to end; each leads a process group, so its
children end with it. A subclass says what the command is (`CommandEngine.command`), or how else a process is started
(`spawn`).

Thread rules
- ``start`` and ``end`` are called by one thread at a time; ``close`` by another one, if that hangs.
- One thread reads what all processes write and notices their ends; it alone tells the watcher and reaps. The lock
  guards the table of processes, and that no signal goes to a process after it was reaped.

A process has ended when it is gone and all it wrote was read; one that left its output to somebody else (a daemon) is
waited for `STRAY_OUTPUT_S`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import IO, NamedTuple

from farcall.launcher.engine import MAX_SPEC_BYTES, EngineError, ProcessState, Watcher, WorkerSpec
from farcall.transport.descriptors import close_in_children

STRAY_OUTPUT_S = 2.0
CLOSE_S = 10.0
"""How long the kernel may take to end killed processes."""
LOOK_S = 0.5
_READ_BYTES = 1 << 16
_CANNOT_START = 127


class Spawned(NamedTuple):
    """A process that leads a group of its own, with the lifeline to it and the pipe from it."""

    pid: int
    lifeline: IO[bytes]
    output: IO[bytes]
    wait: Callable[[], int]
    """Reaps it, once it has ended: its exit code."""


class CommandEngine:
    """Engines of this kind override `command`, perhaps `environment`, `running_detail` and `ended`."""

    driver_host: str | None = None
    end_signal: signal.Signals = signal.SIGKILL
    """What ends a command at once. SIGTERM for one that must first end something elsewhere; `close` kills it later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: dict[WorkerSpec, _Child] = {}
        self._wake_read, self._wake_write = -1, -1
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        close_in_children(self)

    def command(self, spec: WorkerSpec) -> Sequence[str]:
        """What runs the worker; its standard input reaches that of `WorkerSpec.command`, and no secret is in it."""
        return spec.command

    def environment(self, spec: WorkerSpec) -> Mapping[str, str]:
        """The environment of the command."""
        return {**os.environ, "PYTHONUNBUFFERED": "1"}  # somebody looks at its output live

    def running_detail(self, spec: WorkerSpec) -> str:
        """Where it runs, in words."""
        return ""

    def ended(self, spec: WorkerSpec, exit_code: int) -> ProcessState:
        """What the end of its command tells."""
        return ProcessState("ended", "", exit_code)

    def spawn(self, spec: WorkerSpec) -> Spawned:
        """Start the command."""
        # stderr too: what a worker writes last is most often a traceback. A session of its own: Ctrl-C in the terminal
        # is the driver's alone, and signals reach the worker's children.
        process = subprocess.Popen(
            self.command(spec),
            env=dict(self.environment(spec)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        return Spawned(process.pid, process.stdin, process.stdout, process.wait)

    def line(self, spec: WorkerSpec) -> bytes:
        """What is written to the worker's standard input."""
        return spec.encode() + b"\n"

    def start(self, specs: Sequence[WorkerSpec], watcher: Watcher) -> None:
        with self._lock:
            if self._closed.is_set():
                raise EngineError("this engine was closed; make a new one")
            if self._thread is None:
                self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._thread = threading.Thread(target=self._watch, name="farcall-engine", daemon=True)
                self._thread.start()
        for spec in specs:
            try:
                line = self.line(spec)
                child = _Child(spec, watcher, self.spawn(spec), line)
            except (OSError, EngineError) as error:
                why = f"{self.command(spec)[0]}: {error.strerror}" if isinstance(error, OSError) else str(error)
                watcher.on_state(spec, ProcessState("ended", why, _CANNOT_START))
                continue
            # Before the thread knows it, which may have its end to tell.
            watcher.on_state(spec, ProcessState("running", self.running_detail(spec)))
            with self._lock:
                if self._closed.is_set():  # by another thread, that waits no longer for this one
                    child.send(signal.SIGKILL)
                    child.reap()
                    child.close()
                    return
                self._children[spec] = child
        self._wake()

    def end(self, specs: Sequence[WorkerSpec]) -> None:
        self.send(specs, self.end_signal)

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            left = list(self._children)
        if self._thread is None:
            return
        self.send(left, self.end_signal)
        self._wake()
        self._thread.join(CLOSE_S / 2)
        self.send(left, signal.SIGKILL)
        self._thread.join(CLOSE_S / 2)
        if self._thread.is_alive():
            with self._lock:
                names = ", ".join(spec.name for spec in self._children)
            raise EngineError(f"still running {CLOSE_S:.0f} s after SIGKILL: {names}")
        with self._lock:
            self._thread = None
            os.close(self._wake_write)
            self._wake_write = -1

    def close_after_fork(self) -> None:
        """In a forked child: let go of the lifelines, which would outlive their driver otherwise."""
        for child in self._children.values():
            child.close()

    def send(self, specs: Sequence[WorkerSpec], number: signal.Signals) -> None:
        """Signal the commands of these, and their children, if they have not ended."""
        with self._lock:
            for spec in specs:
                child = self._children.get(spec)
                if child is not None:
                    child.send(number)

    def _wake(self) -> None:
        with self._lock:
            try:
                if self._wake_write >= 0:
                    os.write(self._wake_write, b"x")
            except (BlockingIOError, BrokenPipeError):
                pass  # it is full: awake in any case; or the thread has just ended

    def _watch(self) -> None:
        """The thread: read, notice ends, tell."""
        known: set[WorkerSpec] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ, None)
            while True:
                with self._lock:
                    fresh = [child for spec, child in self._children.items() if spec not in known]
                    if self._closed.is_set() and not self._children:
                        break
                for child in fresh:
                    known.add(child.spec)
                    selector.register(child.output, selectors.EVENT_READ, child)
                    # The end itself is an event: looking from time to time could not tell which one was first.
                    selector.register(child.ending, selectors.EVENT_READ, child)
                for key, _ in selector.select(LOOK_S):
                    if key.data is None:
                        os.read(self._wake_read, _READ_BYTES)
                    elif key.fd == key.data.ending:
                        selector.unregister(key.fd)
                        with self._lock:
                            key.data.reap()
                    elif not key.data.read():
                        selector.unregister(key.fd)
                with self._lock:
                    over = [child for child in self._children.values() if child.is_over]
                for child in over:
                    if not child.read_all:
                        selector.unregister(child.output)
                    with self._lock:
                        del self._children[child.spec]
                        child.close()
                    known.discard(child.spec)
                    assert child.exit_code is not None
                    child.watcher.on_state(child.spec, self.ended(child.spec, child.exit_code))
        os.close(self._wake_read)


class _Child:
    """One process, the lifeline to it and the pipe from it."""

    def __init__(self, spec: WorkerSpec, watcher: Watcher, process: Spawned, line: bytes) -> None:
        self.spec = spec
        self.watcher = watcher
        self.process = process
        self.lifeline = process.lifeline
        self.output = process.output
        self.ending: int = -1
        self.exit_code: int | None = None
        self.read_all = False
        self._ended_at: float | None = None
        try:
            self.ending = os.pidfd_open(process.pid)
            if len(line) > MAX_SPEC_BYTES:
                raise OSError(errno.E2BIG, f"the environment for {spec.name} is too large ({len(line)} bytes)")
            # All of it at once, so that a process which never reads cannot keep this thread.
            if len(line) > fcntl.fcntl(self.lifeline, fcntl.F_GETPIPE_SZ):
                fcntl.fcntl(self.lifeline, fcntl.F_SETPIPE_SZ, len(line))
            self.lifeline.write(line)
        except BrokenPipeError:
            pass  # it ended already, and its output says why
        except OSError:
            self.send(signal.SIGKILL)
            self.reap()
            self.close()
            raise

    def read(self) -> bool:
        """Pass on what it wrote; False at the end."""
        data = os.read(self.output.fileno(), _READ_BYTES)
        if data:
            self.watcher.on_output(self.spec, data)
        else:
            self.read_all = True
        return bool(data)

    def reap(self) -> None:
        """It is gone: its children go too, while its number is still its own."""
        self.send(signal.SIGKILL)
        self.exit_code = self.process.wait()
        self._ended_at = monotonic()

    @property
    def is_over(self) -> bool:
        """Is it gone, and all that it wrote read?"""
        return self._ended_at is not None and (self.read_all or monotonic() > self._ended_at + STRAY_OUTPUT_S)

    def send(self, number: signal.Signals) -> None:
        """Signal the process and its children, unless it was reaped."""
        if self._ended_at is None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                pass  # it has just ended

    def close(self) -> None:
        self.lifeline.close()
        self.output.close()
        if self.ending >= 0:
            os.close(self.ending)
            self.ending = -1
