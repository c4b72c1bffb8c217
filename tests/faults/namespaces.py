"""Network namespaces for tests: hosts that have a network of their own, whose links can be cut one by one.

Each host is a namespace with the address ``10.199.0.<number + 1>``; a hub, in a namespace of its own, joins them. A
link is cut by giving one host a wrong hardware address of another: what it sends there is lost without a word, as on a
real network, and nobody else is disturbed. Directions are cut one by one: one alone makes a half-open link.
A direction is refused by giving the sender the hardware address of another host, which has the receiver's address, too,
and no process: its kernel resets connections, and refuses new ones, as a NAT or a proxy does that has just restarted.

Needs root and ``ip``; where that is missing, `hosts` skips the test and says why.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["Hosts", "address", "enter", "hosts", "ip"]

CLONE_NEWNET = 0x40000000
NOBODY = "02:00:00:00:00:99"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """The namespaces ``0 .. size-1``."""

    def __init__(self, size: int) -> None:
        self._spaces = [f"farcall-{os.getpid()}-{number}" for number in range(size)]
        self._hub = f"farcall-{os.getpid()}-hub"
        self._made: list[str] = []
        self._refusers: dict[int, str] = {}
        self._cut: set[tuple[int, int]] = set()

    @property
    def spaces(self) -> list[str]:
        """Their names, for `enter`."""
        return self._spaces

    def make(self) -> None:
        for space in (self._hub, *self._spaces):
            ip("netns", "add", space)
            self._made.append(space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", self._hub, "link", "add", "hub0", "type", "bridge")
        ip("-n", self._hub, "link", "set", "hub0", "up")
        for number, space in enumerate(self._spaces):
            ip("-n", self._hub, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", space, "addr", "add", f"{address(number)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", self._hub, "link", "set", f"port{number}", "master", "hub0", "up")

    def cut_direction(self, sender: int, receiver: int) -> None:
        """Lose what one sends to the other."""
        space, to = self._spaces[sender], address(receiver)
        ip("-n", space, "neigh", "replace", to, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
        self._cut.add((sender, receiver))

    def cut(self, one: int, other: int) -> None:
        """Lose all between the two."""
        self.cut_direction(one, other)
        self.cut_direction(other, one)

    def refuse_direction(self, sender: int, receiver: int) -> None:
        """Have what one sends to the other answered with a reset."""
        if receiver not in self._refusers:
            self._make_refuser(receiver)
        refuser = self._refusers[receiver]
        for space, to, lladdr in (
            (self._spaces[sender], address(receiver), _hardware(refuser)),
            (refuser, address(sender), _hardware(self._spaces[sender])),
        ):
            ip("-n", space, "neigh", "replace", to, "lladdr", lladdr, "dev", "eth0", "nud", "permanent")
        self._cut.add((sender, receiver))

    def refuse(self, one: int, other: int) -> None:
        """Have all between the two answered with a reset."""
        self.refuse_direction(one, other)
        self.refuse_direction(other, one)

    def _make_refuser(self, number: int) -> None:
        space = self._refusers[number] = f"farcall-{os.getpid()}-refuser-{number}"
        ip("netns", "add", space)
        self._made.append(space)
        ip("-n", self._hub, "link", "add", f"deaf{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
        # It must neither answer nor ask who has its address: only those who were told so find it.
        ip("netns", "exec", space, "sh", "-c", "echo 8 > /proc/sys/net/ipv4/conf/eth0/arp_ignore")
        ip("-n", space, "addr", "add", f"{address(number)}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", self._hub, "link", "set", f"deaf{number}", "master", "hub0", "up")

    def heal(self) -> None:
        """Lose nothing any more."""
        while self._cut:
            sender, receiver = self._cut.pop()
            ip("-n", self._spaces[sender], "neigh", "del", address(receiver), "dev", "eth0")

    def remove(self) -> None:
        for space in self._made:
            ip("netns", "del", space)


def _hardware(space: str) -> str:
    """The hardware address of a namespace."""
    shown = subprocess.run(
        ["ip", "-n", space, "-o", "link", "show", "eth0"], capture_output=True, text=True, check=True
    )
    return shown.stdout.split("link/ether ")[1].split()[0]


def address(number: int) -> str:
    return f"10.199.0.{number + 1}"


def enter(space: str) -> None:
    """Move this thread, and those it starts from now on, into a namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{space}", os.O_RDONLY)
    try:
        if library.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {space}")
    finally:
        os.close(descriptor)


@contextmanager
def hosts(size: int) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here: network namespaces cannot be made")
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    found = Hosts(size)
    try:
        try:
            found.make()
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield found
    finally:
        found.remove()
