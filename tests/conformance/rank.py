"""One rank of one test: what a forked process does with a test of the suite.

Every rank leaves through the end of the program, as any user's program does: threads are joined and exit hooks run, so
that a thread which never ends shows. One rank of each test goes on to the very end, so that a crash while the
interpreter and torch's libraries are taken down shows in its exit code. The others stop short of that, because taking
down all of torch in a fork copies every page of it: 0.25 s, where a test takes 0.05.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import os
import resource
import signal
import sys
import traceback
import unittest
import weakref
import zlib
from pathlib import Path
from typing import Any

# On this signal a rank writes the stacks of all its threads and dies: nothing else in the suite uses it.
SHOW_STACKS_AND_DIE = signal.SIGUSR1
ERROR_CODE = 10
SKIP_CODE = 86


def world_size(kind: Any, method: str) -> int:
    return int(kind(method).world_size)


class ShortEnd:
    """The end of a process after its threads and exit hooks, before anything is taken down.

    Exit hooks run last in, first out: whoever makes this before loading torch has it run after all others.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        self._spared: list[Any] = []
        atexit.register(self._end)

    def spare_finalizers(self) -> None:
        """Leave out the finalizers that exist now: torch takes its operators out of their tables, one by one.

        Only at a short end: where torch's libraries are taken down, they crash if that has not been done.
        """
        self._spared = list(weakref.finalize._registry)  # type: ignore[attr-defined]

    def leave_with(self, code: int) -> None:
        """Shorten the end of this process, and give it this exit code."""
        self._code = code
        for finalizer in self._spared:
            finalizer.atexit = False

    def _end(self) -> None:
        if self._code is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self._code)


def skip_reasons() -> dict[int, str]:
    """What the exit codes mean by which a rank says that a test does not apply here."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


def keep_destroyed_groups() -> None:
    """Keep process groups in memory after a test has destroyed them.

    torch ends a gloo group's threads with the interpreter locked, when the last reference to the group goes, and a
    thread that has just finished may need the interpreter to let go of a tensor: then both wait for ever. That has
    nothing to do with RPC, and happens on stock as well (TensorPipeDdpComparisonTest.test_ddp_comparison, once in ten
    runs).
    """
    import torch.distributed

    destroy = torch.distributed.destroy_process_group
    kept: list[Any] = []

    def destroy_process_group(group: Any = None) -> None:
        kept.append(torch.distributed.group.WORLD if group is None else group)
        destroy(group)

    torch.distributed.destroy_process_group = destroy_process_group


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    kind: Any
    method: str
    rank: int
    meeting_file: str
    log: Path
    bound_s: float

    @property
    def goes_to_the_very_end(self) -> bool:
        """Whether this is the one rank of its test that takes everything down: another one for each test."""
        return self.rank == zlib.crc32(self.method.encode()) % world_size(self.kind, self.method)

    def enter(self) -> None:
        """First thing in the fork: a session, output and signals of its own."""
        os.setsid()
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.close(nothing)
        faulthandler.enable(all_threads=True)
        # chain: after the stacks comes what the signal did before, which is to end the process.
        faulthandler.register(SHOW_STACKS_AND_DIE, all_threads=True, chain=True)
        # A crash shows its stacks; a core file would land in the directory of whoever runs the tests.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Should the server be killed, nobody is left to keep the bound.
        signal.alarm(int(self.bound_s) + 30)

    def run(self) -> int:
        """Run the test; return the exit code that tells its outcome."""
        from torch.testing._internal.common_utils import set_rng_seed

        case = self.kind(self.method)
        case.rank = self.rank
        case.file_name = self.meeting_file
        set_rng_seed()
        keep_destroyed_groups()
        try:
            getattr(case, self.method)()
        except unittest.SkipTest as skip:
            print(f"skipped: {skip}", file=sys.stderr)
            return SKIP_CODE
        except SystemExit as exit:
            return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        except Exception:
            traceback.print_exc()
            return ERROR_CODE
        self._leave_process_group()
        return 0

    @staticmethod
    def _leave_process_group() -> None:
        import torch.distributed

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
