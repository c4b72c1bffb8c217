"""A function of a script or a notebook starts children at a launched worker, with classes and functions beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.launching import ROOT
from tests.kit.wheel import Installed
from tests.processes.test_notebook import environment_of

pytest.importorskip("cloudpickle", reason="the notebook extra is not installed")

PROGRAM = """
import collections, concurrent.futures, multiprocessing
import farcall, torch, torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

Batch = collections.namedtuple("Batch", "numbers opened")
opened = None

class Squares(Dataset):
    read = 0
    def __init__(self, length):
        self.length = length
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        Squares.read += 1
        return index * index, opened

class Item:
    def __init__(self, value):
        self.value = value

def collate(items):
    return Batch(torch.tensor([number for number, _ in items]), {name for _, name in items})

def open_file(name):
    global opened
    opened = f"file {name}"

def load(method):
    batches = list(DataLoader(
        Squares(8), 2, num_workers=2, collate_fn=collate, worker_init_fn=open_file, multiprocessing_context=method
    ))
    assert all(type(batch) is Batch for batch in batches)
    return [batch.numbers.tolist() for batch in batches], [batch.opened for batch in batches], Squares.read

def wrap(value):
    return Item((value, opened))

def compute(method):
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(1, context, open_file, ("a",)) as executor:
        items = list(executor.map(wrap, range(2)))
    with context.Pool(1, open_file, ("b",)) as pool:
        items += pool.map(wrap, range(2))
        items.append(pool.apply(lambda: Item("of a lambda")))
    assert all(type(item) is Item for item in items)
    return [item.value for item in items]

def add(rank, queue, tensor):
    tensor += 1
    queue.put(Item(rank))

def share(method):
    context = torch.multiprocessing.get_context(method)
    queue, tensor = context.SimpleQueue(), torch.zeros(2).share_memory_()
    torch.multiprocessing.start_processes(add, (queue, tensor), nprocs=1, start_method=method)
    process = context.Process(target=add, args=(1, queue, tensor))
    process.start()
    process.join()
    items = [queue.get(), queue.get()]
    assert all(type(item) is Item for item in items)
    return [item.value for item in items], tensor.tolist()

def check(worker, method):
    numbers, names, read = worker.call(load, method)
    assert numbers == [[0, 1], [4, 9], [16, 25], [36, 49]] and read == 0, (numbers, read)
    assert names == [{"file 0"}, {"file 1"}, {"file 0"}, {"file 1"}], names
    values = worker.call(compute, method)
    assert values == [(0, "file a"), (1, "file a"), (0, "file b"), (1, "file b"), "of a lambda"], values
    shared = worker.call(share, method)
    assert shared == ([0, 1], [2.0, 2.0]), shared
"""
SCRIPT = """
if __name__ == "__main__":
    import sys
    with farcall.launch(1, quiet=True) as cluster:
        check(cluster[0], sys.argv[1])
"""
CELLS = """
import sys
from jupyter_client.manager import start_new_kernel

LAUNCH = '''
cluster = farcall.launch(1)
for method in ("fork", "spawn", "forkserver"):
    check(cluster[0], method)
cluster.shutdown()
'''
manager, client = start_new_kernel(startup_timeout=120)
try:
    for cell in (sys.argv[1], LAUNCH):
        said = client.execute_interactive(cell, timeout=400, output_hook=print)["content"]
        assert said["status"] == "ok", said
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_a_script(method: str, installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM + SCRIPT)
    done = installed.run(installed.python, tmp_path / "script.py", method)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_children_of_a_notebook(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    done = subprocess.run(
        [sys.executable, "-c", CELLS, PROGRAM],
        cwd=ROOT,
        env=environment_of(tmp_path),
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
