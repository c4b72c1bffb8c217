"""What somebody who listens between two hosts gets to know of a cluster: that there is one.

All packets of one host are recorded by a raw socket in its network namespace, which needs root.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.faults.namespaces import address, enter, hosts
from tests.kit.times import LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
from farcall.observe.observer import Observer
from farcall.testing.cluster import finish, start_processes

SECRET = "long enough to be taken for random bytes"
STORE_PORT = 29500
PORT = 29501
WORDS = ("argument", "result", "exception", "stream", "weights")
"""What calls, streams and weights carry, each with MARK behind it."""
MARK = "_that_nobody_in_between_may_read"
ALL_PROTOCOLS = 3


class Capture:
    """All packets that pass an interface. Mutable: what was recorded."""

    def __init__(self, space: str) -> None:
        self._socket: socket.socket | None = None
        maker = threading.Thread(target=self._open, args=(space,))
        maker.start()
        maker.join()
        if self._socket is None:
            pytest.skip("no raw sockets here")
        self._raw: socket.socket = self._socket
        self._waking, self._woken = socket.socketpair()
        self._packets: list[bytes] = []
        self._thread = threading.Thread(target=self._record)
        self._thread.start()

    def _open(self, space: str) -> None:
        """On a thread of its own, which stays in that namespace."""
        enter(space)
        try:
            found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        except OSError:
            return
        found.bind(("eth0", 0))
        found.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), 256 << 20)
        self._socket = found

    def _record(self) -> None:
        while self._woken not in select.select([self._raw, self._woken], [], [])[0]:
            self._packets.append(self._raw.recv(1 << 17))

    def end(self) -> bytes:
        """All that was recorded."""
        self._waking.close()
        self._thread.join(LONG_S)
        self._woken.close()
        self._raw.close()
        return b"".join(map(_content, self._packets))  # without headers: words may lie in two packets


def _content(packet: bytes) -> bytes:
    """What TCP carries in ``packet``: behind 34 bytes of Ethernet and IPv4, a header that tells its length."""
    return packet[34 + (packet[46] >> 4) * 4 :] if packet[23:24] == bytes([socket.IPPROTO_TCP]) else packet


@contextmanager
def recorded(space: str) -> Iterator[Callable[[], bytes]]:
    capture = Capture(space)
    ended: list[bytes] = []
    try:
        yield lambda: ended[0]
    finally:
        ended.append(capture.end())


def said(word: str) -> str:
    return word + MARK


def answer(argument: str) -> str:
    if argument == said("exception"):
        raise ValueError(argument)
    assert argument == said("argument")
    return said("result")


def count(size: int) -> Iterator[str]:
    for number in range(size):
        yield f"{said('stream')} {number}"


def observed_only(directory: str) -> None:
    """Run until all have looked. Its caller is in the same process: only observers hear its name."""
    wait_until(lambda: Path(directory, "done 2").exists())


def take_part(rank: int, spaces: list[str], directory: str, encryption: str | None) -> None:
    """w0 and w1 are on two hosts. The third one looks on from its own, by way of w0, which asks w1 for it."""
    enter(spaces[rank])
    torch.set_num_threads(1)
    options = farcall.RpcBackendOptions(
        init_method=f"tcp://{address(0)}:{STORE_PORT}",
        advertise=address(rank),
        port=PORT,
        secret=SECRET,
        membership=PATIENT,
        encryption=encryption,
    )
    if rank == 2:
        look_on(options, directory)
        return
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        assert farcall.rpc_sync("w1", answer, (said("argument"),)) == said("result")
        with pytest.raises(ValueError, match=MARK):
            farcall.rpc_sync("w1", answer, (said("exception"),))
        assert len(list(farcall.worker("w1").stream(count, 5))) == 5
        letters = torch.tensor(list(said("weights").encode()), dtype=torch.uint8)
        policy = farcall.publish("policy", {"letters": letters})
        policy.push()
    else:
        weights = farcall.subscribe("policy")
        weights.wait(timeout=2 * LONG_S)
        assert bytes(weights.get()["letters"].tolist()).decode() == said("weights")
    held = farcall.rpc_async(f"w{rank}", observed_only, (directory,), timeout=4 * LONG_S)
    Path(directory, f"done {rank}").touch()
    held.wait()
    farcall.barrier()
    farcall.shutdown()


def look_on(options: farcall.RpcBackendOptions, directory: str) -> None:
    """As `farcall top` and `farcall stacks` do with --connect."""
    wait_until(lambda: all(Path(directory, f"done {rank}").exists() for rank in (0, 1)))

    def sees() -> bool:
        with Observer.connect_with_secret(f"{address(0)}:{PORT}", options) as observer:
            told = repr(observer.snapshots(LONG_S).answers)
            return told.count(observed_only.__name__) > 1 and len(observer.metrics(LONG_S).answers) == 2

    wait_until(sees)
    Path(directory, "done 2").touch()


def words_in(traffic: bytes) -> set[str]:
    return {word for word in (*map(said, WORDS), observed_only.__name__) if word.encode() in traffic}


@pytest.mark.parametrize("encryption", [None, "off"], ids=["default", "off"])
def test_whoever_listens_between_two_hosts_reads_no_word(tmp_path: Path, encryption: str | None) -> None:
    """With encryption off every one of them is found: that is how it is known that the recording has them all."""
    with hosts(3) as network, recorded(network.spaces[0]) as traffic:
        finish(start_processes(3, take_part, network.spaces, str(tmp_path), encryption), 8 * LONG_S)
    found = words_in(traffic())
    assert found == (set() if encryption is None else {*map(said, WORDS), observed_only.__name__})


PROGRAM = f"""
import os
import farcall

rank = int(os.environ["RANK"])
farcall.init_rpc(f"w{{rank}}", rank=rank, world_size=2)
if rank == 0:
    assert farcall.rpc_sync("w1", str.upper, ("argument{MARK}",)) == "ARGUMENT{MARK.upper()}"
farcall.shutdown()
"""


@pytest.mark.parametrize("encryption", [None, "off"], ids=["default", "off"])
def test_so_it_is_with_farcall_run(tmp_path: Path, encryption: str | None) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with hosts(2) as network, recorded(network.spaces[0]) as traffic:
        started = []
        for rank in (0, 1):
            environ = {
                **os.environ,
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "MASTER_ADDR": address(0),
                "MASTER_PORT": str(STORE_PORT),
                "FARCALL_SECRET": SECRET,
                **({"FARCALL_ENCRYPTION": encryption} if encryption else {}),
            }
            command = ["ip", "netns", "exec", network.spaces[rank], sys.executable, "-m", "farcall", "run", program]
            started.append(subprocess.Popen(command, env=environ))
        try:
            assert [process.wait(4 * LONG_S) for process in started] == [0, 0]
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert (said("argument").encode() in traffic()) is (encryption == "off")
