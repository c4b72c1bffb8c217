"""Programs that launch workers: what is left of them when they end, what they send, what they allow."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.launching import wait_gone

PROGRAM = """
import os, sys, time
import farcall
import torch

def forever():  # without letting anybody else have the interpreter
    x = 3 ** 100_000
    while True:
        x ** 200

class Doubler:
    def __init__(self, factor):
        self.factor = factor
    def double(self, x):
        return self.factor * x

if __name__ == "__main__":
    with farcall.launch(2) as cluster:
        assert cluster["worker0"].create(Doubler, 2).rpc_sync().double(21) == 42  # of __main__: by value
        workers = [worker.call(os.getpid) for worker in cluster]
        print("PIDS", *workers, flush=True)
        cluster["worker0"].start(forever)
        exec(sys.argv[1])
"""


UNGUARDED = """
import multiprocessing, os
import farcall

START
child = multiprocessing.get_context(os.environ["CONTEXT"]).Process(target=print, args=("unreachable",))
child.start()
child.join()
print("child ended with", child.exitcode)
farcall.shutdown()
"""


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("start", ["cluster = farcall.launch(1)", "farcall.init_rpc('w0', rank=0, world_size=1)"])
def test_a_child_of_an_unguarded_script_starts_nothing_and_says_what_to_do(
    start: str, context: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(UNGUARDED.replace("START", start))
    with socket.create_server(("127.0.0.1", 0)) as held:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | place | {"CONTEXT": context},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert "child ended with 1" in done.stdout, done.stdout + done.stderr
    assert done.stderr.count('below `if __name__ == "__main__":`') == 1
    assert "unreachable" not in done.stdout


WITH_A_CHILD = """
if os.fork() == 0:  # it must not keep the workers alive
    os.close(1)
    os.close(2)
    give_up_at = time.monotonic() + 100
    while any(os.path.exists(f"/proc/{worker}") for worker in workers) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    os._exit(0)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    "end",
    [
        "signal.SIGKILL",
        "signal.SIGTERM",
        "signal.SIGINT",
        "raise ValueError('mine')",
        "os._exit(3)",
        pytest.param(WITH_A_CHILD, id="with a child"),
    ],
)
def test_no_worker_and_no_temporary_file_outlives_its_driver(end, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    temporary = tmp_path / "t"
    temporary.mkdir()
    number = getattr(signal, end.removeprefix("signal."), None)
    driver = subprocess.Popen(
        [sys.executable, "program.py", end if number is None else "time.sleep(600)"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout is not None
        line = ""
        while not line.startswith("PIDS"):
            line = driver.stdout.readline()
            assert line, driver.communicate()
        processes = [int(text) for text in line.split()[1:]]
        if number is not None:
            driver.send_signal(number)
        said = driver.communicate(timeout=250)[1]
    assert driver.returncode != 0
    if end.startswith("raise"):
        assert said.rstrip().endswith("ValueError: mine")
    if number is signal.SIGINT or end.startswith("raise"):
        assert said.startswith("Traceback"), said  # no word of the workers that it ended itself
    wait_gone(processes)
    assert set(os.listdir(temporary)) <= {f"farcall-{os.getuid()}"}  # the user's runtime directory


@pytest.mark.parametrize(
    "end",
    [
        "cluster = farcall.launch(2); assert cluster[0].call(abs, -1) == 1",
        "farcall.launch(2, on_start=lambda worker: 1 / 0)",
    ],
    ids=["without with", "in on_start"],
)
def test_a_driver_says_nothing_of_workers_that_it_ends_itself(end, tmp_path):
    program = f"import farcall\nif __name__ == '__main__':\n    {end}\n"
    (tmp_path / "program.py").write_text(program)
    ran = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert ran.stderr.startswith("Traceback") if "1 / 0" in end else not ran.stderr, ran.stderr
    assert ran.stdout == ""


A_DEATH = """
import os, signal, time
import farcall

if __name__ == "__main__":
    with farcall.launch(2) as cluster:
        under_way = cluster[1].start(time.sleep, 600)
        os.kill(cluster[1].call(os.getpid), signal.SIGKILL)
        try:
            under_way.result()
        except farcall.errors.PeerDead:
            pass
        try:
            cluster.wait(250)
        except farcall.errors.LaunchFailed as error:
            print(error)
"""


def test_a_driver_says_how_a_worker_died(tmp_path):
    (tmp_path / "program.py").write_text(A_DEATH)
    ran = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert ran.stderr == 'driver: worker1 was ended by SIGKILL; it is not restarted (restart="never")\n'
    assert "worker1 was ended by SIGKILL" in ran.stdout


IN_ON_START = """
import os, time
import farcall

def wait(worker):
    print("PID", worker.call(os.getpid), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    farcall.launch(1, on_start=wait)
"""


@pytest.mark.timeout(600)
def test_an_interrupted_start_leaves_no_worker(tmp_path):
    (tmp_path / "program.py").write_text(IN_ON_START)
    with subprocess.Popen(
        [sys.executable, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        assert line.startswith("PID"), driver.communicate()
        driver.send_signal(signal.SIGINT)
        said = driver.communicate(timeout=250)[1]
    assert said.rstrip().endswith("KeyboardInterrupt")
    wait_gone([int(line.split()[1])])


ALLOWED = """
import farcall
import served
from farcall.observe.observer import Observer

farcall.allow(functions=[served.add])
try:
    farcall.launch(1, ship=True)
except farcall.errors.LaunchFailed as error:
    print(error)
with farcall.launch(2) as cluster:
    print(cluster[0].call(served.add, 1, 2))
    try:
        cluster[0].call(served.subtract, 1, 2)
    except farcall.errors.NotAllowed as error:
        print(error)
    while "MiB" not in cluster._repr_html_():  # a busy worker's answer may be too late for one table
        pass
    with Observer.find() as observer:
        print([one.worker for one in observer.snapshots(250).answers])
    (added,) = cluster.grow()
    cluster.shrink(added)
"""
OF_MAIN = """
import farcall

def mine():
    pass

farcall.allow(functions=[mine])
farcall.launch(1)
"""


@pytest.mark.timeout(600)
def test_workers_allow_what_their_program_allows(tmp_path):
    (tmp_path / "served.py").write_text("def add(a, b):\n    return a + b\ndef subtract(a, b):\n    return a - b\n")
    (tmp_path / "program.py").write_text(ALLOWED)
    (tmp_path / "mine.py").write_text(OF_MAIN)

    def run(name):
        command = [sys.executable, name]
        environment = {**os.environ, "FARCALL_RUNTIME_DIRECTORY": str(tmp_path / "run")}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)

    done = run("program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    shipping, added, refused, observed = done.stdout.splitlines()
    assert observed == "['worker0', 'worker1', 'driver']"
    assert "ship=True sends code" in shipping
    assert added.split() == ["3"]
    assert "the function 'served.subtract' is not allowed here" in refused
    done = run("mine.py")
    assert "farcall.allow names __main__:mine, which workers cannot import" in done.stderr


@pytest.mark.timeout(600)
def test_nothing_is_imported_from_where_a_program_happens_to_run(tmp_path):
    """Somebody may have put a trap there, in /tmp say."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("farcall", "torch", "msgspec"):
        (elsewhere / f"{name}.py").write_text("raise SystemExit('trapped')")
    (tmp_path / "program.py").write_text(
        "import farcall\nwith farcall.launch(1) as cluster: print(cluster[0].call(len, 'four'))"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], cwd=elsewhere, capture_output=True, text=True, timeout=250
    )
    assert done.stdout == "4\n", done.stderr


SHIPPED = """
import os
import farcall
import mine

with farcall.launch(2, ship=True) as cluster:
    for worker in cluster:
        assert worker.call(mine.where) == worker.call(os.getcwd) + "/mine.py" != mine.where(), worker.call(mine.where)
        assert sorted(worker.call(os.listdir)) == [".gitignore", "data", "mine.py", "program.py"]
    assert cluster[0].call(os.getcwd) == cluster[1].call(os.getcwd)
    print(cluster[0].call(os.getcwd))
"""


@pytest.mark.timeout(600)
def test_the_working_directory_is_shipped_once(tmp_path):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "data").mkdir(parents=True)
    elsewhere.mkdir()
    (project / "data" / "table.txt").write_text("1 2 3")
    (project / "program.py").write_text(SHIPPED)
    (project / "mine.py").write_text("def where():\n    return __file__\n")
    (project / ".gitignore").write_text("*.large\n__pycache__\n")
    (project / "weights.large").write_text("not sent")

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=project,
            env={**os.environ, "XDG_RUNTIME_DIR": str(elsewhere), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split()[0]

    first = Path(run())
    assert first.parent == elsewhere / "farcall" / "parcels"
    assert first.parent.stat().st_mode & 0o077 == 0
    made = (first / "mine.py").stat()
    assert Path(run()) == first
    assert (first / "mine.py").stat() == made  # it was there: not sent again
