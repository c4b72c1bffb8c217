"""An engine that runs a command per worker: it joins, is called, ends, and says how."""

import os
import secrets
import signal
import threading
from collections import defaultdict

import pytest
from tests.kit.launching import START_S
from tests.kit.waiting import wait_until

import farcall
from farcall.launcher.commands import CommandEngine
from farcall.launcher.engine import ProcessState, WorkerSpec
from farcall.launcher.local import LocalEngine
from farcall.launcher.worker import DRIVER, end_worker
from farcall.runtime.node import runtime_of


class Watching:
    def __init__(self) -> None:
        self.states: dict[WorkerSpec, list[ProcessState]] = defaultdict(list)
        self.output: dict[WorkerSpec, bytes] = defaultdict(bytes)

    def on_state(self, spec, state):
        self.states[spec].append(state)

    def on_output(self, spec, data):
        self.output[spec] += data

    def is_over(self, spec):
        return bool(self.states[spec]) and self.states[spec][-1].phase == "ended"


@pytest.fixture
def engine():
    made = CommandEngine()
    yield made
    made.close()


@pytest.fixture
def driver(tmp_path):
    secret = secrets.token_hex(32)
    options = farcall.RpcBackendOptions(init_method=f"file://{tmp_path}/store", secret=secret, advertise="127.0.0.1")
    with farcall.Node(DRIVER, rank=1_000_000, options=options) as node:
        node.secret = secret
        yield node


def spec_for(driver, rank, **changes):
    unix, tcp = runtime_of(driver).addresses
    meet = f"farcall://{tcp.removeprefix('tcp://')}?unix={unix.removeprefix('unix:')}"
    return WorkerSpec(name=f"worker{rank}", rank=rank, secret=driver.secret, meet=meet, **changes)


def test_workers_join_answer_and_end(engine, driver):
    watching, specs = Watching(), [spec_for(driver, rank) for rank in range(2)]
    engine.start(specs, watching)
    wait_until(lambda: len(driver.members()) == 3, "all have joined", START_S)
    assert driver["worker1"].call(os.getppid) == os.getpid()
    assert driver["worker0"].call(os.getenv, "RANK") == "0"
    driver["worker0"].start(end_worker)
    wait_until(lambda: watching.is_over(specs[0]))
    assert watching.states[specs[0]][-1].exit_code == 0, watching.output[specs[0]]
    os.kill(driver["worker1"].call(os.getpid), signal.SIGKILL)
    wait_until(lambda: watching.is_over(specs[1]))
    assert str(watching.states[specs[1]][-1]) == "was ended by SIGKILL"


def test_a_worker_that_cannot_start_tells_why(engine, driver):
    watching, spec = Watching(), spec_for(driver, 0, directory="/nowhere")
    engine.start([spec], watching)
    wait_until(lambda: watching.is_over(spec))
    assert watching.states[spec][-1].exit_code == 82
    assert b"finds no directory /nowhere on its host" in watching.output[spec]


def test_close_leaves_no_process(engine, driver):
    watching, spec = Watching(), spec_for(driver, 0)
    engine.start([spec], watching)
    wait_until(lambda: len(driver.members()) == 2, "it has joined", START_S)
    process = driver["worker0"].call(os.getpid)
    engine.close()
    assert watching.is_over(spec)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_the_secret_is_in_no_argument_list(engine, driver):
    spec = spec_for(driver, 0)
    assert driver.secret not in repr(spec)
    assert not any(driver.secret in part for part in engine.command(spec))


def test_an_engine_that_is_closed_while_it_starts_leaves_no_process(driver):
    local, watching = LocalEngine(), Watching()
    specs = [spec_for(driver, rank) for rank in range(2)]
    starting = threading.Thread(target=local.start, args=(specs, watching))
    starting.start()  # it waits for the server, which loads torch
    wait_until(lambda: local._thread is not None)
    local.close()
    starting.join(START_S)
    assert not starting.is_alive()
    wait_until(lambda: len(driver.members()) == 1, "who was quicker than `close`, and joined, has gone")


def test_a_fork_server_that_was_killed_is_replaced(driver):
    local, watching = LocalEngine(), Watching()
    try:
        local.start([spec_for(driver, 0)], watching)
        wait_until(lambda: len(driver.members()) == 2, "it has joined", START_S)
        os.kill(driver["worker0"].call(os.getppid), signal.SIGKILL)
        local.start([spec_for(driver, 1)], watching)
        wait_until(lambda: len(driver.members()) == 3, "all have joined", START_S)
        assert driver["worker0"].call(os.getenv, "RANK") == "0"  # workers outlive it
    finally:
        local.close()
    assert len(watching.states) == 2
    assert all(watching.is_over(spec) for spec in watching.states)
