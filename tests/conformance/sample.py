"""Tests that end in every way that a rank can end, for the driver's own tests. Nothing of PyTorch's suite.

The same shape as the suite's classes: made with a method's name, given a rank, and asked for the size of the world.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path


class SampleTest(unittest.TestCase):
    world_size = 3
    rank: int
    file_name: str

    def test_passes(self) -> None:
        pass

    def test_fails_on_the_last_rank(self) -> None:
        if self.rank == 2:
            raise ValueError("only rank 2")

    def test_last_rank_exits(self) -> None:
        if self.rank == 2:
            sys.exit(3)

    def test_last_rank_is_killed(self) -> None:
        if self.rank == 2:
            os.kill(os.getpid(), signal.SIGSEGV)

    def test_one_hangs(self) -> None:
        if self.rank == 1:
            wait_for_nobody()

    def test_thread_keeps_the_program_open(self) -> None:
        if self.rank == 1:
            threading.Thread(target=wait_for_nobody).start()

    def test_skips(self) -> None:
        self.skipTest("not here")

    def test_only_one_rank_skips(self) -> None:
        if self.rank == 0:
            self.skipTest("not here")

    def test_fails_while_others_wait(self) -> None:
        if self.rank == 0:
            raise ValueError("rank 0 first")
        wait_for_nobody()

    def test_leaves_a_process(self) -> None:
        if self.rank == 0:
            left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(os.environ["SAMPLE_LEFT_BEHIND"]).write_text(str(left.pid))


def wait_for_nobody() -> None:
    time.sleep(600)
