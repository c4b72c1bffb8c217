"""`enable_gil_profiling`: how long a thread waits for the interpreter is measured, and not made up."""

from __future__ import annotations

import sys
import threading
from time import monotonic

from farcall.compat.rpc.agent import _interpreter_wait_us


def test_a_busy_interpreter_is_waited_for() -> None:
    stopped = threading.Event()

    def compute() -> None:
        while not stopped.is_set():
            sum(range(1000))

    before = sys.getswitchinterval()
    sys.setswitchinterval(0.02)  # how long the other thread keeps it, once it has it
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        # Where others keep the processors busy, that thread is not always there to take the interpreter.
        give_up_at = monotonic() + 30.0
        while _interpreter_wait_us() < 1000.0:
            assert monotonic() < give_up_at, "nothing was waited for"
    finally:
        stopped.set()
        thread.join()
        sys.setswitchinterval(before)
