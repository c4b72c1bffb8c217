"""Programs written for torch.distributed.rpc, run over farcall, or over both; what they say."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.ports import held_port

TIMEOUT_S = 250.0
SOURCES = Path(__file__).parents[2] / "src"
_START = """
import multiprocessing, os, sys
import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import rpc_sync, RRef
assert rpc.__name__ == "farcall.compat.rpc", rpc

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: several processes write
    sys.stdout.flush()

def pid():
    return os.getpid()

def double(x):
    return 2 * x
"""

_TAUGHT = """
import os, sys, threading
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync

torch.set_num_threads(1)

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: several processes write
    sys.stdout.flush()

def on_value(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)

def at_owner(method, rref, *args, **kwargs):
    return rpc_sync(rref.owner(), on_value, args=[method, rref, *args], kwargs=kwargs)

def references(module):
    return [RRef(parameter) for parameter in module.parameters()]

def start(work, size):
    say("over", rpc.__name__)
    context = mp.get_context("fork")
    children = [context.Process(target=work, args=(rank, size)) for rank in range(size)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    sys.exit(any(child.exitcode for child in children))
"""
"""What programs in the shapes that are taught begin with."""


def environment(**more: str) -> dict[str, str]:
    cleared = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "FARCALL_INSTALL") and not name.startswith("TORCHELASTIC")
    }
    return {**cleared, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held_port()), **more}


def run(
    tmp_path: Path, program: str, *arguments: str, by: tuple[str, ...] = ("-m", "farcall"), **variables: str
) -> list[str]:
    """Run a program; the lines it said, sorted, since several processes say something."""
    path = tmp_path / "program.py"
    path.write_text(_START + textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, *by, str(path), *arguments],
        env=environment(**variables),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


def said_by_both(
    tmp_path: Path, program: str, *arguments: str, truth: list[str] | None = None, **modules: str
) -> list[str]:
    """Run a program over torch's agent and over farcall, at the same time; its lines, which must be the same.

    ``truth``: the lines that farcall's must be equal to instead, where torch's agent does not always compute the same.
    """
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    path = tmp_path / "program.py"
    path.write_text(_TAUGHT + textwrap.dedent(program))
    said = {}
    with contextlib.ExitStack() as both:
        running = {
            over: both.enter_context(started(tmp_path, *by, str(path), *arguments))
            for over, by in (("torch.distributed.rpc", ()), ("farcall.compat.rpc", ("-m", "farcall")))
        }
        for over, process in running.items():
            try:
                output, errors = process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGABRT)  # all tell where they are
                output, errors = process.communicate()
            # torch's agent may lose the store of rank 0, which is quicker, in the last step of its shutdown.
            lost_its_store = (
                over == "torch.distributed.rpc" and "TensorPipeAgent::join" in errors and "TCPStore" in errors
            )
            assert process.returncode == 0 or lost_its_store, f"over {over}:\n{output}{errors}"
            said[over] = sorted(output.splitlines())
            said[over].remove(f"over {over}")
    theirs, ours = said.values()
    expected = theirs if truth is None else truth
    assert [numbers_and_words(line) for line in ours] == [
        [
            pytest.approx(word, rel=1e-4, abs=1e-5) if isinstance(word, float) else word
            for word in numbers_and_words(line)
        ]
        for line in expected
    ], f"over farcall:\n{ours}\nover torch's agent:\n{theirs}\nexpected:\n{expected}"
    return ours


@contextlib.contextmanager
def started(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *arguments],
        env=environment(MASTER_ADDR="localhost", OTHER_PORT=str(held_port()), PYTHONFAULTHANDLER="1"),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children, where it failed


def numbers_and_words(line: str) -> list[float | str]:
    found: list[float | str] = []
    for word in line.split():
        try:
            found.append(float(word))
        except ValueError:
            found.append(word)
    return found
