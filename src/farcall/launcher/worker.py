"""The process of a worker: ``python -m farcall.launcher.worker``.

    1  its spec        one line of standard input, or of a file (see `engine.py`); nothing is imported before that
    2  its lifeline    the former standard input, if the spec came from there; functions find standard input empty
    3  its place       environment, working directory, ``sys.path``
    4  its work        joins the driver's group and serves until the driver ends it or is gone; or runs a program

A start that fails writes its traceback to stderr, for the driver to raise, and ends with `START_FAILED`. Ctrl-C
ends it silently.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import sys
import threading

from farcall.launcher.engine import ENV_SPEC_FILE, MAX_SPEC_BYTES, WorkerSpec
from farcall.options import RpcBackendOptions

DRIVER = "driver"
"""The name of the member that launched the others."""
START_FAILED = 82
INTERRUPTED = 130
"""The exit code of a worker that Ctrl-C ended, as shells tell it."""
END_S = 2.0
"""How long a worker that was told to end waits for its calls."""
LOOK_S = 5.0
"""How often a worker looks whether it still is a member: no event tells it of its own expulsion."""
_end = threading.Event()


def hold_lifeline(descriptor: int) -> None:
    """Have the kernel kill this process, and the group that it leads, when the other end of ``descriptor`` closes.

    The kernel itself sends the signal (``O_ASYNC`` with ``F_SETSIG``), so a worker whose interpreter is busy in C code,
    or stopped, ends as well. Nobody writes to the line after the worker's spec, so any event on it is its end. A
    parent-death signal would do the same on one machine, but it fires when the *thread* that started the process ends,
    and notebooks start things from threads that do.
    """
    import fcntl  # for Linux alone, and the driver imports this module
    import select
    import signal

    group = os.getpgrp()
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -group if group == os.getpid() else os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    looking = select.poll()
    looking.register(descriptor, select.POLLIN)
    if looking.poll(0):  # it was closed before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def read_spec() -> WorkerSpec:
    """This process' spec, out of a file or standard input; its lifeline is held from here on."""
    path = os.environ.pop(ENV_SPEC_FILE, None)
    if path is not None:
        with open(path, "rb") as file:
            return WorkerSpec.decode(file.read())
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        line += piece
        if not piece or len(line) > MAX_SPEC_BYTES:
            raise SystemExit("farcall: farcall.launch starts this program; do not run it yourself")
    spec = WorkerSpec.decode(line)
    # Functions that read standard input find its end, not the lifeline.
    hold_lifeline(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return spec


def take_place(spec: WorkerSpec) -> None:
    """Environment, working directory and path of the driver, as far as they are here, too."""
    os.environ.update(spec.environment)
    os.environ.update(RANK=str(spec.rank), FARCALL_RESTARTS=str(spec.life))
    if spec.directory is not None:
        try:
            os.chdir(spec.directory)
        except OSError as error:
            raise RuntimeError(
                f"{spec.name} finds no directory {spec.directory} on its host ({error.strerror}): name another with "
                "launch(directory=...), or send this one with launch(ship=True)"
            ) from None
    first = spec.path[:1]
    sys.path[:] = [
        *first,
        *(entry for entry in sys.path if entry not in first),
        *(entry for entry in spec.path[1:] if entry not in sys.path and os.path.exists(entry)),
    ]


def options_of(spec: WorkerSpec) -> RpcBackendOptions:
    """The driver's options, as far as they are not its own."""
    options: RpcBackendOptions = pickle.loads(spec.options) if spec.options else RpcBackendOptions()
    return options.replace(
        init_method=spec.meet,
        secret=spec.secret,
        secret_file=None,
        advertise=None,  # that of this process' environment
        port=0,
        start_timeout_s=spec.start_timeout_s,
        # The driver ends a worker that it has declared dead, and may have started a successor.
        membership=dataclasses.replace(options.membership, rejoin=False),
    )


def serve(spec: WorkerSpec) -> None:
    """Be a member until the driver ends this worker, or is gone."""
    import farcall
    from farcall.errors import RpcError
    from farcall.runtime.node import current_runtime

    if spec.allowed is not None:
        farcall.allow(**spec.allowed)  # type: ignore[arg-type]
    farcall.init_rpc(spec.name, rank=spec.rank, rpc_backend_options=options_of(spec))
    farcall.on_member(_look_for_driver)
    if DRIVER not in (member.name for member in farcall.members()):
        _end.set()  # the driver left after this worker joined, and before it listened
    runtime = current_runtime()
    while not _end.wait(LOOK_S):
        if not runtime.running:
            raise RpcError(f"{spec.name} is no longer a member")  # the others have declared it dead
    try:
        farcall.shutdown(timeout=END_S)
    except RpcError:
        farcall.shutdown(graceful=False)  # a call takes longer, and the driver does not wait


# The functions that the driver calls.


def is_ready() -> bool:
    """The answer itself says that this worker can be called."""
    return True


def end_worker() -> None:
    """Have this worker end in good order; obeys the driver alone."""
    from farcall.runtime.calls.scope import current_call

    caller = current_call().caller
    if caller is None or caller.name == DRIVER:
        _end.set()


def describe() -> tuple[str, int, int, int]:
    """The host, process id, calls served so far and bytes of memory of this worker."""
    from farcall import api

    found = api.metrics()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    served = sum(call.latency.count for call in found.served)
    return found.host, found.process_id, served, pages * os.sysconf("SC_PAGE_SIZE")


def _look_for_driver(event: object) -> None:
    worker, kind = event.worker, event.kind  # type: ignore[attr-defined]
    if worker.name == DRIVER and kind in ("left", "dead"):
        _end.set()


def main() -> None:
    """The entry point."""
    import signal
    import traceback

    at_interrupt = signal.getsignal(signal.SIGINT)
    if at_interrupt is signal.default_int_handler:  # not where SIGINT is ignored
        # Until torch is loaded, Ctrl-C just ends the process: as in `run_program`.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    spec = read_spec()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a pipe, and people watch it live
    try:
        take_place(spec)
        if spec.program:
            from farcall.compat.program import run_program

            signal.signal(signal.SIGINT, at_interrupt)
            run_program(spec.program)
            return
        import farcall.api  # noqa: F401  # and torch

        signal.signal(signal.SIGINT, at_interrupt)
        serve(spec)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)  # where it was is of no interest: the driver's traceback tells of the program
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(START_FAILED)


if __name__ == "__main__":
    # Import the module by its name: functions that the driver calls must find the same `_end`.
    from farcall.launcher.worker import main as run

    run()
