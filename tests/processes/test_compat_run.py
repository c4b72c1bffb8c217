"""``farcall run --workers N``: a cluster of processes on this machine, its output, its failures and Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import textwrap
import time
from pathlib import Path

from tests.kit.launching import runs
from tests.kit.wheel import Installed

TIMEOUT_S = 250.0
PROGRAM = """
    import atexit, os, sys, threading, time
    import torch.distributed.rpc as rpc

    answered = []

    def double(x):
        return 2 * x

    held = threading.Event()

    def hold():
        held.set()
        time.sleep(600)

    def has_its_answer():
        return bool(answered)

    if __name__ == "__main__":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
        print(f"{rpc.rpc_sync(f'worker{(rank + 1) % size}', double, args=(rank,))} {sys.argv[1:]}")
        answered.append(True)
        if "fail" in sys.argv and rank == 1:
            while not rpc.rpc_sync("worker0", has_its_answer):
                time.sleep(0.01)  # or the other one would fail, too, and perhaps be the first to end
            sys.exit("on purpose")
        if "raise" in sys.argv and rank == 1:
            raise LookupError("on purpose")
        if "lose" in sys.argv:
            if rank == 1:
                atexit.register(print, "said after the traceback")  # as the log may be
                rpc.rpc_sync("worker0", hold, timeout=0)
            other = rpc.rpc_sync("worker1", os.getpid)
            held.wait()
            rpc.shutdown(graceful=False)  # the other one fails of it, and ends
            while os.path.exists(f"/proc/{other}"):
                time.sleep(0.01)
            if "cause" in sys.argv:
                print("on purpose")
                os._exit(3)
            sys.exit()
        if "wait" in sys.argv:
            print("waiting")
            while True:
                time.sleep(0.1)
        if "leave" in sys.argv:
            import subprocess
            print("left", subprocess.Popen(["sleep", "600"]).pid)
        rpc.shutdown()
"""


FARCALL_PATIENTLY = f"""
from farcall.cli import main, run

run.CAUSE_S = {TIMEOUT_S}
main()
"""
"""The command `farcall`, which keeps a failure for as long as its cause may take: on a busy machine, more than 2 s."""


def start(installed: Installed, tmp_path: Path, *arguments: str, patiently: bool = False) -> subprocess.Popen[str]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    command = [installed.python, "-c", FARCALL_PATIENTLY] if patiently else [installed.command]
    return subprocess.Popen(
        [*command, "run", "--workers", "2", str(path), *arguments],
        env=installed.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_each_line_says_whose_it_is(installed: Installed, tmp_path: Path) -> None:
    process = start(installed, tmp_path, "--own", "x")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert sorted(apart_from_waiting(output)) == ["0 | 0 ['--own', 'x']", "1 | 2 ['--own', 'x']"]


def test_what_workers_leave_behind_ends_with_them(installed: Installed, tmp_path: Path) -> None:
    process = start(installed, tmp_path, "leave")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    left = [int(line.split()[-1]) for line in output.splitlines() if "left" in line]
    assert len(left) == 2
    give_up_at = time.monotonic() + TIMEOUT_S
    while any(runs(child) for child in left):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_the_first_failure_ends_all_and_is_shown_once(installed: Installed, tmp_path: Path) -> None:
    process = start(installed, tmp_path, "fail", "wait")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, output
    assert output.splitlines()[-1] == "worker 1 ended with exit code 1; ending the others"
    assert output.count("1 | on purpose") == 1


def test_a_traceback_begins_in_the_program(installed: Installed, tmp_path: Path) -> None:
    process = start(installed, tmp_path, "raise")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, output
    lines = [line.removeprefix("1 | ") for line in output.splitlines() if line.startswith("1 | ")]
    begin = lines.index("Traceback (most recent call last):")
    assert f'{tmp_path / "program.py"}"' in lines[begin + 1]
    assert lines[-1] == "LookupError: on purpose"


def test_who_lost_another_is_not_the_cause_though_it_ended_first(installed: Installed, tmp_path: Path) -> None:
    process = start(installed, tmp_path, "lose", "cause", patiently=True)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 3, output
    assert output.splitlines()[-1] == "worker 0 ended with exit code 3; worker 1 failed of it: PeerDead"
    assert output.count("0 | on purpose") == 1


def test_who_lost_another_is_named_where_nobody_else_failed(installed: Installed, tmp_path: Path) -> None:
    process = start(installed, tmp_path, "lose")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, output
    named = [line for line in output.splitlines() if line.startswith("worker ")]
    assert [line.partition(";")[0] for line in named] == ["worker 1 ended with exit code 1"]
    assert any(line.startswith("1 | farcall.errors.PeerDead: ") and "worker0" in line for line in output.splitlines())


LOOKING = """
import os, socket

with socket.socket() as other:
    try:
        other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    except OSError as error:
        print(error.strerror)
"""


def test_the_port_where_workers_meet_goes_to_nobody_else(installed: Installed, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(LOOKING)
    done = installed.run(installed.command, "run", "--workers", "1", path)
    assert done.stdout == "0 | Address already in use\n", done.stdout + done.stderr


def test_control_c_leaves_nothing_behind(installed: Installed, tmp_path: Path) -> None:
    process = start(installed, tmp_path, "wait")
    assert process.stdout is not None
    waiting = 0
    lines = []
    while waiting < 2:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
        waiting += "waiting" in lines[-1]
    workers = children_of(process.pid)
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, output
    assert output.splitlines()[-1] == "interrupted"
    # One line for each worker says where it was.
    assert len(re.findall(r"^[01] \| interrupted at .*program.py:\d+ in <module>$", output, re.MULTILINE)) == 2
    assert len(apart_from_waiting(output)) <= 5, output
    assert not any(runs(worker) for worker in workers)


def test_workers_end_with_a_killed_driver(installed: Installed, tmp_path: Path) -> None:
    process = start(installed, tmp_path, "wait")
    assert process.stdout is not None
    while "waiting" not in process.stdout.readline():
        pass
    workers = children_of(process.pid)
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    give_up_at = time.monotonic() + TIMEOUT_S
    while any(runs(worker) for worker in workers):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def apart_from_waiting(output: str) -> list[str]:
    """The lines, without those of a worker that has to wait for another to start: on a busy machine one says so."""
    return [line for line in output.splitlines() if "Are all workers started?" not in line]


def children_of(process_id: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]
