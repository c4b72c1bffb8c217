"""What a new user meets on the first day: programs with the mistakes that everybody makes, and what they are told."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.kit.wheel import Installed


def run(installed: Installed, folder: Path, program: str, **more: str) -> tuple[int, str]:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program))
    done = installed.run(installed.command, "run", "--workers", "2", path, **more)
    return done.returncode, done.stdout + done.stderr


def test_a_function_that_is_not_defined_yet_is_told_as_such(installed: Installed, tmp_path: Path) -> None:
    code, output = run(
        installed,
        tmp_path,
        """
        import os, time
        import farcall

        rank = int(os.environ["RANK"])
        farcall.init_rpc(f"w{rank}", rank=rank, world_size=2)
        if rank == 1:
            farcall.shutdown()

        def double(x):
            return 2 * x

        if rank == 0:
            while farcall.rpc_sync("w1", farcall.metrics).state != "serving":
                time.sleep(0.01)  # it is about to call shutdown
            farcall.rpc_sync("w1", double, args=(1,))
        """,
    )
    assert code == 1, output
    assert "has no 'double' yet: it is still at line 8. Define functions and classes before init_rpc" in output


def test_a_worker_that_waits_in_shutdown_serves_and_nobody_is_warned(installed: Installed, tmp_path: Path) -> None:
    code, output = run(
        installed,
        tmp_path,
        """
        import logging, os, time
        import farcall
        from farcall.protocol.departure import machine as departure

        said = []

        class Keeping(logging.Handler):
            def emit(self, record):
                said.append(record.getMessage())

        def has_said(text):
            return any(text in line for line in said)

        departure.STATUS_INTERVAL_S = 0.05
        rank = int(os.environ["RANK"])
        farcall.init_rpc(f"w{rank}", rank=rank, world_size=2)
        logging.getLogger("farcall").addHandler(Keeping())

        if rank == 0:
            while not farcall.rpc_sync("w1", has_said, args=("serves in shutdown()",)):
                time.sleep(0.01)
            calls = [farcall.rpc_async("w1", time.sleep, args=(0.5,)) for _ in range(3)]
            for call in calls:
                call.wait()
            print("served")
        farcall.shutdown()
        farcall.shutdown()  # a second one does nothing
        """,
        FARCALL_LOG="info",
    )
    assert code == 0, output
    assert "0 | served" in output
    # As a warning, as long as somebody still works. (On a busy machine, w0 "does not answer" within STATUS_INTERVAL_S.)
    assert "shutdown waits: w0 has not called shutdown" not in output
    assert output.count("w1 serves in shutdown(): w0 has not called shutdown") == 1


def test_a_forgotten_shutdown_is_told_on_both_sides(installed: Installed, tmp_path: Path) -> None:
    code, output = run(
        installed,
        tmp_path,
        """
        import os, threading
        import farcall

        called = threading.Event()

        def call():
            called.set()

        rank = int(os.environ["RANK"])
        farcall.init_rpc(f"w{rank}", rank=rank, world_size=2)
        if rank == 0:
            try:
                while True:  # so that it may be writing when the other ends
                    farcall.rpc_sync("w1", call)
            except farcall.errors.PeerDead as error:
                print("told:", error)
            farcall.shutdown()
        else:
            called.wait(60)
        """,
    )
    assert code == 0, output
    assert "w1 ended without shutdown(): call it last, so that workers wait for each other" in output
    assert "told: w1 ended without shutdown()" in output
