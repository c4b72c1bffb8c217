"""What every test gets: repeatable property tests, and a check that nothing of ours outlives a test with
processes.

Tests in ``tests/processes`` and ``tests/faults`` open sockets, segments and threads in this very process,
and start others. Whatever a test leaves behind fails that test, by name, rather than some later one by
accident.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.kit.distribution import FilesTogether
from tests.kit.ports import let_ports_go
from tests.kit.second_chance import pytest_addoption as pytest_addoption
from tests.kit.second_chance import pytest_sessionfinish as pytest_sessionfinish
from tests.kit.wheel import QUICK_START, ROOT
from tests.kit.wheel import installed as installed

from farcall.core import make_core

# The same examples on every run, or new ones each time: HYPOTHESIS_PROFILE=explore make test
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Processes of tests find farcall here, also where they have an interpreter without it, and load torch in less time.
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([str(ROOT / "src"), str(QUICK_START), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
).rstrip(os.pathsep)

# A shell that starts this in the background has SIGINT ignored, and every process of every test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is loaded by now out of every later collection: a tenth of a second each, and many tests collect."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)  # for runs without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getvalue("dist") == "loadgroup" else None


CHECKED_FOLDERS = {"processes", "faults"}
FOLDERS_WITH_CLUSTERS = CHECKED_FOLDERS | {"fuzz", "gpu"}
# Threads that the test closed may still be on their last lines, and children may not be reaped yet.
SETTLING_S = 6.0
OUR_DESCRIPTORS = ("socket:", "pipe:", "anon_inode:", "/memfd:")


def threads() -> set[str]:
    return {f"thread {thread.name}" for thread in threading.enumerate() if thread is not threading.main_thread()}


def children() -> set[str]:
    """Processes started by this one, without the helpers that multiprocessing keeps for itself."""
    kept = {
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    }
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, after_name = stat.read_text().split("(", 1)[1].rsplit(") ", 1)
        except OSError:
            continue  # it ended while we looked
        process_id = int(stat.parent.name)
        if int(after_name.split()[1]) == os.getpid() and process_id not in kept:
            found.add(f"process {process_id} ({name})")
    return found


def descriptors() -> set[str]:
    """Open sockets, pipes, epolls and memfds, without those that multiprocessing keeps for itself."""
    kept = {
        getattr(resource_tracker._resource_tracker, "_fd", None),
        getattr(forkserver._forkserver, "_forkserver_alive_fd", None),
    }
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the descriptor of this very listing
        if target.startswith(OUR_DESCRIPTORS) and int(entry) not in kept:
            found.add(f"descriptor {entry} -> {target}")
    return found


def segments() -> set[str]:
    """Mapped shared memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {f"mapping {line.split()[0]} {line.split(None, 5)[5]}" for line in lines if "/memfd:" in line}


KINDS: tuple[Callable[[], set[str]], ...] = (threads, children, descriptors, segments)


def remains(before: set[str]) -> set[str]:
    return set().union(*(kind() for kind in KINDS)) - before


@functools.cache
def let_libuv_begin() -> None:
    """The first server of a store in a process leaves a pipe of libuv's behind, which is torch's to keep."""
    from torch.distributed import TCPStore

    TCPStore("127.0.0.1", 0, 1, True)


@functools.cache
def let_monitor_begin() -> None:
    """One native thread serves all cores of a process, from the first one on; each thread that waits keeps a bell."""
    core = make_core(0, 1 << 20, 0.0)
    core.work(None)
    core.next()
    core.stop()


@functools.cache
def start_fork_server() -> None:
    """Before `farcall.testing.cluster` does, which loads less; and before a test changes what processes inherit."""
    forkserver.set_forkserver_preload(["tests.kit.preloaded"])
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def nothing_outlives_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    if FOLDERS_WITH_CLUSTERS & set(request.node.path.parts):
        start_fork_server()
    if not CHECKED_FOLDERS & set(request.node.path.parts):
        yield
        let_ports_go()
        return
    let_libuv_begin()
    let_monitor_begin()
    before = remains(set())
    yield
    let_ports_go()
    give_up_at = time.monotonic() + SETTLING_S
    while left := remains(before):
        if time.monotonic() > give_up_at:
            pytest.fail("outlived the test: " + ", ".join(sorted(left)))
        gc.collect()
        time.sleep(0.01)
