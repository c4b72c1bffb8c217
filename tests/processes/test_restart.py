"""``farcall run --restart``: workers that die are started again, and come back into groups of either kind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.kit.wheel import Installed

TIMEOUT_S = 280.0

COMES_BACK = """
    import os, signal, sys, threading, time
    import farcall

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        rank, again = int(os.environ["RANK"]), int(os.environ["FARCALL_RESTARTS"])
        names = [f"worker{other}" for other in range(int(os.environ["LOCAL_WORLD_SIZE"]))]
        victim = f"worker{sys.argv[1]}"
        survivors = [name for name in names if name != victim]
        assert "WORLD_SIZE" not in os.environ
        farcall.init_rpc(names[rank], rank=rank)
        while len(farcall.members()) < len(names):
            time.sleep(0.01)
        if names[rank] != victim:
            farcall.barrier(survivors)
            if names[rank] == survivors[0]:
                try:
                    farcall.rpc_sync(victim, die)
                except farcall.errors.PeerDead as error:
                    print("lost", error.worker.name)
            farcall.barrier(survivors)
            retry = farcall.Retry(attempts=10_000, longest_backoff_s=0.1)
            life = farcall.rpc_sync(victim, os.getenv, ("FARCALL_RESTARTS",), timeout=250, retry=retry)
            print("answered by life", life)
        elif not again:
            threading.Event().wait()
        farcall.barrier(names)
        farcall.shutdown()
"""

FIXED = """
    import os, signal, sys
    import farcall

    if __name__ == "__main__":
        rank, again = int(os.environ["RANK"]), int(os.environ["FARCALL_RESTARTS"])
        size = int(os.environ["LOCAL_WORLD_SIZE"])
        victim = int(sys.argv[1])
        while True:
            farcall.init_rpc(f"worker{rank}", rank=rank, world_size=size)
            try:
                farcall.barrier([f"worker{other}" for other in range(size)])
                if rank == victim and not again:
                    os.kill(os.getpid(), signal.SIGKILL)
                print("life", farcall.rpc_sync(f"worker{victim}", os.getenv, ("FARCALL_RESTARTS",)))
                farcall.barrier([f"worker{other}" for other in range(size)])
                farcall.shutdown()
                break
            except farcall.errors.RpcError as error:
                print(type(error).__name__)
                farcall.shutdown(graceful=False)
"""

FAILS = """
    import os, sys, time

    if __name__ == "__main__":
        print("life", os.environ["FARCALL_RESTARTS"])
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(600)
"""


def run(installed: Installed, tmp_path: Path, program: str, *arguments: str) -> tuple[int, str]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    done = installed.run(installed.command, "run", *arguments[:4], path, *arguments[4:], timeout_s=TIMEOUT_S)
    return done.returncode, done.stdout + done.stderr


def test_a_killed_worker_comes_back_under_its_name(installed: Installed, tmp_path: Path) -> None:
    """Rank 0, which nobody can spare where it has the store."""
    code, output = run(installed, tmp_path, COMES_BACK, "--workers", "3", "--restart", "2", "0")
    assert code == 0, output
    assert "worker 0 was ended by SIGKILL; starting it again (1 of 2)" in output
    assert re.findall(r"answered by life (\d)", output) == ["1", "1"], output


def test_a_group_of_fixed_size_forms_anew_with_the_restarted_worker(installed: Installed, tmp_path: Path) -> None:
    """It lets nobody in, but those who are left may leave it, and meet again."""
    code, output = run(installed, tmp_path, FIXED, "--workers", "3", "--restart", "1", "0")
    assert code == 0, output
    assert output.count("life 1") == 3, output


def test_who_fails_too_often_ends_all(installed: Installed, tmp_path: Path) -> None:
    code, output = run(installed, tmp_path, FAILS, "--workers", "2", "--restart", "1")
    assert code == 7, output
    assert re.findall(r"1 \| life (\d)", output) == ["0", "1"], output
    assert "(1 of 1)" in output
    assert "worker 1 ended with exit code 7; ending the others" in output


WHAT_WORKERS_GET = """
    import os
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    rows = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/net/{table}")]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(port)]
    print(len(os.environ["FARCALL_SECRET"]), listening)
"""


KEEPS_GOING = """
    import os, sys, time
    if os.environ["RANK"] == "0":
        sys.exit(3)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    if os.environ["FARCALL_RESTARTS"] == "0":
        sys.exit(4)
    print("goes on")
"""


def test_who_fails_for_good_ends_nobody_who_keeps_going(tmp_path: Path) -> None:
    """The others are restarted as before; the exit status is that of the first failure."""
    program, over = tmp_path / "program.py", tmp_path / "over"
    program.write_text(textwrap.dedent(KEEPS_GOING))
    options = ["--workers", "2", "--restart", "1", "--keep-going"]
    lines = []
    with subprocess.Popen(
        [sys.executable, "-m", "farcall", "run", *options, program, over], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "go on" in line:  # worker 0 has failed for good
                over.touch()
    assert "".join(lines).splitlines() == [
        "worker 0 ended with exit code 3; starting it again (1 of 1)",
        "worker 0 ended with exit code 3; the others go on",
        "worker 1 ended with exit code 4; starting it again (1 of 1)",
        "1 | goes on",
    ]
    assert process.returncode == 3


def test_workers_get_a_secret_of_their_run_and_a_store_that_only_this_machine_reaches(tmp_path: Path) -> None:
    """The store used to be open to the network, and had the secret in it for as long as the workers ran."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(WHAT_WORKERS_GET))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_SECRET")}
    done = subprocess.run(
        [sys.executable, "-m", "farcall", "run", "--workers", "1", "--restart", "1", str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 ['0100007F:" in done.stdout
