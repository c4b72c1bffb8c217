"""Running a program written for ``torch.distributed.rpc`` over farcall, as ``python program.py`` would.

The program is ``__main__``, with its own arguments, path and name; processes that it starts, by ``multiprocessing`` or
otherwise, have farcall in place, too. Knows nothing of clusters.
"""

from __future__ import annotations

import atexit
import io
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from farcall.compat.installation import install


def is_program(arguments: Sequence[str]) -> bool:
    """Do these arguments name a program, as those of ``python`` would: a file, or ``-m`` and a module?"""
    if not arguments:
        return False
    first = arguments[0]
    return (first == "-m" and len(arguments) > 1) or first.endswith(".py") or os.path.isfile(first)


def run_program(arguments: Sequence[str]) -> None:
    """Run the program that the first arguments name, with the rest as its own; return when it ends."""
    os.environ["FARCALL_INSTALL"] = "1"  # for programs that this one starts, where farcall.pth is installed
    at_interrupt = signal.getsignal(signal.SIGINT)
    if at_interrupt is signal.default_int_handler:  # not where SIGINT is ignored
        # Loading torch takes a second. Ctrl-C then just ends the process: there is nothing to clean up, a traceback
        # would be torch's, and C code turns a KeyboardInterrupt into other errors.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    install()
    signal.signal(signal.SIGINT, at_interrupt)
    try:
        _execute(arguments)
    except KeyboardInterrupt as interrupt:
        if "FARCALL_RESTARTS" not in os.environ:
            raise
        # Under `farcall run` each worker would print a traceback: one line is enough.
        frames = [frame for frame in traceback.extract_tb(interrupt.__traceback__) if not _is_ours(frame.filename)]
        where = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        sys.stderr.write(
            f"interrupted{where}\n"
        )  # at once: print writes the end apart, and other threads log meanwhile
        sys.last_value = interrupt  # as the interpreter does
        _end_now(130)
    except Exception as error:
        frames_left = error.__traceback__
        while frames_left is not None and frames_left.tb_frame.f_code.co_filename in _BEFORE_THE_PROGRAM:
            frames_left = frames_left.tb_next
        if isinstance(error, KeyError) and error.args[:1] in {("RANK",), ("WORLD_SIZE",)}:
            error.add_note("`farcall run --workers N PROGRAM` sets it; options after PROGRAM are the program's own")
        sys.last_value = error.with_traceback(frames_left)  # as the interpreter does
        sys.excepthook(type(error), error, frames_left)
        sys.exit(1)


def _end_now(code: int) -> None:
    """Run the exit functions and end this process, without the interpreter's own end.

    That stops other threads where they next ask for the interpreter's lock. A thread inside torch's C++ code then
    aborts the process ("terminate called without an active exception").
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


_BEFORE_THE_PROGRAM = (__file__, runpy.__file__, "<frozen runpy>")
"""The frames between the start of the interpreter and the program, which its users need not see."""


def _is_ours(path: str) -> bool:
    return path.startswith(os.path.dirname(os.path.dirname(__file__))) or path in _BEFORE_THE_PROGRAM


def _execute(arguments: Sequence[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        # `python -m farcall` has put the current directory first in sys.path, as `python -m` of the module would.
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    path = arguments[0]
    sys.argv = list(arguments)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        sys.exit(f"farcall: can't open file {path!r}: {error.strerror}")
    # A module that stays: functions of the program may be called for as long as the process lives.
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    # dont_inherit: the program has not asked for this module's __future__ imports.
    exec(compile(source, main.__file__, "exec", dont_inherit=True), main.__dict__)
