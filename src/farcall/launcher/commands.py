"""An engine that runs one command per worker: here, or through a program that runs it elsewhere.

Owns the processes of this machine that run those commands, from start to end; each leads a process group, so its
children end with it. A subclass says what the command is (`CommandEngine.command`), or how else a process is started
(`spawn`).

Thread rules
- One thread at a time calls ``start`` and ``end``; another one ``close``, if that hangs.
- One thread reads the output of all processes and notices their ends; it alone tells the watcher and reaps. The lock
  guards the table of processes, and that no signal goes to a process after it was reaped.

A process has ended when it is gone and its output was read to the end. Where a daemon of its own holds the output open,
the engine waits `STRAY_OUTPUT_S` for that.
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
    """Reap the process, which has ended; its exit code."""


class CommandEngine:
    """Engines of this kind override `command`, perhaps `environment`, `running_detail` and `ended`."""

    driver_host: str | None = None
    end_signal: signal.Signals = signal.SIGKILL
    """Ends a command. SIGTERM for one that must first end something elsewhere; `close` kills it later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: dict[WorkerSpec, _Child] = {}
        self._wake_read, self._wake_write = -1, -1
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        close_in_children(self)

    def command(self, spec: WorkerSpec) -> Sequence[str]:
        """The command that runs the worker. Passes standard input on to `WorkerSpec.command`; contains no secret."""
        return spec.command

    def environment(self, spec: WorkerSpec) -> Mapping[str, str]:
        """The environment of the command."""
        return {**os.environ, "PYTHONUNBUFFERED": "1"}  # people watch the output live

    def running_detail(self, spec: WorkerSpec) -> str:
        """For people: where the worker runs."""
        return ""

    def ended(self, spec: WorkerSpec, exit_code: int) -> ProcessState:
        """The state of a worker whose command ended so."""
        return ProcessState("ended", "", exit_code)

    def spawn(self, spec: WorkerSpec) -> Spawned:
        """Start the command."""
        # stderr, too: the last lines of a worker are most often a traceback. A session of its own: Ctrl-C in the
        # terminal is for the driver alone, and signals to the group reach the worker's children.
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
        """The bytes for the worker's standard input."""
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
                line = self.line(spec)  # before the process, which would wait for it in vain where this raises
                child = _Child(spec, watcher, process=self.spawn(spec), line=line)
            except (OSError, EngineError) as error:
                why = f"{self.command(spec)[0]}: {error.strerror}" if isinstance(error, OSError) else str(error)
                watcher.on_state(spec, ProcessState("ended", why, _CANNOT_START))
                continue
            # Before the thread knows of the process: it may have its end to tell.
            watcher.on_state(spec, ProcessState("running", self.running_detail(spec)))
            with self._lock:
                if self._closed.is_set():  # by another thread, which did not wait for this one
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
        """In a forked child: let go of the lifelines, or workers would outlive their driver."""
        for child in self._children.values():
            child.close()

    def send(self, specs: Sequence[WorkerSpec], number: signal.Signals) -> None:
        """Signal the commands of these workers, and their children, unless they have ended."""
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
                pass  # full: the thread wakes in any case; broken: it has just ended

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
                    # The end is an event of its own: a look from time to time could not tell which worker ended first.
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

    def __init__(self, spec: WorkerSpec, watcher: Watcher, *, process: Spawned, line: bytes) -> None:
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
            # The pipe takes all of it at once: a process that never reads must not block this thread.
            if len(line) > fcntl.fcntl(self.lifeline, fcntl.F_GETPIPE_SZ):
                fcntl.fcntl(self.lifeline, fcntl.F_SETPIPE_SZ, len(line))
            self.lifeline.write(line)
        except BrokenPipeError:
            pass  # the process has ended already, and its output says why
        except OSError:
            self.send(signal.SIGKILL)
            self.reap()
            self.close()
            raise

    def read(self) -> bool:
        """Pass output on; False at its end."""
        data = os.read(self.output.fileno(), _READ_BYTES)
        if data:
            self.watcher.on_output(self.spec, data)
        else:
            self.read_all = True
        return bool(data)

    def reap(self) -> None:
        """The process has ended: kill its children while the number is still its own, then free that."""
        self.send(signal.SIGKILL)
        self.exit_code = self.process.wait()
        self._ended_at = monotonic()

    @property
    def is_over(self) -> bool:
        """Has it ended, and was its output read to the end?"""
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
