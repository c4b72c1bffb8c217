"""Several hosts, for real as far as one kernel goes: two network namespaces, joined by a cable, as two machines.

They see nothing of each other but what goes over that cable: no unix sockets, no shared memory, no common loopback.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "parameter_server.py")
PORT = 29500
_numbers = itertools.count()


class Host(NamedTuple):
    """A network namespace."""

    name: str
    address: str

    def start(self, *command: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, *command],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


def remove(host: Host) -> None:
    """And whatever still runs there: what a launcher has started may outlive it."""
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
    for process_id in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process_id), signal.SIGKILL)
    ip("netns", "delete", host.name)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, each of which reaches the other."""
    mark = f"fc{os.getpid()}x{next(_numbers)}"
    first, second = Host(f"{mark}a", "10.201.7.1"), Host(f"{mark}b", "10.201.7.2")
    with ExitStack() as cleanup:
        for host in (first, second):
            try:
                ip("netns", "add", host.name)
            except FileNotFoundError:
                pytest.skip("there is no command `ip` here")
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
            cleanup.callback(remove, host)
        try:
            ip("-n", first.name, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second.name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no cable can be laid between network namespaces here: {error.stderr.strip()}")
        for host in (first, second):
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "cable")
            ip("-n", host.name, "link", "set", "lo", "up")
            ip("-n", host.name, "link", "set", "cable", "up")
        yield first, second


def finish(processes: Sequence[subprocess.Popen[str]]) -> str:
    """Wait for all of them; what they said."""
    try:
        told = [process.communicate(timeout=250)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for process, text in zip(processes, told, strict=True):
        assert process.returncode == 0, text
    return "".join(told)


def check(told: str) -> None:
    for trainer in ("trainer0", "trainer1"):
        assert f"{trainer}: the same, bit for bit, as in one process" in told


def test_with_torchrun(hosts: tuple[Host, Host]) -> None:
    first, _ = hosts

    def torchrun(host: Host, workers: int) -> subprocess.Popen[str]:
        return host.start(
            *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(workers)),
            *("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{first.address}:{PORT}"),
            # The hosts' names are the same, and mean loopback: so torchrun has to be told which of them serves the
            # store, and by what address each is known.
            *("--rdzv-conf", f"is_host={int(host is first)}", "--local-addr", host.address, EXAMPLE),
        )

    check(finish([torchrun(host, workers) for host, workers in zip(hosts, (2, 1), strict=True)]))


def test_without_it(hosts: tuple[Host, Host]) -> None:
    first, second = hosts

    def worker(host: Host, rank: int) -> subprocess.Popen[str]:
        return host.start(EXAMPLE, RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR=first.address, MASTER_PORT=str(PORT))

    check(finish([worker(first, 0), worker(second, 1), worker(second, 2)]))


MEET = """
import os
import farcall
from farcall.api import current_runtime
farcall.init_rpc("w" + os.environ["RANK"])
print(*current_runtime().addresses)
farcall.shutdown()
"""


def test_a_worker_whose_network_comes_up_late_tells_an_address_that_the_other_reaches(hosts: tuple[Host, Host]) -> None:
    """It took 127.0.0.1 for its own, for ever."""
    first, second = hosts
    ip("-n", second.name, "link", "set", "cable", "down")

    def worker(host: Host, rank: int) -> subprocess.Popen[str]:
        environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": first.address, "MASTER_PORT": str(PORT)}
        return host.start("-c", MEET, **environ, FARCALL_SECRET="for all who may meet here, and for nobody else")

    early, late = worker(first, 0), worker(second, 1)
    told = []
    assert late.stdout is not None
    for line in late.stdout:
        told.append(line)
        if f"no route leads to {first.address} yet" in line:
            ip("-n", second.name, "link", "set", "cable", "up")
    finish([early, late])
    assert f"tcp://{second.address}:" in "".join(told)


def test_the_doctor_between_them(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    listening = first.start("-m", "farcall", "doctor", "--listen", "7777")
    try:
        assert listening.stdout is not None
        for line in listening.stdout:
            told = re.search(r"on other hosts run: farcall doctor (\S+):7777 ", line)
            if told is not None:
                break
        else:
            pytest.fail("it does not say where it listens")
        assert told[1] == first.address, "though no route leads further than to the other host"
        visiting = second.start("-m", "farcall", "doctor", "--json", f"{first.address}:7777")
        document = json.loads(finish([visiting]))
    finally:
        listening.kill()
        listening.communicate()
    findings = {finding["subject"]: finding for finding in document["findings"]}
    assert document["ok"], findings
    assert findings[f"{first.address}: data"]["state"] == "ok"
    assert f"({second.address}:" in findings[f"{first.address}: way back"]["found"].replace("tcp://", "")
    assert "workers will use TCP" in findings[f"{first.address}: ways"]["found"]
