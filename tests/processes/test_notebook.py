"""examples/notebook.ipynb, by ``jupyter execute``: from the first cell to the last, as its reader would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.launching import ROOT

pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")
pytest.importorskip("cloudpickle", reason="the notebook extra is not installed")

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def shown(cell: dict) -> str:
    """Everything below a cell, as text."""
    parts = []
    for output in cell.get("outputs", []):
        parts += output.get("text", [])
        for kind in ("text/plain", "text/html"):
            parts += output.get("data", {}).get(kind, [])
    return "".join(parts)


def environment_of(folder: Path) -> dict[str, str]:
    environment = {**os.environ, "JUPYTER_PLATFORM_DIRS": "1", "IPYTHONDIR": str(folder / "ipython")}
    return environment | {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}


RESTARTED = """
from jupyter_client.manager import start_new_kernel
from tests.kit.launching import runs, wait_gone

LAUNCH = '''
import os
import farcall
cluster = farcall.launch(2)
print(*(worker.call(os.getpid) for worker in cluster))
'''
HELLO = 'cluster["worker0"].call(print, "hello from there")'
said = []


def hear(message):
    said.append(message["content"].get("text", "") + "".join(message["content"].get("traceback", ())))


manager, client = start_new_kernel(startup_timeout=120)
try:
    assert client.execute_interactive(LAUNCH, timeout=120, output_hook=hear)["content"]["status"] == "ok", said
    workers = [int(word) for word in "".join(said).split()]
    assert len(workers) == 2, said
    assert all(map(runs, workers))
    client.execute_interactive(HELLO, timeout=120, output_hook=hear)
    while "hello from there" not in "".join(said):  # the worker's line comes by another way than its answer
        hear(client.get_iopub_msg(timeout=120))
    manager.restart_kernel()
    wait_gone(workers)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
"""


@pytest.mark.timeout(600)
def test_a_kernel_shows_what_workers_write_and_leaves_none_when_it_is_restarted(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESTARTED],
        cwd=ROOT,
        env=environment_of(tmp_path),
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr


INTERRUPTED = """
from jupyter_client.manager import start_new_kernel

LAUNCH = '''
import farcall, torch
cluster = farcall.launch(1)
worker = cluster["worker0"]
large = torch.arange(1 << 16)
'''
CALLS = '''
assert worker.call(max, (1, 2)) == 2
print("calling", flush=True)
while True:
    future = worker.start(max, (3, 4))
    assert torch.equal(worker.call(torch.neg, large), -large)
    assert future.wait() == 4
'''
manager, client = start_new_kernel(startup_timeout=120)


def next_of(request, messages, *kinds):
    while True:
        message = messages(timeout=120)
        if message["parent_header"].get("msg_id") == request and message["msg_type"] in kinds:
            return message


try:
    said = client.execute_interactive(LAUNCH, timeout=120, output_hook=print)["content"]
    assert said["status"] == "ok", said
    for number in range(200):
        request = client.execute(CALLS, stop_on_error=False)
        heard = next_of(request, client.get_iopub_msg, "stream", "error")
        assert heard["msg_type"] == "stream", (number, heard["content"])
        manager.interrupt_kernel()
        said = next_of(request, client.get_shell_msg, "execute_reply")["content"]
        assert said.get("ename") == "KeyboardInterrupt", (number, said)
    said = client.execute_interactive("cluster.shutdown()", timeout=120, output_hook=print)["content"]
    assert said["status"] == "ok", said
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
"""


@pytest.mark.timeout(600)
def test_cells_that_are_interrupted_two_hundred_times_leave_links_that_work(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=ROOT,
        env=environment_of(tmp_path),
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_the_notebook_runs(tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "jupyter", "execute", "--output", str(tmp_path / "done.ipynb"), str(NOTEBOOK)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [cell for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    told = [shown(cell) for cell in cells]
    assert "<th>worker1</th>" in told[0]  # a table, which refreshes
    assert told[1] == "tensor([2., 2., 2.])\n[0, 3, 6, 9, 12]\n"
    assert told[2].startswith("1 2\n")
    assert "worker1 (rank 1)" in told[2]
    assert "(3, 6)" in told[4]
    assert "True {'worker0': 'running', 'worker1': 'running'}" in told[5]
    assert "Cluster: ended" in told[6]
